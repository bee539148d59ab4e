"""Saving, pruning, damage and loading in any order, an error or a kill at any file operation: against a model.

The model knows which checkpoints are there, which of them are damaged, and that the state of step t is a function of t.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from faults import injection
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xpmir_uform.checkpoints import format, manifest, store
from xpmir_uform.checkpoints.compatibility import Subject
from xpmir_uform.learner.context import UFormContext
from xpmir_uform.learner.optimizers import Optimizers

FABRIC = L.Fabric(accelerator="cpu", devices=1)
FILES = (*manifest.FILES, manifest.NAME)
KEEP = 2
OPERATIONS = 110
"""A save makes fewer; so does a load"""

CODES = st.sampled_from([errno.EIO, errno.EACCES, errno.ENOSPC])
AT = st.integers(0, OPERATIONS)


def made(folder):
    """The context of a small run that has made no step."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizers = Optimizers()
    optimizers.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1)]
    optimizers.scheduler_factories, optimizers.scheduler_steps, optimizers.scaler = [None], -1, None
    trainer = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    subject = Subject("test.machine/0", {"batch_size": 5}, "0" * 64)
    return UFormContext(
        folder, folder, 10_000, 1, trainer, model, optimizers, fabric=FABRIC, keep=KEEP, subject=subject
    )


def train(context, steps):
    """Steps whose gradients are a function of the step."""
    for _ in range(steps):
        context.begin_step()
        draw = torch.Generator().manual_seed(context.steps)
        for parameter in context.state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        context.state.optimizer.optimizers[0].step()
        context.counters["seen"] = context.steps * 7
        context.end_step()
    return context


def content(context):
    """All that a checkpoint must bring back."""
    optimizer, rest = format.split_optimizers(context.state.optimizer.state_dict()["optimizers"])
    tensors = {**context.state.model.state_dict(), **optimizer}
    values = {name: tensor.tolist() for name, tensor in tensors.items()}
    return values, json.dumps(rest, sort_keys=True), context.steps, context.counters


def digest(folder):
    """A hash of all names and bytes of a folder."""
    held = [(path.name, path.read_bytes() if path.is_file() else b"") for path in sorted(folder.iterdir())]
    return hashlib.sha256(repr(held).encode()).hexdigest()


DAMAGES = {
    "a bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 4]) + path.read_bytes()[1:]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "more": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


class Checkpoints(RuleBasedStateMachine):
    """The folder of one job. ``whole`` and ``damaged``: the steps there are, with the hashes of the former."""

    expected: dict = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "checkpoints"
        self.whole: dict[int, str] = {}
        self.damaged: set[int] = set()
        self.aside = 0
        self.context = None

    def teardown(self):
        shutil.rmtree(self.root)

    def state_of(self, step):
        """What a run has after ``step`` steps."""
        if step not in self.expected:
            self.expected[step] = content(train(made(self.root / "never"), step))
        return self.expected[step]

    def path(self, step):
        """Of a checkpoint."""
        return self.folder / store.name_of(step)

    def everything(self):
        """All checkpoints, also those set aside; what a killed process was writing or removing is none."""
        seen = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        return sorted((path.name, digest(path) if path.is_dir() else path.read_text()) for path in seen)

    def steps(self):
        """Those that have a folder with their name."""
        return sorted([*self.whole, *self.damaged])

    def committed(self, step):
        """A save is through: all but the newest go."""
        self.damaged.discard(step)
        self.whole[step] = digest(self.path(step))
        self.prune([found for found in self.steps() if found <= step][:-KEEP])

    def prune(self, steps):
        """Forgets some."""
        for old in steps:
            self.whole.pop(old, None)
            self.damaged.discard(old)

    def look(self, step):
        """A save of ``step`` was interrupted: it is there as a whole or not at all, and then the older ones may go."""
        if self.path(step).is_dir() and self.whole.get(step) != digest(self.path(step)):
            self.damaged.discard(step)
            self.whole[step] = digest(self.path(step))
        if step in self.whole:
            spare = [found for found in self.steps() if found <= step][:-KEEP]
            self.prune([old for old in spare if not self.path(old).is_dir()])

    @precondition(lambda self: self.context is not None)
    @rule(steps=st.integers(1, 2))
    def save(self, steps):
        """Trains on and saves."""
        train(self.context, steps).save_checkpoint()
        self.committed(self.context.steps)

    @precondition(lambda self: self.context is not None)
    @rule(at=AT, code=CODES, always=st.booleans())
    def save_with_an_error(self, at, code, always):
        """The run ends if the error reaches it; the checkpoints before are as they were."""
        train(self.context, 1)
        step = self.context.steps
        try:
            with injection.Operations(self.folder, injection.fail_at(at, code, always), reads=True):
                self.context.save_checkpoint()
        except OSError as error:
            self.ended(error, str(self.path(step)))
        self.look(step)

    @precondition(lambda self: self.context is not None)
    @rule(at=AT)
    def save_and_be_killed(self, at):
        """In a process of its own, which is killed or is through."""
        step = self.context.steps + 1
        child = os.fork()
        if child == 0:
            injection.Operations(self.folder, injection.kill_at(at)).install()
            train(self.context, 1).save_checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        self.context = None
        self.look(step)

    @precondition(lambda self: self.whole)
    @rule(place=st.integers(0, 3), kind=st.sampled_from(sorted(DAMAGES)), file=st.sampled_from(FILES))
    def damage(self, place, kind, file):
        """Something happens to one of the whole ones."""
        step = sorted(self.whole)[-1 - place % len(self.whole)]
        shutil.rmtree(self.root / "copy", ignore_errors=True)
        shutil.copytree(self.path(step), self.root / "copy")
        DAMAGES[kind](self.path(step) / file)
        self.last_damaged = step, self.whole.pop(step)
        self.damaged.add(step)

    @precondition(lambda self: self.damaged and not self.whole)
    @rule()
    def stop_and_put_back(self):
        """When all are damaged nothing is touched; a copy that is put back is gone on from."""
        before = self.everything()
        with pytest.raises(ValueError, match="put one back"):
            made(self.folder).load_bestcheckpoint(10_000)
        assert self.everything() == before
        step, hashed = self.last_damaged
        shutil.rmtree(self.path(step))
        shutil.copytree(self.root / "copy", self.path(step))
        self.damaged.discard(step)
        self.whole[step] = hashed
        self.context = None

    @precondition(lambda self: self.whole or not self.damaged)
    @rule()
    def load(self):
        """A new process goes on from the newest whole one, and sets the damaged ones after it aside."""
        context = made(self.folder)
        newest = max(self.whole, default=None)
        assert context.load_bestcheckpoint(10_000) == (newest is not None)
        assert content(context) == self.state_of(newest or 0)
        self.put_aside({step for step in self.damaged if step > (newest or 0)})
        assert newest is None or os.readlink(self.folder / "last") == store.name_of(newest)
        self.context = context
        if newest is None:
            context.save_checkpoint()
            self.committed(0)

    @precondition(lambda self: self.whole)
    @rule(at=AT, code=CODES, always=st.booleans())
    def load_with_an_error(self, at, code, always):
        """It goes on from the newest whole one, or says what the file system said; no whole one is touched."""
        context, newest = made(self.folder), max(self.whole)
        try:
            with injection.Operations(self.folder, injection.fail_at(at, code, always), reads=True):
                assert context.load_bestcheckpoint(10_000)
            assert content(context) == self.state_of(newest)
            self.context = context
        except OSError as error:
            self.ended(error, str(self.folder))
            self.untouched(context)
        self.put_aside({step for step in self.damaged if not self.path(step).is_dir()})

    def ended(self, error, named):
        """A run ended by an error that names what it met and says what to do."""
        assert named in str(error)
        assert "run the task again" in str(error)
        self.context = None

    def untouched(self, context):
        """Nothing was applied."""
        assert content(context) == self.state_of(0)

    def put_aside(self, steps):
        """Checks that damaged ones were renamed, and forgets them."""
        self.damaged -= steps
        self.aside += len(steps)
        assert len([path for path in self.folder.glob("damaged-*") if path.is_dir()]) == self.aside

    @invariant()
    def nothing_whole_is_lost(self):
        """Each one that is there is as it was written, and there are no others."""
        for step, hashed in self.whole.items():
            assert digest(self.path(step)) == hashed
        assert store.steps_in(self.folder) == self.steps()

    @invariant()
    def what_can_be_gone_on_from_is_verified(self):
        """Whole ones verify; damaged ones do not."""
        for step in self.whole:
            assert manifest.verify(self.path(step))["step"] == step
        for step in self.damaged:
            with pytest.raises(manifest.Damaged):
                manifest.verify(self.path(step))


class TestCheckpoints(Checkpoints.TestCase):
    """Many orders of events."""

    settings = settings(max_examples=40, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck))
