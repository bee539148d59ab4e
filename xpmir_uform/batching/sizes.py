"""What batchers know of a bag.

Letters: B bags.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np


class BagSize(NamedTuple):
    """The size of one bag of a batch.

    Args:
        items: the numbers of its items in the batch, at least one.
        lengths: the tokens of each item.
        key: of its first item, by which messages name the bag.
        choices: how many choices its items offer.
    """

    items: range
    lengths: tuple[int, ...]
    key: int
    choices: int = 0


class Sizes(NamedTuple):
    """The sizes of B bags as columns, each (B,) int64.

    Args:
        tokens, items, choices: how many.
        bags: one each.
        squares: sum of the squared lengths.
        longest: tokens of the longest item.
    """

    tokens: np.ndarray
    items: np.ndarray
    choices: np.ndarray
    bags: np.ndarray
    squares: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(cls, bags: Sequence[BagSize]) -> "Sizes":
        """The columns of ``bags``."""
        items = np.fromiter((len(bag.lengths) for bag in bags), np.int64, len(bags))
        lengths = np.fromiter(chain.from_iterable(bag.lengths for bag in bags), np.int64, items.sum())
        starts = np.cumsum(items) - items
        return cls(
            tokens=np.add.reduceat(lengths, starts),
            items=items,
            choices=np.fromiter((bag.choices for bag in bags), np.int64, len(bags)),
            bags=np.ones_like(items),
            squares=np.add.reduceat(lengths**2, starts),
            longest=np.maximum.reduceat(lengths, starts),
        )
