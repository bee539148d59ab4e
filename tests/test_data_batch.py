"""Bags to a batch and back, and everything that a batch refuses."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from uform_kernels import Edges

from xpmir_uform.data.batch import Batch
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.tape import Tape
from xpmir_uform.data.vocabulary import Modality, Side


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Spares hundreds of tiny tensor operations the wait for a second core that may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def texts(*names, first=0):
    return tuple(Item.text(name, first + number) for number, name in enumerate(names))


def batch_of(*bags, deduplicate=False):
    return Batch.of(bags, deduplicate)


def rows_of(edges):
    return [row.tolist() for row in torch.split(edges.ids, edges.offsets.diff().tolist())]


SIX = Bag.alike(texts("a", "b", "c")), Bag(texts("d", "e", "f", first=3), attract=((2, 0), (0, 2)), repel=((0, 1),))


def test_arrays_of_two_bags():
    batch = batch_of(*SIX)
    assert len(batch) == 6
    assert batch.bags.tolist() == [0, 3, 6]
    assert batch.keys.tolist() == list(range(6))
    assert list(batch.contents) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert rows_of(batch.attract) == [[1, 2], [0, 2], [0, 1], [5], [], [3]]
    assert rows_of(batch.repel) == [[], [], [], [4], [], []]
    assert rows_of(batch.ignore) == [[]] * 6
    assert batch.attract.weights is None
    assert batch.modalities.tolist() == batch.families.tolist() == [Modality.TEXT] * 6


def test_weights_follow_their_links_and_are_one_by_default():
    batch = batch_of(Bag(texts("a", "b", "c"), attract=((2, 1, 0.25), (0, 2, 3), (0, 1))))
    assert rows_of(batch.attract) == [[1, 2], [], [1]]
    assert batch.attract.weights.dtype == torch.float64
    assert batch.attract.weights.tolist() == [1, 3, 0.25]


def test_every_field_arrives():
    item = Item(Modality.IMAGE, b"\x89", 2**64 - 1, Side.QUERY, group=3, choices=b"yn", targets=(0.25, 0.75))
    batch = batch_of(Bag((Item.text("", 0), item)))
    assert batch.item(1) == item
    assert batch.item(0).content == b""
    assert batch.keys[1] == 2**64 - 1
    assert (batch.sides[1], batch.groups[1], batch.modalities[1]) == (1, 3, 1)
    assert batch.targets.tolist() == [0.25, 0.75]
    assert batch.describe(1) == "item 1 (key 0xffffffffffffffff, image, 1 bytes)"


def test_no_bags():
    batch = batch_of(deduplicate=True)
    assert len(batch) == 0
    assert batch.bags.tolist() == [0]


@st.composite
def bags(draw):
    """Well-formed bags, their links in canonical order."""
    result = []
    for number in range(draw(st.integers(0, 4))):
        size = draw(st.integers(1, 4))
        choices = draw(st.binary(max_size=3).map(lambda found: bytes(sorted(set(found)))))
        items = tuple(
            Item(
                draw(st.sampled_from(Modality)),
                draw(st.binary(min_size=1, max_size=3)),
                16 * number + place,
                draw(st.sampled_from([Side.NONE, Side.QUERY, Side.DOCUMENT, Side.QUERY_AND_DOCUMENT])),
                draw(st.integers(0, 2)),
                choices,
                tuple(1 / len(choices) for _ in choices),
            )
            for place in range(size)
        )
        sets = ([], [], [])
        for i in range(size):
            for j in range(size):
                kind = draw(st.integers(0, 3)) if i != j else 3
                if kind < 3:
                    sets[kind].append((i, j) if kind == 2 else (i, j, draw(st.just(0.0) | st.floats(1e-18, 8))))
        result.append(Bag(items, *map(tuple, sets)))
    return result


@settings(max_examples=60, deadline=None)
@given(bags())
def test_round_trip(bags):
    batch = Batch.of(bags, deduplicate=False)
    batch = pickle.loads(pickle.dumps(batch))
    found = [batch.bag(number) for number in range(len(batch.bags) - 1)]
    assert [bag.items for bag in found] == [bag.items for bag in bags]
    assert [bag.ignore for bag in found] == [bag.ignore for bag in bags]
    for name in ("attract", "repel"):
        weighted = getattr(batch, name).weights is not None
        assert weighted == any(getattr(bag, name) for bag in bags)
        assert [getattr(bag, name) for bag in found] == [getattr(bag, name) for bag in bags]


def test_order_of_bags_moves_whole_bags():
    one, other = batch_of(*SIX), batch_of(*reversed(SIX))
    assert [one.bag(0), one.bag(1)] == [other.bag(1), other.bag(0)]
    assert rows_of(other.attract) == [[2], [], [0], [4, 5], [3, 5], [3, 4]]


def test_order_of_links_does_not_matter():
    links = ((2, 1, 0.5), (0, 2), (0, 1), (1, 0))
    one, other = (batch_of(Bag(texts("a", "b", "c"), attract=found)) for found in (links, links[::-1]))
    assert rows_of(one.attract) == rows_of(other.attract)
    assert one.attract.weights.tolist() == other.attract.weights.tolist()


def test_duplicates_are_ignored_unless_told_otherwise():
    bags = [Bag.alike(texts("a", "b")), Bag.alike(texts("c", "b", first=2))]
    assert rows_of(Batch.of(bags).ignore) == [[3], [2, 3], [1], [0, 1]]
    assert Batch.of(bags, deduplicate=False).ignore.count == 0


def test_explicit_repel_of_duplicates_stands():
    batch = Batch.of([Bag(texts("a", "a", "b"), repel=((0, 1),))])
    assert rows_of(batch.ignore) == [[], [0], []]
    assert rows_of(batch.repel) == [[1], [], []]


def test_one_item_in_two_bags():
    document = Item.text("shared", 9)
    batch = Batch.of([Bag.alike([*texts("q"), document]), Bag.alike([*texts("r", first=1), document])])
    assert batch.keys.tolist() == [0, 9, 1, 9]


def item(**fields):
    return replace(Item.text("ab", 7), **fields)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        *((item(key=key), "it must be an integer from 0 to 2\\*\\*64 - 1") for key in (-1, 2**64, 1.5, "k", None)),
        (item(modality="text"), "has modality 'text'; it must be a Modality"),
        (item(modality=4), r"\(key 0x0000000000000007, modality 4, 2 bytes\) has no modality of Modality"),
        (item(side="query"), "has side 'query'; it must be a Side"),
        (item(side=4), "has no side of Side"),
        (item(group=-1), "has a negative group"),
        (item(group=0.5), "has group 0.5; it must be an integer"),
        (item(content="ab"), "has content of type str; it must be bytes"),
        (item(choices=[1], targets=(1.0,)), "has choices of type list; it must be bytes"),
        *((item(modality=found, content=b""), "is empty; only a text may be") for found in list(Modality)[1:]),
        (item(choices=b"ab"), "has 2 choices and 0 targets"),
        (item(targets=(1.0,)), "has 0 choices and 1 targets"),
        (item(choices=b"ab", targets=(1.0,)), "has 2 choices and 1 targets"),
        (item(choices=b"aba", targets=(0.5, 0.25, 0.25)), "offers byte 0x61 twice"),
        (item(choices=b"ab", targets=(0.5, 0.502)), "targets that sum to 1.002; they must sum to one"),
        (item(choices=b"ab", targets=(0.5, 0.498)), "targets that sum to 0.998"),
        (item(choices=b"ab", targets=(1.5, -0.5)), "has the target -0.5; targets must be finite and at least 0"),
        (item(choices=b"ab", targets=(1.0, float("nan"))), "has the target nan"),
        (item(choices=b"ab", targets=(1.0, float("inf"))), "has the target inf"),
        (item(choices=b"ab", targets=(1.0, "x")), "has targets that are no numbers"),
    ],
)
def test_bad_items_are_refused_by_number_and_key(bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        batch_of(Bag(texts("x", "y")), Bag((*texts("z", first=2), bad)))
    assert "item 3 (key " in str(caught.value)
    if bad.key == 7:
        assert "0x0000000000000007" in str(caught.value)


def test_targets_within_tolerance_are_kept_as_they_are():
    batch = batch_of(Bag((item(choices=b"ab", targets=(0.5, 0.5009)),)))
    assert batch.targets.tolist() == [0.5, 0.5009]


@pytest.mark.parametrize("other", [Item.text("other", 7), Item(Modality.IMAGE, b"ab", 7)], ids=["content", "modality"])
def test_one_key_for_two_things_is_refused(other):
    with pytest.raises(ValueError, match="have one key and are not the same thing") as caught:
        batch_of(Bag((Item.text("ab", 7), Item.text("x", 1))), Bag((Item.text("ab", 7), other)))
    assert "item 2 (key 0x0000000000000007, text, 2 bytes) and item 3 (key 0x0000000000000007" in str(caught.value)


@pytest.mark.parametrize("name", ["attract", "repel", "ignore"])
@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([(0, 3)], r"the {name} link \(0, 3\), which names a position outside its 3 items"),
        ([(0, 1), (-1, 0)], r"the {name} link \(-1, 0\), which names a position outside"),
        ([(0, 1.0)], r"the {name} link \(0, 1.0\); it must be \(position, position\)"),
        ([(0, 1), (2,)], r"the {name} link \(2,\); it must be"),
        ([(0, 1), (0, 2, 1.0, 1.0)], r"the {name} link \(0, 2, 1.0, 1.0\); it must be"),
        ([(0, 1), (0, 2, "w")], r"the {name} link \(0, 2, 'w'\); it must be"),
        ([7], r"the {name} link 7; it must be"),
    ],
)
def test_bad_links_are_refused_by_bag(name, links, message):
    bag = Bag(texts("a", "b", "c", first=1), **{name: tuple(links)})
    with pytest.raises(ValueError, match=message.format(name=name)) as caught:
        batch_of(Bag(texts("z")), bag)
    assert "bag 1 (first item 0x0000000000000001" in str(caught.value)


@pytest.mark.parametrize("name", ["attract", "repel"])
@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([(1, 1)], "{name}.* = 2 of item 2 .*an edge to itself"),
        ([(1, 0), (1, 2), (1, 0)], "{name}.* = 1 of item 2 .*is repeated"),
        *(([(1, 0, weight)], "{name}.weights.*item 2 .*finite and at least 0") for weight in (-1.0, np.nan, np.inf)),
    ],
)
def test_bad_edges_are_refused_by_item(name, links, message):
    bag = Bag(texts("a", "b", "c", first=1), **{name: tuple(links)})
    with pytest.raises(ValueError, match=message.format(name=name)) as caught:
        batch_of(Bag(texts("z")), bag)
    assert "item 2 (key 0x0000000000000002, text, 1 bytes)" in str(caught.value)


@pytest.mark.parametrize(("one", "other"), [("attract", "repel"), ("attract", "ignore"), ("repel", "ignore")])
def test_one_pair_in_two_edge_sets_is_refused(one, other):
    bag = Bag(texts("a", "b", "c"), **{one: ((0, 2), (0, 1)), other: ((0, 2),)})
    with pytest.raises(ValueError, match=f"in both {one} and {other}") as caught:
        batch_of(bag)
    assert "item 0 (key 0x0000000000000000, text, 1 bytes)" in str(caught.value)


def test_weighted_ignore_links_are_refused():
    with pytest.raises(ValueError, match=r"ignore edges of item 1 \(key .* have weights"):
        batch_of(Bag(texts("a", "b"), ignore=((1, 0, 1.0),)))


def test_empty_bag_is_refused():
    with pytest.raises(ValueError, match="bag 1 is empty"):
        batch_of(Bag(texts("a")), Bag(()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attract": Edges([0, 1, 1], [2])}, r"attract.ids\[0\] = 2 of item 0 \(key 0x0.* is out of range"),
        ({"attract": Edges([0, 1, 1], [-1])}, "attract.*item 0 .* is out of range"),
        ({"repel": Edges([0, 2, 2], [1, 1])}, "repel.*item 0 .* is repeated"),
        ({"repel": Edges([0, 1, 0], [])}, "repel.offsets decreases from 1 to 0 at item 1 "),
        ({"ignore": Edges([0, 1, 1], [1, 0])}, r"ignore.offsets ends at 1; it must end at len\(ids\) = 2"),
        ({"ignore": Edges([0, 0], [])}, "ignore has 1 rows"),
        ({"attract": None}, "attract is a NoneType; it must be Edges"),
        ({"keys": np.array([0, 1])}, "keys must be a numpy array .* of uint64"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, r"groups must be a tensor \(2,\) of int64"),
        ({"sides": torch.zeros(2)}, r"sides must be a tensor \(2,\) of int64"),
        ({"contents": Tape.gather([b"a"])}, "contents has 1 entries for 2 items"),
        ({"choices": Tape.gather([b""] * 3)}, "choices has 3 entries for 2 items"),
        ({"targets": torch.ones(1, dtype=torch.float64)}, r"targets are torch.float64 of shape \(1,\)"),
        ({"bags": np.array([0, 1])}, "bags ends at 1; it must end at the number of items = 2"),
        ({"bags": np.array([0, 1, 1, 2])}, "bags gives bag 1 nothing"),
        ({"bags": np.array([0, 2, 1, 2])}, "bags decreases from 2 to 1 at bag 1"),
    ],
)
def test_arrays_made_by_hand_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(batch_of(Bag(texts("a", "b"))), **fields)


def test_edges_not_ascending_are_refused():
    with pytest.raises(ValueError, match=r"item 0 .*strictly ascending"):
        replace(batch_of(Bag(texts("a", "b", "c"))), attract=Edges([0, 2, 2, 2], [2, 1]))
