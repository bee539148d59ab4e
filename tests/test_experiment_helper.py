"""The experiment helper: every job is waited for, a failed one is shown and fails the command."""

from types import SimpleNamespace

import pytest
from experimaestro.scheduler.jobs import JobFailureStatus

from xpmir_uform.experiments import UFormExperiment, form_of
from xpmir_uform.experiments.helper import last_lines


class Job:
    """A job that ends after being looked at a few times."""

    def __init__(self, name, log, fails=False, looks=2, reason=None):
        self.relpath, self.stderr, self.fails, self.looks, self.reason = name, log, fails, looks, reason
        self.progress = [SimpleNamespace(progress=0.5, desc="outer"), SimpleNamespace(progress=0.25, desc="inner")]

    @property
    def scheduler_state(self):
        self.looks -= 1
        finished, is_error = (lambda: self.looks <= 0), (lambda: self.fails)
        return SimpleNamespace(finished=finished, is_error=is_error, failure_reason=self.reason)


def helper(jobs):
    made = UFormExperiment(lambda helper, settings: None)
    made.xp = SimpleNamespace(wait=lambda: None)
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
    log.write_text("\n".join(f"line {i}" for i in range(100)) + "\nValueError: the reason\n")
    with pytest.raises(SystemExit) as raised:
        helper([Job(f"job-{i}", log, fails=i == failing) for i in range(3)]).wait()
    assert raised.value.code == 1
    shown = capsys.readouterr().err
    assert f"job-{failing} failed" in shown
    assert "ValueError: the reason" in shown
    assert "line 5\n" not in shown


def test_a_job_that_was_not_run_is_said_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        helper([Job("job-0", tmp_path / "none", fails=True, reason=JobFailureStatus.DEPENDENCY)]).wait()
    assert "job-0 was not run: a job that it needs failed." in capsys.readouterr().err


def test_a_missing_log_is_said_to_be_missing(tmp_path):
    assert last_lines(tmp_path / "none").startswith("(no log: ")


def test_training_without_a_tag_is_refused():
    with pytest.raises(ValueError, match=r"train\(\) was given no tag"):
        helper([]).train(None)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form is 'cubic', expected one of balanced, ranked, sigmoid"):
        form_of("cubic")
