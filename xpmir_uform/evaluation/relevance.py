"""A teacher's scores of pairs as probabilities, for a student to learn.

The model is known by its method ``score(queries, documents, pairs) -> scores`` alone.

Letters: P pairs, M wrong documents of each, S scores.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from experimaestro import Constant, Meta, Param, Task, pathgenerator
from safetensors.numpy import save_file
from scipy.optimize import minimize
from scipy.special import expit
from xpm_torch import Module

from xpmir_uform.base.checked_files import new_file
from xpmir_uform.base.configuration import CheckedTask, default
from xpmir_uform.base.devices import check_device, device_of
from xpmir_uform.datasets.pairs import Pair, PairCollection
from xpmir_uform.datasets.relevance import Judgements, questions, wrong_documents
from xpmir_uform.evaluation.choices import results, truth_of


def calibrate(right: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """Slope and intercept with which ``sigmoid(slope * score + intercept)`` is the probability of being right.

    By maximum likelihood, with targets a little inside 0 and 1 so that scores that part perfectly have a finite slope
    (Platt, "Probabilistic outputs for support vector machines", 1999, section 2.2).

    Args:
        right: (S,) scores of right documents.
        wrong: (S',) of wrong ones.
    """
    scores = np.concatenate([right, wrong]).astype(np.float64)
    middle, scale = scores.mean(), scores.std() or 1.0
    scores = (scores - middle) / scale
    high, low = (len(right) + 1) / (len(right) + 2), 1 / (len(wrong) + 2)
    targets = np.repeat([high, low], [len(right), len(wrong)])

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logits = parameters[0] * scores + parameters[1]
        error = (expit(logits) - targets) / len(targets)
        return float((np.logaddexp(0, logits) - targets * logits).mean()), np.array([error @ scores, error.sum()])

    slope, intercept = minimize(loss, np.zeros(2), jac=True, method="BFGS").x
    return float(slope / scale), float(intercept - slope * middle / scale)


class RelevanceScoring(CheckedTask, Task):
    """Tells, by a model's late interaction, how probably the documents of training queries and wrong ones are relevant.

    Scores become probabilities by :func:`calibrate`, on each training pair and its first wrong document. What that is
    worth is measured on the held-out pairs.
    """

    __xpmid__ = "uform.relevance-scoring"

    model: Param[Module]
    """The teacher"""

    collection: Param[PairCollection]
    """The pairs"""

    others: Param[int] = default(4)
    """Wrong documents of each training query"""

    device: Meta[str] = default("auto")
    """Where the model runs; ``auto``: the GPU if there is one"""

    path: Annotated[Path, pathgenerator("judgements.safetensors")]
    """See :class:`~xpmir_uform.datasets.relevance.Judgements`"""

    resultspath: Annotated[Path, pathgenerator("results.json")]
    """As of ``ChoicesEvaluation``, of the held-out pairs; the slope and the intercept"""

    version: Constant[int] = 2
    """Of the rules of its measures, and of the wrong documents: 2 draws none that may be right"""

    def __validate__(self):
        if self.others < 1:
            raise ValueError(f"others is {self.others}, expected at least 1 wrong document")
        check_device(self.device)

    def __submit__(self, dep, add_action) -> Judgements:
        """The teacher's answers."""
        super().__submit__(dep, add_action)
        return dep(Judgements.C(collection=self.collection, path=self.path))

    def execute(self) -> None:
        """Writes the answers, and how right they are."""
        self.model.initialize()
        self.model.to(device_of(self.device))
        train, test = self.collection.train(), self.collection.test()
        others = wrong_documents(train, self.others)
        known, echoes = self.scores(train, others, "document"), self.scores(train, others, "query")
        slope, intercept = calibrate(known[:, 0], known[:, 1])
        told = {
            name: expit(slope * scores + intercept).astype(np.float32)
            for name, scores in (("probabilities", known), ("echoes", echoes))
        }
        with new_file(self.path):
            save_file({"others": others, **told}, self.path)
        yes = expit(slope * self.scores(test, wrong_documents(test, 1), "document") + intercept).ravel()
        found = results(np.stack([yes, 1 - yes], axis=1), truth_of(questions(test)))
        self.resultspath.write_text(json.dumps({**found, "slope": slope, "intercept": intercept}))

    def scores(self, pairs: list[Pair], others: np.ndarray, field: str) -> np.ndarray:
        """(P, 1 + M) float64: of each query with a text of its own pair and of others (P, M), in ``field``."""
        columns = np.concatenate([np.arange(len(pairs))[:, None], others], axis=1)
        listed = np.stack([np.repeat(np.arange(len(pairs)), columns.shape[1]), columns.ravel()], axis=1)
        queries, documents = ([getattr(pair, name) for pair in pairs] for name in ("query", field))
        found = self.model.score(queries, documents, pairs=torch.from_numpy(listed))
        wrong = torch.nonzero(~found.isfinite())
        if len(wrong):
            query, document = listed[int(wrong[0])]
            told = f"{queries[query][:80]!r} and {documents[document][:80]!r}"
            raise ValueError(f"the score of {told} is not finite, expected finite ones")
        return found.double().cpu().numpy().reshape(columns.shape)
