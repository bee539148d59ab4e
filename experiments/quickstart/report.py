"""What the quickstart prints and draws."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xpmir_uform.base import keyed_random
from xpmir_uform.datasets.emoji import EmojiCollection
from xpmir_uform.evaluation.retrieval import RetrievalEvaluation
from xpmir_uform.learner.learner import UFormLearner
from xpmir_uform.reports.curves import plot_curve, read_scalars
from xpmir_uform.reports.sheets import Found, contact_sheet
from xpmir_uform.reports.tables import table

SHOWN = ("MRR", "R@1", "R@10")
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class QuickstartRun:
    """The tasks of a quickstart that has ended.

    Args:
        learner: the task that trained.
        before: the evaluation of the initial weights.
        after: the evaluation of the trained weights.
        collection: the emoji.
        folder: where the pictures go, and where ``model/`` lies.
    """

    learner: UFormLearner
    before: RetrievalEvaluation
    after: RetrievalEvaluation
    collection: EmojiCollection
    folder: Path


def results_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Each search problem: the measures of the untrained and the trained model and of chance."""
    rows = []
    for name, result in after.items():
        sources = {"untrained": before[name]["measures"], "trained": result["measures"], "chance": result["chance"]}
        rows += [
            [f"{name.replace('-', ' -> ')}, {source}", *(f"{values[measure]:.3f}" for measure in SHOWN)]
            for source, values in sources.items()
        ]
    return table(["held-out emoji", *SHOWN], rows)


def examples(collection: EmojiCollection, nearest: list[list[int]]) -> list[Found]:
    """Five keyed queries by English name with their five nearest pictures."""
    emoji, language = collection.test(), collection.languages[0]
    # Relevance is by content: one name may be that of several pictures, and one picture that of several emoji.
    pictures: dict[str, set[bytes]] = {}
    for one in emoji:
        pictures.setdefault(one.names[language], set()).add(one.picture)
    chosen = np.sort(keyed_random.permutation(0, keyed_random.Purpose.SPLIT, 1, len(emoji))[:EXAMPLES]).tolist()
    return [
        Found(
            emoji[query].names[language],
            [emoji[number].picture for number in nearest[query][:EXAMPLES]],
            [emoji[number].picture in pictures[emoji[query].names[language]] for number in nearest[query][:EXAMPLES]],
        )
        for query in chosen
    ]


def usage(folder: Path) -> str:
    """How to use the model, in three lines of Python."""
    return (
        "from xpmir_uform import Item, load_model\n"
        f'model = load_model("{folder}")\n'
        'print(model.encode([Item.text("red apple"), Item.text("pomme rouge")]))'
    )


def report(run: QuickstartRun) -> None:
    """Prints what was trained, the table, and where the pictures and the model are."""
    run.folder.mkdir(parents=True, exist_ok=True)
    before, after = (json.loads(Path(task.resultspath).read_text()) for task in (run.before, run.after))
    curve, sheet = run.folder / "loss.png", run.folder / "examples.png"
    plot_curve(
        curve, *read_scalars(run.learner.logpath, "train/contrastive"), title="Quickstart", label="training loss"
    )
    contact_sheet(sheet, examples(run.collection, after["text-image"]["nearest"]))
    identifier = run.learner.__xpm__.identifier.all.hex()
    model = run.learner.model
    print(
        f"\nTrained {model.depth} blocks of width {model.hidden} in "
        f"{run.learner.max_epochs * run.learner.steps_per_epoch} steps of {run.learner.trainer.batch_size} bags.\n"
        f"Identifier: {identifier}\n\n{results_table(before, after)}\n\n"
        f"Loss curve: {curve}\nExamples:   {sheet}\nModel:      {run.folder / 'model'}\n\n{usage(run.folder / 'model')}"
    )
