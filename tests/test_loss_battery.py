"""What every registered loss must do, and ContrastiveLoss in each of its forms."""

import inspect
import json
from pathlib import Path

import pytest
import torch

import xpmir_uform
from xpmir_uform import Bag, BalancedForm, Batch, ContrastiveLoss, Item, Modality, Negatives, RankedForm, SigmoidForm
from xpmir_uform.data.checks import validate
from xpmir_uform.losses.base import Encoded
from xpmir_uform.losses.registry import LOSSES

ROOT = Path(__file__).parents[1]
VARIANTS = {
    **{name: loss.C for name, loss in LOSSES.items()},
    "contrastive, balanced": lambda: ContrastiveLoss.C(form=BalancedForm.C()),
    "contrastive, ranked": lambda: ContrastiveLoss.C(form=RankedForm.C()),
    "contrastive, across": lambda: ContrastiveLoss.C(negatives=Negatives.ACROSS),
    "contrastive, named": lambda: ContrastiveLoss.C(form=SigmoidForm.C(), negatives=Negatives.NAMED),
    "contrastive, levels": lambda: ContrastiveLoss.C(matryoshka_dimensions=[2, 5], ambient_weight=0.5),
}


@pytest.fixture(params=VARIANTS)
def loss(request):
    return VARIANTS[request.param]().instance()


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


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_exported_documented_and_frozen(name):
    loss = LOSSES[name]
    assert getattr(xpmir_uform, loss.__name__) is loss
    assert loss.__name__ in (ROOT / "docs" / "losses.md").read_text()
    assert any(name in key or "loss" in key for key in json.loads((ROOT / "tests/assets/identifiers.json").read_text()))
    assert inspect.getdoc(loss)


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
