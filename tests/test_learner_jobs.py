"""Jobs as experimaestro runs them: stopped, killed, finished, run again; what its status files say."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import ClassVar

import pytest
from experimaestro import Constant, RunMode, experiment
from experimaestro.run import TaskRunner
from forks import fork
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
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
from xpmir_uform.checkpoints import manifest


class Pairs(BagSource):
    """A number in words and digits."""

    __xpmid__ = "test.pairs"

    def __len__(self):
        return 12

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(f"number {index}"), Item.text(f"{index} {epoch}", key=100 + index)])


class Before(StepTrainingHook):
    """Does something before a step."""

    __xpmid__ = "test.before"
    version: Constant[str] = "1"
    acts: ClassVar[dict] = {}

    def before(self, state):
        self.acts.get(state.steps, lambda: None)()


def learner(seed=3, max_epochs=3, **params):
    return UFormLearner.C(
        random=Random.C(seed=seed),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
        trainer=UFormTrainer.C(sampler=BagSampler.C(source=Pairs.C()), batch_size=4, losses=[ContrastiveLoss.C()]),
        max_epochs=max_epochs,
        steps_per_epoch=4,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2, warmup_steps=2)),
        listeners=[],
        hooks=[Before.C()],
        **params,
    )


@pytest.fixture
def job(tmp_path):
    """The folder of a job that was submitted and not run yet."""

    def submit():
        with experiment(tmp_path, "jobs", run_mode=RunMode.GENERATE_ONLY, no_environmental_impact=True):
            learner().submit()

    assert fork(submit, tmp_path / "submit.log") == 0, (tmp_path / "submit.log").read_text()
    (found,) = (tmp_path / "jobs" / "uform.learner").iterdir()
    return found


def run(job, acts=None):
    """Runs a job as its script does."""

    def work():
        Before.acts = acts or {}
        TaskRunner(str(job / "learner.py"), [str(job / "learner.lock")]).run()

    return fork(work, job / "out.log")


def marks(job):
    return {path.suffix for path in job.glob("learner.*")} & {".done", ".failed"}


def last(job):
    found = manifest.verify(job / "checkpoints" / "last")
    return found["step"], {
        name: tensor.tolist() for name, tensor in load_file(job / "checkpoints" / "last" / "model.safetensors").items()
    }


def send(*numbers):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


def test_a_job_ends_with_its_mark_and_is_not_run_again(job):
    assert run(job) == 0, (job / "out.log").read_text()
    assert marks(job) == {".done"}
    assert last(job)[0] == 12
    before = {path: os.stat(path).st_mtime_ns for path in job.rglob("*") if path.is_file() and path.name != "out.log"}
    kept = {path: time for path, time in before.items() if "checkpoints" in path.parts}
    assert run(job) == 0
    assert {path: os.stat(path).st_mtime_ns for path in kept} == kept
    assert manifest.read(job / "checkpoints" / "last")["identifier"] == f"uform.learner/{job.name}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stopped_job_is_marked_for_running_again(job, number):
    assert run(job, {6: send(number)}) == 1
    assert marks(job) == {".failed"}
    failure = json.loads((job / "learner.failed").read_text())
    assert failure["reason"] == "timeout"
    assert "step 6 is saved, run the task again" in failure["message"]
    assert last(job)[0] == 6
    assert run(job) == 0
    assert marks(job) == {".done"}
    assert last(job)[0] == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_cancels_the_job(job, number):
    assert run(job, {6: send(number, number)}) == 1
    assert marks(job) == {".failed"}
    assert json.loads((job / "learner.failed").read_text())["reason"] == "cancelled"
    assert last(job)[0] == 4
    assert run(job) == 0


def test_a_killed_job_goes_on_to_the_same_weights(job):
    assert run(job, {7: send(signal.SIGKILL)}) == -signal.SIGKILL
    assert marks(job) == set()
    assert last(job)[0] == 4
    assert run(job, {12: send(signal.SIGKILL)}) == -signal.SIGKILL
    assert last(job)[0] == 8
    assert run(job) == 0
    pieces = last(job)
    (job / "learner.done").unlink()
    shutil.rmtree(job / "checkpoints")
    assert run(job) == 0
    assert last(job) == pieces


def test_killed_after_the_last_step_and_before_the_mark_makes_no_step_more(job):
    assert run(job) == 0
    (job / "learner.done").unlink()
    before = last(job)

    def never():
        raise AssertionError("a step was made")

    assert run(job, dict.fromkeys(range(20), never)) == 0
    assert marks(job) == {".done"}
    assert last(job) == before


def test_a_second_job_process_leaves_the_first_one_alone(job):
    def again():
        # Past experimaestro's own lock, as when it was given back too early.
        second = fork(lambda: TaskRunner(str(job / "learner.py"), []).run(), job / "second.log")
        (job / "second.status").write_text(str(second))

    assert run(job, {6: again}) == 0, (job / "out.log").read_text()
    assert (job / "second.status").read_text() == "1"
    assert "trains in" in (job / "second.log").read_text()
    assert last(job)[0] == 12


def test_what_begins_with_another_job_waits_for_it_and_bears_its_name(tmp_path):
    def submit():
        with experiment(tmp_path, "jobs", run_mode=RunMode.GENERATE_ONLY, no_environmental_impact=True):
            found = {}
            for seed in (3, 4):
                first = learner(seed)
                begin = first.submit().checkpoints["last"]
                second = learner(3, max_epochs=4, resume_from=begin)
                second.submit()
                found[seed] = [str(each.__xpm__.job.path) for each in (first, second)]
                assert first.__xpm__.job in [each.origin for each in second.__xpm__.job.dependencies]
            (tmp_path / "found.json").write_text(json.dumps(found))

    assert fork(submit, tmp_path / "submit.log") == 0, (tmp_path / "submit.log").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert len({path for paths in found.values() for path in paths}) == 4
    first, second = (Path(path) for path in found["3"])
    assert run(first) == 0
    assert run(second) == 0, (second / "out.log").read_text()
    (audit,) = manifest.read(second / "checkpoints" / "last")["audits"]
    assert audit["source"]["identifier"] == f"uform.learner/{first.name}"
    assert audit["fields"] == {"max_epochs": [3, 4]}
    assert last(second)[0] == 16
