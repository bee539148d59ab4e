"""Training state and context of a run: xpm-torch's, with checkpoints that survive a kill."""

import logging
from pathlib import Path

from xpm_torch.metrics import Metrics
from xpm_torch.trainers.context import TrainerContext, TrainState

from xpmir_uform.learner import checkpoint
from xpmir_uform.learner.files import commit_folder, point, remove

logger = logging.getLogger(__name__)


class UFormContext(TrainerContext):
    """Saves every tensor as safetensors, every number as JSON, and deletes nothing because of an error."""

    def __init__(self, *args, keep: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.keep = keep
        self.epoch_metrics = Metrics()

    def unwrapped_model(self):
        """The model itself, not Fabric's proxy of it."""
        model = self.state.model
        return getattr(model, "_original_module", getattr(model, "module", model))

    @property
    def scaler(self):
        """Fabric's gradient scaler, which ``16-mixed`` has on a GPU; else None."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    def save_checkpoint(self) -> None:
        """Commits a checkpoint of the current step, points ``last`` at it and prunes the oldest."""
        if not self.is_global_zero():
            return
        name = checkpoint.name_of(self.steps)
        path = self.path / name
        if not path.exists():
            state = {
                "epoch": self.epoch,
                "steps": self.steps,
                "metrics": checkpoint.metrics_to_json(self.epoch_metrics),
                "trainer": self.state.trainer.state_dict(),
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
            }
            commit_folder(
                path,
                lambda folder: checkpoint.write(
                    folder, self.unwrapped_model(), self.state.optimizer.state_dict(), state
                ),
            )
        self.state.path = path
        point(self.path / "last", name)
        for step in checkpoint.steps_in(self.path)[: -self.keep]:
            remove(self.path / checkpoint.name_of(step))

    def load_bestcheckpoint(self, max_epoch: int) -> bool:
        """Restores the newest checkpoint, if there is one.

        Raises:
            ValueError: it is damaged or does not fit; no weight is changed and nothing is deleted.
        """
        steps = checkpoint.steps_in(self.path)
        if not steps:
            return False
        path = self.path / checkpoint.name_of(steps[-1])
        logger.info("Going on from %s", path)
        optimizer, state = checkpoint.read(path)
        self.state.optimizer.load_state_dict(optimizer)
        self.unwrapped_model().load_model(path / checkpoint.MODEL)
        self.state.load_state_dict(state)
        self.state.trainer.load_state_dict(state["trainer"])
        self.epoch_metrics = checkpoint.metrics_from_json(state["metrics"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.state.path = path
        return True

    def copy(self, path: Path) -> None:
        """Copies the current weights to ``path`` as ``model/``."""
        if self.is_global_zero():
            commit_folder(path, lambda folder: self.unwrapped_model().save_model(folder / TrainState.MODEL_DIR))

    def nextepoch(self) -> None:
        """Begins the next epoch."""
        self.state.epoch += 1
