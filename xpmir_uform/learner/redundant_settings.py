"""Settings that say what leaving them out says, or nothing: with them one training would have two identifiers."""

from collections.abc import Iterator
from typing import Any

from xpmir_uform.losses.forms import RankedForm
from xpmir_uform.losses.late_interaction import LateInteractionLoss
from xpmir_uform.losses.masked import PATCHES, MaskedLoss
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
    """Each such setting, and what it repeats, or why nothing comes of it."""
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
    for name, why in _idle_moves(learner.model):
        if augmentation is not None and _given(augmentation, name):
            yield f"{name} of the augmentation is {getattr(augmentation, name)}", why
    width = getattr(getattr(learner.model, "pooled", None), "width", None)
    for loss in getattr(trainer, "losses", ()):
        if width is not None and getattr(loss, "matryoshka_dimensions", None) == [width]:
            yield f"matryoshka_dimensions is [{width}]", "is the whole embedding"
        for name, why in _idle(loss, learner.model):
            if _given(loss, name):
                yield f"{name} of the {loss.NAME} loss is {getattr(loss, name)}", why


def _idle_moves(model: Any) -> Iterator[tuple[str, str]]:
    """The fields of an augmentation that change nothing, and why."""
    if not any(_reads(model, name) for name in ("image", "video")):
        yield from ((name, "changes pictures and videos, which the model does not read") for name in ("shift", "noise"))
    if not _reads(model, "audio"):
        yield from ((name, "changes sounds, which the model does not read") for name in ("hiss", "delay"))


def _idle(loss: Any, model: Any) -> Iterator[tuple[str, str]]:
    """The fields of a loss that change nothing, and why."""
    if isinstance(loss, LateInteractionLoss) and isinstance(loss.form, RankedForm):
        yield "bias", "the ranked form, of differences of scores, does not know"
    if not isinstance(loss, MaskedLoss):
        return
    if loss.token_mask_probability == 0:
        for name in ("token_mean_span", "replace_fraction", "random_fraction", "text_weight"):
            yield name, "changes nothing where token_mask_probability is 0"
    for name in PATCHES:
        if not _reads(model, name):
            yield f"{name}_mask_ratio", f"is of {name}, which the model does not read"
            yield f"{name}_weight", f"is of {name}, which the model does not read"
        elif getattr(loss, f"{name}_mask_ratio") == 0:
            yield f"{name}_weight", f"changes nothing where {name}_mask_ratio is 0"


def _reads(model: Any, modality: str) -> bool:
    """Whether a model reads a modality, as far as its configuration tells."""
    return getattr(model, modality, True) is not None


def _given(config: Any, name: str) -> bool:
    """Whether a field has another value than its default."""
    return getattr(config, name) != type(config).__xpmtype__.arguments[name].default


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
    if _given(rate, "lr"):
        yield f"an optimizer's lr is {rate.lr}", "the schedule's learning_rate replaces"


def _identifier(config: Any) -> Any:
    return config.__xpm__.identifier.all
