"""Half precision with a gradient scaler, on a CPU: one scale for all optimizers, saved with the checkpoint."""

from types import SimpleNamespace

import lightning as L
import torch
from lightning.fabric.plugins import MixedPrecision
from xpm_torch.context import Context
from xpm_torch.optim import ScheduledOptimizer

from xpmir_uform.checkpoints.compatibility import Subject
from xpmir_uform.learner.context import UFormContext
from xpmir_uform.learner.optimizers import Optimizers


def made(growth_interval=1):
    """Two parameters under one optimizer each, wrapped by a Fabric that scales gradients."""
    precision = MixedPrecision(
        "16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", 4.0, growth_interval=growth_interval)
    )
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[precision])
    parameters = [torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2)]
    optimizers = Optimizers()
    optimizers.context = Context([])
    optimizers.scaler = None
    optimizers.module = torch.nn.ParameterList(parameters)
    optimizers.optimizers = list(fabric.setup_optimizers(*(torch.optim.SGD([p], lr=0.125) for p in parameters)))
    return fabric, parameters, optimizers, SimpleNamespace(scaler=precision.scaler, steps=1)


def back(fabric, parameters):
    fabric.backward(parameters[0] * 2.0 + parameters[1] * 2.0)


def test_stock_stepping_unscales_the_second_optimizer_by_another_factor():
    """When this fails, Fabric is repaired and ``Optimizers`` may go."""
    fabric, parameters, optimizers, _ = made()
    back(fabric, parameters)
    for optimizer in optimizers.optimizers:
        optimizer.step()
    assert parameters[0].item() == 0.75
    assert parameters[1].item() != 0.75


def test_all_optimizers_are_unscaled_by_one_factor():
    fabric, parameters, optimizers, context = made()
    back(fabric, parameters)
    optimizers.optimizer_step(context)
    assert [parameter.item() for parameter in parameters] == [0.75, 0.75]
    assert context.scaler.get_scale() == 8.0


def test_an_infinite_gradient_makes_no_step_and_lowers_the_scale():
    fabric, parameters, optimizers, context = made(growth_interval=100)
    fabric.backward((parameters[0] + parameters[1]) * float("inf"))
    optimizers.optimizer_step(context)
    assert [parameter.item() for parameter in parameters] == [1.0, 1.0]
    assert context.scaler.get_scale() == 2.0


def context(fabric, folder):
    model = torch.nn.Linear(1, 1)
    optimizers = Optimizers()
    optimizers.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    optimizers.scheduler_factories, optimizers.scheduler_steps, optimizers.scaler = [None], -1, None
    trainer = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    subject = Subject("test.scaler/0", {}, "")
    return UFormContext(folder, folder, 1, 1, trainer, model, optimizers, fabric=fabric, keep=1, subject=subject)


def test_the_scale_is_saved_with_the_checkpoint(tmp_path):
    fabric, _, _, scaled = made()
    context(fabric, tmp_path).save_checkpoint()
    scaled.scaler.load_state_dict({**scaled.scaler.state_dict(), "scale": 32.0})
    assert context(fabric, tmp_path).load_bestcheckpoint(1)
    assert scaled.scaler.get_scale() == 4.0


def test_a_checkpoint_without_a_scale_begins_a_fresh_one(tmp_path):
    context(L.Fabric(accelerator="cpu", devices=1), tmp_path).save_checkpoint()
    fabric, _, _, scaled = made()
    assert context(fabric, tmp_path).load_bestcheckpoint(1)
    assert scaled.scaler.get_scale() == 4.0


def test_stock_optimizers_do_not_save_the_scale_of_fabric():
    """When this fails, xpm-torch saves it."""
    _, _, optimizers, scaled = made()
    optimizers.scheduler_steps = -1
    assert scaled.scaler.state_dict()["scale"] == 4.0
    assert ScheduledOptimizer.state_dict(optimizers)["scaler"] is None
