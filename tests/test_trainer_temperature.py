"""Temperatures: clamped after the step, never inside the forward pass; never decayed."""

import math
from types import SimpleNamespace

import pytest
import torch
from uform_kernels import Edges, pair_loss
from xpm_torch.optim import ScheduledOptimizer

from xpmir_uform import CosineSchedule, ImageShape, PooledHead, UFormEncoder, adamw
from xpmir_uform.trainer.hooks import TemperatureClamp


@pytest.fixture
def model():
    made = UFormEncoder.C(
        depth=1, hidden=128, pooled=PooledHead.C(width=8, bias=0.0), image=ImageShape.C(patch_side=8, max_side=8)
    ).instance()
    made.initialize()
    return made


def clamp(model):
    TemperatureClamp.C().instance().after(SimpleNamespace(trainer=SimpleNamespace(model=model)))


def test_an_excessive_temperature_comes_back(model):
    """Two pairs that the model has exactly wrong: the loss falls with the temperature, from the cap of 100 on.

    Each of the four anchors has one negative at cosine 1 and its positive at cosine 0: d loss / d log t = t = 100, and
    one step of SGD with rate 1e-4 leads to 100 e^-0.01.
    """
    with torch.no_grad():
        model.pooling.log_inverse_temperature.fill_(5.0)
    clamp(model)
    assert model.pooling.inverse_temperature().item() == pytest.approx(100.0, rel=1e-6)

    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    loss = pair_loss(
        embeddings,
        attract=Edges.from_lists([[2], [3], [0], [1]]),
        form="sigmoid",
        negatives="across",
        families=torch.tensor([0, 0, 1, 1]),
        inverse_temperature=model.pooling.inverse_temperature(),
        bias=model.pooling.bias,
    ).loss
    loss.backward()
    assert model.pooling.log_inverse_temperature.grad.item() == pytest.approx(100.0, rel=1e-6)
    torch.optim.SGD([model.pooling.log_inverse_temperature], lr=1e-4).step()
    clamp(model)
    assert model.pooling.inverse_temperature().item() == pytest.approx(100 * math.exp(-0.01), rel=1e-6)


def test_a_temperature_below_the_cap_is_left_alone(model):
    with torch.no_grad():
        model.pooling.log_inverse_temperature.fill_(3.0)
    clamp(model)
    assert model.pooling.log_inverse_temperature.item() == 3.0


def test_matrices_decay_and_norms_temperatures_and_biases_do_not(model):
    optimizer = ScheduledOptimizer()
    optimizer.initialize(
        [o.instance() for o in adamw(CosineSchedule.C(learning_rate=1e-3), weight_decay=0.3)], 10, model, False
    )
    decay = {
        id(parameter): group["weight_decay"]
        for each in optimizer.optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }
    by_name = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    spared = {name for name, value in by_name.items() if value == 0.0}
    assert {"pooling.log_inverse_temperature", "pooling.bias", "encoder.norm.weight"} <= spared
    assert spared == {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    assert by_name["encoder.bytes.weight"] == by_name["encoder.patches.image.weight"] == 0.3
