"""One optimizer step over a global batch, whatever its microbatches.

The loss needs every embedding of the batch, the memory holds the graph of one microbatch. So embeddings are first made
without graph, the loss gives their gradients, and each microbatch is then run again to carry its gradients back to the
parameters (GradCache: Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", RepL4NLP
2021, section 3.2). The last microbatch keeps its graph, so that a batch of one microbatch is run once.

Letters: N items of the batch, n items of a microbatch, d embedding width, G temperature groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xpmir_uform.data.batch import Batch
from xpmir_uform.losses.base import BatchLoss, Encoded, LossValue
from xpmir_uform.model import Packed

Forward = Callable[[Packed], Encoded]
Backward = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of the global batch.

    Args:
        packed: its n items, ready for the model.
        numbers: (n,) int64, the number of each item in the global batch.
    """

    packed: Packed
    numbers: torch.Tensor


def embed(forward: Forward, microbatches: Sequence[Microbatch]) -> list[Encoded]:
    """What the model makes of every microbatch; only the last has a graph."""
    with torch.no_grad():
        outputs = [forward(microbatch.packed) for microbatch in microbatches[:-1]]
    return [*outputs, forward(microbatches[-1].packed)]


def join(microbatches: Sequence[Microbatch], outputs: Sequence[Encoded]) -> Encoded:
    """The detached embeddings in the batch's order, with temperature and bias: the leaves of the loss."""
    parts = torch.cat([output.embeddings.detach() for output in outputs])
    numbers = torch.cat([microbatch.numbers for microbatch in microbatches]).to(parts.device)
    embeddings = torch.empty_like(parts)
    embeddings[numbers] = parts
    last = outputs[-1]
    leaves = (embeddings, last.inverse_temperature.detach().clone(), last.bias.detach().clone())
    return Encoded(*(leaf.requires_grad_() for leaf in leaves))


def objective(losses: Sequence[BatchLoss], encoded: Encoded, batch: Batch) -> dict[str, LossValue]:
    """The value of every loss, by its name."""
    return {loss.NAME: loss.compute(encoded, batch) for loss in losses}


def gradients(total: torch.Tensor, encoded: Encoded) -> Encoded:
    """The gradient of the objective with respect to each leaf."""
    leaves = (encoded.embeddings, encoded.inverse_temperature, encoded.bias)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return Encoded(
        *(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True))
    )


def surrogate(output: Encoded, microbatch: Microbatch, gradient: Encoded, with_scale: bool) -> torch.Tensor:
    """A scalar whose gradient with respect to the parameters is the microbatch's share of the objective's.

    Temperature and bias are parameters of the whole batch: one microbatch alone carries them.
    """
    numbers = microbatch.numbers.to(gradient.embeddings.device)
    value = (output.embeddings * gradient.embeddings[numbers]).sum()
    if with_scale:
        value = value + (output.inverse_temperature * gradient.inverse_temperature).sum()
        value = value + (output.bias * gradient.bias).sum()
    return value


def propagate(
    forward: Forward, backward: Backward, microbatches: Sequence[Microbatch], last: Encoded, gradient: Encoded
) -> None:
    """Carries the gradients to the parameters: first through the graph that was kept, then microbatch by microbatch."""
    backward(surrogate(last, microbatches[-1], gradient, with_scale=True))
    for microbatch in microbatches[:-1]:
        backward(surrogate(forward(microbatch.packed), microbatch, gradient, with_scale=False))


def exact_step(
    forward: Forward,
    backward: Backward,
    microbatches: Sequence[Microbatch],
    losses: Sequence[BatchLoss],
    batch: Batch,
) -> dict[str, LossValue]:
    """Adds the gradient of the objective over the whole batch to the parameters; returns the values of the losses."""
    outputs = embed(forward, microbatches)
    encoded = join(microbatches, outputs)
    values = objective(losses, encoded, batch)
    total = torch.stack([loss.weight * values[loss.NAME].value for loss in losses]).sum()
    propagate(forward, backward, microbatches, outputs[-1], gradients(total, encoded))
    return values
