"""Losses and gradients that are not finite: once, many times in a row, on one rank of two."""

import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from faults.changes import ROUNDING
from faults.harness import Lab, Row, Setup, before, send
from faults.training import LAST, Acts

BAD = 6
MOST = 3
VALUES = {"NaN": math.nan, "inf": math.inf}
ALL = {"checkpoint_steps": 1, "keep": LAST + 1}


def poison(where: str, value: float, steps: Sequence[int], rank: int | None = None) -> Setup:
    """Multiplies loss or gradient of some steps, on one rank or all."""

    def setup(here: int) -> None:
        if rank in (None, here):
            setattr(Acts, where, dict.fromkeys(steps, value))

    return setup


def rows(lab: Lab) -> Iterator[Row]:
    """Once, in a row, on one rank."""
    kinds = [(where, name) for where in ("loss", "gradient") for name in VALUES]
    for where, name in lab.spread(kinds, 2):
        yield once(lab, where, name)
    for where, name in lab.spread(kinds, 1):
        yield in_a_row(lab, where, name)
    row = Row("NaN in the loss or the gradient of one rank of two, once")
    for where in lab.spread(("loss", "gradient"), 1):
        whole = lab.reference(poison(where, math.nan, [BAD]))
        trial = lab.trial()
        attempt = trial.attempt(poison(where, math.nan, [BAD], rank=1), 2)
        row.add(attempt.ending.status, lab.check(trial, whole, tolerance=ROUNDING), where)
    yield row


def once(lab: Lab, where: str, name: str) -> Row:
    """The step moves nothing; killed after it and run again, the end is that of the same run without the kill."""
    row, fault = Row(f"{name} in the {where} of one step, then SIGKILL"), poison(where, VALUES[name], [BAD])
    trial = lab.trial()
    trial.attempt(fault, **ALL)
    lost = moved(trial.checkpoints)
    whole = lab.reference(fault)
    row.add(trial.attempts[-1].ending.status, [*lost, *lab.check(trial, whole, keep=LAST + 1)])
    for kill in lab.spread((BAD, BAD + 1, BAD + 2), 1):
        trial = lab.trial()
        trial.attempt(both(fault, before(kill, send(signal.SIGKILL))))
        trial.attempt(fault)
        row.add(trial.attempts[0].ending.status, lab.check(trial, whole), f"killed before {kill}")
    return row


def both(first: Setup, second: Setup) -> Setup:
    """Two faults in one run."""

    def setup(rank: int) -> None:
        first(rank)
        second(rank)

    return setup


def moved(checkpoints: Path) -> list[str]:
    """What the bad step changed of weights and optimizer."""
    lost = []
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = (load_file(checkpoints / f"step-{step:08d}" / file) for step in (BAD - 1, BAD))
        lost += [f"step {BAD} moved {name}" for name in one if not torch.equal(one[name], two[name])]
    return lost


def in_a_row(lab: Lab, where: str, name: str) -> Row:
    """So many that the task fails; again with the fault it fails again; without, it goes on after the last commit."""
    row = Row(f"{name} in the {where} of {MOST} steps in a row, which is max_skipped")
    steps = range(BAD, BAD + MOST)
    trial, fault = lab.trial(), poison(where, VALUES[name], steps)
    trial.attempt(fault, max_skipped=MOST)
    again = trial.attempt(fault, max_skipped=MOST)
    lost = [] if "bad_batch.json" in again.ending.message else [f"it says {again.ending.message[:200]}"]
    trial.attempt(max_skipped=MOST)
    whole = lab.reference(poison(where, VALUES[name], steps[:-1]))
    row.add(again.ending.status, [*lost, *lab.check(trial, whole)])
    return row
