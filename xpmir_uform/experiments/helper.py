"""The helper that an experiment's ``run`` receives."""

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from experimaestro import Task, stop_tags
from experimaestro.scheduler.jobs import JobFailureStatus
from tqdm import tqdm
from xpm_torch import ModuleLoader
from xpm_torch.experiments.helpers import LearningExperimentHelper
from xpm_torch.learner import Learner, LearnerOutput

from xpmir_uform.data.checks import validate

SHOWN_LINES = 30
POLL_SECONDS = 0.2


class UFormExperiment(LearningExperimentHelper):
    """Submits tasks, shows their progress, and fails when one of them fails.

    experimaestro's own command ends with status 0 whatever happens to its jobs.
    """

    def __init__(self, callable):
        super().__init__(callable)
        self.pending: list[tuple[str, Any]] = []

    def train(self, learner: Learner, *, start: ModuleLoader | None = None, **tags: str | int | float) -> LearnerOutput:
        """Submits a learner under ``tags`` and links its TensorBoard folder into the experiment's.

        A learner without a tag would have no name there, and its log folder exists only once it is submitted.

        Args:
            learner: that trains.
            start: trained weights to begin with, as ``learned_model`` of another training of the same model. They are a
                part of the learner's identifier. None: the model's initial weights.

        Raises:
            ValueError: there is no tag, or ``start`` loads the weights of another model.
        """
        if start is not None and start.model is not learner.model:
            raise ValueError(
                "start loads its weights into another model than the one that is trained: "
                "give both trainings the same model object"
            )
        if not tags:
            raise ValueError("train() was given no tag, expected at least one, such as seed=1: runs are named by tags")
        for name, value in tags.items():
            learner.tag(name, value)
        label = ", ".join(f"{name}={value}" for name, value in tags.items())
        output = self.submit(f"Training {label}", learner, init_tasks=[] if start is None else [stop_tags(start)])
        self.monitoring_service.add(learner, learner.logpath)
        return output

    def submit(self, label: str, task: Task, **kwargs):
        """Submits a task, to be shown as ``label``; answers what ``task.submit`` does.

        Raises:
            ValueError: the task, or a configuration that it holds, is not legal.
        """
        validate(task)
        output = task.submit(**kwargs)
        self.pending.append((label, job_of(task)))
        return output

    def wait(self) -> None:
        """Shows a bar for each job until all have ended.

        Raises:
            SystemExit: a job failed; its last lines have been printed.
        """
        jobs, self.pending = self.pending, []
        for label, job in jobs:
            watch(label, job)
        self.xp.wait()
        failed = [job for _, job in jobs if state_of(job).is_error()]
        for job in failed:
            print(failure(job), file=sys.stderr)
        if failed:
            raise SystemExit(1)

    def run(self, args, configuration) -> None:
        """Runs the experiment; a failed job makes the command fail."""
        super().run(args, configuration)
        self.wait()


def job_of(task: Any) -> Any:
    """The job of a submitted task."""
    return task.__xpm__.job


def state_of(job: Any) -> Any:
    """Where a job is for the scheduler: the state of its files knows nothing of a job it waits for that failed."""
    return job.scheduler_state


def watch(label: str, job: Any) -> None:
    """Shows the progress of one job until it ends."""
    with tqdm(total=100, desc=label, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}") as bar:
        while not state_of(job).finished():
            levels = job.progress
            if levels:
                bar.n = 100 * levels[0].progress
                inner = [f"{level.desc or ''} {level.progress:.0%}" for level in levels[1:]]
                bar.set_postfix_str(", ".join(inner), refresh=False)
            bar.refresh()
            time.sleep(POLL_SECONDS)
        failed = state_of(job).is_error()
        bar.n = 0 if failed else 100
        bar.set_postfix_str("failed" if failed else "done")


def failure(job: Any) -> str:
    """What a failed job printed last, or that it was not run."""
    if state_of(job).failure_reason is JobFailureStatus.DEPENDENCY:
        return f"\n{job.relpath} was not run: a job that it needs failed."
    return f"\n{job.relpath} failed. The last lines of {job.stderr}:\n{last_lines(job.stderr)}"


def last_lines(path: Path, count: int = SHOWN_LINES) -> str:
    """The last lines of a log, or why there are none."""
    try:
        with path.open(errors="replace") as file:
            return "".join(deque(file, count))
    except OSError as error:
        return f"(no log: {error})"


uform_experiment = UFormExperiment.decorator
