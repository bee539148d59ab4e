"""What the tiled back ends of MaxSim share: where a pair's tokens lie, and how the gradient of a score is spread.

Q queries, D documents, P listed pairs, E entries (a query token of a listed pair; pairs in order).
"""

import torch
from torch import Tensor


def segment_of(offsets: Tensor, total: int) -> Tensor:
    """(total,) int64: the segment that each row of a packed tensor belongs to."""
    segments = torch.arange(offsets.numel() - 1, device=offsets.device)
    return segments.repeat_interleave(offsets.diff(), output_size=total)


def entry_offsets(pairs: Tensor, query_offsets: Tensor) -> Tensor:
    """(P + 1,) int64: where the entries of each listed pair begin; the last is E."""
    lengths = query_offsets.diff()[pairs[:, 0]]
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def grouped(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The positions of `groups` (P,), sorted by group and stable, and the offsets (count + 1,) of each group."""
    ordered, order = groups.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(count + 1, device=groups.device))


def slopes(grad: Tensor, query_offsets: Tensor, pairs: Tensor | None, normalize: bool, dtype: torch.dtype) -> Tensor:
    """Derivative of the result by one token's largest product: the score's gradient, over the query's tokens if
    `normalize`. Contiguous, of the shape of the scores, whatever the strides of `grad`."""
    grad = grad.to(dtype)
    if normalize:
        lengths = query_offsets.diff().to(dtype)
        grad = grad / (lengths[:, None] if pairs is None else lengths[pairs[:, 0]])
    return grad.contiguous()


def averaged(sums: Tensor, query_offsets: Tensor, pairs: Tensor | None, normalize: bool) -> Tensor:
    """Scores from the sums over a query's tokens: (Q, D), or (P,) of listed pairs."""
    return slopes(sums, query_offsets, pairs, normalize, sums.dtype)
