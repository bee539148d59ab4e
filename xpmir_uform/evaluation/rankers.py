"""Rankers: how a model orders documents for a query.

The model is known by its methods alone: ``encode(items) -> (N, d)`` and
``score(queries, documents, pairs, max_query_span=...)``.

Letters: Q queries, D documents, k places of a ranking.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from experimaestro import Config, Param

from xpmir_uform.base.configuration import default
from xpmir_uform.evaluation.search import UNRANKED, Order, Ranking, cosine_search


def pooled_ranking(model: Any, order: Order, depth: int) -> Ranking:
    """(Q, min(depth, D)): the nearest documents by the cosine of pooled embeddings."""
    queries, documents = model.encode(order.problem.queries), model.encode(order.problem.documents)
    return Ranking(cosine_search(queries, documents, order, depth))


class Ranker(Config, ABC):
    """Orders documents for queries."""

    __xpmid__ = "uform.ranker"

    @abstractmethod
    def rank(self, model: Any, order: Order, depth: int) -> Ranking:
        """At most ``depth`` documents of each query of ``order.problem``."""


class PooledRanker(Ranker):
    """By the cosine of pooled embeddings."""

    __xpmid__ = "uform.pooled-ranker"

    def rank(self, model: Any, order: Order, depth: int) -> Ranking:
        """(Q, min(depth, D))."""
        return pooled_ranking(model, order, depth)


def check_span(tokens: int | None) -> None:
    """Refuses a query without tokens.

    Raises:
        ValueError: naming the field.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"max_query_span is {tokens}, expected at least 1 token")


class TokenRanker(Ranker):
    """By late interaction with every document."""

    __xpmid__ = "uform.token-ranker"

    max_query_span: Param[int | None] = default()
    """How many of a query's first tokens count, as in training; None: all"""

    def __validate__(self):
        check_span(self.max_query_span)

    def rank(self, model: Any, order: Order, depth: int) -> Ranking:
        """(Q, min(depth, D))."""
        problem = order.problem
        scores = model.score(problem.queries, problem.documents, max_query_span=self.max_query_span)
        return Ranking(torch.cat([order.best_first(rows, scores[rows], depth) for rows in order.blocks()]))


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
        check_span(self.max_query_span)

    def rank(self, model: Any, order: Order, depth: int) -> Ranking:
        """(Q, min(first, depth, D)), and the documents that were reranked."""
        problem, found = order.problem, pooled_ranking(model, order, self.first).best
        listed = found != UNRANKED
        pairs = torch.stack([torch.nonzero(listed)[:, 0], found[listed]], dim=1)
        given = model.score(problem.queries, problem.documents, pairs, max_query_span=self.max_query_span).cpu()
        scores = torch.zeros(found.shape, dtype=given.dtype).masked_scatter(listed, given)
        return Ranking(order.best_first(slice(0, len(found)), scores, depth, found), found)
