"""Exact search.

Letters: Q queries, D documents, d embedding width, k results.
"""

import torch
from torch.nn.functional import normalize


def cosine_search(queries: torch.Tensor, documents: torch.Tensor, k: int, rows: int = 1024) -> torch.Tensor:
    """The k nearest documents of each query by cosine, nearest first; equal cosines keep the documents' order.

    Args:
        queries: (Q, d) float.
        documents: (D, d) float.
        k: at most D are returned.
        rows: queries scored at a time, which bounds memory to rows * D scores.

    Returns:
        (Q, min(k, D)) int64 document numbers.

    Raises:
        ValueError: an embedding is not finite.
    """
    for name, embeddings in (("query", queries), ("document", documents)):
        wrong = torch.nonzero(~embeddings.isfinite().all(dim=1))
        if len(wrong):
            raise ValueError(f"the embedding of {name} {int(wrong[0])} is not finite, expected finite ones")
    documents = normalize(documents, dim=1).T
    parts = [
        torch.sort(normalize(part, dim=1) @ documents, dim=1, descending=True, stable=True).indices[:, :k]
        for part in queries.split(rows)
    ]
    return torch.cat(parts)
