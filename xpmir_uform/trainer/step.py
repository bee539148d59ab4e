"""One optimizer step over a global batch, whatever its microbatches and ranks.

The loss needs every embedding of the batch; memory holds the graph of one microbatch, and a rank holds its own items.
So:

1. the normalisers of the losses are counted, before any forward pass, and summed over the ranks;
2. embeddings are made without graph, microbatch by microbatch; the last one keeps its graph, so that a batch of one
   microbatch is run once;
3. embeddings are gathered; each rank computes the loss rows of its own items against all columns; the gradients
   return to the owners of the items by one sum;
4. each microbatch runs again to carry its gradients to the parameters, whose gradients are then summed over the ranks.

Steps 2 to 4 on one device are GradCache (Gao et al., "Scaling deep contrastive learning batch size under memory limited
setup", RepL4NLP 2021, section 3.2).

Letters: N items of the batch, n items of a microbatch, d embedding width, G temperature groups.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from xpmir_uform.batching.probing import is_out_of_memory
from xpmir_uform.data.batch import Batch
from xpmir_uform.losses.base import BatchLoss, Encoded, LossValue
from xpmir_uform.model import Packed
from xpmir_uform.trainer.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of this rank's items.

    Args:
        packed: its n items, ready for the model.
        numbers: (n,) int64, the number of each item in the global batch.
        seed: of the draws that a forward pass takes from torch's generator, the same in both passes.
    """

    packed: Packed
    numbers: torch.Tensor
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does of a global batch.

    Args:
        batch: the global batch, in rank order.
        shares: the items of each rank.
        microbatches: of this rank; none if it has no item.
        closing: one item outside the batch, of no weight: its pass carries temperature and bias and sums the
            parameters' gradients over the ranks. None on a single rank.
    """

    batch: Batch
    shares: Sequence[range]
    microbatches: Sequence[Microbatch]
    closing: Microbatch | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """How a step runs the model.

    Args:
        forward: the model on one microbatch.
        backward: adds the gradient of a scalar to the parameters.
        ranks: who takes part.
        unsynchronised: within it a backward pass keeps its gradients to this rank.
    """

    forward: Callable[[Microbatch], Encoded]
    backward: Callable[[torch.Tensor], None]
    ranks: Ranks = field(default_factory=Ranks)
    unsynchronised: Callable[[], AbstractContextManager] = nullcontext


def exact_step(engine: Engine, share: Share, losses: Sequence[BatchLoss]) -> dict[str, LossValue]:
    """Adds the gradient of the objective over the whole global batch to the parameters.

    Returns:
        The value of every loss over the whole batch, the same on every rank.

    Raises:
        RuntimeError: memory ran out, on every rank if on one; the parameters' gradients are then undefined.
    """
    counts = count(engine.ranks, share, losses)
    with engine.unsynchronised():
        outputs, failure = attempt(engine.ranks, lambda: embed(engine, share.microbatches))
        encoded = gather(engine, share, outputs)
        found, lost = attempt(engine.ranks, lambda: differentiate(engine.ranks, share, losses, encoded, counts))
        values, gradient = found or nothing(losses, encoded)
        own = engine.ranks.scatter_sum(gradient.embeddings, share.shares)
        failure = failure or lost
        if outputs is not None and failure is None:
            _, failure = attempt(engine.ranks, lambda: propagate(engine, share, outputs, own, gradient))
    values = agree(engine.ranks, values, failure)
    if share.closing is not None:
        engine.backward(surrogate(engine.forward(share.closing), None, gradient))
    return values


def count(ranks: Ranks, share: Share, losses: Sequence[BatchLoss]) -> list[torch.Tensor]:
    """Phase 1: the global normalisers of every loss."""
    parts = [loss.counts(share.batch, share.shares[ranks.rank]) for loss in losses]
    return list(ranks.total(torch.cat(parts)).split([len(part) for part in parts]))


def embed(engine: Engine, microbatches: Sequence[Microbatch]) -> list[Encoded]:
    """Phase 2: what the model makes of every microbatch; only the last has a graph."""
    with torch.no_grad():
        outputs = [engine.forward(microbatch) for microbatch in microbatches[:-1]]
    return [*outputs, *(engine.forward(microbatch) for microbatch in microbatches[-1:])]


def gather(engine: Engine, share: Share, outputs: Sequence[Encoded] | None) -> Encoded:
    """Phase 3: the detached embeddings of all ranks, with temperature and bias: the leaves of the loss.

    A rank whose memory ran out sends zeros: what comes of them is thrown away by :func:`agree`.
    """
    mine = share.shares[engine.ranks.rank]
    last = outputs[-1] if outputs else without_items(engine, share)
    rows = last.embeddings.new_zeros((len(mine), last.embeddings.shape[1]))
    if outputs:
        numbers = torch.cat([microbatch.numbers for microbatch in share.microbatches]).to(rows.device)
        rows[numbers - mine.start] = torch.cat([output.embeddings.detach() for output in outputs])
    leaves = engine.ranks.gather(rows, share.shares), last.inverse_temperature.detach(), last.bias.detach()
    return Encoded(*(leaf.clone().requires_grad_() for leaf in leaves))


def without_items(engine: Engine, share: Share) -> Encoded:
    """Temperature, bias and the width of embeddings, on a rank that has no output."""
    assert share.closing is not None
    with torch.no_grad():
        return engine.forward(share.closing)


def differentiate(
    ranks: Ranks, share: Share, losses: Sequence[BatchLoss], encoded: Encoded, counts: Sequence[torch.Tensor]
) -> tuple[dict[str, LossValue], Encoded]:
    """Phase 3: this rank's part of every loss, by its name, and the gradient of their sum with respect to each leaf."""
    rows = share.shares[ranks.rank]
    values = {
        loss.NAME: loss.compute(encoded, share.batch, rows, normalizers)
        for loss, normalizers in zip(losses, counts, strict=True)
    }
    total = torch.stack([loss.weight * values[loss.NAME].value for loss in losses]).sum()
    leaves = (encoded.embeddings, encoded.inverse_temperature, encoded.bias)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    gradients = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True))
    return values, Encoded(*gradients)


def nothing(losses: Sequence[BatchLoss], encoded: Encoded) -> tuple[dict[str, LossValue], Encoded]:
    """What :func:`differentiate` would answer of no loss at all: what a rank whose memory ran out goes on with."""
    zero = torch.zeros((), device=encoded.embeddings.device)
    values = {loss.NAME: LossValue(zero, dict.fromkeys(loss.STATS, 0.0)) for loss in losses}
    return values, Encoded(*map(torch.zeros_like, (encoded.embeddings, encoded.inverse_temperature, encoded.bias)))


def propagate(engine: Engine, share: Share, outputs: Sequence[Encoded], own: torch.Tensor, gradient: Encoded) -> None:
    """Phase 4: carries the gradients to the parameters, first through the graph that was kept.

    Args:
        own: (n, d), the gradient of this rank's embeddings.
    """
    start = share.shares[engine.ranks.rank].start

    def rows(microbatch: Microbatch) -> torch.Tensor:
        return own[microbatch.numbers.to(own.device) - start]

    for microbatch, output in zip(share.microbatches[-1:], outputs[-1:], strict=True):
        engine.backward(surrogate(output, rows(microbatch), gradient if share.closing is None else None))
    for microbatch in share.microbatches[:-1]:
        engine.backward(surrogate(engine.forward(microbatch), rows(microbatch), None))


def surrogate(output: Encoded, rows: torch.Tensor | None, scale: Encoded | None) -> torch.Tensor:
    """A scalar whose gradient with respect to the parameters is a microbatch's share of the objective's.

    Args:
        output: of the microbatch.
        rows: (n, d), the gradient of its embeddings; None: they have no weight.
        scale: the gradient of temperature and bias, which belong to the whole batch: one pass alone carries them.
    """
    value = (output.embeddings * (0.0 if rows is None else rows)).sum()
    if scale is not None:
        value = value + (output.inverse_temperature * scale.inverse_temperature).sum()
        value = value + (output.bias * scale.bias).sum()
    return value


def attempt(ranks: Ranks, work: Callable[[], T]) -> tuple[T | None, RuntimeError | None]:
    """What ``work`` answers, or the error by which memory ran out, which the other ranks must hear of first."""
    try:
        return work(), None
    except RuntimeError as error:
        if ranks.count == 1 or not is_out_of_memory(error):
            raise
        return None, error


def agree(ranks: Ranks, values: dict[str, LossValue], failure: RuntimeError | None) -> dict[str, LossValue]:
    """The losses summed over the ranks, unless memory ran out on one of them: then every rank raises."""
    numbers = [float(failure is not None)]
    for value in values.values():
        numbers += [value.value.item(), *value.stats.values()]
    device = next(iter(values.values())).value.device
    failed, *totals = ranks.total(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()
    if failed:
        raise failure or RuntimeError("CUDA out of memory. It happened on another rank.")
    remaining = iter(totals)
    return {
        name: LossValue(torch.tensor(next(remaining)), {key: next(remaining) for key in value.stats})
        for name, value in values.items()
    }
