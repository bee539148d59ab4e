"""Steps that are not finite are skipped whole; gradients are clipped by one norm; who fails says what of."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import lightning as L
import pytest
import torch
from experimaestro import Constant
from invariance import job, run_here, run_ranks
from lightning.fabric.plugins import MixedPrecision
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.context import Context
from xpm_torch.learner import Learner
from xpm_torch.optim import GradientClippingHook
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Alerts,
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.learner import nonfinite
from xpmir_uform.learner.optimizers import Optimizers
from xpmir_uform.losses.base import LossValue
from xpmir_uform.monitoring.telemetry import read_alerts, read_telemetry

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
    context = SimpleNamespace(fabric=fabric, scaler=getattr(fabric.strategy.precision, "scaler", None), steps=1)
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
    counts = nonfinite.Counts()
    bad, fine = nonfinite.Outcome(nan=True, inf=True, skipped=True), nonfinite.Outcome(clipped=True)
    overflow = nonfinite.Outcome(skipped=True, excused=True)
    for outcome in (bad, fine, bad, overflow, bad):
        counts.add(outcome)
    assert counts.state_dict() == {"nan": 3, "inf": 3, "skipped": 4, "clipped": 1, "row": 2}
    again = nonfinite.Counts()
    again.load_state_dict(json.loads(json.dumps(counts.state_dict())))
    assert again == counts


def test_a_bad_batch_that_cannot_be_written_is_told(tmp_path, caplog):
    nonfinite.describe_batch(tmp_path / "absent", 3, [42], {"a": NAN}, nonfinite.Counts(row=3))
    assert "0x000000000000002a" in caplog.text


# --- Whole runs

EPOCHS, STEPS = 2, 4
WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibex", "jay"]


class Words(BagSource):
    """A word and its reverse."""

    __xpmid__ = "test.guard-words"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(WORDS[index][::-1] + "?")])


class Poison(StepTrainingHook):
    """Makes loss or gradient of some steps what they should not be, on some ranks; and ends the run, once."""

    __xpmid__ = "test.poison"
    version: Constant[str] = "1"

    loss: ClassVar[dict[int, float]] = {}
    gradient: ClassVar[dict[int, float]] = {}
    ranks: ClassVar[set[int]] = {0, 1}
    kills: ClassVar[set[int]] = set()
    factor: ClassVar[float] = 1.0

    @classmethod
    def set(cls, loss=(), gradient=(), value=NAN, ranks=(0, 1), kills=()):
        cls.loss, cls.gradient = dict.fromkeys(loss, value), dict.fromkeys(gradient, value)
        cls.ranks, cls.kills, cls.factor = set(ranks), set(kills), 1.0

    def before(self, state):
        if state.steps in self.kills:
            self.kills.discard(state.steps)
            raise Killed
        here = state.fabric.global_rank in self.ranks
        Poison.factor = self.loss.get(state.steps, 1.0) if here else 1.0
        self.handle = None
        if here and state.steps in self.gradient:
            parameter = next(iter(state.trainer.model.parameters()))
            value = self.gradient[state.steps]
            self.handle = parameter.register_hook(lambda gradient: gradient * value)

    def after(self, state):
        if self.handle is not None:
            self.handle.remove()


class Killed(BaseException):
    """What no handler of errors catches."""


class PoisonedLoss(ContrastiveLoss):
    """The contrastive loss, times what :class:`Poison` says."""

    __xpmid__ = "test.poisoned-loss"

    def compute(self, *args):
        value = super().compute(*args)
        return LossValue(value.value * Poison.factor, value.stats)


def config(cls=UFormLearner, devices=1, **params):
    return cls.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
        trainer=UFormTrainer.C(sampler=BagSampler.C(source=Words.C()), batch_size=4, losses=[PoisonedLoss.C()]),
        max_epochs=EPOCHS,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2, warmup_steps=2)),
        listeners=[],
        hooks=[Poison.C()],
        fabric_config=FabricConfiguration.C(accelerator="cpu", devices=str(devices)),
        **params,
    )


def every_step(**params):
    return config(checkpoint_steps=1, keep=100, **params)


def tensors(folder: Path, checkpoint="last"):
    """Every tensor of a checkpoint, weights and optimizer, and the optimizers' step counts."""
    path = job(folder) / "checkpoints" / (checkpoint if checkpoint == "last" else f"step-{checkpoint:08d}")
    return {**load_file(path / "model.safetensors"), **load_file(path / "optimizer.safetensors")}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def adam_steps(found):
    return {int(value) for name, value in found.items() if name.endswith("/step")}


@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_bad_step_moves_nothing_is_counted_and_told(execute, tmp_path, where, value):
    Poison.set(**{where: [3]}, value=value)
    execute(every_step(), tmp_path)
    assert same(tensors(tmp_path, 3), tensors(tmp_path, 2))
    assert not same(tensors(tmp_path, 4), tensors(tmp_path, 3))
    assert adam_steps(tensors(tmp_path)) == {EPOCHS * STEPS - 1}
    lines = list(read_telemetry(job(tmp_path)))
    assert [line["skipped"] for line in lines] == [line["step"] == 3 for line in lines]
    assert lines[2]["gradient_norm"]["after"] == 0.0
    assert [line["counts"]["skipped"] for line in lines] == [0, 0, 1, 1, 1, 1, 1, 1]
    # 0 times infinity is NaN: an infinite factor may make both.
    assert lines[-1]["counts"]["nan"] + lines[-1]["counts"]["inf"] >= 1
    assert {alert["step"] for alert in read_alerts(job(tmp_path))} == {3}
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path).values())


def test_the_mean_of_a_window_does_not_drop_the_bad_step(execute, tmp_path):
    Poison.set(loss=[3])
    execute(config(window=2), tmp_path)
    means = [line["window"]["loss"] for line in read_telemetry(job(tmp_path))]
    assert [math.isnan(mean) for mean in means] == [False, False, True, True, False, False, False, False]


def test_the_schedule_goes_on_through_a_skipped_step(execute, tmp_path):
    Poison.set()
    execute(config(), tmp_path / "whole")
    Poison.set(gradient=[3])
    execute(config(), tmp_path / "skipped")
    rates = [[line["learning_rate"] for line in read_telemetry(job(tmp_path / name))] for name in ("whole", "skipped")]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("kill", [3, 4, 6])
def test_killed_about_a_bad_step_and_run_again(execute, tmp_path, kill):
    Poison.set(loss=[3], gradient=[5])
    execute(every_step(), tmp_path / "whole")
    Poison.set(loss=[3], gradient=[5], kills=[kill])
    with pytest.raises(Killed):
        execute(every_step(), tmp_path / "killed")
    execute(every_step(), tmp_path / "killed")
    assert same(tensors(tmp_path / "killed"), tensors(tmp_path / "whole"))
    lines = [list(read_telemetry(job(tmp_path / name))) for name in ("whole", "killed")]
    for name in ("step", "losses", "counts", "learning_rate", "gradient_norm"):
        assert repr([line[name] for line in lines[0]]) == repr([line[name] for line in lines[1]])
    alerts = [[(a["name"], a["step"]) for a in read_alerts(job(tmp_path / name))] for name in ("whole", "killed")]
    assert alerts[0] == alerts[1]


def test_so_many_in_a_row_fail_the_task_and_spare_its_checkpoints(execute, tmp_path):
    Poison.set(gradient=range(4, 9))
    with pytest.raises(RuntimeError, match=r"steps 4 to 6 were skipped, 3 in a row.*bad_batch\.json"):
        execute(every_step(max_skipped=3), tmp_path)
    content = json.loads((job(tmp_path) / "bad_batch.json").read_text())
    assert (content["step"], content["skipped_in_a_row"]) == (6, 3)
    texts = {text for word in WORDS for text in (word, word[::-1] + "?")}
    known = {f"{Item.text(text).key:#018x}" for text in texts}
    assert len(content["keys"]) == 8
    assert set(content["keys"]) <= known
    assert os.readlink(job(tmp_path) / "checkpoints" / "last") == "step-00000005"
    assert same(tensors(tmp_path), tensors(tmp_path, 3))
    # Run again, it counts on from the checkpoint, and gives up at the same step.
    with pytest.raises(RuntimeError, match="steps 4 to 6 were skipped"):
        execute(every_step(max_skipped=3), tmp_path)
    # Once the cause is gone, training goes on from unspoilt weights.
    Poison.set()
    execute(every_step(max_skipped=3), tmp_path)
    assert [line["step"] for line in read_telemetry(job(tmp_path))] == list(range(1, 9))
    assert adam_steps(tensors(tmp_path)) == {6}


def test_fewer_in_a_row_do_not(execute, tmp_path):
    Poison.set(gradient=[2, 3, 5, 6, 8])
    execute(config(max_skipped=3), tmp_path)
    assert adam_steps(tensors(tmp_path)) == {3}


def test_the_stock_learner_is_poisoned_by_one_nan(execute, tmp_path):
    """When this fails, the stock class is repaired."""
    Poison.set(loss=[3])
    execute(config(Learner), tmp_path)
    last = job(tmp_path) / "checkpoints" / "last"
    weights = load_file(last / "model" / "model.safetensors")
    assert all(weight.isnan().any() for weight in weights.values())
    states = torch.load(last.parent / "epoch-00000002" / "optimizer.pth", weights_only=True)["optimizers"]
    moments = [entry["exp_avg"] for state in states for entry in state["state"].values()]
    assert all(moment.isnan().any() for moment in moments)


def test_an_alert_that_ends_the_task(execute, tmp_path):
    Poison.set(gradient=[3])
    with pytest.raises(RuntimeError, match="an alert of fail_on_alert ends the task at step 3: nan"):
        execute(config(alerts=Alerts.C(fail_on_alert=["nan"])), tmp_path)
    assert [line["step"] for line in read_telemetry(job(tmp_path))] == [1, 2, 3]


# --- Several ranks


def run_two(made, folder):
    """Runs two ranks; what a rank fails with is written to a file."""

    def work(rank, where):
        try:
            run_here(made(), where)
        except RuntimeError as error:
            (where / f"error-{rank}").write_text(str(error))

    run_ranks(2, work, folder)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_on_one_rank_of_two_skips_the_step_on_both(tmp_path, where):
    Poison.set(**{where: [3]}, ranks=[1])
    run_two(lambda: every_step(devices=2), tmp_path)
    assert same(tensors(tmp_path, 3), tensors(tmp_path, 2))
    assert adam_steps(tensors(tmp_path)) == {EPOCHS * STEPS - 1}
    assert [line["skipped"] for line in read_telemetry(job(tmp_path))] == [step == 3 for step in range(1, 9)]
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path).values())


def test_both_ranks_give_up_together(tmp_path):
    Poison.set(loss=range(2, 9), ranks=[1])
    run_two(lambda: every_step(devices=2, max_skipped=2), tmp_path)
    assert {path.name for path in tmp_path.glob("error-*")} == {"error-0", "error-1"}
    assert json.loads((job(tmp_path) / "bad_batch.json").read_text())["step"] == 3


def test_both_ranks_end_by_an_alert(tmp_path):
    Poison.set(loss=[2], ranks=[1])
    run_two(lambda: every_step(devices=2, alerts=Alerts.C(fail_on_alert=["all"])), tmp_path)
    told = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert all("an alert of fail_on_alert ends the task at step 2" in text for text in told)
