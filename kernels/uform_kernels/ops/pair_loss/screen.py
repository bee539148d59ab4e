"""Numbers that are not finite: a cell that has to do with one makes the loss NaN if it counts, else it does not exist.

A weight of 0 times an infinite score is no 0, and in a product of matrices one NaN spoils whole rows. So no back end
meets such a number: before any of them runs, either the loss is NaN, or the number is replaced.

N items, G groups, R anchors.
"""

import torch
from torch import Tensor

from uform_kernels.ops.pair_loss.problem import Problem, active_rows, ambient_counts, row_weights

Inputs = tuple[Tensor, Tensor, Tensor]


def screen(inputs: Inputs, problem: Problem) -> Inputs | None:
    """The embeddings, temperature and bias with all that is not finite replaced; None: it counts, the loss is NaN.

    An embedding is replaced as a whole, by zeros of which nothing is read. What is replaced gets no gradient.
    """
    embeddings, temperature, bias = inputs
    low, high = embeddings.detach()[:, : problem.dimensions[-1]].aminmax(dim=1)
    items, groups = ~(low.isfinite() & high.isfinite()), ~(temperature.isfinite() & bias.isfinite())
    if not bool(items.any() | groups.any()):
        return inputs
    if counts(items, groups, problem):
        return None
    return embeddings.masked_fill(items[:, None], 0), temperature.masked_fill(groups, 1), bias.masked_fill(groups, 0)


def counts(items: Tensor, groups: Tensor, problem: Problem) -> bool:
    """Whether a cell of positive weight, in a row that adds to the loss, has to do with one of these (N,), (G,)."""
    start, stop = problem.rows
    named = problem.attract, problem.repel, problem.ignore
    cells = problem.count, problem.rows, problem.negatives, problem.families
    active = active_rows(*row_weights(named, *cells, problem.ambient_weight), problem.form)
    met = items[start:stop] | groups[problem.groups[start:stop]]
    if problem.ambient:
        met = met | (ambient_counts(named, *cells, items) > 0)
    for edges in named[:2]:
        bad = items[edges.ids] & (edges.weights_as(torch.float64) > 0)
        met = met | (torch.bincount(edges.anchors()[bad], minlength=stop - start) > 0)
    return bool((active & met).any())
