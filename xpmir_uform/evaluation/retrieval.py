"""Retrieval with a model: a task, and a listener that watches the pooled embeddings in training.

The model is known by its methods alone: ``encode(items) -> (N, d)`` and ``save_model(folder)``.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from experimaestro import Constant, Meta, Param, Task, pathgenerator
from xpm_torch import Module
from xpm_torch.learner import Learner, LearnerListener, LearnerListenerStatus
from xpm_torch.trainers.context import TrainerContext, TrainState
from xpm_torch.validation import ValidationSettings

from xpmir_uform.base.configuration import CheckedTask, default
from xpmir_uform.base.devices import check_device, device_of
from xpmir_uform.data.problems import Retrieval, RetrievalSet
from xpmir_uform.evaluation.history import read_history, write_history
from xpmir_uform.evaluation.measures import MEASURES, chance, counts_of, measure
from xpmir_uform.evaluation.rankers import PooledRanker, Ranker, pooled_ranking
from xpmir_uform.evaluation.results import write_each
from xpmir_uform.evaluation.search import UNRANKED, Order, Ranking

logger = logging.getLogger(__name__)

DEPTH = 1000


def evaluate(retrieval: Retrieval, rank: Callable[[Order, int], Ranking], depth: int) -> dict[str, Any]:
    """What is recorded of a search problem: its measures, those of chance, and each query's first documents.

    Args:
        retrieval: as it is loaded; measured is each thing once.
        rank: puts at most so many documents of each query in order.
        depth: documents that are recorded of each query that was given, by the numbers that they were given under.
    """
    problem, queries, documents = retrieval.distinct()
    order = Order.of(problem)
    random = chance(counts_of(order), DEPTH)
    best, listed = rank(order, DEPTH)
    rows = [[int(documents[number]) for number in row if number != UNRANKED] for row in best[:, :depth].tolist()]
    return {
        "measures": measure(best, problem.relevant),
        "chance": random if listed is None else chance(counts_of(order, listed), DEPTH),
        "queries": len(problem.queries),
        "documents": len(problem.documents),
        "nearest": [rows[number] for number in queries],
    }


class RetrievalValidation(LearnerListener):
    """Measures retrieval on held-out items after training epochs and keeps the best model.

    Every ``interval`` epochs, and after the last, the measures are logged as ``ID/MEASURE``; the weights of the epoch
    with the highest ``measure``, the earliest of equals, are kept. Its output is a loader of those weights.
    """

    __xpmid__ = "uform.retrieval-validation"

    may_stop = False
    """It never asks training to stop, so that a learner can say at submission which epochs there will be."""

    retrieval: Param[RetrievalSet]
    """What is searched"""

    measure: Param[str] = default("MRR")
    """The measure that decides which epoch is the best: MRR, MRR@10, R@1, R@10 or nDCG@10"""

    interval: Param[int] = default(1)
    """Epochs between two validations"""

    bestpath: Annotated[Path, pathgenerator("best")]
    """Where the best weights are"""

    historypath: Annotated[Path, pathgenerator("history.json")]
    """The measures of every validation, by epoch"""

    version: Constant[int] = 2
    """Of the rules by which documents are ordered and measured"""

    def __validate__(self):
        if self.measure not in MEASURES:
            raise ValueError(f"measure is {self.measure!r}, expected one of {', '.join(MEASURES)}")
        if self.interval < 1:
            raise ValueError(f"interval is {self.interval}, expected at least 1")

    def initialize(self, learner: Learner, context: TrainerContext) -> None:
        """Loads what is searched and what earlier runs of this task measured."""
        super().initialize(learner, context)
        self.order = Order.of(self.retrieval.load().distinct().problem)
        self.historypath.parent.mkdir(parents=True, exist_ok=True)
        self.history = read_history(self.historypath, self.measure)

    def init_task(self, learner: Learner, dep, add_action):
        """A loader of the best weights, named by what makes them the best."""
        settings = ValidationSettings.C(listener=self, key=self.measure)
        return dep(learner.model.loader_config(self.bestpath, settings=settings))

    def update_metrics(self, metrics: dict[str, float]) -> None:
        """Adds the best measures, at the end of training; validates if none was due before it was stopped."""
        if not self.history:
            self.validate(self.context.state)
        best = max(self.history.values(), key=lambda values: values[self.measure])
        metrics.update({f"{self.id}/best/{name}": value for name, value in best.items()})

    def __call__(self, state: TrainState) -> LearnerListenerStatus:
        """Validates after an epoch; asks neither to stop nor to go on."""
        due = state.epoch % self.interval == 0 or state.epoch == self.learner.max_epochs
        if due and self.context.is_global_zero():
            self.validate(state)
        return LearnerListenerStatus.NO_DECISION

    def validate(self, state: TrainState) -> None:
        """Measures, logs, keeps the weights if they are the best so far, and then records the epoch."""
        model = getattr(state.model, "_original_module", state.model)
        values = measure(pooled_ranking(model, self.order, DEPTH).best, self.order.problem.relevant)
        logger.info("epoch %d, %s: %s", state.epoch, self.id, values)
        for name, value in values.items():
            self.context.metrics_logger.log_scalar(f"{self.id}/{name}", value, state.step)
        earlier = [past[self.measure] for epoch, past in self.history.items() if int(epoch) < state.epoch]
        if all(values[self.measure] > value for value in earlier):
            self.context.copy(self.bestpath)
        self.history[str(state.epoch)] = values
        write_history(self.historypath, self.history)


class RetrievalEvaluation(CheckedTask, Task):
    """Measures a model on search problems and records its rankings.

    Submitted with a loader of weights among its init tasks it measures a trained model, without one the initial
    weights, which are a function of the model's configuration.
    """

    __xpmid__ = "uform.retrieval-evaluation"

    model: Param[Module]
    """What encodes"""

    retrievals: Param[dict[str, RetrievalSet]]
    """The search problems by name"""

    ranker: Param[Ranker] = default(factory=PooledRanker.C)
    """How documents are ordered; by default by pooled embeddings"""

    depth: Param[int] = default(10)
    """How many of each query's documents are recorded"""

    device: Meta[str] = default("auto")
    """Where the model runs; ``auto``: the GPU if there is one"""

    resultspath: Annotated[Path, pathgenerator("results.json")]
    """By problem: the measures, those of chance, and each query's nearest documents"""

    version: Constant[int] = 2
    """Of the rules by which documents are ordered and measured"""

    def __validate__(self):
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}, expected at least 1 document")
        check_device(self.device)

    def execute(self) -> None:
        """Writes the results."""
        self.model.initialize()
        self.model.to(device_of(self.device))
        write_each(self.resultspath, self.retrievals, self.evaluate)

    def evaluate(self, name: str) -> dict[str, Any]:
        """The results of one problem."""
        return evaluate(self.retrievals[name].load(), partial(self.ranker.rank, self.model), self.depth)
