"""What every loss takes and gives.

Letters: N items of the global batch, d embedding width, G temperature groups.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from experimaestro import Config, Param

from xpmir_uform.data.batch import Batch
from xpmir_uform.data.fields import default


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the model made of a global batch.

    Args:
        embeddings: (N, d) float.
        inverse_temperature: (G,) float, positive.
        bias: (G,) float.
    """

    embeddings: torch.Tensor
    inverse_temperature: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss and what is worth logging about it.

    Args:
        value: 0-d, differentiable.
        stats: numbers by name that, like the value, add up over parts of the batch.
    """

    value: torch.Tensor
    stats: dict[str, float] = field(default_factory=dict)


class BatchLoss(Config, ABC):
    """A loss over a global batch; the training objective is the weighted sum of its losses."""

    __xpmid__ = "uform.batch-loss"

    weight: Param[float] = default(1.0)
    """Its factor in the objective"""

    NAME: str
    """The name it is logged under"""

    STATS: tuple[str, ...] = ()
    """The names of its statistics"""

    @abstractmethod
    def counts(self, batch: Batch, rows: range) -> torch.Tensor:
        """(k,) float64: the normalisers that the items ``rows`` add to the batch's, known before any forward pass."""

    @abstractmethod
    def compute(self, encoded: Encoded, batch: Batch, rows: range, counts: torch.Tensor) -> LossValue:
        """The part of the unweighted loss that the items ``rows`` add.

        Args:
            encoded: all items of the global batch.
            rows: whose anchors are summed.
            counts: (k,) float64, the sum of :meth:`counts` over the whole batch.
        """
