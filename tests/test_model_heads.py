"""Pooling, and the learned temperature and bias."""

from math import exp, log

import pytest
import torch

from xpmir_uform.model import PooledHead, Pooling
from xpmir_uform.model.head_modules import mean_of_items


def test_means_are_of_each_item():
    states = torch.arange(12, dtype=torch.float64).view(6, 2)
    got = mean_of_items(states, torch.tensor([1, 3, 2]))
    assert got.tolist() == [[0, 1], [4, 5], [9, 10]]


def test_means_have_the_right_gradient():
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(7, 3, dtype=torch.float64, generator=draw, requires_grad=True)
    lengths = torch.tensor([4, 1, 2])
    assert torch.autograd.gradcheck(lambda x: mean_of_items(x, lengths), states)
    strided = torch.randn(3, 7, dtype=torch.float64, generator=draw).T
    torch.testing.assert_close(mean_of_items(strided, lengths)[0], strided[:4].mean(dim=0))


def test_means_in_half_precision_are_formed_in_single():
    states = torch.ones(1000, 1, dtype=torch.bfloat16)
    assert mean_of_items(states, torch.tensor([1000])).item() == 1
    large = torch.full((10, 1), 60_000.0, dtype=torch.float16)
    assert mean_of_items(large, torch.tensor([10])).isfinite().all()


@pytest.mark.parametrize("value", [0.1, -3.3])
def test_the_mean_of_many_equal_states_is_that_state(value):
    states = torch.full((30_000, 1), value)
    assert mean_of_items(states, torch.tensor([29_999, 1])).tolist() == states[:2].tolist()


def test_embeddings_are_projected_means():
    pooling = Pooling(128, width=24, groups=3).double()
    states = torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = pooling(states, torch.tensor([2, 3]))
    expected = torch.stack((states[:2].mean(0), states[2:].mean(0))) @ pooling.projection.weight.T
    torch.testing.assert_close(got, expected)
    assert pooling.projection.bias is None


def test_initial_values_in_each_group():
    pooling = Pooling(128, groups=3, inverse_temperature=20.0, bias=-5.0)
    torch.testing.assert_close(pooling.inverse_temperature(), torch.full((3,), 20.0))
    assert pooling.bias.tolist() == [-5.0] * 3


def test_the_scale_is_formed_in_single_precision_and_capped_by_the_clamp():
    pooling = Pooling(128).half()
    with torch.no_grad():
        pooling.log_inverse_temperature.fill_(12.0)
    scale = pooling.inverse_temperature()
    assert scale.dtype == torch.float32
    assert scale.item() == pytest.approx(exp(12.0))
    pooling.clamp_temperature()
    assert pooling.inverse_temperature().item() == pytest.approx(100.0, rel=2e-3)


def test_the_clamp_does_not_cut_the_gradient():
    """At the cap, one step of a loss that wants a lower scale must lower it."""
    pooling = Pooling(128).double()
    with torch.no_grad():
        pooling.log_inverse_temperature.fill_(5.0)
    pooling.clamp_temperature()
    optimizer = torch.optim.SGD([pooling.log_inverse_temperature], lr=1e-4)
    scores = pooling.inverse_temperature() * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1]))
    loss.backward()
    assert pooling.log_inverse_temperature.grad.item() == pytest.approx(100.0)
    optimizer.step()
    pooling.clamp_temperature()
    assert pooling.inverse_temperature().item() == pytest.approx(99.00498, abs=1e-5)


def test_the_clamp_leaves_lower_scales_alone():
    pooling = Pooling(128, groups=2)
    with torch.no_grad():
        pooling.log_inverse_temperature.copy_(torch.tensor([1.0, 9.0]))
    pooling.clamp_temperature()
    torch.testing.assert_close(pooling.log_inverse_temperature.detach(), torch.tensor([1.0, log(100.0)]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"groups": 0}, "groups is 0"),
        ({"inverse_temperature": 0.0}, "inverse_temperature is 0.0"),
        ({"inverse_temperature": 200.0}, "at most max_inverse_temperature, 100.0"),
    ],
)
def test_refusals(values, message):
    with pytest.raises(ValueError, match=message):
        Pooling(128, **values)


def test_the_config_builds_what_it_says():
    head = PooledHead.C(width=8, groups=2, inverse_temperature=4.0, bias=-1.0, max_inverse_temperature=5.0).instance()
    pooling = head.build(128)
    assert pooling.projection.weight.shape == (8, 128)
    assert pooling.bias.tolist() == [-1.0, -1.0]
    assert pooling.max_inverse_temperature == 5.0
    torch.testing.assert_close(pooling.inverse_temperature(), torch.full((2,), 4.0))
