"""What a person at the keyboard meets: signals to experimaestro's own command, on tasks of a second."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT = 240
"""Seconds that anything may take on a busy machine"""

TASKS = """
import signal
import time
from pathlib import Path

from experimaestro import GracefulTimeout, Meta, ResumableTask


class Quick(ResumableTask):
    __xpmid__ = "test.quick"

    def execute(self):
        print("done")


class Slow(ResumableTask):
    __xpmid__ = "test.slow"
    patience: Meta[int] = 1
    end: Meta[str]

    def execute(self):
        asked = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        Path("ready").touch()
        while not Path(self.end).exists():
            if len(asked) >= self.patience:
                Path("checkpoints/step-00000007").mkdir(parents=True, exist_ok=True)
                raise GracefulTimeout("saved")
            time.sleep(0.05)
        Path("finished").touch()
"""
"""``Slow`` runs until there is a file ``end``; it saves and leaves when it is asked ``patience`` times"""

PLAN = """
from experimaestro.experiments import configuration
from keyboard_tasks import Quick, Slow
from xpmir_uform.recipes import ExperimentSettings, uform_experiment


@configuration
class Plan(ExperimentSettings):
    patience: int = 1


@uform_experiment()
def run(helper, settings: Plan):
    helper.submit("Quick", Quick.C())
    helper.wait()
    helper.submit("Slow", Slow.C(patience=settings.patience, end=str(helper.xp.workspace.path / "end")))
    helper.wait()
    print("all of it")
"""


@pytest.fixture
def experiment(tmp_path):
    """The folder of an experiment; its workspace is below."""
    (tmp_path / "experiment.py").write_text(PLAN)
    (tmp_path / "keyboard_tasks.py").write_text(TASKS)
    (tmp_path / "plan.yaml").write_text("id: plan\nfile: experiment\ndirty_git: ignore\n")
    return tmp_path


def start(folder: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            str(Path(sys.executable).with_name("experimaestro")),
            *("run-experiment", "--workdir", str(folder / "workspace")),
            *(part for option in options for part in ("-c", option)),
            str(folder / "plan.yaml"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slow(folder: Path, process: subprocess.Popen) -> Path:
    """The folder of the slow job, once it runs."""
    for _ in range(LIMIT * 20):
        assert process.poll() is None, process.communicate()
        if found := list(folder.glob("workspace/jobs/test.slow/*/ready")):
            return found[0].parent
        time.sleep(0.05)
    raise AssertionError("the job does not begin")


def gone(folder: Path) -> bool:
    """Whether no process of the jobs is left, waiting for it."""
    for _ in range(LIMIT * 10):
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        if not any(str(folder / "workspace" / "jobs").encode() in command for command in commands):
            return True
        time.sleep(0.1)
    return False


def test_interrupted_it_saves_and_the_same_command_goes_on(experiment):
    process = start(experiment)
    job = slow(experiment, process)
    process.send_signal(signal.SIGINT)
    output, told = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, told
    assert told.splitlines()[-1] == "Stopped by SIGINT: run the same command to go on."
    assert "1 running job is asked to save and stop" in told
    assert "Traceback" not in told
    assert "ENVIRONMENTAL IMPACT" not in told
    assert not re.search(r"^\S+ INFO +xpm\.(scheduler|experiment):", told, re.MULTILINE)
    assert "Submitting job" in Path(re.search(r"^Log: (.*)$", told, re.MULTILINE)[1]).read_text()
    assert "all of it" not in output
    assert (job / "checkpoints" / "step-00000007").is_dir()
    assert gone(experiment)

    # More ends without a result than experimaestro lets a task have.
    status = json.loads((job / ".experimaestro" / "status.json").read_text())
    (job / ".experimaestro" / "status.json").write_text(json.dumps({**status, "retry_count": 7}))
    (experiment / "workspace" / "end").touch()
    again = start(experiment)
    output, told = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, told
    assert "all of it" in output
    assert "Slow goes on from step 7 (ended without a result 7 times)" in told
    assert re.search(r"^Quick is done since 2\d\d\d-.*, reused: ", told, re.MULTILINE)
    assert (job / "finished").exists()


def test_a_second_signal_ends_the_command_and_the_job_at_once(experiment):
    process = start(experiment, "patience=2")
    slow(experiment, process)
    process.send_signal(signal.SIGTERM)
    for line in process.stderr:
        if "asked to save and stop" in line:
            break
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert gone(experiment)
