"""Bags to a batch and back, and everything that a batch refuses."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from uform_kernels import Edges

from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.batch.tape import Tape
from xpmir_uform.data.items import Bag, Item
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


def test_targets_within_tolerance_are_kept_as_they_are():
    batch = batch_of(Bag((Item.text("ab", choices=b"ab", targets=(0.5, 0.5009)),)))
    assert batch.targets.tolist() == [0.5, 0.5009]


@pytest.mark.parametrize("other", [Item.text("other", 7), Item(Modality.IMAGE, b"ab", 7)], ids=["content", "modality"])
def test_one_key_for_two_things_is_refused(other):
    with pytest.raises(ValueError, match="have one key and are not the same thing") as caught:
        batch_of(Bag((Item.text("ab", 7), Item.text("x", 1))), Bag((Item.text("ab", 7), other)))
    assert "item 2 (key 0x0000000000000007, text, 2 bytes) and item 3 (key 0x0000000000000007" in str(caught.value)


def test_choices_without_targets_are_refused_in_training():
    with pytest.raises(
        ValueError, match=r"item 1 \(key 0x0000000000000007, text, 1 bytes\) has 2 choices and no targets"
    ):
        batch_of(Bag((Item.text("a", 1), Item.text("b", 7, choices=b"yn"))))


@pytest.mark.parametrize("bags", [Bag(texts("a")), [texts("a")], ["a"], 3, [Item.text("a")]])
def test_what_is_no_bag_is_refused(bags):
    with pytest.raises(
        ValueError, match=r"(bag 0 is a (tuple|str|Item); expected a Bag|got one (Bag|int); expected a seq)"
    ):
        Batch.of(bags)


def offered(choices, targets):
    """The fields of a batch whose second item offers choices."""
    return {"choices": Tape.gather([b"", choices]), "targets": torch.tensor(targets, dtype=torch.float64)}


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
        ({"keys": np.array([7, 7], np.uint64)}, "item 0 .* and item 1 .* have one key and are not the same thing"),
        (
            {"modalities": torch.tensor([0, 4])},
            r"item 1 \(key 0x0+1, modality 4, 1 bytes\) has no modality of Modality",
        ),
        ({"sides": torch.tensor([0, 4])}, "item 1 .* has no side of Side"),
        ({"groups": torch.tensor([0, -1])}, "item 1 .* has a negative group"),
        ({"modalities": torch.tensor([0, 1]), "contents": Tape.gather([b"a", b""])}, "item 1 .* is empty; only a text"),
        ({"contents": [b"a", b"b"]}, "contents is a list; it must be a Tape"),
        ({"targets": None}, "targets is a NoneType; it must be a tensor of float64"),
        (offered(b"aba", (0.5, 0.25, 0.25)), "item 1 .* offers byte 0x61 twice"),
        (offered(b"ab", (0.5, 0.502)), "item 1 .* has targets that sum to 1.002; they must sum to one"),
        (offered(b"ab", (1.5, -0.5)), "item 1 .* has the target -0.5; targets must be finite and at least 0"),
        (offered(b"ab", (1.0, np.nan)), "item 1 .* has the target nan"),
        ({"bags": [0, 2]}, r"bags must be a numpy array \(B \+ 1,\) of int64"),
        ({"bag_keys": np.array([1], np.int64)}, r"bag_keys must be a numpy array \(1,\) of uint64"),
        ({"bags": np.array([0, 1])}, "bags ends at 1; it must end at the number of items = 2"),
        ({"bags": np.array([0, 1, 1, 2])}, "bags gives bag 1 nothing"),
        ({"bags": np.array([0, 2, 1, 2])}, "bags decreases from 2 to 1 at bag 1"),
    ],
)
def test_arrays_made_by_hand_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(batch_of(Bag(texts("a", "b"))), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attract": Edges([0, 0, 1, 1], [1])}, "attract.* = 1 of item 1 .*an edge to itself"),
        ({"attract": Edges([0, 1, 1, 1], [2], [np.nan])}, "attract.weights.*item 0 .*must be finite and at least 0"),
        (
            {"attract": Edges([0, 1, 1, 1], [2]), "repel": Edges([0, 1, 1, 1], [2])},
            "item 0 .*in both attract and repel",
        ),
        ({"ignore": Edges([0, 0, 1, 1], [0], [1.0])}, r"ignore edges of item 1 \(key .* have weights"),
    ],
)
def test_edges_made_by_hand_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(batch_of(Bag(texts("a", "b", "c"))), **fields)


def test_edges_not_ascending_are_refused():
    with pytest.raises(ValueError, match=r"item 0 .*strictly ascending"):
        replace(batch_of(Bag(texts("a", "b", "c"))), attract=Edges([0, 2, 2, 2], [2, 1]))
