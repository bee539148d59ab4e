"""The nearest pooled vectors: exactly, shard by shard, or by a graph.

Letters: Q queries, D documents, d embedding width, k results, n documents of a block.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 65_536
"""Documents that are compared at a time, which bounds memory to Q * BLOCK_ROWS scores."""

EXPANSION = 128
"""Candidates that the graph looks at in a search: more find more of the true neighbours and take longer."""


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
    for start, block in _blocks(parts):
        scores = torch.cat([products, queries @ block.float().T], dim=1)
        columns = torch.arange(start, start + len(block)).expand(len(queries), -1)
        kept = best(scores, k)
        numbers, products = torch.cat([numbers, columns], dim=1).gather(1, kept), scores.gather(1, kept)
    return numbers, products


def _blocks(parts: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for part in parts:
        for block in part.split(BLOCK_ROWS):
            yield start, block
            start += len(block)


def usearch() -> Any:
    """The module of usearch's graph.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import usearch.index
    except ImportError as error:
        raise ValueError("usearch is not installed: pip install 'xpmir-uform[search]'") from error
    return usearch.index


def write_graph(parts: Iterable[Tensor], width: int, path: Path) -> None:
    """Writes a graph (HNSW, Malkov and Yashunin, 2018) over the documents (n, d) of length one, in order.

    By one thread: several insert in an order of their own, and the same collection would give another graph each time.
    """
    graph = usearch().Index(ndim=width, metric="ip", dtype="f16")
    for start, block in _blocks(parts):
        graph.add(torch.arange(start, start + len(block)).numpy(), block.numpy(), threads=1)
    graph.save(str(path))


def open_graph(path: Path, count: int, expansion: int = EXPANSION) -> Any:
    """The graph in a file, which is mapped and not read.

    Raises:
        ValueError: usearch is not installed, or the file is no whole graph of ``count`` documents.
    """
    module = usearch()
    try:
        graph = module.Index.restore(str(path), view=True, expansion_search=expansion)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is no whole graph ({error}): build the index again") from error
    if graph is None or len(graph) != count:
        raise ValueError(f"{path} is no graph of {count} documents: build the index again")
    return graph


def graph_nearest(queries: Tensor, graph: Any, k: int) -> Tensor | None:
    """(Q, min(k, D)) int64: about the nearest documents of the queries (Q, d) float32, nearest first.

    None: the graph did not reach that many from where it began.
    """
    k = min(k, len(graph))
    found = graph.search(queries.numpy(), k)
    reached = getattr(found, "counts", None)
    if found.keys.size != len(queries) * k or (reached is not None and (reached < k).any()):
        return None
    return torch.from_numpy(found.keys.astype("int64")).reshape(len(queries), k)
