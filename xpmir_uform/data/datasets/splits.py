"""Splits: which things of a data set are held out from training, by a keyed permutation."""

from collections.abc import Sequence
from typing import TypeVar

from xpmir_uform.data import draws

T = TypeVar("T")


def shuffled(things: Sequence[T], seed: int, limit: int, held_out: int, name: str) -> list[T]:
    """``things`` in keyed order, the ``held_out`` first of which are kept from training.

    Args:
        limit: keep this many in all, those held out included; 0 keeps every one.
        name: of the things, in the message.

    Raises:
        ValueError: nothing is left for training.
    """
    order = draws.permutation(seed, draws.Purpose.SPLIT, 0, len(things))[: limit or None]
    if held_out >= len(order):
        raise ValueError(
            f"held_out is {held_out}, expected less than the {len(order)} {name} there are: lower held_out"
            f"{' or raise limit' if limit else ''}"
        )
    return [things[int(number)] for number in order]
