"""Tape: many byte strings as one array.

C entries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """C byte strings, end to end: entry i is ``data[offsets[i]:offsets[i + 1]]``.

    Args:
        data: (total bytes,) uint8.
        offsets: (C + 1,) uint64, from 0 to ``len(data)``, never decreasing.

    Raises:
        ValueError: an array has another dtype or shape, or the offsets break their rule.
    """

    data: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        _check_array("data", self.data, np.uint8)
        _check_array("offsets", self.offsets, np.uint64)
        _check_offsets(self.offsets, len(self.data))

    @classmethod
    def gather(cls, entries: Iterable[bytes]) -> "Tape":
        """The tape of ``entries``, made with one copy; its data is read-only.

        Raises:
            ValueError: an entry is no byte string.
        """
        entries = list(entries)
        for number, entry in enumerate(entries):
            if not isinstance(entry, bytes):
                raise ValueError(f"entry {number} is a {type(entry).__name__}; a tape holds bytes. Encode it first.")
        offsets = np.zeros(len(entries) + 1, np.uint64)
        np.cumsum(np.fromiter(map(len, entries), np.uint64, len(entries)), out=offsets[1:])
        return cls(np.frombuffer(b"".join(entries), np.uint8), offsets)

    def __len__(self) -> int:
        """C."""
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> "Tape": ...

    def __getitem__(self, place: int | slice) -> "bytes | Tape":
        """One entry, copied; or the tape of a slice of entries, which shares ``data`` where the step is 1."""
        if not isinstance(place, slice):
            start, stop = self._ends(range(len(self))[place])
            return self.data[start:stop].tobytes()
        numbers = range(len(self))[place]
        if numbers.step != 1:
            return self.select(numbers)
        start, stop = self._ends(numbers.start, max(numbers.stop, numbers.start))
        return Tape(self.data[start:stop], self.offsets[numbers.start : numbers.start + len(numbers) + 1] - start)

    def __iter__(self) -> Iterator[bytes]:
        """The entries, each copied."""
        return (self.data[start:stop].tobytes() for start, stop in pairwise(self.offsets.tolist()))

    def select(self, numbers: Iterable[int]) -> "Tape":
        """The tape of the entries with these numbers, in this order, made with a copy of their bytes.

        Raises:
            IndexError: a number is not of an entry.
        """
        return Tape.gather([self[int(number)] for number in numbers])

    def lengths(self) -> np.ndarray:
        """(C,) int64: the number of bytes of each entry."""
        return np.diff(self.offsets).astype(np.int64)

    def _ends(self, first: int, stop: int | None = None) -> tuple[int, int]:
        """Where entries first to stop (by default ``first`` alone) begin and end in ``data``."""
        stop = first + 1 if stop is None else stop
        return int(self.offsets[first]), int(self.offsets[stop])


def _check_array(name: str, array: np.ndarray, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray):
        raise ValueError(
            f"{name} is a {type(array).__name__}; a tape needs a numpy array. Tape.gather takes byte strings."
        )
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; a tape needs one axis of {dtype.__name__}.")


def _check_offsets(offsets: np.ndarray, end: int) -> None:
    if not len(offsets):
        raise ValueError("offsets are empty; a tape of no entries has offsets [0].")
    if offsets[0] != 0:
        raise ValueError(f"offsets start at {offsets[0]}; they must start at 0.")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        entry = int(falls[0])
        raise ValueError(f"offsets decrease from {offsets[entry]} to {offsets[entry + 1]} at entry {entry}.")
    if offsets[-1] != end:
        raise ValueError(f"offsets end at {offsets[-1]}; they must end at len(data) = {end}.")
