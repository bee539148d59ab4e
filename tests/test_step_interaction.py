"""Late interaction in the exact step: equal, with all gradients, to a padded einsum through one graph."""

import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from uform_kernels import Normalizers
from uform_kernels.ops.pair_loss.reference import form_loss

from xpmir_uform import (
    Bag,
    BalancedForm,
    Batch,
    ByteHead,
    ContrastiveLoss,
    Item,
    LateInteractionLoss,
    MaskedLoss,
    Negatives,
    PooledHead,
    RankedForm,
    Side,
    SigmoidForm,
    TokenHead,
    UFormEncoder,
)
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.targets import Questions
from xpmir_uform.losses.base import Answers, Encoded
from xpmir_uform.model.packing import pack
from xpmir_uform.trainer.loader import LoadedStep, sizes
from xpmir_uform.trainer.step.collectives import Ranks
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step
from xpmir_uform.trainer.step.token_exchange import Interaction

SPAN = 5
FORMS = {"ranked": RankedForm, "sigmoid": SigmoidForm, "balanced": BalancedForm}
VARIANTS = list(itertools.product(FORMS, [Negatives.NAMED, Negatives.AMBIENT], [True, False]))


def query(text):
    return Item.text(text, side=Side.QUERY)


def document(text):
    return Item.text(text, side=Side.DOCUMENT)


def both(text):
    return Item.text(text, side=Side.QUERY_AND_DOCUMENT)


BAGS = [
    Bag(
        (query("a query that is longer than its span"), document("a document"), document("another")),
        attract=((0, 1, 2.0), (1, 0)),
        repel=((0, 2, 0.5),),
    ),
    Bag((query("q"), document("d"), document("of several tokens")), attract=((0, 1),), repel=((0, 2),)),
    Bag((query("one"), document("named by two queries"), query("two"), document("no")), ((0, 1), (2, 1)), ((2, 3),)),
    Bag((query("without documents"),)),
    Bag((both("either"), both("other"), query("and")), attract=((0, 1), (1, 0), (2, 1)), repel=((2, 0),)),
    Bag((query("twice"), document("a document"), document("")), attract=((0, 1),), repel=((0, 2),)),
    Bag((document("alone " * 20),)),
]


def encoder(**heads):
    made = UFormEncoder.C(depth=1, hidden=128, tokens=TokenHead.C(width=8), **heads).instance()
    made.initialize()
    return made.double()


@pytest.fixture(scope="module", autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def model():
    return encoder()


@pytest.fixture(scope="module")
def joint_model():
    return encoder(pooled=PooledHead.C(width=12), bytes=ByteHead.C())


def made(form="ranked", negatives=Negatives.NAMED, normalize=True, **params):
    params = {"max_query_span": SPAN, "inverse_temperature": 3.0, "bias": -1.25, **params}
    return LateInteractionLoss.C(form=FORMS[form].C(), negatives=negatives, normalize=normalize, **params).instance()


def load(losses, bags=BAGS):
    batch = Batch.of(bags)
    segments = []
    for item in (item for bag in bags for item in bag.items):
        segment = decode(item, {})
        for loss in losses:
            segment = loss.ask(segment, item, 0, 0)
        segments.append(segment)
    return LoadedStep(0, batch, [range(len(batch))], sizes(bags, segments, 0, losses), segments)


def run(model, step, losses, parts=None):
    model.zero_grad()

    def forward(microbatch):
        return Answers(*model(microbatch.packed)[1:])

    numbers = [[number for bag in bags for number in bag.items] for bags in parts or [step.bags]]
    microbatches = [Microbatch(pack(step.collect(n)), torch.tensor(n), step.questions(n)) for n in numbers]
    share = Share(step.batch, step.shares, microbatches, kept=[segment.kept for segment in step.segments])
    values = exact_step(Engine(forward, torch.Tensor.backward), share, losses)
    return values, gradients_of(model)


def gradients_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def cut(step, size):
    return [step.bags[start : start + size] for start in range(0, len(step.bags), size)]


def similarities(tokens, kept, batch, normalize):
    """M as ColBERT writes it: everything padded, products of all with all. (N, N), of which some make sense."""
    lengths = torch.tensor(kept)
    ends = lengths.cumsum(0)
    longest = int(lengths.max())
    place = torch.arange(longest)
    real = place < lengths[:, None]
    padded = tokens[torch.where(real, (ends - lengths)[:, None] + place, 0)]
    asked = real[:, :SPAN]
    products = torch.einsum("qtw,dsw->qtds", padded[:, :SPAN], padded)
    best = products.masked_fill(~real, -torch.inf).max(-1).values
    sums = torch.where(asked[:, :, None], best, 0.0).sum(1)
    return sums / asked.sum(1)[:, None] if normalize else sums


def plain(loss, tokens, step):
    """The unweighted loss through one graph, from dense weights of all items with all."""
    batch = step.batch
    scores = similarities(tokens, [s.kept for s in step.segments], batch, loss.normalize)
    scores = loss.inverse_temperature * scores.nan_to_num(0.0, 0.0, 0.0) + loss.bias
    sides = [Side(side) for side in batch.sides.tolist()]
    joined = torch.tensor([[Side.QUERY in i and Side.DOCUMENT in j for j in sides] for i in sides])
    joined.fill_diagonal_(False)
    attract, repel = torch.zeros(2, *joined.shape)
    if loss.negatives == Negatives.AMBIENT:
        repel += joined
    for edges in (batch.attract, batch.repel, batch.ignore):
        repel[edges.anchors(), edges.ids] = 0.0
    attract[batch.attract.anchors(), batch.attract.ids] = batch.attract.weights_as(torch.float64)
    repel[batch.repel.anchors(), batch.repel.ids] = batch.repel.weights_as(torch.float64)
    attract, repel = attract * joined, repel * joined
    pulls, pushes = attract.sum(1), repel.sum(1)
    active = (pulls > 0) & (pushes > 0) if loss.form.NAME == "ranked" else pulls + pushes > 0
    counts = Normalizers(torch.stack([pulls.sum(), pushes.sum(), active.sum().double()]))
    return sum(form_loss(scores, attract, repel, SimpleNamespace(form=loss.form.NAME, normalizers=counts)))


def same(found, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("form", "negatives", "normalize"), VARIANTS)
def test_a_step_is_the_einsum_with_all_its_gradients(model, form, negatives, normalize):
    loss = made(form, negatives, normalize, weight=0.7)
    step = load([loss])
    model.zero_grad()
    expected = plain(loss, model(pack(step.segments)).tokens, step)
    (0.7 * expected).backward()
    gradients = gradients_of(model)
    assert gradients["token_projection.projection.weight"].norm() > 1e-3
    for size in (1, 3, len(step.bags)):
        values, found = run(model, step, [loss], cut(step, size))
        assert values["late_interaction"].value.item() == pytest.approx(expected.item(), rel=1e-12)
        same(found, gradients)


@pytest.mark.parametrize("negatives", [Negatives.NAMED, Negatives.AMBIENT])
def test_the_order_of_bags_and_of_microbatches_changes_nothing(model, negatives):
    loss = made(negatives=negatives)
    values, expected = run(model, load([loss]), [loss])
    step = load([loss], [BAGS[place] for place in (4, 6, 0, 5, 3, 2, 1)])
    bags = step.bags
    others, found = run(model, step, [loss], [[bags[6], bags[0]], [bags[3]], [bags[5], bags[1], bags[4], bags[2]]])
    assert others["late_interaction"].value.item() == pytest.approx(values["late_interaction"].value.item(), rel=1e-12)
    same(found, expected)


@pytest.mark.parametrize("negatives", [Negatives.NAMED, Negatives.AMBIENT])
def test_a_long_neighbour_that_is_not_compared_changes_nothing(model, negatives):
    loss = made(negatives=negatives)
    _, expected = run(model, load([loss]), [loss])
    _, found = run(model, load([loss], [*BAGS, Bag((Item.text("neighbour " * 30),))]), [loss])
    same(found, expected)


@pytest.mark.parametrize("negatives", [Negatives.NAMED, Negatives.AMBIENT])
@pytest.mark.parametrize("size", [2, len(BAGS)])
def test_contrast_late_interaction_and_masks_in_one_pass(joint_model, negatives, size):
    late = made("sigmoid", negatives, weight=0.4)
    losses = [ContrastiveLoss.C(weight=0.8).instance(), late, MaskedLoss.C(weight=0.3).instance()]
    step = load(losses)
    joint_model.zero_grad()
    outputs = joint_model(pack(step.segments))
    rows = range(len(step.batch))
    pooled = Encoded(outputs.embeddings, outputs.inverse_temperature, outputs.bias)
    contrast = losses[0].compute(pooled, step.batch, rows, losses[0].counts(step.batch, rows)).value
    asked = Questions.of(step.segments, [])
    masked = losses[2].compute(Answers(*outputs[1:]), asked, losses[2].counts(asked)).value
    (0.8 * contrast + 0.4 * plain(late, outputs.tokens, step) + 0.3 * masked).backward()
    expected = gradients_of(joint_model)
    values, found = run(joint_model, step, losses, cut(step, size))
    assert list(values) == ["contrastive", "late_interaction", "masked"]
    assert values["masked"].value.item() == pytest.approx(masked.item(), rel=1e-10)
    same(found, expected)


def test_one_microbatch_runs_the_model_once_and_k_run_it_2k_minus_1_times(model):
    loss = made(negatives=Negatives.AMBIENT)
    step = load([loss])
    calls = []
    handle = model.encoder.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run(model, step, [loss])
    assert calls == [True]
    calls.clear()
    run(model, step, [loss], cut(step, 3))
    assert calls == [False, False, True, True, True]
    handle.remove()


def told(loss, bags, tokens):
    """The gradient of the loss with respect to the token vectors of a batch, as they are given."""
    step = load([loss], bags)
    leaf = torch.tensor(tokens).requires_grad_()
    share = Share(step.batch, step.shares, [Microbatch(None, torch.arange(len(step.batch)))], kept=kept(step))
    values = exact_step(Engine(lambda _: Answers(tokens=leaf), torch.Tensor.backward), share, [loss])
    return values["late_interaction"].value.item(), leaf.grad


def kept(step):
    return [segment.kept for segment in step.segments]


@pytest.mark.parametrize("negatives", [Negatives.NAMED, Negatives.AMBIENT])
def test_of_tokens_that_tie_the_first_takes_the_whole_gradient(negatives):
    """Scores 3 and 0 of both kinds of cell: the slope of softplus(0 - 3) is -sigmoid(-3), times the factor 3."""
    bag = Bag((query("q"), document("abc"), document("d")), attract=((0, 1),), repel=((0, 2),))
    vectors = [[1.0, 0.0], [0.6, 0.8], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    value, gradient = told(made(negatives=negatives), [bag], vectors)
    slope = 3.0 / (1.0 + torch.tensor(3.0).exp())
    assert value == pytest.approx(torch.tensor(-3.0).exp().log1p().item(), rel=1e-12)
    expected = slope * torch.tensor([[-1.0, 1.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_tokens_behind_the_span_take_no_part_in_a_query_and_all_of_them_in_a_document():
    """The second item is a query of two tokens, of which one counts, and a document of two."""
    bags = [Bag((both("ab"), both("cd"), query("e"), document("f")), attract=((0, 1), (1, 0)), repel=((0, 3), (1, 3)))]
    loss = made(max_query_span=1)
    vectors = [[1.0, 0.0], [0.0, 1.0], [0.8, -0.6], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    _, gradient = told(loss, bags, vectors)
    # Query 0 is [1, 0], for which the second token of 1 stands; query 1 is [0.8, -0.6], for which the first of 0 does.
    assert gradient[1].tolist() == [0.0, 0.0]
    assert gradient[4].tolist() == [0.0, 0.0]
    assert gradient[3].abs().sum() > 0
    assert gradient[2].abs().sum() > 0


def test_a_document_named_by_two_queries_has_the_gradients_of_both():
    items = (query("q"), query("r"), document("d"), document("e"), document("f"))
    vectors = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, -0.6], [-1.0, 0.0]]
    first = {"attract": ((0, 2),), "repel": ((0, 3),)}
    second = {"attract": ((1, 2),), "repel": ((1, 4),)}
    parts = [told(made(), [Bag(items, **edges)], vectors) for edges in (first, second)]
    edges = {half: first[half] + second[half] for half in first}
    value, gradient = told(made(), [Bag(items, **edges)], vectors)
    assert value == pytest.approx(sum(part for part, _ in parts) / 2, rel=1e-12)
    torch.testing.assert_close(gradient, sum(part for _, part in parts) / 2, rtol=1e-12, atol=1e-15)


def test_a_query_without_documents_adds_nothing():
    bag = Bag((query("q"), document("d"), document("e")), attract=((0, 1),), repel=((0, 2),))
    vectors = [[1.0, 0.0], [0.6, 0.8], [0.8, -0.6]]
    expected, of_tokens = told(made(), [bag], vectors)
    value, gradient = told(made(), [bag, Bag((query("r"),))], [*vectors, [0.0, 1.0]])
    assert value == expected
    torch.testing.assert_close(gradient[:3], of_tokens, rtol=0, atol=0)
    assert gradient[3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("negatives", [Negatives.NAMED, Negatives.AMBIENT])
def test_a_batch_without_queries_or_documents_leaves_zero_gradients(model, negatives):
    loss = made(negatives=negatives)
    for item in (query("q"), document("d"), Item.text("aside")):
        values, found = run(model, load([loss], [Bag((item,)), Bag((replace(item, content=b"x", key=5),))]), [loss])
        assert values["late_interaction"].value.item() == 0.0
        assert all(gradient.abs().max() == 0.0 for gradient in found.values())


class Told(Ranks):
    """One rank of several whose others are played: it notes what it is lent for their documents."""

    def __init__(self, rank, documents):
        super().__init__(rank, len(documents))
        self.documents = documents
        self.lent = []

    def total(self, values):
        return values

    def broadcast(self, values, owner):
        if owner == self.rank:
            return values
        self.lent.append((values.data_ptr(), len(values)))
        return values.copy_(self.documents[owner])

    def sum_at(self, values, owner):
        pass


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_documents_of_other_ranks_are_held_one_rank_at_a_time(rank):
    """Ranks of 1, 3 and 2 documents of two tokens, each with a query of one token."""
    loss = made(negatives=Negatives.AMBIENT, normalize=False)
    counts = [1, 3, 2]
    bags = [Bag((query(f"q{r}"), *(document(f"d{r}{n}") for n in range(count)))) for r, count in enumerate(counts)]
    ends = list(itertools.accumulate([0, *(len(bag.items) for bag in bags)]))
    shares = [range(*pair) for pair in itertools.pairwise(ends)]
    kept = torch.tensor([length for count in counts for length in (1, *[2] * count)])
    vectors = [torch.randn(1 + 2 * count, 4) for count in counts]
    ranks = Told(rank, [each[1:] for each in vectors])
    meeting = Interaction(loss, ranks, Batch.of(bags), shares, kept)
    scores, failure = meeting.score(vectors[rank], failed=False)
    documents = torch.cat([each[1:].view(-1, 2, 4) for each in vectors])
    assert failure is None
    torch.testing.assert_close(scores[0], (documents @ vectors[rank][0]).max(1).values)
    meeting.gradient(torch.ones_like(scores))
    others = [2 * count for r, count in enumerate(counts) if r != rank]
    assert [tokens for _, tokens in ranks.lent] == others * 2
    assert len({place for place, _ in ranks.lent}) == 1
    assert len(meeting.room.block) == max(others)


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made within it hold at once."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.live:
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.most = max(self.most, sum(self.live.values()))
        return found


def test_an_ambient_step_takes_less_than_a_fifth_of_an_einsum():
    """A quarter of the sizes of the benchmark, which measures a process; forward and backward."""
    queries, each, spans, width = 64, 4, (32, 128), 32
    bags = [
        Bag((query(f"q{n}"), *(document(f"d{n}-{k}") for k in range(each))), attract=((0, 1),)) for n in range(queries)
    ]
    batch = Batch.of(bags)
    kept = [spans[0], *[spans[1]] * each] * queries
    leaf = normalize(torch.randn(sum(kept), width), dim=1).requires_grad_()
    share = Share(batch, [range(len(batch))], [Microbatch(None, torch.arange(len(batch)))], kept=kept)
    grouped = leaf.detach().view(queries, -1, width)
    with Peak() as step:
        loss = made(negatives=Negatives.AMBIENT, max_query_span=spans[0])
        exact_step(Engine(lambda _: Answers(tokens=leaf), torch.Tensor.backward), share, [loss])
    with Peak() as einsum:
        documents = grouped[:, spans[0] :].reshape(-1, spans[1], width)
        torch.einsum("qtw,dsw->qtds", grouped[:, : spans[0]], documents)
    assert leaf.grad.abs().max() > 0
    assert einsum.most >= queries * spans[0] * queries * each * spans[1] * leaf.element_size()
    assert step.most < einsum.most / 5


class Silent(Ranks):
    """One rank of two that must not speak to the other."""

    def total(self, values):
        raise AssertionError("a sum over ranks")

    broadcast = sum_at = gather = scatter_sum = total


def test_named_documents_are_scored_without_a_word_to_other_ranks():
    bag = Bag((query("q"), document("d"), document("e")), attract=((0, 1),), repel=((0, 2),))
    batch = load([made()], [bag, replace(bag, items=(query("r"), document("f"), document("g")))]).batch
    meeting = Interaction(made(), Silent(1, 2), batch, [range(3), range(3, 6)], torch.ones(6, dtype=torch.int64))
    vectors = torch.eye(3)[[0, 0, 1]]
    scores, failure = meeting.score(vectors, failed=False)
    gradient, lost = meeting.gradient(torch.tensor([1.0, 2.0]))
    assert failure is lost is None
    assert scores.tolist() == [1.0, 0.0]
    assert gradient.tolist() == [[1.0, 2.0, 0.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]


def test_a_named_document_on_another_rank_is_refused():
    loss = made()
    batch = load([loss], [Bag((query("q"), document("d")), attract=((0, 1),))]).batch
    with pytest.raises(ValueError, match=r"item 0 .* and its item 1 .* are on two ranks: put them into one bag"):
        Interaction(loss, Ranks(0, 2), batch, [range(1), range(1, 2)], torch.ones(2, dtype=torch.int64))


def test_edges_to_the_wrong_side_stop_the_step_before_any_forward_pass(model):
    loss = made()
    step = load([loss], [Bag((query("q"), Item.text("d", key=7)), attract=((0, 1),))])
    with pytest.raises(ValueError, match=r"attract edge from item 0 .* to item 1 \(key 0x0000000000000007"):
        exact_step(Engine(None, None), Share(step.batch, step.shares, [], kept=kept(step)), [loss])
