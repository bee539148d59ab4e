"""Telemetry: one line of JSON for each optimizer step, and how it is read again.

``telemetry.schema.json`` beside this file says what a line holds.
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from xpmir_uform.learner import journal

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
    return journal.read(Path(job) / TELEMETRY)


def read_alerts(job: Path) -> Iterator[dict[str, Any]]:
    """The alerts of a job, in the order in which they were raised; none if it has no such file.

    Args:
        job: the folder of the job.
    """
    return journal.read(Path(job) / ALERTS)
