"""Late interaction: the score of a query and a document from their token vectors."""

import torch
from torch import Tensor

from uform_kernels.backends import choose_backend
from uform_kernels.checks import (
    check_device,
    check_dtype,
    check_filled,
    check_integers,
    check_offsets,
    check_shape,
    check_tensor,
    first_true,
)
from uform_kernels.ops.maxsim import chunked, reference
from uform_kernels.ops.maxsim.screen import finite, first_of_equals, mark


def maxsim(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None = None,
    normalize: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Scores of queries and documents by late interaction (ColBERT, Khattab and Zaharia 2020, equation 3).

        M(q, d) = sum over q's tokens i of max over d's tokens j of <q_i, d_j>, over q's number of tokens if `normalize`

    The maximum is hard: the first token that reaches it takes the whole gradient. Of a document's equal vectors that
    is the first, in every back end and for tiles of any shape; of different vectors whose products are equal, or differ
    by less than they are rounded, it may be any. Products and sums are formed in float32 (float64 for float64), and
    gradients are summed in a fixed order: two runs on one machine agree to the bit. The scores of a query or document
    with a number that is not finite are NaN, and so are the gradients that pass through them; where no gradient
    arrives, or 0, none passes.

    queries: (sum of query tokens, W) float64, float32, bfloat16 or float16; query_offsets: (Q + 1,) int
    documents: (sum of document tokens, W), same dtype; document_offsets: (D + 1,) int
    pairs: (P, 2) int, the (query, document) pairs to score, in any order, repeated or not; None: all
    backend: "auto", "reference", "chunked" or "triton"

    Returns: (Q, D), or (P,) for listed pairs; float64 for float64 tokens, else float32, which a sum of half
    precision products may need.
    Raises: ValueError that names the argument and the row, before anything is computed; a query or document without
    tokens is refused.
    """
    check_shape("queries", queries, "query tokens", "W")
    backend = choose_backend(backend, queries)
    query_offsets, document_offsets = _checked_offsets(queries, query_offsets, documents, document_offsets)
    pairs = None if pairs is None else _checked_pairs(pairs, queries, query_offsets, document_offsets)
    # Under autocast the products would fall to half precision.
    with torch.autocast(queries.device.type, enabled=False):
        queries, of_queries = finite(queries, query_offsets)
        documents, of_documents = finite(documents, document_offsets)
        documents = first_of_equals(documents, document_offsets)
        tensors = queries, query_offsets, documents, document_offsets, pairs
        if backend == "triton":
            from uform_kernels.ops.maxsim.kernel import maxsim as triton_maxsim

            scores = triton_maxsim(*tensors, normalize)
        else:
            scores = (reference if backend == "reference" else chunked).maxsim(*tensors, normalize)
        return mark(scores, of_queries, of_documents, pairs)


def _checked_offsets(
    queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Refuses what `maxsim` does not take; gives both offsets as int64."""
    check_dtype("queries", queries)
    if queries.shape[1] == 0:
        raise ValueError(f"queries has shape {tuple(queries.shape)}; token vectors need at least one coordinate.")
    check_shape("documents", documents, "document tokens", queries.shape[1])
    check_dtype("documents", documents, (queries.dtype,))
    check_tensor("query_offsets", query_offsets)
    check_tensor("document_offsets", document_offsets)
    check_device(
        queries.device,
        "queries",
        query_offsets=query_offsets,
        documents=documents,
        document_offsets=document_offsets,
    )
    return (
        _checked_segments("query", "query_offsets", query_offsets, "len(queries)", len(queries)),
        _checked_segments("document", "document_offsets", document_offsets, "len(documents)", len(documents)),
    )


def _checked_segments(what: str, name: str, offsets: Tensor, ends_at: str, end: int) -> Tensor:
    check_integers(name, offsets)
    offsets = offsets.to(torch.int64)
    check_offsets(name, offsets, end, ends_at=ends_at, describe=lambda row: f"{what} {row}")
    check_filled(name, offsets, describe=lambda row: f"{what} {row}")
    if int(offsets.diff().max() if offsets.numel() > 1 else 0) >= 2**31:
        raise ValueError(f"{name} has a {what} of 2^31 tokens or more; split it.")
    return offsets


def _checked_pairs(pairs: Tensor, queries: Tensor, query_offsets: Tensor, document_offsets: Tensor) -> Tensor:
    check_shape("pairs", pairs, "P", 2)
    check_integers("pairs", pairs)
    check_device(queries.device, "queries", pairs=pairs)
    pairs = pairs.to(torch.int64)
    for column, (what, offsets) in enumerate((("query", query_offsets), ("document", document_offsets))):
        count, ids = offsets.numel() - 1, pairs[:, column]
        place = first_true((ids < 0) | (ids >= count))
        if place is not None:
            raise ValueError(
                f"pairs[{place}, {column}] = {int(ids[place])} names no {what}; it must be in 0..{count - 1}."
            )
    return pairs
