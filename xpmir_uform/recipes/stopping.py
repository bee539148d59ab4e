"""Ctrl-C, SIGTERM and a closed terminal: the running jobs are asked to save and stop, then the command leaves."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from xpmir_uform.recipes.jobs import POLL_SECONDS, ended

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(SystemExit):
    """A signal was received; the exit status is 128 and its number, as a shell's."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def signals_raised(log: Path) -> Iterator[None]:
    """Within, a signal raises :class:`Stopped` in the main thread.

    A terminal that is closed hangs up more than once, and cannot be written to: what follows goes to ``log``.
    """
    terminals = [number for number in (1, 2) if os.isatty(number)]
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            if received:
                return
            _redirect(terminals, log)
        received.append(number)
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup has SIGHUP ignored, and means it.
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _redirect(descriptors: Iterable[int], path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor in descriptors:
        os.dup2(target, descriptor)
    os.close(target)


def stop_jobs(jobs: Iterable[Any], reason: str) -> None:
    """Asks the jobs that run to save and stop, and waits for them.

    Raises:
        Stopped: by a further signal: the jobs are asked a second time, at which they end at once.
    """
    left = [job for job in jobs if not ended(job)]
    for job in left:
        # One that saves and leaves would be started again.
        job.max_retries = -1
    if left:
        print(
            f"\n{reason}: {_count(left)} asked to save and stop. Once more ends at once, and what was done since the "
            "last checkpoints is repeated.",
            file=sys.stderr,
            flush=True,
        )
    asked: set[int] = set()
    try:
        while left := [job for job in left if not ended(job)]:
            for job in left:
                # Jobs that waited for others may begin meanwhile.
                if id(job) not in asked and ask(job):
                    asked.add(id(job))
            time.sleep(POLL_SECONDS)
    except Stopped:
        for job in left:
            ask(job)
        raise


def ask(job: Any) -> bool:
    """Sends SIGTERM to a job, by its launcher if it runs elsewhere; answers whether there is something that runs."""
    process = job.process_state_dict()
    if process is None:
        return False
    try:
        if process["type"] == "local":
            os.kill(process["pid"], signal.SIGTERM)
        else:
            job.scheduler.kill_job(job, perform=True)
    except (ProcessLookupError, RuntimeError):
        return False
    return True


def _count(jobs: list[Any]) -> str:
    running = sum(job.process_state_dict() is not None for job in jobs)
    return "1 running job is" if running == 1 else f"{running} running jobs are"
