"""The trainer: what one step of training does, for any learner of xpm-torch."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from experimaestro import Meta, Param
from xpm_torch.metrics import ScalarMetric
from xpm_torch.trainers import LossTrainer
from xpm_torch.trainers.context import TrainerContext

from xpmir_uform.data.augmentation import PictureAugmentation
from xpmir_uform.data.fields import default
from xpmir_uform.losses.base import BatchLoss, Encoded
from xpmir_uform.model import Packed, pack
from xpmir_uform.trainer.loader import LoadedStep, StepDataset, bag_ranges, collect, iterate_steps
from xpmir_uform.trainer.step import Microbatch, exact_step
from xpmir_uform.trainer.temperature import TemperatureClamp


class UFormTrainer(LossTrainer):
    """Trains on global batches of ``batch_size`` bags, exactly, whatever microbatches the batcher makes of them."""

    __xpmid__ = "uform.trainer"

    losses: Param[list[BatchLoss]]
    """The objective is their weighted sum"""

    augmentation: Param[PictureAugmentation | None] = default(None)
    """What is done to training pictures"""

    num_workers: Meta[int] = default(0, overrides=True)
    """Processes that decode; 0: the training process itself. Results do not depend on it"""

    def __validate__(self):
        names = [loss.NAME for loss in self.losses]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"losses are {names}, expected at least one loss, each kind once")

    def initialize(self, random: np.random.RandomState, context: TrainerContext) -> None:
        """Builds the model and the data set; all draws are keyed by a seed taken from ``random``."""
        super().initialize(random, context)
        self.model.initialize()
        context.add_hook(TemperatureClamp.C().instance())
        self.dataset = StepDataset(self.sampler, self.batch_size, self.model.shapes, self.augmentation)

    def iter_batches(self) -> Iterator[LoadedStep]:
        """The global batches from the context's step on: resuming is setting that integer."""
        return iterate_steps(self.dataset, self.context.state.steps, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is drawn is a function of the seed and the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def process_batch(self, batch: LoadedStep) -> None:
        """Adds the gradient of the whole global batch to the parameters and logs its losses."""
        self.batcher_worker.process_withreplay(bag_ranges(batch.batch), partial(self._run, batch))

    def _run(self, step: LoadedStep, parts: Iterator[Sequence[range]], count: int) -> None:
        self.context.state.optimizer.zero_grad()
        values = exact_step(
            self._forward,
            self._backward,
            [self._microbatch(step, bags) for bags in parts],
            self.losses,
            step.batch,
        )
        items = len(step.segments)
        for name, value in values.items():
            self.context.add_metric(ScalarMetric(name, value.value.item(), items))
            for key, number in value.stats.items():
                self.context.add_metric(ScalarMetric(f"{name}/{key}", number, items))

    def _microbatch(self, step: LoadedStep, bags: Sequence[range]) -> Microbatch:
        numbers = torch.tensor([number for bag in bags for number in bag])
        return Microbatch(pack(collect(step, bags)).to(self.model.device), numbers)

    def _forward(self, packed: Packed) -> Encoded:
        outputs = self._fabric_model(packed)
        return Encoded(outputs.embeddings, outputs.inverse_temperature, outputs.bias)

    def _backward(self, value: torch.Tensor) -> None:
        self.context.backward(self.context.state.optimizer.scale(value))
