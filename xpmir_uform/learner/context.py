"""Training state and context of a run: xpm-torch's, with checkpoints that nothing is lost of."""

import logging
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xpm_torch.metrics import Metrics, MetricsLogger
from xpm_torch.trainers.context import TrainerContext

from xpmir_uform.base.atomic_files import commit_folder, explained, point
from xpmir_uform.base.checked_files import copy_file
from xpmir_uform.checkpoints import compatibility, format, manifest, provenance, store
from xpmir_uform.learner import nonfinite
from xpmir_uform.learner.distributed import together
from xpmir_uform.monitoring.tensorboard import Curves

logger = logging.getLogger(__name__)


class UFormContext(TrainerContext):
    """Saves every tensor as safetensors, every number as JSON, and deletes nothing because of an error.

    Args:
        keep: how many of the newest checkpoints are kept, and of the newest planned ones.
        planned: whether every run of the task saves a checkpoint at that step.
        subject: what is trained.
        force_resume: why a checkpoint of another configuration or other data is gone on from; empty: it is refused.
        begin: answers the folder of another task's checkpoint to begin with; not asked once this task has one.
    """

    def __init__(
        self,
        *args,
        keep: int,
        planned: Callable[[int], bool] = lambda step: True,
        subject: compatibility.Subject,
        force_resume: str = "",
        begin: Callable[[], Path | None] = lambda: None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1: a run with no checkpoint cannot be resumed")
        self.keep = keep
        self.planned = planned
        self.subject = subject
        self.force_resume = force_resume
        self.begin = begin
        self.curves = Curves(lambda: super(UFormContext, self).metrics_logger, self.logpath)
        self.epoch_metrics = Metrics()
        self.counters: dict[str, Any] = {}
        """Numbers of the whole run by name, JSON values, saved with each checkpoint."""
        self.previous: Mapping[str, Any] | None = None
        """The checkpoint that the next one follows."""
        self.audits: list[Mapping[str, Any]] = []
        """Each time that training was resumed: when, from what, and what differed."""
        self.alerts: list[tuple[str, str]] = []
        """Name and message of what has been told and is not yet in the file of alerts."""
        self.whole = True
        """Whether no step is under way: weights, optimizer, schedule and step number belong together."""

    def alert(self, name: str, message: str) -> None:
        """Tells the user of something that is wrong and that training survives."""
        logger.warning("%s: %s", name, message)
        self.alerts.append((name, message))

    def unwrapped_model(self):
        """The model itself, not Fabric's proxy of it."""
        model = self.state.model
        return getattr(model, "_original_module", getattr(model, "module", model))

    @property
    def metrics_logger(self) -> MetricsLogger:
        """Where metrics go; what cannot be written there is warned of once."""
        return self.curves

    @property
    def scaler(self):
        """Fabric's gradient scaler, which ``16-mixed`` has on a GPU; else None."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    def begin_step(self) -> None:
        """Counts a step; until it has ended nothing can be saved."""
        self.nextbatch()
        self.whole = False
        self.state.path = None

    def end_step(self) -> None:
        """All parts of the step were made, or none."""
        self.whole = True

    def nextepoch(self) -> None:
        """Begins the next epoch."""
        self.state.epoch += 1

    # Saving

    def save_checkpoint(self) -> None:
        """Commits a checkpoint of the current step unless there is one, points ``last`` at it and prunes the oldest.

        Raises:
            RuntimeError: a step is under way, or weights or moments are not finite.
            OSError: it cannot be written; those before are as they were.
        """
        if not self.is_global_zero():
            return
        if not self.whole:
            raise RuntimeError(f"step {self.steps} is under way, expected a checkpoint between steps")
        path = self.path / store.name_of(self.steps)
        with explained(
            f"the checkpoint {path} cannot be written",
            "no other was touched; make room and check the permissions of its folder, then run the task again",
        ):
            if self.state.path is None:
                self.state.path = self._commit(path)
            point(self.path / store.LAST, self.state.path.name)
            store.prune(self.path, self.steps, self.keep, self.planned)
            self._look_ahead(self.state.path)

    def _look_ahead(self, path: Path) -> None:
        """Tells, as long as there is time to make room, that a checkpoint as large as this one would not fit."""
        needed, free = store.size_of(path), shutil.disk_usage(path).free
        if free < needed:
            self.alert(
                "full disk",
                f"the next checkpoint takes about {needed:,} bytes, and {free:,} are free where {self.path} is: make "
                "room, or it cannot be saved",
            )

    def _commit(self, path: Path) -> Path:
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.state.optimizer.optimizers]
        nonfinite.check_finite(
            f"step {self.steps} is not saved, the checkpoints before it are as they were",
            nonfinite.written(self.unwrapped_model(), optimizers),
        )
        if path.exists():
            store.set_aside(path, "it was there before this run came to that step", "stale")
        optimizer, state, values = self.state.optimizer.state_dict(), self._state(), self._facts()
        weights = self.unwrapped_model().state_dict()
        commit_folder(path, lambda folder: format.write(folder, weights, optimizer, state, values))
        self.previous = manifest.reference(path, values)
        return path

    def _state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "metrics": format.metrics_to_json(self.epoch_metrics),
            "trainer": self.state.trainer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "counters": self.counters,
        }

    def _fit(self) -> dict[str, Any]:
        model = compatibility.model_layout(self.unwrapped_model().state_dict())
        return compatibility.fit_of(
            self.subject, model, compatibility.optimizer_layout(self.state.optimizer.optimizers)
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.steps,
            "epoch": self.epoch,
            "identifier": self.subject.identifier,
            **self._fit(),
            "settings": dict(self.subject.settings),
            "versions": dict(provenance.versions()),
            "git": provenance.git(),
            **self._arithmetic(),
            "ranks": self.fabric.world_size,
            "previous": self.previous,
            "audits": self.audits,
        }

    def _arithmetic(self) -> dict[str, Any]:
        return provenance.arithmetic(self.fabric, getattr(self.state.trainer, "losses", ()))

    def copy(self, path: Path) -> None:
        """Copies the current step's checkpoint to ``path``, where it outlives it; saves it if need be."""
        if not self.is_global_zero():
            return
        self.save_checkpoint()

        def copy_all(folder: Path) -> None:
            for name in (*manifest.FILES, manifest.NAME):
                copy_file(self.state.path / name, folder / name)

        commit_folder(path, copy_all)

    # Loading

    def load_bestcheckpoint(self, max_epoch: int) -> bool:
        """Restores the newest whole checkpoint of this task, else the one it is to begin with, if there is one.

        All or nothing: everything is read, checked and compared before anything is changed.

        Raises:
            ValueError: it does not fit, or none is whole. Nothing is deleted.
            OSError: the file system does not answer. Nothing is deleted.
        """
        with explained(
            f"the checkpoints in {self.path} cannot be read or ordered just now",
            "nothing was deleted; run the task again once the file system answers",
        ):
            path = together(self.fabric, self._choose)
            if path is None:
                return False
            found = format.read(path)
        own = path.parent == self.path
        different, forced = self._compare(path, found.manifest, own)
        if not own and found.state["steps"] > max_epoch * self.steps_per_epoch:
            raise ValueError(
                f"{path} is of step {found.state['steps']}, expected at most {max_epoch * self.steps_per_epoch}, where "
                "this task ends: raise max_epochs or begin with an earlier checkpoint"
            )
        parameters = dict(self.unwrapped_model().named_parameters())
        weights = {name: tensor for name, tensor in found.weights.items() if name in parameters}
        moments, _ = format.split_optimizers(found.optimizer["optimizers"])
        nonfinite.check_finite(f"{path} is whole, but cannot be gone on from", {**weights, **moments})
        self._apply(found, own)
        self.state.path = path if own else None
        self._audit(found, different, forced)
        return True

    def _choose(self) -> Path | None:
        """The checkpoint to go on from; those found damaged are set aside."""
        store.sweep(self.path)
        found = store.newest(self.path, self.alert)
        return self.begin() if found is None else found[0]

    def _compare(self, path: Path, found: Mapping[str, Any], own: bool) -> tuple[dict[str, list[Any]], str | None]:
        """What differs between a checkpoint and this task, and why that is accepted."""
        different = compatibility.differences(found, self._fit())
        if not different:
            return {}, None
        reason = self.force_resume if own else f"resume_from names it; {self.force_resume}".rstrip("; ")
        table = compatibility.side_by_side(different, ("field", "checkpoint", "task"))
        if any(" layout " in name for name in different):
            raise ValueError(
                f"the tensors of {path} do not fit this task, so it cannot go on from them:\n{table}\nNothing was "
                "changed. Restore what differs, or train in a fresh folder"
            )
        if not reason:
            raise ValueError(
                f"the checkpoint {path} is whole, but of another training:\n{table}\nNothing was changed. Restore what "
                "differs, train in a fresh folder, or give force_resume a reason to go on all the same"
            )
        self.alert("resumed with differences", f"{path}, because: {reason}\n{table}")
        return different, reason

    def _apply(self, found: format.Loaded, own: bool) -> None:
        self.unwrapped_model().load_state_dict(found.weights)
        self.state.optimizer.load_state_dict(found.optimizer)
        self.state.load_state_dict(found.state)
        self.state.trainer.load_state_dict(found.state["trainer"])
        self.epoch_metrics = format.metrics_from_json(found.state["metrics"])
        self.counters = found.state["counters"]
        if self.scaler is not None and found.state["scaler"] is not None:
            self.scaler.load_state_dict(found.state["scaler"])
        if not own:
            # Its epochs may have been longer or shorter than ours.
            self.state.epoch = -(-self.steps // self.steps_per_epoch)

    def _audit(self, found: format.Loaded, different: Mapping[str, Any], reason: str | None) -> None:
        theirs, ours = found.manifest["versions"], provenance.versions()
        names = sorted(theirs.keys() | ours.keys())
        versions = {name: [theirs.get(name), ours.get(name)] for name in names if theirs.get(name) != ours.get(name)}
        if versions:
            self.alert("other versions", compatibility.side_by_side(versions, ("package", "checkpoint", "now")))
        machine = provenance.arithmetic_differences(found.manifest, self._arithmetic())
        if machine:
            self.alert("other arithmetic", compatibility.side_by_side(machine, ("what", "checkpoint", "now")))
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": found.reference,
            "fields": {**different, **machine, **{f"version of {name}": pair for name, pair in versions.items()}},
            "reason": reason,
            "ranks": [found.manifest["ranks"], self.fabric.world_size],
        }
        self.previous = found.reference
        self.audits = [*found.manifest["audits"], entry]
        logger.info("Going on from step %d of %s", found.manifest["step"], found.manifest["identifier"])
