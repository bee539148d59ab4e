"""MaxSim in plain torch: the definition that the other back ends are held to.

Q queries, D documents, P listed pairs, T tokens, W token width.
"""

import itertools

import torch
from torch import Tensor


def maxsim(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None,
    normalize: bool,
) -> Tensor:
    """`M(q, d) = sum over q's tokens of max over d's tokens of their dot product`, over q's tokens if `normalize`.

    Shapes, errors and what is refused: see `uform_kernels.maxsim`. autograd gives the gradient: torch's `max` along
    an axis sends it to the first largest entry.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    query_list = _segments(queries.to(dtype), query_offsets)
    document_list = _segments(documents.to(dtype), document_offsets)
    shape = (len(query_list), len(document_list)) if pairs is None else (len(pairs),)
    cells = itertools.product(*map(range, shape)) if pairs is None else pairs.tolist()
    scores = [_score(query_list[q], document_list[d], normalize) for q, d in cells]
    if not scores:
        return (queries[:0].sum(dtype=dtype) + documents[:0].sum(dtype=dtype)).expand(shape)
    return torch.stack(scores).view(shape)


def _segments(tokens: Tensor, offsets: Tensor) -> list[Tensor]:
    return [tokens[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]


def _score(query: Tensor, document: Tensor, normalize: bool) -> Tensor:
    best = (query @ document.T).max(dim=1).values
    return best.mean() if normalize else best.sum()
