"""What the multimodal experiment prints and draws."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from xpmir_uform.evaluation.retrieval import RetrievalEvaluation
from xpmir_uform.learner.learner import UFormLearner
from xpmir_uform.reports.curves import plot_curve, read_scalars
from xpmir_uform.reports.tables import table

GOAL = 3
"""Times chance that each direction is to reach."""

MEASURE = "MRR"

Results = Mapping[str, Mapping[str, Any]]
"""What an evaluation wrote: by ``queries-documents`` the measures and those of chance."""


@dataclass(frozen=True, slots=True)
class MultimodalRun:
    """The tasks of a multimodal experiment that has ended.

    Args:
        learner: the task that trained.
        before: the evaluation of the initial weights.
        after: the evaluation of the trained weights.
        folder: where the pictures go, and where ``model/`` lies.
    """

    learner: UFormLearner
    before: RetrievalEvaluation
    after: RetrievalEvaluation
    folder: Path


def arrow(name: str) -> str:
    """How a direction is written."""
    return name.replace("-", " -> ")


def times_chance(result: Mapping[str, Any]) -> float:
    """How many times the MRR of chance a direction reaches."""
    return result["measures"][MEASURE] / result["chance"][MEASURE]


def directions_table(before: Results, after: Results) -> str:
    """Each direction: the MRR untrained, trained and of chance, times chance, R@10, and whether it misses the goal."""
    rows = [
        [
            arrow(name),
            *(f"{values[MEASURE]:.3f}" for values in (before[name]["measures"], result["measures"], result["chance"])),
            f"{times_chance(result):.1f}",
            f"{result['measures']['R@10']:.3f}",
            "" if times_chance(result) >= GOAL else f"below {GOAL} times",
        ]
        for name, result in after.items()
    ]
    return table(["held-out emoji", "untrained", "trained", "chance", "times", "R@10", ""], rows)


def verdict(after: Results) -> str:
    """Whether every direction reaches the goal, and which do not."""
    missed = [arrow(name) for name, result in after.items() if times_chance(result) < GOAL]
    if not missed:
        return f"All {len(after)} directions reach {GOAL} times the MRR of chance."
    return f"{len(missed)} of {len(after)} directions miss {GOAL} times the MRR of chance: {', '.join(missed)}."


def plot_directions(path: Path, after: Results) -> None:
    """Draws the MRR of every direction as a square of cells: queries down, documents across."""
    names = list(dict.fromkeys(part for name in after for part in name.split("-")))
    cells = np.full((len(names), len(names)), np.nan)
    for name, result in after.items():
        queries, _, documents = name.partition("-")
        cells[names.index(queries), names.index(documents)] = result["measures"][MEASURE]
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.add_subplot(title="MRR of held-out emoji", xlabel="documents", ylabel="queries")
    ticks = range(len(names))
    axes.set(xticks=ticks, yticks=ticks, xticklabels=names, yticklabels=names)
    figure.colorbar(axes.imshow(cells, cmap="Blues", vmin=0))
    for row, column in zip(*np.nonzero(~np.isnan(cells)), strict=True):
        dark = cells[row, column] > 0.6 * np.nanmax(cells)
        axes.text(
            column, row, f"{cells[row, column]:.3f}", ha="center", va="center", color="white" if dark else "black"
        )
    figure.savefig(path, dpi=120)


def report(run: MultimodalRun) -> None:
    """Prints what was trained, the table, and where the pictures and the model are."""
    run.folder.mkdir(parents=True, exist_ok=True)
    before, after = (json.loads(Path(task.resultspath).read_text()) for task in (run.before, run.after))
    curve, square = run.folder / "loss.png", run.folder / "directions.png"
    plot_curve(
        curve, *read_scalars(run.learner.logpath, "train/contrastive"), title="Multimodal", label="training loss"
    )
    plot_directions(square, after)
    model = run.learner.model
    print(
        f"\nTrained {model.depth} blocks of width {model.hidden} in "
        f"{run.learner.max_epochs * run.learner.steps_per_epoch} steps of {run.learner.trainer.batch_size} bags.\n"
        f"Identifier: {run.learner.__xpm__.identifier.all.hex()}\n\n{directions_table(before, after)}\n\n"
        f"{verdict(after)}\n\n"
        f"Loss curve: {curve}\nDirections: {square}\nModel:      {run.folder / 'model'}"
    )
