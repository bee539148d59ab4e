"""The exact step: microbatches change nothing but rounding."""

import math
from dataclasses import replace

import pytest
import torch

from xpmir_uform import Bag, Batch, ByteHead, ContrastiveLoss, Item, Negatives, PooledHead, RankedForm, UFormEncoder
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.losses.base import AdditiveLoss, Answers, Encoded, LossValue
from xpmir_uform.model.packing import pack
from xpmir_uform.trainer.loader import LoadedStep, sizes
from xpmir_uform.trainer.step.collectives import Ranks
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step, gather

WORDS = ["ant", "bee", "a much longer text than the others", "cat", "dog", "", "elk", "fox"]


@pytest.fixture(scope="module")
def model():
    torch.set_default_dtype(torch.float64)
    made = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=12)).instance()
    made.initialize()
    yield made.double()
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def loaded():
    bags = [Bag.alike([Item.text(word), Item.text(word[::-1] + "!"), Item.text(word * 2 + "?")]) for word in WORDS[:7]]
    batch = Batch.of(bags)
    segments = [decode(item, {}) for bag in bags for item in bag.items]
    return LoadedStep(0, batch, [range(len(batch))], sizes(bags, segments, 0), segments)


def microbatches(step, parts):
    numbers = [[number for bag in bags for number in bag.items] for bags in parts]
    return [Microbatch(pack(step.collect(part)), torch.tensor(part), step.questions(part)) for part in numbers]


def run(model, step, parts, losses):
    model.zero_grad()

    def forward(microbatch):
        return Answers(*model(microbatch.packed)[1:])

    share = Share(step.batch, step.shares, microbatches(step, parts))
    values = exact_step(Engine(forward, torch.Tensor.backward), share, losses)
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return values, gradient


def direct(model, step, losses):
    """The plain way: one forward pass, one backward pass through the whole objective."""
    model.zero_grad()
    outputs = model(pack(step.segments))
    encoded = Encoded(outputs.embeddings, outputs.inverse_temperature, outputs.bias)
    rows = range(len(step.batch))
    parts = [
        loss.weight * loss.compute(encoded, step.batch, rows, loss.counts(step.batch, rows)).value for loss in losses
    ]
    sum(parts).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def cuts(bags, size):
    return [bags[start : start + size] for start in range(0, len(bags), size)]


@pytest.mark.parametrize("form", ["sigmoid", "ranked"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_microbatches_give_the_gradient_of_the_whole_batch(model, loaded, size, form):
    loss = ContrastiveLoss.C(weight=0.7, **({"form": RankedForm.C()} if form == "ranked" else {})).instance()
    expected = direct(model, loaded, [loss])
    _, found = run(model, loaded, cuts(loaded.bags, size), [loss])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_bags_in_another_order_give_the_same_gradient(model, loaded):
    loss = ContrastiveLoss.C().instance()
    expected = direct(model, loaded, [loss])
    bags = loaded.bags
    _, found = run(model, loaded, [[bags[6], bags[0]], [bags[3]], [bags[5], bags[1], bags[4], bags[2]]], [loss])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)


def test_temperature_and_bias_are_counted_once(model, loaded):
    loss = ContrastiveLoss.C().instance()
    bags = loaded.bags
    _, whole = run(model, loaded, [bags], [loss])
    _, parts = run(model, loaded, cuts(bags, 1), [loss])
    for name in ("pooling.log_inverse_temperature", "pooling.bias"):
        assert whole[name].abs().item() > 1e-3
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=0)


def test_one_microbatch_runs_the_model_once_and_k_run_it_2k_minus_1_times(model, loaded):
    loss = ContrastiveLoss.C().instance()
    bags = loaded.bags
    calls = []
    handle = model.encoder.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run(model, loaded, [bags], [loss])
    assert calls == [True]
    calls.clear()
    run(model, loaded, cuts(bags, 2), [loss])
    assert calls == [False, False, False, True, True, True, True]
    handle.remove()


def test_embeddings_are_joined_in_the_order_of_the_batch():
    share = Share(None, [range(3)], [Microbatch(None, torch.tensor([2, 0])), Microbatch(None, torch.tensor([1]))])
    one = torch.ones(1)
    outputs = [Answers(torch.tensor([[2.0], [0.0]]), one, one), Answers(torch.tensor([[1.0]]), one, one)]
    assert gather(Engine(None, None, Ranks()), share, outputs).embeddings.tolist() == [[0.0], [1.0], [2.0]]


def test_a_two_pass_step_by_hand():
    """Two embeddings on the unit circle, at the angles a and 3 a; one attract edge each way, no negatives.

    Their cosine is cos 2a, s = t cos 2a + b, and the loss of both anchors, halved, is softplus(-s). By hand: the
    gradient of the bias is -sigmoid(-s), that of a is 2 t sin(2a) sigmoid(-s), to which both microbatches add.
    """
    angle = torch.tensor(0.4, requires_grad=True, dtype=torch.float64)
    bias = torch.tensor([0.5], requires_grad=True, dtype=torch.float64)
    temperature = torch.tensor([10.0], dtype=torch.float64)
    factors = torch.tensor([1.0, 3.0], dtype=torch.float64)
    batch = Batch.of([Bag.alike([Item.text("a"), Item.text("b")])])

    def forward(microbatch):
        angles = angle * factors[microbatch.numbers]
        return Answers(torch.stack([angles.cos(), angles.sin()], dim=1), temperature, bias)

    parts = [Microbatch(None, torch.tensor([i])) for i in range(2)]
    loss = ContrastiveLoss.C(negatives=Negatives.NAMED).instance()
    values = exact_step(Engine(forward, torch.Tensor.backward), Share(batch, [range(2)], parts), [loss])
    s = 10 * math.cos(0.8) + 0.5
    sigmoid = 1 / (1 + math.exp(s))
    assert values["contrastive"].value.item() == pytest.approx(math.log1p(math.exp(-s)), rel=1e-9)
    assert bias.grad.item() == pytest.approx(-sigmoid, rel=1e-9)
    assert angle.grad.item() == pytest.approx(2 * 10 * math.sin(0.8) * sigmoid, rel=1e-9)


class Told(AdditiveLoss):
    """The mean squared first logit of the answer slots, and how many there are."""

    __xpmid__ = "test.told"
    NAME = "told"
    STATS = ("slots",)
    HEADS = ("bytes",)

    def counts(self, questions):
        return torch.tensor([len(questions.choice_offsets) - 1], dtype=torch.float64)

    def compute(self, answers, questions, counts):
        chosen = answers.choices[:, 0]
        return LossValue(chosen.square().sum() / counts[0].clamp(min=1), {"slots": float(len(chosen))})


@pytest.fixture(scope="module")
def answering(loaded):
    segments = [replace(s, answers=n % 4 == 0) for n, s in enumerate(loaded.segments)]
    items = [replace(item, choices=b"ab", targets=(0.5, 0.5)) for item in map(loaded.batch.item, range(21))]
    bags = [Bag.alike(items[start : start + 3]) for start in range(0, 21, 3)]
    return LoadedStep(0, Batch.of(bags), loaded.shares, sizes(bags, segments, 0), segments)


@pytest.fixture(scope="module")
def answerer(model):
    made = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=12), bytes=ByteHead.C()).instance()
    made.initialize()
    return made.double()


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_additive_losses_join_the_second_pass(answerer, answering, size, joint):
    told = Told.C(weight=0.3).instance()
    losses = [ContrastiveLoss.C().instance(), told] if joint else [told]
    answerer.zero_grad()
    outputs = answerer(pack(answering.segments))
    mean = outputs.choices[:, 0].square().mean()
    objective = 0.3 * mean + 0 * sum(tensor.sum() for tensor in Answers(*outputs[1:]).tensors())
    if joint:
        encoded = Encoded(outputs.embeddings, outputs.inverse_temperature, outputs.bias)
        rows = range(len(answering.batch))
        counts = losses[0].counts(answering.batch, rows)
        objective = objective + losses[0].compute(encoded, answering.batch, rows, counts).value
    objective.backward()
    expected = {name: parameter.grad.clone() for name, parameter in answerer.named_parameters()}
    values, found = run(answerer, answering, cuts(answering.bags, size), losses)
    assert values["told"].value.item() == pytest.approx(mean.item(), rel=1e-9)
    assert values["told"].stats == {"slots": 6.0}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_without_a_joint_loss_each_microbatch_runs_once(answerer, answering):
    calls = []
    handle = answerer.encoder.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run(answerer, answering, cuts(answering.bags, 3), [Told.C().instance()])
    handle.remove()
    assert calls == [True, True, True]
