"""Search and measures against definitions written out."""

import math

import pytest
import torch

from xpmir_uform.evaluation.measures import chance, measure
from xpmir_uform.evaluation.search import cosine_search


def test_measures_by_hand():
    """Query 0 finds its document first; query 1 finds two relevant ones at ranks 2 and 4; query 2 finds nothing."""
    ranking = torch.tensor([[3, 1, 2, 0], [1, 0, 3, 2], [0, 1, 2, 3]])
    values = measure(ranking, [[3], [0, 2], [9]])
    assert values["MRR"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert values["R@1"] == pytest.approx((1 + 0 + 0) / 3)
    assert values["R@10"] == pytest.approx((1 + 1 + 0) / 3)
    second = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert values["nDCG@10"] == pytest.approx((1 + second) / 3)


def test_chance_is_the_mean_over_all_rankings():
    """All 24 rankings of four documents, for queries with one and with three relevant ones."""
    from itertools import permutations

    rankings = torch.tensor(list(permutations(range(4))))
    for relevant in ([2], [0, 1, 3]):
        mean = measure(rankings, [relevant] * len(rankings))
        assert chance(4, [relevant]) == pytest.approx(mean)


def test_chance_of_300_documents():
    assert chance(300, [[0]])["MRR"] == pytest.approx(sum(1 / k for k in range(1, 301)) / 300)
    assert chance(300, [[0], [1]])["R@10"] == pytest.approx(10 / 300)


def test_search_is_by_cosine_and_keeps_order_among_equals():
    documents = torch.tensor([[0.0, 1.0], [2.0, 0.0], [5.0, 0.0], [-1.0, 0.0]])
    assert cosine_search(torch.tensor([[3.0, 0.0]]), documents, 4).tolist() == [[1, 2, 0, 3]]
    assert cosine_search(torch.tensor([[3.0, 0.0]]), documents, 2).tolist() == [[1, 2]]


def test_search_in_parts_equals_search_at_once():
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(n, 8, generator=generator) for n in (33, 50))
    assert torch.equal(cosine_search(queries, documents, 10, rows=7), cosine_search(queries, documents, 10))


def test_chance_within_a_depth_is_that_of_a_cut_ranking():
    from itertools import permutations

    rankings = torch.tensor(list(permutations(range(5))))[:, :3]
    for relevant in ([2], [0, 1, 3, 4]):
        assert chance(5, [relevant], depth=3) == pytest.approx(measure(rankings, [relevant] * len(rankings)))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_embeddings_that_are_not_finite_are_refused(wrong):
    good, bad = torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0], [1.0, wrong, 3.0]])
    with pytest.raises(ValueError, match="the embedding of query 1 is not finite"):
        cosine_search(bad, good, 1)
    with pytest.raises(ValueError, match="the embedding of document 1 is not finite"):
        cosine_search(good, bad, 1)
