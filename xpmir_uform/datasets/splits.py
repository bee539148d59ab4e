"""Splits: which things of a data set are held out from training, by a keyed permutation and by content.

A thing holds contents: texts, and files as bytes. Things are **kin** when they share a content, directly or through
others: equal bytes, or texts that are equal once :func:`normalised`. Kin fall on the same side of a split, so that
nothing that is asked of a model stood in its training; and none of them is a wrong answer of another.

T things, C contents of all things.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import check_least

T = TypeVar("T")

BREAKS = "PZC"
"""General categories of Unicode that part words: punctuation, separators and controls. Symbols stay: C is not C++."""


def normalised(text: str) -> str:
    """``text`` by NFKC and case folding, its words joined by one space; punctuation alone stands for itself."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    words = "".join(" " if unicodedata.category(character)[0] in BREAKS else character for character in folded)
    return " ".join(words.split()) or " ".join(folded.split())


def kin(contents: Iterable[Iterable[str | bytes]]) -> np.ndarray:
    """(T,) int: the family of each thing, by what each holds; things without contents are alone."""
    numbers: dict[str | bytes, int] = {}
    held = [
        [numbers.setdefault(normalised(one) if isinstance(one, str) else one, len(numbers)) for one in each]
        for each in contents
    ]
    things = np.repeat(np.arange(len(held)), list(map(len, held)))
    found = np.fromiter((number for each in held for number in each), np.int64, len(things)) + len(held)
    size = len(held) + len(numbers)
    shares = coo_array((np.ones(len(things), np.int8), (things, found)), shape=(size, size))
    return connected_components(shares, directed=False)[1][: len(held)]


def check_counts(held_out: int, limit: int, name: str) -> None:
    """Refuses counts that leave nothing to hold out or nothing to train on, whatever the data are.

    Raises:
        ValueError: with what is expected.
    """
    check_least(1, held_out=held_out)
    check_least(0, limit=limit)
    if limit and held_out >= limit:
        raise ValueError(
            f"held_out is {held_out} and limit {limit}, which leaves no {name} for training: lower held_out or raise "
            "limit"
        )


def held_out_first(
    things: Sequence[T],
    contents: Callable[[T], Iterable[str | bytes]],
    *,
    seed: int,
    limit: int,
    held_out: int,
    name: str,
) -> list[T]:
    """``things`` in keyed order, the ``held_out`` first of which are kept from training.

    Families are taken in that order as long as they fit.

    Args:
        contents: of a thing: what training sees of it, and what is asked about it.
        limit: keep this many in all, those held out included; 0 keeps every one.
        held_out: how many things, exactly.
        name: of the things, in the message.

    Raises:
        ValueError: ``limit`` leaves nothing out, nothing is left for training, or no families make up this number.
    """
    if limit >= len(things) > held_out:
        raise ValueError(f"limit is {limit} and there are {len(things)} {name}: leave it out, which keeps every one")
    order = keyed_random.permutation(seed, keyed_random.Purpose.SPLIT, 0, len(things))[: limit or None]
    if held_out >= len(order):
        raise ValueError(
            f"held_out is {held_out}, expected less than the {len(order)} {name} there are: lower held_out"
            f"{' or raise limit' if limit else ''}"
        )
    chosen = [things[int(number)] for number in order]
    out = _filled(kin(map(contents, chosen)), held_out)
    if out.sum() < held_out:
        raise ValueError(
            f"held_out is {held_out}, and {name} that share a text or a file are held out together, which makes "
            f"{out.sum()}: choose another number, or find out which texts so many share"
        )
    return [chosen[place] for place in np.argsort(~out, kind="stable")]


def _filled(families: np.ndarray, room: int) -> np.ndarray:
    """(T,) bool: the things of the first families that fit into ``room`` places, each whole."""
    names, first, sizes = np.unique(families, return_index=True, return_counts=True)
    taken = []
    for place in np.argsort(first):
        if sizes[place] <= room:
            taken.append(names[place])
            room -= sizes[place]
    return np.isin(families, taken)
