"""One optimizer step over a global batch, whatever its microbatches and ranks.

A joint loss needs every embedding of the batch, or token vectors of all its queries and documents; memory holds the
graph of one microbatch, and a rank holds its own items. So:

1. the normalisers of the losses are counted, before any forward pass, and summed over the ranks;
2. embeddings and token vectors are made without graph, microbatch by microbatch; the last one keeps its graph, so that
   a batch of one microbatch is run once;
3. embeddings are gathered, and token vectors scored (see :mod:`~xpmir_uform.trainer.step.token_exchange`); each rank
   computes the loss rows of its own items against all columns; the gradients return to the owners of the items by one
   sum;
4. each microbatch runs again to carry its gradients to the parameters, and the additive losses join there; then the
   parameters' gradients are summed over the ranks.

Steps 2 to 4 on one device are GradCache (Gao et al., "Scaling deep contrastive learning batch size under memory limited
setup", RepL4NLP 2021, section 3.2). Without a joint loss there is no step 2 and 3.

Letters: N items of the batch, n items of a microbatch, d embedding width, G temperature groups, k kept tokens, W token
width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.targets import Questions
from xpmir_uform.losses.base import AdditiveLoss, Answers, BatchLoss, Encoded, JointLoss, LossValue
from xpmir_uform.losses.late_interaction import LateInteractionLoss
from xpmir_uform.model import Packed
from xpmir_uform.trainer.step.collectives import Ranks
from xpmir_uform.trainer.step.token_exchange import Interaction, Spans

Values = dict[str, LossValue]
"""Losses by name."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of this rank's items.

    Args:
        packed: its n items, ready for the model.
        numbers: (n,) int64, the number of each item in the global batch.
        questions: what the model is asked about them.
        seed: of the draws that a forward pass takes from torch's generator, the same in both passes.
    """

    packed: Packed
    numbers: Tensor
    questions: Questions = field(default_factory=lambda: Questions.of([], []))
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
        kept: how many tokens of each of this rank's items have their vectors kept, if a loss compares tokens.
    """

    batch: Batch
    shares: Sequence[range]
    microbatches: Sequence[Microbatch]
    closing: Microbatch | None = None
    kept: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """How a step runs the model.

    Args:
        forward: the model on one microbatch.
        backward: adds the gradient of a scalar to the parameters.
        ranks: who takes part.
        unsynchronised: within it a backward pass keeps its gradients to this rank.
        watch: entered with the name of a part of the step (forward, loss, backward) around it, to time it.
    """

    forward: Callable[[Microbatch], Answers]
    backward: Callable[[Tensor], None]
    ranks: Ranks = field(default_factory=Ranks)
    unsynchronised: Callable[[], AbstractContextManager] = nullcontext
    watch: Callable[[str], AbstractContextManager] = nullcontext

    def run(self, microbatch: Microbatch) -> Answers:
        """The forward pass, watched."""
        with self.watch("forward"):
            return self.forward(microbatch)

    def carry(self, value: Tensor) -> None:
        """The backward pass, watched."""
        with self.watch("backward"):
            self.backward(value)


@dataclass(frozen=True, slots=True)
class Counted:
    """The losses of a step, each with its normalisers over the whole batch.

    Args:
        joint, additive: both kinds.
        kept: (N,) int64, the kept tokens of every item.
    """

    joint: Sequence[tuple[JointLoss, Tensor]]
    additive: Sequence[tuple[AdditiveLoss, Tensor]]
    kept: Tensor

    def reading(self, head: str) -> list[JointLoss]:
        """The joint losses that compare what a head of the model gives."""
        return [loss for loss, _ in self.joint if head in loss.HEADS]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of the joint losses' weighted sum with respect to answers; None where there is none.

    Args:
        embeddings: (n, d), of this rank's items or of a microbatch.
        inverse_temperature, bias: (G,), this rank's part.
        tokens: (k, W), of this rank's kept tokens or of a microbatch.
    """

    embeddings: Tensor | None = None
    inverse_temperature: Tensor | None = None
    bias: Tensor | None = None
    tokens: Tensor | None = None

    def scale(self) -> "Gradient":
        """Temperature and bias alone, which belong to the whole batch: one pass carries them."""
        return Gradient(inverse_temperature=self.inverse_temperature, bias=self.bias)

    def of_items(self, items: Tensor, kept: Tensor, scale: "Gradient") -> "Gradient":
        """The part of some items, by their numbers on this rank, and what ``scale`` holds.

        Args:
            kept: (n,) tokens of each item of this rank.
        """
        embeddings, tokens = self.embeddings, self.tokens
        return replace(
            scale,
            embeddings=None if embeddings is None else embeddings[items.to(embeddings.device)],
            tokens=None if tokens is None else tokens[Spans.of(kept, items).rows.to(tokens.device)],
        )


def exact_step(engine: Engine, share: Share, losses: Sequence[BatchLoss]) -> Values:
    """Adds the gradient of the objective over the whole global batch to the parameters.

    Returns:
        The value of every loss over the whole batch, the same on every rank.

    Raises:
        RuntimeError: memory ran out, on every rank if on one; the parameters' gradients are then undefined.
    """
    counted = count(engine.ranks, share, losses)
    values, gradient = nothing(losses), Gradient()
    answers: list[Answers] | None = None
    failure: RuntimeError | None = None
    with engine.unsynchronised():
        if counted.joint:
            answers, failure = engine.ranks.attempt(lambda: embed(engine, share.microbatches))
            found, gradient, lost = compare(engine, share, counted, answers)
            values, failure = values | found, failure or lost
            answers = answers and answers[-1:]
        if failure is None:
            added, failure = engine.ranks.attempt(lambda: propagate(engine, share, counted, answers, gradient))
            values |= added or {}
    values = with_lacking(agree(engine.ranks, values, failure), counted)
    if share.closing is not None:
        answer = engine.run(share.closing)
        engine.carry(surrogate(answer, gradient.scale()) + added_loss(answer, share.closing, counted)[0])
    return values


def count(ranks: Ranks, share: Share, losses: Sequence[BatchLoss]) -> Counted:
    """Phase 1: the global normalisers of every loss, and how many tokens each item keeps."""
    rows = share.shares[ranks.rank]
    asked = [part.questions for part in (*share.microbatches, share.closing) if part is not None]
    joint = [loss for loss in losses if isinstance(loss, JointLoss)]
    additive = [loss for loss in losses if isinstance(loss, AdditiveLoss)]
    parts = [loss.counts(share.batch, rows) for loss in joint]
    parts += [torch.stack([loss.counts(questions) for questions in asked]).sum(dim=0) for loss in additive]
    kept = torch.zeros(share.shares[-1].stop, dtype=torch.float64)
    compared = any("tokens" in loss.HEADS for loss in joint)
    if compared:
        kept[rows.start : rows.stop] = torch.tensor(share.kept, dtype=torch.float64)
        parts.append(kept)
    totals = ranks.total(torch.cat(parts)).split([len(part) for part in parts])
    last = len(joint) + len(additive)
    return Counted(
        list(zip(joint, totals[: len(joint)], strict=True)),
        list(zip(additive, totals[len(joint) : last], strict=True)),
        kept=(totals[last] if compared else kept).long(),
    )


def embed(engine: Engine, microbatches: Sequence[Microbatch]) -> list[Answers]:
    """Phase 2: what the joint losses need of every microbatch; only the last has a graph."""
    with torch.no_grad():
        answers = [lasting(engine.run(microbatch)) for microbatch in microbatches[:-1]]
    return [*answers, *(engine.run(microbatch) for microbatch in microbatches[-1:])]


def lasting(answers: Answers) -> Answers:
    """What is kept from the first pass to the second: not what additive losses read."""
    return replace(answers, bytes=None, choices=None, patches=None)


def compare(
    engine: Engine, share: Share, counted: Counted, answers: Sequence[Answers] | None
) -> tuple[Values, Gradient, RuntimeError | None]:
    """Phase 3: this rank's part of the joint losses and the gradient of its own items, or how memory ran out."""
    ranks, meeting = engine.ranks, interaction(engine.ranks, share, counted)
    with engine.watch("loss"):
        encoded = gather(engine, share, answers) if counted.reading("pooled") else Encoded()
        scores, unscored = score(engine, share, counted, answers, meeting)
        encoded = replace(encoded, scores=scores)
        found, failure = ranks.attempt(lambda: differentiate(ranks, share, counted, encoded))
        values, slopes = found or ({}, zeros_like(encoded))
        own = None if slopes.embeddings is None else ranks.scatter_sum(slopes.embeddings, share.shares)
        tokens, lost = (None, None) if meeting is None else meeting.gradient(slopes.scores)
    gradient = Gradient(own, slopes.inverse_temperature, slopes.bias, tokens)
    return values, gradient, unscored or failure or lost


def gather(engine: Engine, share: Share, answers: Sequence[Answers] | None) -> Encoded:
    """Phase 3: the detached embeddings of all ranks, with temperature and bias: the leaves of the loss.

    A rank whose memory ran out sends zeros: what comes of them is thrown away by :func:`agree`.
    """
    mine = share.shares[engine.ranks.rank]
    embeddings, inverse_temperature, bias = some_answer(engine, share, answers).pooled()
    rows = embeddings.new_zeros((len(mine), embeddings.shape[1]))
    if answers:
        rows[numbers_of(share).to(rows.device) - mine.start] = torch.cat([a.pooled()[0].detach() for a in answers])
    leaves = engine.ranks.gather(rows, share.shares), inverse_temperature.detach(), bias.detach()
    return Encoded(*(leaf.clone().requires_grad_() for leaf in leaves))


def some_answer(engine: Engine, share: Share, answers: Sequence[Answers] | None) -> Answers:
    """Temperature, bias and the width of vectors; on a rank that has no output, those of the closing pass."""
    if answers:
        return answers[-1]
    assert share.closing is not None
    with torch.no_grad():
        return engine.forward(share.closing)


def numbers_of(share: Share) -> Tensor:
    """The numbers of this rank's items in the batch, in the order of its microbatches."""
    return torch.cat([microbatch.numbers for microbatch in share.microbatches])


def interaction(ranks: Ranks, share: Share, counted: Counted) -> Interaction | None:
    """Phase 3: the late interaction of this step, if a loss asks for it."""
    losses = counted.reading("tokens")
    if not losses:
        return None
    (loss,) = losses
    assert isinstance(loss, LateInteractionLoss)
    return Interaction(loss, ranks, share.batch, share.shares, counted.kept)


def score(
    engine: Engine, share: Share, counted: Counted, answers: Sequence[Answers] | None, meeting: Interaction | None
) -> tuple[Tensor | None, RuntimeError | None]:
    """Phase 3: the scores that late interaction asks for, a leaf, and how memory ran out, if it did."""
    if meeting is None:
        return None, None
    vectors = join_tokens(engine, share, counted.kept, answers)
    scores, failure = meeting.score(vectors, failed=answers is None)
    return scores.requires_grad_(), failure


def join_tokens(engine: Engine, share: Share, kept: Tensor, answers: Sequence[Answers] | None) -> Tensor:
    """Phase 3: (k, W) detached vectors of this rank's kept tokens, item by item; zeros if memory ran out."""
    mine = share.shares[engine.ranks.rank]
    own = kept[mine.start : mine.stop]
    like = some_answer(engine, share, answers).tokens
    assert like is not None
    vectors = like.new_zeros((int(own.sum()), like.shape[1]))
    if answers:
        rows = Spans.of(own, numbers_of(share) - mine.start).rows.to(vectors.device)
        vectors[rows] = torch.cat([answer.tokens.detach() for answer in answers if answer.tokens is not None])
    return vectors


def differentiate(ranks: Ranks, share: Share, counted: Counted, encoded: Encoded) -> tuple[Values, Encoded]:
    """Phase 3: this rank's part of every joint loss, and the gradient of their sum with respect to each leaf."""
    rows = share.shares[ranks.rank]
    values = {loss.NAME: loss.compute(encoded, share.batch, rows, counts) for loss, counts in counted.joint}
    total = torch.stack([loss.weight * values[loss.NAME].value for loss, _ in counted.joint]).sum()
    leaves = encoded.tensors()
    found = torch.autograd.grad(total, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
    return values, Encoded(**dict(zip(leaves, found, strict=True)))


def zeros_like(encoded: Encoded) -> Encoded:
    """No gradient of any leaf."""
    return Encoded(**{name: torch.zeros_like(leaf) for name, leaf in encoded.tensors().items()})


def propagate(
    engine: Engine, share: Share, counted: Counted, answers: Sequence[Answers] | None, gradient: Gradient
) -> Values:
    """Phase 4: carries the gradients to the parameters; the additive losses, this rank's part.

    A single rank carries those of temperature and bias with its first microbatch.
    """
    mine = share.shares[engine.ranks.rank]
    kept = counted.kept[mine.start : mine.stop]
    scale = gradient.scale() if share.closing is None else Gradient()
    values: list[Values] = []
    for microbatch, answer in graphs(engine, share.microbatches, answers or []):
        part = gradient.of_items(microbatch.numbers - mine.start, kept, scale)
        added, found = added_loss(answer, microbatch, counted)
        engine.carry(surrogate(answer, part) + added)
        values.append(found)
        scale = Gradient()
    return {loss.NAME: total([found[loss.NAME] for found in values]) for loss, _ in counted.additive if values}


def graphs(
    engine: Engine, microbatches: Sequence[Microbatch], answers: Sequence[Answers]
) -> Iterator[tuple[Microbatch, Answers]]:
    """Every microbatch with a graph of its answers, first that which was kept, if any."""
    kept = len(answers[-1:])
    yield from zip(microbatches[len(microbatches) - kept :], answers[-1:], strict=True)
    for microbatch in microbatches[: len(microbatches) - kept]:
        yield microbatch, engine.run(microbatch)


def surrogate(answers: Answers, gradient: Gradient) -> Tensor:
    """A scalar whose gradient with respect to the parameters is what ``gradient`` says of these answers.

    Every answer takes part, with no weight if need be, so that each parameter that runs has a gradient, on every rank
    alike.
    """
    parts = [tensor * 0.0 for tensor in answers.tensors()]
    for each in fields(gradient):
        slope, answer = getattr(gradient, each.name), getattr(answers, each.name)
        if slope is not None:
            parts.append(answer * slope)
    return sum((part.sum() for part in parts), torch.zeros(()))


def added_loss(answers: Answers, microbatch: Microbatch, counted: Counted) -> tuple[Tensor, Values]:
    """What a microbatch adds to the objective by additive losses, and the part of each."""
    values = {loss.NAME: loss.compute(answers, microbatch.questions, counts) for loss, counts in counted.additive}
    parts = [loss.weight * values[loss.NAME].value for loss, _ in counted.additive]
    return torch.stack(parts).sum() if parts else torch.zeros(()), values


def total(parts: Sequence[LossValue]) -> LossValue:
    """The sum of parts of one loss, without its graph."""
    value = torch.stack([part.value.detach() for part in parts]).sum()
    return LossValue(value, {key: sum(part.stats[key] for part in parts) for key in parts[0].stats})


def nothing(losses: Sequence[BatchLoss]) -> Values:
    """The part of a rank that computes no loss."""
    return {loss.NAME: LossValue(torch.zeros(()), dict.fromkeys(loss.STATS, 0.0)) for loss in losses}


def with_lacking(values: Values, counted: Counted) -> Values:
    """The losses, each with what the batch lacks for it."""
    every = [*counted.joint, *counted.additive]
    return {loss.NAME: replace(values[loss.NAME], lacking=loss.lacking(counts)) for loss, counts in every}


def agree(ranks: Ranks, values: Values, failure: RuntimeError | None) -> Values:
    """The losses summed over the ranks, unless memory ran out on one of them: then every rank raises."""
    numbers = [float(failure is not None)]
    for value in values.values():
        numbers += [value.value.item(), *value.stats.values()]
    failed, *totals = ranks.total(torch.tensor(numbers, dtype=torch.float64)).tolist()
    if failed:
        raise failure or RuntimeError("CUDA out of memory. It happened on another rank.")
    remaining = iter(totals)
    return {
        name: LossValue(torch.tensor(next(remaining)), {key: next(remaining) for key in value.stats})
        for name, value in values.items()
    }
