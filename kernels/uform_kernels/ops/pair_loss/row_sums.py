"""The ranked form of whole rows: a chunk of anchors against every candidate at once, or against its repel edges alone.

N items, R anchors, L levels, r rows of a chunk, n candidates, P positives.
"""

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from uform_kernels.ops.pair_loss.cells import Cells
from uform_kernels.ops.pair_loss.ranked_form import rank_rows
from uform_kernels.ops.pair_loss.threads import share_out
from uform_kernels.ops.pair_loss.tile_order import Walk, add_forces, spread

# Cells whose scores of all levels are held at once (16 MiB in float32), and rows that make a product efficient.
HELD_CELLS = 1 << 22
LEAST_ROWS, MOST_ROWS = 16, 256

# Cells ranked at once: their scores, weights and table places stay in the second-level caches of two cores.
RANKED_CELLS = 1 << 18


class Padded:
    """Cells (E,) of one kind, sorted by anchor, as rows of equal length, a chunk of anchors at a time."""

    def __init__(self, cells: Cells, rows: int) -> None:
        self.cells = cells[cells.anchors.argsort(stable=True)]
        self.starts = torch.searchsorted(self.cells.anchors, torch.arange(rows + 1, device=cells.anchors.device))
        self.bounds = self.starts.tolist()

    def part(self, rows: slice) -> slice:
        """The chunk's cells."""
        return slice(self.bounds[rows.start], self.bounds[rows.stop])

    def width(self, rows: slice) -> int:
        """The most cells that an anchor of the chunk has."""
        counts = self.starts[rows.start : rows.stop + 1].diff()
        return int(counts.max()) if len(counts) else 0

    def places(self, rows: slice, width: int) -> Tensor:
        """Where the chunk's cells lie in flat rows of `width`."""
        anchors = self.cells.anchors[self.part(rows)]
        slots = torch.arange(self.bounds[rows.start], self.bounds[rows.stop], device=anchors.device)
        return (anchors - rows.start) * width + slots - self.starts[anchors]

    def spread(self, values: Tensor, rows: slice) -> Tensor:
        """(r, width) the chunk's part of values (E,), 0 where a row is shorter."""
        width = self.width(rows)
        padded = values.new_zeros(rows.stop - rows.start, width)
        padded.view(-1)[self.places(rows, width)] = values[self.part(rows)]
        return padded

    def collect(self, padded: Tensor, rows: slice) -> Tensor:
        """The chunk's cells of (r, width)."""
        return padded.reshape(-1)[self.places(rows, padded.shape[1])]


def rank_named(walk: Walk, positives: Cells, negatives: Cells) -> None:
    """Ranks each anchor's repel edges against its attract edges: O(E d) time, O(E) memory."""
    rows, sums = len(walk.layout.anchors), walk.sums
    plus, minus = Padded(positives, rows), Padded(negatives, rows)
    cosines, other_cosines = (
        walk.levels.edge_cosines(walk.layout.anchors[kind.cells.anchors], kind.cells.columns) for kind in (plus, minus)
    )
    pulls, pushes = torch.zeros_like(cosines), torch.zeros_like(other_cosines)
    everything = slice(0, rows)
    for chunk in chunks(everything, ranked_rows(minus.width(everything), plus.width(everything))):
        shares, weights = plus.spread(plus.cells.attract, chunk), minus.spread(minus.cells.repel, chunk)
        temperature, cost = spread(walk.rule.temperature, chunk, 1), spread(walk.rule.repel, chunk, 1)
        for level in range(walk.levels.count):
            scores = minus.spread(other_cosines[level], chunk) * temperature
            losses, pull = rank_rows(
                scores, weights, plus.spread(cosines[level], chunk) * temperature, shares, walk.forces
            )
            sums.losses[1] += (losses[:, None] * cost).sum()
            pulls[level, plus.part(chunk)] = plus.collect(pull * cost, chunk)
            pushes[level, minus.part(chunk)] = minus.collect(scores * cost, chunk)
    sums.cosines += torch.stack([plus.cells.attract @ cosines[-1], minus.cells.repel @ other_cosines[-1]])
    if walk.forces:
        add_forces(walk, plus.cells.anchors, plus.cells.columns, pulls, cosines)
        add_forces(walk, minus.cells.anchors, minus.cells.columns, pushes, other_cosines)


class RowWalk:
    """One pass over all cells of a ranked loss with ambient cells; `named` are the cells that an edge names."""

    def __init__(self, walk: Walk, named: Cells, positives: Cells) -> None:
        self.walk = walk
        rows = len(walk.layout.anchors)
        self.named, self.plus = Padded(named, rows), Padded(positives, rows)

    def run(self) -> None:
        """Walks chunk after chunk of anchors."""
        rows, columns = len(self.walk.layout.anchors), len(self.walk.levels.vectors)
        step = HELD_CELLS // (columns * self.walk.levels.count)
        share_out(self.walk, [*chunks(slice(0, rows), min(max(step, LEAST_ROWS), MOST_ROWS))], self._work)

    def _work(self, walk: Walk, parts: Sequence[slice]) -> None:
        """Walks some chunks, adding to `walk`."""
        own = copy(self)
        own.walk = walk
        for chunk in parts:
            own._chunk(chunk)

    def _chunk(self, chunk: slice) -> None:
        levels, gradient = self.walk.levels, self.walk.gradient
        anchors = self.walk.layout.anchors[chunk]
        vectors = levels.vectors[anchors]
        products = levels.vectors.new_zeros(len(vectors), len(levels.vectors))
        forces = []
        for level, block in enumerate(levels.blocks):
            products.addmm_(vectors[:, block], levels.vectors[:, block].T)
            forces.append(self._level(level, chunk, anchors, products))
        if gradient is None:
            return
        total = forces[-1]
        for level, block in reversed([*enumerate(levels.blocks)]):
            if level < levels.count - 1:
                total.add_(forces[level])
            gradient.vectors[:, block].addmm_(total.T, vectors[:, block])
            gradient.vectors[:, block].index_add_(0, anchors, total @ levels.vectors[:, block])

    def _level(self, level: int, chunk: slice, anchors: Tensor, products: Tensor) -> Tensor:
        """Forces (r, N) on a level's products."""
        levels, gradient = self.walk.levels, self.walk.gradient
        scale = levels.scales[level]
        if scale is None:
            return self._rank(level, chunk, products)
        left, right = scale[anchors, None], scale
        cosines = (products * left).mul_(right)
        forces = self._rank(level, chunk, cosines)
        if gradient is not None:
            along = cosines.mul_(forces)
            gradient.radial[level].index_add_(0, anchors, along.sum(1).double())
            gradient.radial[level] += along.sum(0)
            forces.mul_(left).mul_(right)
        return forces

    def _rank(self, level: int, chunk: slice, cosines: Tensor) -> Tensor:
        """dL/dc (r, N) of a chunk's cosines; a few rows are ranked at a time."""
        forces = torch.empty_like(cosines)
        columns, shares = (
            self.plus.spread(values, chunk) for values in (self.plus.cells.columns, self.plus.cells.attract)
        )
        for rows in chunks(chunk, ranked_rows(cosines.shape[1], columns.shape[1])):
            part = slice(rows.start - chunk.start, rows.stop - chunk.start)
            self._rank_few(level, rows, cosines[part], columns[part], shares[part], forces[part])
        return forces

    def _rank_few(
        self, level: int, rows: slice, cosines: Tensor, columns: Tensor, shares: Tensor, forces: Tensor
    ) -> None:
        walk, sums, rule = self.walk, self.walk.sums, self.walk.rule
        temperature, cost = spread(rule.temperature, rows, 1), spread(rule.repel, rows, 1)
        named = self.named.cells[self.named.part(rows)]
        places = (named.anchors - rows.start) * cosines.shape[1] + named.columns
        weights = self._weights(rows, cosines, places, named.repel)
        positives = cosines.gather(1, columns)
        if level == walk.levels.count - 1:
            sums.cosines += torch.stack([(shares * positives).sum(), (weights * cosines).sum()])
        torch.mul(cosines, temperature, out=forces)
        # A cell without weight, such as the anchor's own, must not widen the range of scores that a table covers.
        forces.view(-1)[places[named.repel == 0]] = 0
        losses, pulls = rank_rows(forces, weights, positives * temperature, shares, walk.forces)
        sums.losses[1] += (losses[:, None] * cost).sum()
        if not walk.forces:
            return
        sums.along[rows] += ((forces * cosines).sum(1, True) + (pulls * positives).sum(1, True)).mul(cost).squeeze(1)
        forces.scatter_add_(1, columns, pulls).mul_(cost)
        if isinstance(temperature, Tensor):
            forces.mul_(temperature)

    def _weights(self, rows: slice, like: Tensor, places: Tensor, repel: Tensor) -> Tensor:
        """(r, N) the weight with which each cell repels, that of the named cells at flat `places` being `repel`."""
        layout = self.walk.layout
        weights = torch.full_like(like, self.walk.ambient_weight)
        if layout.families is not None:
            weights *= layout.families[layout.anchors[rows], None] != layout.families
        weights.view(-1)[places] = repel
        return weights


def ranked_rows(candidates: int, positives: int) -> int:
    """How many rows to rank at once; a table holds about 64 nodes against every positive."""
    return max(RANKED_CELLS // max(candidates, 64 * positives, 1), 1)


def chunks(rows: slice, step: int) -> Iterator[slice]:
    """Slices of at most `step` anchors."""
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))
