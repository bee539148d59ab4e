"""Balanced and sigmoid losses, and ranked ones with one positive an anchor: ambient cells, tile by tile.

All three are sums of w softplus(s) over repelling cells and w softplus(-s) over attracting ones, with scores
s_ij = t_i c_ij + b_i (with a single positive p, the ranked form's b_i is -t_i c_ip). Nothing but a few tiles is held.

Cosines are symmetric, so where all items are anchors a tile above the diagonal serves as its transpose too: two
products with the sum of both forces in place of four. Where scores do not depend on the anchor the forces are
symmetric as well, and computed once.

N items, R anchors, L levels, I x J a tile.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from uform_kernels.ops.pair_loss.cells import Buckets, Cells, Grid, Layout, complete
from uform_kernels.ops.pair_loss.matryoshka import Levels
from uform_kernels.ops.pair_loss.problem import softplus
from uform_kernels.ops.pair_loss.threads import share_out
from uform_kernels.ops.pair_loss.tile_order import Walk, cell_terms, spread

# Three float32 tiles of this side fill the second-level caches of two cores.
SIDE = 512


@dataclass(frozen=True)
class Tile:
    """A tile to walk: `mirrored` where it also stands for its transpose, `mixed` where families meet in it."""

    number: int
    rows: slice
    columns: slice
    mirrored: bool
    mixed: bool


def ambient_tiles(grid: Grid, layout: Layout, half: bool) -> Iterator[list[Tile]]:
    """Row by row of tiles, those with ambient cells; with `half`, those on or above the diagonal."""
    row_spans = _family_spans(layout, layout.anchors, [grid.row_slice(row) for row in range(grid.down)])
    column_spans = _family_spans(layout, None, [grid.column_slice(column) for column in range(grid.across)])
    for row, (first, last) in enumerate(row_spans):
        tiles = []
        for column in range(row if half else 0, grid.across):
            low, high = column_spans[column]
            if first == last == low == high and layout.families is not None:
                continue
            mixed = layout.families is not None and first <= high and low <= last
            number = row * grid.across + column
            tiles.append(Tile(number, grid.row_slice(row), grid.column_slice(column), half and column > row, mixed))
        yield tiles


def _family_spans(layout: Layout, positions: Tensor | None, parts: list[slice]) -> list[tuple[int, int]]:
    """The first and last family in each part of the positions (of all, for None)."""
    if layout.families is None:
        return [(0, 0)] * len(parts)
    families = (layout.families if positions is None else layout.families[positions]).tolist()
    return [(families[part.start], families[part.stop - 1]) for part in parts]


class TileWalk:
    """One pass over the ambient tiles of a pair loss; `cells` are those that stand in the place of ambient ones."""

    side = SIDE
    threaded = True

    @staticmethod
    def keeps(embeddings: Tensor) -> bool:
        """Whether products are taken of the embeddings' own half-precision numbers."""
        return False

    def __init__(self, walk: Walk, cells: Cells) -> None:
        self.walk = walk
        anchors, items = len(walk.layout.anchors), len(walk.levels.vectors)
        self.half = anchors == items
        self.grid = Grid(anchors, items, self.side)
        self.forward, self.backward = self._bucket(cells)

    def _allocate(self, size: int) -> None:
        """Tiles that every step reuses."""

        def tile() -> Tensor:
            return torch.empty(size, dtype=self.walk.levels.wide, device=self.walk.levels.vectors.device)

        self.products, self.cosines, self.back, self.scratch = tile(), tile(), tile(), tile()
        self.forces = [tile() for _ in self.walk.levels.blocks]

    def _bucket(self, cells: Cells) -> tuple[Buckets, Buckets]:
        """The named cells by tile: those of the tiles as they are, and those of their transposes."""
        if self.half:
            cells = complete(cells, self.grid.columns, self.walk.ambient_weight)
        under = (cells.anchors // self.side > cells.columns // self.side) & self.half
        above, below = cells[~under], cells[under]
        return (
            self.grid.bucket(above, above.anchors, above.columns),
            self.grid.bucket(below, below.columns, below.anchors),
        )

    def run(self) -> None:
        """Walks every tile."""
        walk = self.walk
        walk.sums.cosines[1] += walk.ambient_weight * all_cosines(walk.levels, walk.layout)
        rows = [tiles for tiles in ambient_tiles(self.grid, walk.layout, self.half) if tiles]
        if self.threaded:
            share_out(walk, rows, self._work)
        else:
            self._work(walk, rows)

    def _work(self, walk: Walk, rows: Sequence[list[Tile]]) -> None:
        """Walks some rows of tiles, adding to `walk`."""
        own = copy(self)
        own.walk = walk
        own._allocate(min(self.side, self.grid.rows) * min(self.side, self.grid.columns))
        for tiles in rows:
            own._row(tiles)

    def _row(self, tiles: list[Tile]) -> None:
        walk = self.walk
        anchors = walk.layout.anchors[tiles[0].rows]
        vectors = walk.levels.vectors[anchors]
        gathered = torch.zeros_like(vectors, dtype=walk.levels.wide)
        for tile in tiles:
            self._tile(tile, anchors, vectors, gathered)
        if walk.gradient is not None:
            walk.gradient.vectors.index_add_(0, anchors, gathered)

    def _tile(self, tile: Tile, anchors: Tensor, vectors: Tensor, gathered: Tensor) -> None:
        levels, gradient = self.walk.levels, self.walk.gradient
        others = levels.vectors[tile.columns]
        products = shaped(self.products, (len(vectors), len(others)))
        for level, block in enumerate(levels.blocks):
            multiply(vectors[:, block], others[:, block].T, products, add=level > 0)
            self._level(level, tile, anchors, products)
        if gradient is None:
            return
        total = shaped(self.forces[-1], products.shape)
        for level, block in reversed([*enumerate(levels.blocks)]):
            if level < levels.count - 1:
                total.add_(shaped(self.forces[level], products.shape))
            multiply(total, others[:, block], gathered[:, block], add=True)
            multiply(total.T, vectors[:, block], gradient.vectors[tile.columns, block], add=True)

    def _kin(self, tile: Tile, anchors: Tensor) -> Tensor | None:
        """(I, J) which cells lie within one family; None where none does."""
        families = self.walk.layout.families
        if families is None or not tile.mixed:
            return None
        return families[anchors, None] == families[tile.columns]

    def _level(self, level: int, tile: Tile, anchors: Tensor, products: Tensor) -> None:
        """Turns a level's products into forces on them, in `forces[level]`."""
        levels, gradient = self.walk.levels, self.walk.gradient
        forces = shaped(self.forces[level], products.shape)
        scale = levels.scales[level]
        if scale is None:
            self._both(level, tile, anchors, products, forces)
            return
        left, right = scale[anchors, None], scale[tile.columns]
        cosines = torch.mul(products, left, out=shaped(self.cosines, products.shape)).mul_(right)
        self._both(level, tile, anchors, cosines, forces)
        if gradient is not None:
            along = cosines.mul_(forces)
            gradient.radial[level].index_add_(0, anchors, along.sum(1).double())
            gradient.radial[level, tile.columns] += along.sum(0)
            forces.mul_(left).mul_(right)

    def _both(self, level: int, tile: Tile, anchors: Tensor, cosines: Tensor, forces: Tensor) -> None:
        """Forces on the tile's cosines, from its own cells and from those that it mirrors."""
        kin = self._kin(tile, anchors)
        own = self.forward[tile.number]
        mirrored = self.backward[tile.number] if tile.mirrored else []
        if self.walk.rule.uniform:
            self._push(level, cosines, forces, kin, tile.rows, None, own + mirrored, 1 + tile.mirrored)
            return
        self._push(level, cosines, forces, kin, tile.rows, 1, own)
        if tile.mirrored:
            back = shaped(self.back, forces.shape)
            self._push(level, cosines, back, kin, tile.columns, 0, mirrored)
            forces.add_(back)

    def _push(
        self,
        level: int,
        cosines: Tensor,
        forces: Tensor,
        kin: Tensor | None,
        rows: slice,
        axis: int | None,
        named: list[tuple[Cells, Tensor]],
        times: int = 1,
    ) -> None:
        """Writes dL/dc of one direction: of anchors down the tile (axis 1 is summed) or across it (axis 0).

        A uniform rule has no axis, and counts each cell `times`.
        """
        rule, sums = self.walk.rule, self.walk.sums
        temperature, offset = spread(rule.temperature, rows, axis), spread(rule.offsets[level], rows, axis)
        weight = spread(rule.repel, rows, axis) * (self.walk.ambient_weight * times)
        flat = torch.mul(cosines, temperature, out=forces).add_(offset).view(-1)
        on_cells = [self._name(level, cells, flat[places], cosines.view(-1)[places]) for cells, places in named]
        for _, places in named:
            flat.index_fill_(0, places, float("-inf"))
        if kin is not None:
            forces.masked_fill_(kin, float("-inf"))
        scratch = softplus(forces, out=shaped(self.scratch, forces.shape))
        total = scratch.sum() if axis is None else scratch.sum(axis, keepdim=True)
        sums.losses[1] += (total * weight).sum()
        if not self.walk.forces:
            return
        forces.sigmoid_().mul_(weight)
        axis = 1 if axis is None else axis
        sums.force[level, rows] += forces.sum(axis)
        sums.along[rows] += torch.mul(forces, cosines, out=scratch).sum(axis)
        for (_, places), on_named in zip(named, on_cells, strict=True):
            flat.index_add_(0, places, on_named)
        if isinstance(temperature, Tensor):
            forces.mul_(temperature)

    def _name(self, level: int, cells: Cells, scores: Tensor, cosines: Tensor) -> Tensor:
        """Adds a tile's named cells to the sums and answers dL/ds of each.

        Apart from the ambient cells, whose forces are so much smaller that a sum of both would round them away.
        """
        walk, sums = self.walk, self.walk.sums
        losses, forces = cell_terms(walk.rule, scores, cells)
        sums.losses += losses.sum(1)
        if level == walk.levels.count - 1:
            repel = cells.repel - walk.ambient_weight * cells.ambient
            sums.cosines += (torch.stack([cells.attract, repel]) * cosines).sum(1)
        if walk.forces:
            sums.add(level, cells.anchors, forces, cosines)
        return forces


def all_cosines(levels: Levels, layout: Layout) -> Tensor:
    """Sum of the cosines of all cells (of those between families, where these matter), from sums of vectors alone."""
    unit = levels.unit()
    total = unit[layout.anchors].sum(0) @ unit.sum(0)
    if layout.families is None:
        return total
    by_family = unit.new_zeros(2, int(layout.families[-1]) + 1, unit.shape[1])
    by_family[0].index_add_(0, layout.families[layout.anchors], unit[layout.anchors])
    by_family[1].index_add_(0, layout.families, unit)
    return total - by_family.prod(0).sum()


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """`out` (+)= left @ right; a wide `out` of half factors keeps the wide sums of their products."""
    if left.dtype == out.dtype:
        out.addmm_(left, right, beta=int(add))
    elif add:
        out += torch.mm(left, right, out_dtype=out.dtype)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def shaped(buffer: Tensor, shape: tuple[int, int] | torch.Size) -> Tensor:
    """The first I * J entries of a flat buffer as a tile."""
    return buffer[: shape[0] * shape[1]].view(shape)
