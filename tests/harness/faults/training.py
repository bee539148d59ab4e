"""The training that every fault happens to: twelve steps of a small model over numbers, a second at most.

K keys of the items of a step
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from experimaestro import Constant, Meta, taskglobals
from experimaestro.xpmutils import DirectoryContext
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.context import InitializationHook
from xpm_torch.learner import LearnerListener
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import default
from xpmir_uform.losses.base import LossValue

EPOCHS, STEPS, BATCH = 3, 4, 4
LAST = EPOCHS * STEPS
BAGS = 12

append = os.write
"""The system's own, whatever an injection puts in its place."""


class Numbers(BagSource):
    """A number in words and digits; in version 2 the words are others."""

    __xpmid__ = "test.fault-numbers"

    version: Meta[int] = default(1)
    bad: ClassVar[Callable[[int, int], None]] = staticmethod(lambda index, epoch: None)
    """Called before each bag is made, in the process that loads"""

    def __len__(self):
        return BAGS

    def bag(self, index, seed, epoch):
        """The bag of one number."""
        self.bad(index, epoch)
        words = "number" if self.version == 1 else "figure"
        return Bag.alike([Item.text(f"{words} {index}"), Item.text(f"{index} {epoch}", key=100 + index)])


class Acts(StepTrainingHook, InitializationHook):
    """What is done to a run: before a step by its number, before step 0 while it begins, and to its loss."""

    __xpmid__ = "test.fault-acts"
    version: Constant[str] = "1"

    before_step: ClassVar[dict[int, Callable[[], object]]] = {}
    in_forward: ClassVar[dict[int, Callable[[], object]]] = {}
    loss: ClassVar[dict[int, float]] = {}
    gradient: ClassVar[dict[int, float]] = {}
    factor: ClassVar[float] = 1.0

    def before(self, state):
        """Called before each step, and before the model is made."""
        self.before_step.get(state.steps, lambda: None)()
        Acts.factor = self.loss.get(state.steps, 1.0)
        self.handle = None
        if state.steps in self.gradient:
            value = self.gradient[state.steps]
            parameter = next(iter(state.trainer.model.parameters()))
            self.handle = parameter.register_hook(lambda gradient: gradient * value)

    def after(self, state):
        """Called after each step."""
        if getattr(self, "handle", None) is not None:
            self.handle.remove()


class ActedLoss(ContrastiveLoss):
    """The contrastive loss, times what :class:`Acts` says."""

    __xpmid__ = "test.fault-loss"

    def compute(self, *args):
        """The loss of one step."""
        value = super().compute(*args)
        return LossValue(value.value * Acts.factor, value.stats)


class Best(LearnerListener):
    """Keeps the newest checkpoint of all epochs under another name, as a validation does with the best."""

    __xpmid__ = "test.fault-best"

    def __call__(self, state):
        """Called after each epoch."""
        self.context.copy(self.learner.logpath.parent / "best")
        return super().__call__(state)


class WatchedTrainer(UFormTrainer):
    """Writes down the items of each step that is made: a line ``{"step": t, "keys": [K numbers]}``."""

    __xpmid__ = "test.fault-trainer"

    seen: ClassVar[int | None] = None
    """An open file"""

    def process_batch(self, batch):
        """One step."""
        step = self.context.state.steps
        if self.seen is not None and self.ranks.rank == 0:
            append(
                self.seen, json.dumps({"step": step, "keys": [int(key) for key in batch.batch.keys]}).encode() + b"\n"
            )
        Acts.in_forward.get(step, lambda: None)()
        super().process_batch(batch)


def config(
    devices=1, workers=0, precision="32-true", epochs=EPOCHS, batch_size=BATCH, rate=1e-2, version=1, width=16,
    hooks=(), **params,
):  # fmt: skip
    """The configuration of every run; a checkpoint after each step."""
    return UFormLearner.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=width), seed=3),
        trainer=WatchedTrainer.C(
            sampler=BagSampler.C(source=Numbers.C(version=version)),
            batch_size=batch_size,
            losses=[ActedLoss.C()],
            num_workers=workers,
        ),
        max_epochs=epochs,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=rate, warmup_steps=2)),
        hooks=[Acts.C(), *hooks],
        fabric_config=FabricConfiguration.C(precision=precision, accelerator="cpu", devices=str(devices)),
        **{"listeners": [], "checkpoint_steps": 1, **params},
    )


def execute(made: Any, job: Path) -> None:
    """Executes a task as its job would."""
    torch.set_num_threads(1)
    taskglobals.Env.instance().taskpath = job
    made.instance(context=DirectoryContext(job)).execute()
