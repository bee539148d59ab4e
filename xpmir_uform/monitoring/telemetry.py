"""Telemetry: one line of JSON for each optimizer step, and how it is read again.

``telemetry.schema.json`` beside this file says what a line holds.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from xpmir_uform.monitoring import jsonl

logger = logging.getLogger(__name__)

TELEMETRY = "telemetry.jsonl"
ALERTS = "alerts.jsonl"


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a line of telemetry; ``$defs/alert`` is that of an alert."""
    return json.loads(files(__package__).joinpath("telemetry.schema.json").read_text())


def read_telemetry(job: Path) -> Iterator[dict[str, Any]]:
    """The lines of a job's telemetry, in the order of its steps; none if it has no such file.

    Args:
        job: the folder of the job.
    """
    return jsonl.read(Path(job) / TELEMETRY)


def read_alerts(job: Path) -> Iterator[dict[str, Any]]:
    """The alerts of a job, in the order in which they were raised; none if it has no such file.

    Args:
        job: the folder of the job.
    """
    return jsonl.read(Path(job) / ALERTS)


class Window:
    """The newest steps together.

    Args:
        length: how many.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.lowest: float | None = None
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=length)

    def recall(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the state after these lines."""
        self._lines.extend(lines)
        self.lowest = lines[-1]["window"]["lowest"] if lines else None

    def add(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """What the window tells, this step being its newest."""
        self._lines.append(line)
        waits = sum(one["seconds"]["wait"] for one in self._lines)
        seconds = waits + sum(one["seconds"]["step"] for one in self._lines)
        loss = self._mean("loss", len(self._lines))
        if len(self._lines) == self.length and loss is not None and isfinite(loss):
            self.lowest = loss if self.lowest is None else min(self.lowest, loss)
        return {
            "steps": len(self._lines),
            "loss": loss,
            "lowest": self.lowest,
            "seconds": seconds / len(self._lines),
            "items_per_second": self._mean("items", seconds),
            "tokens_per_second": self._mean("tokens", seconds),
            "wait_share": waits / seconds if seconds else 0.0,
        }

    def _mean(self, name: str, whole: float) -> float | None:
        """The sum over the steps by ``whole``; not finite if a step's value is not, None if one is unknown."""
        values = [one[name] for one in self._lines]
        return None if None in values or not whole else sum(values) / whole


class Telemetry:
    """Writes the line of each step.

    Args:
        job: the folder of the job.
        facts: what every line repeats.
        steps: of the whole training.
        window: steps of a full window.
        part_bytes: a larger file is put aside as an older part.
    """

    def __init__(self, job: Path, facts: Mapping[str, Any], steps: int, window: int, part_bytes: int) -> None:
        self.journal = jsonl.Journal(job / TELEMETRY, part_bytes)
        self.facts = facts
        self.steps = steps
        self.window = Window(window)

    def resume(self, step: int, memory: int) -> list[dict[str, Any]]:
        """Drops what is written of later steps; answers the last lines before, at least ``memory`` of them."""
        self.journal.rewind(step)
        try:
            lines = jsonl.read_last(self.journal.path, max(memory, self.window.length))
        except OSError as error:
            logger.warning("the windows begin anew: %s", error)
            return []
        try:
            self.window.recall(lines[-self.window.length :])
        except (LookupError, TypeError) as error:
            self.restart(f"a line is not of this telemetry ({type(error).__name__}: {error})")
            return []
        return lines

    def restart(self, reason: object) -> None:
        """Sets the telemetry so far aside and begins anew."""
        self.journal.restart(reason)
        self.window = Window(self.window.length)

    def write(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Adds what follows from the steps before, and what never changes; answers the line."""
        window = self.window.add(line)
        whole = {
            **line,
            "time": time.time(),
            "window": window,
            "percent": min(100.0, 100.0 * line["step"] / self.steps),
            "eta_seconds": max(0, self.steps - line["step"]) * window["seconds"],
            **self.facts,
        }
        self.journal.append(whole)
        return whole

    def finish(self) -> None:
        """Lets the newest line say that no step remains, where training ends before the last one."""
        self.journal.amend({"percent": 100.0, "eta_seconds": 0.0})
