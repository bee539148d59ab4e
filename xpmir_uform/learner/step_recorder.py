"""What the learner tells of its steps: a line of telemetry each, and alerts; and when it can go on no longer."""

import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from xpm_torch.metrics import ScalarMetric

from xpmir_uform.checkpoints.provenance import back_ends
from xpmir_uform.learner import nonfinite
from xpmir_uform.learner.distributed import any_rank
from xpmir_uform.learner.freezing import count_parameters
from xpmir_uform.monitoring.alerts import AlertLog, Finding, Monitor
from xpmir_uform.monitoring.telemetry import ALERTS, Telemetry

if TYPE_CHECKING:
    from xpmir_uform.learner.learner import UFormLearner

PARTS = ("forward", "loss", "backward")


class Observer:
    """Counts what became of every step on all ranks; rank 0 writes it down and raises the alerts.

    Args:
        learner: with its context, trainer and optimizers as they train.
        frozen: how many numbers each pattern froze.
    """

    def __init__(self, learner: "UFormLearner", frozen: Mapping[str, int]) -> None:
        self.learner = learner
        self.context = learner.context
        self.fabric = self.context.fabric
        self.job = learner.logpath.parent
        self.frozen = dict(frozen)
        self.counts = nonfinite.Counts()
        self.monitor = Monitor(learner.alerts, learner.window)
        self.alerts = AlertLog(self.job / ALERTS)
        self.telemetry = Telemetry(
            self.job,
            facts(learner),
            learner.max_epochs * learner.steps_per_epoch,
            learner.window,
            learner.telemetry_bytes,
        )

    def resume(self) -> None:
        """Goes on after the context's step, as if the steps after it had never been made."""
        self.counts.load_state_dict(self.context.counters)
        if self.fabric.is_global_zero:
            self._recall()
            self.alerts.rewind(self.context.steps)
        self.tell()

    def tell(self) -> None:
        """Keeps the alerts of the context, about what is no matter of a step."""
        if self.fabric.is_global_zero:
            for name, message in self.context.alerts:
                self.alerts.write(
                    Finding(name, None, None, message),
                    self.context.steps,
                    self.context.epoch,
                    self.context.metrics_logger,
                )
        self.context.alerts.clear()

    def _recall(self) -> None:
        """Takes up the windows and the episodes of alerts where the telemetry ends; a log never stops a training."""
        lines = self.telemetry.resume(self.context.steps, self.monitor.memory)
        try:
            self.monitor.recall(lines)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            self.telemetry.restart(f"a line is not of this telemetry ({type(error).__name__}: {error})")
            self.monitor = Monitor(self.learner.alerts, self.learner.window)

    def begin(self) -> None:
        """To be called before each step."""
        if self.fabric.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.fabric.device)

    def end(self, batch: Any, seconds: float, wait: float) -> None:
        """To be called after each step.

        Args:
            batch: what it was made of.
            seconds, wait: that the step took, and that was waited for the batch before.

        Raises:
            RuntimeError: too many steps in a row were skipped, or an alert that ends the task was raised.
        """
        outcome = self.learner.optimizer.outcome
        self.counts.add(outcome)
        self.context.counters = self.counts.state_dict()
        for name, value in (("gradient_norm", outcome.before), ("skipped", float(outcome.skipped))):
            self.context.epoch_metrics.add(ScalarMetric(name, value, 1))
        begun = self._write(seconds, wait) if self.fabric.is_global_zero else []
        self._check_row(batch)
        self._check_alerts(begun)

    def finish(self) -> None:
        """Training was ended before its last step: nothing remains."""
        if self.fabric.is_global_zero:
            self.telemetry.finish()

    def sync(self) -> None:
        """Waits until all that was written is on the disk: a checkpoint must not know of steps that it does not."""
        if self.fabric.is_global_zero:
            self.telemetry.journal.sync()
            self.alerts.journal.sync()

    def _write(self, seconds: float, wait: float) -> list[Finding]:
        line = self.telemetry.write(self._line(seconds, wait))
        begun = self.monitor.observe(line)
        for finding in begun:
            self.alerts.add(finding, line["step"], line["epoch"], self.context.metrics_logger)
        return begun

    def _line(self, seconds: float, wait: float) -> dict[str, Any]:
        """What is known of the step by itself."""
        last, outcome = getattr(self.learner.trainer, "last", None), self.learner.optimizer.outcome
        losses = dict(self.learner.optimizer.losses)
        counts = self.counts.state_dict()
        counts.pop("row")
        return {
            "step": self.context.steps,
            "epoch": self.context.epoch,
            "loss": objective(self.learner.trainer, losses),
            "losses": losses,
            "stats": {} if last is None else statistics(last.values),
            "lacking": {} if last is None else {name: v.lacking for name, v in last.values.items() if v.lacking},
            "parameters": self._parameters(),
            "learning_rate": outcome.rates,
            "phase": phases(self.learner.optimizer, self.context.steps, outcome.rates),
            "gradient_norm": {"before": outcome.before, "after": outcome.after},
            "clipped": outcome.clipped,
            "skipped": outcome.skipped,
            "counts": counts,
            "scale": outcome.scale,
            **{name: getattr(last, name, None) for name in ("items", "tokens", "bytes", "microbatches")},
            "seconds": {
                "step": seconds,
                **{part: None if last is None else last.seconds.get(part) for part in PARTS},
                "optimizer": outcome.seconds,
                "wait": wait,
            },
            "memory": {
                "predicted": getattr(getattr(self.learner.trainer, "batcher_worker", None), "predicted", None),
                "peak": peak_bytes(self.fabric.device),
            },
        }

    def _parameters(self) -> dict[str, Any]:
        """How many there are, and are trained: hooks may freeze some at any step."""
        model, optimizers = self.context.unwrapped_model(), self.learner.optimizer.optimizers
        total, trainable = count_parameters(model, optimizers)
        return {"total": total, "trainable": trainable, "frozen": self.frozen}

    def _check_row(self, batch: Any) -> None:
        if self.counts.row < self.learner.max_skipped:
            return
        step, losses = self.context.steps, self.learner.optimizer.losses
        if self.fabric.is_global_zero:
            nonfinite.describe_batch(self.job, step, batch.batch.keys, losses, self.counts)
        raise RuntimeError(
            f"steps {step - self.counts.row + 1} to {step} were skipped, {self.counts.row} in a row: loss or gradient "
            f"were not finite. No weight was changed by them. {nonfinite.BAD_BATCH} in {self.job} names the items of "
            "the last one: look at these, lower the learning rate, or raise max_skipped, and run the task again"
        )

    def _check_alerts(self, begun: list[Finding]) -> None:
        alerts = self.learner.alerts
        failing = [finding for finding in begun if alerts.fails(finding.name)]
        # What is measured by the clock is not the same on every rank, and only rank 0 watches.
        if not alerts.fail_on_alert or not any_rank(self.fabric, bool(failing)):
            return
        what = "; ".join(f"{finding.name}: {finding.message}" for finding in failing) or "rank 0 tells which"
        raise RuntimeError(f"an alert of fail_on_alert ends the task at step {self.context.steps}: {what}")


def facts(learner: "UFormLearner") -> dict[str, Any]:
    """What every line repeats."""
    used = back_ends(getattr(learner.trainer, "losses", ()), learner.context.fabric.device).values()
    return {
        "seed": learner.random.seed,
        "backend": ",".join(sorted({backend for _, backend in used})),
        "precision": learner.fabric_config.precision,
        "identifier": learner.context.subject.identifier,
    }


def losses_of(trainer: Any) -> dict[str, float]:
    """The losses of the last step, the same on every rank; none from a trainer that does not tell."""
    last = getattr(trainer, "last", None)
    return {} if last is None else {name: float(value.value) for name, value in last.values.items()}


def objective(trainer: Any, losses: Mapping[str, float]) -> float | None:
    """The weighted sum of the losses; None: there are none."""
    weights = {loss.NAME: loss.weight for loss in getattr(trainer, "losses", ())}
    return sum(weights[name] * value for name, value in losses.items()) if losses else None


def statistics(values: Mapping[str, Any]) -> dict[str, float]:
    """The statistics of all losses by ``loss/statistic``."""
    return {f"{name}/{key}": float(number) for name, value in values.items() for key, number in value.stats.items()}


def phases(optimizer: Any, step: int, rates: Mapping[str, float]) -> dict[str, str]:
    """Where the schedule of each ``optimizer/group`` was in the step that has just been made.

    A schedule that has no ``phase`` is told by the rate that follows.
    """
    found = {}
    for name, rate in rates.items():
        number, place = (int(part) - 1 for part in name.split("/"))
        schedule = optimizer.scheduler_factories[number]
        if hasattr(schedule, "phase"):
            found[name] = schedule.phase(step - 1, optimizer.num_training_steps)
        else:
            following = optimizer.optimizers[number].param_groups[place]["lr"]
            found[name] = "warmup" if following > rate else "decay" if following < rate else "constant"
    return found


def peak_bytes(device: torch.device) -> int:
    """The most memory that was allocated on a GPU since the step began; elsewhere by this process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
