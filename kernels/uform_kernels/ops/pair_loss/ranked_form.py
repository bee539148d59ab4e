"""The ranked form of a block of rows: every candidate's score against every positive's.

For one row with candidates n of weight w_n and positives p whose weights v_p sum to one,

    loss = sum_n w_n Phi(s_n),    Phi(x) = sum_p v_p softplus(x - s_p),
    dloss/ds_n = w_n Phi'(s_n),   dloss/ds_p = -v_p sum_n w_n sigmoid(s_n - s_p).

Directly, that is one softplus for each pair. But Phi' is smooth (its poles lie pi away from the real line), so it can
be read from a table, and what reads a table with weights w also writes the histogram from which the other two sums
follow: if Phi'(x) is about sum_k a_k(x) Phi'(x_k), then sum_n w_n g(s_n) is about sum_k (sum_n w_n a_k(s_n)) g(x_k) for
every function g as smooth, among them Phi and sigmoid(x - s_p). Then no cell meets more than a few table entries.

r rows, n candidates, P positives, K nodes a piece, F cells a piece, D the degree in a cell.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from uform_kernels.ops.pair_loss.problem import softplus

# Positives an anchor from which the table is faster than direct evaluation (measured on a CPU with AVX-512).
TABLE_FROM = 4

# A table of more nodes than this share of the candidates costs more to fill than it saves.
TABLE_SHARE = 0.5


@dataclass(frozen=True)
class Resolution:
    """How finely a table resolves one unit of score.

    nodes: Chebyshev nodes of a unit-wide piece, where sigmoids are evaluated; the error falls as 12.6^-nodes
    cells: cells of a piece, each with a polynomial
    degree: its degree; the error is about (1 / 2 cells)^(degree + 1) / ((degree + 1)! 2^degree)
    """

    nodes: int
    cells: int
    degree: int


RESOLUTIONS = {torch.float32: Resolution(8, 64, 2), torch.float64: Resolution(14, 16, 5)}


def rank_rows(
    scores: Tensor, weights: Tensor, positives: Tensor, shares: Tensor, forces: bool
) -> tuple[Tensor, Tensor]:
    """Losses (r,) of the rows, and dloss/ds_p (r, P); with `forces`, `scores` becomes dloss/ds_n.

    scores, weights: (r, n)
    positives, shares: (r, P) scores of the positives and their v_p; padding has share 0
    """
    count = positives.shape[1]
    if count >= TABLE_FROM and scores.numel():
        low, high = scores.aminmax()
        span = float(high - low)
        # Written so that a span of NaN is left to direct evaluation, which hands it on.
        if span * RESOLUTIONS[scores.dtype].nodes < TABLE_SHARE * scores.shape[1]:
            pieces = int(span + 1.01)
            return _by_table(scores, weights, positives, shares, forces, low, pieces)
    return _directly(scores, weights, positives, shares, forces)


def _directly(
    scores: Tensor, weights: Tensor, positives: Tensor, shares: Tensor, forces: bool
) -> tuple[Tensor, Tensor]:
    total = torch.zeros_like(scores)
    difference, scratch = torch.empty_like(scores), torch.empty_like(scores)
    losses, pulls = scores.new_zeros(len(scores)), torch.zeros_like(positives)
    for p in range(positives.shape[1]):
        share = shares[:, p]
        torch.sub(scores, positives[:, p, None], out=difference)
        losses += share * softplus(difference, out=scratch).mul_(weights).sum(1)
        if forces:
            difference.sigmoid_().mul_(weights).mul_(share[:, None])
            pulls[:, p] = -difference.sum(1)
            total += difference
    scores.copy_(total)
    return losses, pulls


def _by_table(
    scores: Tensor, weights: Tensor, positives: Tensor, shares: Tensor, forces: bool, low: Tensor, pieces: int
) -> tuple[Tensor, Tensor]:
    resolution = RESOLUTIONS[scores.dtype]
    refine = refinement(resolution, scores.dtype, scores.device)
    nodes = low + torch.arange(pieces, device=low.device)[:, None] + chebyshev(resolution.nodes).to(low)
    differences = nodes.view(-1, 1) - positives[:, None]
    curve = differences.sigmoid()

    place = scores.sub_(low).mul_(resolution.cells)
    cell = place.long()
    place.frac_().sub_(0.5)
    histogram = scores.new_zeros(len(refine), len(scores), pieces * resolution.cells)
    moment = weights
    for degree in histogram:
        degree.scatter_add_(1, cell, moment)
        moment = moment * place
    on_nodes = torch.bmm(histogram.view(len(refine), -1, resolution.cells), refine.mT).sum(0).view(len(scores), 1, -1)
    pulls = -shares * (on_nodes @ curve).squeeze(1)
    losses = ((on_nodes @ softplus(differences)).squeeze(1) * shares).sum(1)
    if forces:
        slopes = (curve @ shares[:, :, None]).view(-1, resolution.nodes)
        _read((slopes @ refine).view(histogram.shape), cell, place).mul_(weights)
    return losses, pulls


def _read(table: Tensor, cell: Tensor, place: Tensor) -> Tensor:
    """Evaluates the cells' polynomials (D + 1, r, cells) at `place`, in place."""
    value = torch.empty_like(place)
    entry = torch.empty_like(place)
    torch.gather(table[-1], 1, cell, out=value)
    for coefficients in reversed(table[:-1].unbind()):
        value.mul_(place).add_(torch.gather(coefficients, 1, cell, out=entry))
    return place.copy_(value)


def chebyshev(count: int) -> Tensor:
    """(count,) float64 Chebyshev nodes of [0, 1]."""
    angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    return (1 - angles.cos()) / 2


@functools.lru_cache(maxsize=8)
def refinement(resolution: Resolution, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(D + 1, K, F): values at a piece's nodes to the coefficients of its cells' polynomials.

    A cell's variable runs from -1/2 to 1/2; its polynomial agrees with the piece's at D + 1 Chebyshev points.
    """
    points = chebyshev(resolution.degree + 1)
    places = (torch.arange(resolution.cells, dtype=torch.float64)[:, None] + points) / resolution.cells
    at_points = lagrange(chebyshev(resolution.nodes), places)
    powers = (points[:, None] - 0.5) ** torch.arange(resolution.degree + 1)
    return torch.einsum("dq,fqk->dkf", torch.linalg.inv(powers), at_points).to(device, dtype)


def lagrange(nodes: Tensor, places: Tensor) -> Tensor:
    """(..., K): the Lagrange basis of `nodes` (K,) at `places` (...)."""
    apart = nodes[:, None] - nodes
    own = torch.eye(len(nodes), dtype=torch.bool)
    factors = (places[..., None, None] - nodes) / torch.where(own, 1, apart)
    return torch.where(own, 1, factors).prod(-1)
