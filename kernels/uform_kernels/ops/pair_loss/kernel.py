"""Pair losses on a GPU: products in the vendor's library, and one Triton kernel that turns scores into forces.

The walk is that of `tiles`, with tiles thousands of items wide. Between a tile's products this kernel reads each
product once and writes each force once; scores, losses, sigmoids and all sums stay in registers (README.md counts).

I x J a tile of products, R x C what a program works on.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from uform_kernels.ops.pair_loss.chunked import chunked_pair_loss
from uform_kernels.ops.pair_loss.problem import Problem
from uform_kernels.ops.pair_loss.tile_order import Scalars, spread
from uform_kernels.ops.pair_loss.tiles import Tile, TileWalk, shaped
from uform_kernels.targets import architecture, row_for

# Wide enough that a tile's products take longer than the launch of the dozen small steps around them.
SIDE = 8192

# Bytes of a force: architecture or its first letters -> block sizes and warps. The kernel reads float32 products, whose
# dtype and d it never sees. 8 cells a thread keep all intermediates in registers, which was chosen by what compiles
# without spills; `benchmarks/tune_kernels.py` finds better rows on a device.
TABLE = {
    2: {"sm_": {"R": 16, "C": 128, "num_warps": 8}, "gfx": {"R": 8, "C": 128, "num_warps": 4}},
    4: {"sm_": {"R": 16, "C": 128, "num_warps": 8}, "gfx": {"R": 8, "C": 128, "num_warps": 4}},
}

# Fusing a product and a sum into one rounding changes results, and its default differs between releases.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True}

# What the kernel sums over a tile's rows and columns.
RADIAL, LOSS, FORCE, ALONG = range(4)


def triton_pair_loss(
    embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor, problem: Problem
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `chunked_pair_loss`, for float32, bfloat16 and float16.

    Products of bfloat16 embeddings are taken in bfloat16 with float32 sums; of float16, whose range does not hold
    forces, in float32. Losses without ambient cells, and ranked ones with several positives an anchor, have no tiles:
    these run as in `chunked`.
    """
    return chunked_pair_loss(embeddings, inverse_temperature, bias, problem, FusedWalk)


@triton.jit
def _softplus_sigmoid(x):
    """log(1 + e^x) and 1 / (1 + e^-x), both to a few units in the last place of any finite x.

    With e = e^-|x| at most 1, log(1 + e) = 2 artanh(e / (2 + e)) is a short series; a logarithm of 1 + e would lose
    small e.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    q = z * z
    series = 1.0 / 17
    series = series * q + 1.0 / 15
    series = series * q + 1.0 / 13
    series = series * q + 1.0 / 11
    series = series * q + 1.0 / 9
    series = series * q + 1.0 / 7
    series = series * q + 1.0 / 5
    series = series * q + 1.0 / 3
    series = series * q + 1.0
    return tl.maximum(x, 0.0) + 2.0 * z * series, tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _forces(
    products, forces, row_sums, column_sums, row_scale, column_scale, row_temperature, row_offset, row_cost,
    column_temperature, column_offset, column_cost, row_family, column_family, rows, columns,
    SCALED: tl.constexpr, SAME: tl.constexpr, MIRRORED: tl.constexpr, PER_ANCHOR: tl.constexpr, MIXED: tl.constexpr,
    STORE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Forces (I, J) on products (I, J), float32 both but for the forces' precision; and four sums of each line.

    A product of -inf marks a named cell, which is left aside. SCALED: cosines are products times both scales. SAME:
    a mirrored cell (j, i) has the score and force of (i, j), else MIRRORED: its own, from the column's values.
    PER_ANCHOR: forces on cosines, temperature included, else on scores. MIXED: cells within a family are left aside.
    """
    row_block, column_block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row, column = row_block * R + tl.arange(0, R), column_block * C + tl.arange(0, C)
    in_rows, in_columns = row < rows, column < columns
    cell = row[:, None] * columns + column[None, :]
    live = in_rows[:, None] & in_columns[None, :]
    product = tl.load(products + cell, mask=live, other=float("-inf"))
    live = live & (product != float("-inf"))
    if MIXED:
        own = tl.load(row_family + row, mask=in_rows, other=0)
        other = tl.load(column_family + column, mask=in_columns, other=0)
        live = live & (own[:, None] != other[None, :])
    # As numbers, for masks of every cell would stay in scalar registers to the end.
    counts, cosine = tl.where(live, 1.0, 0.0), tl.where(live, product, 0.0)
    if SCALED:
        left = tl.load(row_scale + row, mask=in_rows, other=0.0)
        right = tl.load(column_scale + column, mask=in_columns, other=0.0)
        cosine = cosine * left[:, None] * right[None, :]

    temperature = tl.load(row_temperature + row, mask=in_rows, other=0.0)[:, None]
    offset = tl.load(row_offset + row, mask=in_rows, other=0.0)[:, None]
    cost = counts * tl.load(row_cost + row, mask=in_rows, other=0.0)[:, None]
    if SAME and MIRRORED:
        cost = cost * 2.0
    loss, force = _softplus_sigmoid(temperature * cosine + offset)
    force = force * cost
    row_line = row_sums + column_block * rows + row
    row_plane = tl.num_programs(0).to(tl.int64) * rows
    tl.store(row_line + row_plane, tl.sum(loss * cost, 1), mask=in_rows)
    tl.store(row_line + 2 * row_plane, tl.sum(force, 1), mask=in_rows)
    tl.store(row_line + 3 * row_plane, tl.sum(force * cosine, 1), mask=in_rows)
    if PER_ANCHOR:
        force = force * temperature

    column_line = column_sums + row_block * columns + column
    column_plane = tl.num_programs(1).to(tl.int64) * columns
    if MIRRORED and not SAME:
        temperature = tl.load(column_temperature + column, mask=in_columns, other=0.0)[None, :]
        offset = tl.load(column_offset + column, mask=in_columns, other=0.0)[None, :]
        cost = counts * tl.load(column_cost + column, mask=in_columns, other=0.0)[None, :]
        loss, back = _softplus_sigmoid(temperature * cosine + offset)
        back = back * cost
        tl.store(column_line + column_plane, tl.sum(loss * cost, 0), mask=in_columns)
        tl.store(column_line + 2 * column_plane, tl.sum(back, 0), mask=in_columns)
        tl.store(column_line + 3 * column_plane, tl.sum(back * cosine, 0), mask=in_columns)
        if PER_ANCHOR:
            back = back * temperature
        force = force + back
    if SCALED:
        tl.store(row_line, tl.sum(force * cosine, 1), mask=in_rows)
        tl.store(column_line, tl.sum(force * cosine, 0), mask=in_columns)
        force = force * left[:, None] * right[None, :]
    if STORE:
        tl.store(forces + cell, force.to(forces.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def tile_forces(products: Tensor, forces: Tensor, lines: Sequence[Tensor], **flags: bool) -> tuple[Tensor, Tensor]:
    """Runs the kernel on a tile; `lines` and `flags` are its arguments from `row_scale` on.

    Returns: what its programs summed of each row (4, I) and column (1 or 4, J), added up in a fixed order, float64.
    """
    rows, columns = products.shape
    sizes = block_sizes(forces.element_size(), architecture(products.device))
    blocks = triton.cdiv(rows, sizes["R"]), triton.cdiv(columns, sizes["C"])
    row_sums = products.new_zeros(4, blocks[1], rows)
    backwards = flags["MIRRORED"] and not flags["SAME"]
    column_sums = products.new_zeros(4 if backwards else 1, blocks[0], columns)
    with torch.cuda.device_of(products):
        _forces[blocks[::-1]](
            products, forces, row_sums, column_sums, *lines, rows, columns, **flags, **sizes, **OPTIONS
        )
    return row_sums.sum(1, dtype=torch.float64), column_sums.sum(1, dtype=torch.float64)


class FusedWalk(TileWalk):
    """A tile walk whose elementwise work is one kernel."""

    side = SIDE
    # Triton's interpreter, which runs kernels on CPU tensors, keeps the place in the grid in a global.
    threaded = False

    @staticmethod
    def keeps(embeddings: Tensor) -> bool:
        """bfloat16 is kept; Triton's interpreter, on a CPU, cannot compute with it."""
        return embeddings.dtype == torch.bfloat16 and embeddings.is_cuda

    def _allocate(self, size: int) -> None:
        vectors, wide = self.walk.levels.vectors, self.walk.levels.wide
        self.products = torch.empty(size, dtype=wide, device=vectors.device)
        self.forces = [vectors.new_empty(size) for _ in self.walk.levels.blocks]

    def _level(self, level: int, tile: Tile, anchors: Tensor, products: Tensor) -> None:
        """Turns a level's products into forces on them, in `forces[level]`; the products stay as they are."""
        forces = shaped(self.forces[level], products.shape)
        flat = products.view(-1)
        named = self.forward[tile.number] + (self.backward[tile.number] if tile.mirrored else [])
        found = [flat[places] for _, places in named]
        for _, places in named:
            flat.index_fill_(0, places, float("-inf"))
        self._launch(level, tile, anchors, products, forces)
        for (cells, places), values in zip(named, found, strict=True):
            flat[places] = values
            self._place(level, cells, places, values, forces)

    def _launch(self, level: int, tile: Tile, anchors: Tensor, products: Tensor, forces: Tensor) -> None:
        """Runs the kernel on a tile and adds what it summed."""
        walk, rule = self.walk, self.walk.rule
        scale, families = walk.levels.scales[level], walk.layout.families
        by_anchor = [
            expanded(value, part, products)
            for part in (tile.rows, tile.columns if tile.mirrored else tile.rows)
            for value in (rule.temperature, rule.offsets[level], self._cost())
        ]
        scales = (scale[anchors], scale[tile.columns]) if scale is not None else (products, products)
        kinds = (families[anchors], families[tile.columns]) if families is not None else (products, products)
        sums = tile_forces(
            products, forces, [*scales, *by_anchor, *kinds],
            SCALED=scale is not None, SAME=rule.uniform, MIRRORED=tile.mirrored,
            PER_ANCHOR=isinstance(rule.temperature, Tensor), MIXED=tile.mixed, STORE=walk.gradient is not None,
        )  # fmt: skip
        self._add(level, tile, anchors, *sums)

    def _add(self, level: int, tile: Tile, anchors: Tensor, by_row: Tensor, by_column: Tensor) -> None:
        """Adds the sums (4, I) and (4 or 1, J) of a tile's lines."""
        sums, gradient = self.walk.sums, self.walk.gradient
        sums.losses[1] += by_row[LOSS].sum()
        sums.force[level, tile.rows] += by_row[FORCE]
        sums.along[tile.rows] += by_row[ALONG]
        if len(by_column) > 1:
            sums.losses[1] += by_column[LOSS].sum()
            sums.force[level, tile.columns] += by_column[FORCE]
            sums.along[tile.columns] += by_column[ALONG]
        if gradient is not None:
            gradient.radial[level].index_add_(0, anchors, by_row[RADIAL])
            gradient.radial[level, tile.columns] += by_column[RADIAL]

    def _place(self, level: int, cells: Any, places: Tensor, products: Tensor, forces: Tensor) -> None:
        """Adds a tile's named cells to the sums and to the forces."""
        walk, rule, scale = self.walk, self.walk.rule, self.walk.levels.scales[level]
        rows, columns = walk.layout.anchors[cells.anchors], cells.columns
        both = 1.0 if scale is None else scale[rows] * scale[columns]
        cosines = products * both
        temperature = spread(rule.temperature, cells.anchors)
        on_cells = self._name(level, cells, temperature * cosines + spread(rule.offsets[level], cells.anchors), cosines)
        if walk.gradient is None:
            return
        if isinstance(temperature, Tensor):
            on_cells = on_cells * temperature
        if scale is not None:
            along = (on_cells * cosines).double()
            walk.gradient.radial[level].index_add_(0, rows, along).index_add_(0, columns, along)
        forces.view(-1).index_add_(0, places, (on_cells * both).to(forces.dtype))

    def _cost(self) -> Scalars:
        return self.walk.rule.repel * self.walk.ambient_weight


def expanded(value: Scalars, rows: slice, like: Tensor) -> Tensor:
    """A number or per-anchor values as one value for each line."""
    if isinstance(value, Tensor):
        return value[rows].contiguous()
    return like.new_full((rows.stop - rows.start,), value)


def block_sizes(size: int, target: str) -> dict[str, int]:
    """Block sizes and warps for forces of `size` bytes on an architecture."""
    return row_for(TABLE[size], target)


def compile_cases(
    target: str = "sm_90",
) -> list[tuple[str, triton.JITFunction, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Name, kernel, signature, constants and options of what a call may launch, for a compile check."""
    names = "temperature", "offset", "cost", "scale", "sums"
    floats = ["products", *(f"{line}_{name}" for line in ("row", "column") for name in names)]
    cases: list[tuple[str, triton.JITFunction, dict[str, str], dict[str, Any], dict[str, Any]]] = []
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        sizes = block_sizes(size, target)
        options = OPTIONS | {"num_warps": sizes["num_warps"]}
        signature = dict.fromkeys(floats, "*fp32") | {"forces": f"*{dtype}", "rows": "i32", "columns": "i32"}
        signature |= {"row_family": "*i64", "column_family": "*i64"}
        for same, mixed, scaled in (
            (True, False, False),
            (True, True, True),
            (False, False, True),
            (False, True, True),
        ):
            constants: dict[str, Any] = {
                "SCALED": scaled,
                "SAME": same,
                "MIRRORED": True,
                "PER_ANCHOR": not same,
                "MIXED": mixed,
            }
            constants |= {"STORE": True, "R": sizes["R"], "C": sizes["C"]}
            label = f"pair_loss forces {dtype}" + " same" * same + " mixed" * mixed + " scaled" * scaled
            cases.append((label, _forces, signature, constants, options))
    return cases
