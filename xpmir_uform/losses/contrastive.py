"""Contrastive loss on pooled embeddings.

Letters: N items of the global batch, d embedding width.
"""

from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from experimaestro import Meta, Param
from uform_kernels import Edges, Normalizers, pair_loss, pair_normalizers
from uform_kernels.checks import check_weight

from xpmir_uform.base.configuration import default
from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.losses.base import BACKENDS, Encoded, JointLoss, LossValue, named_zeros
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


def edges_of(batch: Batch, rows: range, device: torch.device | str = "cpu") -> tuple[Edges, Edges, Edges]:
    """What the anchors ``rows`` attract, repel and ignore."""
    attract, repel, ignore = (
        edges.part(rows.start, rows.stop).to(device) for edges in (batch.attract, batch.repel, batch.ignore)
    )
    return attract, repel, ignore


class ContrastiveLoss(JointLoss):
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
    HEADS = ("pooled",)
    STATS = ("attract_loss", "repel_loss", "attract_cosine", "repel_cosine")

    def __validate__(self):
        super().__validate__()
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, expected one of {', '.join(BACKENDS)}")
        check_weight("ambient_weight", self.ambient_weight)
        if self.negatives != Negatives.NAMED and self.ambient_weight == 0:
            raise ValueError(
                "ambient_weight is 0, expected above 0: for no such cells give negatives=named and leave it out"
            )
        if self.negatives == Negatives.NAMED and self.ambient_weight != 1.0:
            raise ValueError(
                f"ambient_weight is {self.ambient_weight} and negatives is named, which has no such cells: leave it out"
            )
        if any(low >= high for low, high in pairwise([0, *self.matryoshka_dimensions])):
            raise ValueError(f"matryoshka_dimensions is {self.matryoshka_dimensions}, expected positive and ascending")

    def counts(self, batch: Batch, rows: range) -> torch.Tensor:
        """(3,) float64: attract weight, repel weight, anchors."""
        return pair_normalizers(*edges_of(batch, rows), count=len(batch), **self._cells(batch, rows)).values

    def lacking(self, counts: torch.Tensor) -> str:
        """Attract edges, cells that repel, or anchors that have both, where the form compares them."""
        kinds = named_zeros(counts[:2], ("attract edges", "cells that repel"))
        return kinds or named_zeros(counts[2:], ("anchors that have both attract edges and cells that repel",))

    def compute(self, encoded: Encoded, batch: Batch, rows: range, counts: torch.Tensor) -> LossValue:
        """The part of the unweighted loss that the items ``rows`` add."""
        embeddings, inverse_temperature, bias = encoded.pooled()
        device = embeddings.device
        out = pair_loss(
            embeddings,
            *edges_of(batch, rows, device),
            inverse_temperature=inverse_temperature,
            bias=bias,
            groups=batch.groups.to(device),
            dimensions=self.matryoshka_dimensions or None,
            normalizers=Normalizers(counts.to(device)),
            backend=self.backend,
            describe=batch.describe,
            **self._cells(batch, rows, device),
        )
        return LossValue(out.loss, {name: float(out.stats[name]) for name in self.STATS})

    def _cells(self, batch: Batch, rows: range, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What decides which cells there are and what they weigh."""
        return {
            "form": self.form.NAME,
            "negatives": str(self.negatives),
            "ambient_weight": self.ambient_weight,
            "families": batch.families.to(device),
            "rows": (rows.start, rows.stop),
        }
