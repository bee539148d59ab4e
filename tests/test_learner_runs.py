"""The learner: every interruption ends as the uninterrupted run does; the stock learner's faults, and their absence."""

import json
import os
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from experimaestro import Constant, ResumableTask, TaskCancelled, taskglobals
from experimaestro.xpmutils import DirectoryContext
from safetensors.torch import load_file, save_file
from xpm_torch import Module, Random
from xpm_torch.learner import Learner, LearnerListener, LearnerListenerStatus
from xpm_torch.schedulers import LinearWithWarmup
from xpm_torch.trainers import Trainer
from xpm_torch.trainers.context import StepTrainingHook, TrainState

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    Retrieval,
    RetrievalSet,
    RetrievalValidation,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.checkpoints import manifest
from xpmir_uform.reports.curves import read_scalars
from xpmir_uform.trainer.loader import iterate_steps

EPOCHS, STEPS = 3, 4
WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibex", "jay", "koi", "lynx"]


class Words(BagSource):
    """A word and a mangled copy of it, drawn anew each epoch."""

    __xpmid__ = "test.words"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        letters = list(WORDS[index])
        generator(seed, Purpose.BAG, epoch, index).shuffle(letters)
        return Bag.alike([Item.text(WORDS[index]), Item.text("".join(letters) + "?")])


class WordSearch(RetrievalSet):
    """Words by their reverse."""

    __xpmid__ = "test.word-search"

    def load(self):
        return Retrieval(
            [Item.text(word[::-1]) for word in WORDS],
            [Item.text(word) for word in WORDS],
            [[i] for i in range(len(WORDS))],
        )


class Killed(BaseException):
    """What no handler of errors catches."""


class KillAt(StepTrainingHook):
    """Ends the run before the given step, once."""

    __xpmid__ = "test.kill-at"
    version: Constant[str] = "1"
    steps: ClassVar[set[int]] = set()

    def before(self, state):
        if state.steps in self.steps:
            self.steps.discard(state.steps)
            raise Killed


class StopAfterOne(LearnerListener):
    """Asks to stop after the first epoch."""

    __xpmid__ = "test.stop-after-one"

    def __call__(self, state):
        return LearnerListenerStatus.STOP


def config(cls=UFormLearner, optimizers=None, max_epochs=EPOCHS, seed=3, listeners=True, **params):
    schedule = CosineSchedule.C(learning_rate=1e-2, warmup_steps=2)
    return cls.C(
        random=Random.C(seed=seed),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=seed),
        trainer=UFormTrainer.C(sampler=BagSampler.C(source=Words.C()), batch_size=5, losses=[ContrastiveLoss.C()]),
        max_epochs=max_epochs,
        steps_per_epoch=STEPS,
        optimizers=optimizers or adamw(schedule),
        listeners=[RetrievalValidation.C(id="words", retrieval=WordSearch.C())] if listeners else [],
        hooks=[KillAt.C()],
        **params,
    )


def job(folder: Path) -> Path:
    return folder / "workspace" / "jobs" / "task" / "job"


def last(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, weights and optimizer."""
    checkpoint = job(folder) / "checkpoints" / "last"
    return {
        **load_file(checkpoint / "model.safetensors"),
        **load_file(checkpoint / "optimizer.safetensors"),
    }


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = last(found), last(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    states = [json.loads((job(f) / "checkpoints" / "last" / "state.json").read_text()) for f in (found, expected)]
    for state in states:
        # A duration, the one thing of a run that no two runs share.
        state["metrics"].pop("step_seconds")
    assert states[0] == states[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    job(folder).mkdir(parents=True)
    taskglobals.Env.instance().taskpath = job(folder)
    KillAt.steps = set()
    config(keep=EPOCHS + 1).instance(context=DirectoryContext(job(folder))).execute()
    return folder


def run_killed(execute, made, folder, steps):
    KillAt.steps = set(steps)
    for _ in steps:
        with pytest.raises(Killed):
            execute(made(), folder)
    return execute(made(), folder)


@pytest.mark.parametrize("step", [1, 2, 5, 7, 9, 12])
def test_killed_before_a_step_and_run_again(execute, tmp_path, whole, step):
    run_killed(execute, config, tmp_path, [step])
    assert_same(tmp_path, whole)


@pytest.mark.parametrize("step", [2, 6, 8, 11])
def test_killed_inside_an_epoch_with_checkpoints_between(execute, tmp_path, whole, step):
    run_killed(execute, lambda: config(checkpoint_steps=1), tmp_path, [step])
    assert_same(tmp_path, whole)


def test_killed_twice_with_other_intervals(execute, tmp_path, whole):
    run_killed(execute, lambda: config(checkpoint_steps=3, checkpoint_interval=2, keep=1), tmp_path, [4, 11])
    assert_same(tmp_path, whole)


def reseal(folder, change):
    """Changes a checkpoint as its writer could have: the manifest is of the changed files."""
    folder = folder.resolve()
    values = manifest.read(folder)
    change(folder)
    manifest.write(folder, {key: value for key, value in values.items() if key not in ("files", "format")})


def lose_optimizer(folder):
    path = folder / "optimizer.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)


def lose_schedule(folder):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "scheduler_steps": state["scheduler_steps"] - 1}))


def flip_one_bit(folder):
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(torch.int32).view(-1)[0] ^= 1
    save_file(weights, folder / "model.safetensors")


def keep_all(folder):
    """The positive control: what :func:`reseal` does of itself changes nothing."""


@pytest.mark.parametrize("change", [lose_optimizer, lose_schedule, flip_one_bit, keep_all])
def test_negative_control_one_lost_state_differs(execute, tmp_path, whole, change):
    KillAt.steps = {6}
    with pytest.raises(Killed):
        execute(config(), tmp_path)
    reseal(job(tmp_path) / "checkpoints" / "last", change)
    execute(config(), tmp_path)
    if change is keep_all:
        assert_same(tmp_path, whole)
        return
    with pytest.raises(AssertionError):
        assert_same(tmp_path, whole)


def test_negative_control_data_one_step_behind_differ(execute, tmp_path, whole, monkeypatch):
    """The state of the sampler is the step."""
    KillAt.steps = {6}
    with pytest.raises(Killed):
        execute(config(), tmp_path)

    def one_step_behind(self):
        return iterate_steps(self.dataset, self.context.state.steps - 1, 0)

    monkeypatch.setattr(UFormTrainer, "iter_batches", one_step_behind)
    execute(config(), tmp_path)
    with pytest.raises(AssertionError):
        assert_same(tmp_path, whole)


def test_negative_control_another_seed_differs(execute, tmp_path, whole):
    execute(config(seed=4), tmp_path)
    with pytest.raises(AssertionError):
        assert_same(tmp_path, whole)


def test_validation_and_logging_change_nothing(execute, tmp_path, whole):
    execute(config(listeners=False), tmp_path)
    assert_same(tmp_path, whole)


def test_a_finished_task_run_again_touches_no_checkpoint(execute, tmp_path):
    execute(config(), tmp_path)
    folder = job(tmp_path) / "checkpoints"
    before = {path: os.stat(path).st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    execute(config(), tmp_path)
    assert {path: os.stat(path).st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_the_newest_are_kept_and_last_names_the_newest(execute, tmp_path):
    execute(config(listeners=False), tmp_path)
    folder = job(tmp_path) / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["last", "step-00000008", "step-00000012"]
    assert os.readlink(folder / "last") == "step-00000012"


def test_no_pickle_is_written(whole):
    names = {path.name for path in (job(whole) / "checkpoints").rglob("*") if path.is_file()}
    assert names == {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}


def test_every_epoch_is_logged(whole):
    steps, values = read_scalars(job(whole) / "runs", "train/contrastive")
    assert steps == [4, 8, 12]
    assert all(np.isfinite(values))
    assert values[-1] < values[0]
    assert read_scalars(job(whole) / "runs", "words/MRR")[0] == [4, 8, 12]


def test_the_best_validated_weights_are_kept(whole, execute):
    out = next((job(whole)).rglob("history.json"))
    history = {int(epoch): values["MRR"] for epoch, values in json.loads(out.read_text()).items()}
    best = max(history, key=lambda epoch: (history[epoch], -epoch))
    kept = load_file(out.parent / "best" / "model.safetensors")
    of_best = job(whole) / "checkpoints" / f"step-{best * STEPS:08d}" / "model.safetensors"
    expected = load_file(of_best)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


def test_the_best_weights_exist_though_training_is_stopped_before_a_validation(execute, tmp_path):
    made = config()
    made.listeners = [
        RetrievalValidation.C(id="words", retrieval=WordSearch.C(), interval=2),
        StopAfterOne.C(id="stop"),
    ]
    execute(made, tmp_path)
    assert os.readlink(job(tmp_path) / "checkpoints" / "last") == "step-00000004"
    kept = next(job(tmp_path).rglob("best")) / "model.safetensors"
    newest = job(tmp_path) / "checkpoints" / "last" / "model.safetensors"
    assert kept.read_bytes() == newest.read_bytes()


def test_weights_are_saved_before_the_first_step(execute, tmp_path):
    KillAt.steps = {1}
    with pytest.raises(Killed):
        execute(config(), tmp_path)
    assert os.readlink(job(tmp_path) / "checkpoints" / "last") == "step-00000000"


@pytest.mark.parametrize("name", ["max_epochs", "keep", "checkpoint_interval"])
def test_impossible_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
        validate(config(**{name: 0}))


def test_experimaestro_does_not_validate_and_we_do():
    """When the first line raises, experimaestro is repaired and ``validate`` may go."""
    made = config(max_epochs=0)
    made.__xpm__.validate()
    with pytest.raises(ValueError, match="max_epochs is 0"):
        validate(made)


def test_what_a_task_holds_is_validated_too():
    wrong = CosineSchedule.C(learning_rate=1e-3, min_learning_rate=1e-2)
    with pytest.raises(ValueError, match=r"min_learning_rate is 0\.01, expected 0 to learning_rate"):
        validate(config(optimizers=adamw(wrong)))
    twice = (
        RetrievalValidation.C(id="a", retrieval=WordSearch.C()),
        RetrievalValidation.C(id="a", retrieval=WordSearch.C()),
    )
    made = config()
    made.listeners = list(twice)
    with pytest.raises(ValueError, match="the listeners have the ids"):
        validate(made)


# --- The stock learner


def one_optimizer():
    return [adamw(CosineSchedule.C(learning_rate=1e-2))[1]]


def test_one_optimizer_fails_in_the_stock_learner_and_trains_in_ours(execute, tmp_path):
    with pytest.raises(TypeError):
        execute(config(Learner, one_optimizer(), listeners=False), tmp_path / "stock")
    execute(config(optimizers=one_optimizer()), tmp_path / "ours")
    assert os.readlink(job(tmp_path / "ours") / "checkpoints" / "last") == "step-00000012"


def test_the_stock_learner_loses_the_last_epoch_and_ours_does_not(execute, tmp_path):
    execute(config(Learner, checkpoint_interval=2, listeners=False), tmp_path / "stock")
    info = json.loads((job(tmp_path / "stock") / "checkpoints" / "last" / "info.json").read_text())
    assert info["epoch"] == 2
    assert read_scalars(job(tmp_path / "stock") / "runs", "train/contrastive")[0] == [4, 8]
    execute(config(checkpoint_interval=2), tmp_path / "ours")
    assert os.readlink(job(tmp_path / "ours") / "checkpoints" / "last") == "step-00000012"


def test_our_trainer_ends_with_the_same_weights_in_the_stock_learner(execute, tmp_path, whole):
    execute(config(Learner, listeners=False), tmp_path)
    stock = load_file(job(tmp_path) / "checkpoints" / "last" / "model" / "model.safetensors")
    ours = load_file(job(whole) / "checkpoints" / "last" / "model.safetensors")
    assert all(torch.equal(stock[name], ours[name]) for name in ours)


def test_ours_is_resumable_and_the_stock_one_is_not():
    assert issubclass(UFormLearner, ResumableTask)
    assert not issubclass(Learner, ResumableTask)


def test_no_checkpoint_is_promised_that_does_not_exist(tmp_path):
    """The stock learner names those of all epochs, of which it keeps one."""
    made = {cls: config(cls, listeners=False) for cls in (Learner, UFormLearner)}
    outputs = {}
    for cls, learner in made.items():
        learner.__xpm__.seal(DirectoryContext(tmp_path))
        outputs[cls] = cls.__submit__(learner, lambda loader: loader, lambda action: None)
    assert sorted(outputs[Learner].checkpoints) == [0, 1, 2]
    assert list(outputs[UFormLearner].checkpoints) == ["last", 2, 3]
    assert outputs[UFormLearner].checkpoints["last"].path == tmp_path / "checkpoints" / "last"
    assert outputs[UFormLearner].learned_model.path == tmp_path / "checkpoints" / "last"


def stop_before(execute, made, folder, step):
    KillAt.steps = {step}
    with pytest.raises(Killed):
        execute(made, folder)


def stock(**params):
    return config(Learner, listeners=False, **params)


def epochs_in(folder):
    return sorted(path.name for path in (job(folder) / "checkpoints").glob("epoch-*"))


@pytest.mark.parametrize(
    "error", [OSError(5, "input/output error"), TaskCancelled("by a signal"), MemoryError()], ids=str
)
def test_the_stock_learner_deletes_what_it_cannot_read_once_and_begins_anew(execute, tmp_path, monkeypatch, error):
    """Ours raises such an error and touches nothing (test_learner_checkpoints.py)."""
    stop_before(execute, stock(), tmp_path, 10)
    assert epochs_in(tmp_path) == ["epoch-00000002"]

    def fail(*args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(TrainState, "load", fail)
        stop_before(execute, stock(), tmp_path, 1)
    assert epochs_in(tmp_path) == []


def test_the_stock_learner_goes_on_from_flipped_bits_and_ours_does_not(execute, tmp_path, whole):
    for made, folder, pattern in ((stock, "stock", "epoch-*/model/*"), (config, "ours", "step-00000008/model*")):
        stop_before(execute, made(), tmp_path / folder, 10)
        (weights,) = (job(tmp_path / folder) / "checkpoints").glob(pattern)
        data = bytearray(weights.read_bytes())
        data[-3] ^= 64
        weights.write_bytes(data)
        execute(made(), tmp_path / folder)
    assert_same(tmp_path / "ours", whole)
    found = load_file(job(tmp_path / "stock") / "checkpoints" / "last" / "model" / "model.safetensors")
    expected = load_file(job(whole) / "checkpoints" / "last" / "model.safetensors")
    assert not all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_stock_learner_killed_in_its_last_copy_ends_without_it(execute, tmp_path, monkeypatch):
    """Ours: a kill at each operation of saving (test_learner_checkpoints.py)."""
    copy = TrainState.copy_model

    def killed(self, path):
        if self.epoch == EPOCHS:
            raise Killed
        copy(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(TrainState, "copy_model", killed)
        with pytest.raises(Killed):
            execute(stock(), tmp_path)
    execute(stock(), tmp_path)
    assert list((job(tmp_path) / "checkpoints" / "last").iterdir()) == []


def test_the_stock_learner_repeats_an_epoch_that_ours_goes_on_inside(execute, tmp_path, monkeypatch):
    steps, process = [], UFormTrainer.process_batch
    monkeypatch.setattr(
        UFormTrainer, "process_batch", lambda self, batch: steps.append(batch.number) or process(self, batch)
    )
    stop_before(execute, stock(), tmp_path / "stock", 7)
    execute(stock(), tmp_path / "stock")
    assert steps == [*range(6), *range(4, 12)]
    steps.clear()
    stop_before(execute, config(checkpoint_steps=1), tmp_path / "ours", 7)
    execute(config(checkpoint_steps=1), tmp_path / "ours")
    assert len(steps) == len(set(steps)) == 12


def test_the_stock_learner_can_end_without_any_checkpoint(execute, tmp_path):
    execute(stock(checkpoint_interval=5), tmp_path / "stock")
    assert not (job(tmp_path / "stock") / "checkpoints" / "last").exists()
    execute(config(checkpoint_interval=5), tmp_path / "ours")
    assert os.readlink(job(tmp_path / "ours") / "checkpoints" / "last") == "step-00000012"


class Noise(Trainer):
    """Its gradients are drawn from torch's global generator."""

    __xpmid__ = "test.noise"

    def initialize(self, random, context):
        super().initialize(random, context)
        self.model.initialize()

    def iter_batches(self):
        return iter(int, 1)

    def process_batch(self, batch):
        weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.context.backward(sum((weight * torch.rand_like(weight)).sum() for weight in weights))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_draws_from_a_global_generator_are_lost_by_the_stock_learner(execute, tmp_path):
    """Ours keys what a model draws (test_learner_resume.py), so that there is nothing to save."""

    def made():
        learner = stock()
        learner.trainer = Noise.C()
        return learner

    execute(made(), tmp_path / "whole")
    stop_before(execute, made(), tmp_path / "pieces", 7)
    execute(made(), tmp_path / "pieces")
    found, expected = (
        load_file(job(tmp_path / name) / "checkpoints" / "last" / "model" / "model.safetensors")
        for name in ("pieces", "whole")
    )
    assert not all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_stock_trainer_that_uses_its_ranker_passes_by_the_wrapper_and_ours_does_not(execute, tmp_path, monkeypatch):
    through, forward = [], UFormTrainer.forward

    def watched(self, microbatch):
        through.append((self.ranker is self._fabric_model, self._fabric_model is self.context.state.model))
        return forward(self, microbatch)

    monkeypatch.setattr(UFormTrainer, "forward", watched)
    execute(stock(max_epochs=1), tmp_path)
    assert set(through) == {(False, True)}


def test_the_stock_linear_schedule_misses_its_floor_and_ours_does_not():
    stock_schedule = LinearWithWarmup.C(num_warmup_steps=2, min_factor=0.1).instance()
    assert stock_schedule.lr_lambda(10, 10) == pytest.approx(0.1 / 1.1)
    ours = CosineSchedule.C(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=2).instance()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    ours(optimizer, 10, last_epoch=9)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_any_folder_named_kernels_passes_for_flash_attention(tmp_path, monkeypatch):
    """None of ours bears that name (test_package.py)."""
    from xpm_torch.utils.fabric import is_fa2_available

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    (tmp_path / "kernels").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_fa2_available()
    monkeypatch.delitem(sys.modules, "kernels", raising=False)


def test_the_stock_way_of_saving_fails_on_tied_and_strided_tensors(tmp_path):
    """Ours writes them in full (test_learner_checkpoints.py)."""
    tied = torch.nn.Linear(2, 2)
    tied.again = tied.weight
    with pytest.raises(RuntimeError, match="share memory"):
        Module.save_model(tied, tmp_path)
    strided = torch.nn.Module()
    strided.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    with pytest.raises(ValueError, match="non contiguous"):
        Module.save_model(strided, tmp_path)
