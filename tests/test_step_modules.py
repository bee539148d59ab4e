"""Modules of users within the model: what microbatches would decide is refused by name; hooks draw by step."""

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from experimaestro import Param
from invariance import ALONE, Killed, Pieces, config, job, run_here, run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import PooledHead, UFormEncoder
from xpmir_uform.base.configuration import default


class Codebook(nn.Module):
    """Counts what it sees in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("never", torch.full((2,), -torch.inf))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return x


class Constant(nn.Module):
    """Has buffers, and changes none that is saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([-torch.inf, torch.nan, 1.0]))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.cache = torch.zeros(len(x))
        return x * self.mask[2]


class Transposed(nn.Module):
    """A module that wants channels first."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.T[None])[0].T


MODULES = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(16),
    "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(16, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(16),
    "InstanceNorm1d": lambda: Transposed(nn.InstanceNorm1d(16, track_running_stats=True)),
    "_SpectralNorm": lambda: spectral_norm(nn.Linear(16, 16)),
    "Linear": lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
    "Codebook": Codebook,
    "LayerNorm": lambda: nn.LayerNorm(16),
    "Constant": Constant,
    "BatchNorm1d in evaluation mode": lambda: nn.BatchNorm1d(16),
}


class Extended(UFormEncoder):
    """An encoder with one more module behind its pooled head."""

    __xpmid__ = "test.extended"

    extra: Param[str] = default("LayerNorm")

    def __initialize__(self):
        super().__initialize__()
        self.more = MODULES[self.extra]()

    def train(self, mode=True):
        super().train(mode)
        if "evaluation" in self.extra:
            self.more.eval()
        return self

    def forward(self, packed):
        outputs = super().forward(packed)
        name = "bytes" if outputs.embeddings is None else "embeddings"
        return outputs._replace(**{name: self.more(getattr(outputs, name))})


def extended(extra, heads=None, **params):
    made = config(**{"precision": "32-true", "epochs": 1, "keep": 100, "heads": heads, **params})
    heads = heads or {"pooled": PooledHead.C(width=16)}
    made.model = Extended.C(depth=1, hidden=128, image=made.model.image, seed=1, extra=extra, **heads)
    return made


@pytest.mark.parametrize("name", list(MODULES)[:7])
def test_what_microbatches_would_decide_is_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=rf"more.*{name.partition(' ')[0]}"):
        run_here(extended(name), tmp_path)


@pytest.mark.parametrize("name", list(MODULES)[7:])
def test_what_they_do_not_decide_is_trained(tmp_path, name):
    run_here(extended(name), tmp_path)


def test_a_rank_without_microbatches_does_not_wait_for_buffers(tmp_path):
    """DDP would broadcast buffers at each pass, which that rank does not make."""

    def masked(**params):
        return extended("Constant", batch_size=2, **ALONE, **params)

    run_here(masked(), tmp_path / "one")
    run_ranks(3, lambda rank, folder: run_here(masked(devices=3), folder), tmp_path / "three")
    one, three = (load_file(job(tmp_path / name) / "checkpoints/last/model.safetensors") for name in ("one", "three"))
    for name, parameter in one.items():
        torch.testing.assert_close(three[name], parameter, rtol=1e-3, atol=1e-3, equal_nan=True)


class Draws(StepTrainingHook):
    """Keeps what a hook draws after each step, and ends the run before one."""

    __xpmid__ = "test.draws"
    drawn: ClassVar[dict[int, tuple]] = {}
    kill: ClassVar[int] = 0

    def before(self, state):
        if state.steps == Draws.kill:
            raise Killed

    def after(self, state):
        Draws.drawn[state.steps] = (torch.rand(1).item(), np.random.rand(), random.random())


def test_hooks_draw_by_step_whatever_microbatches_and_interruptions(tmp_path):
    def drawn(folder, batcher=None, kill=0):
        made = config(batcher, precision="32-true", epochs=1, checkpoint_steps=1)
        made.hooks = [Draws.C()]
        Draws.kill = kill
        run_here(made, folder)
        return dict(Draws.drawn)

    whole = drawn(tmp_path / "whole")
    assert len({value for values in whole.values() for value in values}) == 15
    Draws.drawn.clear()
    with pytest.raises(Killed):
        drawn(tmp_path / "killed", kill=3)
    assert drawn(tmp_path / "killed", Pieces.C(size=3)) == whole
