"""The rule of duplicates: hand-made cases, real emoji, and its definition written out over all pairs."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from uform_kernels import Edges, check_disjoint, check_edges

from xpmir_uform.base.keyed_random import key_of
from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.batch.duplicates import hash_things, ignore_duplicates
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.datasets.emoji import read_names


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Spares hundreds of tiny tensor operations the wait for a second core that may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def edges_of(pairs, items):
    return Edges.from_lists([sorted(j for i, j in pairs if i == row) for row in range(items)])


def pairs_of(edges):
    return set(zip(edges.anchors().tolist(), edges.ids.tolist(), strict=True))


def ignored(things, attract=(), repel=(), ignore=(), bags=None):
    """The pairs that are ignored, for items named by their content; ``bags`` holds the size and the key of each bag."""
    hashes = hash_things([0] * len(things), [thing.encode() for thing in things])
    sizes, keys = zip(*bags, strict=True) if bags else ([len(things)], [0])
    placed = np.cumsum([0, *sizes]), np.array(keys, np.uint64)
    result = ignore_duplicates(hashes, *placed, *(edges_of(pairs, len(things)) for pairs in (attract, repel, ignore)))
    check_edges("ignore", result, len(things), len(things))
    return pairs_of(result)


def both(*pairs):
    return {*pairs, *((j, i) for i, j in pairs)}


def test_nothing_without_duplicates():
    assert ignored("abc", attract=both((0, 1)), ignore={(1, 2)}) == {(1, 2)}
    assert ignored("abc", attract={(0, 1)}) == set()
    assert ignored("") == set()


def test_two_pictures_of_one_name():
    # bags (P, n) and (Q, n): a name neither repels its twin nor the twin's picture; the pictures are two things
    assert ignored("PnQn", attract=both((0, 1), (2, 3))) == both((1, 3), (0, 3), (1, 2))


def test_triplets_of_one_thing():
    assert ignored("aaab") == both((0, 1), (0, 2), (1, 2))


def test_explicit_edges_stand():
    attract = both((0, 1), (2, 3))
    assert ignored("PnQn", attract, repel={(1, 3)}) == both((1, 3), (0, 3), (1, 2)) - {(1, 3)}
    assert ignored("PnQn", attract | {(0, 3)}) == both((1, 3), (0, 3), (1, 2)) - {(0, 3)}
    assert ignored("PnQn", attract, ignore={(0, 2), (1, 3)}) == both((1, 3), (0, 3), (1, 2)) | {(0, 2)}


def test_a_bag_that_occurs_twice():
    assert ignored("PnPn", attract=both((0, 1), (2, 3))) == both((0, 2), (1, 3), (0, 3), (1, 2))


def test_both_ends_repeated_apart():
    # n and P attract in the first bag; the other n and the other P meet in no bag
    assert (2, 5) in ignored("nPnQmP", attract=both((0, 1), (2, 3), (4, 5)))


def test_copies_of_a_bag_know_each_other_by_its_key():
    # an emoji by its picture and a name, in two epochs, and another emoji between them
    links = both((0, 1), (2, 3), (4, 5))
    assert ignored("PnQmPk", links, bags=[(2, 7), (2, 8), (2, 9)]) == both((0, 4), (1, 4), (0, 5))
    assert ignored("PnQmPk", links, bags=[(2, 7), (2, 8), (2, 7)]) == both((0, 4), (1, 4), (0, 5), (1, 5))


def test_copies_keep_their_explicit_edges_and_the_cells_within_each():
    # a query, its document and a wrong one, twice
    assert ignored("qdwrev", both((0, 1)), {(0, 2), (0, 5)}, bags=[(3, 1), (3, 1)]) == both(
        *product(range(3), range(3, 6))
    ) - {(0, 5)}


def test_attraction_in_one_direction():
    # d repels q, which alone attracts; the twin r of q attracts nothing
    assert ignored("qdq", attract={(0, 1)}) == both((0, 2), (1, 2))
    assert ignored("qdqd", attract={(0, 1), (2, 3)}) == both((0, 2), (1, 3), (0, 3), (1, 2)) | {(1, 0), (3, 2)}


def test_modalities_are_told_apart():
    hashes = hash_things([Modality.TEXT, Modality.IMAGE, Modality.TEXT], [b"x"] * 3)
    assert (hashes[0] == hashes[2]).all()
    assert (hashes[0] != hashes[1]).any()


def test_hashes_are_frozen():
    # BLAKE2b-128 of b"abc" with the personalisation b"\1", as two little-endian words: ranks on any machines agree
    assert hash_things([1], [b"abc"]).tolist() == [[-8274864409996990615, -8459896154554827031]]


def test_hashes_join_over_ranks():
    contents = [b"a", b"b", b"a"]
    parts = [hash_things([0], [content]) for content in contents]
    np.testing.assert_array_equal(np.concatenate(parts), hash_things([0] * 3, contents))


def definition(things, attract, repel, ignore, bags):
    """The rule over all pairs, word by word."""
    result = set(ignore)
    owners = [number for number, (size, _) in enumerate(bags) for _ in range(size)]
    for i, j in product(range(len(things)), repeat=2):
        if i == j or (i, j) in attract | repel | ignore:
            continue
        joined = any(
            {(things[k], things[l])} & {(things[i], things[j]), (things[j], things[i])}
            for k, l in attract - {(j, i)}  # noqa: E741
        )
        copies = owners[i] != owners[j] and bags[owners[i]][1] == bags[owners[j]][1]
        if things[i] == things[j] or joined or copies:
            result.add((i, j))
    return result


@st.composite
def cases(draw):
    things = draw(st.text("abcd", min_size=1, max_size=9))
    numbers = st.integers(0, len(things) - 1)
    pairs = draw(st.lists(st.tuples(numbers, numbers, st.integers(0, 5)), max_size=12))
    sets = [set(), set(), set()]
    for i, j, kind in pairs:
        if i != j and not any((i, j) in named for named in sets):
            sets[max(0, kind - 3)].add((i, j))
    if draw(st.booleans()):
        sets[0] |= {(j, i) for i, j in sets[0]} - sets[1] - sets[2]
    bags = []
    while (rest := len(things) - sum(size for size, _ in bags)) > 0:
        bags.append((draw(st.integers(1, rest)), draw(st.integers(0, 3))))
    return things, *sets, bags


@settings(max_examples=400, deadline=None)
@given(cases())
def test_rule_is_its_definition(case):
    assert ignored(*case) == definition(*case)


@given(cases())
def test_sets_stay_disjoint(case):
    things, *sets, _ = case
    attract, repel, _ = (edges_of(pairs, len(things)) for pairs in sets)
    check_disjoint(attract, repel, edges_of(ignored(*case), len(things)))


def test_work_follows_items_and_edges():
    # a table of all pairs would take 40 GB
    items = 200_000
    hashes = hash_things([0] * items, [b"%d" % (number // 2 if number < 100 else number) for number in range(items)])
    empty = Edges.empty(items)
    bags, keys = np.arange(items + 1), np.arange(items, dtype=np.uint64)
    assert ignore_duplicates(hashes, bags, keys, empty, empty, empty).count == 100
    keys[:100] //= 2
    assert ignore_duplicates(np.arange(2 * items).reshape(-1, 2), bags, keys, empty, empty, empty).count == 100


def test_emoji_of_one_name_do_not_repel_each_other():
    pytest.importorskip("emoji")
    languages = ("en", "es", "fr", "de", "it", "pt")
    owners: dict[str, list[str]] = {}
    for characters, names in read_names(languages).items():
        for name in {names[language] for language in languages}:
            owners.setdefault(name, []).append(characters)
    shared = {name: found for name, found in owners.items() if len(found) > 1}
    assert {"\N{LEO}", "\N{LION FACE}"} <= set(shared["lion"])
    for name, (one, other, *_) in shared.items():
        bags = [named_picture(one, name), named_picture("a stranger", "its name"), named_picture(other, name)]
        assert pairs_of(Batch.of(bags).ignore) == both((1, 5), (1, 4), (0, 5))
        assert Batch.of(bags, deduplicate=False).ignore.count == 0


def named_picture(characters, name):
    picture = Item(Modality.IMAGE, b"a picture of " + characters.encode(), key_of("picture", characters))
    return Bag.alike([picture, Item.text(name, key_of("name", characters))])
