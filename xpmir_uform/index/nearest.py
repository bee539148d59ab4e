"""The nearest pooled vectors, exactly, shard by shard.

Letters: Q queries, D documents, d embedding width, k results, n documents of a block.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 65_536
"""Documents that are compared at a time, which bounds memory to Q * BLOCK_ROWS scores."""


def best(scores: Tensor, k: int) -> Tensor:
    """(Q, min(k, n)) int64: the columns of the highest scores (Q, n), highest first; of equals the first.

    A stable sort of each row as a whole would say the same and take longer.
    """
    k = min(k, scores.shape[1])
    least = scores.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True) if k else scores[:, :0]
    rows = []
    for row, bound in zip(scores, least, strict=True):
        columns = torch.nonzero(row >= bound)[:, 0] if k else torch.zeros(0, dtype=torch.int64)
        rows.append(columns[row[columns].sort(descending=True, stable=True).indices][:k])
    return torch.stack(rows) if rows else torch.zeros((0, k), dtype=torch.int64)


def exact_nearest(queries: Tensor, parts: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of D documents of each query by their product, nearest first; of equals the first.

    Args:
        queries: (Q, d) float32 of length one.
        parts: the documents (n, d) of length one, in order.

    Returns:
        (Q, min(k, D)) int64 numbers and float32 products.
    """
    numbers = torch.zeros((len(queries), 0), dtype=torch.int64)
    products = torch.zeros((len(queries), 0))
    for start, block in blocks(parts):
        scores = torch.cat([products, queries @ block.float().T], dim=1)
        columns = torch.arange(start, start + len(block)).expand(len(queries), -1)
        kept = best(scores, k)
        numbers, products = torch.cat([numbers, columns], dim=1).gather(1, kept), scores.gather(1, kept)
    return numbers, products


def blocks(parts: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The documents in blocks, each with the number of its first."""
    start = 0
    for part in parts:
        for block in part.split(BLOCK_ROWS):
            yield start, block
            start += len(block)
