"""What every loss takes and gives.

A *joint* loss compares the items of the whole global batch, by their embeddings or by scores of their token vectors.
An *additive* one is a mean over places that each item has by itself: it adds up over microbatches.

Letters: N items of the global batch, d embedding width, G temperature groups, k kept tokens of a microbatch, W token
width, L listed pairs, q queries of a rank, D documents of the batch, R masked bytes, K masked patches of one modality,
P values of one patch, S answer slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from experimaestro import Config, Param
from torch import Tensor

from xpmir_uform.base.configuration import default
from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.targets import Questions
from xpmir_uform.data.vocabulary import Modality

BACKENDS = ("auto", "reference", "chunked", "triton")
"""Of the kernels."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model answers of a microbatch; None where it has no such head.

    Args:
        embeddings: (n, d) float, of its n items.
        inverse_temperature: (G,) float, positive.
        bias: (G,) float.
        tokens: (k, W) float, unit vectors of the k tokens that are kept, in item order.
        bytes: (R, 256) float, logits of masked bytes.
        choices: (S, 256) float, logits of answer slots.
        patches: (K, P) float of each modality, for masked patches.
    """

    embeddings: Tensor | None = None
    inverse_temperature: Tensor | None = None
    bias: Tensor | None = None
    tokens: Tensor | None = None
    bytes: Tensor | None = None
    choices: Tensor | None = None
    patches: Mapping[Modality, Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor that there is."""
        plain = (self.embeddings, self.inverse_temperature, self.bias, self.tokens, self.bytes, self.choices)
        return [*(tensor for tensor in plain if tensor is not None), *(self.patches or {}).values()]

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, temperature and bias."""
        return _pooled(self)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the model made of a global batch; None where no loss asks for it.

    Args:
        embeddings: (N, d) float.
        inverse_temperature: (G,) float, positive.
        bias: (G,) float.
        scores: (L,) or (q, D) float, of the queries and documents that late interaction compares.
    """

    embeddings: Tensor | None = None
    inverse_temperature: Tensor | None = None
    bias: Tensor | None = None
    scores: Tensor | None = None

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, temperature and bias."""
        return _pooled(self)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that there is, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _pooled(given: Answers | Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """What every model with a pooled head answers."""
    embeddings, inverse_temperature, bias = given.embeddings, given.inverse_temperature, given.bias
    assert embeddings is not None
    assert inverse_temperature is not None
    assert bias is not None
    return embeddings, inverse_temperature, bias


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss and what is worth logging about it.

    Args:
        value: 0-d, differentiable.
        stats: numbers by name that, like the value, add up over parts of the batch.
        lacking: what the whole batch lacks that the loss learns from, such as attract edges; empty: nothing.
    """

    value: Tensor
    stats: dict[str, float] = field(default_factory=dict)
    lacking: str = ""


def named_zeros(counts: Tensor, names: Sequence[str]) -> str:
    """The names of the numbers (k,) that are 0."""
    return " and ".join(name for name, count in zip(names, counts.tolist(), strict=True) if not count)


class BatchLoss(Config, ABC):
    """A loss over a global batch; the training objective is the weighted sum of its losses."""

    __xpmid__ = "uform.batch-loss"

    weight: Param[float] = default(1.0)
    """Its factor in the objective"""

    NAME: str
    """The name it is logged under"""

    STATS: tuple[str, ...] = ()
    """The names of its statistics"""

    HEADS: tuple[str, ...] = ()
    """The fields of the model whose heads it needs"""

    LIMITS: tuple[str, ...] = ()
    """The fields of the batch shape that it needs"""

    def __validate__(self):
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}, expected finite and at least 0")

    def ask(self, segment: Segment, item: Item, seed: int, step: int) -> Segment:
        """The segment of a training item with what this loss asks of the model; draws are keyed by seed, step, item."""
        return segment

    def lacking(self, counts: Tensor) -> str:
        """What a global batch lacks that this loss learns from, by its normalisers; empty: nothing, or not known.

        Args:
            counts: (k,) float64, the sum of ``counts`` over the whole batch.
        """
        return ""

    def limits(self) -> Mapping[str, int]:
        """Hard limits of a microbatch on one device that this loss sets, by the name of what :meth:`load` tells."""
        return {}

    def load(self, items: Sequence[Item], segments: Sequence[Segment]) -> Mapping[str, int]:
        """What a bag of these items adds to what :meth:`limits` may bound."""
        return {}


class JointLoss(BatchLoss):
    """A loss that compares the items of a global batch with one another."""

    __xpmid__ = "uform.joint-loss"

    @abstractmethod
    def counts(self, batch: Batch, rows: range) -> Tensor:
        """(k,) float64: the normalisers that the items ``rows`` add to the batch's, known before any forward pass."""

    @abstractmethod
    def compute(self, encoded: Encoded, batch: Batch, rows: range, counts: Tensor) -> LossValue:
        """The part of the unweighted loss that the items ``rows`` add.

        Args:
            encoded: all items of the global batch.
            rows: whose anchors are summed.
            counts: (k,) float64, the sum of :meth:`counts` over the whole batch.
        """


class AdditiveLoss(BatchLoss):
    """A loss that adds up over the microbatches of a global batch."""

    __xpmid__ = "uform.additive-loss"

    @abstractmethod
    def counts(self, questions: Questions) -> Tensor:
        """(k,) float64: the normalisers that a microbatch adds to the batch's."""

    @abstractmethod
    def compute(self, answers: Answers, questions: Questions, counts: Tensor) -> LossValue:
        """The part of the unweighted loss that a microbatch adds; 0, with a graph, if it is asked nothing.

        Args:
            answers: of the model.
            questions: what it was asked.
            counts: (k,) float64, the sum of :meth:`counts` over the whole batch.
        """
