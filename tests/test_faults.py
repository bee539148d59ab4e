"""Faults of every kind in small trainings: nothing is lost; and the checker sees when something is."""

import errno
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
from dataclasses import replace

import pytest
import torch
from experimaestro import taskglobals
from faults import command, damage, harness, hostile, saving, training
from safetensors.torch import load_file, save_file

from xpmir_uform.base.atomic_files import explained
from xpmir_uform.checkpoints import store
from xpmir_uform.monitoring.jsonl import Journal, read
from xpmir_uform.monitoring.tensorboard import Curves
from xpmir_uform.trainer.loader import iterate_steps
from xpmir_uform.trainer.loader_workers import WorkerLost, received, workers_explained

GROUPS = "changes damage disk hostile lost numbers races saving stopping surroundings".split()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    environment = taskglobals.Env.instance()
    before = environment.taskpath
    yield harness.Lab(tmp_path_factory.mktemp("faults"), quick=True)
    environment.taskpath = before


def test_every_group_is_tried_here():
    assert sorted(command.GROUPS) == GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_is_lost(lab, group):
    rows = list(importlib.import_module(f"faults.{group}").rows(lab))
    assert rows
    assert {row.fault: row.lost for row in rows if row.lost} == {}
    assert all(row.outcomes.total() for row in rows)


def test_kills_and_damages_are_many(lab):
    assert saving.count(lab, saving.MIDDLE) >= 16
    assert saving.KILLS >= 200
    assert len(damage.DAMAGES) >= 22


def test_the_table_names_what_failed():
    row = harness.Row("a fault")
    row.add("done", [])
    row.add("stopped", ["a checkpoint is gone"], "here")
    text = command.table({"disk": [row]})
    assert "| a fault | 2 | went on 1, stopped 1 | **1 checks fail** |" in text
    assert row.lost == ["here: a checkpoint is gone"]


# Negative controls


def drop_optimizer(folder):
    save_file({}, folder / "optimizer.safetensors")


def flip_one_bit(folder):
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1).view(dtype=torch.int32)[7] ^= 1
    save_file(tensors, folder / "model.safetensors")


def count_one_more(folder):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "scheduler_steps": state["scheduler_steps"] + 1}))


@pytest.mark.parametrize(
    ("change", "seen"),
    [(drop_optimizer, "differs by"), (flip_one_bit, "differs by"), (count_one_more, "state differs")],
)
def test_control_a_state_that_is_not_whole_is_seen(lab, change, seen):
    trial = lab.trial(8)
    folder = trial.checkpoints / "step-00000008"
    change(folder)
    hostile.reseal(folder)
    assert trial.attempt().ending.status == "done"
    assert any(seen in text for text in lab.check(trial))


def test_control_another_order_of_the_data_is_seen(lab):
    trial = lab.trial(8)

    def one_step_back(rank):
        training.WatchedTrainer.iter_batches = lambda self: iterate_steps(self.dataset, self.context.state.steps - 1, 0)

    assert trial.attempt(one_step_back).ending.status == "done"
    lost = lab.check(trial)
    assert any("other records" in text for text in lost)
    assert any("differs by" in text for text in lost)


def spoil_last(trial, attempt):
    return replace(attempt, after=replace(attempt.after, last="step-00000011"))


def spoil_folders(trial, attempt):
    return replace(attempt, before=replace(attempt.before, folders={"step-00000012": "an older content"}))


def spoil_aside(trial, attempt):
    folders = {**attempt.after.folders, "damaged-step-00000008-0": "a content"}
    return replace(attempt, after=replace(attempt.after, folders=folders))


def spoil_steps(trial, attempt):
    return replace(attempt, steps=[attempt.steps[0], *attempt.steps])


def spoil_message(trial, attempt):
    return replace(attempt, endings=[replace(attempt.ending, status="stopped", message="No space left on device")])


def spoil_telemetry(trial, attempt):
    path = trial.job / "telemetry.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(True)[-1])
    return attempt


@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (spoil_last, "last is step-00000011"),
        (spoil_folders, "the checkpoint of step 12 is gone"),
        (spoil_aside, "was set aside and had no damage"),
        (spoil_steps, "the steps 9 to 12 were made, expected 9"),
        (spoil_message, "the message has no remedy"),
        (spoil_telemetry, "telemetry has the steps"),
    ],
)
def test_control_each_check_sees_its_fault(lab, spoil, seen):
    trial = lab.trial(8)
    trial.attempt()
    trial.attempts[-1] = spoil(trial, trial.attempts[-1])
    assert any(seen in text for text in lab.check(trial))


# What the faults have shown


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "step-00000003").mkdir()

    def refuse(*args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        patched.setattr(os, "scandir", refuse)
        assert list(tmp_path.glob("step-*")) == []
        with pytest.raises(PermissionError):
            store.newest(tmp_path, lambda name, message: None)
    assert store.steps_in(tmp_path) == [3]


def test_telemetry_is_taken_back_before_anything_is_added(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "telemetry.jsonl")
    for step in range(1, 6):
        journal.append({"step": step})

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "truncate", fail)
        assert not journal.rewind(3)
        assert not journal.append({"step": 4, "again": True})
    assert journal.append({"step": 5, "again": True})
    assert [entry["step"] for entry in read(journal.path)] == [1, 2, 3, 5]


def test_curves_that_cannot_be_written_are_told_once(tmp_path, caplog):
    class Full:
        def log_scalar(self, *args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    curves = Curves(Full, tmp_path)
    with caplog.at_level(logging.WARNING):
        curves.log_scalar("loss", 1.0, 1)
        curves.log_scalar("loss", 1.0, 2)
        curves.flush()
        curves.close()
    assert [record.message for record in caplog.records] == [
        f"metrics cannot be written to {tmp_path}, training goes on without them: [Errno 28] No space left on device"
    ]


def test_an_error_of_an_open_file_names_it_and_the_remedy():
    with pytest.raises(OSError, match="make room") as found, explained("notes cannot be written", "make room"):
        raise OSError(errno.ENOSPC, "full")
    assert found.value.errno == errno.ENOSPC
    assert found.value.strerror == "notes cannot be written ([Errno 28] full): make room"


def test_a_worker_that_was_killed_is_told_of_and_another_error_is_left_as_it_is():
    with pytest.raises(RuntimeError, match="fewer num_workers"), workers_explained():
        raise RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {signal.SIGKILL.name}. ")
    with pytest.raises(RuntimeError, match=r"^Caught KeyError in DataLoader worker process 0\."), workers_explained():
        raise RuntimeError("Caught KeyError in DataLoader worker process 0.")


@pytest.fixture(scope="module")
def processes():
    """One that was killed, one that lives."""
    pair = [multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True) for _ in range(2)]
    for process in pair:
        process.start()
    os.kill(pair[0].pid, signal.SIGKILL)
    yield pair
    pair[1].kill()


SHOWN = [
    ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),
    BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)),
    EOFError(),
    pickle.UnpicklingError("pickle data was truncated"),
    RuntimeError("unable to open shared memory object </torch_7_8_9> in read-write mode"),
    FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/tmp/pymp-7/listener-8"),
]


@pytest.mark.parametrize("error", SHOWN, ids=lambda error: type(error).__name__)
def test_a_lost_worker_is_told_of_however_it_shows_itself(processes, error):
    def steps():
        yield 1
        raise error

    found = received(steps(), processes)
    assert next(found) == 1
    with pytest.raises(WorkerLost, match=r"was ended by SIGKILL.*fewer num_workers") as told:
        next(found)
    assert told.value.__cause__ is error


def test_an_error_while_every_worker_lives_or_that_one_sent_is_left_as_it_is(processes, monkeypatch):
    monkeypatch.setattr("xpmir_uform.trainer.loader_workers.NOTICED_SECONDS", 0.1)
    for workers, text in (
        (processes[1:], "of another kind"),
        (processes, "Caught EOFError in DataLoader worker process 1."),
    ):
        with pytest.raises(EOFError, match=text), workers_explained(workers):
            raise EOFError(text)
