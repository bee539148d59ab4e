"""Predicting the memory of a training run from its configuration, before anything is submitted.

The model is built of fake tensors, which have shapes and types but no values, and is measured as the batcher measures
the real one.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from experimaestro import Config
from torch._subclasses.fake_tensor import FakeTensorMode
from xpm_torch.optim import DuplicateParameterFilter, ParameterOptimizer

from xpmir_uform.base.devices import device_count
from xpmir_uform.batching.bag_sizes import BagSize
from xpmir_uform.batching.batcher import UFormBatcher
from xpmir_uform.batching.cost import CostModel, fit
from xpmir_uform.batching.memory_probe import probe, probe_lengths
from xpmir_uform.data.decoding.segment import blank_text
from xpmir_uform.data.items import Item
from xpmir_uform.model.inference.batches import most_tokens
from xpmir_uform.model.packing import pack
from xpmir_uform.model.precision import Precision, compute_in, precision_of
from xpmir_uform.model.uform import UFormEncoder

TEXT_TOKENS = 64
"""Bytes of a text, unless the caller knows better."""

PROCESS_BYTES = 10**9
"""What a process takes before its first tensor: the context and kernels of a GPU, or Python and its libraries."""


class Footprint(NamedTuple):
    """Bytes of a training run on each device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int


def footprint(learner: Any, bag: Sequence[int] | None = None) -> Footprint:
    """The memory that a run takes on each of its devices.

    Args:
        learner: a learner's configuration, which is left as it was.
        bag: tokens of the items of a typical bag; None: a text of 64 bytes, and the largest picture that the model
            reads or else another text.

    Returns:
        The activations are those of the heaviest microbatch: the whole batch of a device, unless the batcher has a
        batch shape or is given the bytes to use. Temporary buffers are not counted.

    Raises:
        ValueError: an unknown precision, or a bag that the batch shape refuses.
    """
    precision = precision_of(learner.fabric_config.precision)
    batcher = made(learner.trainer.batcher)
    longest = batcher.longest if isinstance(batcher, UFormBatcher) else 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = built(learner.model, precision)
        cost = cost_of(model, longest, precision)
        optimizer = state_bytes(learner.optimizers, model)
    bags = ceil(learner.trainer.batch_size / (device_count(learner.fabric_config) * learner.fabric_config.num_nodes))
    parameters = list(model.parameters())
    return Footprint(
        weights=sum(parameter.nbytes for parameter in parameters),
        gradients=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        optimizer=optimizer,
        activations=ceil(heaviest(bags, bag or typical_bag(model, longest), batcher, cost)),
    )


def made(config: Any) -> Any:
    """The instance of a copy of a configuration, or None: making one seals the configuration that it is made of."""
    return config and copied(config).instance()


def copied(value: Any) -> Any:
    """A configuration with the same values; experimaestro 2.7's own copy forgets those that have a default factory."""
    if isinstance(value, list):
        return [copied(each) for each in value]
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if not isinstance(value, Config):
        return value
    known: Any = value
    given = {
        argument.name: copied(each)
        for argument, each in known.__xpm__.xpmvalues()
        if not argument.constant and (argument.generator is None or isinstance(each, Config))
    }
    return type(value)(**given)


def built(config: Any, precision: Precision) -> UFormEncoder:
    """The model of a configuration, as it is trained."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(precision.held)
    try:
        model = made(config)
        model.initialize()
    finally:
        torch.set_default_dtype(before)
    if precision.computed and not precision.autocast:
        compute_in(model, precision.computed)
    return model


def cost_of(model: UFormEncoder, longest: int, precision: Precision) -> CostModel:
    """The cost model of a model, by the count of what autograd saves on texts of at most ``longest`` tokens."""
    cpu = torch.device("cpu")
    context = partial(torch.autocast, "cpu", precision.computed) if precision.autocast else nullcontext
    return fit(probe(partial(pass_through, model, context), probe_lengths(longest, cpu), cpu))


def pass_through(model: UFormEncoder, context: Callable[[], AbstractContextManager], lengths: Sequence[int]) -> None:
    """A forward and a backward pass over texts of these lengths; the forward pass runs in ``context``."""
    packed = pack([blank_text(length) for length in lengths])
    with context():
        outputs = model(packed)
    (outputs.states if outputs.embeddings is None else outputs.embeddings).sum().backward()


def state_bytes(optimizers: Iterable[ParameterOptimizer], model: UFormEncoder) -> int:
    """What optimizers keep of a model's parameters, seen by letting them make a step."""
    taken, total = DuplicateParameterFilter(), 0
    for config in optimizers:
        optimizer = made(config).create_optimizer(model, taken, log=False)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        kept = (value for state in optimizer.state.values() for value in state.values())
        total += sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    return total


def typical_bag(model: UFormEncoder, longest: int) -> tuple[int, ...]:
    """Tokens of a text and of the largest picture, or of two texts; each at most ``longest``, unless that is 0."""
    pictures = tuple(most_tokens(Item(modality, b"", 0), model.shapes) for modality in model.shapes)
    return tuple(min(tokens, longest or tokens) for tokens in (TEXT_TOKENS, *(pictures or (TEXT_TOKENS,))))


def heaviest(count: int, bag: Sequence[int], batcher: Any, cost: CostModel) -> float:
    """Bytes of the heaviest microbatch of ``count`` like bags."""
    size = len(bag)
    bags = [BagSize(range(start, start + size), tuple(bag), start) for start in range(0, count * size, size)]
    parts = [list(range(count))]
    if isinstance(batcher, UFormBatcher):
        parts = batcher.plan(bags, cost, batcher.memory or float("inf"))
    return max(cost.predict([length for number in part for length in bags[number].lengths]) for part in parts)


def predict_memory(learner: Any, bag: Sequence[int] | None = None) -> int:
    """Bytes that a run takes on each device: weights, gradients, optimizer state and activations.

    See :func:`footprint`.
    """
    return sum(footprint(learner, bag))


def requirements_for(learner: Any, duration: str = "1h", bag: Sequence[int] | None = None) -> str:
    """What to ask a launcher for, in experimaestro's words: ``duration=1h & cuda(mem=12G)``.

    Args:
        learner: a learner's configuration.
        duration: such as ``30m``, ``10h`` or ``2d``.
        bag: see :func:`footprint`.

    Returns:
        The predicted memory, whole gigabytes of 10^9 bytes, with room for the process and for what the batcher leaves
        free; ``cuda`` unless the learner's accelerator is ``cpu``, ``mps`` or ``gpu``; with ``* n`` for n GPUs.
    """
    parts = footprint(learner, bag)
    fraction = getattr(made(learner.trainer.batcher), "memory_fraction", 1.0)
    needed = sum(parts[:3]) + parts.activations / fraction + PROCESS_BYTES
    accelerator = learner.fabric_config.accelerator
    kind = accelerator if accelerator in ("cpu", "mps", "gpu") else "cuda"
    count = device_count(learner.fabric_config)
    if kind == "cpu":
        return f"duration={duration} & cpu(mem={ceil(count * needed / 1e9)}G)"
    return f"duration={duration} & {kind}(mem={ceil(needed / 1e9)}G)" + (f" * {count}" if count > 1 else "")
