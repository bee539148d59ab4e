"""What the experiment on masked pre-training prints and draws."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xpmir_uform.base import keyed_random
from xpmir_uform.data.items import Item
from xpmir_uform.datasets.emoji import EmojiCollection
from xpmir_uform.evaluation.retrieval import RetrievalEvaluation
from xpmir_uform.learner.learner import UFormLearner
from xpmir_uform.losses.masked import MaskedLoss
from xpmir_uform.model import UFormEncoder
from xpmir_uform.reports.curves import plot_curve, read_scalars
from xpmir_uform.reports.reconstruction import draw, reconstruct, write_page
from xpmir_uform.reports.tables import table

PICTURES, TEXTS = 8, 6
MEASURE = "MRR"
NOTE = (
    "Held-out emoji, which training has not seen. Of a masked patch the model tells the standardised values; "
    "the mean and deviation are those of the patch itself."
)


@dataclass(frozen=True, slots=True)
class MaskedRun:
    """The tasks of an experiment that has ended.

    Args:
        alone: by seed, the evaluation after contrastive training alone.
        after: by seed, the evaluation after masked pre-training and the same contrastive training.
        masked: the first seed's masked training.
        model: that it trained.
        loss: of it.
        collection: the emoji.
        folder: where the pictures go.
    """

    alone: Mapping[int, RetrievalEvaluation]
    after: Mapping[int, RetrievalEvaluation]
    masked: UFormLearner
    model: UFormEncoder
    loss: MaskedLoss
    collection: EmojiCollection
    folder: Path


Measured = Mapping[int, Mapping[str, float]]
"""By seed and direction."""


def read_measures(evaluations: Mapping[int, RetrievalEvaluation]) -> dict[int, dict[str, float]]:
    """What the evaluations measured."""
    results = {seed: json.loads(Path(task.resultspath).read_text()) for seed, task in evaluations.items()}
    return {
        seed: {name: found["measures"][MEASURE] for name, found in result.items()} for seed, result in results.items()
    }


def comparison(alone: Measured, after: Measured) -> str:
    """A row per direction: the means over the seeds, each seed's gain, and how many of them are above 0."""
    rows = []
    for name in next(iter(alone.values())):
        before, behind = (np.array([found[seed][name] for seed in alone]) for found in (alone, after))
        gains = behind - before
        rows.append(
            [
                name.replace("-", " -> "),
                f"{before.mean():.3f}",
                f"{behind.mean():.3f}",
                f"{gains.mean():+.3f}",
                " ".join(f"{gain:+.3f}" for gain in gains),
                verdict(gains),
            ]
        )
    seeds = ", ".join(map(str, alone))
    header = [f"held-out {MEASURE}", "contrast alone", "after masked", "gain", f"of seeds {seeds}", "pre-training"]
    return table(header, rows)


def verdict(gains: np.ndarray) -> str:
    """``helps`` or ``harms`` where several seeds all say so, else ``undecided``."""
    if len(gains) < 2:
        return "undecided"
    if (gains > 0).all():
        return "helps"
    return "harms" if (gains < 0).all() else "undecided"


def shown_items(collection: EmojiCollection) -> list[Item]:
    """Keyed pictures and names of held-out emoji, in each language in turn."""
    emoji = collection.test()
    chosen = [emoji[number] for number in keyed_random.permutation(0, keyed_random.Purpose.SPLIT, 2, len(emoji))]
    languages = collection.languages
    names = [one.name(languages[number % len(languages)]) for number, one in enumerate(chosen[:TEXTS])]
    return [*(one.image() for one in chosen[:PICTURES]), *names]


def report(run: MaskedRun) -> None:
    """Prints the comparison and where the pictures of reconstructions are."""
    run.folder.mkdir(parents=True, exist_ok=True)
    alone, after = read_measures(run.alone), read_measures(run.after)
    (run.folder / "measures.json").write_text(json.dumps({"alone": alone, "after": after}, indent=1))
    curve = run.folder / "masked.png"
    plot_curve(curve, *read_scalars(run.masked.logpath, "train/masked"), title="Masked", label="training loss")
    shown = [reconstruct(run.model, run.loss, item) for item in shown_items(run.collection)]
    picture, page = run.folder / "reconstruction.png", run.folder / "reconstruction.html"
    draw(picture, shown, "Reconstructions of held-out emoji and names")
    write_page(page, shown, "Reconstructions of held-out emoji and names", NOTE)
    print(
        f"\n{comparison(alone, after)}\n\n'helps' or 'harms' where all of several seeds agree.\n"
        f"Loss curve: {curve}\nReconstructions: {picture}\n                 {page}"
    )
