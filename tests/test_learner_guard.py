"""Steps that are not finite are skipped whole; gradients are clipped by one norm; who fails says what of."""

import json
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from xpm_torch.context import Context
from xpm_torch.optim import GradientClippingHook

from xpmir_uform.learner import guard
from xpmir_uform.learner.scaling import Optimizers

NAN, INF = math.nan, math.inf


# --- Optimizers alone


def fabric_of(precision=None):
    return L.Fabric(accelerator="cpu", devices=1, **({"plugins": [precision]} if precision else {}))


def made(optimizer, count=1, fabric=None, hooks=(), **attributes):
    """``count`` parameters of value 1 under an optimizer each; answers them, the optimizers and their context."""
    fabric = fabric or fabric_of()
    parameters = [torch.nn.Parameter(torch.tensor([1.0])) for _ in range(count)]
    optimizers = Optimizers()
    optimizers.context, optimizers.scaler = Context(list(hooks)), None
    wrapped = fabric.setup_optimizers(*(optimizer([parameter]) for parameter in parameters))
    optimizers.optimizers = list(wrapped) if isinstance(wrapped, (list, tuple)) else [wrapped]
    optimizers.module = torch.nn.ParameterList(parameters)
    context = SimpleNamespace(fabric=fabric, scaler=getattr(fabric.strategy.precision, "scaler", None))
    optimizers.trainer_context = context
    for name, value in attributes.items():
        setattr(optimizers, name, value)
    return parameters, optimizers, context


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def step(parameters, optimizers, context, *gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor([gradient])
    optimizers.optimizer_step(context)
    return optimizers.outcome


def state_of(optimizer, parameter):
    return {name: value.clone() for name, value in optimizer.state[parameter].items()}


def test_a_nan_poisons_adam_for_ever():
    """The fault: gradients 1, NaN, 1."""
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = adam([parameter])
    for gradient in (1.0, NAN, 1.0):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
    assert parameter.isnan().all()
    assert optimizer.state[parameter]["exp_avg"].isnan().all()


def test_a_step_with_a_nan_leaves_parameter_moments_and_step_count_bit_for_bit():
    """Gradients 1, NaN, 1 are the gradients 1, 1."""
    parameters, optimizers, context = made(adam)
    optimizer = optimizers.optimizers[0].optimizer
    step(parameters, optimizers, context, 1.0)
    before, state = parameters[0].detach().clone(), state_of(optimizer, parameters[0])
    assert step(parameters, optimizers, context, NAN).skipped
    assert torch.equal(parameters[0], before)
    assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert all(torch.equal(optimizer.state[parameters[0]][name], value) for name, value in state.items())
    assert not step(parameters, optimizers, context, 1.0).skipped

    plain = torch.nn.Parameter(torch.tensor([1.0]))
    reference = adam([plain])
    for _ in range(2):
        plain.grad = torch.tensor([1.0])
        reference.step()
    assert torch.equal(parameters[0], plain)
    assert optimizer.state[parameters[0]]["step"].item() == 2


@pytest.mark.parametrize(("value", "nan", "inf"), [(NAN, True, False), (INF, False, True), (-INF, False, True)])
def test_what_was_wrong_is_told(value, nan, inf):
    parameters, optimizers, context = made(sgd, 2)
    outcome = step(parameters, optimizers, context, 1.0, value)
    assert (outcome.nan, outcome.inf, outcome.skipped, outcome.after) == (nan, inf, True, 0.0)
    assert [parameter.item() for parameter in parameters] == [1.0, 1.0]


def test_a_loss_that_is_not_finite_skips_the_step_though_gradients_are():
    parameters, optimizers, context = made(sgd, losses={"a": 1.0, "b": NAN})
    outcome = step(parameters, optimizers, context, 1.0)
    assert (outcome.nan, outcome.skipped, outcome.before) == (True, True, 1.0)
    assert parameters[0].item() == 1.0


def test_a_gradient_whose_square_overflows_is_finite():
    parameters, optimizers, context = made(sgd, 2)
    outcome = step(parameters, optimizers, context, 3e30, 4e30)
    assert not outcome.skipped
    assert outcome.before == pytest.approx(5e30, rel=1e-6)


def test_clipping_takes_one_norm_over_all_optimizers():
    parameters, optimizers, context = made(sgd, 2, clip_norm=1.0)
    outcome = step(parameters, optimizers, context, 3.0, 4.0)
    assert (outcome.clipped, outcome.before, outcome.after) == (True, 5.0, 1.0)
    assert [1.0 - parameter.item() for parameter in parameters] == pytest.approx([0.6, 0.8], abs=1e-6)


def test_fabric_clips_each_optimizer_by_itself():
    """Why there is ``clip_norm``: the stock hook gives (3, 4) the direction (1, 1)."""
    hook = GradientClippingHook.C(max_norm=1.0).instance()
    parameters, optimizers, context = made(sgd, 2, hooks=[hook])
    outcome = step(parameters, optimizers, context, 3.0, 4.0)
    assert [1.0 - parameter.item() for parameter in parameters] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert outcome.clipped
    assert outcome.after == pytest.approx(math.sqrt(2.0), abs=1e-5)


@pytest.mark.parametrize("longest", [0.0, 5.0, 7.0])
def test_a_gradient_that_is_short_enough_keeps_its_bits(longest):
    parameters, optimizers, context = made(sgd, 2, clip_norm=longest)
    outcome = step(parameters, optimizers, context, 3.0, 4.0)
    assert (outcome.clipped, outcome.after) == (False, 5.0)
    assert [parameter.item() for parameter in parameters] == [-2.0, -3.0]


# --- With the scaler of 16-mixed


def scaled(scale=4.0, **others):
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=100)
    scaler.scale(torch.zeros(()))
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return made(sgd, 2, fabric=fabric_of(precision), **others)


def test_gradients_are_unscaled_before_they_are_measured_and_clipped():
    parameters, optimizers, context = scaled(clip_norm=1.0)
    outcome = step(parameters, optimizers, context, 12.0, 16.0)
    assert (outcome.before, outcome.after, outcome.scale) == (5.0, 1.0, 4.0)
    assert [1.0 - parameter.item() for parameter in parameters] == pytest.approx([0.6, 0.8], abs=1e-6)


def test_an_overflow_of_one_optimizer_skips_both_and_is_the_scalers_business():
    parameters, optimizers, context = scaled()
    outcome = step(parameters, optimizers, context, 4.0, INF)
    assert (outcome.skipped, outcome.excused, outcome.inf) == (True, True, False)
    assert [parameter.item() for parameter in parameters] == [1.0, 1.0]
    assert context.scaler.get_scale() == 2.0
    assert not step(parameters, optimizers, context, 2.0, 2.0).skipped
    assert [parameter.item() for parameter in parameters] == [0.0, 0.0]


def test_stock_stepping_moves_the_optimizer_that_did_not_overflow():
    """When this fails, the scaler decides for all optimizers, and unscaling by hand may go."""
    parameters, optimizers, context = scaled()
    for parameter, gradient in zip(parameters, (4.0, INF), strict=True):
        parameter.grad = torch.tensor([gradient])
    for optimizer in optimizers.optimizers:
        context.scaler.step(optimizer.optimizer)
    assert [parameter.item() for parameter in parameters] == [0.0, 1.0]


def test_without_scale_left_or_with_a_bad_loss_the_step_counts_as_bad():
    assert step(*scaled(scale=1.0), INF, 1.0).inf
    outcome = step(*scaled(losses={"a": NAN}), 1.0, 1.0)
    assert (outcome.nan, outcome.excused, outcome.skipped) == (True, False, True)


def test_the_stock_clipping_hook_works_with_a_scaler():
    parameters, optimizers, context = scaled(hooks=[GradientClippingHook.C(max_norm=1.0).instance()])
    step(parameters, optimizers, context, 12.0, 16.0)
    assert [1.0 - parameter.item() for parameter in parameters] == pytest.approx([1.0, 1.0], abs=1e-6)


# --- Counting


def test_counts():
    counts = guard.Counts()
    bad, fine = guard.Outcome(nan=True, inf=True, skipped=True), guard.Outcome(clipped=True)
    overflow = guard.Outcome(skipped=True, excused=True)
    for outcome in (bad, fine, bad, overflow, bad):
        counts.add(outcome)
    assert counts.state_dict() == {"nan": 3, "inf": 3, "skipped": 4, "clipped": 1, "row": 2}
    again = guard.Counts()
    again.load_state_dict(json.loads(json.dumps(counts.state_dict())))
    assert again == counts


def test_a_bad_batch_that_cannot_be_written_is_told(tmp_path, caplog):
    guard.describe_batch(tmp_path / "absent", 3, [42], {"a": NAN}, guard.Counts(row=3))
    assert "0x000000000000002a" in caplog.text
