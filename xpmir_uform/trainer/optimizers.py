"""Optimizers of a model: what decays and what does not."""

from typing import Any

from xpm_torch.optim import AdamW, ParameterFilter, ParameterOptimizer
from xpm_torch.schedulers import Scheduler

from xpmir_uform.model import decays


class DecayedParameters(ParameterFilter):
    """Weight matrices and embeddings; neither norms, nor temperatures, nor biases."""

    __xpmid__ = "uform.decayed-parameters"

    def __call__(self, name: str, params: Any) -> bool:
        """Whether the parameter is decayed."""
        return decays(name, params)


def adamw(scheduler: Scheduler, *, weight_decay: float = 0.01, eps: float = 1e-8) -> list[ParameterOptimizer]:
    """AdamW (Loshchilov and Hutter, ICLR 2019) with decay on weight matrices and embeddings alone."""
    return [
        ParameterOptimizer.C(
            optimizer=AdamW.C(weight_decay=weight_decay, eps=eps), scheduler=scheduler, filter=DecayedParameters.C()
        ),
        ParameterOptimizer.C(optimizer=AdamW.C(weight_decay=0.0, eps=eps), scheduler=scheduler),
    ]
