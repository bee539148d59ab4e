"""Killed while it saves, at every operation on a file; and killed at random moments, again and again."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial

from faults import checker
from faults.harness import Lab, Row, Setup, Trial, inject
from faults.injection import kill_at
from faults.training import LAST, STEPS, Acts

MIDDLE = STEPS + 2
KILLS = 200
LONG_EPOCHS = 150
PATIENCE_SECONDS = 1200


def rows(lab: Lab) -> Iterator[Row]:
    """A kill at each operation of the save after a step in the middle of an epoch, and of the last save and the end."""
    yield kills(lab, "SIGKILL at each operation of a save inside an epoch", MIDDLE)
    yield kills(lab, "SIGKILL at each operation of the last save and of ending", LAST)
    yield kills(lab, "SIGKILL at each operation of the first save", 1)
    yield at_random(lab)


def one_save(trial: Trial, step: int, at: int) -> Setup:
    """Kills at operation ``at`` after the beginning of a step, up to the beginning of the next one."""
    if step == 1:
        return inject(trial, kill_at(at))

    def setup(rank: int):
        operations = inject(trial, kill_at(at), step)(rank)
        Acts.before_step[step + 1] = lambda: os._exit(1) if at < 0 else None
        return operations

    return setup


def count(lab: Lab, step: int) -> int:
    """The operations of a save."""
    trial = lab.trial(0 if step == 1 else step - 1)

    def setup(rank: int):
        operations = inject(trial, kill_at(-1), 0 if step == 1 else step)(rank)
        stop = 1 if step == 1 else step + 1
        Acts.before_step[stop] = lambda: trial.job.with_name("count").write_text(str(len(operations.seen)))
        return operations

    trial.attempt(setup)
    counted = trial.job.with_name("count")
    return int(counted.read_text()) if counted.exists() else len(trial.attempts[-1].operations)


def kills(lab: Lab, fault: str, step: int) -> Row:
    """One kill at each operation."""
    row = Row(fault)
    for at in lab.spread(range(count(lab, step)), 4):
        trial = lab.trial(0 if step == 1 else step - 1)
        trial.attempt(one_save(trial, step, at))
        lab.resubmit(row, trial, f"operation {at}")
    return row


def kill_after(seconds: float, child: int) -> None:
    """Kills a process some time after it began."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)


def at_random(lab: Lab) -> Row:
    """One training of many steps, killed at random moments until it has been killed so often; then it may end."""
    kills_wanted = 6 if lab.quick else KILLS
    params = {"epochs": 5 if lab.quick else LONG_EPOCHS}
    whole = lab.trial()
    start = time.monotonic()
    whole.attempt(seconds=PATIENCE_SECONDS, **params)
    longest = 6.0 * (time.monotonic() - start) / params["epochs"] / STEPS + 0.1
    row, trial, draw = Row("SIGKILL at random moments of one training"), lab.trial(), random.Random(7)
    while row.outcomes["killed"] < kills_wanted:
        pause = draw.uniform(0.0, longest)
        attempt = trial.attempt(during=partial(kill_after, pause), **params)
        row.outcomes[attempt.ending.status] += 1
        if attempt.ending.status == "done":
            break
    trial.attempt(seconds=PATIENCE_SECONDS, **params)
    expected = checker.witness(whole.job, whole.attempts)
    row.lost = checker.violations(trial.job, trial.attempts, expected)
    for one in (whole, trial):
        shutil.rmtree(one.folder)
    return row
