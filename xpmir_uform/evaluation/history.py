"""What a validation measured, by epoch: kept so that a damaged file costs nothing.

``history.json`` is for readers. ``history.sealed.json`` holds the same with its digest and is what training goes on
from: which epoch is the best depends on it.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import read_bytes, replace_file, seal, unseal

logger = logging.getLogger(__name__)

History = dict[str, dict[str, float]]


def write_history(path: Path, history: Mapping[str, Mapping[str, float]]) -> None:
    """Writes both files, each whole and on the disk before it takes its name."""
    replace_file(sealed_path(path), seal({"epochs": history}).encode())
    replace_file(path, json.dumps(history, indent=1).encode())


def read_history(path: Path, measure: str) -> History:
    """What was written last; empty if nothing was.

    Raises:
        ValueError: both files are damaged.
    """
    damages = []
    for file, parse in ((sealed_path(path), lambda text: unseal(text)["epochs"]), (path, json.loads)):
        try:
            history = checked(parse(read_bytes(file)), measure)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            damages.append(f"{file} ({error})")
            logger.warning("%s is damaged: %s", file, error)
            continue
        return history
    if damages:
        raise ValueError(
            f"what was measured cannot be read: {', '.join(damages)}. Put one back from a copy; or move both away, and "
            "the best of the epochs that follow is kept as the best of all"
        )
    return {}


def sealed_path(path: Path) -> Path:
    """Where the sealed file is."""
    return path.with_suffix(".sealed.json")


def checked(values: Any, measure: str) -> History:
    """Measures by epoch.

    Raises:
        ValueError: something else was there.
    """
    for epoch, measures in values.items():
        int(epoch)
        if not math.isfinite(measures[measure]) or not all(
            isinstance(value, int | float) for value in measures.values()
        ):
            raise ValueError(f"epoch {epoch} has other values than measures")
    return values
