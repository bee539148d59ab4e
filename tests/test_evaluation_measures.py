"""Search and measures against definitions written out."""

import logging
import math
from itertools import combinations, permutations

import pytest
import torch

from xpmir_uform import Item, Modality, Retrieval
from xpmir_uform.evaluation.measures import Counts, chance, counts_of, measure
from xpmir_uform.evaluation.search import UNRANKED, Order, cosine_search, unit


def texts(*words):
    return [Item.text(word) for word in words]


def order_of(queries, documents, relevant=None):
    """The order of a problem with so many queries and documents."""
    names = texts(*(f"query {n}" for n in range(queries))), texts(*(f"document {n}" for n in range(documents)))
    return Order.of(Retrieval(*names, relevant or [[0]] * queries))


def whole(documents, *relevant):
    return [Counts(documents, r, r) for r in relevant]


# Measures


def test_measures_by_hand():
    """Query 0 finds its document first; query 1 finds two relevant ones at ranks 2 and 4; query 2 finds nothing."""
    ranking = torch.tensor([[3, 1, 2, 0], [1, 0, 3, 2], [0, 1, 2, 3]])
    values = measure(ranking, [[3], [0, 2], [9]])
    assert values["MRR"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert values["R@1"] == pytest.approx((1 + 0 + 0) / 3)
    assert values["R@10"] == pytest.approx((1 + 1 + 0) / 3)
    second = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert values["nDCG@10"] == pytest.approx((1 + second) / 3)


def test_what_is_not_ranked_is_not_found_and_takes_no_place():
    values = measure(torch.tensor([[2, UNRANKED, UNRANKED], [UNRANKED] * 3]), [[2], [0]])
    assert set(values.values()) == {0.5}


# Chance


def test_chance_is_the_mean_over_all_rankings():
    """All 24 rankings of four documents, for queries with one and with three relevant ones."""
    rankings = torch.tensor(list(permutations(range(4))))
    for relevant in ([2], [0, 1, 3]):
        mean = measure(rankings, [relevant] * len(rankings))
        assert chance(whole(4, len(relevant))) == pytest.approx(mean)


def test_chance_of_300_documents():
    assert chance(whole(300, 1))["MRR"] == pytest.approx(sum(1 / k for k in range(1, 301)) / 300)
    assert chance(whole(300, 1, 1))["R@10"] == pytest.approx(10 / 300)


def test_chance_within_a_depth_is_that_of_a_cut_ranking():
    rankings = torch.tensor(list(permutations(range(5))))[:, :3]
    for relevant in ([2], [0, 1, 3, 4]):
        mean = measure(rankings, [relevant] * len(rankings))
        assert chance(whole(5, len(relevant)), depth=3) == pytest.approx(mean)


@pytest.mark.parametrize("relevant", [[0], [0, 7], [0, 1, 2, 7, 8], [7]])
@pytest.mark.parametrize("depth", [2, 9])
def test_chance_of_a_candidate_list_is_the_mean_over_its_orders(relevant, depth):
    """Four of nine documents are reordered; of the relevant ones some are among them, or none."""
    rankings = torch.tensor(list(permutations(range(4))))
    found = len({*relevant} & {0, 1, 2, 3})
    mean = measure(rankings[:, :depth], [relevant] * len(rankings))
    assert chance([Counts(4, found, len(relevant))], depth) == pytest.approx(mean)


def test_counts_are_those_of_what_a_first_stage_chose():
    order = order_of(2, 5, [[0, 4], [1]])
    assert counts_of(order) == [(5, 2, 2), (5, 1, 1)]
    assert counts_of(order, torch.tensor([[0, 2, UNRANKED], [3, 4, 2]])) == [(2, 1, 2), (3, 0, 1)]


@pytest.mark.parametrize(("documents", "relevant"), [(2_000, 500), (100_000, 60_000), (10**7, 1), (1_000, 1_000)])
def test_chance_of_large_problems_is_finite(documents, relevant):
    """Against the limit for a share of relevant documents."""
    values = chance(whole(documents, relevant), depth=1000)
    assert all(0 <= value <= 1 for value in values.values())
    share = relevant / documents
    assert values["R@10"] == pytest.approx(10 / documents)
    if 0 < share < 1 and relevant > 1:
        # With replacement the first relevant rank is geometric, and E[1 / rank] = -p log p / (1 - p).
        assert values["MRR"] == pytest.approx(-share * math.log(share) / (1 - share), rel=2 / relevant**0.5)


def test_the_first_relevant_rank_is_hypergeometric():
    """Each place of 30 relevant ones among 34 is as likely as any other."""
    placed = list(combinations(range(34), 30))
    mean = sum(1 / (1 + min(places)) for places in placed) / len(placed)
    assert chance(whole(34, 30))["MRR"] == pytest.approx(mean, rel=1e-12)


# Search


def test_search_is_by_cosine():
    documents = torch.tensor([[0.0, 1.0], [2.0, 0.1], [5.0, 0.0], [-1.0, 0.0]])
    queries, order = torch.tensor([[3.0, 0.0]]), order_of(1, 4)
    assert cosine_search(queries, documents, order, 4).tolist() == [[2, 1, 0, 3]]
    assert cosine_search(queries, documents, order, 2).tolist() == [[2, 1]]


def test_search_in_parts_equals_search_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(n, 8, generator=generator) for n in (33, 50))
    order = order_of(33, 50)
    at_once = cosine_search(queries, documents, order, 10)
    monkeypatch.setattr("xpmir_uform.evaluation.search.CELLS", 7 * 50)
    assert torch.equal(cosine_search(queries, documents, order, 10), at_once)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_embeddings_that_are_not_finite_are_refused(wrong):
    good, bad = torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0], [1.0, wrong, 3.0]])
    order = order_of(2, 2)
    with pytest.raises(ValueError, match=r"the embedding of query item 0x\w+ \(text, 7 bytes\) is not finite"):
        cosine_search(bad, good, order, 1)
    with pytest.raises(ValueError, match=r"the embedding of document item 0x\w+ \(text, 10 bytes\) is not finite"):
        cosine_search(good, bad, order, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_embeddings_are_ranked_as_their_own_values_are(dtype):
    """The scores of 400 documents near a query differ by less than half precision resolves, not by less than float32.

    A zero embedding has cosine 0 also in float16, in which an epsilon of 1e-12 would be 0.
    """
    draw = torch.Generator().manual_seed(1)
    queries = torch.randn(40, 64, generator=draw).to(dtype)
    documents = (queries[0].double() + 0.3 * torch.randn(400, 64, generator=draw)).to(dtype)
    documents[17] = 0
    order = order_of(40, 400)
    cosines = torch.nn.functional.cosine_similarity(queries.double()[:, None], documents.double()[None], dim=2)
    expected = cosines.sort(dim=1, descending=True).indices
    assert torch.equal(cosine_search(queries, documents, order, 400), expected)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_a_cosine_knows_no_length(scale):
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-5.0, 12.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [-5 / 13, 12 / 13]], dtype=torch.float64)
    torch.testing.assert_close(unit(vectors * scale), expected)
    if 1e-40 < scale < 1e40:
        torch.testing.assert_close(unit((vectors * scale).float()), expected, atol=1e-6, rtol=0)


# Ties


def ranked(scores, order, depth=None):
    return order.best_first(slice(0, len(scores)), scores, depth or scores.shape[1])


def test_a_model_that_scores_all_alike_ranks_as_chance_does():
    """400 queries, of which three quarters have the first document as their only relevant one."""
    order = order_of(400, 100, [[0]] * 300 + [[number] for number in range(100)])
    values = measure(ranked(torch.zeros(400, 100), order), order.problem.relevant)
    expected = chance(counts_of(order))
    for name, spread in (("MRR", 0.1), ("R@1", 0.1), ("R@10", 0.3), ("nDCG@10", 0.17)):
        # Five standard errors of 400 draws.
        assert values[name] == pytest.approx(expected[name], abs=5 * spread / 400**0.5), name
    places = (ranked(torch.zeros(400, 100), order) == 0).nonzero()[:, 1]
    assert len(set(places.tolist())) > 90


@pytest.mark.parametrize(("queries", "documents"), [(13, 37), (257, 1031), (1, 90)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_embeddings_that_are_all_alike_are_equally_near(queries, documents, dtype):
    """A product of matrices adds up equal columns in different ways, by where they lie: it must not be a rank."""
    vector, order = torch.randn(100, generator=torch.Generator().manual_seed(4)).to(dtype), order_of(queries, documents)
    found = cosine_search(vector.expand(queries, -1), vector.expand(documents, -1), order, documents)
    assert torch.equal(found, ranked(torch.zeros(queries, documents), order))


def test_documents_and_queries_in_any_order_give_the_same_ranking():
    """Scores with many ties: each query's documents by content are the same however they are listed."""
    draw = torch.Generator().manual_seed(3)
    queries, documents = texts(*map(str, range(12))), texts(*map(str, range(100, 140)))
    scores = torch.randint(0, 4, (12, 40), generator=draw).float()
    rows, columns = torch.randperm(12, generator=draw), torch.randperm(40, generator=draw)
    one = ranked(scores, Order.of(Retrieval(queries, documents, [[0]] * 12)))
    shuffled = Retrieval([queries[row] for row in rows], [documents[column] for column in columns], [[0]] * 12)
    other = ranked(scores[rows][:, columns], Order.of(shuffled))
    assert torch.equal(columns[other], one[rows])


def test_the_place_of_the_answer_among_equals_is_uniform():
    """Of 4 equal documents the relevant one is first, second, third and last equally often: 2,000 queries each 500."""
    order = order_of(2000, 4)
    places = (ranked(torch.ones(2000, 4), order) == 2).nonzero()[:, 1]
    assert torch.bincount(places).tolist() == pytest.approx([500] * 4, abs=100)


def test_a_document_that_is_the_query_is_ranked_if_it_is_relevant_alone():
    problem = Retrieval(texts("rose", "tulip"), texts("tulip", "rose", "flower"), [[2], [0, 2]])
    order = Order.of(problem)
    scores = torch.tensor([[1.0, 9.0, 2.0], [9.0, 1.0, 2.0]])
    assert ranked(scores, order).tolist() == [[2, 0, UNRANKED], [0, 2, 1]]
    assert counts_of(order) == [(2, 1, 1), (3, 2, 2)]


# Equal items


def test_equal_documents_and_queries_are_one(caplog):
    queries, documents = texts("a", "b", "a"), texts("x", "y", "x", "z")
    with caplog.at_level(logging.WARNING):
        problem, numbers, firsts = Retrieval(queries, documents, [[0], [2], [3, 1]]).distinct()
    assert [text.split()[0] for text in caplog.messages] == ["1", "1"]
    assert "1 of 4 documents repeat another" in caplog.text
    asked = {
        query.content: {problem.documents[number].content for number in row}
        for query, row in zip(problem.queries, problem.relevant, strict=True)
    }
    assert asked == {b"a": {b"x", b"y", b"z"}, b"b": {b"x"}}
    assert [problem.queries[number].content for number in numbers] == [b"a", b"b", b"a"]
    assert sorted(firsts.tolist()) == [0, 1, 3]


def test_equal_bytes_of_two_modalities_are_two_things():
    documents = [Item.text("x"), Item(Modality.AUDIO, b"x", 1)]
    assert len(Retrieval(texts("a"), documents, [[1]]).distinct().problem.documents) == 2


@pytest.mark.parametrize(
    ("relevant", "message"),
    [
        ([[0], []], "query 1, 'a question', has no relevant document: leave it out, or add a document"),
        ([[0], [1, 1]], r"query 1, 'a question', has the relevant documents \[1, 1\], expected each once"),
        (
            [[2], [0]],
            r"query 0, item 0x.* \(image, 1 bytes\), has the relevant documents \[2\], expected numbers fr",
        ),
    ],
)
def test_a_query_of_a_problem_is_refused_by_its_text(relevant, message):
    queries = [Item(Modality.IMAGE, b"x", 1), Item.text("a question")]
    with pytest.raises(ValueError, match=message):
        Retrieval(queries, [Item.text("a"), Item.text("b")], relevant)
