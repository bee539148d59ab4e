"""Settings that say what leaving them out says: with them one training would have two identifiers."""

from collections.abc import Iterator
from typing import Any

from xpmir_uform.trainer.schedule import CosineSchedule

FP32_PRECISION = {"16-mixed": "medium", "bf16-mixed": "medium"}
"""What xpm-torch 0.3.1 takes an absent ``torch_fp32_precision`` for; "high" with every other precision."""


def refuse_redundant(learner: Any) -> None:
    """Refuses what changes the identifier of a learner and not the training.

    Raises:
        ValueError: naming the first such setting.
    """
    for setting, meaning in redundant(learner):
        raise ValueError(
            f"{setting}, which {meaning}: leave it out, since the same training would have another identifier with it"
        )


def redundant(learner: Any) -> Iterator[tuple[str, str]]:
    """Each such setting, and what it repeats."""
    yield from _of_trainer(learner)
    for optimizer in learner.optimizers:
        yield from _of_optimizer(optimizer, learner)
    fabric = learner.fabric_config
    if fabric.torch_fp32_precision == FP32_PRECISION.get(fabric.precision, "high"):
        yield (
            f"torch_fp32_precision is {fabric.torch_fp32_precision!r}",
            f"is what {fabric.precision} means without it",
        )


def _of_trainer(learner: Any) -> Iterator[tuple[str, str]]:
    trainer = learner.trainer
    if trainer.model is not None and trainer.model is learner.model:
        yield "the trainer's model is given", "is the learner's"
    augmentation = getattr(trainer, "augmentation", None)
    if augmentation is not None and _identifier(augmentation) == _identifier(type(augmentation)()):
        yield "augmentation is given without a setting", "changes nothing"
    width = getattr(getattr(learner.model, "pooled", None), "width", None)
    for loss in getattr(trainer, "losses", ()):
        if width is not None and getattr(loss, "matryoshka_dimensions", None) == [width]:
            yield f"matryoshka_dimensions is [{width}]", "is the whole embedding"


def _of_optimizer(optimizer: Any, learner: Any) -> Iterator[tuple[str, str]]:
    if optimizer.module is not None and optimizer.module is learner.model:
        yield "an optimizer's module is given", "is the learner's model"
    schedule = optimizer.scheduler
    if not isinstance(schedule, CosineSchedule):
        return
    steps = learner.max_epochs * learner.steps_per_epoch
    if schedule.steps == steps:
        yield f"the schedule's steps is {steps}", "is the length of the training"
    rate = optimizer.optimizer
    if getattr(rate, "lr", None) != type(rate).__xpmtype__.arguments["lr"].default:
        yield f"an optimizer's lr is {rate.lr}", "the schedule's learning_rate replaces"


def _identifier(config: Any) -> Any:
    return config.__xpm__.identifier.all
