"""Scores of many queries and documents by late interaction, without a graph, in blocks.

Letters: Q queries, D documents, P listed pairs, W width of a token vector.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from uform_kernels import maxsim

CELLS = 1 << 24
"""Query tokens times documents of a block: the kernel keeps two numbers of each, 128 MiB in all."""


def as_pairs(pairs: Any) -> Tensor:
    """(P, 2): pairs of numbers, given as a tensor, an array or a list.

    Raises:
        ValueError: they are no such table.
    """
    try:
        found = torch.as_tensor(pairs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"pairs are no table of numbers ({error}): list one (query, document) for each") from error
    # An empty list becomes a tensor of floats.
    found = found if found.numel() else torch.zeros((0, 2), dtype=torch.int64)
    if found.ndim != 2 or found.shape[1] != 2:
        raise ValueError(f"pairs have the shape {tuple(found.shape)}, expected (P, 2): one (query, document) for each")
    return found


@torch.no_grad()
def score_tokens(
    queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor, pairs: Tensor | None = None
) -> Tensor:
    """As :func:`uform_kernels.maxsim`, (Q, D) or (P,), in memory that grows by the scores alone."""
    longest = max(1, int(query_offsets.diff().max())) if len(query_offsets) > 1 else 1
    if pairs is not None:
        blocks = pairs.to(documents.device).split(max(1, CELLS // longest))
        return torch.cat([maxsim(queries, query_offsets, documents, document_offsets, block) for block in blocks])
    count = len(query_offsets) - 1
    rows = max(1, CELLS // (longest * len(document_offsets)))
    ends = [*range(0, count, rows), count] if count else [0, 0]
    return torch.cat(
        [
            maxsim(queries[first:last], query_offsets[start : stop + 1] - first, documents, document_offsets)
            for start, stop in pairwise(ends)
            for first, last in [query_offsets[[start, stop]].tolist()]
        ]
    )
