"""What batchers know of a bag.

Letters: B bags.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

COUNTED = ("choices", "query_tokens", "documents", "document_tokens")
"""What a bag tells by a number of its own."""


class BagSize(NamedTuple):
    """The size of one bag of a batch.

    Args:
        items: the numbers of its items in the batch, at least one.
        lengths: the tokens of each item.
        key: of its first item, by which messages name the bag.
        choices: how many choices its items offer.
        query_tokens, documents, document_tokens: what late interaction compares of it.
    """

    items: range
    lengths: tuple[int, ...]
    key: int
    choices: int = 0
    query_tokens: int = 0
    documents: int = 0
    document_tokens: int = 0


class Sizes(NamedTuple):
    """The sizes of B bags as columns, each (B,) int64.

    Args:
        tokens, items, choices, query_tokens, documents, document_tokens: how many.
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
    query_tokens: np.ndarray
    documents: np.ndarray
    document_tokens: np.ndarray

    @classmethod
    def of(cls, bags: Sequence[BagSize]) -> "Sizes":
        """The columns of ``bags``."""
        items = np.fromiter((len(bag.lengths) for bag in bags), np.int64, len(bags))
        lengths = np.fromiter(chain.from_iterable(bag.lengths for bag in bags), np.int64, items.sum())
        starts = np.cumsum(items) - items
        return cls(
            tokens=np.add.reduceat(lengths, starts),
            items=items,
            **{name: np.fromiter(map(attrgetter(name), bags), np.int64, len(bags)) for name in COUNTED},
            bags=np.ones_like(items),
            squares=np.add.reduceat(lengths**2, starts),
            longest=np.maximum.reduceat(lengths, starts),
        )
