"""The definition: every cell of every anchor at once, in plain differentiable torch. For small inputs.

N items, R anchors, E attract edges.
"""

import torch
from torch import Tensor

from uform_kernels.edges import Edges
from uform_kernels.ops.pair_loss.problem import Problem, softplus


def reference_pair_loss(
    embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor, problem: Problem
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (0-d) and its statistics, differentiable by autograd; O(R N) memory, ranked O(E N)."""
    anchors = slice(*problem.rows)
    attract, repel = cell_weights(problem, embeddings.dtype)
    groups = problem.groups[anchors]
    temperature, offset = inverse_temperature[groups, None], bias[groups, None]
    halves, cosines = [], torch.zeros(())
    for dimension in problem.dimensions:
        unit = normalize(embeddings[:, :dimension])
        cosines = unit[anchors] @ unit.T
        halves.append(form_loss(temperature * cosines + offset, attract, repel, problem))
    attract_loss, repel_loss = (torch.stack(half).mean() for half in zip(*halves, strict=True))
    stats = {
        "attract_loss": attract_loss.detach(),
        "repel_loss": repel_loss.detach(),
        "attract_cosine": divide((attract * cosines.detach()).sum(), problem.normalizers.attract),
        "repel_cosine": divide((repel * cosines.detach()).sum(), problem.normalizers.repel),
    }
    return attract_loss + repel_loss, stats


def normalize(vectors: Tensor) -> Tensor:
    """Unit vectors; a zero vector stays zero and gets no gradient, for it is replaced before the norm is taken.

    So does one of subnormal coordinates, which some devices take for zeros and whose gradient may be no finite number.
    """
    largest = vectors.detach().abs().amax(1, keepdim=True)
    real = largest >= torch.finfo(vectors.dtype).tiny
    scaled = torch.where(real, vectors, 1) / torch.where(real, largest, 1)
    return torch.where(real, scaled / scaled.norm(dim=1, keepdim=True), 0)


def cell_weights(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, N), (R, N): the weight with which each cell attracts and repels."""
    start, stop = problem.rows
    items = torch.arange(problem.count, device=problem.groups.device)
    repel = torch.zeros(stop - start, problem.count, dtype=dtype, device=items.device)
    if problem.ambient:
        ambient = items[start:stop, None] != items
        if problem.families is not None:
            ambient = problem.families[start:stop, None] != problem.families
        repel += problem.ambient_weight * ambient.to(dtype)
    attract = torch.zeros_like(repel)
    for edges in (problem.attract, problem.repel, problem.ignore):
        repel[edges.anchors(), edges.ids] = 0
    set_cells(attract, problem.attract)
    set_cells(repel, problem.repel)
    return attract, repel


def set_cells(weights: Tensor, edges: Edges) -> None:
    """Writes the weights of the edges into (R, N)."""
    weights[edges.anchors(), edges.ids] = edges.weights_as(weights.dtype)


def form_loss(scores: Tensor, attract: Tensor, repel: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """What the attract and the repel cells add to the loss, 0-d each; the ranked form counts as repelling."""
    counts = problem.normalizers
    if problem.form == "ranked":
        return 0 * scores.sum(), divide(ranked_rows(scores, attract, repel).sum(), counts.anchors)
    pulls, pushes = (attract * softplus(-scores)).sum(), (repel * softplus(scores)).sum()
    if problem.form == "balanced":
        return divide(pulls, counts.attract), divide(pushes, counts.repel)
    return divide(pulls, counts.anchors), divide(pushes, counts.anchors)


def ranked_rows(scores: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
    """(R,) each anchor's weighted mean of softplus(s_n - s_p) over its pairs of an attract and a repel cell."""
    anchor, item = attract.nonzero(as_tuple=True)
    differences = scores[anchor] - scores[anchor, item, None]
    per_edge = (repel[anchor] * softplus(differences)).sum(1) * attract[anchor, item]
    sums = scores.new_zeros(len(scores)).index_add(0, anchor, per_edge)
    return divide(sums, attract.sum(1) * repel.sum(1))


def divide(total: Tensor, weight: Tensor) -> Tensor:
    """`total / weight`, and 0 with gradient 0 where there is no weight."""
    weight = weight.to(total.dtype)
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1), 0)
