"""The command ``xpmir-uform checkpoint``: readable, and status 1 on damage."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xpmir_uform.base.atomic_files import Occupied, commit_folder, point
from xpmir_uform.base.checked_files import seal
from xpmir_uform.checkpoints import format, manifest, store
from xpmir_uform.checkpoints.compatibility import Subject, fit_of, model_layout
from xpmir_uform.commands import main


def save(folder, step, previous=None, weight=1.0, batch_size=5, audits=()):
    """A checkpoint of one weight, as a learner writes it."""
    weights = {"weight": torch.full((2, 3), weight)}
    state = {"epoch": 1, "steps": step, "metrics": {}, "trainer": {}, "scaler": None, "counters": {}}
    optimizer = {"optimizers": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}], "scheduler_steps": 1}
    facts = {
        "step": step,
        "epoch": 1,
        "identifier": "uform.learner/abc",
        **fit_of(Subject("uform.learner/abc", {"batch_size": batch_size}, "0" * 64), model_layout(weights), {}),
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "environment": {"device_name": "x86_64", "threads": 1},
        "device": "cpu",
        "precision": "32-true",
        "ranks": 2,
        "previous": previous and manifest.reference(previous, manifest.read(previous)),
        "audits": list(audits),
    }
    path = folder / "checkpoints" / store.name_of(step)
    commit_folder(path, lambda part: format.write(part, weights, optimizer, state, facts))
    point(path.parent / "last", path.name)
    return path


@pytest.fixture
def job(tmp_path):
    """Two checkpoints, after one that is gone; the second after a forced resume."""
    gone = save(tmp_path, 4)
    first = save(tmp_path, 8, gone)
    audit = {
        "time": "2026-01-02T03:04:05+00:00",
        "source": manifest.reference(first, manifest.read(first)),
        "fields": {"batch_size": [5, 7]},
        "reason": "more memory",
    }
    save(tmp_path, 12, first, weight=1.5, batch_size=7, audits=[audit])
    store.prune(tmp_path / "checkpoints", 12, 2)
    return tmp_path


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/last", "checkpoints/step-00000012"])
def test_show(job, capsys, where):
    assert main(["checkpoint", "show", str(job / where)]) == 0
    shown = capsys.readouterr().out
    for text in (
        r"checkpoint +/.*step-00000012\n",
        r"step +12, epoch 1",
        r"task +uform.learner/abc",
        r"file +model.safetensors +\d+ bytes +[0-9a-f]{16}",
        r"made on +cpu \(x86_64\), 32-true, 2 ranks",
        r"versions +torch 2.13.0",
        r"git +0123456789ab, with changes",
        r"follows +step 8 of uform.learner/abc",
        r"model layout +[0-9a-f]{16}",
        r"batch_size = 7",
    ):
        assert re.search(text, shown), text


def test_verify_looks_at_every_checkpoint_of_a_job(job, capsys):
    assert main(["checkpoint", "verify", str(job)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["whole", "whole"]
    cut(job / "checkpoints" / "step-00000008" / "optimizer.safetensors")
    assert main(["checkpoint", "verify", str(job)]) == 1
    damaged, whole = capsys.readouterr().out.splitlines()
    assert re.match(r"DAMAGED .*optimizer\.safetensors was changed: its size is \d+, expected \d+", damaged)
    assert whole.startswith("whole")
    assert main(["checkpoint", "verify", str(job / "checkpoints" / "last")]) == 0


@pytest.mark.parametrize("action", ["show", "verify", "lineage", "diff"])
def test_damage_is_status_1_and_named(job, capsys, action):
    path = job / "checkpoints" / "last"
    cut(path / "manifest.json")
    assert main(["checkpoint", action, str(path), *([str(path)] if action == "diff" else [])]) == 1
    out, err = capsys.readouterr()
    assert "manifest.json" in out + err
    assert "Traceback" not in out + err


def test_lineage_goes_back_as_far_as_there_are_checkpoints(job, capsys):
    assert main(["checkpoint", "lineage", str(job)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["12", "8", "4"]
    assert lines[2].endswith("not here any more")
    assert re.search(r"resumed 2026-01-02T03:04:05\+00:00 from step 8 .*; more memory: batch_size: 5 -> 7", lines[3])


def test_lineage_does_not_take_another_checkpoint_of_that_step_for_its_own(job, capsys):
    save(job, 8, weight=9.0)
    assert main(["checkpoint", "lineage", str(job / "checkpoints" / "step-00000012")]) == 0
    assert "uform.learner/abc, not here any more" in capsys.readouterr().out.splitlines()[1]


def test_diff(job, capsys):
    paths = [str(job / "checkpoints" / f"step-{step:08d}") for step in (8, 12)]
    assert main(["checkpoint", "diff", *paths]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"batch_size +5 +7\n", shown)
    assert re.search(r"step +8 +12\n", shown)
    assert "1 tensors differ." in shown
    assert "weight weight  differs by up to 0.5" in shown
    assert main(["checkpoint", "diff", paths[0], paths[0]]) == 0
    assert capsys.readouterr().out == "The manifests agree.\nEvery tensor is the same, bit for bit.\n"


def test_what_cannot_be_done_is_said_in_one_line(capsys):
    assert main(["checkpoint", "show", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("xpmir-uform: nowhere holds no checkpoint")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diff", "one"], "the following arguments are required: OTHER"),
        (["verify", "one", "two"], "unrecognized arguments: two"),
        (["export", "one", "two", "--step", "3", "--best"], "not allowed with argument --step"),
    ],
)
def test_arguments_that_an_action_does_not_take_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


ESCAPES = "red\x1b[31m\x07\x9b2J\u202e\nwhole    all of it"


def test_a_strangers_manifest_is_printed_without_characters_that_a_terminal_obeys(job, capsys):
    folder = (job / "checkpoints" / "last").resolve()
    values = manifest.read(folder)
    values["config"][ESCAPES] = values["environment"]["device_name"] = values["identifier"] = ESCAPES
    values["audits"][0]["reason"] = values["audits"][0]["fields"]["batch_size"][0] = ESCAPES
    values["versions"][ESCAPES] = ESCAPES
    (folder / manifest.NAME).write_text(seal(values))
    other = job / "checkpoints" / "step-00000008"
    for arguments in (["show", folder], ["lineage", folder], ["diff", folder, other], ["verify", job]):
        main(["checkpoint", *map(str, arguments)])
    shown, err = capsys.readouterr()
    assert "red\\x1b[31m\\x07\\x9b2J\\u202e" in shown
    assert all(part.isprintable() or part == "\n" for part in shown + err)
    assert not any(line.startswith("whole    all of it") for line in (shown + err).splitlines())


@pytest.mark.parametrize("action", ["show", "verify", "lineage", "export"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"{" * 9, b"\0" * (17 << 20), b'{"digest": ' + b"9" * 5000 + b"}"])
def test_a_strangers_manifest_ends_in_one_line(job, tmp_path, capsys, action, content):
    folder = (job / "checkpoints" / "last").resolve()
    (folder / manifest.NAME).write_bytes(content)
    assert main(["checkpoint", action, str(folder), *([str(tmp_path / "out")] if action == "export" else [])]) == 1
    out, err = capsys.readouterr()
    assert "manifest.json" in out + err
    assert len((out + err).splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error", [Occupied("another process writes x"), ValueError("it is\x1b[2J"), OSError("no disk")]
)
def test_what_stops_a_command_is_one_line(job, tmp_path, capsys, monkeypatch, error):
    def stop(*arguments):
        raise error

    monkeypatch.setattr("xpmir_uform.export.pretrained.export_checkpoint", stop)
    assert main(["checkpoint", "export", str(job), str(tmp_path / "model")]) == 1
    assert re.fullmatch(r"xpmir-uform: [ -~]+\n", capsys.readouterr().err)


def test_the_console_script_is_there(job):
    script = Path(sys.executable).with_name("xpmir-uform")
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    done = subprocess.run([script, "checkpoint", "verify", job], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step-00000012" in done.stdout
