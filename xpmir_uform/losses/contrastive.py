"""Contrastive loss on pooled embeddings.

Letters: N items of the global batch, d embedding width.
"""

from collections.abc import Sequence
from enum import StrEnum

from experimaestro import Meta, Param
from uform_kernels import pair_loss

from xpmir_uform.data.batch import Batch
from xpmir_uform.data.fields import default
from xpmir_uform.losses.base import BatchLoss, Encoded, LossValue
from xpmir_uform.losses.forms import PairForm, SigmoidForm


class Negatives(StrEnum):
    """Which cells repel beside the repel edges.

    A string, so that its identifier does not hold the name of this module.
    """

    AMBIENT = "ambient"
    """Every other item of the global batch that no edge names"""
    NAMED = "named"
    """None"""
    ACROSS = "across"
    """As AMBIENT, but only items of another modality"""


def contrastive(
    encoded: Encoded,
    batch: Batch,
    *,
    form: str,
    negatives: Negatives,
    ambient_weight: float,
    dimensions: Sequence[int] | None,
    backend: str,
) -> LossValue:
    """The pair loss of the whole global batch; see :func:`uform_kernels.pair_loss` for the formulas."""
    device = encoded.embeddings.device
    out = pair_loss(
        encoded.embeddings,
        attract=batch.attract.to(device),
        repel=batch.repel.to(device),
        ignore=batch.ignore.to(device),
        form=form,
        negatives=str(negatives),
        families=batch.families.to(device) if negatives is Negatives.ACROSS else None,
        ambient_weight=ambient_weight,
        inverse_temperature=encoded.inverse_temperature,
        bias=encoded.bias,
        groups=batch.groups.to(device),
        dimensions=dimensions,
        backend=backend,
    )
    return LossValue(out.loss, {name: float(value) for name, value in out.stats.items()})


class ContrastiveLoss(BatchLoss):
    """Draws together what attracts and pushes apart what repels, by cosine."""

    __xpmid__ = "uform.contrastive-loss"

    form: Param[PairForm] = default(factory=SigmoidForm.C)
    """How a row of scores becomes a loss"""

    negatives: Param[Negatives] = default(Negatives.AMBIENT)
    """Which cells repel beside the repel edges"""

    ambient_weight: Param[float] = default(1.0)
    """Weight of an ambient cell"""

    matryoshka_dimensions: Param[list[int]] = default([])
    """Prefix lengths at which the loss is taken, ascending; empty: the whole embedding alone"""

    backend: Meta[str] = default("auto")
    """Kernel back end: ``auto``, ``reference``, ``chunked`` or ``triton``"""

    NAME = "contrastive"

    def compute(self, encoded: Encoded, batch: Batch) -> LossValue:
        """The unweighted loss of the whole global batch."""
        return contrastive(
            encoded,
            batch,
            form=self.form.NAME,
            negatives=self.negatives,
            ambient_weight=self.ambient_weight,
            dimensions=self.matryoshka_dimensions or None,
            backend=self.backend,
        )
