"""Rankers and the lexical baseline, on problems worked out by hand."""

import json
from pathlib import Path

import pytest
import torch
from experimaestro.xpmutils import DirectoryContext

from xpmir_uform import Item, LexicalEvaluation, Modality, PooledRanker, Reranker, Retrieval, RetrievalSet, TokenRanker
from xpmir_uform.data.checks import validate
from xpmir_uform.evaluation.lexical import bm25_ranking
from xpmir_uform.evaluation.rankers import best_first

DOCUMENTS = ["a b", "b b", "c", "a"]


class Letters:
    """Embeds a text by the numbers of its letters; scores by the letters that both have."""

    def encode(self, items):
        return torch.tensor([[item.content.count(letter) + 0.0 for letter in b"abc"] for item in items])

    def score(self, queries, documents, pairs=None, max_query_span=None):
        queries = [Item.text(query.content.decode()[:max_query_span]) for query in queries]
        table = torch.tensor([[len(set(q.content) & set(d.content)) + 0.0 for d in documents] for q in queries])
        return table if pairs is None else table[pairs[:, 0], pairs[:, 1]]


class Sentences(RetrievalSet):
    """Two queries of words."""

    __xpmid__ = "test.sentences"

    def load(self):
        texts = ["the red apple", "a blue sky", "red red wine"]
        return Retrieval([Item.text("red"), Item.text("sky blue")], [*map(Item.text, texts)], [[0], [1]])


@pytest.fixture
def problem():
    return Retrieval([Item.text("a"), Item.text("bc")], [*map(Item.text, DOCUMENTS)], [[3], [0]])


def test_pooled_ranking_is_by_cosine(problem):
    found = PooledRanker.C().instance().rank(Letters(), problem, 3)
    assert found.tolist() == [[3, 0, 1], [1, 2, 0]]


def test_token_ranking_is_by_score_and_keeps_the_order_of_equals(problem):
    found = TokenRanker.C().instance().rank(Letters(), problem, 4)
    # The space of "a b" is no letter of a query.
    assert found.tolist() == [[0, 3, 1, 2], [0, 1, 2, 3]]


def test_reranking_orders_what_pooling_found_and_nothing_else(problem):
    found = Reranker.C(first=2).instance().rank(Letters(), problem, 10)
    assert found.tolist() == [[3, 0], [1, 2]]
    assert Reranker.C(first=9).instance().rank(Letters(), problem, 2).tolist() == [[3, 0], [1, 2]]


def test_queries_are_cut_as_in_training():
    """All documents hold the letter a; of the query "ab" only the first letter counts."""
    problem = Retrieval([Item.text("ab")], [Item.text("ac"), Item.text("ab")], [[1]])
    assert TokenRanker.C(max_query_span=1).instance().rank(Letters(), problem, 2).tolist() == [[0, 1]]
    assert TokenRanker.C().instance().rank(Letters(), problem, 2).tolist() == [[1, 0]]
    assert Reranker.C(max_query_span=1).instance().rank(Letters(), problem, 2).tolist() == [[1, 0]]


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_scores_that_are_not_finite_are_refused(wrong):
    with pytest.raises(ValueError, match="query 0 and document 1 is not finite"):
        best_first(torch.tensor([[0.0, wrong]]))


def test_a_reranker_of_nothing_is_refused():
    with pytest.raises(ValueError, match="first is 0, expected at least 1 document"):
        validate(Reranker.C(first=0))


def test_bm25_ranks_by_words():
    """ "red" stands once in document 0 and twice in the equally long document 2; "blue" and "sky" in document 1."""
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    found = bm25_ranking(Sentences.C().instance().load(), k1=0.9, b=0.4, depth=3)
    assert found.tolist() == [[2, 0, 1], [1, 0, 2]]


@pytest.mark.parametrize(
    ("queries", "documents", "expected"),
    [
        (["", "red"], ["blue boat", "red apple"], [[0, 1], [1, 0]]),
        (["é", "zebra"], ["blue boat", "red apple"], [[0, 1], [0, 1]]),
        (["red"], ["", "a"], [[0, 1]]),
        (["red"], ["", "red"], [[1, 0]]),
    ],
    ids=["no query", "no known word", "no word anywhere", "an empty document"],
)
def test_bm25_without_words_keeps_the_order(queries, documents, expected):
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    problem = Retrieval([*map(Item.text, queries)], [*map(Item.text, documents)], [[0]] * len(queries))
    assert bm25_ranking(problem, 0.9, 0.4, 9).tolist() == expected


@pytest.mark.parametrize("params", [{"k1": float("nan")}, {"k1": -1.0}, {"b": 1.5}, {"depth": 0}])
def test_impossible_settings_of_bm25_are_refused(params):
    with pytest.raises(ValueError, match="expected k1 finite and at least 0, b from 0 to 1, and depth at least 1"):
        validate(LexicalEvaluation.C(retrievals={}, **params))


def test_bm25_reads_texts_alone():
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    picture = Item(Modality.IMAGE, b"x", 1)
    with pytest.raises(ValueError, match="BM25 reads texts alone"):
        bm25_ranking(Retrieval([Item.text("a")], [picture], [[0]]), 0.9, 0.4, 1)
    with pytest.raises(ValueError, match=r"item 0x0000000000000001 \(text, 1 bytes\) is not UTF-8"):
        bm25_ranking(Retrieval([Item(Modality.TEXT, b"\xff", 1)], [Item.text("a")], [[0]]), 0.9, 0.4, 1)


def test_the_lexical_evaluation_writes_what_that_of_a_model_does(tmp_path: Path):
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    task = LexicalEvaluation.C(retrievals={"words": Sentences.C()}).instance(context=DirectoryContext(tmp_path))
    task.execute()
    found = json.loads(task.resultspath.read_text())["words"]
    assert found["nearest"] == [[2, 0, 1], [1, 0, 2]]
    assert (found["queries"], found["documents"]) == (2, 3)
    assert found["measures"]["MRR@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["chance"]["R@1"] == pytest.approx(1 / 3)
