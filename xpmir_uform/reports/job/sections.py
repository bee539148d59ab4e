"""Which panels a run has, section by section."""

from collections.abc import Mapping, Sequence

import numpy as np

from xpmir_uform.reports.job.plots import Panel
from xpmir_uform.reports.job.series import Columns, Curve, thin

PARTS = ("forward", "loss", "backward", "optimizer")
MIB = 2**20
UNITS = (("h", 3600), ("min", 60), ("s", 1))
MOST_POINTS, MOST_LAYERED = 600, 60
"""Of a curve; of stacked areas, which noise makes unreadable."""


def finite(values: np.ndarray) -> bool:
    """Whether anything of a column can be drawn."""
    return bool(np.isfinite(values).any())


def made(
    columns: Columns, title: str, label: str, values: Mapping[str, np.ndarray], most: int = MOST_POINTS, **settings
) -> list[Panel]:
    """A panel of the columns that hold a number, in at most ``most`` points; none if no column does."""
    curves = {name: thin(columns.steps, column, most) for name, column in values.items() if finite(column)}
    return [Panel(title, label, curves, **settings)] if curves else []


def training(columns: Columns, resumes: Sequence[int]) -> list[Panel]:
    """Loss, losses by name, learning rate, gradient norm, counts; ``resumes``: the steps that were gone on from."""
    losses, lost = columns.below("losses"), columns.not_finite()
    total = {"loss": columns.get("loss"), "mean of the window": columns.get("window", "loss")}
    norms = {f"{when} clipping": columns.get("gradient_norm", when) for when in ("before", "after")}
    rates = columns.below("learning_rate")
    return [
        *made(columns, "Loss", "loss", total, lost=lost, events=[(step, "resumed") for step in resumes]),
        *(made(columns, "Losses by name", "loss", losses, lost=lost) if len(losses) > 1 else []),
        *made(columns, "Learning rate", "learning rate", rates, zero=True, events=columns.phases),
        *made(columns, "Gradient norm", "global L2 norm", norms, lost=lost),
        *made(columns, "Steps counted since the start", "steps", columns.below("counts"), zero=True),
    ]


def throughput(columns: Columns) -> list[Panel]:
    """Items and tokens per second, where a step's time goes, how long the run took."""
    parts = {name: columns.get("seconds", name) for name in PARTS}
    rest = np.maximum(columns.get("seconds", "step") - np.nansum(list(parts.values()), axis=0), 0)
    spent = {"wait for the loader": columns.get("seconds", "wait"), **parts, "other": rest}
    share = {"%": 100 * columns.get("window", "wait_share")}
    passed = columns.get("time") - columns.get("time")[0]
    unit, length = next(one for one in UNITS if np.nanmax(passed, initial=0) >= 2 * one[1] or one[1] == 1)
    return [
        *made(
            columns,
            "Items per second, mean of the window",
            "items / s",
            {"items / s": columns.get("window", "items_per_second")},
            zero=True,
        ),
        *made(
            columns,
            "Tokens per second, mean of the window",
            "tokens / s",
            {"tokens / s": columns.get("window", "tokens_per_second")},
            zero=True,
        ),
        *made(columns, "Where a step's time goes", "s / step", spent, MOST_LAYERED, stacked=True),
        *made(columns, "Wait for the loader, share of the window", "% of the time", share, zero=True),
        *made(columns, "Microbatches of this rank", "per step", {"": columns.get("microbatches")}, zero=True),
        *made(columns, "Time since the first line", unit, {unit: passed / length}, zero=True),
    ]


def memory(columns: Columns) -> list[Panel]:
    """Predicted and measured memory."""
    parts = {name: column / MIB for name, column in columns.below("memory").items()}
    return made(columns, "Memory", "MiB", parts, zero=True)


def validations(histories: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Panel]:
    """The measures of each validation by epoch; ``histories``: by listener, epoch and measure."""
    panels = []
    for listener, history in histories.items():
        epochs = sorted(history, key=int)
        names = dict.fromkeys(name for epoch in epochs for name in history[epoch])
        values = {name: np.array([history[epoch].get(name, np.nan) for epoch in epochs]) for name in names}
        places = np.array([int(epoch) for epoch in epochs], dtype=np.int64)
        drawn: dict[str, Curve] = {name: thin(places, column, MOST_POINTS) for name, column in values.items()}
        if drawn:
            panels.append(Panel(f"Validation: {listener}", "measure", drawn, across="epoch", dots=True))
    return panels
