"""Loader workers and ranks that die, fail, hang, come late."""

import os
import signal
import time
from collections.abc import Callable, Iterator

from faults.harness import Lab, Row, Setup, before, send
from faults.training import Numbers

STEP = 9
EPOCH = 2
"""Of the data: steps 7 to 9"""


def in_worker(act: Callable[[], object], index: int = 5) -> Setup:
    """Does something before a bag is made in a loader worker."""

    def setup(rank: int) -> None:
        trainer = os.getpid()

        def bad(here: int, epoch: int) -> None:
            if os.getpid() != trainer and (here, epoch) == (index, EPOCH):
                act()

        Numbers.bad = staticmethod(bad)

    return setup


def fail() -> None:
    """What a record that cannot be read does."""
    raise ValueError("bag 5 cannot be read: move it away, or put one back from a copy")


def rows(lab: Lab) -> Iterator[Row]:
    """Workers, then ranks."""
    row = Row("a loader worker dies (SIGKILL)")
    for workers in lab.spread((1, 2), 1):
        trial = lab.trial(4)
        trial.attempt(in_worker(send(signal.SIGKILL)), workers=workers)
        lab.resubmit(row, trial, f"{workers} workers", names="loader worker")
    yield row
    row = Row("a loader worker raises")
    for workers in lab.spread((1, 2), 1):
        trial = lab.trial(4)
        trial.attempt(in_worker(fail), workers=workers)
        lab.resubmit(row, trial, f"{workers} workers", names="bag 5")
    yield row
    row = Row("a loader worker is late by a second")
    trial = lab.trial(4)
    trial.attempt(in_worker(lambda: time.sleep(1)), workers=1)
    row.add(trial.attempts[-1].ending.status, lab.check(trial))
    yield row
    row = Row("a loader worker blocks for ever; SIGTERM, and SIGKILL or SIGTERM after it")
    for last in lab.spread((signal.SIGKILL, signal.SIGTERM), 1):
        trial = lab.trial(4)
        trial.attempt(in_worker(lambda: time.sleep(1e6)), during=lambda child, last=last: end(child, last), workers=1)
        lab.resubmit(row, trial, last.name)
    yield row
    yield from ranks(lab)


def end(child: int, last: int) -> None:
    """As a batch system ends a job."""
    for number in (signal.SIGTERM, last):
        time.sleep(3.0)
        os.kill(child, number)


def ranks(lab: Lab) -> Iterator[Row]:
    """Two ranks, against two ranks without a fault."""
    whole = lab.reference(ranks=2)
    faults = {
        "a rank of two dies (SIGKILL)": before(STEP, send(signal.SIGKILL), 1),
        "rank 0 of two dies (SIGKILL)": before(STEP, send(signal.SIGKILL), 0),
        "a rank of two hangs, rank_timeout 5 s": before(STEP, lambda: time.sleep(1e6), 1),
    }
    for name, fault in lab.spread(list(faults.items()), 1):
        row, trial = Row(name), lab.trial()
        attempt = trial.attempt(fault, 2, rank_timeout=5.0)
        lost = [f"rank {n} is done" for n, ending in enumerate(attempt.endings) if ending.status == "done"]
        trial.attempt(ranks=2)
        # What the transport says of a lost peer names no file; no rank is left waiting.
        ended = " and ".join(sorted(ending.status for ending in attempt.endings))
        row.add(ended, [*lost, *lab.check(trial, whole, names=None)])
        yield row
    row, trial = Row("a rank of two starts two seconds late"), lab.trial()
    attempt = trial.attempt(lambda rank: time.sleep(2.0 * rank), 2)
    row.add(attempt.ending.status, lab.check(trial, whole))
    yield row
