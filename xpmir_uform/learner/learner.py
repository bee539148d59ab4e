"""The task that trains."""

import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from experimaestro import Config, Constant, GracefulTimeout, Meta, Param, ResumableTask, tqdm
from xpm_torch import ModuleLoader
from xpm_torch.batchers import RecoverableOOMError
from xpm_torch.context import InitializationHook
from xpm_torch.learner import CheckpointSettings, Learner, LearnerListenerStatus, LearnerOutput
from xpm_torch.metrics import Metrics, ScalarMetric
from xpm_torch.optim import OptimizationHook
from xpm_torch.trainers.context import StepTrainingHook, TrainState

from xpmir_uform.base.configuration import check_submitted, default
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.checkpoints import format, store
from xpmir_uform.checkpoints.compatibility import Subject, config_of, fingerprint, settings_of
from xpmir_uform.checkpoints.config import Checkpoint
from xpmir_uform.learner.context import UFormContext
from xpmir_uform.learner.distributed import Watchdog, any_rank, check_started, limit_waiting, ranks_explained, together
from xpmir_uform.learner.freezing import expression, freeze
from xpmir_uform.learner.job_lock import only_one
from xpmir_uform.learner.optimizers import Optimizers
from xpmir_uform.learner.preemption import Interruptions
from xpmir_uform.learner.redundant_settings import refuse_redundant
from xpmir_uform.learner.step_recorder import Observer, losses_of
from xpmir_uform.learner.upstream_settings import check_warmup
from xpmir_uform.model.precision import compute_in, precision_of
from xpmir_uform.monitoring.alerts import Alerts
from xpmir_uform.trainer.foreign_modules import seed_generators
from xpmir_uform.trainer.loader_workers import workers_explained
from xpmir_uform.trainer.trainer import check_heads, check_widths

logger = logging.getLogger(__name__)


@contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """torch's default type, within which Fabric answers: in ``64-true`` too it converts outputs to that type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "64-true" else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def prepare_precision(plugin: Any, name: str) -> None:
    """Lets Fabric's ``bf16-true`` leave the parameters in float32: :func:`compute_in` rounds copies of them.

    Raises:
        ValueError: Fabric took another precision than ``name``, as it does of ``16-mixed`` on a CPU.
    """
    if plugin.precision != name:
        raise ValueError(f"precision is {name!r} and Fabric would take {plugin.precision!r}: {name} needs a GPU")
    if name == "bf16-true":
        plugin.convert_module = lambda module: module
        plugin.module_init_context = nullcontext


class UFormLearner(Learner, ResumableTask):
    """Trains a model; killed at any moment and run again, it goes on from its last checkpoint.

    An epoch is ``steps_per_epoch`` optimizer steps: after each, metrics are logged, a checkpoint may be saved and the
    listeners are called. The last epoch is always saved.
    """

    __xpmid__ = "uform.learner"

    version: Constant[int] = 2
    """2: parameters are float32 under ``bf16-true``"""

    clip_norm: Param[float] = default(0.0)
    """The norm that the gradient of all parameters is shortened to where it is longer; 0: it never is"""

    frozen: Param[list[str]] = default([])
    """The parameters that are not trained: regular expressions that match the beginning of their names"""

    max_skipped: Meta[int] = default(10)
    """How many steps in a row may be skipped because loss or gradient are not finite; then the task fails"""

    alerts: Meta[Alerts] = default(factory=Alerts.C)
    """What the run tells of by itself"""

    window: Meta[int] = default(50)
    """Steps that the rolling means of the telemetry and of the alerts are taken over"""

    telemetry_bytes: Meta[int] = default(64 * 2**20)
    """A larger ``telemetry.jsonl`` is put aside as ``telemetry-0001.jsonl`` and so on; none is ever deleted"""

    keep: Meta[int] = default(2)
    """How many of the newest checkpoints are kept, and of those at the ends of epochs: ``checkpoints`` offers these"""

    checkpoint_steps: Meta[int] = default(0)
    """Also save whenever this many steps have been made; 0: at the ends of epochs alone"""

    resume_from: Param[Checkpoint | None] = default()
    """A checkpoint of another task to begin with; None: the model's initial weights"""

    force_resume: Meta[str] = default("")
    """Why to go on from a checkpoint of another configuration or other data, which is then recorded; empty: refuse"""

    time_margin: Meta[float] = default(120.0)
    """Save and leave, to be run again, when fewer seconds than these are left to the job"""

    rank_timeout: Meta[float] = default(1800.0)
    """With several ranks: how many seconds a rank may make no progress before all end. Longer than any validation"""

    def __validate__(self):
        if not self.optimizers:
            raise ValueError("optimizers is empty, expected at least one: adamw(schedule) makes them")
        check_heads(getattr(self.trainer, "losses", ()), self.model)
        check_widths(getattr(self.trainer, "losses", ()), self.model)
        ids = [listener.id for listener in self.listeners]
        if len(set(ids)) != len(ids):
            raise ValueError(f"the listeners have the ids {ids}, expected each once")
        for name in (
            "max_epochs", "steps_per_epoch", "keep", "checkpoint_interval", "max_skipped", "window", "telemetry_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for pattern in self.frozen:
            expression("frozen", pattern)
        for optimizer in self.optimizers:
            check_warmup(optimizer.scheduler, self.max_epochs * self.steps_per_epoch)
        if not 0.0 <= self.clip_norm < float("inf"):
            raise ValueError(f"clip_norm is {self.clip_norm}, expected 0 (never) or a positive number")
        if self.checkpoint_steps < 0 or self.time_margin < 0 or self.rank_timeout <= 0:
            raise ValueError(
                f"checkpoint_steps is {self.checkpoint_steps}, time_margin {self.time_margin} and rank_timeout "
                f"{self.rank_timeout}, expected at least 0, at least 0 and more than 0"
            )
        refuse_redundant(self)

    def __submit__(self, dep, add_action):
        """The loader of the trained model, those of its listeners, and its checkpoints.

        ``checkpoints["last"]`` is the whole one that another task may begin with (``resume_from``);
        ``checkpoints[epoch]`` loads the weights of an epoch, of those that are left when the task has ended.

        Raises:
            ValueError: the task, or a configuration that it holds, is not legal.
        """
        check_submitted(self)
        learned_model = dep(self.model.loader_config(self.last_checkpoint_path))
        add_action(self.model.export_action(learned_model, default_name="last"))
        last = Checkpoint.C(path=self.last_checkpoint_path, task=self._task_name())
        epochs: dict[int | str, Config] = {epoch: dep(self._loader_of_epoch(epoch)) for epoch in self._kept_epochs()}
        return LearnerOutput(
            listeners={listener.id: listener.init_task(self, dep, add_action) for listener in self.listeners},
            learned_model=learned_model,
            checkpoints={"last": dep(last), **epochs},
        )

    def _task_name(self) -> str:
        """Type and identifier of this task, which are the names of its job's folder."""
        return "/".join(self.checkpointspath.parent.parts[-2:])

    def _loader_of_epoch(self, epoch: int) -> ModuleLoader:
        path = self.checkpointspath / store.name_of(epoch * self.steps_per_epoch)
        return self.model.loader_config(path, settings=CheckpointSettings.C(epoch=epoch))

    def _kept_epochs(self) -> list[int]:
        """The epochs whose checkpoints are left when the task has ended, however often it was interrupted."""
        if any(getattr(listener, "may_stop", True) for listener in self.listeners):
            return []
        # What is resumed from may be of any epoch; that of the last is saved whichever it is.
        first = 0 if self.resume_from is None else self.max_epochs
        return [epoch for epoch in range(first, self.max_epochs + 1) if self._saves_epoch(epoch)][-self.keep :]

    def _saves_epoch(self, epoch: int) -> bool:
        return epoch % self.checkpoint_interval == 0 or epoch == self.max_epochs

    def _saves_step(self, step: int) -> bool:
        """Whether ``step`` ends an epoch that is saved."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return rest == 0 and self._saves_epoch(epoch)

    def execute(self) -> None:
        """Trains to the end, or until every listener asks to stop.

        Raises:
            GracefulTimeout: it was asked to stop, and is to be run again.
        """
        fabric = self.fabric_config.get_fabric()
        limit_waiting(fabric, self.rank_timeout)
        with Interruptions(self.remaining_time, self.time_margin) as self.interruptions:
            prepare_precision(fabric.strategy.precision, self.fabric_config.precision)
            fabric.launch()
            check_started(fabric, self.fabric_config)
            with (
                ranks_explained(fabric),
                self._alone(fabric),
                default_dtype(self.fabric_config.precision),
                Watchdog(fabric.world_size, self.rank_timeout) as self.watchdog,
            ):
                self._initialize(fabric)
                self._wrap(fabric)
                self._train(fabric)
                self._report_hyperparameters(fabric)

    @contextmanager
    def _alone(self, fabric) -> Iterator[None]:
        """Holds the job's folder, for all ranks."""
        with ExitStack() as stack:
            together(fabric, lambda: stack.enter_context(only_one(self.checkpointspath.parent)))
            yield

    def _initialize(self, fabric) -> None:
        """Builds context, model, trainer, listeners and optimizers, in the order of the stock learner."""
        self.optimizer = Optimizers()
        self.context = UFormContext(
            self.logpath,
            self.checkpointspath,
            self.max_epochs,
            self.steps_per_epoch,
            self.trainer,
            self.model,
            self.optimizer,
            fabric=fabric,
            keep=self.keep,
            planned=self._saves_step,
            subject=Subject(self._task_name(), config_of(self), "", settings_of(self)),
            force_resume=self.force_resume,
            **({"begin": self.resume_from.checked} if self.resume_from else {}),
        )
        for hook in self.hooks:
            self.context.add_hook(hook)
        for hook in self.context.hooks(InitializationHook):
            hook.before(self.context)
        self._seed()
        with fabric.init_module():
            self.trainer.initialize(self.random.state, self.context)
        precision = precision_of(self.fabric_config.precision)
        if precision.computed and not precision.autocast:
            compute_in(self.model, precision.computed)
        self.frozen_counts = freeze(self.model, self.frozen)
        self.context.subject = replace(self.context.subject, data=fingerprint(getattr(self.trainer, "sampler", None)))
        for listener in self.listeners:
            listener.initialize(self, self.context)
        self.optimizer.initialize(
            self.optimizers,
            self.max_epochs * self.steps_per_epoch,
            self.model,
            use_scaler=False,
            hooks=[hook for hook in self.hooks if isinstance(hook, OptimizationHook)],
            trainer_context=self.context,
        )
        self.optimizer.clip_norm = self.clip_norm
        self.trainer.pre_train_setup(fabric)

    def _seed(self) -> None:
        """Seeds the global generators for code that is not ours: ours draws by key."""
        self._seed_of_hooks = int(self.random.state.randint((2**32) - 1))
        np.random.seed(self._seed_of_hooks)
        torch.manual_seed(self._seed_of_hooks)
        random.seed(self._seed_of_hooks)

    def _seed_step(self) -> None:
        """What hooks, listeners and others draw from the global generators is a function of the seed and the step."""
        draw = generator(self._seed_of_hooks, Purpose.HOOKS, self.context.steps)
        seed_generators(int(draw.integers(2**63)))

    def _wrap(self, fabric) -> None:
        """Hands model and optimizers to Fabric."""
        model = self.model.setup_with_fabric(fabric)
        wrapped = fabric.setup_optimizers(*self.optimizer.optimizers)
        # Fabric answers one optimizer alone, not in a sequence.
        self.optimizer.optimizers = list(wrapped) if isinstance(wrapped, (list, tuple)) else [wrapped]
        self.context.state.model = self.context.state._fabric_model = model
        self.trainer.model = self.trainer._fabric_model = model
        self.observer = Observer(self, self.frozen_counts)
        for hook in self.context.hooks(InitializationHook):
            hook.after(self.context)

    def _train(self, fabric) -> None:
        with tqdm(total=self.max_epochs, desc=f"Training ({self.max_epochs} epochs)") as progress:
            for state in self.iter_train(fabric):
                progress.update(state.epoch - progress.n)
                if self._ask_listeners(fabric, state) == LearnerListenerStatus.STOP:
                    logger.warning("stopping after epoch %d since every listener asks for it", state.epoch)
                    self.observer.finish()
                    progress.update(self.max_epochs - progress.n)
                    break
        self._save(fabric)

    def iter_train(self, fabric) -> Iterator[TrainState]:
        """Trains, and yields the state at the end of each epoch, its metrics logged and its checkpoint saved."""
        self.context.load_bestcheckpoint(self.max_epochs)
        self.context.curves.open()
        self.observer.resume()
        # A model that cannot be saved fails here, not after an epoch.
        self._save(fabric)
        self._leave_if_asked(fabric)
        if self.context.steps and self._epoch_is_whole():
            yield self._end_epoch(fabric)
        batches = self.trainer.iter_batches()
        while self.context.steps < self.max_epochs * self.steps_per_epoch:
            self._train_epoch(fabric, batches)
            yield self._end_epoch(fabric)

    def _epoch_is_whole(self) -> bool:
        return self.context.steps % self.steps_per_epoch == 0

    def _train_epoch(self, fabric, batches: Iterator) -> None:
        """Makes the steps that the current epoch still lacks."""
        if self._epoch_is_whole():
            self.context.nextepoch()
            self.context.epoch_metrics = Metrics()
        self.context.state.model.train()
        done = self.context.steps % self.steps_per_epoch
        with (
            workers_explained(),
            self.context,
            tqdm(
                leave=False, initial=done, total=self.steps_per_epoch, desc=f"Train - epoch #{self.context.epoch}"
            ) as progress,
        ):
            for _ in range(done, self.steps_per_epoch):
                start = perf_counter()
                batch = next(batches)
                self._step(batch, perf_counter() - start)
                progress.update(1)
                self._save_between(fabric)
                self._leave_if_asked(fabric)

    def _step(self, batch, wait: float) -> None:
        """One optimizer step, repeated with smaller microbatches when memory runs out."""
        self.context.begin_step()
        self.observer.begin()
        start = perf_counter()
        while True:
            self._seed_step()
            try:
                with self.context.step(self.context.epoch_metrics):
                    for hook in self.context.hooks(StepTrainingHook):
                        hook.before(self.context)
                    self.trainer.process_batch(batch)
                    self.optimizer.losses = losses_of(self.trainer)
                    self.context.add_metric(ScalarMetric("step_seconds", perf_counter() - start, 1))
                break
            except RecoverableOOMError:
                logger.warning("out of memory: the step is run again with smaller microbatches")
        for hook in self.context.hooks(StepTrainingHook):
            hook.after(self.context)
        self.context.end_step()
        self.observer.end(batch, perf_counter() - start, wait)
        self.watchdog.report()

    def _save_between(self, fabric) -> None:
        if self.checkpoint_steps and self.context.steps % self.checkpoint_steps == 0 and not self._epoch_is_whole():
            self._save(fabric)

    def _end_epoch(self, fabric) -> TrainState:
        """Logs and saves; doing it again after a resume changes nothing."""
        metrics = format.metrics_from_json(format.metrics_to_json(self.context.epoch_metrics))
        metrics.all_reduce(fabric).report(self.context.steps, self.context.metrics_logger, "train")
        self.context.metrics_logger.flush()
        if self._saves_epoch(self.context.epoch):
            self._save(fabric)
        return self.context.state

    def _save(self, fabric) -> None:
        self.observer.sync()
        together(fabric, self.context.save_checkpoint)
        self.observer.tell()
        self.watchdog.report()

    def _leave_if_asked(self, fabric) -> None:
        """Between steps: saves and leaves if a signal or the time limit asks any rank to."""
        if any_rank(fabric, self.interruptions.due()):
            self._save(fabric)
            reason = self.interruptions.reason or "another rank was asked to stop"
            raise GracefulTimeout(f"{reason}: step {self.context.steps} is saved, run the task again to go on")

    def _ask_listeners(self, fabric, state: TrainState) -> LearnerListenerStatus:
        """The listeners' decision, the same on every rank."""
        self._seed_step()
        decision = LearnerListenerStatus.NO_DECISION
        for listener in self.listeners:
            decision = decision.update(listener(state))
        value = fabric.broadcast(torch.tensor(decision.value, device=fabric.device), src=0)
        self.watchdog.report()
        return LearnerListenerStatus(int(value))

    def _report_hyperparameters(self, fabric) -> None:
        if fabric.is_global_zero:
            metrics: dict[str, float] = {}
            for listener in self.listeners:
                listener.update_metrics(metrics)
            for name, value in metrics.items():
                self.context.metrics_logger.log_scalar(name, value, self.context.steps)
            self.context.metrics_logger.log_hparams(getattr(self, "__tags__", {}), metrics)
            self.context.metrics_logger.close()
        fabric.barrier()
