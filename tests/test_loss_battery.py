"""What every registered loss must do: joint losses first, then additive ones."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import xpmir_uform
from xpmir_uform import (
    Bag,
    BalancedForm,
    Batch,
    ChoicesLoss,
    ContrastiveLoss,
    Item,
    Modality,
    Negatives,
    RankedForm,
    SigmoidForm,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.targets import Questions
from xpmir_uform.losses.base import AdditiveLoss, Answers, Encoded, JointLoss
from xpmir_uform.losses.registry import LOSSES

ROOT = Path(__file__).parents[1]

# The joint losses over embeddings; that over scores is walked alike in test_loss_late_interaction.py.
JOINT = {
    **{name: loss.C for name, loss in LOSSES.items() if issubclass(loss, JointLoss) and "pooled" in loss.HEADS},
    "contrastive, balanced": lambda: ContrastiveLoss.C(form=BalancedForm.C()),
    "contrastive, ranked": lambda: ContrastiveLoss.C(form=RankedForm.C()),
    "contrastive, across": lambda: ContrastiveLoss.C(negatives=Negatives.ACROSS),
    "contrastive, named": lambda: ContrastiveLoss.C(form=SigmoidForm.C(), negatives=Negatives.NAMED),
    "contrastive, levels": lambda: ContrastiveLoss.C(matryoshka_dimensions=[2, 5], ambient_weight=0.5),
}
ADDITIVE = {
    **{name: loss.C for name, loss in LOSSES.items() if issubclass(loss, AdditiveLoss)},
    "choices, reference": lambda: ChoicesLoss.C(backend="reference"),
}


@pytest.fixture(params=JOINT)
def loss(request):
    return JOINT[request.param]().instance()


@pytest.fixture(params=ADDITIVE)
def added(request):
    return ADDITIVE[request.param]().instance()


@pytest.fixture(scope="module")
def batch():
    def item(number, bag):
        modality = Modality.IMAGE if number == 1 else Modality.TEXT
        return Item(modality, f"{bag}-{number}".encode(), 10 * bag + number)

    bags = [Bag.alike(item(number, bag) for number in range(3)) for bag in range(4)]
    one, two, three = (item(number, 9) for number in range(3))
    bags.append(Bag((one, two, three), attract=((0, 1, 2.0), (1, 0)), repel=((0, 2, 0.5),), ignore=((2, 0),)))
    return Batch.of(bags)


@pytest.fixture
def encoded(batch):
    generator = torch.Generator().manual_seed(0)
    leaves = (
        torch.randn(len(batch), 5, generator=generator, dtype=torch.float64),
        torch.tensor([3.0], dtype=torch.float64),
        torch.tensor([-1.0], dtype=torch.float64),
    )
    return Encoded(*(leaf.requires_grad_() for leaf in leaves))


def leaves_of(encoded):
    return encoded.embeddings, encoded.inverse_temperature, encoded.bias


def whole(loss, encoded, batch):
    rows = range(len(batch))
    return loss.compute(encoded, batch, rows, loss.counts(batch, rows))


def gradients(value, encoded):
    found = torch.autograd.grad(value, leaves_of(encoded), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves_of(encoded), found, strict=True)]


def test_parts_add_up_to_the_whole(loss, encoded, batch):
    expected = whole(loss, encoded, batch)
    parts = [range(0, 4), range(4, 4), range(4, 11), range(11, len(batch))]
    counts = sum(loss.counts(batch, rows) for rows in parts)
    torch.testing.assert_close(counts, loss.counts(batch, range(len(batch))))
    found = [loss.compute(encoded, batch, rows, counts) for rows in parts]
    torch.testing.assert_close(sum(part.value for part in found), expected.value, rtol=1e-12, atol=1e-14)
    for name in loss.STATS:
        assert sum(part.stats[name] for part in found) == pytest.approx(expected.stats[name], rel=1e-9, abs=1e-12)
    summed = [sum(g) for g in zip(*(gradients(part.value, encoded) for part in found), strict=True)]
    for one, other in zip(summed, gradients(expected.value, encoded), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


def test_gradients_are_those_of_finite_differences(loss, encoded, batch):
    assert torch.autograd.gradcheck(lambda *leaves: whole(loss, Encoded(*leaves), batch).value, leaves_of(encoded))


def test_statistics_are_those_that_are_declared(loss, encoded, batch):
    assert tuple(whole(loss, encoded, batch).stats) == loss.STATS


def test_a_batch_without_a_cell_costs_nothing(loss):
    alone = Batch.of([Bag((Item.text("alone"),))])
    leaves = torch.ones(1, 5), torch.tensor([3.0]), torch.tensor([0.0])
    encoded = Encoded(*(leaf.requires_grad_() for leaf in leaves))
    value = whole(loss, encoded, alone).value
    assert value.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(value, encoded))


def sized(modality, tokens, values, draw):
    """A segment of some tokens, each of some values."""
    if modality == Modality.TEXT:
        return Segment(modality, draw.integers(0, 256, tokens).astype(np.int16), (1, 1, tokens))
    return Segment(modality, draw.normal(size=(tokens, values)).astype(np.float32), (1, tokens // 3, 3))


@pytest.fixture(scope="module")
def things():
    """Items and segments: of every modality, long and short, with and without choices."""
    draw = np.random.default_rng(3)
    sizes = [*[(Modality.TEXT, n, 0) for n in (70, 1, 40, 3, 90)], (Modality.IMAGE, 12, 6), (Modality.AUDIO, 9, 4)]
    segments = [sized(*size, draw) for size in [*sizes, (Modality.VIDEO, 15, 8)]]
    offered = {0: (b"yn", (0.25, 0.75)), 3: (b"a", (1.0,)), 4: (bytes(range(97, 107)), (0.1,) * 10), 5: (b"yn", (1, 0))}
    items = [
        Item(s.modality, b"%d" % n, n, choices=offered.get(n, (b"", ()))[0], targets=offered.get(n, (b"", ()))[1])
        for n, s in enumerate(segments)
    ]
    return items, segments


class Asked:
    """Some items as a loss asks about them, and answers drawn for each item by itself."""

    def __init__(self, loss, things, numbers):
        items, plain = things
        segments = [loss.ask(plain[number], items[number], 7, 2) for number in numbers]
        rows = {"bytes": [], "choices": [], **{modality: [] for modality in list(Modality)[1:]}}
        for number, segment in zip(numbers, segments, strict=True):
            masked = 0 if segment.masked is None else len(segment.masked)
            kind = "bytes" if segment.modality == Modality.TEXT else segment.modality
            width = 256 if kind == "bytes" else segment.values.shape[1]
            draw = torch.Generator().manual_seed(number)
            rows[kind].append(torch.randn(masked, width, generator=draw, dtype=torch.float64))
            rows["choices"].append(torch.randn(int(segment.answers), 256, generator=draw, dtype=torch.float64))
        answering = [items[number] for number, segment in zip(numbers, segments, strict=True) if segment.answers]
        none = torch.zeros(0, 256, dtype=torch.float64)
        self.leaves = {k: torch.cat(parts or [none]).requires_grad_() for k, parts in rows.items()}
        self.questions = Questions.of(segments, answering)
        self.segments = segments

    def compute(self, loss, counts, leaves=None):
        found = dict(zip(self.leaves, leaves or self.leaves.values(), strict=True))
        answers = Answers(bytes=found.pop("bytes"), choices=found.pop("choices"), patches=found)
        return loss.compute(answers, self.questions, counts)

    def gradients(self, value):
        found = torch.autograd.grad(value, list(self.leaves.values()), allow_unused=True)
        pairs = zip(self.leaves.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in pairs}


def test_parts_of_questions_add_up_to_the_whole(added, things):
    whole = Asked(added, things, range(8))
    parts = [Asked(added, things, part) for part in ([0, 1, 2], [], [3], [4, 5, 6, 7])]
    counts = sum(added.counts(part.questions) for part in parts)
    torch.testing.assert_close(counts, added.counts(whole.questions))
    assert counts.dtype == torch.float64
    expected = whole.compute(added, counts)
    found = [part.compute(added, counts) for part in parts]
    torch.testing.assert_close(sum(part.value for part in found), expected.value, rtol=1e-12, atol=1e-14)
    assert expected.value > 0
    assert all(tuple(part.stats) == added.STATS for part in found)
    for name in added.STATS:
        assert sum(part.stats[name] for part in found) == pytest.approx(expected.stats[name], rel=1e-9, abs=1e-12)
    gradients = [part.gradients(value.value) for part, value in zip(parts, found, strict=True)]
    for name, gradient in whole.gradients(expected.value).items():
        one = torch.cat([part[name] for part in gradients if part[name].numel()] or [gradient])
        torch.testing.assert_close(one, gradient, rtol=1e-11, atol=1e-14)


def test_the_order_of_questions_changes_nothing(added, things):
    whole, other = Asked(added, things, range(8)), Asked(added, things, [5, 0, 7, 3, 6, 1, 4, 2])
    counts = added.counts(whole.questions)
    found, expected = other.compute(added, counts), whole.compute(added, counts)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-14)
    assert found.stats == pytest.approx(expected.stats, rel=1e-9, abs=1e-12)


def test_gradients_of_questions_are_those_of_finite_differences(added, things):
    asked = Asked(added, things, range(8))
    counts = added.counts(asked.questions)
    leaves = tuple(asked.leaves.values())
    assert torch.autograd.gradcheck(lambda *given: asked.compute(added, counts, given).value, leaves, fast_mode=True)


def test_nothing_asked_costs_nothing(added, things):
    nobody = Asked(added, things, [])
    value = nobody.compute(added, added.counts(nobody.questions)).value
    assert value.item() == 0.0
    assert value.requires_grad
    plain = [things[1][number] for number in range(8)]
    silent = Questions.of(plain, [])
    logits = torch.zeros(0, 256, requires_grad=True)
    patches = {modality: torch.zeros(0, 4, requires_grad=True) for modality in list(Modality)[1:]}
    value = added.compute(Answers(bytes=logits, choices=logits, patches=patches), silent, added.counts(silent)).value
    assert value.item() == 0.0
    value.backward()


def test_what_is_asked_is_keyed_and_adds_no_token(added, things):
    one, other = Asked(added, things, range(8)), Asked(added, things, [3, 0])
    for place, number in enumerate([3, 0]):
        for field in ("values", "masked", "truth", "answers"):
            np.testing.assert_array_equal(
                getattr(one.segments[number], field), getattr(other.segments[place], field), strict=True
            )
    for plain, asked in zip(things[1], one.segments, strict=True):
        assert (asked.tokens, asked.grid, asked.modality) == (plain.tokens, plain.grid, plain.modality)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_exported_documented_and_frozen(name):
    loss = LOSSES[name]
    assert getattr(xpmir_uform, loss.__name__) is loss
    assert loss.__name__ in (ROOT / "docs" / "losses.md").read_text()
    assert any(name in key or "loss" in key for key in json.loads((ROOT / "tests/assets/identifiers.json").read_text()))
    assert inspect.getdoc(loss)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_no_factor_is_refused(name, weight):
    with pytest.raises(ValueError, match=f"weight is {weight}, expected finite and at least 0"):
        validate(LOSSES[name].C(weight=weight))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"backend": "cuda"}, "backend is 'cuda', expected one of auto"),
        ({"ambient_weight": -1.0}, "ambient_weight is -1"),
        ({"matryoshka_dimensions": [9, 3]}, r"matryoshka_dimensions is \[9, 3\], expected positive and ascending"),
        ({"matryoshka_dimensions": [0, 3]}, r"matryoshka_dimensions is \[0, 3\]"),
    ],
)
def test_impossible_settings_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        validate(ContrastiveLoss.C(**params))


def test_an_unknown_back_end_of_choices_is_refused():
    with pytest.raises(ValueError, match="backend is 'cuda', expected one of auto"):
        validate(ChoicesLoss.C(backend="cuda"))


def grouped(groups):
    """Four texts, one of them of a temperature group of its own; each attracts another."""
    items = [Item.text(f"{number}", number, group=group) for number, group in enumerate(groups)]
    return Batch.of([Bag(tuple(items[:2]), attract=((0, 1), (1, 0))), Bag(tuple(items[2:]), attract=((0, 1), (1, 0)))])


@pytest.mark.parametrize("form", [BalancedForm, SigmoidForm, RankedForm])
def test_an_item_has_the_temperature_and_the_bias_of_its_group(form):
    """As anchor: two groups of the same values are one, of other values are not, and each gets its own gradient."""
    loss = ContrastiveLoss.C(form=form.C()).instance()
    vectors = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def solved(groups, temperature, bias):
        leaves = [vectors, torch.tensor(temperature).double(), torch.tensor(bias).double()]
        encoded = Encoded(*(leaf.clone().requires_grad_() for leaf in leaves))
        value = whole(loss, encoded, grouped(groups)).value
        return value, gradients(value, encoded)

    one, (_, slope, _) = solved([0, 0, 0, 0], [3.0, 9.0], [-1.0, 5.0])
    assert slope[1] == 0
    alike, _ = solved([0, 1, 0, 1], [3.0, 3.0], [-1.0, -1.0])
    torch.testing.assert_close(alike, one)
    other, (_, slope, _) = solved([0, 1, 0, 1], [3.0, 9.0], [-1.0, -1.0])
    assert abs(other - one) > 1e-3
    assert slope.all()


def test_an_error_names_the_item():
    batch = grouped([0, 0, 2, 0])
    encoded = Encoded(torch.ones(4, 3), torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"groups has 2 for item 2 \(key 0x0000000000000002, text, 1 bytes\)"):
        whole(ContrastiveLoss.C().instance(), encoded, batch)
