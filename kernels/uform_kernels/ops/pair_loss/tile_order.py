"""What every pass over cells shares: the rule that turns cosines into forces, and what they add up to.

N items, R anchors, L levels, E named cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from uform_kernels.ops.pair_loss.cells import Cells, Layout
from uform_kernels.ops.pair_loss.matryoshka import Gradient, Levels
from uform_kernels.ops.pair_loss.problem import softplus

Scalars = float | Tensor


@dataclass(frozen=True, eq=False)
class Rule:
    """How cosines become scores s_ij = t_i c_ij + b_i, and what a cell of weight 1 costs.

    temperature: t, one number or (R,)
    offsets: b, for each level one number or (R,)
    attract: what w softplus(-s) of an attracting cell is multiplied by, the mean over levels included
    repel: the same for w softplus(s) of a repelling cell, one number or (R,)
    """

    temperature: Scalars
    offsets: list[Scalars]
    attract: float
    repel: Scalars

    @property
    def uniform(self) -> bool:
        """Whether all anchors share it, so that cells (i, j) and (j, i) have the same score and force."""
        return not any(isinstance(value, Tensor) for value in (self.temperature, self.repel, *self.offsets))


class Sums:
    """What the cells add up to, in float64.

    losses: (2,) the attract and the repel part
    cosines: (2,) sums of weight times cosine, at the last level
    force: (L, R) sum over j of dL/ds_ij; of a uniform rule only its total means something
    along: (R,) sum over levels and j of dL/ds_ij c_ij; of a uniform rule only its total means something
    """

    def __init__(self, levels: int, rows: int, device: torch.device) -> None:
        self.losses, self.cosines, self.force, self.along = (
            torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((2,), (2,), (levels, rows), (rows,))
        )

    def add(self, level: int, anchors: Tensor, forces: Tensor, cosines: Tensor) -> None:
        """Adds dL/ds (E,) of listed cells of a level, whose cosines are (E,)."""
        self.force[level].index_add_(0, anchors, forces.double())
        self.along.index_add_(0, anchors, (forces * cosines).double())

    def absorb(self, other: "Sums") -> None:
        """Adds what another walk added up."""
        for own, more in zip(vars(self).values(), vars(other).values(), strict=True):
            own += more


@dataclass(frozen=True, eq=False)
class Walk:
    """A pass over cells: what it reads, and the sums and gradient that it adds to.

    gradient: None where no products with forces are wanted
    forces: whether forces are wanted at all, for any gradient
    """

    levels: Levels
    layout: Layout
    rule: Rule
    ambient_weight: float
    sums: Sums
    gradient: Gradient | None
    forces: bool


def spread(value: Scalars, rows: slice | Tensor, axis: int | None = None) -> Scalars:
    """Values of some anchors: a column beside cells that are summed along axis 1, a row along axis 0, else flat."""
    if not isinstance(value, Tensor):
        return value
    return value[rows] if axis is None else value[rows].unsqueeze(axis)


def cell_terms(rule: Rule, scores: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
    """(2, E) attract and repel losses, and (E,) dL/ds, of named cells with scores (E,)."""
    pull, push = rule.attract * cells.attract, spread(rule.repel, cells.anchors) * cells.repel
    losses = torch.stack([pull * softplus(-scores), push * softplus(scores)])
    return losses, push * scores.sigmoid() - pull * (-scores).sigmoid()


def walk_cells(walk: Walk, cells: Cells) -> None:
    """Adds cells that no tile covers, each from its own two vectors: O(E d) time, O(E) memory."""
    if not len(cells):
        return
    rule, sums = walk.rule, walk.sums
    rows = walk.layout.anchors[cells.anchors]
    cosines = walk.levels.edge_cosines(rows, cells.columns)
    temperature = spread(rule.temperature, cells.anchors)
    forces = torch.empty_like(cosines)
    for level, offset in enumerate(rule.offsets):
        scores = temperature * cosines[level] + spread(offset, cells.anchors)
        losses, forces[level] = cell_terms(rule, scores, cells)
        sums.losses += losses.sum(1)
    sums.cosines += (torch.stack([cells.attract, cells.repel]) * cosines[-1]).sum(1)
    if walk.forces:
        add_forces(walk, cells.anchors, cells.columns, forces, cosines)


def add_forces(walk: Walk, anchors: Tensor, columns: Tensor, forces: Tensor, cosines: Tensor) -> None:
    """Adds dL/ds (L, E) of listed cells, whose cosines are (L, E), to the sums and the gradient."""
    for level in range(walk.levels.count):
        walk.sums.add(level, anchors, forces[level], cosines[level])
    if walk.gradient is None:
        return
    if isinstance(walk.rule.temperature, Tensor):
        forces = forces * walk.rule.temperature[anchors]
    walk.gradient.add_edges(walk.layout.anchors[anchors], columns, forces, cosines)
