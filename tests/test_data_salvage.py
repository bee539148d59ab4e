"""Bags with items that cannot be read: what is left out with them, and what stays."""

import pytest

from xpmir_uform import Bag, Item, Modality
from xpmir_uform.data.decoding.registry import UnreadableItem, decode
from xpmir_uform.data.unreadable_bags import salvage, without

A, B, C, D = (Item.text(letter) for letter in "abcd")
BAD = Item(Modality.TEXT, b"\xff", 99)


def read(item):
    return decode(item, {})


def test_a_readable_bag_is_the_same_bag():
    bag = Bag.alike([A, B])
    assert without(bag, set()) is bag
    kept = salvage([bag], read)
    assert kept.bags == [bag]
    assert kept.unreadable == []
    assert bytes(kept.segments[id(A)].values.astype("uint8")) == b"a"


def test_an_item_goes_with_its_links():
    bag = Bag((A, BAD, C, D), attract=((0, 2, 0.5), (0, 1), (2, 0)), repel=((0, 3), (1, 3)), ignore=((3, 2), (1, 2)))
    assert without(bag, {1}) == Bag((A, C, D), attract=((0, 1, 0.5), (1, 0)), repel=((0, 2),), ignore=((2, 1),))


def test_an_item_whose_partners_are_gone_goes_too():
    bag = Bag((A, BAD, B, C), attract=((0, 1), (2, 3), (3, 2)), repel=((0, 2), (2, 0)))
    assert without(bag, {1}) == Bag((B, C), attract=((0, 1), (1, 0)))


@pytest.mark.parametrize(
    ("bag", "bad"),
    [
        (Bag((BAD,)), {0}),
        (Bag.alike([A, BAD]), {1}),
        (Bag.alike([BAD, BAD]), {0, 1}),
        (Bag((A, BAD, C, D), attract=((0, 1),), repel=((0, 2), (0, 3))), {1}),  # hard negatives of no positive
    ],
)
def test_a_bag_of_which_nothing_is_learned_goes(bag, bad):
    assert without(bag, bad) is None
    assert salvage([bag], read).bags == []


def test_items_without_links_stay():
    assert without(Bag((A, BAD, C)), {1}) == Bag((A, C))


def test_the_others_keep_their_order_and_none_comes_twice():
    bags = [Bag.alike([A, B]), Bag.alike([BAD, C]), Bag.alike([C, D, BAD]), Bag.alike([B, D])]
    kept = salvage(bags, read)
    assert kept.bags == [bags[0], Bag.alike([C, D]), bags[3]]
    assert len(kept.unreadable) == 2
    assert all(f"item {BAD.key:#018x}" in message for message in kept.unreadable)


def test_other_errors_pass():
    with pytest.raises(ValueError, match="no shape for image items") as caught:
        salvage([Bag((Item(Modality.IMAGE, b"x", 1),))], read)
    assert not isinstance(caught.value, UnreadableItem)
