"""Rankers: how a model orders documents for a query.

The model is known by its methods alone: ``encode(items) -> (N, d)`` and
``score(queries, documents, pairs, max_query_span=...)``.

Letters: Q queries, D documents, k places of a ranking.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from experimaestro import Config, Param
from torch import Tensor

from xpmir_uform.data.fields import default
from xpmir_uform.data.retrieval import Retrieval
from xpmir_uform.evaluation.search import cosine_search


def pooled_ranking(model: Any, retrieval: Retrieval, depth: int) -> Tensor:
    """(Q, min(depth, D)) int64: the nearest documents by the cosine of pooled embeddings."""
    queries, documents = model.encode(retrieval.queries), model.encode(retrieval.documents)
    return cosine_search(queries, documents, depth).cpu()


class Ranker(Config, ABC):
    """Orders documents for queries."""

    __xpmid__ = "uform.ranker"

    @abstractmethod
    def rank(self, model: Any, retrieval: Retrieval, depth: int) -> Tensor:
        """(Q, k) int64 document numbers, best first; equals keep the documents' order; k is at most ``depth``."""


class PooledRanker(Ranker):
    """By the cosine of pooled embeddings."""

    __xpmid__ = "uform.pooled-ranker"

    def rank(self, model: Any, retrieval: Retrieval, depth: int) -> Tensor:
        """(Q, min(depth, D)) int64."""
        return pooled_ranking(model, retrieval, depth)


class TokenRanker(Ranker):
    """By late interaction with every document."""

    __xpmid__ = "uform.token-ranker"

    max_query_span: Param[int | None] = default()
    """How many of a query's first tokens count, as in training; None: all"""

    def rank(self, model: Any, retrieval: Retrieval, depth: int) -> Tensor:
        """(Q, min(depth, D)) int64."""
        scores = model.score(retrieval.queries, retrieval.documents, max_query_span=self.max_query_span)
        return best_first(scores.cpu())[:, :depth]


class Reranker(Ranker):
    """By late interaction with the documents that pooled embeddings put first."""

    __xpmid__ = "uform.reranker"

    first: Param[int] = default(100)
    """How many documents are reranked"""

    max_query_span: Param[int | None] = default()
    """How many of a query's first tokens count, as in training; None: all"""

    def __validate__(self):
        if self.first < 1:
            raise ValueError(f"first is {self.first}, expected at least 1 document to rerank")

    def rank(self, model: Any, retrieval: Retrieval, depth: int) -> Tensor:
        """(Q, min(first, depth, D)) int64."""
        found = pooled_ranking(model, retrieval, self.first)
        queries = torch.arange(len(found)).repeat_interleave(found.shape[1])
        pairs = torch.stack([queries, found.flatten()], dim=1)
        scores = model.score(retrieval.queries, retrieval.documents, pairs, max_query_span=self.max_query_span)
        return found.gather(1, best_first(scores.cpu().view(found.shape)))[:, :depth]


def best_first(scores: Tensor) -> Tensor:
    """(Q, D) int64: the order of each row from the highest score; equals keep their order.

    Raises:
        ValueError: a score is not finite.
    """
    wrong = torch.nonzero(~scores.isfinite())
    if len(wrong):
        query, document = wrong[0].tolist()
        raise ValueError(f"the score of query {query} and document {document} is not finite, expected finite ones")
    return torch.sort(scores, dim=1, descending=True, stable=True).indices
