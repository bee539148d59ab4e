"""What is checked of xpm-torch's own configurations before a training is submitted; it checks nothing itself."""

import re
from collections.abc import Mapping
from typing import Any

from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.optim import SGD, Adafactor, Adam, AdamW, GradientClippingHook, RegexParameterFilter
from xpm_torch.schedulers import CosineWithWarmup, LinearWithWarmup, LinearWithWarmupAndMaxEpochs

from xpmir_uform.base.configuration import CHECKS
from xpmir_uform.learner.freezing import expression
from xpmir_uform.model.precision import precision_of

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
"""Those that keep whole weights on every rank: checkpoints are written by one."""

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
MATRIX_PRECISIONS = (None, "highest", "high", "medium")
"""Of torch's ``set_float32_matmul_precision``."""


def expect(config: Any, name: str, legal: bool, words: str) -> None:
    """Raises ValueError with a field, its value and what was expected, unless it is legal."""
    if not legal:
        raise ValueError(f"{name} is {getattr(config, name)!r}, expected {words}")


def among(config: Any, name: str, known: tuple) -> None:
    """Refuses a value that is not one of those known."""
    expect(config, name, getattr(config, name) in known, f"one of {', '.join(map(str, known))}")


def check_random(config: Random) -> None:
    """The seed is one of numpy's."""
    expect(config, "seed", 0 <= config.seed < 2**32, "an integer in [0, 2**32)")


def check_fabric(config: FabricConfiguration) -> None:
    """What Fabric would refuse when the job runs, and what it would take for something else."""
    precision_of(config.precision)
    among(config, "torch_fp32_precision", MATRIX_PRECISIONS)
    among(config, "strategy", STRATEGIES)
    among(config, "accelerator", ACCELERATORS)
    expect(config, "num_nodes", config.num_nodes >= 1, "at least 1")
    numbers = re.fullmatch(r"auto|-1|[1-9]\d*|\d+(\s*,\s*\d+)*\s*,?", config.devices.strip())
    expect(config, "devices", numbers is not None, "auto, their number, or their numbers with commas")


def check_optimizer(config: Any) -> None:
    """Rates, decay and epsilon are not negative."""
    for name in ("lr", "weight_decay", "eps"):
        value = getattr(config, name, None)
        expect(config, name, value is None or 0 <= value < float("inf"), "a finite number, at least 0")


def check_filter(config: RegexParameterFilter) -> None:
    """Patterns are regular expressions, and there are some."""
    for name in ("includes", "excludes"):
        for pattern in getattr(config, name) or ():
            expression(name, pattern)
    expect(config, "includes", bool(config.includes or config.excludes), "some patterns, there or in excludes")


def check_scheduler(config: Any) -> None:
    """Steps are not negative and factors are shares."""
    expect(config, "num_warmup_steps", config.num_warmup_steps >= 0, "at least 0")
    if hasattr(config, "min_factor"):
        expect(config, "min_factor", 0 <= config.min_factor <= 1, "0 to 1")
    if hasattr(config, "num_cycles"):
        expect(config, "num_cycles", 0 < config.num_cycles < float("inf"), "a finite number above 0")
    steps = getattr(config, "total_training_steps", None)
    if steps is not None:
        expect(config, "total_training_steps", steps > config.num_warmup_steps, "more than num_warmup_steps")


def check_clipping(config: GradientClippingHook) -> None:
    """The norm is positive."""
    expect(config, "max_norm", 0 < config.max_norm < float("inf"), "a finite number above 0")


def warmup_of(scheduler: Any) -> tuple[str, int]:
    """The field that says how many steps a schedule warms up, and its value; 0 where it does not."""
    names = ("warmup_steps", "num_warmup_steps")
    return next(((name, getattr(scheduler, name)) for name in names if hasattr(scheduler, name)), ("", 0))


def check_warmup(scheduler: Any, steps: int) -> None:
    """Refuses a warm-up that a training of ``steps`` does not end.

    Raises:
        ValueError: naming the field.
    """
    name, warmup = warmup_of(scheduler)
    if warmup >= steps:
        raise ValueError(
            f"{name} is {warmup}, expected less than the {steps} steps of the training (max_epochs * steps_per_epoch): "
            "its highest rate would never be reached"
        )


FOREIGN: Mapping[type, Any] = {
    Random: check_random,
    FabricConfiguration: check_fabric,
    **dict.fromkeys((SGD, Adafactor, Adam, AdamW), check_optimizer),
    RegexParameterFilter: check_filter,
    GradientClippingHook: check_clipping,
    **dict.fromkeys((LinearWithWarmup, LinearWithWarmupAndMaxEpochs, CosineWithWarmup), check_scheduler),
}
CHECKS.update(FOREIGN)
