"""Learning-rate schedule."""

import math

from experimaestro import Param
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from xpm_torch.schedulers import Scheduler

from xpmir_uform.base.configuration import check_least, default


def cosine_rate(step: int, *, warmup: int, steps: int, peak: float, floor: float) -> float:
    """The learning rate of optimizer step ``step`` (the first is 0).

    Rises as ``peak * step / warmup`` to ``peak`` at ``warmup``, then falls as half a cosine to ``floor`` at ``steps``,
    and stays there (Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, one period).
    """
    if step < warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * done)) / 2.0


class CosineSchedule(Scheduler):
    """Linear warm-up to ``learning_rate``, then a cosine to ``min_learning_rate`` over ``steps``.

    The rates are absolute: they replace the optimizer's own ``lr``.
    """

    __xpmid__ = "uform.cosine-schedule"

    learning_rate: Param[float]
    """The highest rate"""

    min_learning_rate: Param[float] = default(0.0)
    """The rate from ``steps`` on"""

    warmup_steps: Param[int] = default(0)
    """Steps of linear warm-up"""

    steps: Param[int] = default(0)
    """Optimizer step at which the lowest rate is reached; 0: the learner's ``max_epochs * steps_per_epoch``"""

    def __validate__(self):
        check_least(0.0, learning_rate=self.learning_rate, min_learning_rate=self.min_learning_rate)
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate is {self.min_learning_rate}, expected 0 to learning_rate ({self.learning_rate})"
            )
        check_least(0, warmup_steps=self.warmup_steps, steps=self.steps)
        if 0 < self.steps <= self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and steps is {self.steps}, expected 0 <= warmup_steps < steps, "
                "or steps 0 for those of the training"
            )

    def rate(self, step: int, training_steps: int) -> float:
        """The learning rate of optimizer step ``step`` in a training of ``training_steps``."""
        return cosine_rate(
            step,
            warmup=self.warmup_steps,
            steps=self.steps or training_steps,
            peak=self.learning_rate,
            floor=self.min_learning_rate,
        )

    def phase(self, step: int, training_steps: int) -> str:
        """Where optimizer step ``step`` is: ``warmup``, ``decay``, ``floor``, or ``constant`` where nothing decays."""
        if step < self.warmup_steps:
            return "warmup"
        if self.learning_rate == self.min_learning_rate:
            return "constant"
        return "decay" if step < (self.steps or training_steps) else "floor"

    def __call__(self, optimizer: Optimizer, num_training_steps: int, *, last_epoch: int = -1, **_) -> LambdaLR:
        """The scheduler of ``optimizer``, at the step after ``last_epoch``."""
        for group in optimizer.param_groups:
            group["lr"] = 1.0
            group["initial_lr"] = 1.0
        return LambdaLR(optimizer, lambda step: self.rate(step, num_training_steps), last_epoch=last_epoch)
