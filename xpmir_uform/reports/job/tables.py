"""The tables of a report: what is said in words and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xpmir_uform.reports.job.formatting import duration, moment, number, size, text
from xpmir_uform.reports.job.series import Columns

MOST_ROWS = 300


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of the page."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tiles(columns: Columns, alerts: Sequence[Mapping[str, Any]], finished: bool) -> list[tuple[str, str]]:
    """The facts that are looked for first."""
    newest = columns.newest
    window, counts, parameters = (newest.get(name) or {} for name in ("window", "counts", "parameters"))
    peak = columns.get("memory", "peak")
    return [
        ("Step", f"{number(newest['step'])} ({number(newest.get('percent'), '%')})"),
        ("Epoch", number(newest.get("epoch"))),
        ("Time left", "nothing" if finished else duration(newest.get("eta_seconds"))),
        ("Loss, mean of the window", number(window.get("loss"))),
        ("Items per second", number(window.get("items_per_second"))),
        ("Tokens per second", number(window.get("tokens_per_second"))),
        ("Wait for the loader", number(100 * columns.get("window", "wait_share")[-1], "%")),
        ("Peak memory", size(np.nanmax(peak)) if np.isfinite(peak).any() else "not recorded"),
        ("Parameters", f"{number(parameters.get('trainable'))} of {number(parameters.get('total'))} train"),
        ("Steps skipped", number(counts.get("skipped"))),
        ("NaN / inf", f"{number(counts.get('nan'))} / {number(counts.get('inf'))}"),
        ("Alerts", number(len(alerts))),
    ]


def notes(columns: Columns) -> list[str]:
    """What a reader must know to trust the rest."""
    lines, missing = len(columns.steps), columns.missing()
    repeated = lines - len(np.unique(columns.steps))
    inside = np.nansum([columns.get("seconds", name) for name in ("step", "wait")])
    between = columns.get("time")[-1] - columns.get("time")[0]
    faults = [f"{count:,} {what}" for count, what in ((missing, "without a line"), (repeated, "repeated")) if count]
    return [
        f"{lines:,} {'line' if lines == 1 else 'lines'} of telemetry, of the steps {columns.steps[0]:,} to "
        f"{columns.steps[-1]:,}: " + (f"{' and '.join(faults)}." if faults else "each step has its line."),
        f"{duration(between)} from the first line to the newest; {duration(inside)} went into steps and the wait for "
        "their batches, the rest into validation, checkpoints and interruptions.",
    ]


def alert_grid(alerts: Sequence[Mapping[str, Any]]) -> Grid:
    """Every field of the newest alerts, newest first."""
    shown = list(alerts)[-MOST_ROWS:][::-1]
    header = list(dict.fromkeys(key for alert in shown for key in alert))
    words = {"time": moment}
    rows = [
        ["" if (value := alert.get(key)) is None else words.get(key, text)(value) for key in header] for alert in shown
    ]
    note = (
        f"The newest {MOST_ROWS} of {len(alerts):,} alerts; alerts.jsonl holds all." if len(alerts) > MOST_ROWS else ""
    )
    return Grid(header, rows, note)


def statistic_grid(columns: Columns) -> Grid:
    """Newest, least and greatest value of each statistic."""
    rows = []
    for name, column in columns.below("stats").items():
        finite = column[np.isfinite(column)]
        found = (finite[-1], finite.min(), finite.max()) if len(finite) else (None, None, None)
        rows.append([name, *map(number, found)])
    return Grid(["statistic", "newest", "least", "greatest"], rows)


def parameter_grid(columns: Columns) -> Grid:
    """Parameter counts; each frozen group."""
    counts = columns.newest.get("parameters") or {}
    rows = [[name, number(counts[name])] for name in ("total", "trainable") if name in counts]
    rows += [[f"frozen: {group}", number(count)] for group, count in (counts.get("frozen") or {}).items()]
    return Grid(["parameters", "count"], rows)
