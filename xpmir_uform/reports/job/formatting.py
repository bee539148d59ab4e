"""Numbers, durations and moments as they are read."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

UNKNOWN = "not recorded"


def known(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def moment(seconds: Any) -> str:
    """A point in time, from seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if known(seconds) else UNKNOWN


def duration(seconds: Any) -> str:
    """A duration in two units."""
    if not known(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def number(value: Any, unit: str = "") -> str:
    """Whole numbers with separators, others with four digits."""
    if not known(value):
        return UNKNOWN
    whole = float(value).is_integer() or 1e4 <= abs(value) < 1e15
    return f"{f'{value:,.0f}' if whole and abs(value) < 1e15 else f'{value:.4g}'} {unit}".strip()


def size(count: Any) -> str:
    """A number of bytes."""
    if not known(count):
        return UNKNOWN
    power = min(4, max(0, (int(abs(count)).bit_length() - 1) // 10))
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def text(value: Any) -> str:
    """Any JSON value in one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}".replace("nan", "NaN")
    return json.dumps(value, ensure_ascii=False)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The leaves of nested mappings, by their names joined with dots."""
    leaves: dict[str, str] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        leaves |= flat(value, f"{before}{key}.") if inner else {f"{before}{key}": text(value)}
    return leaves
