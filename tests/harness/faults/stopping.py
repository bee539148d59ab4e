"""Signals at every moment, once and twice."""

import os
import signal
from collections.abc import Callable, Iterator

from faults.harness import Lab, Row, Setup, Trial, before, inject, send
from faults.injection import Act
from faults.training import Acts

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
OTHERS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU)
STEP = 11
SIGNALS = {"SIGTERM": (TERM,), "SIGINT": (INT,), "SIGUSR1": (USR1,), "SIGTERM twice": (TERM, TERM)}
"""Sent at every operation; the others, which one handler meets, between steps only."""


def rows(lab: Lab) -> Iterator[Row]:
    """Idle, in a step, while saving, while loading."""
    every = SIGNALS | {number.name: (number,) for number in OTHERS}
    for name, numbers in lab.spread([*every.items()], 3):
        row = Row(f"{name} while it begins, between steps, in a forward pass")
        for setup in (before(0, send(*numbers)), before(STEP, send(*numbers)), forward(send(*numbers))):
            once(lab, row, lambda trial, setup=setup: setup)
        yield row
    for name, numbers in lab.spread([*SIGNALS.items()], 2):
        row = Row(f"{name} at the operations of a save")
        for at in lab.spread(range(0, 80, 4), 2):
            once(lab, row, lambda trial, at=at, numbers=numbers: inject(trial, signal_at(at, numbers), STEP))
        yield row
        row = Row(f"{name} at the operations of loading")
        for at in lab.spread(range(0, 60, 5), 2):
            once(lab, row, lambda trial, at=at, numbers=numbers: inject(trial, signal_at(at, numbers), reads=True))
        yield row


def once(lab: Lab, row: Row, fault: Callable[[Trial], Setup]) -> None:
    """One signal, and the job run again."""
    trial = lab.trial(STEP - 1)
    trial.attempt(fault(trial))
    lab.resubmit(row, trial)


def forward(act: Callable[[], object]) -> Setup:
    """Does something in a forward pass."""

    def setup(rank: int) -> None:
        Acts.in_forward = {STEP: act}

    return setup


def signal_at(at: int, numbers: tuple[int, ...]) -> Act:
    """Sends signals at one operation."""

    def act(number: int, name: str, path: str) -> None:
        if number == at:
            for each in numbers:
                os.kill(os.getpid(), each)

    return act
