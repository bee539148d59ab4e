"""Retrieval measures of a ranking, by ir-measures, and what a random ranking would reach.

Letters: Q queries, D documents, k length of a ranking; of one query: r relevant documents, n listed documents, f
relevant ones among them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import log2
from typing import NamedTuple

import ir_measures
from ir_measures import RR, R, nDCG
from torch import Tensor

from xpmir_uform.evaluation.search import UNRANKED, Order

MEASURES = {"MRR": RR, "MRR@10": RR @ 10, "R@1": R @ 1, "R@10": R @ 10, "nDCG@10": nDCG @ 10}


def measure(ranking: Tensor, relevant: Sequence[Sequence[int]]) -> dict[str, float]:
    """The mean of each measure over all queries.

    Args:
        ranking: (Q, k) int64 document numbers, best first, and :data:`~xpmir_uform.evaluation.search.UNRANKED`
            behind them; what is not among them counts as not found.
        relevant: the numbers of each query's relevant documents.
    """
    qrels = {str(query): {str(number): 1 for number in numbers} for query, numbers in enumerate(relevant)}
    run = {
        str(query): {str(number): -float(rank) for rank, number in enumerate(numbers) if number != UNRANKED}
        for query, numbers in enumerate(ranking.tolist())
    }
    values = ir_measures.calc_aggregate(list(MEASURES.values()), qrels, run)
    return {name: float(values[key]) for name, key in MEASURES.items()}


class Counts(NamedTuple):
    """Of one query: the documents that are put in order, the relevant ones among them, and all relevant ones."""

    listed: int
    found: int
    relevant: int


def counts_of(order: Order, listed: Tensor | None = None) -> list[Counts]:
    """The counts of each query of a problem.

    Args:
        listed: (Q, c) int64, the documents that a first stage chose, or UNRANKED; None: all that are ranked.
    """
    relevant = order.problem.relevant
    if listed is None:
        totals = (len(order.documents) - (order.itself != UNRANKED).long()).tolist()
        return [Counts(total, len(right), len(right)) for total, right in zip(totals, relevant, strict=True)]
    chosen = [set(row) - {UNRANKED} for row in listed.tolist()]
    return [Counts(len(row), len(row & set(right)), len(right)) for row, right in zip(chosen, relevant, strict=True)]


def chance(queries: Iterable[Counts], depth: int | None = None) -> dict[str, float]:
    """The expected value of each measure when each query's listed documents are ordered at random.

    Args:
        queries: the counts of each.
        depth: documents of a ranking that are looked at; None: all.
    """
    groups = Counter(queries)
    total = sum(groups.values())
    # In one order, whatever that of the queries: the sum is the same to the bit.
    return {name: sum(groups[of] * expected(name, of, depth) for of in sorted(groups)) / total for name in MEASURES}


def expected(name: str, counts: Counts, depth: int | None = None) -> float:
    """The expected value of one measure for one query."""
    n, f, r = counts
    cut = int(name.partition("@")[2] or n)
    seen = min(n, cut, n if depth is None else depth)
    if f == 0:
        return 0.0
    if name.startswith("MRR"):
        return expected_reciprocal_rank(n, f, seen)
    if name.startswith("R@"):
        return f / r * seen / n
    gains = [1 / log2(rank + 1) for rank in range(1, max(seen, min(cut, r)) + 1)]
    return f / n * sum(gains[:seen]) / sum(gains[: min(cut, r)])


def expected_reciprocal_rank(n: int, f: int, seen: int) -> float:
    """The mean over all orders of n documents, f of them relevant, of 1 / the first relevant rank, 0 beyond ``seen``.

    The first is at rank k with probability ``before * f / (n - k + 1)``, where ``before``, the probability of none
    above, is a product of ratios below one: no binomial coefficient, which would overflow, is formed.
    """
    value, before = 0.0, 1.0
    for rank in range(1, min(seen, n - f + 1) + 1):
        left = n - rank + 1
        value += before * f / left / rank
        before *= (left - f) / left
    return value
