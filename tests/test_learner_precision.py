"""Precisions: float32 parameters under bf16-true, what is refused, and weights that an update overflows."""

import math
import os
from typing import get_args

import lightning as L
import pytest
import torch
from invariance import Killed, config, distance, job, relative, run_here, run_ranks
from lightning.fabric.plugins.precision import precision as fabric_precision
from safetensors.torch import load_file
from torch import nn
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform.base.configuration import validate
from xpmir_uform.checkpoints import manifest
from xpmir_uform.learner import nonfinite
from xpmir_uform.model.precision import PRECISIONS, REFUSED, compute_in
from xpmir_uform.model.weights import save_weights
from xpmir_uform.monitoring.telemetry import read_telemetry

VECTORS = (
    "pooling.log_inverse_temperature",
    "pooling.bias",
    "encoder.norm.weight",
    "encoder.blocks.0.attention_norm.weight",
)
LONG = {"epochs": 4, "learning_rate": 1e-3, "keep": 100}


def weights(folder, checkpoint="last"):
    return load_file(job(folder) / "checkpoints" / checkpoint / "model.safetensors")


def moved(folder):
    """How far each parameter is from where it began."""
    begin, end = weights(folder, "step-00000000"), weights(folder)
    return {name: end[name].double() - begin[name].double() for name in begin}


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    run_here(config(precision="bf16-true", **LONG), folder)
    return folder


# --- bf16-true


def test_an_update_below_the_resolution_of_bfloat16_is_lost_by_fabric_alone():
    """The fault: when this fails, Fabric keeps float32 parameters, and ``compute_in`` may go."""
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    linear = fabric.setup_module(nn.Linear(1, 1))
    assert linear.weight.dtype == torch.bfloat16


def test_bf16_true_moves_vectors_as_32_true_does(tmp_path, bf16):
    run_here(config(precision="32-true", **LONG), tmp_path)
    expected, found = moved(tmp_path), moved(bf16)
    for name in VECTORS:
        assert found[name].norm() > 0
        assert (found[name] - expected[name]).norm() < 0.1 * expected[name].norm(), name
    assert relative(bf16, tmp_path) < 1e-2


def test_what_is_saved_is_float32_and_so_are_moments_and_initial_weights(tmp_path, bf16):
    assert {tensor.dtype for tensor in weights(bf16).values()} == {torch.float32}
    moments = load_file(job(bf16) / "checkpoints" / "last" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    run_here(config(precision="32-true", epochs=1), tmp_path)
    first = weights(tmp_path, "step-00000000")
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights(bf16, "step-00000000").items())


def test_bf16_true_resumes_bit_for_bit(tmp_path, bf16):
    with pytest.raises(Killed):
        run_here(config(precision="bf16-true", kill=13, checkpoint_steps=1, **LONG), tmp_path)
    run_here(config(precision="bf16-true", **LONG), tmp_path)
    expected = weights(bf16)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path).items())


def test_bf16_true_on_two_ranks_clipped_and_partly_frozen(tmp_path):
    params = {**LONG, "epochs": 1, "precision": "bf16-true", "clip_norm": 1e-3, "frozen": ["encoder.bytes"]}
    run_here(config(**params), tmp_path / "one")
    run_ranks(2, lambda rank, folder: run_here(config(devices=2, **params), folder), tmp_path / "two")
    assert distance(tmp_path / "two", tmp_path / "one") < 0.2
    assert relative(tmp_path / "two", tmp_path / "one") < 1e-3
    assert not moved(tmp_path / "two")["encoder.bytes.weight"].any()


class Scaled(nn.Module):
    """A product, and a factor that is not to be rounded."""

    UNROUNDED = ("factor",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0 + 2**-12]))
        self.factor = nn.Parameter(torch.tensor([1.0 + 2**-12]))

    def forward(self, x):
        return self.weight * x, self.factor * 1.0


def test_rounding_is_for_training_alone_passes_gradients_and_spares_what_is_listed():
    module = nn.ModuleList([Scaled()])[0]
    names = list(dict(module.named_parameters()))
    compute_in(module, torch.bfloat16)
    product, factor = module(torch.ones(1))
    assert (product.item(), factor.item()) == (1.0, 1.0 + 2**-12)
    (product + factor).backward()
    assert (module.weight.grad.item(), module.weight.grad.dtype) == (1.0, torch.float32)
    assert module.eval()(torch.ones(1))[0].item() == 1.0 + 2**-12
    assert list(dict(module.named_parameters())) == names


# --- What is refused


def test_every_precision_of_fabric_is_taken_or_refused_with_a_reason():
    known = {*get_args(fabric_precision._PRECISION_INPUT_STR), *get_args(fabric_precision._PRECISION_INPUT_STR_ALIAS)}
    assert known == {*PRECISIONS, *REFUSED}


@pytest.mark.parametrize("name", [*REFUSED, "float32", ""])
def test_a_refused_precision_is_named_before_submission(name):
    with pytest.raises(ValueError, match=f"precision is '{name}'.*expected one of 32-true"):
        validate(config(precision=name))


def test_fabric_may_not_take_another_precision_than_was_asked_for(tmp_path):
    """On a CPU Fabric makes bf16-mixed of 16-mixed, with a warning."""
    with pytest.raises(ValueError, match="16-mixed needs a GPU"):
        run_here(config(precision="16-mixed"), tmp_path)


# --- Updates that are not finite


class Huge(StepTrainingHook):
    """Makes the gradient of one step as large as it may be."""

    __xpmid__ = "test.huge"

    def before(self, state):
        (self.handle,) = (
            parameter.register_hook(lambda gradient: gradient * 1e37 if state.steps == 3 else gradient)
            for name, parameter in state.trainer.model.named_parameters()
            if name.endswith("pooling.projection.weight")
        )

    def after(self, state):
        self.handle.remove()


def test_an_update_that_overflows_ends_the_run_and_spares_the_checkpoint(tmp_path):
    made = config(precision="32-true", keep=1, checkpoint_steps=1)
    made.hooks = [Huge.C()]
    with pytest.raises(
        nonfinite.NotFinite, match=r"step 3 is not saved.*exp_avg_sq of pooling\.projection\.weight hold a NaN"
    ):
        run_here(made, tmp_path)
    assert [line["step"] for line in read_telemetry(job(tmp_path))] == [1, 2]
    checkpoints = job(tmp_path) / "checkpoints"
    assert os.readlink(checkpoints / "last") == "step-00000002"
    for name in ("model", "optimizer"):
        tensors = load_file(checkpoints / "last" / f"{name}.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_moment_that_overflows_is_named():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.tensor([1.0, 1e30])
    optimizer.step()
    module = nn.ParameterDict({"a": parameter})
    assert parameter.isfinite().all()
    with pytest.raises(nonfinite.NotFinite, match="here: exp_avg_sq of a hold"):
        nonfinite.check_finite("here", nonfinite.written(module, [optimizer]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_and_only_that(value):
    huge = {"a": torch.full((3,), -3e38), "none": torch.zeros(0), "whole": torch.tensor([7])}
    nonfinite.check_finite("here", huge)
    bad = {f"bad{number}": torch.tensor([1.0, value], dtype=torch.float64) for number in range(5)}
    with pytest.raises(nonfinite.NotFinite, match=r"^here: bad0, bad1, bad2 and 2 more hold a NaN or an infinity$"):
        nonfinite.check_finite("here", {**huge, **bad})


def test_weights_that_are_not_finite_are_never_saved_nor_gone_on_from(tmp_path):
    task = run_here(config(precision="32-true", epochs=1, keep=1), tmp_path)
    with torch.no_grad():
        task.context.unwrapped_model().pooling.bias.fill_(math.nan)
    task.context.begin_step()
    task.context.end_step()
    with pytest.raises(nonfinite.NotFinite, match=r"step 6 is not saved.*pooling\.bias"):
        task.context.save_checkpoint()
    assert sorted(os.listdir(job(tmp_path) / "checkpoints")) == ["last", "step-00000005"]
    # One that an earlier version wrote is not gone on from.
    last = job(tmp_path) / "checkpoints" / "step-00000005"
    facts, tensors = manifest.read(last), load_file(last / "model.safetensors")
    tensors["pooling.bias"].fill_(math.inf)
    save_weights(tensors, last / "model.safetensors")
    manifest.write(last, {name: value for name, value in facts.items() if name not in ("format", "files")})
    with pytest.raises(
        nonfinite.NotFinite, match=r"step-00000005 is whole, but cannot be gone on from: pooling\.bias hold"
    ):
        run_here(config(precision="32-true", epochs=1, keep=1), tmp_path)
