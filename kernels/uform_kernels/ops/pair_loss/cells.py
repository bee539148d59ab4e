"""Which cells an edge names, put where the tiles will meet them.

Items are walked in an order that puts families together, so that almost every tile lies within one pair of families;
a position is a place in that order. Anchors keep that order too: anchor a is the item at position `anchors[a]`.

N items, R anchors, E named cells.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from uform_kernels.ops.pair_loss.problem import Problem


@dataclass(frozen=True, eq=False)
class Layout:
    """The order in which a problem's items and anchors are walked.

    order: (N,) the item at each position; None: as they come
    anchors: (R,) the position of each anchor, ascending
    places: (N,) the position of each item
    ranks: (R,) which anchor each edge row is
    families: (N,) the family at each position, ascending; None where no family matters
    """

    order: Tensor | None
    anchors: Tensor
    places: Tensor
    ranks: Tensor
    families: Tensor | None

    @classmethod
    def of(cls, problem: Problem) -> "Layout":
        """Items by family where that matters, else as they come."""
        start, stop = problem.rows
        items = torch.arange(problem.count, device=problem.groups.device)
        if problem.families is None:
            return cls(None, items[start:stop], items, items[: stop - start], None)
        order = problem.families.argsort(stable=True)
        places = torch.empty_like(order).index_copy_(0, order, items)
        anchors, by_place = places[start:stop].sort()
        ranks = torch.empty_like(by_place).index_copy_(0, by_place, items[: stop - start])
        return cls(order, anchors, places, ranks, problem.families[order])

    def arrange(self, values: Tensor) -> Tensor:
        """(N, ...) values of items, by position."""
        return values if self.order is None else values[self.order]

    def restore(self, values: Tensor) -> Tensor:
        """(N, ...) values by position, of items."""
        return values if self.order is None else values[self.places]


@dataclass(frozen=True, eq=False)
class Cells:
    """Named cells (E,): which anchor and position, and the weights with which they attract and repel.

    ambient: how many ambient cells the named cell stands in the place of
    """

    anchors: Tensor
    columns: Tensor
    attract: Tensor
    repel: Tensor
    ambient: Tensor

    def __getitem__(self, selection: Tensor | slice) -> "Cells":
        return Cells(*(getattr(self, field)[selection] for field in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.anchors)

    def __add__(self, other: "Cells") -> "Cells":
        pairs = ((getattr(self, field), getattr(other, field)) for field in self.__dataclass_fields__)
        return Cells(*(torch.cat(pair) for pair in pairs))


def named_cells(problem: Problem, layout: Layout, dtype: torch.dtype) -> tuple[Cells, Cells]:
    """Cells that stand in the place of an ambient cell, and the others: edges that no ambient tile covers.

    The former hold each anchor's own cell and its ignore edges too, without weight.
    """
    attract, repel, ignore = problem.attract, problem.repel, problem.ignore
    anchors = torch.cat([layout.ranks[edges.anchors()] for edges in (attract, repel, ignore)])
    columns = layout.places[torch.cat([attract.ids, repel.ids, ignore.ids])]
    pulls, pushes = attract.weights_as(dtype), repel.weights_as(dtype)
    none = pulls.new_zeros(len(anchors))
    pulls = torch.cat([pulls, none[attract.count :]])
    pushes = torch.cat([none[: attract.count], pushes, none[: ignore.count]])
    cells = Cells(anchors, columns, pulls, pushes, torch.ones_like(pulls))
    if not problem.ambient:
        return cells[:0], cells[: attract.count + repel.count]
    if layout.families is None:
        return cells + _own_cells(layout, dtype), cells[:0]
    own = layout.families[layout.anchors]
    foreign = own[anchors] != layout.families[columns]
    weighted = torch.arange(len(cells), device=foreign.device) < attract.count + repel.count
    return cells[foreign], cells[~foreign & weighted]


def _own_cells(layout: Layout, dtype: torch.dtype) -> Cells:
    ranks = layout.ranks.sort().values
    none = torch.zeros(len(ranks), dtype=dtype, device=ranks.device)
    return Cells(ranks, layout.anchors, none, none, torch.ones_like(none))


def complete(cells: Cells, count: int, ambient_weight: float) -> Cells:
    """Names the transpose of every named cell: where no edge does, as a repelling cell of the ambient weight.

    A tile that stands for its transpose too then leaves the same cells aside in both directions.
    """
    keys, mirrored = cells.anchors * count + cells.columns, cells.columns * count + cells.anchors
    lone = cells[~torch.isin(mirrored, keys)]
    weight = torch.full_like(lone.repel, ambient_weight)
    return cells + Cells(lone.columns, lone.anchors, torch.zeros_like(weight), weight, torch.ones_like(weight))


@dataclass(frozen=True, eq=False)
class Buckets:
    """Cells sorted by tile, and where each tile's begin.

    places: (E,) the cell's place in its tile, row by row
    bounds: of tile t, `bounds[t] : bounds[t + 1]`
    """

    cells: Cells
    places: Tensor
    bounds: list[int]

    def __getitem__(self, tile: int) -> list[tuple[Cells, Tensor]]:
        """The tile's cells and their places, or nothing."""
        part = slice(self.bounds[tile], self.bounds[tile + 1])
        return [(self.cells[part], self.places[part])] if part.start < part.stop else []


@dataclass(frozen=True)
class Grid:
    """R x N cells cut into tiles of `side` x `side`, numbered row by row."""

    rows: int
    columns: int
    side: int

    @cached_property
    def across(self) -> int:
        """Tiles in a row of tiles."""
        return -(-self.columns // self.side)

    @cached_property
    def down(self) -> int:
        """Tiles in a column of tiles."""
        return -(-self.rows // self.side)

    def row_slice(self, row: int) -> slice:
        """Anchors of a row of tiles."""
        return slice(row * self.side, min((row + 1) * self.side, self.rows))

    def column_slice(self, column: int) -> slice:
        """Positions of a column of tiles."""
        return slice(column * self.side, min((column + 1) * self.side, self.columns))

    def bucket(self, cells: Cells, rows: Tensor, columns: Tensor) -> Buckets:
        """Sorts cells by the tile in which `rows`, `columns` lie; a mirrored cell lies at (column, row)."""
        tiles = rows // self.side * self.across + columns // self.side
        tiles, order = tiles.sort(stable=True)
        edges = torch.arange(self.down * self.across + 1, device=tiles.device)
        bounds = torch.searchsorted(tiles, edges).tolist()
        cells, rows, columns = cells[order], rows[order], columns[order]
        widths = torch.clamp(self.columns - columns // self.side * self.side, max=self.side)
        return Buckets(cells, rows % self.side * widths + columns % self.side, bounds)
