"""Cosines of all Matryoshka levels from one set of products, and the way back to the embeddings.

With vectors v_i along the embeddings, the cosine of level l is

    c_ij = r_i r_j sum of v_i v_j over the first m_l coordinates,    r_i = 1 / |v_i[:m_l]|,

so a product accumulated coordinate block by coordinate block passes every level on its way; of unit vectors the last
level needs no scale. Backwards, with forces f_ij = dL/dc_ij of level l, coordinate block b of v_i receives
sum_j (sum over levels l >= b of r_i r_j f_ij) v_j[b], and each level's norm takes away what points along v_i:
r_i^2 v_i[:m_l] sum_j f_ij c_ij. Unit vectors' own norm is dealt with when the gradient returns to the embeddings.

N items, d coordinates, L levels, E edges.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

# A prefix whose coordinates are all below this share of the vector's largest is not scaled to a cosine: the square of
# its length, or one over it, might leave float32. Its level is then computed by itself, from vectors of that prefix.
LEAST_SHARE = 1e-12

# Edges whose two vectors are gathered at once; bounds the memory of edge cosines.
EDGE_CHUNK = 8192


class Levels:
    """The vectors that products are taken of, and what scales products to cosines.

    vectors: (N, m_k) unit vectors in the wide dtype, or with `keep` the embeddings' own numbers
    blocks: L coordinate ranges, one after another
    scales: L vectors (N,) r, 0 where a prefix is zero; None for unit vectors' last level
    """

    def __init__(self, embeddings: Tensor, dimensions: tuple[int, ...], wide: torch.dtype, keep: bool = False) -> None:
        self.width, self.wide = embeddings.shape[1], wide
        vectors = embeddings[:, : dimensions[-1]].to(wide, copy=True)
        # Dividing by the largest coordinate first keeps the squares of any finite vector in range.
        largest = vectors.abs().amax(1, keepdim=True)
        real = largest >= torch.finfo(wide).tiny
        # What is kept in a half precision may only be divided by a power of two, for that loses nothing.
        divisor = torch.exp2(torch.frexp(largest).exponent.to(wide)) if keep else largest
        vectors /= torch.where(real, divisor, torch.inf)
        norms = vectors.norm(dim=1, keepdim=True)
        if not keep:
            vectors /= torch.where(norms > 0, norms, 1)
            divisor = largest * norms
        self.shrink = torch.where(real, 1 / divisor, 0)
        self.blocks = [slice(low, high) for low, high in itertools.pairwise((0, *dimensions))]
        self.scales: list[Tensor | None] = [reciprocal(vectors[:, :size].norm(dim=1)) for size in dimensions[:-1]]
        self.scales.append(reciprocal(norms.squeeze(1)) if keep else None)
        self.vectors = vectors.to(embeddings.dtype) if keep else vectors

    @property
    def count(self) -> int:
        """L."""
        return len(self.blocks)

    def unit(self, items: Tensor | slice = slice(None)) -> Tensor:
        """Unit vectors of some items on the last level's coordinates."""
        scale = self.scales[-1]
        return self.vectors[items] if scale is None else self.vectors[items] * scale[items, None]

    def edge_cosines(self, rows: Tensor, columns: Tensor) -> Tensor:
        """(L, E): the cosines of listed pairs, at every level."""
        cosines = torch.empty(self.count, len(rows), dtype=self.wide, device=rows.device)
        for part, row, column in _chunks(rows, columns):
            products = self.vectors[row].to(self.wide) * self.vectors[column]
            partial = torch.stack([products[:, block].sum(1) for block in self.blocks]).cumsum(0)
            for level, scale in enumerate(self.scales):
                if scale is not None:
                    partial[level] *= scale[row] * scale[column]
            cosines[:, part] = partial
        return cosines


class Gradient:
    """What the forces on cosines add up to: a gradient of the vectors, and of the norms that scale them.

    vectors: (N, m_k), wide
    radial: (L, N) float64: sum_j (f_ij + f_ji) c_ij of each level that has a scale
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.vectors = torch.zeros_like(levels.vectors, dtype=levels.wide)
        self.radial = self.vectors.new_zeros(levels.count, len(self.vectors), dtype=torch.float64)

    def add_edges(self, rows: Tensor, columns: Tensor, forces: Tensor, cosines: Tensor) -> None:
        """Adds forces (L, E) on the cosines (L, E) of listed pairs."""
        levels = self.levels
        for part, row, column in _chunks(rows, columns):
            scaled = forces[:, part].clone()
            for level, scale in enumerate(levels.scales):
                if scale is not None:
                    along = (scaled[level] * cosines[level, part]).double()
                    self.radial[level].index_add_(0, row, along).index_add_(0, column, along)
                    scaled[level] *= scale[row] * scale[column]
            for low, block in enumerate(levels.blocks):
                force = scaled[low:].sum(0)[:, None]
                self.vectors[:, block].index_add_(0, row, force * levels.vectors[column, block])
                self.vectors[:, block].index_add_(0, column, force * levels.vectors[row, block])

    def absorb(self, other: "Gradient") -> None:
        """Adds what another walk added up."""
        self.vectors += other.vectors
        self.radial += other.radial

    def finish(self, factor: float) -> Tensor:
        """`factor` times the gradient of the embeddings (N, d). Consumes the gradient."""
        levels, vectors = self.levels, self.vectors
        for radial, scale, block in zip(self.radial, levels.scales, levels.blocks, strict=True):
            if scale is not None:
                pull = (radial * scale.double() ** 2).to(levels.wide)
                vectors[:, : block.stop] -= pull[:, None] * levels.vectors[:, : block.stop]
        if levels.scales[-1] is None:
            vectors -= (levels.vectors * vectors).sum(1, keepdim=True) * levels.vectors
        vectors *= levels.shrink * factor
        return F.pad(vectors, (0, levels.width - vectors.shape[1]))


def has_faint_prefix(embeddings: Tensor, dimensions: tuple[int, ...], wide: torch.dtype) -> bool:
    """Whether a prefix (its first m coordinates) that is not zero is too small beside its vector to share its scale."""
    if len(dimensions) == 1:
        return False
    blocks = [embeddings.detach()[:, low:high].aminmax(dim=1) for low, high in itertools.pairwise((0, *dimensions))]
    largest = torch.stack([high.maximum(-low) for low, high in blocks]).to(wide).cummax(0).values
    least = (LEAST_SHARE * largest[-1]).clamp(min=torch.finfo(wide).tiny)
    return bool(((largest > 0) & (largest < least))[:-1].any())


def reciprocal(norms: Tensor) -> Tensor:
    """1 / norms, 0 where a norm is 0."""
    return torch.where(norms > 0, 1 / norms, 0)


def _chunks(rows: Tensor, columns: Tensor):
    for start in range(0, len(rows), EDGE_CHUNK):
        part = slice(start, start + EDGE_CHUNK)
        yield part, rows[part], columns[part]
