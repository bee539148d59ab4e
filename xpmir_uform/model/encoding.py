"""Encoding a collection of items under a budget of tokens.

Letters: N items.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from torch import nn

from xpmir_uform.data.items import Item
from xpmir_uform.data.shapes import Shape
from xpmir_uform.data.vocabulary import Modality


def check_readable(items: Sequence[Item], shapes: Mapping[Modality, Shape]) -> None:
    """Refuse items of a modality that has no shape.

    Raises:
        ValueError: naming the first such item.
    """
    for item in items:
        if item.modality != Modality.TEXT and item.modality not in shapes:
            name = item.modality.name.lower()
            raise ValueError(f"{item}: this model has no {name} input; build it with {name}={name.title()}Shape(...)")


def most_tokens(item: Item, shapes: Mapping[Modality, Shape]) -> int:
    """An upper bound of the item's tokens, known before it is decoded."""
    if item.modality == Modality.TEXT:
        return max(1, len(item.content))
    return shapes[item.modality].most_tokens


def batches(sizes: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Indices of N items in batches of like size.

    Args:
        sizes: (N,) int, at least 1 each.
        budget: most that the sizes of a batch sum to; a larger item comes alone.

    Yields:
        (n,) int64, ascending in size, ties in order.
    """
    order = np.argsort(sizes, kind="stable")
    ends = np.cumsum(sizes[order])
    start = 0
    while start < len(order):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + budget, side="right")))
        yield order[start:stop]
        start = stop


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every submodule has the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
