"""Pair losses in linear memory on any device: tiles forwards, and the gradients along with them.

The backward pass only scales: what it would need, the forces on all cosines, is of the size that tiles avoid.

N items, d coordinates, G groups, R anchors, L levels.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cells import Cells, Layout, named_cells
from .levels import Gradient, Levels, reciprocal
from .problem import Problem, row_weights
from .rows import RowWalk, rank_named
from .tiles import TileWalk
from .walk import Rule, Scalars, Sums, Walk, add_forces, spread, walk_cells

Gradients = tuple[Tensor | None, ...]


def chunked_pair_loss(
    embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor, problem: Problem
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (0-d) and its statistics; O((N + E) d) memory besides a few tiles.

    embeddings (N, d) may be of a half precision; inverse_temperature and bias (G,) are wide.
    """
    inputs = (embeddings, inverse_temperature, bias)
    wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs)
    loss, halves, cosines = _PairLoss.apply(*inputs, problem, wanted)
    weights = problem.normalizers.values[:2].to(cosines)
    means = torch.where(weights > 0, cosines / torch.where(weights > 0, weights, 1), 0)
    names = ("attract_loss", "repel_loss", "attract_cosine", "repel_cosine")
    return loss, dict(zip(names, (*halves, *means), strict=True))


class _PairLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, embeddings, inverse_temperature, bias, problem, wanted):
        sums, gradients = sum_pairs(embeddings, inverse_temperature, bias, problem, wanted)
        ctx.dtype = embeddings.dtype
        ctx.save_for_backward(*gradients)
        losses, cosines = (values.to(inverse_temperature.dtype) for values in (sums.losses, sums.cosines))
        ctx.mark_non_differentiable(losses, cosines)
        return sums.losses.sum().to(losses), losses, cosines

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        by_embeddings, *others = (None if saved is None else grad * saved for saved in ctx.saved_tensors)
        return None if by_embeddings is None else by_embeddings.to(ctx.dtype), *others, None, None


def sum_pairs(
    embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor, problem: Problem, wanted: tuple[bool, ...]
) -> tuple[Sums, Gradients]:
    """The sums over all cells, and the wanted gradients of (embeddings, inverse_temperature, bias)."""
    layout = Layout.of(problem)
    levels = Levels(layout.arrange(embeddings), problem.dimensions, inverse_temperature.dtype)
    groups = layout.arrange(problem.groups)[layout.anchors]
    temperature = shared(inverse_temperature, groups)
    walk = Walk(
        levels,
        layout,
        rule=_ranked_rule(problem, layout, temperature, levels)
        if problem.form == "ranked"
        else _pointwise_rule(problem, temperature, shared(bias, groups), levels.count),
        ambient_weight=problem.ambient_weight,
        sums=Sums(levels.count, len(groups), embeddings.device),
        gradient=Gradient(levels) if wanted[0] else None,
        forces=any(wanted),
    )
    tile_cells, other_cells = named_cells(problem, layout, levels.unit.dtype)
    if problem.form == "ranked":
        _walk_ranked(walk, problem.ambient, tile_cells, other_cells)
    else:
        _walk_pointwise(walk, problem.ambient, tile_cells, other_cells)
    return walk.sums, _gradients(walk, problem, groups, len(bias), wanted)


def shared(values: Tensor, groups: Tensor) -> Scalars:
    """The value of each anchor's group (R,), or one number where there is one group."""
    return float(values[0]) if len(values) == 1 else values.detach()[groups]


def _pointwise_rule(problem: Problem, temperature: Scalars, bias: Scalars, levels: int) -> Rule:
    attract, repel, anchors = problem.normalizers.values.tolist()
    if problem.form == "sigmoid":
        attract = repel = anchors
    attract, repel = (1 / (weight * levels) if weight > 0 else 0.0 for weight in (attract, repel))
    return Rule(temperature, [bias] * levels, attract, repel)


def _ranked_rule(problem: Problem, layout: Layout, temperature: Scalars, levels: Levels) -> Rule:
    """A pair of cells of weights w_p and w_n costs w_p w_n / (anchors sum w_p sum w_n); the bias cancels."""
    named = (problem.attract, problem.repel, problem.ignore)
    weights = row_weights(
        named, problem.count, problem.rows, problem.negatives, problem.families, problem.ambient_weight
    )
    product = torch.empty_like(weights[0]).index_copy_(0, layout.ranks, weights[0] * weights[1])
    cost = reciprocal(product * (problem.normalizers.anchors * levels.count))
    return Rule(temperature, [0.0] * levels.count, 0.0, cost.to(levels.unit.dtype))


def _walk_pointwise(walk: Walk, ambient: bool, tile_cells: Cells, other_cells: Cells) -> None:
    if ambient:
        TileWalk(walk, tile_cells).run()
    walk_cells(walk, other_cells)


def _walk_ranked(walk: Walk, ambient: bool, tile_cells: Cells, other_cells: Cells) -> None:
    """Takes the cheapest walk that the edges allow."""
    cells = tile_cells + other_cells
    positives = cells[cells.attract > 0]
    if not ambient:
        rank_named(walk, positives, cells[cells.repel > 0])
    elif len(positives) > 0 and int(torch.bincount(positives.anchors).max()) > 1:
        RowWalk(walk, cells, positives).run()
    else:
        _walk_single(walk, positives, tile_cells, other_cells)


def _walk_single(walk: Walk, positives: Cells, tile_cells: Cells, other_cells: Cells) -> None:
    """Ranks against one positive p an anchor: softplus(s_n - s_p) is a pointwise term whose bias is -t c_ip."""
    rule, levels, layout = walk.rule, walk.levels, walk.layout
    assert isinstance(rule.repel, Tensor)
    cosines = levels.edge_cosines(layout.anchors[positives.anchors], positives.columns)
    offsets = rule.repel.new_zeros(levels.count, len(rule.repel))
    offsets.index_copy_(1, positives.anchors, -cosines * spread(rule.temperature, positives.anchors))
    cost = rule.repel.index_copy(0, positives.anchors, rule.repel[positives.anchors] * positives.attract)
    walk = replace(walk, rule=Rule(rule.temperature, list(offsets), 0.0, cost))
    _walk_pointwise(walk, True, tile_cells, other_cells)
    if walk.forces:
        forces = -walk.sums.force[:, positives.anchors].to(cosines)
        add_forces(walk, positives.anchors, positives.columns, forces, cosines)


def _gradients(walk: Walk, problem: Problem, groups: Tensor, group_count: int, wanted: tuple[bool, ...]) -> Gradients:
    """The wanted gradients, by item and by group, from what the walk added up."""
    sums, temperature = walk.sums, walk.rule.temperature
    by_embeddings = None
    if walk.gradient is not None:
        # Forces are on cosines where anchors have temperatures of their own, else on scores.
        by_embeddings = walk.gradient.finish(1.0 if isinstance(temperature, Tensor) else temperature)
        by_embeddings = walk.layout.restore(by_embeddings)
    by_temperature, by_bias = sums.losses.new_zeros(2, group_count)
    by_temperature.index_add_(0, groups, sums.along)
    # Differences of scores do not see the bias: the ranked forces cancel, but only up to rounding.
    if problem.form != "ranked":
        by_bias.index_add_(0, groups, sums.force.sum(0))
    gradients = by_embeddings, *(values.to(walk.levels.unit.dtype) for values in (by_temperature, by_bias))
    return tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
