"""Retrieval measures of a ranking, by ir-measures, and what a random ranking would reach.

Letters: Q queries, D documents, r relevant documents of a query, k length of a ranking.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb, log2

import ir_measures
import torch
from ir_measures import RR, R, nDCG

MEASURES = {"MRR": RR, "MRR@10": RR @ 10, "R@1": R @ 1, "R@10": R @ 10, "nDCG@10": nDCG @ 10}


def measure(ranking: torch.Tensor, relevant: Sequence[Sequence[int]]) -> dict[str, float]:
    """The mean of each measure over all queries.

    Args:
        ranking: (Q, k) int64 document numbers, best first; what is not among them counts as not found.
        relevant: the numbers of each query's relevant documents.
    """
    qrels = {str(query): {str(number): 1 for number in numbers} for query, numbers in enumerate(relevant)}
    run = {
        str(query): {str(number): -float(rank) for rank, number in enumerate(numbers)}
        for query, numbers in enumerate(ranking.tolist())
    }
    values = ir_measures.calc_aggregate(list(MEASURES.values()), qrels, run)
    return {name: float(values[key]) for name, key in MEASURES.items()}


def chance(documents: int, relevant: Sequence[Sequence[int]], depth: int | None = None) -> dict[str, float]:
    """The expected value of each measure when the first ``depth`` of D documents ranked at random are looked at."""
    counts = Counter(len(numbers) for numbers in relevant)
    total = sum(counts.values())
    depth = documents if depth is None else depth
    return {
        name: sum(count * expected(name, documents, r, depth) for r, count in counts.items()) / total
        for name in MEASURES
    }


def expected(name: str, documents: int, r: int, depth: int) -> float:
    """The expected value of one measure for a query with r of D documents relevant."""
    cut = min(int(name.partition("@")[2] or documents), documents)
    if name.startswith("MRR"):
        firsts = range(1, min(documents - r + 1, depth, cut) + 1)
        return sum(comb(documents - first, r - 1) / first for first in firsts) / comb(documents, r)
    if name.startswith("R@"):
        return min(cut, depth) / documents
    gains = [1 / log2(rank + 1) for rank in range(1, cut + 1)]
    return r / documents * sum(gains[:depth]) / sum(gains[:r])
