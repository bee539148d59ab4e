"""Keyed draws: every random number is a pure function of (seed, purpose, step, key).

The generator is counter-based (Philox4x64, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
Its 128-bit key holds the seed and the item's key; of its 256-bit counter the upper half holds the purpose and the
step, and the lower half counts the numbers of one stream. Streams cannot overlap, and none depends on position, rank or
worker.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b

import numpy as np

WORD = 2**64


class Purpose(IntEnum):
    """What a draw is for. Numbers are frozen: they decide results."""

    INITIALISATION = 0
    ORDER = 1
    SPLIT = 2
    BAG = 3
    AUGMENTATION = 4
    MASK = 5
    DROPOUT = 6
    HOOKS = 7


def generator(seed: int, purpose: Purpose, step: int = 0, key: int = 0) -> np.random.Generator:
    """The stream of one purpose, step (or epoch) and item.

    Args:
        seed, step, key: integers in [0, 2**64).

    Raises:
        ValueError: one of them is outside that range.
    """
    for name, value in (("seed", seed), ("step", step), ("key", key)):
        if not 0 <= value < WORD:
            raise ValueError(f"{name} is {value}, expected an integer in [0, 2**64)")
    return np.random.Generator(
        np.random.Philox(
            key=np.array([seed, key], dtype=np.uint64), counter=np.array([0, 0, step, purpose], dtype=np.uint64)
        )
    )


@lru_cache(maxsize=4)
def permutation(seed: int, purpose: Purpose, step: int, count: int) -> np.ndarray:
    """(count,) int64: a keyed permutation of range(count), read-only."""
    order = generator(seed, purpose, step).permutation(count)
    order.flags.writeable = False
    return order


def key_of(*parts: str | bytes | int) -> int:
    """A stable 64-bit key of a name: the same on every machine and in every process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def seed_from(random: np.random.RandomState) -> int:
    """A 63-bit seed for keyed draws from the generator that xpm-torch hands out."""
    return int(random.randint(0, 2**63 - 1, dtype=np.int64))


def choose(draw: np.random.Generator, options: Sequence[str], count: int) -> list[str]:
    """``count`` different ``options``, in the order drawn.

    Raises:
        ValueError: there are fewer.
    """
    if not 0 <= count <= len(options):
        raise ValueError(f"count is {count}, expected 0 to {len(options)}, the number of options")
    return [options[int(i)] for i in draw.permutation(len(options))[:count]]
