"""The optimizers of a run as one: one scale, one verdict, one norm, for all of their groups."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import torch
from xpm_torch.metrics import ScalarMetric
from xpm_torch.optim import GradientHook, ScheduledOptimizer

from xpmir_uform.learner import nonfinite
from xpmir_uform.learner.context import UFormContext


class Optimizers(ScheduledOptimizer):
    """Steps all optimizers, or none of them when the loss or the gradient is not finite.

    Fabric updates the scale of ``16-mixed`` after each optimizer: the second one would then be unscaled by another
    factor than its gradients were scaled by; and each is skipped by itself. Gradient hooks see unscaled, finite
    gradients.

    Attributes:
        clip_norm: the norm over the gradients of all optimizers that is clipped to; 0: none is.
        losses: of the step to make, the same on every rank.
        outcome: of the last step.
    """

    clip_norm = 0.0
    losses: Mapping[str, float] = {}
    outcome = nonfinite.Outcome()

    def optimizer_step(self, context: UFormContext) -> None:
        """One step of every optimizer, or of none."""
        start = perf_counter()
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]
        scaler = context.scaler
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        outcome = nonfinite.judge(
            tuple(self.losses.values()),
            nonfinite.parameters_of(optimizers),
            None if scaler is None else scaler.get_scale(),
        )
        if not outcome.skipped:
            outcome = self._step(context, optimizers, outcome)
        if scaler is not None:
            scaler.update()
        self.outcome = replace(outcome, rates=rates(optimizers), seconds=perf_counter() - start)

    def scheduler_step(self, context: UFormContext) -> None:
        """One step of every schedule, also when the optimizers made none: the rate of step t is a function of t."""
        with warnings.catch_warnings():
            if self.outcome.skipped:
                # torch takes a first step that was skipped for a wrong order of calls.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for name, rate in self.outcome.rates.items():
                context.add_metric(ScalarMetric(f"learning_rate/{name}", rate, 1))
            for scheduler in filter(None, self.schedulers):
                scheduler.step()
        self.scheduler_steps += 1

    def _step(
        self, context: UFormContext, optimizers: list[torch.optim.Optimizer], outcome: nonfinite.Outcome
    ) -> nonfinite.Outcome:
        """Hooks, clipping, and the step of each optimizer, whose gradients are unscaled and finite."""
        parameters = nonfinite.parameters_of(optimizers)
        hooks = self.context.hooks(GradientHook)
        if hooks:
            with nonfinite.unscaled(context.fabric.strategy.precision):
                for hook in hooks:
                    hook(self)
        norm = nonfinite.gradient_norm(parameters) if hooks else outcome.before
        after = nonfinite.clip(parameters, norm, self.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        nonfinite.check_finite(
            f"step {context.steps} is not saved: lower the learning rate or clip the gradient (its norm is {norm:.4g})",
            nonfinite.written(self.module, optimizers),
        )
        return replace(outcome, clipped=after < outcome.before, after=after)


def rates(optimizers: list[torch.optim.Optimizer]) -> dict[str, float]:
    """The learning rate of each ``optimizer/group``, both counted from 1, before the schedule moves it on."""
    return {
        f"{number}/{place}": float(group["lr"])
        for number, optimizer in enumerate(optimizers, 1)
        for place, group in enumerate(optimizer.param_groups, 1)
    }
