"""Cosines of all Matryoshka levels from one set of products, and the way back to the embeddings.

With unit vectors u_i on the last level's m_k coordinates, the cosine of level l is

    c_ij = r_i r_j sum of u_i u_j over the first m_l coordinates,    r_i = 1 / |u_i[:m_l]|,

so a product accumulated coordinate block by coordinate block passes every level on its way, and the last level needs
no scale. Backwards, with forces f_ij = dL/dc_ij of level l, coordinate block b of u_i receives
sum_j (sum over levels l >= b of r_i r_j f_ij) u_j[b], and each lower level's norm takes away what points along u_i:
r_i^2 u_i[:m_l] sum_j f_ij c_ij. The last level's own norm is dealt with when the gradient returns to the embeddings.

N items, d coordinates, L levels, E edges.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Edges whose two vectors are gathered at once; bounds the memory of edge cosines.
EDGE_CHUNK = 8192


class Levels:
    """Unit vectors and prefix norms of a batch.

    unit: (N, m_k) in the wide dtype; a zero vector stays zero
    blocks: L coordinate ranges, one after another
    scales: L - 1 vectors (N,), the r of the levels below the last; 0 where the prefix is zero
    """

    def __init__(self, embeddings: Tensor, dimensions: tuple[int, ...], dtype: torch.dtype) -> None:
        self.width = embeddings.shape[1]
        self.unit = embeddings[:, : dimensions[-1]].to(dtype, copy=True)
        # Dividing by the largest coordinate first keeps the squares of any finite vector in range.
        largest = self.unit.abs().amax(1, keepdim=True)
        self.unit /= torch.where(largest > 0, largest, 1)
        norms = self.unit.norm(dim=1, keepdim=True)
        self.unit /= torch.where(norms > 0, norms, 1)
        self.shrink = reciprocal((largest * norms).squeeze(1))
        bounds = (0, *dimensions)
        self.blocks = [slice(low, high) for low, high in zip(bounds, dimensions, strict=False)]
        self.scales = [reciprocal(self.unit[:, :dimension].norm(dim=1)) for dimension in dimensions[:-1]]

    @property
    def count(self) -> int:
        """L."""
        return len(self.blocks)

    def edge_cosines(self, rows: Tensor, columns: Tensor) -> Tensor:
        """(L, E): the cosines of listed pairs, at every level."""
        cosines = self.unit.new_empty(self.count, len(rows))
        for part, row, column in _chunks(rows, columns):
            products = self.unit[row] * self.unit[column]
            partial = torch.stack([products[:, block].sum(1) for block in self.blocks]).cumsum(0)
            for level, scale in enumerate(self.scales):
                partial[level] *= scale[row] * scale[column]
            cosines[:, part] = partial
        return cosines


class Gradient:
    """What the forces on cosines add up to: a gradient of the unit vectors, and of the lower levels' norms.

    unit: (N, m_k)
    radial: (L - 1, N) float64: sum_j (f_ij + f_ji) c_ij of each lower level
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.unit = torch.zeros_like(levels.unit)
        self.radial = self.unit.new_zeros(levels.count - 1, len(self.unit), dtype=torch.float64)

    def add_edges(self, rows: Tensor, columns: Tensor, forces: Tensor, cosines: Tensor) -> None:
        """Adds forces (L, E) on the cosines (L, E) of listed pairs."""
        levels = self.levels
        for part, row, column in _chunks(rows, columns):
            scaled = forces[:, part].clone()
            for level, scale in enumerate(levels.scales):
                along = (scaled[level] * cosines[level, part]).double()
                self.radial[level].index_add_(0, row, along).index_add_(0, column, along)
                scaled[level] *= scale[row] * scale[column]
            for low, block in enumerate(levels.blocks):
                force = scaled[low:].sum(0)[:, None]
                self.unit[:, block].index_add_(0, row, force * levels.unit[column, block])
                self.unit[:, block].index_add_(0, column, force * levels.unit[row, block])

    def finish(self, factor: float) -> Tensor:
        """`factor` times the gradient of the embeddings (N, d). Consumes the gradient."""
        levels = self.levels
        for radial, scale, block in zip(self.radial, levels.scales, levels.blocks, strict=False):
            prefix = slice(0, block.stop)
            self.unit[:, prefix] -= (radial * scale**2).to(scale)[:, None] * levels.unit[:, prefix]
        self.unit -= (levels.unit * self.unit).sum(1, keepdim=True) * levels.unit
        self.unit *= levels.shrink[:, None] * factor
        return F.pad(self.unit, (0, levels.width - self.unit.shape[1]))


def reciprocal(norms: Tensor) -> Tensor:
    """1 / norms, 0 where a norm is 0."""
    return torch.where(norms > 0, 1 / norms, 0)


def _chunks(rows: Tensor, columns: Tensor):
    for start in range(0, len(rows), EDGE_CHUNK):
        part = slice(start, start + EDGE_CHUNK)
        yield part, rows[part], columns[part]
