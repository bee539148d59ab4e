"""What every back end of MaxSim is spared: token vectors that are not finite, and the choice among equal ones.

Q queries, D documents, P listed pairs, T tokens, W token width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uform_kernels.ops.maxsim.packing import segment_of

# Numbers of token vectors that are hashed at once: 4 MiB of int64.
HASHED = 1 << 19


def finite(tokens: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Token vectors (T, W) with zeros for those that are not finite, and (segments,) which hold one, or None."""
    if not len(tokens):
        return tokens, None
    low, high = tokens.detach().aminmax(dim=1)
    broken = ~(low.isfinite() & high.isfinite())
    if not bool(broken.any()):
        return tokens, None
    segments = segment_of(offsets, len(tokens))[broken]
    return tokens.masked_fill(broken[:, None], 0), torch.bincount(segments, minlength=offsets.numel() - 1) > 0


def mark(scores: Tensor, queries: Tensor | None, documents: Tensor | None, pairs: Tensor | None) -> Tensor:
    """Scores that are NaN where the query (Q,) or the document (D,) is marked, and so for their gradients.

    Only where a gradient arrives: a score that nothing depends on spoils no gradient.
    """
    if queries is None and documents is None:
        return scores
    marked = torch.zeros_like(scores, dtype=torch.bool)
    if queries is not None:
        marked |= queries[:, None] if pairs is None else queries[pairs[:, 0]]
    if documents is not None:
        marked |= documents if pairs is None else documents[pairs[:, 1]]
    return _Marked.apply(scores, marked)


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return scores.masked_fill(marked, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (marked,) = ctx.saved_tensors
        return grad.masked_fill(marked & (grad != 0), torch.nan), None


def first_of_equals(documents: Tensor, offsets: Tensor) -> Tensor:
    """The documents' tokens, whose gradients the first of equal vectors of a document takes from the others.

    Equal columns of a matrix may get products that differ in their last bit, by where they lie: which of them then is
    the maximum depends on the library, its threads and the shape of a tile. The vectors themselves do not.
    """
    return _FirstOfEquals.apply(documents, offsets)


class _FirstOfEquals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, documents: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(documents, offsets)
        return documents.view_as(documents)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, firsts = equal_rows(*ctx.saved_tensors)
        if not len(rows):
            return grad, None
        targets, lengths = firsts.unique_consecutive(return_counts=True)
        wide = torch.promote_types(grad.dtype, torch.float32)
        sums = torch.segment_reduce(grad[rows].to(wide), "sum", lengths=lengths)
        return grad.index_fill(0, rows, 0).index_copy_(0, targets, sums.to(grad.dtype)), None


def equal_rows(documents: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens whose vector their document holds more than once, and the first token that holds it: both (tokens,).

    Tokens of one vector come together, in their order. Zeros of both signs are equal. Vectors that share a hash are
    compared in full; without such a pair the cost is one pass over the bits and a sort of T numbers.
    """
    owners = segment_of(offsets, len(documents))
    keys, order = hashes(documents, owners).sort()
    same = keys[1:] == keys[:-1]
    shared = torch.zeros_like(keys, dtype=torch.bool)
    shared[1:] |= same
    shared[:-1] |= same
    rows = order[shared].sort().values
    if not len(rows):
        return rows, rows
    vectors = torch.cat([owners[rows, None], bits_of(documents[rows])], dim=1)
    _, group, counts = torch.unique(vectors, dim=0, return_inverse=True, return_counts=True)
    firsts = torch.full_like(counts, len(documents)).scatter_reduce(0, group, rows, "amin")[group]
    repeated = counts[group] > 1
    rows, firsts = rows[repeated], firsts[repeated]
    firsts, order = firsts.sort(stable=True)
    return rows[order], firsts


def hashes(documents: Tensor, owners: Tensor) -> Tensor:
    """(T,) int64 of each token's vector and document: equal where both are, and hardly ever where they are not.

    In integers, whose sum does not depend on an order.
    """
    drawn = torch.randint(-(2**62), 2**62, (documents.shape[1] + 1,), generator=torch.Generator().manual_seed(0))
    factors = (2 * drawn + 1).to(documents.device)
    keys = owners * factors[-1]
    step = max(1, HASHED // documents.shape[1])
    for first in range(0, len(documents), step):
        bits = bits_of(documents[first : first + step])
        # Of short numbers such as 1.0 only the highest bits are set, which no product moves down.
        keys[first : first + step] += bits.bitwise_xor_(bits >> 29).mul_(factors[:-1]).sum(1)
    return keys


def bits_of(vectors: Tensor) -> Tensor:
    """(T, W) int64: equal where the finite numbers are equal, -0.0 and 0.0 too."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[vectors.element_size()]
    return (vectors + 0.0).contiguous().view(whole).to(torch.int64)
