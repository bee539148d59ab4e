"""The learner: every interruption ends as the uninterrupted run does; the stock learner's faults, and their absence."""

import json
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from experimaestro import Constant, ResumableTask, taskglobals
from experimaestro.xpmutils import DirectoryContext
from safetensors.torch import load_file, save_file
from xpm_torch import Random
from xpm_torch.learner import Learner, LearnerListener, LearnerListenerStatus
from xpm_torch.trainers.context import StepTrainingHook

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
from xpmir_uform.data.checks import validate
from xpmir_uform.data.draws import Purpose, generator
from xpmir_uform.learner import manifest
from xpmir_uform.reports.curves import read_scalars

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


def lose_position(folder):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "steps": state["steps"] - 1}))


def flip_one_bit(folder):
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(torch.int32).view(-1)[0] ^= 1
    save_file(weights, folder / "model.safetensors")


def keep_all(folder):
    """The positive control: what :func:`reseal` does of itself changes nothing."""


@pytest.mark.parametrize("change", [lose_optimizer, lose_position, flip_one_bit, keep_all])
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
    assert list(outputs[UFormLearner].checkpoints) == ["last"]
    assert outputs[UFormLearner].checkpoints["last"].path == tmp_path / "checkpoints" / "last"
    assert outputs[UFormLearner].learned_model.path == tmp_path / "checkpoints" / "last"
