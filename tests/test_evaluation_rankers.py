"""Rankers and the lexical baseline, on problems worked out by hand."""

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from experimaestro import TaskCancelled
from experimaestro.xpmutils import DirectoryContext

from xpmir_uform import (
    Item,
    LexicalEvaluation,
    Modality,
    PooledHead,
    PooledRanker,
    Reranker,
    Retrieval,
    RetrievalEvaluation,
    RetrievalSet,
    TokenHead,
    TokenRanker,
    UFormEncoder,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.evaluation.lexical import bm25_ranking, words
from xpmir_uform.evaluation.measures import Counts, chance
from xpmir_uform.evaluation.results import write_each
from xpmir_uform.evaluation.retrieval import evaluate
from xpmir_uform.evaluation.search import UNRANKED, Order

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
def order():
    return Order.of(Retrieval([Item.text("a"), Item.text("bc")], [*map(Item.text, DOCUMENTS)], [[3], [0]]))


def rank(ranker, model, order, depth):
    return ranker.instance().rank(model, order, depth).best.tolist()


def test_pooled_ranking_is_by_cosine(order):
    """The query "a" is a document too, and relevant; "bc" is as near to "b b" as to "c"."""
    found = rank(PooledRanker.C(), Letters(), order, 3)
    assert found[0][:2] == [3, 0]
    assert {*found[1][:2]} == {1, 2}
    assert found[1][2] == 0


def test_token_ranking_is_by_score(order):
    """The space of "a b" is no letter of a query; the letters that count twice are the same."""
    found = rank(TokenRanker.C(), Letters(), order, 4)
    assert [{*found[0][:2]}, {*found[0][2:]}] == [{0, 3}, {1, 2}]
    assert [{*found[1][:3]}, found[1][3]] == [{0, 1, 2}, 3]


def test_reranking_orders_what_pooling_found_and_nothing_else(order):
    best, listed = Reranker.C(first=2).instance().rank(Letters(), order, 10)
    assert [*map(sorted, best.tolist())] == [[0, 3], [1, 2]]
    assert [*map(sorted, listed.tolist())] == [[0, 3], [1, 2]]
    assert rank(Reranker.C(first=9), Letters(), order, 2) == rank(TokenRanker.C(), Letters(), order, 2)


def test_queries_are_cut_as_in_training():
    """All documents hold the letter a; of the query "ab" only the first letter counts."""
    order = Order.of(Retrieval([Item.text("ab")], [Item.text("ac"), Item.text("abb")], [[1]]))
    cut = [rank(ranker(max_query_span=1), Letters(), order, 2) for ranker in (TokenRanker.C, Reranker.C)]
    whole = [rank(ranker(), Letters(), order, 2) for ranker in (TokenRanker.C, Reranker.C)]
    assert whole == [[[1, 0]], [[1, 0]]]
    assert cut == [order.best_first(slice(0, 1), torch.ones(1, 2), 2).tolist()] * 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_are_refused(order, wrong):
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, wrong, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"the score of query item .* 2 bytes\) and document item .* 3 bytes\) is"):
        order.best_first(slice(0, 2), scores, 1)


def listed(queries, documents):
    """A problem in which each query, a number, asks for the documents that end as it does."""
    relevant = [[n for n, other in enumerate(documents) if other % 10 == query % 10] for query in queries]
    return Retrieval(*([Item.text(f"number {n}") for n in some] for some in (queries, documents)), relevant)


@pytest.fixture(scope="module")
def encoders():
    """A tiny model by the name of its precision, and one all of whose weights are zero."""
    made = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("zero", torch.float32)):
        config = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), tokens=TokenHead.C(width=16))
        made[name] = config.instance()
        made[name].initialize()
        made[name].to(dtype)
    with torch.no_grad():
        for parameter in made["zero"].parameters():
            parameter.zero_()
    return made


RANKERS = {"pooled": PooledRanker.C(), "tokens": TokenRanker.C(), "reranked": Reranker.C(first=20)}


@pytest.mark.parametrize("name", RANKERS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_order_of_a_data_set_changes_no_measure_bit_for_bit(encoders, name, precision):
    """Queries and documents reversed and shuffled: the same measures, chance and documents of each query."""
    queries, documents = list(range(100, 130)), list(range(200, 260))
    rank = partial(RANKERS[name].instance().rank, encoders[precision])
    one = evaluate(listed(queries, documents), rank, 5)
    draw = random.Random(5)
    for shuffle in (list.reverse, draw.shuffle):
        shuffle(queries)
        shuffle(documents)
        other = evaluate(listed(queries, documents), rank, 5)
        assert {**other, "nearest": None} == {**one, "nearest": None}
        named = {query: [documents[n] for n in row] for query, row in zip(queries, other["nearest"], strict=True)}
        assert named == {n: [200 + m for m in row] for n, row in zip(range(100, 130), one["nearest"], strict=True)}


@pytest.mark.parametrize("name", RANKERS)
def test_a_model_of_zeros_finds_what_chance_finds(encoders, name):
    """Each of 100 queries asks for the document that is listed first, which an order by position would find."""
    problem = listed([*range(0, 1000, 10)], [*range(2000, 2060)])
    problem = Retrieval(problem.queries, problem.documents, [[0]] * 100)
    found = evaluate(problem, partial(RANKERS[name].instance().rank, encoders["zero"]), 5)
    # The first relevant rank of 60 has a mean reciprocal of 0.078 and a deviation of 0.15.
    assert found["measures"]["MRR"] == pytest.approx(found["chance"]["MRR"], abs=5 * 0.15 / 10)


def test_chance_of_a_reranking_is_that_of_the_documents_that_were_reranked(encoders):
    """Of 60 documents 20 are reordered: chance is the mean over their orders, not over those of all."""
    problem = listed([*range(100, 130)], [*range(200, 260)])
    found = evaluate(problem, partial(RANKERS["reranked"].instance().rank, encoders["float32"]), 20)
    inside = [
        sum(number in right for number in row) for row, right in zip(found["nearest"], problem.relevant, strict=True)
    ]
    assert found["chance"] == chance([Counts(20, count, 6) for count in inside], 1000)
    assert found["chance"]["R@10"] == pytest.approx(sum(inside) / 6 / 30 / 2)


def test_equal_documents_and_queries_count_once():
    """Letters are embedded ideally: whichever of equal documents a query names, it is found first."""
    documents = ["a", "b", "a", "c", "b"]
    problem = Retrieval([*map(Item.text, ["aa", "bb", "cc", "aa"])], [*map(Item.text, documents)], [[2], [1], [3], [0]])
    found = evaluate(problem, partial(PooledRanker.C().instance().rank, Letters()), 5)
    assert set(found["measures"].values()) == {1.0}
    assert (found["queries"], found["documents"]) == (3, 3)
    assert [row[0] for row in found["nearest"]] == [0, 1, 3, 0]


def test_chance_is_known_before_anything_is_encoded(monkeypatch):
    """Counts that would fail do so at once."""

    def fail(*_):
        raise OverflowError("too large")

    monkeypatch.setattr("xpmir_uform.evaluation.retrieval.chance", fail)
    with pytest.raises(OverflowError):
        evaluate(listed([1], [11, 12]), lambda order, depth: pytest.fail("ranked"), 5)


def test_a_reranker_of_nothing_is_refused():
    with pytest.raises(ValueError, match="first is 0, expected at least 1 document"):
        validate(Reranker.C(first=0))


def bm25(problem, depth=9):
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    order = Order.of(problem)
    return [[n for n in row if n != UNRANKED] for row in bm25_ranking(order, 0.9, 0.4, depth).best.tolist()]


def test_bm25_ranks_by_words():
    """ "red" stands once in document 0 and twice in the equally long document 2; "blue" and "sky" in document 1."""
    assert bm25(Sentences.C().instance().load()) == [[2, 0], [1]]


@pytest.mark.parametrize(
    ("queries", "documents", "expected"),
    [
        (["", "red"], ["blue boat", "red apple"], [[], [1]]),
        (["é", "zebra"], ["blue boat", "red apple"], [[], []]),
        (["red"], ["", "!"], [[]]),
        (["red"], ["", "red one"], [[1]]),
    ],
    ids=["no query", "no known word", "no word anywhere", "an empty document"],
)
def test_bm25_finds_nothing_without_a_word(queries, documents, expected):
    problem = Retrieval([*map(Item.text, queries)], [*map(Item.text, documents)], [[0]] * len(queries))
    assert bm25(problem) == expected
    found = evaluate(problem, lambda order, depth: bm25_ranking(order, 0.9, 0.4, depth), 5)
    assert found["measures"]["MRR"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Red apples, x86-64: can't!", ["red", "apples", "x86", "64", "can't"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        ("শব্দকোষ", ["শব্দকোষ"]),
        ("cafe\u0301 CAFÉ", ["café", "café"]),
        ("STRASSE straße", ["strasse", "strasse"]),
        ("我喜欢 apple", ["我", "喜", "欢", "apple"]),
        ("カタカナ", ["カタカナ"]),
        ("ไทย", ["ไ", "ท", "ย"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("ﬁne 🍎 --", ["fine"]),
    ],
)
def test_words_are_parted_as_unicode_says(text, expected):
    pytest.importorskip("regex", reason="needs the extra demo-text")
    assert words(text) == expected


@pytest.mark.parametrize("library", ["regex", "bm25s"])
def test_what_bm25_needs_is_named(monkeypatch, library):
    pytest.importorskip("regex", reason="needs the extra demo-text")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=rf"{library} is not installed: pip install 'xpmir-uform\[demo-text\]'"):
        bm25_ranking(Order.of(Sentences.C().instance().load()), 0.9, 0.4, 3)


@pytest.mark.parametrize("text", ["मेरी बिल्ली", "猫が好き", "แมวของฉัน", "私の猫"])
def test_bm25_finds_words_of_any_script(text):
    texts = ["नमस्ते दुनिया", "犬だけ", "สุนัข", text, "a dog"]
    problem = Retrieval([Item.text(f"{text}!")], [*map(Item.text, texts)], [[3]])
    assert bm25(problem)[0][0] == 3


def test_bm25_does_not_know_where_a_document_is_listed():
    """40 documents hold the one word of the query alike; the relevant one is listed first, then last."""
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    documents = [Item.text(f"red {n}") for n in range(40)]
    for queries in (["red", "the red"], ["red one red", "red apple"]):
        problems = [
            Retrieval([*map(Item.text, queries)], documents[::step], [[place]] * 2)
            for step, place in ((1, 0), (-1, 39))
        ]
        one, other = (
            evaluate(problem, lambda order, depth: bm25_ranking(order, 0.9, 0.4, depth), 40) for problem in problems
        )
        assert one["measures"] == other["measures"]
        assert [[39 - n for n in row] for row in other["nearest"]] == one["nearest"]


@pytest.mark.parametrize("params", [{"k1": float("nan")}, {"k1": -1.0}, {"b": 1.5}, {"depth": 0}])
def test_impossible_settings_of_bm25_are_refused(params):
    with pytest.raises(ValueError, match="expected k1 finite and at least 0, b from 0 to 1, and depth at least 1"):
        validate(LexicalEvaluation.C(retrievals={}, **params))


def test_a_setting_of_bm25_that_changes_nothing_is_refused():
    """The same evaluation would have two identifiers."""
    validate(LexicalEvaluation.C(retrievals={}, k1=0.0))
    with pytest.raises(ValueError, match=r"b is 0\.7, which changes nothing where k1 is 0: leave it out"):
        validate(LexicalEvaluation.C(retrievals={}, k1=0.0, b=0.7))


def test_bm25_reads_texts_alone():
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    picture = Item(Modality.IMAGE, b"x", 1)
    with pytest.raises(ValueError, match="BM25 reads texts alone"):
        bm25(Retrieval([Item.text("a")], [picture], [[0]]))
    with pytest.raises(ValueError, match=r"item 0x0000000000000001 \(text, 1 bytes\) is not UTF-8"):
        bm25(Retrieval([Item(Modality.TEXT, b"\xff", 1)], [Item.text("a")], [[0]]))


def test_the_lexical_evaluation_writes_what_that_of_a_model_does(tmp_path: Path):
    pytest.importorskip("bm25s", reason="needs the extra demo-text")
    task = LexicalEvaluation.C(retrievals={"words": Sentences.C()}).instance(context=DirectoryContext(tmp_path))
    task.execute()
    found = json.loads(task.resultspath.read_text())["words"]
    assert found["nearest"] == [[2, 0], [1]]
    assert (found["queries"], found["documents"]) == (2, 3)
    assert found["measures"]["MRR@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["chance"]["R@1"] == pytest.approx(1 / 3)


class Unreadable(RetrievalSet):
    """A document that no model reads."""

    __xpmid__ = "test.unreadable"

    def load(self):
        return Retrieval([Item.text("a")], [Item(Modality.IMAGE, b"no picture", 1)], [[0]])


def test_one_problem_that_fails_costs_none_of_the_others(tmp_path: Path):
    problems = {"first": Sentences.C(), "bad": Unreadable.C(), "last": Sentences.C()}
    tasks = [LexicalEvaluation.C(retrievals=problems)]
    tasks.append(
        RetrievalEvaluation.C(
            model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16)), retrievals=problems
        )
    )
    for task, why in zip(tasks, ("BM25 reads texts alone", "image"), strict=True):
        if isinstance(task, LexicalEvaluation):
            pytest.importorskip("bm25s", reason="needs the extra demo-text")
        task = task.instance(context=DirectoryContext(tmp_path))
        with pytest.raises(RuntimeError, match=rf"1 of 3 problems failed.*'bad': ValueError: .*{why}"):
            task.execute()
        found = json.loads(task.resultspath.read_text())
        assert [*found] == ["first", "last"]
        assert found["first"] == found["last"]


def test_a_cancelled_task_does_not_go_on_with_the_next_problem(tmp_path: Path):
    asked = []

    def evaluate_one(name):
        asked.append(name)
        if name == "second":
            raise TaskCancelled("Job cancelled by SIGTERM")
        return {"name": name}

    with pytest.raises(TaskCancelled):
        write_each(tmp_path / "results.json", ["first", "second", "third"], evaluate_one)
    assert asked == ["first", "second"]
    assert json.loads((tmp_path / "results.json").read_text()) == {"first": {"name": "first"}}
