"""Exact search, and the one rule by which documents are put in order.

Letters: Q queries, D documents, d embedding width, c documents listed for a query, k results.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xpmir_uform.data.problems import Retrieval, hash_items

UNRANKED = -1
"""In a ranking: no document."""

CELLS = 1 << 24
"""Scores that are put in order at a time."""


class Ranking(NamedTuple):
    """The documents of each query.

    Args:
        best: (Q, k) int64 document numbers, best first; behind them :data:`UNRANKED`.
        listed: (Q, c) int64, the documents that were put in order, where a first stage chose them; None: all.
    """

    best: Tensor
    listed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """How the documents of a search problem are put in order by their scores.

    Equal scores are ordered by a keyed hash of the contents of query and document. It knows neither what is relevant
    nor where an item is listed, so that a model that scores all documents alike ranks as chance does.

    A document that is the same thing as its query is not ranked, unless it is relevant: it is no answer, nor is it
    wrong, as in training a thing does not repel itself.

    Args:
        problem: whose documents are ordered, of which each thing is listed once.
        queries: (Q,) int64, hashes.
        documents: (D,) int64, hashes.
        itself: (Q,) int64, the document that is not ranked for a query, or :data:`UNRANKED`.
    """

    problem: Retrieval
    queries: Tensor
    documents: Tensor
    itself: Tensor

    @classmethod
    def of(cls, problem: Retrieval) -> "Order":
        """The order of the documents of ``problem``."""
        queries, documents = hash_items(problem.queries), hash_items(problem.documents)
        numbers = {row.tobytes(): number for number, row in enumerate(documents)}
        same = [numbers.get(row.tobytes(), UNRANKED) for row in queries]
        itself = [
            UNRANKED if number in relevant else number for number, relevant in zip(same, problem.relevant, strict=True)
        ]
        return cls(problem, torch.tensor(queries[:, 0]), torch.tensor(documents[:, 1]), torch.tensor(itself))

    def blocks(self) -> Iterator[slice]:
        """Runs of queries whose scores are put in order at a time, which bounds memory."""
        count, rows = len(self.queries), max(1, CELLS // len(self.documents))
        return (slice(start, min(start + rows, count)) for start in range(0, count, rows))

    def best_first(self, queries: slice, scores: Tensor, depth: int, listed: Tensor | None = None) -> Tensor:
        """The ranking of some queries.

        Args:
            queries: which.
            scores: (q, c) float32 or wider.
            depth: documents that are kept.
            listed: (q, c) int64, the document of each column, or :data:`UNRANKED`, of which the score does not matter;
                None: all, in order.

        Returns:
            (q, min(depth, c)) int64 document numbers, best first; behind them :data:`UNRANKED`.

        Raises:
            ValueError: a score is NaN or infinite; names the query and the document.
        """
        if listed is None:
            listed = torch.arange(len(self.documents)).expand(scores.shape)
        listed = listed.masked_fill(listed == self.itself[queries, None], UNRANKED)
        # An odd factor permutes the int64, and the high bits of the product depend on all bits of both.
        keys = (self.queries[queries, None] | 1) * self.documents[listed]
        listed, keys = listed.to(scores.device), keys.to(scores.device)
        self._check(queries, scores, listed)
        scores = scores.masked_fill(listed == UNRANKED, -torch.inf)
        order = keys.argsort(dim=1)
        order = order.gather(1, scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices)[:, :depth]
        return listed.gather(1, order).cpu()

    def _check(self, queries: slice, scores: Tensor, listed: Tensor) -> None:
        wrong = torch.nonzero((listed != UNRANKED) & ~scores.isfinite())
        if len(wrong):
            row, column = wrong[0].tolist()
            query, document = self.problem.queries[queries][row], self.problem.documents[int(listed[row, column])]
            score = float(scores[row, column])
            raise ValueError(f"the score of query {query} and document {document} is {score}, expected a finite one")


def unit(vectors: Tensor) -> Tensor:
    """Rows (N, d) of length one, in float64; a zero row stays zero, however small or large the others are."""
    vectors = vectors.double()
    largest = vectors.abs().amax(dim=1, keepdim=True)
    scaled = vectors / torch.where(largest > 0, largest, 1)
    norms = scaled.norm(dim=1, keepdim=True)
    return scaled / torch.where(norms > 0, norms, 1)


def cosine_search(queries: Tensor, documents: Tensor, order: Order, depth: int) -> Tensor:
    """The nearest documents of each query by cosine.

    Cosines are formed in float64 and rounded to float32, whatever the type of the embeddings: those that are equal but
    for the order of a sum are equal again. A zero embedding has cosine 0 with everything.

    Args:
        queries: (Q, d) float.
        documents: (D, d) float.
        order: of the problem.
        depth: at most D are returned.

    Returns:
        (Q, min(depth, D)) int64 document numbers, nearest first; behind them :data:`UNRANKED`.

    Raises:
        ValueError: an embedding is not finite.
    """
    both = ("query", queries, order.problem.queries), ("document", documents, order.problem.documents)
    for name, embeddings, items in both:
        wrong = torch.nonzero(~embeddings.isfinite().all(dim=1))
        if len(wrong):
            raise ValueError(f"the embedding of {name} {items[int(wrong[0])]} is not finite, expected finite ones")
    queries, columns = unit(queries), unit(documents).T
    return torch.cat([order.best_first(rows, (queries[rows] @ columns).float(), depth) for rows in order.blocks()])
