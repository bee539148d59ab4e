"""What experimaestro does that ours works around: each fault is seen in it, and its absence in ours.

Others are beside the tests of what replaces them; docs/upstream.md names all of them. Where a new release repairs a
fault, its test fails here and says what may go.
"""

import importlib.util
import inspect
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from experimaestro import Config, Constant, Meta, Param, ResumableTask, RunMode, experiment, field
from experimaestro.connectors import ProcessState
from experimaestro.launcherfinder.registry import LauncherRegistry
from experimaestro.launchers.slurm.base import SlurmJobState, SlurmLauncher
from experimaestro.run import TaskRunner
from experimaestro.settings import find_workspace, get_settings
from forks import fork
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.optim import AdamW, ParameterOptimizer

import xpmir_uform
from xpmir_uform.learner.distributed import check_started

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "assets" / "defaults.json"


def repaired(what: str) -> str:
    """What an assertion that a fault is there says when it is not."""
    return f"repaired upstream: {what} can go"


@contextmanager
def fault(error: type[Exception], message: str, what: str) -> Iterator[None]:
    """Within it that error is raised; else what works around it can go."""
    try:
        yield
    except error as raised:
        if not re.search(message, str(raised)):
            raise
    else:
        pytest.fail(repaired(what))


# --- Identifiers


def identifier(cls) -> str:
    return cls.C().__xpm__.identifier.all.hex()


def module(path: Path, name: str, text: str):
    path.write_text(text)
    made = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = made
    made.__spec__.loader.exec_module(made)
    return made


def test_a_class_that_moves_changes_its_identifier_unless_it_is_pinned(tmp_path, monkeypatch):
    """Every class of ours pins it (test_identity.py)."""
    found = {}
    for pinned in ("pass", '__xpmid__ = "test.thing"'):
        names = {f"moved_{place}" for place in "ab"}
        text = f"from experimaestro import Config\nclass Thing(Config):\n    {pinned}\n"
        found[pinned] = {identifier(module(tmp_path / f"{name}.py", name, text).Thing) for name in names}
        for name in names:
            monkeypatch.delitem(sys.modules, name)
    assert [len(each) for each in found.values()] == [2, 1], repaired("__xpmid__")


class Before(Config):
    """A class before its default is changed."""

    __xpmid__ = "test.changed"
    size: Param[int] = field(default=1, ignore_default=True)


class After(Config):
    """And after."""

    __xpmid__ = "test.changed"
    size: Param[int] = field(default=2, ignore_default=True)


class Versioned(After):
    """With a version of what it means."""

    __xpmid__ = "test.changed"
    version: Constant[str] = "2"


def test_a_changed_default_is_the_same_task_unless_a_version_says_otherwise():
    assert identifier(Before) == identifier(After), repaired("tests/assets/defaults.json")
    assert identifier(Versioned) != identifier(After)


STOCK = (AdamW, FabricConfiguration, ParameterOptimizer, Random)
"""Classes of xpm-torch that our configurations hold."""


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def our_defaults() -> dict[str, str]:
    """The default of every parameter, as text; of a configuration its identifier. Constants are in identifiers."""
    for found in pkgutil.walk_packages(xpmir_uform.__path__, "xpmir_uform."):
        importlib.import_module(found.name)
    ours = {cls for cls in subclasses(Config) if cls.__module__.startswith("xpmir_uform.")}
    return {
        f"{cls.__name__}.{name}": told(argument.default)
        for cls in (*STOCK, *ours)
        if not cls.__name__.endswith("XPMConfig")
        for name, argument in cls.__getxpmtype__().arguments.items()
        if argument.default is not None and not argument.ignored and not argument.constant
    }


def told(value) -> str:
    return value.__xpm__.identifier.all.hex() if isinstance(value, Config) else repr(value)


def test_our_defaults_are_frozen():
    """A changed default would silently reuse old results: give the class a Constant version with it."""
    frozen, found = json.loads(FROZEN.read_text()), our_defaults()
    names = sorted(frozen.keys() | found.keys())
    differing = {name: [frozen.get(name), found.get(name)] for name in names if frozen.get(name) != found.get(name)}
    assert not differing, f"frozen, and now: write what is new into {FROZEN.name}"


MOVED_ENUM = """
from enum import Enum, StrEnum
from experimaestro import Config, Param

class Colour({kind}):
    RED = "red"

class Thing(Config):
    __xpmid__ = "test.coloured"
    colour: Param[Colour]
"""


def test_an_enumeration_that_moves_changes_identifiers_unless_it_is_of_words(tmp_path, monkeypatch):
    """Those of ours are StrEnum; identifiers are frozen (test_identity.py)."""
    found = []
    for kind in ("Enum", "StrEnum"):
        names = [f"{place}_{kind.lower()}" for place in ("here", "there")]
        made = [module(tmp_path / f"{name}.py", name, MOVED_ENUM.format(kind=kind)) for name in names]
        found.append({each.Thing.C(colour=each.Colour.RED).__xpm__.identifier.all for each in made})
        for name in names:
            monkeypatch.delitem(sys.modules, name)
    assert [len(each) for each in found] == [2, 1], repaired("the rule to use StrEnum")


class Inner(Config):
    """Made by a default."""

    __xpmid__ = "test.inner"


class Middle(Config):
    """Holds it, and is made by a default."""

    __xpmid__ = "test.middle"
    inner: Meta[Inner] = field(default_factory=Inner.C)


class Outer(Config):
    """Holds that."""

    __xpmid__ = "test.outer"
    middle: Meta[Middle] = field(default_factory=Middle.C)


def test_a_default_within_a_default_of_a_meta_field_is_missing():
    """Ours is made where it is needed: UFormBatcher.plan (test_batching_worker.py)."""
    assert isinstance(Outer.C(middle=Middle.C()).instance().middle.inner, Inner)
    assert Outer.C().instance().middle.inner is None, repaired("the packer made in UFormBatcher.plan")


# --- Experiments


TASKS = """
import json, sys
from experimaestro import Task

class Fails(Task):
    __xpmid__ = "test.fails"

    def execute(self):
        print(json.dumps(sys.path))
        raise RuntimeError("on purpose")
"""

RUN = """
from experimaestro.experiments import ConfigurationBase
from {tasks} import Fails

def run(helper, configuration: ConfigurationBase):
    Fails.C().submit()
"""


RUN_EXPERIMENT = (str(Path(sys.executable).with_name("experimaestro")), "run-experiment")


def write_experiment(folder: Path, key: str, value: str, tasks: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failing_tasks.py").write_text(TASKS)
    (folder / "failing_run.py").write_text(RUN.format(tasks=tasks))
    (folder / "run.yaml").write_text(f"id: failing\n{key}: {value}\n")
    return folder / "run.yaml"


def command(settings: Path, workspace: Path, home: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*RUN_EXPERIMENT, "--workdir", str(workspace), *options, str(settings)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """An experiment whose job failed: its folder and what the command printed."""
    folder = tmp_path_factory.mktemp("failed")
    settings = write_experiment(folder / "experiment", "file", "failing_run.py", "failing_tasks")
    return folder, command(settings, folder / "workspace", folder)


def test_the_command_ends_well_when_a_job_failed(failed):
    """Ours ends with status 1 (test_experiment_helper.py, test_experiment_quickstart.py)."""
    folder, done = failed
    (mark,) = (folder / "workspace" / "jobs").rglob("*.failed")
    assert json.loads(mark.read_text())["reason"] == "failed"
    assert done.returncode == 0, repaired("UFormExperiment.wait")


def test_the_folder_of_an_experiments_file_is_first_on_the_path_of_its_jobs(failed):
    folder, _ = failed
    (printed,) = (folder / "workspace" / "jobs").rglob("*.out")
    path = json.loads(printed.read_text().splitlines()[0])
    assert path[0] == str(folder / "experiment"), repaired(
        "the rule that no file of experiments/ bears a library's name"
    )


def test_no_file_of_our_experiments_bears_the_name_of_a_library():
    files = [path.stem for path in (ROOT / "experiments").glob("*/*.py")]
    assert "experiment" in files
    assert [name for name in files if importlib.util.find_spec(name)] == []


def test_a_module_puts_the_root_of_the_repository_first(tmp_path):
    """There, our folder of kernels would be importable as ``kernels``."""
    settings = write_experiment(
        tmp_path / "parts" / "inner", "module", "parts.inner.failing_run", "parts.inner.failing_tasks"
    )
    (tmp_path / ".config" / "experimaestro").mkdir(parents=True)
    (tmp_path / ".config" / "experimaestro" / "settings.yaml").write_text("carbon: {enabled: false}\n")
    done = command(settings, tmp_path / "workspace", tmp_path, "--run-mode", "generate_only")
    (script,) = (tmp_path / "workspace" / "jobs" / "test.fails").glob("*/fails.py")
    assert f"sys.path.insert(0, '{tmp_path}')" in script.read_text(), repaired("the rule to use file:") + done.stderr


def test_our_experiments_are_files():
    settings = [yaml.safe_load(path.read_text()) for path in (ROOT / "experiments").glob("*/*.yaml")]
    assert settings
    assert all("file" in each and "module" not in each for each in settings)


def test_folders_of_tasks_that_are_not_resumable_are_said_to_be_cleaned(failed):
    """Ours is resumable (test_learner_runs.py)."""
    assert "directory will be cleaned up for non-resumable tasks (test.fails)" in failed[1].stderr, repaired(
        "the sentence about cleaned folders in docs/upstream.md"
    )


@pytest.mark.skipif(bool(importlib.util.find_spec("codecarbon")), reason="needs an environment without codecarbon")
def test_every_start_shows_a_banner_without_codecarbon(failed):
    assert "ENVIRONMENTAL IMPACT TRACKING DISABLED" in failed[1].stderr, repaired("the extra 'carbon'")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["carbon"] == ["experimaestro[carbon]"]


# --- Jobs


class Stopped(ResumableTask):
    """Is asked to stop."""

    __xpmid__ = "test.stopped"

    def execute(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_job_counts_as_cancelled_and_is_not_run_again(tmp_path):
    """Ours says that its time is over (test_learner_jobs.py), which is what is tried again."""

    def submit():
        with experiment(tmp_path, "jobs", run_mode=RunMode.GENERATE_ONLY, no_environmental_impact=True):
            Stopped.C().submit()

    assert fork(submit, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    (job,) = (tmp_path / "jobs" / "test.stopped").iterdir()
    assert fork(lambda: TaskRunner(str(job / "stopped.py"), [str(job / "stopped.lock")]).run(), tmp_path / "log") == 1
    reason = json.loads((job / "stopped.failed").read_text())["reason"]
    assert reason == "cancelled", repaired("Interruptions and GracefulTimeout")


def test_an_experiment_ends_well_when_a_job_failed(tmp_path):
    def submit():
        sys.path.insert(0, str(tmp_path))
        (tmp_path / "failing_tasks.py").write_text(TASKS)
        fails = importlib.import_module("failing_tasks").Fails
        with experiment(tmp_path / "workspace", "failing", no_environmental_impact=True) as xp:
            xp.workspace.python_path.append(tmp_path)
            fails.C().submit()

    assert fork(submit, tmp_path / "log") == 0, repaired("UFormExperiment.wait")
    assert list((tmp_path / "workspace" / "jobs" / "test.fails").glob("*/fails.failed"))


# --- Clusters


def test_requeued_and_preempted_jobs_count_as_failed():
    for state in ("REQUEUED", "PREEMPTED"):
        assert SlurmJobState(state, "", "").state is ProcessState.ERROR, repaired("the hint in docs/upstream.md")


def test_jobs_of_a_cluster_are_looked_at_once_a_minute():
    interval = inspect.signature(SlurmLauncher.__init__).parameters["interval"]
    assert interval.default == 60, repaired("the hint in docs/upstream.md")


SLURM = {
    "NTASKS": "1",
    "JOB_ID": "1",
    "JOB_NAME": "train",
    "PROCID": "0",
    "LOCALID": "0",
    "NODEID": "0",
    "NODELIST": "localhost",
}


def test_two_devices_of_one_slurm_task_train_as_one(tmp_path):
    def launch():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        os.environ.update({f"SLURM_{name}": str(value) for name, value in SLURM.items()}, GLOO_SOCKET_IFNAME="lo")
        fabric = FabricConfiguration.C(accelerator="cpu", devices="2").instance().get_fabric()
        fabric.launch()
        sys.exit(10 + fabric.world_size)

    assert fork(launch, tmp_path / "log") == 11, repaired("check_started of the learner")


@pytest.mark.parametrize(
    ("devices", "nodes", "started", "expected"),
    [("2", 1, 1, 2), ("2", 3, 2, 6), ("0,1,4", 1, 1, 3), ("1", 1, 2, 1)],
)
def test_ours_counts_the_processes_that_were_started(devices, nodes, started, expected):
    config = FabricConfiguration.C(accelerator="cpu", devices=devices, num_nodes=nodes)
    with pytest.raises(ValueError, match=f"started are {started}, expected {expected} .*set ntasks_per_node"):
        check_started(SimpleNamespace(world_size=started), config)
    check_started(SimpleNamespace(world_size=expected), config)


def test_devices_that_are_no_numbers_are_not_counted():
    for devices in ("auto", "-1"):
        check_started(SimpleNamespace(world_size=4), FabricConfiguration.C(devices=devices))


# --- Settings


def test_devices_are_words():
    with fault(ValueError, "Input should be a valid string", "the hint in docs/upstream.md"):
        FabricConfiguration.C(devices=2)


@pytest.fixture
def no_settings(tmp_path, monkeypatch):
    """A home without settings."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    get_settings.cache_clear()
    yield tmp_path
    get_settings.cache_clear()


def test_without_a_workspace_there_is_a_bare_assertion(no_settings):
    with fault(AssertionError, "No workdir or workspace defined, and no default", "the hint in docs/upstream.md"):
        find_workspace()


def test_settings_are_those_of_the_home_whatever_the_folder_of_launchers(no_settings, monkeypatch):
    for folder in (no_settings / "elsewhere", no_settings / "home" / ".config" / "experimaestro"):
        folder.mkdir(parents=True)
        (folder / "settings.yaml").write_text(f"workspaces: [{{id: {folder.name}, path: {folder}}}]\n")
    monkeypatch.setattr(LauncherRegistry, "CURRENT_CONFIG_DIR", None)
    LauncherRegistry.set_config_dir(no_settings / "elsewhere")
    assert [workspace.id for workspace in get_settings().workspaces] == ["experimaestro"], repaired(
        "the hint in docs/upstream.md"
    )
