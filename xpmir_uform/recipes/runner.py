"""The helper that an experiment's ``run`` receives."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from experimaestro import Task, stop_tags
from experimaestro.experiments import ConfigurationBase, configuration
from experimaestro.scheduler.workspace import RunMode
from xpm_torch import ModuleLoader
from xpm_torch.experiments.helpers import LearningExperimentHelper
from xpm_torch.learner import Learner, LearnerOutput

from xpmir_uform.base.configuration import check_least, refuse_unnamed, validate
from xpmir_uform.recipes.jobs import (
    FULL,
    attempts,
    failed,
    failure,
    full_file_system,
    history,
    job_of,
    lost,
    summary,
    watch,
)
from xpmir_uform.recipes.machine import check_devices, runs_here
from xpmir_uform.recipes.reading import check_options, check_room, read_by, read_settings
from xpmir_uform.recipes.screen import Screen, leave_quietly, no_carbon_banner
from xpmir_uform.recipes.stopping import Stopped, signals_raised, stop_jobs
from xpmir_uform.recipes.user_errors import Refused, refusal

logger = logging.getLogger(__name__)

MAX_RETRIES = 3


class Listed(Exception):
    """What a plan needs results for is not listed: no task was run."""


@configuration
class ExperimentSettings(ConfigurationBase):
    """What every experiment's YAML file may set."""

    max_retries: int = MAX_RETRIES
    """How many times a command starts a task again that reached its time limit"""

    verbose: bool = False
    """Show all log lines, and not only what matters"""


class UFormExperiment(LearningExperimentHelper):
    """Submits tasks, shows their progress, and fails when one of them fails.

    experimaestro's own command ends with status 0 whatever happens to its jobs.
    """

    max_retries = MAX_RETRIES
    screen: Screen | None = None

    def __init__(self, callable):
        super().__init__(read_by(callable, self.read))
        self.pending: list[tuple[str, Any]] = []

    def read(self, kind: type, data: Any) -> Any:
        """The settings, and the screen as they want it; experimaestro's command asks for them before it begins.

        Raises:
            SystemExit: they are not legal; the message is one line.
        """
        try:
            check_options()
            settings: Any = read_settings(kind, data)
            self.max_retries = getattr(settings, "max_retries", self.max_retries)
            check_least(0, max_retries=self.max_retries)
            check_room()
        except ValueError as error:
            raise SystemExit(f"Refused: {error}") from None
        no_carbon_banner()
        self.screen = Screen(everything=getattr(settings, "verbose", False))
        return settings

    @property
    def runs(self) -> bool:
        """Whether tasks are run, and not only listed (``--run-mode``)."""
        return self.xp.workspace.run_mode is RunMode.NORMAL

    def train(
        self,
        learner: Learner,
        *,
        start: ModuleLoader | None = None,
        launcher: Any = None,
        **tags: str | int | float,
    ) -> LearnerOutput:
        """Submits a learner under ``tags`` and links its TensorBoard folder into the experiment's.

        A learner without a tag would have no name there, and its log folder exists only once it is submitted.

        Args:
            learner: that trains.
            start: trained weights to begin with, as ``learned_model`` of another training of the same model. They are a
                part of the learner's identifier. None: the model's initial weights.
            launcher: where it runs; None: by the workspace's launcher.

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
        init_tasks = [] if start is None else [stop_tags(start)]
        output = self.submit(f"Training {label}", learner, init_tasks=init_tasks, launcher=launcher)
        if self.runs:
            self.monitoring_service.add(learner, learner.logpath)
        return output

    def submit(self, label: str, task: Task, *, launcher: Any = None, **kwargs):
        """Submits a task, to be shown as ``label``; returns what ``task.submit`` does.

        A task that is done is reused, and one that failed, was killed or was stopped before runs again, from its newest
        checkpoint if it has one; both are told.

        Raises:
            ValueError: the task, or a configuration that it holds, is not legal, or this machine lacks its devices.
        """
        validate(task)
        refuse_unnamed(kwargs.get("init_tasks", ()))
        if hasattr(task, "fabric_config"):
            check_devices(task.fabric_config, runs_here(launcher or self.xp.workspace.launcher))
        # experimaestro counts the failures of a task for ever, and passes over a task that has too many.
        output = task.submit(**{"launcher": launcher, "max_retries": sys.maxsize, **kwargs})
        job = job_of(task)
        if self.runs:
            before = attempts(job)
            job.max_retries = before + kwargs.get("max_retries", self.max_retries)
            if told := history(job, before):
                print(f"{label} {told}", file=sys.stderr)
            self.pending.append((label, job))
        return output

    def wait(self) -> None:
        """Shows a bar for each job until all have ended.

        Raises:
            FailedExperiment: jobs failed; their last lines have been printed, and the message is one line.
            Listed: tasks are only listed, so that there is nothing that the plan could go on with.
        """
        if not self.runs:
            raise Listed
        jobs, self.pending = self.pending, []
        for label, job in jobs:
            watch(label, job)
        bad = [(label, job) for label, job in jobs if failed(job)]
        if not any(lost(job) for _, job in jobs):
            self.xp.wait()
        for _, job in bad:
            print(failure(job), file=sys.stderr)
        if bad:
            raise Refused(summary(bad))

    def run(self, args, configuration) -> None:
        """Runs the experiment; a failed job makes the command fail.

        Raises:
            FailedExperiment: jobs failed, or the plan was refused; the message is one line.
            Stopped: a signal was received; the running jobs were asked to save and stop.
        """
        if args:
            raise Refused(f"{' '.join(args)} is no option, expected -c name=value")
        self.screen = self.screen or Screen(everything=True)
        if self.runs:
            leave_quietly(self.xp)
            self.screen.keep(self.xp.workdir / "experiment.log")
            print(f"Log: {self.screen.path}", file=sys.stderr)
        with signals_raised(self.screen.path):
            try:
                self._carry_out(configuration)
            except Stopped as stopped:
                stop_jobs(self.xp.jobs.values(), stopped.name)
                print(f"Stopped by {stopped.name}: run the same command to go on.", file=sys.stderr)
                raise

    def _carry_out(self, configuration) -> None:
        """The plan; errors that a person can mend become one line, and their traceback goes to the log."""
        try:
            self.callable(self, configuration)
            self.wait()
        except Listed:
            print("Nothing was run.", file=sys.stderr)
        except Exception as error:
            message = None if isinstance(error, Refused) else refusal(error)
            if message is None:
                raise
            logger.info("the traceback of what was refused", exc_info=True)
            if full := full_file_system(self.xp.workspace.path, FULL in message):
                raise Refused(f"Failed: {full}") from None
            raise Refused(f"Refused: {message}") from None


uform_experiment: Callable[..., Callable] = UFormExperiment.decorator
