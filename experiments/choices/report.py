"""What the experiment on choices prints and draws."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from xpmir_uform.evaluation.choices import ChoicesEvaluation
from xpmir_uform.evaluation.relevance import RelevanceScoring
from xpmir_uform.reports.tables import table

LANGUAGE, STUDENT, TEACHER = "language of a name", "relevance, student", "relevance, teacher"
HEADER = ("held-out items", "items", "accuracy", "of the majority", "Brier", "of the majority", "calibration error")


@dataclass(frozen=True, slots=True)
class ChoicesRun:
    """The tasks of an experiment that has ended.

    Args:
        language: the evaluation of the model that tells languages.
        relevance: the evaluation of the student.
        teacher: what the student learned from.
        folder: where the picture goes, and where ``language/`` and ``relevance/`` lie.
    """

    language: ChoicesEvaluation
    relevance: ChoicesEvaluation
    teacher: RelevanceScoring
    folder: Path


def scores(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per problem: accuracy and Brier score beside those of the best constant answers."""
    rows = [
        [
            name,
            str(result["items"]),
            f"{result['accuracy']:.3f}",
            f"{result['majority']['accuracy']:.3f}",
            f"{result['brier']:.3f}",
            f"{result['majority']['brier']:.3f}",
            f"{result['calibration_error']:.3f}",
        ]
        for name, result in found.items()
    ]
    return table(HEADER, rows)


def verdict(name: str, result: Mapping[str, Any]) -> str:
    """In words: whether the choices are more often right than the majority class, and better calibrated in sum."""
    constant = result["majority"]
    right, near = result["accuracy"] > constant["accuracy"], result["brier"] < constant["brier"]
    told = {
        (True, True): "beats the majority class in accuracy and Brier score",
        (True, False): "beats the majority class in accuracy, not in Brier score",
        (False, True): "beats the majority class in Brier score, not in accuracy",
        (False, False): "does not beat the majority class",
    }
    return f"{name}: {told[right, near]}."


def plot_reliability(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws, as a PNG, how often a choice is right by how probable the model says it is; larger dots hold more."""
    figure = Figure(figsize=(4 * len(found), 4.2), layout="constrained")
    for axes, (name, result) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        curve = result["reliability"]
        told, came, counts = ([point[key] for point in curve] for key in ("told", "came", "count"))
        axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
        axes.plot(told, came, linewidth=1)
        axes.scatter(told, came, s=[20 + 200 * count / sum(counts) for count in counts])
        axes.set(title=name, xlabel="probability that the model tells", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axes.set_aspect("equal")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share that is right")
    figure.savefig(path, dpi=120)


def read(path: Path) -> dict[str, Any]:
    """What a task wrote."""
    return json.loads(Path(path).read_text())


def report(run: ChoicesRun) -> None:
    """Prints the table, the verdicts, and where the picture and the models are."""
    run.folder.mkdir(parents=True, exist_ok=True)
    found = {
        LANGUAGE: read(run.language.resultspath)[LANGUAGE],
        STUDENT: read(run.relevance.resultspath)[STUDENT],
        TEACHER: read(run.teacher.resultspath),
    }
    picture = run.folder / "reliability.png"
    plot_reliability(picture, found)
    verdicts = "\n".join(verdict(name, result) for name, result in found.items())
    print(
        f"\n{scores(found)}\n\n{verdicts}\n\nReliability: {picture}\n"
        f"Models:      {run.folder / 'language'}\n             {run.folder / 'relevance'}"
    )
