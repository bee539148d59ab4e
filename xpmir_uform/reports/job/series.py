"""The telemetry of a run as columns, and columns as curves of bounded length.

S steps, B buckets.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Place = tuple[str, ...]
"""Where a number stands in a line: ``("losses", "contrastive")``."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the lines of a run say, one array per number.

    Args:
        steps: (S,) int64, ascending.
        values: by place (S,) float64; NaN where a line has no number, or one that is not finite.
        newest: the newest line, whole.
        phases: the step at which each phase of a learning rate begins, and its name.
    """

    steps: np.ndarray
    values: dict[Place, np.ndarray]
    newest: dict[str, Any]
    phases: list[tuple[int, str]] = field(default_factory=list)

    def below(self, *place: str) -> dict[str, np.ndarray]:
        """The columns one level below ``place``, by name."""
        return {path[-1]: column for path, column in self.values.items() if path[:-1] == place}

    def get(self, *place: str) -> np.ndarray:
        """One column; all NaN if no line has it."""
        return self.values.get(place, np.full(len(self.steps), np.nan))

    def missing(self) -> int:
        """How many steps between the first and the newest have no line."""
        return int(np.ptp(self.steps)) + 1 - len(np.unique(self.steps))

    def not_finite(self) -> np.ndarray:
        """The steps whose loss or gradient was not finite: those at which the counts grow."""
        counts = np.nan_to_num(self.get("counts", "nan") + self.get("counts", "inf"))
        return self.steps[np.diff(counts, prepend=0) > 0]


@dataclass(frozen=True, slots=True)
class Curve:
    """A column in at most a given number of buckets of consecutive steps.

    Args:
        steps: (B,) the mean step of each bucket.
        low, middle, high: (B,) the least, mean and greatest finite value of each; NaN if it has none.
        bucket: the most steps in a bucket; 1: nothing was merged.
        last: the newest finite value, NaN if there is none.
    """

    steps: np.ndarray
    low: np.ndarray
    middle: np.ndarray
    high: np.ndarray
    bucket: int
    last: float


def numbers(line: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, float]]:
    """Every number of a line with its place; null and what is not finite are NaN, other values are left out."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, (*place, key))
        elif value is None:
            yield (*place, key), math.nan
        elif isinstance(value, int | float):
            yield (*place, key), float(value) if math.isfinite(value) else math.nan


def read_columns(lines: Iterable[Mapping[str, Any]]) -> Columns:
    """Collects lines in step order.

    Raises:
        ValueError: there is no line.
    """
    steps, columns = array("q"), dict[Place, array]()
    phases: dict[tuple[int, str], None] = {}
    current: dict[str, str] = {}
    newest: Mapping[str, Any] = {}
    for line in lines:
        if not isinstance(line.get("step"), int):
            continue
        newest = line
        for place, value in numbers(line):
            column = columns.setdefault(place, array("d"))
            column.extend([math.nan] * (len(steps) - len(column)))
            column.append(value)
        steps.append(line["step"])
        for group, phase in (line.get("phase") or {}).items():
            if current.get(group) != phase:
                phases[line["step"], phase] = None
                current[group] = phase
    if not steps:
        raise ValueError(
            "the telemetry has no line that can be read, expected at least one step: wait if the job has just begun"
        )
    for column in columns.values():
        column.extend([math.nan] * (len(steps) - len(column)))
    arrays = {place: np.asarray(column, dtype=np.float64) for place, column in columns.items()}
    return Columns(np.asarray(steps, dtype=np.int64), arrays, dict(newest), list(phases))


def thin(steps: np.ndarray, values: np.ndarray, most: int) -> Curve:
    """Merges consecutive steps so that at most ``most`` buckets remain; a lone spike stays visible in ``high``."""
    count = len(steps)
    buckets = min(count, most)
    starts = np.arange(buckets) * count // buckets
    finite = np.isfinite(values)
    known = np.where(finite, values, np.nan)
    lengths = np.diff(starts, append=count)
    weights = np.add.reduceat(finite, starts, dtype=np.float64)
    # Divided before they are added: the sum of large values is not finite where their mean is.
    shares = np.where(finite, values, 0.0) / np.repeat(np.maximum(weights, 1), lengths)
    return Curve(
        steps=np.add.reduceat(steps, starts) / lengths,
        low=np.fmin.reduceat(known, starts),
        middle=np.where(weights > 0, np.add.reduceat(shares, starts), np.nan),
        high=np.fmax.reduceat(known, starts),
        bucket=int(lengths.max()),
        last=float(values[finite][-1]) if finite.any() else math.nan,
    )
