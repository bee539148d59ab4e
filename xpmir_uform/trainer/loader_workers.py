"""The processes of the loader: when they end, and what is said of one that is lost."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""

PASSED_OVER = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""What batch systems and terminals send to every process of a job."""

NOTICED_SECONDS = 5.0
"""How long after its last message a lost worker may still seem to live."""


class WorkerLost(RuntimeError):
    """A loader worker was ended from outside."""


@contextmanager
def workers_explained(workers: Sequence[BaseProcess] = ()) -> Iterator[None]:
    """Says what to do when a loader worker was ended from outside.

    torch tells of it at any moment, by a signal's handler. While a batch is received it may show itself first, as a
    connection that is reset, a message that is cut, or shared memory that is gone.

    Args:
        workers: that may be lost; an error of any kind is theirs if one of them has ended, and they did not send it.

    Raises:
        WorkerLost: one is.
    """
    try:
        yield
    except WorkerLost:
        raise
    except Exception as error:
        told = isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)
        sent = "in DataLoader worker process" in str(error)
        found = str(error) if told else "" if sent else _ended(workers)
        if not found:
            raise
        raise WorkerLost(
            f"a loader worker did not end by itself ({found.strip()}): memory may have run out. Nothing that was saved "
            "is lost; run the task again, with fewer num_workers if it happens again"
        ) from error


def _ended(workers: Sequence[BaseProcess]) -> str:
    """Which worker has ended, and how; its connections are closed a moment before. Empty: none has."""
    if not workers:
        return ""
    closed = wait([worker.sentinel for worker in workers], NOTICED_SECONDS)
    lost = next((worker for worker in workers if worker.sentinel in closed), None)
    if lost is None:
        return ""
    # The kernel closes what a process held before it says how it ended.
    lost.join(NOTICED_SECONDS)
    code = lost.exitcode or 0
    return f"process {lost.pid} " + (f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with {code}")


def received(steps: Iterator[T], workers: Sequence[BaseProcess]) -> Iterator[T]:
    """What workers send."""
    while True:
        with workers_explained(workers):
            step = next(steps)
        yield step


def begin_worker(worker: int) -> None:
    """Prepares a worker to end with the process that made it, neither before nor after.

    A batch system asks every process of a job to stop, and the training process needs its workers for one more step:
    the first such signal is passed over here, a second one ends the worker. One that the training process itself sends,
    as Python does at its exit, ends it at once.
    """
    die_with_parent()
    for number in PASSED_OVER:
        signal.signal(number, signal.SIG_DFL)
    # A handler is not told who sends a signal; who waits for it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_OVER)
    threading.Thread(target=_pass_over, daemon=True).start()


def _pass_over() -> None:
    passed: set[int] = set()
    while True:
        found = signal.sigwaitinfo(PASSED_OVER)
        if found.si_pid == os.getppid():
            os._exit(0)
        if found.si_signo in passed:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [found.si_signo])
            os.kill(os.getpid(), found.si_signo)
        passed.add(found.si_signo)


def die_with_parent() -> None:
    """Asks the kernel to end this worker with the process that made it.

    A worker whose queue is full when that process is killed would wait for ever, and hold the job's lock.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
