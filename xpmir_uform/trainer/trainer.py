"""The trainer: what one step of training does, for any learner of xpm-torch."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from experimaestro import Meta, Param
from xpm_torch.batchers import Batcher
from xpm_torch.metrics import ScalarMetric
from xpm_torch.trainers import LossTrainer
from xpm_torch.trainers.context import TrainerContext

from xpmir_uform.base.configuration import check_least, default
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.batching.bag_sizes import BagSize
from xpmir_uform.batching.batcher import UFormBatcher, UFormBatcherWorker
from xpmir_uform.data.batch.validation import check_choice_counts
from xpmir_uform.data.decoding.augmentation import Augmentation
from xpmir_uform.data.decoding.segment import blank_text
from xpmir_uform.data.sampling import check_size, known_size
from xpmir_uform.losses.base import Answers, BatchLoss, LossValue
from xpmir_uform.model import pack
from xpmir_uform.trainer.foreign_modules import (
    buffers_of,
    leave_buffers_alone,
    refuse_batch_statistics,
    refuse_changed_buffers,
    seeded,
)
from xpmir_uform.trainer.hooks import TemperatureClamp
from xpmir_uform.trainer.loader import LoadedStep, StepDataset, iterate_steps
from xpmir_uform.trainer.step.collectives import Ranks
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step
from xpmir_uform.trainer.step.timing import Watch

logger = logging.getLogger(__name__)


def name_of(value: Any) -> str:
    """How a message names the class of a configuration or of an instance of it."""
    return type(value).__qualname__.partition(".")[0]


def check_heads(losses: Sequence[BatchLoss], model: Any) -> None:
    """Refuses losses that need a head which the model lacks.

    Args:
        model: a ``UFormEncoder``, or its configuration.

    Raises:
        ValueError: naming the loss and the head.
    """
    for loss in losses:
        for head in loss.HEADS:
            if getattr(model, head, True) is None:
                raise ValueError(
                    f"{name_of(loss)} needs the head {head!r} and the model has none: give the model {head}=..."
                )


def check_widths(losses: Sequence[BatchLoss], model: Any) -> None:
    """Refuses Matryoshka levels that are wider than the embeddings of a model.

    Raises:
        ValueError: naming the levels and the width.
    """
    width = getattr(getattr(model, "pooled", None), "width", None)
    for loss in losses:
        levels = getattr(loss, "matryoshka_dimensions", ())
        if width is not None and levels and max(levels) > width:
            raise ValueError(
                f"matryoshka_dimensions is {list(levels)}, expected at most the width of the pooled head, {width}"
            )


def limits_of(losses: Sequence[BatchLoss]) -> dict[str, int]:
    """The hard limits of a microbatch that losses set, by the name of a column of the sizes of bags."""
    return {name: limit for loss in losses for name, limit in loss.limits().items()}


def check_limits(losses: Sequence[BatchLoss], batcher: Any) -> None:
    """Refuses losses that need a limit which the batch shape does not set.

    Args:
        batcher: a batcher, or its configuration.

    Raises:
        ValueError: naming the loss and what to write.
    """
    shape = getattr(batcher, "shape", None)
    for loss in losses:
        for limit in loss.LIMITS:
            if not getattr(shape, limit, 0):
                raise ValueError(
                    f"{name_of(loss)} needs the limit {limit!r} and the batcher has none: give the trainer "
                    f"batcher=UFormBatcher.C(shape=BatchShape.C({limit}=...))"
                )
    bounded = limits_of(losses)
    if bounded and not isinstance(batcher, UFormBatcher):
        raise ValueError(
            f"the losses bound {', '.join(bounded)} of a microbatch and {name_of(batcher)} "
            "honours no such limit: give the trainer batcher=UFormBatcher.C()"
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did.

    Args:
        values: every loss over the whole batch.
        seconds: spent in the forward passes, the joint losses and the backward passes.
        microbatches: of this rank.
        items: of the whole batch.
        bytes: of their contents.
        tokens: of this rank's items, answer slots among them.
    """

    values: Mapping[str, LossValue]
    seconds: Mapping[str, float]
    microbatches: int
    items: int
    bytes: int
    tokens: int


class UFormTrainer(LossTrainer):
    """Trains on global batches of ``batch_size`` bags, exactly, whatever microbatches and ranks they are split into."""

    __xpmid__ = "uform.trainer"

    losses: Param[list[BatchLoss]]
    """The objective is their weighted sum"""

    augmentation: Param[Augmentation | None] = default(None)
    """What is done to training items"""

    batcher: Meta[Batcher] = default(factory=UFormBatcher.C, overrides=True)
    """What is run at once on a device. Results do not depend on it, beyond rounding"""

    num_workers: Meta[int] = default(0, overrides=True)
    """Processes that decode; 0: the training process itself. Results do not depend on it"""

    def __validate__(self):
        names = [loss.NAME for loss in self.losses]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"losses are {names}, expected at least one loss, each kind once")
        check_least(1, batch_size=self.batch_size)
        check_least(0, num_workers=self.num_workers)
        check_limits(self.losses, self.batcher)
        source = getattr(self.sampler, "source", None)
        if source is not None and (count := known_size(source)) is not None:
            check_size(count, self.batch_size)

    def initialize(self, random: np.random.RandomState, context: TrainerContext) -> None:
        """Builds the model and the data set; all draws are keyed by a seed taken from ``random``."""
        super().initialize(random, context)
        check_heads(self.losses, self.model)
        check_limits(self.losses, self.batcher)
        self.model.initialize()
        context.add_hook(TemperatureClamp.C().instance())
        self.ranks = Ranks(context.fabric.global_rank, context.fabric.world_size, context.fabric.device)
        self.dataset = StepDataset(
            self.sampler,
            self.batch_size,
            self.model.shapes,
            self.losses,
            self.augmentation,
            self.ranks.rank,
            self.ranks.count,
        )
        self.last: StepReport | None = None
        if isinstance(self.batcher_worker, UFormBatcherWorker):
            self.batcher_worker.limits = limits_of(self.losses)

    def pre_train_setup(self, fabric) -> None:
        """Lets the batcher measure the model before it is wrapped."""
        self.batcher_worker.pre_train_setup(probe_fn=self.probe, fabric=fabric)
        self.context.state.optimizer.zero_grad()

    def probe(self, lengths: Sequence[int]) -> None:
        """One forward and backward pass over texts of these lengths, on the model as it is now."""
        compared = any("tokens" in loss.HEADS for loss in self.losses)
        blanks = [replace(blank_text(length), kept=length if compared else 0) for length in lengths]
        packed = pack(blanks).to(self.model.device)
        with self.context.fabric.autocast():
            answers = Answers(*self.model(packed)[1:])
        torch.stack([tensor.sum() for tensor in answers.tensors()]).sum().backward()

    def iter_batches(self) -> Iterator[LoadedStep]:
        """The global batches from the context's step on: resuming is setting that integer."""
        return iterate_steps(self.dataset, self.context.state.steps, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """What the batcher has learned; what is drawn is a function of the seed and the step."""
        worker = self.batcher_worker
        return {"batcher": worker.state_dict()} if isinstance(worker, UFormBatcherWorker) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave; another batcher than then begins afresh."""
        if isinstance(self.batcher_worker, UFormBatcherWorker) and "batcher" in state:
            self.batcher_worker.load_state_dict(state["batcher"])

    def process_batch(self, batch: LoadedStep) -> None:
        """Adds the gradient of the whole global batch to the parameters and logs its losses.

        Raises:
            ValueError: an item offers more choices than the batch shape allows; the message names it.
        """
        most = getattr(getattr(self.batcher, "shape", None), "max_choices_per_item", 0)
        if most:
            check_choice_counts(batch.batch, most)
        if self.ranks.rank == 0:
            for message in batch.unreadable:
                logger.warning("step %d goes on without an item: %s", batch.number, message)
        self.batcher_worker.process_withreplay(batch.bags, partial(self.step, batch))

    def step(self, loaded: LoadedStep, parts: Iterator[Sequence[BagSize]], count: int) -> None:
        """The exact step in ``count`` microbatches; called again with smaller ones when memory runs out."""
        self.context.state.optimizer.zero_grad()
        several = self.ranks.count > 1
        share = Share(
            loaded.batch,
            loaded.shares,
            [self.microbatch(loaded, bags) for bags in parts if bags],
            closing=Microbatch(pack([blank_text(1)]), torch.zeros(0, dtype=torch.int64)) if several else None,
            kept=[segment.kept for segment in loaded.segments],
        )
        watch = Watch(self.model.device)
        engine = Engine(self.forward, self.backward, self.ranks, self.unsynchronised, watch)
        with self.exactly():
            values = exact_step(engine, share, self.losses)
        self.last = StepReport(
            values,
            watch.seconds(),
            microbatches=len(share.microbatches),
            items=len(loaded.batch),
            bytes=len(loaded.batch.contents.data),
            tokens=sum(sum(bag.lengths) for bag in loaded.bags),
        )
        if self.sampler.on_bad_item == "skip":
            self.context.add_metric(ScalarMetric("unreadable_items", len(loaded.unreadable), 1))
        total = sum(loss.weight * values[loss.NAME].value.item() for loss in self.losses)
        self.context.add_metric(ScalarMetric("loss", total, len(loaded.batch)))
        for name, value in values.items():
            self.context.add_metric(ScalarMetric(name, value.value.item(), len(loaded.batch)))
            for key, number in value.stats.items():
                self.context.add_metric(ScalarMetric(f"{name}/{key}", number, len(loaded.batch)))

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Around a step: the first one of a process tells whether the model is one that the exact step can train."""
        if self.last is not None:
            yield
            return
        refuse_batch_statistics(self.model)
        leave_buffers_alone(self._fabric_model)
        before = buffers_of(self.model)
        yield
        refuse_changed_buffers(self.model, before)

    def microbatch(self, loaded: LoadedStep, bags: Sequence[BagSize]) -> Microbatch:
        """Some bags of this rank, ready for the model."""
        numbers = [number for bag in bags for number in bag.items]
        draw = generator(self.sampler.seed, Purpose.DROPOUT, loaded.number, bags[0].key)
        return Microbatch(
            pack(loaded.collect(numbers)),
            torch.tensor(numbers),
            loaded.questions(numbers),
            int(draw.integers(2**63)),
        )

    def forward(self, microbatch: Microbatch) -> Answers:
        """The model, wrapped by Fabric, on one microbatch; what it draws from the global generators is keyed."""
        with seeded(microbatch.seed, self.model.device):
            outputs = self._fabric_model(microbatch.packed.to(self.model.device))
        return Answers(*outputs[1:])

    def backward(self, value: torch.Tensor) -> None:
        """Adds a gradient; the factor undoes the mean that data-parallel strategies take over ranks."""
        self.context.backward(self.context.state.optimizer.scale(value * self.ranks.count))

    def unsynchronised(self) -> AbstractContextManager:
        """Within it gradients stay on this rank."""
        return self.context.fabric.no_backward_sync(self._fabric_model)
