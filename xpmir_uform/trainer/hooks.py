"""Keeps temperatures in range."""

from xpm_torch.trainers.context import StepTrainingHook, TrainerContext


class TemperatureClamp(StepTrainingHook):
    """Clamps the temperatures in place after each optimizer step.

    A clamp inside the forward pass would cut the gradient that brings an excessive temperature back.
    """

    __xpmid__ = "uform.temperature-clamp"

    def after(self, state: TrainerContext) -> None:
        """Called after each step."""
        state.trainer.model.clamp_temperature()
