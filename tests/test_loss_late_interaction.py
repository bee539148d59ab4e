"""Late interaction as a loss over scores: its cells, its forms, its counts, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from uform_kernels.ops.pair_loss.listed import Cells, form_loss, rank

from xpmir_uform import (
    Bag,
    BalancedForm,
    Batch,
    Item,
    LateInteractionLoss,
    Negatives,
    RankedForm,
    Side,
    SigmoidForm,
    UFormBatcher,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.batching.memory_probe import saved_bytes
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.losses.base import Encoded
from xpmir_uform.trainer.loader import sizes

FORMS = {"ranked": RankedForm, "sigmoid": SigmoidForm, "balanced": BalancedForm}
VARIANTS = list(itertools.product(FORMS, [Negatives.NAMED, Negatives.AMBIENT]))


def query(text, **others):
    return Item.text(text, side=Side.QUERY, **others)


def document(text, **others):
    return Item.text(text, side=Side.DOCUMENT, **others)


def both(text):
    return Item.text(text, side=Side.QUERY_AND_DOCUMENT)


def made(form="ranked", negatives=Negatives.NAMED, **params):
    return LateInteractionLoss.C(form=FORMS[form].C(), negatives=negatives, **params).instance()


@pytest.fixture(scope="module")
def batch():
    """Weights, hard negatives, ignored documents, symmetric edges, a query without documents, items of both sides."""
    return Batch.of(
        [
            Bag(
                (query("a"), document("A"), document("B"), document("C")),
                attract=((0, 1, 2.0), (1, 0, 1.0), (0, 3, 0.5)),
                repel=((0, 2, 1.5),),
            ),
            Bag((query("b"), document("D"), document("E")), attract=((0, 1), (1, 0)), ignore=((0, 2),)),
            Bag((query("alone"),)),
            Bag((both("c"), both("d"), query("e")), attract=((0, 1), (1, 0), (2, 1)), repel=((2, 0, 0.0), (0, 2))),
            Bag((Item.text("aside"),)),
        ],
        deduplicate=False,
    )


def cells_by_definition(batch, negatives):
    """Of each query the documents with their weights: {query: ([(document, w)], [(document, w)])}."""

    def run(edges, i):
        place = slice(int(edges.offsets[i]), int(edges.offsets[i + 1]))
        return dict(zip(edges.ids[place].tolist(), edges.weights_as(torch.float64)[place].tolist(), strict=True))

    found = {}
    sides = [Side(side) for side in batch.sides.tolist()]
    for i in range(len(batch)):
        if Side.QUERY not in sides[i]:
            continue
        attract, repel, ignore = (run(edges, i) for edges in (batch.attract, batch.repel, batch.ignore))
        documents = [j for j in range(len(batch)) if Side.DOCUMENT in sides[j] and j != i]
        pull = [(j, attract[j]) for j in documents if j in attract]
        push = [(j, repel[j]) for j in documents if j in repel]
        if negatives == Negatives.AMBIENT:
            push += [(j, 1.0) for j in documents if j not in attract and j not in repel and j not in ignore]
        found[i] = pull, push
    return found


def loss_by_definition(form, cells, score):
    """The formulas as they stand, cell by cell, with ``score(i, j)``."""

    def softplus(x):
        return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)

    zero = torch.zeros((), dtype=torch.float64)
    pulls = [w * softplus(-score(i, j)) for i, (pull, _) in cells.items() for j, w in pull]
    pushes = [w * softplus(score(i, j)) for i, (_, push) in cells.items() for j, w in push]
    total_pull = sum(w for pull, _ in cells.values() for _, w in pull)
    total_push = sum(w for _, push in cells.values() for _, w in push)
    if form == "balanced":
        return sum(pulls, zero) / total_pull + sum(pushes, zero) / total_push
    if form == "sigmoid":
        anchors = sum(sum(w for _, w in pull + push) > 0 for pull, push in cells.values())
        return sum(pulls + pushes, zero) / anchors
    rows = []
    for i, (pull, push) in cells.items():
        weight = sum(w for _, w in pull) * sum(w for _, w in push)
        if weight:
            pairs = [(v * w, score(i, n) - score(i, p)) for p, v in pull for n, w in push]
            rows.append(sum(w * softplus(x) for w, x in pairs) / weight)
    return sum(rows, zero) / len(rows)


def scores_of(loss, batch, rows, table):
    """The scores that the loss asks for, out of a table of all items with all."""
    pairs = loss.pairs(batch, rows)
    if pairs is not None:
        return table[pairs[:, 0], pairs[:, 1]]
    queries = [i for i in rows if batch.sides[i] & Side.QUERY]
    documents = [j for j in range(len(batch)) if batch.sides[j] & Side.DOCUMENT]
    return table[queries][:, documents]


def part(loss, batch, table, rows=None, counts=None):
    rows = range(len(batch)) if rows is None else rows
    counts = loss.counts(batch, rows) if counts is None else counts
    return loss.compute(Encoded(scores=scores_of(loss, batch, rows, table)), batch, rows, counts)


@pytest.fixture
def table(batch):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(len(batch), len(batch), generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
def test_the_loss_is_what_the_formulas_say(batch, table, form, negatives):
    loss = made(form, negatives, inverse_temperature=3.0, bias=-1.25)
    cells = cells_by_definition(batch, negatives)
    expected = loss_by_definition(form, cells, lambda i, j: 3.0 * table[i, j] - 1.25)
    found = part(loss, batch, table)
    torch.testing.assert_close(found.value, expected, rtol=1e-13, atol=0)
    one, other = (torch.autograd.grad(value, table)[0] for value in (found.value, expected))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    weights = [[(i, j, w) for i, row in cells.items() for j, w in row[half]] for half in (0, 1)]
    means = [sum(w * table[i, j].item() for i, j, w in half) / sum(w for *_, w in half) for half in weights]
    assert list(found.stats.values()) == pytest.approx(means, rel=1e-12)
    assert tuple(found.stats) == loss.STATS


@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
def test_counts_are_those_of_the_listed_cells(batch, form, negatives):
    cells = cells_by_definition(batch, negatives).values()
    sums = [(sum(w for _, w in pull), sum(w for _, w in push)) for pull, push in cells]
    active = [pull > 0 and push > 0 if form == "ranked" else pull + push > 0 for pull, push in sums]
    expected = [sum(pull for pull, _ in sums), sum(push for _, push in sums), sum(active)]
    assert made(form, negatives).counts(batch, range(len(batch))).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
def test_parts_add_up_to_the_whole(batch, table, form, negatives):
    loss = made(form, negatives)
    whole = part(loss, batch, table)
    rows = [range(0, 3), range(3, 3), range(3, 9), range(9, len(batch))]
    counts = sum(loss.counts(batch, each) for each in rows)
    torch.testing.assert_close(counts, loss.counts(batch, range(len(batch))))
    parts = [part(loss, batch, table, each, counts) for each in rows]
    torch.testing.assert_close(sum(each.value for each in parts), whole.value, rtol=1e-13, atol=0)
    for name in loss.STATS:
        assert sum(each.stats[name] for each in parts) == pytest.approx(whole.stats[name], rel=1e-12)


@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
def test_gradients_are_those_of_finite_differences(batch, table, form, negatives):
    loss = made(form, negatives)
    rows = range(len(batch))
    counts = loss.counts(batch, rows)
    scores = scores_of(loss, batch, rows, table).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: loss.compute(Encoded(scores=s), batch, rows, counts).value, (scores,))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
def test_a_cell_of_weight_0_may_have_any_score(batch, table, form, negatives, value):
    """Of the table all that weighs nothing: loss, gradient and statistics are those of other scores there."""
    loss = made(form, negatives)
    spoilt = torch.full_like(table, value)
    for i, halves in cells_by_definition(batch, negatives).items():
        for j, weight in itertools.chain(*halves):
            if weight:
                spoilt[i, j] = table[i, j]
    spoilt = spoilt.detach().requires_grad_()
    assert not spoilt.isfinite().all()
    found, expected = part(loss, batch, spoilt), part(loss, batch, table)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=0)
    one, other = torch.autograd.grad(found.value, spoilt)[0], torch.autograd.grad(expected.value, table)[0]
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert found.stats == pytest.approx(expected.stats, rel=1e-12)


@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
def test_a_document_that_is_ignored_may_hold_anything(form, negatives):
    """Through the kernel: the token vectors of the others get the gradient that they get beside a finite one."""
    bag = Bag(
        (query("a"), document("A"), document("B"), document("C")), attract=((0, 1),), repel=((0, 2),), ignore=((0, 3),)
    )
    batch, loss = Batch.of([bag]), made(form, negatives)
    rows = range(len(batch))
    found = []
    for value in (math.nan, 0.0):
        tokens = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        tokens[3, 1] = value
        tokens.requires_grad_()
        offsets = torch.tensor([0, 1, 2, 3])
        scores = loss.score(tokens[:1], torch.tensor([0, 1]), tokens[1:], offsets)
        asked = scores if loss.ambient else scores[0, :2]
        part = loss.compute(Encoded(scores=asked), batch, rows, loss.counts(batch, rows))
        found.append([part.value, *torch.autograd.grad(part.value, tokens)])
    assert found[1][0] > 0
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("weight", [1e9, 1e-18])
def test_extreme_weights_rank_as_any_others(weight):
    def bags(w):
        items = (query("a"), document("A"), document("B"), document("C"), document("D"))
        return [Bag(items, attract=((0, 1, w), (0, 2, w / 4)), repel=((0, 3, w / 2), (0, 4, w)))]

    scores = torch.tensor([0.5, -0.25, 0.75, 0.1], requires_grad=True)
    weight = min(weight, 1e9) if weight > 1 else 4 * weight
    found = []
    for w in (weight, 1.0):
        batch, loss = Batch.of(bags(w)), made("ranked")
        rows = range(len(batch))
        value = loss.compute(Encoded(scores=scores), batch, rows, loss.counts(batch, rows)).value
        found.append([value, *torch.autograd.grad(value, scores)])
    assert found[1][0] > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"attract.weights.*item .*finite and at least 0 \(above 0 from 1e-18 to 1e"):
        Batch.of(bags(1e30))


@pytest.mark.parametrize(("form", "negatives"), VARIANTS)
@pytest.mark.parametrize(
    "bags",
    [
        [Bag((query("a"),)), Bag((query("b"),))],
        [Bag((document("A"),))],
        [Bag((Item.text("aside"),))],
        [Bag((query("a"), document("A")), ignore=((0, 1),))],
        [Bag((query("a"), document("A")), attract=((0, 1, 0.0),))],
    ],
    ids=["queries alone", "documents alone", "neither", "ignored", "weight zero"],
)
def test_a_batch_without_a_cell_costs_nothing(form, negatives, bags):
    batch = Batch.of(bags)
    table = torch.ones(len(batch), len(batch), dtype=torch.float64, requires_grad=True)
    value = part(made(form, negatives), batch, table).value
    assert value.item() == 0.0
    assert not torch.autograd.grad(value, table)[0].any()


@pytest.mark.parametrize("half", ["attract", "repel"])
def test_a_query_of_one_kind_of_cell_has_no_rank(half):
    """It adds 0 with gradient 0, and does not count among the anchors."""
    bags = [
        Bag((query("a"), document("A")), **{half: ((0, 1),)}),
        Bag((query("b"), document("B"), document("C")), attract=((0, 1),), repel=((0, 2),)),
    ]
    batch = Batch.of(bags)
    table = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    value = part(made(), batch, table).value
    gradient = torch.autograd.grad(value, table)[0]
    assert value.item() == pytest.approx(math.log(2), rel=1e-14)
    assert gradient[0].tolist() == [0.0] * 5
    assert gradient[2].tolist() == pytest.approx([0.0, 0.0, 0.0, -5.0, 5.0])


def test_rows_of_very_different_lengths(batch):
    """Many attract cells in one row, many repel cells in another, in a scattered order."""
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.permutation([0] * 40 + [1] * 3 + [2] * 60 + [4] * 2 + [5]))
    pulled = torch.from_numpy(draw.random(len(rows)) < 0.5)
    weights = torch.from_numpy(draw.random(len(rows)))
    cells = Cells(rows, torch.where(pulled, weights, 0.0), torch.where(pulled, 0.0, weights))
    scores = torch.from_numpy(draw.normal(size=len(rows))).requires_grad_()
    members = [(rows == i).nonzero().squeeze(1).tolist() for i in range(6)]
    named = {i: tuple([(c, float(w[c])) for c in row if w[c]] for w in cells[1:]) for i, row in enumerate(members)}
    counts = torch.tensor([1.0, 1.0, sum(bool(pull and push) for pull, push in named.values())])
    expected = loss_by_definition("ranked", named, lambda i, c: scores[c])
    found = form_loss("ranked", scores, cells, counts)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    one, other = (torch.autograd.grad(value, scores)[0] for value in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_the_ranked_form_keeps_no_pair_of_cells():
    count = 400
    rows = torch.zeros(2 * count, dtype=torch.int64)
    half = torch.cat([torch.ones(count), torch.zeros(count)])
    scores = torch.rand(2 * count, requires_grad=True)
    cells = Cells(rows, half, 1 - half)
    saved = saved_bytes(lambda: form_loss("ranked", scores, cells, torch.ones(3)))
    assert saved <= 8 * scores.nbytes
    assert saved < count * count * scores.element_size() / 20


def test_nothing_to_rank():
    none = torch.zeros(0, dtype=torch.float64)
    loss, slope = rank(none, Cells(none.long(), none, none))
    assert loss.item() == 0.0
    assert slope.shape == (0,)


def test_large_scores_do_not_overflow():
    cells = Cells(torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    scores = torch.tensor([-30000.0, 30000.0], requires_grad=True)
    for form in FORMS:
        value = form_loss(form, scores, cells, torch.ones(3))
        assert value.item() == 60000.0
        assert torch.autograd.grad(value, scores)[0].tolist() == [-1.0, 1.0]


def test_what_is_kept_of_an_item():
    loss = made(max_query_span=4)
    expected = {query("abcdefg"): 4, query("ab"): 2, document("abcdefg"): 7, both("abcdefg"): 7, Item.text("abc"): 0}
    for item, kept in expected.items():
        assert loss.ask(decode(item, {}), item, 0, 0).kept == kept
    assert loss.ask(decode(query(""), {}), query(""), 0, 0).kept == 1


def test_what_a_bag_adds_to_the_limits():
    loss = made(max_query_span=4, max_query_tokens=9, max_document_tokens=30)
    assert loss.limits() == {"query_tokens": 9, "document_tokens": 30}
    bags = [Bag((query("abcdefg"), document("xy"), both("abcde"), Item.text("aside"))), Bag((document("z"),))]
    segments = [loss.ask(decode(item, {}), item, 0, 0) for bag in bags for item in bag.items]
    one, other = sizes(bags, segments, 0, [loss])
    assert (one.query_tokens, one.documents, one.document_tokens) == (8, 2, 7)
    assert (other.query_tokens, other.documents, other.document_tokens) == (0, 1, 1)


@pytest.mark.parametrize(
    ("limits", "given"),
    [
        ({"max_query_tokens": 7}, "has 8 query tokens and a microbatch holds at most 7"),
        ({"max_documents": 1}, "has 2 documents and a microbatch holds at most 1"),
        ({"max_document_tokens": 6}, "has 7 document tokens and a microbatch holds at most 6"),
    ],
)
def test_limits_are_held_by_packing_and_a_bag_above_one_is_refused_by_key(limits, given):
    loss = made(max_query_span=4, **limits)
    small = [Bag((query(f"ab{n}"), document("xy"))) for n in range(9)]
    large = Bag((query("abcdefg", key=77), document("xy"), both("abcde")))
    worker = UFormBatcher.C().instance().initialize(10)
    worker.limits = loss.limits()

    def plan(bags):
        segments = [loss.ask(decode(item, {}), item, 0, 0) for bag in bags for item in bag.items]
        return worker.plan(sizes(bags, segments, 0, [loss]))

    parts = plan(small)
    assert sorted(bag.key for bags in parts for bag in bags) == sorted(bag.items[0].key for bag in small)
    for name, limit in loss.limits().items():
        assert max(sum(getattr(bag, name) for bag in bags) for bags in parts) <= limit
    assert len(parts) > 1
    with pytest.raises(ValueError, match=f"bag {77:#018x} {given}"):
        plan([*small, large])


@pytest.mark.parametrize(
    ("items", "edges", "who"),
    [
        ((query("a", key=1), query("b", key=2)), ((0, 1),), "item 0 .*001.* side QUERY to item 1 .*002.* side QUERY"),
        ((query("a"), Item.text("b", key=2)), ((0, 1),), "side QUERY to item 1 .*002.* side NONE"),
        ((Item.text("a", key=1), document("b")), ((0, 1),), "item 0 .*001.* side NONE to item 1 .* side DOCUMENT"),
        ((Item.text("a", key=1), Item.text("b")), ((0, 1), (1, 0)), "item 0 .*001.* side NONE to item 1 .* side NONE"),
        ((document("a", key=1), query("b")), ((0, 1),), "item 0 .*001.* side DOCUMENT to item 1 .* side QUERY"),
    ],
    ids=["no document", "no side", "no query", "sides forgotten", "the wrong way round"],
)
@pytest.mark.parametrize("half", ["attract", "repel"])
def test_edges_that_join_no_query_with_a_document_are_refused_by_key(items, edges, who, half):
    batch = Batch.of([Bag((query("fine"),)), Bag(items, **{half: edges})])
    who = who.replace("item 1", "item 2").replace("item 0", "item 1")
    with pytest.raises(ValueError, match=f"the {half} edge from .*{who}"):
        made().counts(batch, range(len(batch)))


def test_edges_of_documents_are_left_to_other_losses():
    items = (query("a"), document("A"), document("B"))
    batch = Batch.of([Bag.alike(items), Bag((both("c"), query("d")), attract=((0, 1), (1, 0)))])
    assert made().pairs(batch, range(len(batch))).tolist() == [[0, 1], [0, 2], [4, 3]]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"backend": "cuda"}, "backend is 'cuda', expected one of auto"),
        ({"negatives": Negatives.ACROSS}, "negatives is across, expected named or ambient"),
        ({"max_query_span": 0}, "max_query_span is 0, expected at least 1"),
        ({"inverse_temperature": 0.0}, "inverse_temperature is 0.0"),
        ({"bias": float("nan")}, "bias nan, expected finite"),
        ({"max_documents": -1}, "'max_documents': -1.*expected none below 0"),
    ],
)
def test_impossible_settings_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        validate(LateInteractionLoss.C(**params))
