"""Modules within a model that are not ours: what they draw is keyed, and what an exact step cannot hold is refused.

The exact step runs the model on microbatches, most of them twice. A module may therefore draw from the global
generators, but neither compute statistics over a microbatch nor change a buffer.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


def seed_generators(seed: int) -> None:
    """Begins the global generators of torch (on all devices), numpy and Python anew.

    Args:
        seed: in [0, 2**63).
    """
    torch.manual_seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])
    # By a hash of it: seeded by the same integer, Python draws what numpy draws.
    random.seed(str(seed))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within it the global generators begin from ``seed``; afterwards they are as they were.

    Args:
        device: whose generator is used beside the CPU's.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_generators(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within Fabric's wrapper, or the model itself."""
    return getattr(model, "_original_module", model)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuses batch normalisation in training mode: its statistics are those of a microbatch.

    Raises:
        ValueError: naming the module.
    """
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"the model has {name}, a {type(module).__name__}, whose statistics are those of a microbatch: results "
                "would depend on microbatches. Use LayerNorm, GroupNorm or RMSNorm, or keep it in evaluation mode"
            )


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers that a checkpoint holds, by name."""
    module = unwrapped(model)
    saved = module.state_dict()
    return {name: buffer.clone() for name, buffer in module.named_buffers() if name in saved}


def refuse_changed_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuses a forward pass that changes buffers, such as running statistics: it is run once or twice a step.

    Args:
        before: what :func:`buffers_of` gave before the step.

    Raises:
        ValueError: naming the buffers and their modules.
    """
    module = unwrapped(model)
    now = buffers_of(model)
    changed = [name for name, buffer in before.items() if not _same(now[name], buffer)]
    if changed:
        named = [f"{name} ({type(module.get_submodule(name.rpartition('.')[0])).__name__})" for name in changed]
        raise ValueError(
            f"the forward pass changes the buffers {', '.join(named)}: the exact step runs it twice on some items, so "
            "results would depend on microbatches. Use a module without running statistics or power iteration, or keep "
            "it in evaluation mode"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def leave_buffers_alone(wrapped: nn.Module) -> None:
    """Keeps DDP from broadcasting buffers at each forward pass: a rank without microbatches makes none."""
    inner = getattr(wrapped, "_forward_module", wrapped)
    if isinstance(inner, DistributedDataParallel):
        inner.broadcast_buffers = False
