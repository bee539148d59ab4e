"""The optimizers of a run as one."""

from xpm_torch.optim import GradientHook, ScheduledOptimizer

from xpmir_uform.learner.context import UFormContext


class Optimizers(ScheduledOptimizer):
    """Steps all optimizers under one scale of their gradients.

    Fabric updates the scale of ``16-mixed`` after each optimizer: the second one would then be unscaled by another
    factor than its gradients were scaled by. Gradient hooks see scaled gradients, as in the stock learner; clipping by
    Fabric unscales them first.
    """

    def optimizer_step(self, context: UFormContext) -> None:
        """One step of every optimizer."""
        if context.scaler is None:
            super().optimizer_step(context)
            return
        for hook in self.context.hooks(GradientHook):
            hook(self)
        for optimizer in self.optimizers:
            context.scaler.step(getattr(optimizer, "optimizer", optimizer))
        context.scaler.update()
