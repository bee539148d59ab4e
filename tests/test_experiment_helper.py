"""The experiment helper: jobs are watched to their end, failures are told in one line, what was done before is told."""

import errno
import json
import os
import shutil
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from experimaestro.scheduler.experiment import FailedExperiment
from experimaestro.scheduler.jobs import JobFailureStatus
from experimaestro.scheduler.workspace import RunMode

from xpmir_uform import ContrastiveLoss, UFormEncoder, UFormTrainer
from xpmir_uform.base.configuration import validate
from xpmir_uform.recipes import UFormExperiment, form_of
from xpmir_uform.recipes.jobs import attempts, full_disk, full_file_system, history, last_lines, reason, size, watch
from xpmir_uform.recipes.machine import check_devices
from xpmir_uform.recipes.screen import leave_quietly
from xpmir_uform.recipes.stopping import Stopped, signals_raised, stop_jobs
from xpmir_uform.recipes.user_errors import refusal


class Job:
    """A job that ends after being looked at a few times, or that the scheduler loses."""

    def __init__(self, name, log, fails=False, looks=2, reason=None, loses=False):
        self.relpath, self.stderr, self.fails, self.looks, self.reason = name, log, fails, looks, reason
        self.loses, self.path, self.max_retries, self.asked = loses, log.parent, 3, 0
        self.status_path, self.donepath = self.path / "status.json", self.path / "job.done"
        self.progress = [SimpleNamespace(progress=0.5, desc="outer"), SimpleNamespace(progress=0.25, desc="inner")]

    @property
    def scheduler_state(self):
        finished, is_error = (lambda: not self.loses and self.looks <= 0), (lambda: self.fails)
        return SimpleNamespace(finished=finished, is_error=is_error, failure_reason=self.reason)

    def finalState(self):
        self.looks -= 1
        future = Future()
        if self.looks <= 0:
            future.set_result(None)
        return future

    def process_state_dict(self):
        return None if self.looks <= 0 else {"type": "elsewhere"}

    @property
    def scheduler(self):
        def kill_job(job, perform):
            self.asked += 1

        return SimpleNamespace(kill_job=kill_job)


def helper(jobs):
    made = UFormExperiment(lambda helper, settings: None)
    made.xp = SimpleNamespace(wait=lambda: None, workspace=SimpleNamespace(run_mode=RunMode.NORMAL))
    made.pending = [("Training", job) for job in jobs]
    return made


def test_jobs_of_one_label_are_all_waited_for(tmp_path):
    jobs = [Job(str(i), tmp_path / "none") for i in range(3)]
    made = helper(jobs)
    made.wait()
    assert all(job.looks <= 0 for job in jobs)
    assert made.pending == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_any_failed_job_fails_the_command_and_is_shown(tmp_path, capsys, failing):
    log = tmp_path / "job.err"
    log.write_text("\n".join(f"line {i}" for i in range(100)) + "\nValueError: the reason\nCleaning up\n")
    with pytest.raises(FailedExperiment) as raised:
        helper([Job(f"job-{i}", log, fails=i == failing) for i in range(3)]).wait()
    assert str(raised.value) == f"Failed. Training: ValueError: the reason ({log})"
    shown = capsys.readouterr().err
    assert f"job-{failing} failed" in shown
    assert "ValueError: the reason" in shown
    assert "line 5\n" not in shown


def test_a_job_that_was_not_run_is_said_so(tmp_path, capsys):
    jobs = [Job("job-0", tmp_path / "none", fails=True), Job("job-1", tmp_path / "none", fails=True)]
    jobs[1].reason = JobFailureStatus.DEPENDENCY
    with pytest.raises(FailedExperiment, match=r"killed, for want of memory .*; 1 that need it were not run"):
        helper(jobs).wait()
    assert "job-1 was not run: a job that it needs failed." in capsys.readouterr().err


def test_a_job_that_the_scheduler_lost_is_not_waited_for(tmp_path):
    made = helper([Job("job-0", tmp_path / "none", loses=True)])
    made.xp.wait = lambda: pytest.fail("would wait for ever")
    with pytest.raises(FailedExperiment):
        made.wait()


def test_a_plan_that_is_listed_ends_where_it_needs_results():
    made, reached = helper([]), []
    made.xp.workspace.run_mode = RunMode.DRY_RUN

    def plan(helper, settings):
        helper.wait()
        reached.append("results")

    made.callable = plan
    made._carry_out(None)
    assert not reached


def test_a_log_is_shown_without_what_bars_leave(tmp_path):
    log = tmp_path / "job.err"
    log.write_text("a reason\n\nEpoch:  20%|██        | 4/20 [00:01<00:04]\x1b[A\n\n   \x1b[A\nat 50% | of it\n")
    assert last_lines(log) == "a reason\nat 50% | of it\n"


def test_a_file_gets_few_states_of_a_bar(tmp_path, capsys):
    watch("Training", Job("job-0", tmp_path / "none", looks=9))
    assert capsys.readouterr().err.count("Training") <= 3


def test_a_full_disk_is_no_reason_to_hide_another(tmp_path, monkeypatch):
    told = []

    def finalize(status):
        told.append(status)
        raise OSError(errno.ENOSPC, "No space left on device")

    xp = SimpleNamespace(_finalize_run=finalize)
    leave_quietly(xp)
    xp._finalize_run("failed")
    assert told == ["failed"]


def test_a_plan_that_meets_a_full_disk_names_it(tmp_path):
    def plan(helper, settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "loss.png")

    made = helper([])
    made.xp.workspace.path = tmp_path
    made.callable = plan
    with pytest.raises(FailedExperiment, match=r"^Failed: the file system .* is full: .* are free. Make room and run"):
        made._carry_out(None)


def test_a_folder_that_does_not_exist_lies_where_its_parent_does(tmp_path, monkeypatch):
    assert full_file_system(tmp_path / "a" / "b") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=500_000 if path == tmp_path else 0))
    assert "is full: 500.0 kB are free. " in full_file_system(tmp_path / "a" / "b")


def test_a_missing_log_is_said_to_be_missing(tmp_path):
    assert last_lines(tmp_path / "none").startswith("(no log: ")


def test_a_full_disk_is_named_with_what_a_checkpoint_takes(tmp_path, monkeypatch):
    job = Job("job-0", tmp_path / "job.err", fails=True)
    checkpoint = tmp_path / "checkpoints" / "step-00000012"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(3_000_000))
    assert full_disk(job, certain=False) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_900_000))
    assert "is full: 2.9 MB are free, and a checkpoint of this job takes 3.0 MB" in reason(job)
    monkeypatch.undo()
    job.stderr.write_text("OSError: [Errno 28] No space left on device\n")
    assert "a checkpoint of this job takes 3.0 MB" in reason(job)


def test_bytes_are_told_in_units():
    assert [size(count) for count in (0, 999, 1000, 2.5e6, 3e12, 4e15)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "2.5 MB",
        "3.0 TB",
        "4000.0 TB",
    ]


@pytest.mark.parametrize(
    ("count", "steps", "told"),
    [
        (0, [], None),
        (0, [5], "goes on from step 5"),
        (1, [5, 12], "goes on from step 12 (ended without a result once)"),
        (7, [], "begins anew (ended without a result 7 times)"),
    ],
)
def test_what_a_job_did_before_is_told(tmp_path, count, steps, told):
    job = Job("job-0", tmp_path / "job.err")
    job.status_path.write_text(json.dumps({"retry_count": count}))
    for step in steps:
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert history(job, attempts(job)) == told


def test_a_damaged_status_counts_no_attempt(tmp_path):
    job = Job("job-0", tmp_path / "job.err")
    for text in ("", "[]", '{"retry_count": null}'):
        job.status_path.write_text(text)
        assert attempts(job) == 0


def test_a_job_that_is_done_says_since_when(tmp_path):
    job = Job("job-0", tmp_path / "job.err")
    job.donepath.touch()
    os.utime(job.donepath, (1e9, 1e9))
    assert history(job, 0).startswith("is done since 2001-09-")


# --- Signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_with_the_status_of_a_shell(tmp_path, number, status):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as raised, signals_raised(tmp_path / "log"):
        signal.raise_signal(number)
    assert raised.value.code == status
    assert signal.getsignal(number) is before


def test_a_terminal_that_hangs_up_again_is_no_second_signal(tmp_path):
    with signals_raised(tmp_path / "log"):
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)


def test_nohup_is_respected(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raised(tmp_path / "log"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_jobs_are_asked_once_and_not_started_again(tmp_path, capsys):
    job = Job("job-0", tmp_path / "none", looks=6)
    stop_jobs([job, Job("job-1", tmp_path / "none", looks=0)], "SIGTERM")
    assert (job.asked, job.max_retries) == (1, -1)
    assert "SIGTERM: 1 running job is asked to save and stop" in capsys.readouterr().err


def test_nothing_is_told_of_no_jobs(tmp_path, capsys):
    stop_jobs([Job("job-0", tmp_path / "none", looks=0)], "SIGHUP")
    assert capsys.readouterr().err == ""


def test_a_second_signal_asks_again_and_leaves(tmp_path):
    job = Job("job-0", tmp_path / "none", looks=10**9)

    def interrupt(seconds):
        raise Stopped(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xpmir_uform.recipes.stopping.time.sleep", interrupt)
        with pytest.raises(Stopped):
            stop_jobs([job], "SIGINT")
    assert job.asked == 2


# --- Refusals


def test_training_without_a_tag_is_refused():
    with pytest.raises(ValueError, match=r"train\(\) was given no tag"):
        helper([]).train(None)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form is 'cubic', expected one of balanced, ranked, sigmoid"):
        form_of("cubic")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: UFormEncoder.C(dept=2), "dept is no field of UFormEncoder: did you mean depth?"),
        (lambda: ContrastiveLoss.C(frm=None), "frm is no field of ContrastiveLoss: did you mean form?"),
        (lambda: UFormEncoder(depth=2), "UFormEncoder was called without .C"),
        (lambda: ContrastiveLoss(weight=2.0), "ContrastiveLoss was called without .C"),
        (lambda: validate(UFormTrainer.C(losses=[ContrastiveLoss()])), "was called without .C"),
        (lambda: UFormEncoder.C(depth="deep"), "Invalid value for parameter 'depth' of uform.encoder"),
        (lambda: validate(UFormTrainer.C(batch_size=3)), "UFormTrainer lacks "),
    ],
)
def test_a_configuration_that_is_wrong_is_refused_in_one_line(made, message):
    with pytest.raises((ValueError, TypeError, AttributeError)) as raised:
        made()
    told = refusal(raised.value)
    assert message in told
    assert "\n" not in told


def test_a_fault_of_the_program_keeps_its_traceback():
    for error in (TypeError("unsupported operand"), AttributeError("no attribute"), KeyError("x"), RuntimeError("x")):
        assert refusal(error) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accelerator": "gpux"}, "accelerator is 'gpux', expected one of auto, "),
        ({"precision": "17"}, "precision is '17', expected one of "),
        ({"devices": "0"}, "devices is '0', expected a number"),
        ({"devices": "two"}, "devices is 'two', expected a number"),
        ({"accelerator": "cuda"}, "accelerator is 'cuda', but this machine has none"),
    ],
)
def test_devices_that_do_not_exist_are_refused(monkeypatch, changed, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    config = SimpleNamespace(**{"accelerator": "auto", "precision": "32-true", "devices": "1"} | changed)
    with pytest.raises(ValueError, match=message):
        check_devices(config, here=True)


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_more_ranks_than_processors_are_refused_here_alone(monkeypatch, accelerator):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    config = SimpleNamespace(accelerator=accelerator, precision="32-true", devices="5000")
    check_devices(config, here=False)
    with pytest.raises(ValueError, match="devices is '5000', but this machine has 4 of the accelerator 'cpu'"):
        check_devices(config, here=True)
    check_devices(SimpleNamespace(**{**vars(config), "devices": "4"}), here=True)


@pytest.mark.parametrize("devices", ["3", "0,2", "[0, 2]"])
def test_more_devices_than_there_are_are_refused_here_alone(monkeypatch, devices):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = SimpleNamespace(accelerator="cuda", precision="bf16-mixed", devices=devices)
    check_devices(config, here=False)
    with pytest.raises(ValueError, match="this machine has 2 of the accelerator 'cuda'"):
        check_devices(config, here=True)
    for fine in ("auto", "-1", "2", "0,1", "1,"):
        check_devices(SimpleNamespace(**{**vars(config), "devices": fine}), here=True)
