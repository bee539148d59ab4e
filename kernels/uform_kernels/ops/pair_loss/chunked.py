"""Pair losses in linear memory on any device: tiles forwards, and the gradients along with them.

The backward pass only scales: what it would need, the forces on all cosines, is of the size that tiles avoid.

N items, d coordinates, G groups, R anchors, L levels.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uform_kernels.ops.pair_loss.cells import Cells, Layout, named_cells
from uform_kernels.ops.pair_loss.matryoshka import Gradient, Levels, has_faint_prefix, reciprocal
from uform_kernels.ops.pair_loss.problem import STATS, Problem, row_weights
from uform_kernels.ops.pair_loss.row_sums import RowWalk, rank_named
from uform_kernels.ops.pair_loss.tile_order import Rule, Scalars, Sums, Walk, add_forces, spread, walk_cells
from uform_kernels.ops.pair_loss.tiles import TileWalk

Gradients = tuple[Tensor | None, ...]


def chunked_pair_loss(
    embeddings: Tensor,
    inverse_temperature: Tensor,
    bias: Tensor,
    problem: Problem,
    tile_walk: type[TileWalk] = TileWalk,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (0-d) and its statistics; O((N + E) d) memory besides a few tiles.

    embeddings (N, d) may be of a half precision; inverse_temperature and bias (G,) are wide.
    tile_walk: what walks the ambient cells of a pointwise loss
    """
    if has_faint_prefix(embeddings, problem.dimensions, inverse_temperature.dtype):
        return _level_by_level(embeddings, inverse_temperature, bias, problem, tile_walk)
    inputs = (embeddings, inverse_temperature, bias)
    wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs)
    loss, halves, cosines = _PairLoss.apply(*inputs, problem, wanted, tile_walk)
    weights = problem.normalizers.values[:2].to(cosines)
    means = torch.where(weights > 0, cosines / torch.where(weights > 0, weights, 1), 0)
    return loss, dict(zip(STATS, (*halves, *means), strict=True))


def _level_by_level(
    embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor, problem: Problem, tile_walk: type[TileWalk]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, each level from vectors that are scaled for it alone: a pass for each, exact for any prefix."""
    parts = []
    for size in problem.dimensions:
        level = replace(problem, dimensions=(size,))
        parts.append(chunked_pair_loss(embeddings[:, :size], inverse_temperature, bias, level, tile_walk))
    losses, stats = zip(*parts, strict=True)
    halves = {name: torch.stack([part[name] for part in stats]).mean() for name in STATS[:2]}
    return torch.stack(losses).mean(), stats[-1] | halves


class _PairLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, embeddings, inverse_temperature, bias, problem, wanted, tile_walk):
        sums, gradients = sum_pairs(embeddings, inverse_temperature, bias, problem, wanted, tile_walk)
        ctx.dtype = embeddings.dtype
        ctx.save_for_backward(*gradients)
        losses, cosines = (values.to(inverse_temperature.dtype) for values in (sums.losses, sums.cosines))
        ctx.mark_non_differentiable(losses, cosines)
        return sums.losses.sum().to(losses), losses, cosines

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        by_embeddings, *others = (None if saved is None else grad * saved for saved in ctx.saved_tensors)
        return None if by_embeddings is None else by_embeddings.to(ctx.dtype), *others, None, None, None


def sum_pairs(
    embeddings: Tensor,
    inverse_temperature: Tensor,
    bias: Tensor,
    problem: Problem,
    wanted: tuple[bool, ...],
    tile_walk: type[TileWalk],
) -> tuple[Sums, Gradients]:
    """The sums over all cells, and the wanted gradients of (embeddings, inverse_temperature, bias)."""
    wide = inverse_temperature.dtype
    layout = Layout.of(problem)
    groups = layout.arrange(problem.groups)[layout.anchors]
    temperature = shared(inverse_temperature, groups)
    tile_cells, other_cells = named_cells(problem, layout, wide)
    positives = (tile_cells + other_cells)[torch.cat([tile_cells.attract, other_cells.attract]) > 0]
    by_rows = problem.form == "ranked" and not (problem.ambient and most_per_anchor(positives) <= 1)
    keep = not by_rows and tile_walk.keeps(embeddings)
    levels = Levels(layout.arrange(embeddings), problem.dimensions, wide, keep)
    count = levels.count
    walk = Walk(
        levels,
        layout,
        rule=_ranked_rule(problem, layout, temperature, count, wide)
        if problem.form == "ranked"
        else _pointwise_rule(problem, temperature, shared(bias, groups), count),
        ambient_weight=problem.ambient_weight,
        sums=Sums(count, len(groups), embeddings.device),
        gradient=Gradient(levels) if wanted[0] else None,
        forces=any(wanted),
    )
    if by_rows:
        _walk_rows(walk, problem.ambient, tile_cells + other_cells, positives)
    elif problem.form == "ranked":
        _walk_single(walk, positives, tile_cells, other_cells, tile_walk)
    else:
        _walk_pointwise(walk, problem.ambient, tile_cells, other_cells, tile_walk)
    return walk.sums, _gradients(walk, problem, groups, len(bias), wanted)


def most_per_anchor(cells: Cells) -> int:
    """The largest number of cells of one anchor."""
    return int(torch.bincount(cells.anchors).max()) if len(cells) else 0


def shared(values: Tensor, groups: Tensor) -> Scalars:
    """The value of each anchor's group (R,), or one number where there is one group."""
    return float(values[0]) if len(values) == 1 else values.detach()[groups]


def _pointwise_rule(problem: Problem, temperature: Scalars, bias: Scalars, levels: int) -> Rule:
    attract, repel, anchors = problem.normalizers.values.tolist()
    if problem.form == "sigmoid":
        attract = repel = anchors
    attract, repel = (1 / (weight * levels) if weight > 0 else 0.0 for weight in (attract, repel))
    return Rule(temperature, [bias] * levels, attract, repel)


def _ranked_rule(problem: Problem, layout: Layout, temperature: Scalars, levels: int, wide: torch.dtype) -> Rule:
    """A pair of cells of weights w_p and w_n costs w_p w_n / (anchors sum w_p sum w_n); the bias cancels."""
    named = (problem.attract, problem.repel, problem.ignore)
    weights = row_weights(
        named, problem.count, problem.rows, problem.negatives, problem.families, problem.ambient_weight
    )
    product = torch.empty_like(weights[0]).index_copy_(0, layout.ranks, weights[0] * weights[1])
    cost = reciprocal(product * (problem.normalizers.anchors * levels))
    return Rule(temperature, [0.0] * levels, 0.0, cost.to(wide))


def _walk_pointwise(
    walk: Walk, ambient: bool, tile_cells: Cells, other_cells: Cells, tile_walk: type[TileWalk]
) -> None:
    if ambient:
        tile_walk(walk, tile_cells).run()
    walk_cells(walk, other_cells)


def _walk_single(
    walk: Walk, positives: Cells, tile_cells: Cells, other_cells: Cells, tile_walk: type[TileWalk]
) -> None:
    """Ranks against one positive p an anchor: softplus(s_n - s_p) is a pointwise term whose bias is -t c_ip."""
    rule, levels, anchors = walk.rule, walk.levels, positives.anchors
    assert isinstance(rule.repel, Tensor)
    cosines = levels.edge_cosines(walk.layout.anchors[anchors], positives.columns)
    offsets = rule.repel.new_zeros(levels.count, len(rule.repel))
    offsets.index_copy_(1, anchors, -cosines * spread(rule.temperature, anchors))
    cost = rule.repel.index_copy(0, anchors, rule.repel[anchors] * positives.attract)
    walk = replace(walk, rule=Rule(rule.temperature, list(offsets), 0.0, cost))
    _walk_pointwise(walk, True, tile_cells, other_cells, tile_walk)
    if walk.forces:
        add_forces(walk, anchors, positives.columns, -walk.sums.force[:, anchors].to(cosines), cosines)


def _walk_rows(walk: Walk, ambient: bool, cells: Cells, positives: Cells) -> None:
    """Ranks against any positives: all candidates of a row at once, or its repel edges alone."""
    if ambient:
        RowWalk(walk, cells, positives).run()
    else:
        rank_named(walk, positives, cells[cells.repel > 0])


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
    gradients = by_embeddings, *(values.to(walk.levels.wide) for values in (by_temperature, by_bias))
    return tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
