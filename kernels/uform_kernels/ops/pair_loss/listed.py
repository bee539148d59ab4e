"""The three forms of a pair loss over listed cells: the scores of each anchor with the items that it names.

Memory is linear in the cells, also where rows are of very different lengths.

Letters: C cells, R anchors (rows), P attract cells and N repel cells of one row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uform_kernels.ops.pair_loss.problem import softplus
from uform_kernels.ops.pair_loss.reference import divide


class Cells(NamedTuple):
    """C cells, in any order.

    Args:
        rows: (C,) int64, the anchor of each, from 0.
        attract, repel: (C,) float, with what weight it is drawn near and pushed away; one of the two is zero.
    """

    rows: Tensor
    attract: Tensor
    repel: Tensor


def form_loss(form: str, scores: Tensor, cells: Cells, counts: Tensor) -> Tensor:
    """What some rows add to a loss, 0-d.

        balanced: sum_attract w softplus(-s) / counts[0] + sum_repel w softplus(s) / counts[1]
        sigmoid:  (sum_attract w softplus(-s) + sum_repel w softplus(s)) / counts[2]
        ranked:   sum over rows of sum_p sum_n w_p w_n softplus(s_n - s_p) / (sum_p w_p sum_n w_n) / counts[2]

    Args:
        form: ``balanced``, ``sigmoid`` or ``ranked``.
        scores: (C,) float.
        cells: of the rows.
        counts: (3,) attract weight, repel weight and anchors of the whole batch; a half without weight adds 0.
    """
    counts = counts.to(scores.device)
    if form == "ranked":
        return divide(_Ranked.apply(scores, cells), counts[2])
    pulls, pushes = costs(cells.attract, -scores), costs(cells.repel, scores)
    if form == "balanced":
        return divide(pulls, counts[0]) + divide(pushes, counts[1])
    return divide(pulls + pushes, counts[2])


def costs(weights: Tensor, scores: Tensor) -> Tensor:
    """0-d: ``sum w softplus(s)`` over cells (C,). One of weight 0 does not exist, whatever its score."""
    real = weights > 0
    return (weights[real] * softplus(scores[real])).sum()


def weighted_mean(weights: Tensor, values: Tensor, total: Tensor) -> float:
    """The part that some cells add to a mean whose weights sum to ``total``; 0 if that is 0."""
    real = weights > 0
    return float(divide((weights[real] * values.detach()[real]).sum(), total.to(values.device)))


def rank(scores: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
    """The sum over rows of the pairwise logistic loss, 0-d, and its gradient (C,).

    One attract cell of each row at a time meets the row's repel cells: O(sum of P N) time and O(C) memory. Nothing is
    added in an order that depends on the device.
    """
    rows = 1 + int(cells.rows.max()) if len(scores) else 0
    positives, heights = grouped(cells.rows, cells.attract > 0, torch.arange(rows, device=scores.device))
    # Rows with many attract cells first: those that still have one are then a prefix.
    order = heights.argsort(descending=True, stable=True)
    heights, firsts = heights[order], (heights.cumsum(0) - heights)[order]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
    negatives, widths = grouped(cells.rows, cells.repel > 0, place)
    pulls, pushes = cells.attract[positives], cells.repel[negatives]
    shares = pushes / spread(row_sums(pushes, widths), widths)
    pull = row_sums(pulls, heights[place])[order]
    loss, slope, force = scores.new_zeros(()), torch.zeros_like(scores), torch.zeros_like(shares)
    for level in range(int(heights.max()) if rows else 0):
        live = int((heights > level).sum())
        among = widths[:live]
        stop = int(among.sum())
        at = positives[firsts[:live] + level]
        weight = shares[:stop] * spread(cells.attract[at] / pull[:live], among)
        difference = scores[negatives[:stop]] - spread(scores[at], among)
        loss += (weight * softplus(difference)).sum()
        pushed = weight * difference.sigmoid()
        force[:stop] += pushed
        slope[at] = -row_sums(pushed, among)
    slope[negatives] = force
    return loss, slope


def grouped(rows: Tensor, wanted: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the wanted cells, those of one row together, and how many each row has.

    Args:
        rows: (C,) the row of each cell.
        wanted: (C,) bool.
        place: (R,) where each row comes.
    """
    cells = wanted.nonzero().squeeze(1)
    places, order = place[rows[cells]].sort(stable=True)
    return cells[order], torch.bincount(places, minlength=len(place))


def ends(lengths: Tensor) -> Tensor:
    """Offsets of segments of these lengths, the first 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """The sum over each row's cells, in their order."""
    return torch.segment_reduce(values, "sum", offsets=ends(lengths), initial=0)


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """A row's value for each of its cells."""
    return values.repeat_interleave(lengths, output_size=int(lengths.sum()))


class _Ranked(torch.autograd.Function):
    """Autograd would keep every pair of an attract and a repel cell; the gradient is found on the way instead."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, cells: Cells) -> Tensor:
        loss, slope = rank(scores, cells)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None
