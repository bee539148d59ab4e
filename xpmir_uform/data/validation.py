"""What is refused of an item and of a bag, where they are made."""

import os
from collections.abc import Iterable, Sequence
from math import isfinite
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

from PIL import Image

from xpmir_uform.data.vocabulary import Modality, Side

if TYPE_CHECKING:
    from xpmir_uform.data.items import Bag, Item

TARGET_TOLERANCE = 1e-3
"""How far the sum of an item's targets may be from one."""

KEYS, GROUPS = 2**64, 2**63


def whole(value: Any) -> Any:
    """An integer of any kind, such as numpy's, as an int; anything else as it is."""
    try:
        return value if isinstance(value, bool) else index(value)
    except TypeError:
        return value


def as_items(things: Any) -> tuple[Any, ...]:
    """The items of a bag, as a tuple.

    Raises:
        ValueError: there is none, or something is no item; says how to make one of it.
    """
    if not isinstance(things, Iterable) or isinstance(things, str | bytes):
        raise ValueError(f"a bag of a {type(things).__name__}; expected a sequence of items")
    items = tuple(things)
    if not items:
        raise ValueError("a bag is empty; it holds at least one item")
    for place, item in enumerate(items):
        if not hasattr(item, "modality"):
            raise ValueError(
                f"number {place} of a bag is a {type(item).__name__}; {remedy(item) or 'expected an Item'}"
            )
    return items


def as_links(links: Any) -> tuple[Any, ...]:
    """Links as tuples of ints and weights, whatever sequences and integers they were given as."""
    if not isinstance(links, Iterable) or isinstance(links, str | bytes):
        return (links,)
    return tuple((*map(whole, link[:2]), *link[2:]) if isinstance(link, tuple | list) else link for link in links)


def check_item(item: "Item") -> None:
    """Refuses an item whose fields are not what :class:`~xpmir_uform.data.items.Item` says.

    Raises:
        ValueError: names the field, what was given and what is expected.
    """
    _check_fields(item)
    _check_content(item)
    _check_choices(item)


def check_bag(bag: "Bag") -> None:
    """Refuses a bag whose fields are not what :class:`~xpmir_uform.data.items.Bag` says.

    Raises:
        ValueError: names the bag by its first item, the link, and the rule.
    """
    if bag.key is not None and not _within(bag.key, KEYS):
        raise ValueError(f"{_name_bag(bag)} has key {bag.key!r}; it must be an integer from 0 to 2**64 - 1")
    pairs: dict[tuple[int, int], str] = {}
    for name in ("attract", "repel", "ignore"):
        _check_links(bag, name, getattr(bag, name))
        for pair in (link[:2] for link in getattr(bag, name)):
            if pair in pairs:
                again = f"twice in {name}" if pairs[pair] == name else f"in both {pairs[pair]} and {name}"
                raise ValueError(f"{_name_bag(bag)} has the link {pair} {again}")
            pairs[pair] = name


def remedy(value: Any) -> str | None:
    """How to make an item of what is none; None: there is no way."""
    if isinstance(value, str):
        return "make it an item: Item.text(...)"
    if isinstance(value, bytes | os.PathLike):
        return "make it an item: Item.image(...), Item.audio(...) or Item.video(...), or Item.text of decoded bytes"
    if isinstance(value, Image.Image):
        return "make it an item: Item.image(...)"
    return None


def _check_fields(item: "Item") -> None:
    if not isinstance(item.modality, Modality):
        raise ValueError(f"an item has modality {item.modality!r}; it must be a Modality, such as Modality.TEXT")
    if not _within(item.key, KEYS):
        raise ValueError(f"an item has key {item.key!r}; it must be an integer from 0 to 2**64 - 1")
    if not isinstance(item.side, Side) or not Side.NONE <= item.side <= Side.QUERY_AND_DOCUMENT:
        raise ValueError(f"{_name(item)} has side {item.side!r}; it must be a Side, such as Side.QUERY")
    if not _within(item.group, GROUPS):
        raise ValueError(f"{_name(item)} has group {item.group!r}; it must be an integer of at least 0")


def _check_content(item: "Item") -> None:
    if not isinstance(item.content, bytes):
        name = item.modality.name.lower()
        kind = type(item.content).__name__
        raise ValueError(f"{_name(item)} has content of type {kind}; it must be bytes. Item.{name} makes it of others")


def _check_choices(item: "Item") -> None:
    if not isinstance(item.choices, bytes):
        raise ValueError(f"{item} has choices of type {type(item.choices).__name__}; they must be bytes")
    if len(set(item.choices)) < len(item.choices):
        raise ValueError(f"{item} has choices {item.choices!r}; they must be distinct bytes")
    if item.targets:
        _check_targets(item)


def _check_targets(item: "Item") -> None:
    if len(item.targets) != len(item.choices):
        counts = f"{len(item.choices)} choices and {len(item.targets)} targets"
        raise ValueError(f"{item} has {counts}; give each choice one target, or none to all")
    for target in item.targets:
        if not _measure(target):
            raise ValueError(f"{item} has the target {target!r}; targets must be numbers, finite and at least 0")
    if abs(sum(item.targets) - 1) > TARGET_TOLERANCE:
        raise ValueError(f"{item} has targets that sum to {sum(item.targets):.6g}; they must sum to one")


def _check_links(bag: "Bag", name: str, links: Sequence[Any]) -> None:
    for link in links:
        problem = _problem(link, len(bag.items), weighted=name != "ignore")
        if problem:
            raise ValueError(f"{_name_bag(bag)} has the {name} link {link!r}, {problem}")


def _problem(link: Any, size: int, weighted: bool) -> str | None:
    """What is wrong with a link of a bag of that size."""
    if not isinstance(link, tuple) or len(link) not in (2, 3) or any(type(end) is not int for end in link[:2]):
        return "which is not (position, position) or (position, position, weight)"
    anchor, other = link[:2]
    if not (0 <= anchor < size and 0 <= other < size):
        return f"which names a position outside its {size} items; positions count from 0 within the bag"
    if anchor == other:
        return "which is from an item to itself"
    if len(link) == 3 and not weighted:
        return "which has a weight; a pair is ignored or it is not. Leave the weight out"
    if len(link) == 3 and not _measure(link[2]):
        return "whose weight must be a number, finite and at least 0"
    return None


def _measure(value: Any) -> bool:
    return isinstance(value, Real) and isfinite(value) and float(value) >= 0


def _within(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def _name(item: "Item") -> str:
    return f"item {item.key:#018x} ({item.modality.name.lower()})"


def _name_bag(bag: "Bag") -> str:
    return f"the bag of {len(bag.items)} items whose first is {bag.items[0]}"
