"""Columns: the fields of many items, and the links of many bags, as arrays.

Items and bags refuse what does not fit when they are made.

N items, B bags, E links.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import numpy as np
import torch
from uform_kernels import Edges

from xpmir_uform.data.batch.tape import Tape
from xpmir_uform.data.batch.validation import name_item
from xpmir_uform.data.items import Bag, Item, Link


def integers(field: str, items: Sequence[Item]) -> np.ndarray:
    """(N,) an integer field of each item: uint64 keys, int64 of others."""
    return np.fromiter(map(attrgetter(field), items), np.uint64 if field == "key" else np.int64, len(items))


def byte_tape(field: str, items: Sequence[Item]) -> Tape:
    """A field of bytes of each item."""
    return Tape.gather(map(attrgetter(field), items))


def target_column(items: Sequence[Item]) -> np.ndarray:
    """The targets of all items one after another, float64.

    Raises:
        ValueError: an item offers choices without targets; names the item.
    """
    for number, item in enumerate(items):
        if len(item.targets) != len(item.choices):
            name = name_item(number, item.key, item.modality, len(item.content))
            raise ValueError(f"{name} has {len(item.choices)} choices and no targets; give each choice one target.")
    return np.fromiter(chain.from_iterable(item.targets for item in items), np.float64)


def bag_offsets(bags: Sequence[Bag]) -> np.ndarray:
    """(B + 1,) int64: where each bag's items begin."""
    return np.cumsum([0, *(len(bag.items) for bag in bags)], dtype=np.int64)


def bag_keys(bags: Sequence[Bag]) -> np.ndarray:
    """(B,) uint64: the identity of each bag."""
    return np.fromiter((bag.identity for bag in bags), np.uint64, len(bags))


def link_edges(name: str, bags: Sequence[Bag], offsets: np.ndarray) -> Edges:
    """The links ``name`` ("attract", "repel" or "ignore") of all bags as edges between item numbers, sorted.

    There are weights where any link has one; a link without counts one.
    """
    sets: list[Sequence[Link]] = list(map(attrgetter(name), bags))
    owners = np.repeat(np.arange(len(bags)), list(map(len, sets)))
    ends, weights = _link_columns(list(chain.from_iterable(sets)))
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
    ends = np.fromiter((end for link in links for end in link[:2]), np.int64, 2 * len(links)).reshape(-1, 2)
    if all(len(link) == 2 for link in links):
        return ends, None
    return ends, np.fromiter((link[2] if len(link) == 3 else 1.0 for link in links), np.float64, len(links))
