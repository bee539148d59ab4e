"""Columns: the fields of many items, and the links of many bags, as arrays.

The fast way first; where a value does not fit, the slow way finds the item or bag to name.

N items, E links.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, index
from typing import Any

import numpy as np
import torch
from uform_kernels import Edges

from xpmir_uform.data.items import Bag, Item, Link
from xpmir_uform.data.refusals import name_item
from xpmir_uform.data.tape import Tape

UNFIT = (TypeError, ValueError, OverflowError)

FIELDS: dict[str, tuple[type[np.integer], str]] = {
    "modality": (np.int64, "a Modality"),
    "key": (np.uint64, "an integer from 0 to 2**64 - 1"),
    "side": (np.int64, "a Side"),
    "group": (np.int64, "an integer of at least 0"),
}
"""The integer fields of an item: dtype of the column, and what a value must be."""


def integers(field: str, items: Sequence[Item]) -> np.ndarray:
    """(N,) an integer field of each item, in the dtype that :data:`FIELDS` says.

    Raises:
        ValueError: a value is no integer or does not fit the dtype; names the item.
    """
    dtype, _ = FIELDS[field]
    values = map(attrgetter(field), items)
    try:
        return np.fromiter(map(index, values), dtype, len(items))
    except UNFIT:
        number = _first_unfit(lambda item: np.fromiter([index(getattr(item, field))], dtype), items)
        value = getattr(items[number], field)
        raise ValueError(f"{_name(number, items)} has {field} {value!r}; it must be {FIELDS[field][1]}.") from None


def byte_tape(field: str, items: Sequence[Item]) -> Tape:
    """A field of bytes of each item.

    Raises:
        ValueError: a value is not bytes; names the item.
    """
    entries = list(map(attrgetter(field), items))
    for number, entry in enumerate(entries):
        if not isinstance(entry, bytes):
            kind = type(entry).__name__
            raise ValueError(f"{_name(number, items)} has {field} of type {kind}; it must be bytes.")
    return Tape.gather(entries)


def target_column(items: Sequence[Item]) -> np.ndarray:
    """The targets of all items one after another, float64.

    Raises:
        ValueError: an item has another number of targets than of choices, or one is no number; names the item.
    """
    for number, item in enumerate(items):
        if len(item.targets) != len(item.choices):
            counts = f"{len(item.choices)} choices and {len(item.targets)} targets"
            raise ValueError(f"{_name(number, items)} has {counts}; give each choice one target.")
    try:
        return np.fromiter(chain.from_iterable(item.targets for item in items), np.float64)
    except UNFIT:
        number = _first_unfit(lambda item: np.fromiter(item.targets, np.float64), items)
        raise ValueError(f"{_name(number, items)} has targets that are no numbers.") from None


def bag_offsets(bags: Sequence[Bag]) -> np.ndarray:
    """(B + 1,) int64: where each bag's items begin.

    Raises:
        ValueError: a bag is empty.
    """
    sizes = np.fromiter((len(bag.items) for bag in bags), np.int64, len(bags))
    if not sizes.all():
        raise ValueError(f"bag {int(np.argmin(sizes))} is empty; a bag holds at least one item.")
    return np.concatenate([[0], np.cumsum(sizes)])


def bag_keys(bags: Sequence[Bag]) -> np.ndarray:
    """(B,) uint64: the identity of each bag.

    Raises:
        ValueError: a key is no integer or does not fit; names the bag.
    """
    try:
        return np.fromiter((index(bag.identity) for bag in bags), np.uint64, len(bags))
    except UNFIT:
        number = _first_unfit(lambda bag: np.fromiter([index(bag.identity)], np.uint64), bags)
        raise ValueError(
            f"{_name_bag(number, bags)} has key {bags[number].key!r}; it must be {FIELDS['key'][1]}."
        ) from None


def link_edges(name: str, bags: Sequence[Bag], offsets: np.ndarray) -> Edges:
    """The links ``name`` ("attract", "repel" or "ignore") of all bags as edges between item numbers, sorted.

    There are weights where any link has one; a link without counts one.

    Raises:
        ValueError: a link is not (position, position) or (position, position, weight), or names a position outside its
            bag; names the bag.
    """
    sets: list[Sequence[Link]] = list(map(attrgetter(name), bags))
    owners = np.repeat(np.arange(len(bags)), list(map(len, sets)))
    links = list(chain.from_iterable(sets))
    try:
        ends, weights = _link_columns(links)
    except UNFIT:
        place = _first_unfit(lambda link: _link_columns([link]), links)
        owner = _name_bag(int(owners[place]), bags)
        form = "(position, position) or (position, position, weight)"
        raise ValueError(f"{owner} has the {name} link {links[place]!r}; it must be {form}.") from None
    _check_inside(name, bags, links, owners, ends)
    anchors, ids = ends.T + offsets[owners]
    order = np.lexsort((ids, anchors))
    starts = np.searchsorted(anchors[order], np.arange(offsets[-1] + 1))
    return Edges(
        torch.from_numpy(starts),
        torch.from_numpy(ids[order]),
        None if weights is None else torch.from_numpy(weights[order]),
    )


def _link_columns(links: Sequence[Link]) -> tuple[np.ndarray, np.ndarray | None]:
    """(E, 2) int64 positions and (E,) float64 weights."""
    lengths = set(map(len, links))
    if not lengths <= {2, 3}:
        raise ValueError(lengths)
    ends = np.fromiter((index(end) for link in links for end in link[:2]), np.int64).reshape(-1, 2)
    if 3 not in lengths:
        return ends, None
    return ends, np.fromiter((link[2] if len(link) == 3 else 1.0 for link in links), np.float64, len(links))


def _check_inside(name: str, bags: Sequence[Bag], links: Sequence[Link], owners: np.ndarray, ends: np.ndarray) -> None:
    sizes = np.fromiter((len(bag.items) for bag in bags), np.int64, len(bags))
    outside = ((ends < 0) | (ends >= sizes[owners, None])).any(1)
    if outside.any():
        place = int(np.argmax(outside))
        bag = int(owners[place])
        raise ValueError(
            f"{_name_bag(bag, bags)} has the {name} link {links[place]}, which names a position outside its "
            f"{sizes[bag]} items; positions count from 0 within the bag."
        )


def _name(number: int, items: Sequence[Item]) -> str:
    item = items[number]
    return name_item(number, item.key, item.modality, len(item.content))


def _name_bag(number: int, bags: Sequence[Bag]) -> str:
    return f"bag {number} (first {bags[number].items[0]})"


def _first_unfit(convert: Callable[[Any], object], values: Sequence[Any]) -> int:
    """The place of the first value that ``convert`` refuses."""
    for place, value in enumerate(values):
        try:
            convert(value)
        except UNFIT:
            return place
    raise AssertionError("every value fits alone")
