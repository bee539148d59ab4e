"""Alerts: what a run tells of by itself, once when it begins and again only after it has ended.

Every condition is a function of the newest line of telemetry and of the lines shortly before it, so that a resumed run
raises each alert as the uninterrupted one does.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experimaestro import Config, Meta
from xpm_torch.metrics import MetricsLogger

from xpmir_uform.base.configuration import default
from xpmir_uform.monitoring.jsonl import Journal

logger = logging.getLogger(__name__)

NAMES = (
    "nan",
    "inf",
    "skipped",
    "lacking",
    "gradient_norm",
    "step_seconds",
    "learning_rate",
    "wait",
    "divergence",
    "plateau",
)
"""The conditions of a step"""

ALL = "all"
"""In ``fail_on_alert``: every one of them"""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds: its name, what was found, what it was compared with (where it is a number), in words."""

    name: str
    value: float | None
    threshold: float | None
    message: str


class Alerts(Config):
    """When a run is to be looked at; 0 turns a condition off.

    Windows are those of the telemetry. An alert goes to the log, to TensorBoard (``alerts/<name>``) and to
    ``alerts.jsonl``.
    """

    __xpmid__ = "uform.alerts"

    nan: Meta[bool] = default(True)
    """The loss or the gradient holds a NaN"""

    inf: Meta[bool] = default(True)
    """The loss or the gradient holds an infinity"""

    skipped: Meta[int] = default(3)
    """So many steps in a row were skipped"""

    lacking: Meta[int] = default(1)
    """In so many steps in a row a loss lacked what it learns from, such as attract edges or masked places"""

    gradient_norm: Meta[float] = default(0.0)
    """The norm of the gradient, before clipping, is above this"""

    step_seconds: Meta[float] = default(0.0)
    """A step takes longer than this"""

    learning_rate: Meta[float] = default(0.0)
    """A learning rate is above this"""

    wait_share: Meta[float] = default(0.5)
    """Of the time of a full window, more than this share was waited for batches"""

    divergence: Meta[float] = default(3.0)
    """The mean loss of a full window is above so many times the lowest one so far, where that is positive"""

    plateau_steps: Meta[int] = default(0)
    """The mean loss of the window has fallen too little since it was measured so many steps ago"""

    plateau_improvement: Meta[float] = default(0.01)
    """Share of its size that the mean loss should have fallen by in ``plateau_steps``"""

    fail_on_alert: Meta[list[str]] = default([])
    """The alerts that end the task with an error: their names, or ``all``"""

    def __validate__(self):
        unknown = sorted({*self.fail_on_alert} - {*NAMES, ALL})
        if unknown:
            raise ValueError(f"fail_on_alert has {', '.join(unknown)}, expected some of {', '.join(NAMES)}, {ALL}")
        for name in (
            "skipped",
            "lacking",
            "gradient_norm",
            "step_seconds",
            "learning_rate",
            "divergence",
            "plateau_steps",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 (off) or more")
        if not 0.0 <= self.wait_share <= 1.0:
            raise ValueError(f"wait_share is {self.wait_share}, expected 0 (off) to 1")

    def fails(self, name: str) -> bool:
        """Whether the alert ends the task."""
        return name in self.fail_on_alert or ALL in self.fail_on_alert


class Monitor:
    """Follows the conditions over the steps.

    Args:
        alerts: the thresholds.
        window: steps of a full window.
    """

    def __init__(self, alerts: Alerts, window: int) -> None:
        self.alerts = alerts
        self.window = window
        self.active: set[str] = set()
        self.row = 0
        self.lacking_row = 0
        self._counts: dict[str, int] = {}
        self._means: deque[float] = deque(maxlen=alerts.plateau_steps + 1)

    @property
    def memory(self) -> int:
        """How many lines decide what holds."""
        return max(self.alerts.plateau_steps + 1, self.alerts.skipped, self.alerts.lacking, 2)

    def observe(self, line: Line) -> list[Finding]:
        """The conditions that begin to hold with this line of telemetry."""
        found = [*self._step(line), *self._window(line)]
        begun = [finding for finding in found if finding.name not in self.active]
        self.active = {finding.name for finding in found}
        return begun

    def recall(self, lines: Iterable[Line]) -> None:
        """Takes up the state after these lines, whose alerts were raised when they were written."""
        for line in lines:
            self.observe(line)

    def _step(self, line: Line) -> Iterator[Finding]:
        """The conditions of one step."""
        alerts, counts, seconds = self.alerts, line["counts"], line["seconds"]["step"]
        before, self._counts = self._counts or (counts if line["step"] > 1 else dict.fromkeys(counts, 0)), counts
        self.row = self.row + 1 if line["skipped"] else 0
        for name, what in (("nan", "a NaN"), ("inf", "an infinity")):
            if getattr(alerts, name) and counts[name] > before[name]:
                yield Finding(name, counts[name], 0, f"the loss or the gradient holds {what}; the step is skipped")
        if 0 < alerts.skipped <= self.row:
            yield Finding("skipped", self.row, alerts.skipped, f"{self.row} steps in a row were skipped")
        lacking = line.get("lacking", {})  # Lines of earlier versions have none.
        self.lacking_row = self.lacking_row + 1 if lacking else 0
        if 0 < alerts.lacking <= self.lacking_row:
            what = "; ".join(f"{loss} lacks {things}" for loss, things in lacking.items())
            yield Finding("lacking", self.lacking_row, alerts.lacking, f"in the whole batch {what}")
        if not line["skipped"]:
            yield from _above("gradient_norm", "the gradient's norm", line["gradient_norm"]["before"], alerts)
        yield from _above("step_seconds", "the time of a step in seconds", seconds, alerts)
        yield from _above("learning_rate", "a learning rate", max(line["learning_rate"].values(), default=0.0), alerts)

    def _window(self, line: Line) -> Iterator[Finding]:
        """The conditions of the newest steps together."""
        window, alerts = line["window"], self.alerts
        full = window["steps"] == self.window
        mean = math.nan if window["loss"] is None or not full else window["loss"]
        self._means.append(mean)
        if not full:
            return
        if 0 < alerts.wait_share < window["wait_share"]:
            share = window["wait_share"]
            yield Finding("wait", share, alerts.wait_share, f"{share:.0%} of the time is waited for batches")
        bound = alerts.divergence * (window["lowest"] or 0.0)
        if 0 < bound < mean:
            yield Finding("divergence", mean, bound, f"the mean loss is {mean:.4g}; it has been {window['lowest']:.4g}")
        fallen = self._means[0] - mean
        if len(self._means) > alerts.plateau_steps > 0 and fallen < alerts.plateau_improvement * abs(self._means[0]):
            words = f"the mean loss is {mean:.4g}, and was {self._means[0]:.4g} {alerts.plateau_steps} steps ago"
            yield Finding("plateau", fallen, alerts.plateau_improvement * abs(self._means[0]), words)


def _above(name: str, what: str, value: float, alerts: Alerts) -> Iterator[Finding]:
    """The finding that ``value`` is above the threshold ``name``, if that is set and it is."""
    threshold = getattr(alerts, name)
    if 0 < threshold < value:
        yield Finding(name, value, threshold, f"{what} is {value:.4g}, above {threshold:.4g}")


class AlertLog:
    """Where alerts go: the log, TensorBoard and ``alerts.jsonl``.

    Args:
        path: of ``alerts.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)

    def add(self, finding: Finding, step: int, epoch: int, metrics_logger: MetricsLogger) -> None:
        """Tells of a finding at a step."""
        logger.warning("alert %s at step %d: %s", finding.name, step, finding.message)
        self.write(finding, step, epoch, metrics_logger)

    def write(self, finding: Finding, step: int, epoch: int, metrics_logger: MetricsLogger) -> None:
        """Keeps a finding that the log has already."""
        value = math.nan if finding.value is None else finding.value
        metrics_logger.log_scalar(f"alerts/{finding.name}", value, step)
        self.journal.append({**asdict(finding), "step": step, "epoch": epoch, "time": time.time()})

    def rewind(self, step: int) -> None:
        """Drops what later steps raised, which they will raise again; alerts about anything else stay."""
        self.journal.keep(lambda entry: entry.get("name") not in NAMES or not _is_later(entry, step))


def _is_later(entry: Line, step: int) -> bool:
    return isinstance(entry.get("step"), int) and entry["step"] > step
