"""Whether a step's loss and gradient are finite, how long the gradient is, and what was counted of both.

A step whose loss or gradient is not finite is skipped: no parameter, no number of an optimizer and no step count of it
moves. The schedule goes on all the same: the rate of step t is a function of t alone, so that a resumed run has it too.
All ranks decide alike: losses and gradients are sums over the ranks, in which one rank's NaN is everybody's.

A finite gradient may still overflow a weight or a moment, and nothing can take that back. Both are therefore looked at
after each update, and again before a checkpoint is written: the run ends, and its last checkpoint is finite.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from xpmir_uform.base.checked_files import replace_file

logger = logging.getLogger(__name__)

BAD_BATCH = "bad_batch.json"
SHOWN = 3
"""Names of tensors in a message."""


class NotFinite(RuntimeError):
    """Weights or moments hold a NaN or an infinity."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step.

    Args:
        nan, inf: whether its loss or gradient held one.
        skipped: whether parameters and optimizers were left as they were.
        clipped: whether the gradient was shortened.
        before, after: the norm of the gradient of all parameters, and of what the optimizers were given (0 if skipped).
        scale: the factor by which ``16-mixed`` had multiplied the gradient; None without one.
        excused: it was skipped because that factor was too high, as happens while it is searched for.
        rates: the learning rate of each ``optimizer/group``.
        seconds: of all this.
    """

    nan: bool = False
    inf: bool = False
    skipped: bool = False
    clipped: bool = False
    before: float = 0.0
    after: float = 0.0
    scale: float | None = None
    excused: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class Counts:
    """Numbers of steps so far: with a NaN, with an infinity, skipped, clipped; and those just skipped in a row."""

    nan: int = 0
    inf: int = 0
    skipped: int = 0
    clipped: int = 0
    row: int = 0

    def add(self, outcome: Outcome) -> None:
        """Counts one step more."""
        self.nan += outcome.nan
        self.inf += outcome.inf
        self.skipped += outcome.skipped
        self.clipped += outcome.clipped
        if not outcome.excused:
            self.row = self.row + 1 if outcome.skipped else 0

    def state_dict(self) -> dict[str, int]:
        """What a resumed run goes on from; JSON."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, int(value))


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The parameters of all groups that have a gradient."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """The norm of all gradients as one vector; not finite if and only if an element of them is not.

    In the gradients' own precision, and in float64 where its squares overflow.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(get_total_norm(gradients))
    if math.isfinite(norm):
        return norm
    return float(get_total_norm([gradient.detach().cpu().double() for gradient in gradients]))


def faults(losses: Iterable[float], parameters: Iterable[Tensor]) -> tuple[bool, bool]:
    """Whether a loss or a gradient holds a NaN, and whether one holds an infinity."""
    values = list(losses)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    nan = any(map(math.isnan, values)) or any(bool(gradient.isnan().any()) for gradient in gradients)
    return nan, any(map(math.isinf, values)) or any(bool(gradient.isinf().any()) for gradient in gradients)


def judge(losses: Sequence[float], parameters: Sequence[Tensor], scale: float | None = None) -> Outcome:
    """What is to become of a step with these losses and these gradients, unscaled.

    Args:
        scale: of ``16-mixed``; an overflow of the gradients alone is the business of whoever lowers it, as long as it
            is above 1.
    """
    norm = gradient_norm(parameters)
    finite = all(map(math.isfinite, losses))
    if finite and math.isfinite(norm):
        return Outcome(before=norm, after=norm, scale=scale)
    excused = finite and scale is not None and scale > 1.0
    nan, inf = (False, False) if excused else faults(losses, parameters)
    return Outcome(nan=nan, inf=inf, skipped=True, before=norm, scale=scale, excused=excused)


def written(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """What an update writes, by name: the parameters, and what the optimizers keep of each."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    kept = {
        f"{key} of {names.get(parameter, 'a parameter')}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return {**{name: parameter.detach() for parameter, name in names.items()}, **kept}


def check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors that hold a NaN or an infinity.

    Args:
        what: the beginning of the message.

    Raises:
        NotFinite: with the names of some of them.
    """
    found = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not found or math.isfinite(get_total_norm(found.values(), math.inf)):
        return
    bad = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    raise NotFinite(f"{what}: {', '.join(bad[:SHOWN])}{more} hold a NaN or an infinity")


def clip(parameters: Sequence[Tensor], norm: float, longest: float) -> float:
    """Shortens the gradient of this norm to ``longest``, if it is longer and that is not 0; answers its new norm."""
    if not 0.0 < longest < norm:
        return norm
    clip_grads_with_norm_(parameters, longest, torch.tensor(norm, dtype=torch.float64))
    return longest


@contextmanager
def unscaled(precision: Any) -> Iterator[None]:
    """Within it Fabric takes the gradients for unscaled, which they are: it would divide them again, and fail."""
    precision.unscale_gradients = lambda optimizer: None
    try:
        yield
    finally:
        del precision.unscale_gradients


def describe_batch(job: Path, step: int, keys: Iterable[int], losses: Mapping[str, float], counts: Counts) -> None:
    """Writes ``bad_batch.json``: the items of a batch that no step could be made of.

    Args:
        job: the folder that it is written to.
        step: the number of the step.
        keys: of the items of the global batch, written as messages write them.
        losses: of the step.
        counts: with this step.
    """
    content = {
        "step": step,
        "skipped_in_a_row": counts.row,
        "losses": {name: str(value) for name, value in losses.items()},
        "keys": [f"{int(key):#018x}" for key in keys],
    }
    try:
        replace_file(job / BAD_BATCH, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        logger.warning("%s cannot be written (%s); it would hold %s", job / BAD_BATCH, error, json.dumps(content))
