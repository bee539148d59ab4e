"""How right a model's choices are, and how well it knows.

The model is known by its method ``choose(items) -> probabilities`` alone.

Letters: N items, K choices of each, B bins.
"""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from experimaestro import Constant, Meta, Param, Task, pathgenerator
from xpm_torch import Module

from xpmir_uform.base.configuration import CheckedTask, default
from xpmir_uform.base.devices import check_device, device_of
from xpmir_uform.data.items import Item
from xpmir_uform.data.problems import ChoiceSet
from xpmir_uform.evaluation.results import write_each

BINS = 10


def accuracy(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """The share of items whose likeliest choice is the right one, one of t equals by 1 / t of a hit; both (N, K)."""
    told, right = (table == table.max(1, keepdims=True) for table in (probabilities, truth))
    return float(((told & right).sum(1) / told.sum(1)).mean())


def brier(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """The mean over items of the summed squared differences, 0 to 2 (Brier, 1950, equation 2); both (N, K)."""
    return float(np.square(probabilities - truth).sum(1).mean())


def reliability(probabilities: np.ndarray, truth: np.ndarray, bins: int = BINS) -> list[dict[str, float]]:
    """Of all N K probabilities, by bins of equal width that are not empty: count, mean, and the share that is right."""
    told, came = probabilities.ravel(), truth.ravel()
    numbers = np.minimum((told * bins).astype(np.int64), bins - 1)
    return [
        {"count": int(here.sum()), "told": float(told[here].mean()), "came": float(came[here].mean())}
        for here in (numbers == number for number in range(bins))
        if here.any()
    ]


def calibration_error(curve: list[dict[str, float]]) -> float:
    """The mean distance of told and came, over all probabilities (Naeini et al., AAAI 2015, ECE)."""
    total = sum(point["count"] for point in curve)
    return sum(point["count"] * abs(point["told"] - point["came"]) for point in curve) / total


def majority(truth: np.ndarray) -> dict[str, float]:
    """What the best constant answers reach: the commonest choice, and the frequencies as probabilities; of (N, K)."""
    constant = np.broadcast_to(truth.mean(0), truth.shape)
    return {"accuracy": accuracy(constant, truth), "brier": brier(constant, truth)}


def results(probabilities: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """What is recorded of choices.

    Args:
        probabilities: (N, K).
        truth: (N, K), 1 for the right choice of each item and else 0.
    """
    curve = reliability(probabilities, truth)
    return {
        "items": len(truth),
        "accuracy": accuracy(probabilities, truth),
        "brier": brier(probabilities, truth),
        "calibration_error": calibration_error(curve),
        "majority": majority(truth),
        "reliability": curve,
    }


def truth_of(items: Sequence[Item]) -> np.ndarray:
    """(N, K): the targets of items that offer equally many choices."""
    return np.array([item.targets for item in items])


class ChoicesEvaluation(CheckedTask, Task):
    """Measures a model's choices of held-out items.

    Submitted with a loader of weights among its init tasks it measures a trained model.
    """

    __xpmid__ = "uform.choices-evaluation"

    model: Param[Module]
    """What chooses"""

    problems: Param[dict[str, ChoiceSet]]
    """The items by the name of the problem"""

    device: Meta[str] = default("auto")
    """Where the model runs; ``auto``: the GPU if there is one"""

    resultspath: Annotated[Path, pathgenerator("results.json")]
    """By problem: accuracy, Brier score, those of the best constant answers, and the reliability curve"""

    version: Constant[int] = 2
    """Of the rules of its measures"""

    def __validate__(self):
        check_device(self.device)

    def execute(self) -> None:
        """Writes the results."""
        self.model.initialize()
        self.model.to(device_of(self.device))
        write_each(self.resultspath, self.problems, self.evaluate)

    def evaluate(self, name: str) -> dict[str, Any]:
        """The results of one problem."""
        # In an order of their own, so that what is summed over them does not depend on that of the data set.
        key = attrgetter("modality", "content", "choices", "targets")
        items = sorted(self.problems[name].load(), key=key)
        rows = torch.stack(self.model.choose(items))
        wrong = torch.nonzero(~rows.isfinite().all(dim=1))
        if len(wrong):
            raise ValueError(f"the probabilities of {items[int(wrong[0])]} are not finite, expected finite ones")
        return results(rows.double().cpu().numpy(), truth_of(items))
