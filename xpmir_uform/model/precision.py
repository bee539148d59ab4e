"""The precisions of a training: the type that parameters are held in, and the one that a pass computes in."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call


class Precision(NamedTuple):
    """Types of a training.

    Args:
        held: of parameters, gradients and optimizer state.
        computed: of the activations where it is another one; None: ``held``.
        autocast: whether torch chooses between both, operation by operation; else all is computed in ``computed``.
    """

    held: torch.dtype
    computed: torch.dtype | None = None
    autocast: bool = False


PRECISIONS: Mapping[str, Precision] = {
    "32-true": Precision(torch.float32),
    "64-true": Precision(torch.float64),
    "bf16-true": Precision(torch.float32, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16, autocast=True),
    "16-mixed": Precision(torch.float32, torch.float16, autocast=True),
}
"""By the name that Fabric gives them."""

REFUSED = {
    "16-true": "float16 parameters overflow, and lose updates: give 16-mixed, or bf16-true",
    "transformer-engine": "it replaces layers of the model: give bf16-mixed",
    "transformer-engine-float16": "it replaces layers of the model: give 16-mixed",
    # Fabric's short names; a task has one identifier only if a precision has one name.
    "16": "its full name is 16-mixed",
    "bf16": "its full name is bf16-mixed",
    "32": "its full name is 32-true",
    "64": "its full name is 64-true",
}
"""What Fabric takes beside, and why it is refused."""


def precision_of(name: str) -> Precision:
    """The types of a precision.

    Raises:
        ValueError: it is not one of :data:`PRECISIONS`.
    """
    if name not in PRECISIONS:
        reason = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise ValueError(f"precision is {name!r}{reason}, expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Lets the forward pass of ``module`` in training mode run on its parameters rounded to ``dtype``.

    The parameters stay what they are, and gradients reach them through the rounding unchanged: an optimizer moves the
    wide values, whose small updates a narrow type would lose. Parameters that a submodule lists in its attribute
    ``UNROUNDED`` are not rounded. In evaluation mode nothing is.
    """
    exact = set(_unrounded(module))
    original = _Original(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return original.run(*args, **kwargs)
        rounded = {
            f"module.{name}": parameter.to(dtype)
            for name, parameter in module.named_parameters()
            if parameter.is_floating_point() and name not in exact
        }
        return functional_call(original, rounded, args, kwargs)

    module.forward = forward


def _unrounded(module: nn.Module) -> Iterator[str]:
    for prefix, part in module.named_modules():
        for name in getattr(part, "UNROUNDED", ()):
            yield f"{prefix}.{name}".lstrip(".")


class _Original(nn.Module):
    """A module by its forward pass of now, whatever takes its place later."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.run = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)
