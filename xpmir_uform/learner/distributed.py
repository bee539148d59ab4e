"""Several ranks as one run: they decide alike, fail alike, and end when one of them is lost."""

import faulthandler
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from xpmir_uform.base.devices import device_count

T = TypeVar("T")

TRANSPORT = re.compile(r"gloo|nccl|DistBackendError|Connection (closed|reset) by|recvValue|wait timeout", re.IGNORECASE)
"""What the errors of collective calls say."""

LOST = 70
"""The exit status of a rank that made no progress."""


def together(fabric: Any, work: Callable[[], T]) -> T:
    """What ``work`` answers on rank 0, on every rank.

    Raises:
        Exception: as ``work`` did on rank 0, and on the other ranks a RuntimeError that says so: none is left waiting.
    """
    if fabric.world_size == 1:
        return work()
    answer, failure = None, None
    if fabric.is_global_zero:
        try:
            answer = work()
        except Exception as error:
            failure = error
    answer, message = fabric.broadcast((answer, failure and f"{type(failure).__name__}: {failure}"), src=0)
    if failure is not None:
        raise failure
    if message is not None:
        raise RuntimeError(f"rank 0 failed, and this rank ends with it: {message}")
    return answer


@contextmanager
def ranks_explained(fabric: Any) -> Iterator[None]:
    """Says which rank ends because another one was lost, of which the transport says a peer's address alone.

    Raises:
        RuntimeError: in place of the transport's own.
    """
    members = meet(fabric)
    try:
        yield
    except RuntimeError as error:
        if fabric.world_size == 1 or not TRANSPORT.search(f"{type(error).__name__} {error}"):
            raise
        raise RuntimeError(
            f"rank {fabric.global_rank} of {fabric.world_size} ends, since {lost(members)} "
            f"({error}). The log of that rank says why; without one, memory may have run out or its machine is gone. "
            "Nothing that was saved is lost: run the task again"
        ) from error


@dataclass(frozen=True, slots=True)
class Member:
    """A rank and its process."""

    rank: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    def gone(self) -> bool:
        """Whether the process has ended; to be asked on its own machine."""
        try:
            return psutil.Process(self.process).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True


def meet(fabric: Any) -> list[Member]:
    """All ranks, as long as they are there to be asked; empty where they are not connected."""
    if fabric.world_size == 1 or not dist.is_initialized():
        return []
    members: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(members, Member(fabric.global_rank, socket.gethostname(), os.getpid()))
    return members


def lost(members: Sequence[Member], patience: float = 2.0) -> str:
    """Which rank was lost, in words.

    Args:
        patience: seconds that are waited for a process of this machine to end: its connections close before.
    """
    here = [member for member in members if member.host == socket.gethostname()]
    deadline = monotonic() + patience
    while not (gone := [str(member) for member in here if member.gone()]) and here and monotonic() < deadline:
        sleep(0.05)
    if gone:
        return f"{' and '.join(gone)} {'was' if len(gone) == 1 else 'were'} lost"
    others = [str(member) for member in members if member not in here]
    if others:
        return f"{' or '.join(others)} was lost or did not answer: the processes on this machine live"
    return "another rank was lost or did not answer"


def any_rank(fabric: Any, flag: bool) -> bool:
    """Whether the flag is up on some rank: the same answer on every one."""
    if fabric.world_size == 1:
        return flag
    up = fabric.all_reduce(torch.tensor(float(flag), device=fabric.device), reduce_op="sum")
    return bool(up > 0)


def check_started(fabric: Any, config: Any) -> None:
    """Refuses to train on another number of processes than there are to be devices.

    Slurm starts one process for a task unless it is told otherwise; Fabric then trains on one device without a word.

    Args:
        config: the ``FabricConfiguration``; ``devices`` that are no numbers, such as ``auto``, are not counted.

    Raises:
        ValueError: another number of processes runs.
    """
    words = [word.strip() for word in config.devices.split(",") if word.strip()]
    expected = device_count(config) * config.num_nodes
    if all(word.isdigit() for word in words) and fabric.world_size != expected:
        raise ValueError(
            f"processes that were started are {fabric.world_size}, expected {expected} (devices {config.devices!r}, "
            f"num_nodes {config.num_nodes}): on Slurm, set ntasks_per_node to the number of devices of a node"
        )


def limit_waiting(fabric: Any, seconds: float) -> None:
    """How long a collective call waits for a rank that does not come; to be called before ``fabric.launch()``."""
    if hasattr(fabric.strategy, "_timeout"):
        fabric.strategy._timeout = timedelta(seconds=seconds)


class Watchdog:
    """Ends this process when it has not reported for ``seconds``: a rank that hangs would keep the others waiting.

    With one rank it does nothing: nobody waits for it.
    """

    def __init__(self, ranks: int, seconds: float) -> None:
        self.seconds = seconds
        self._last = monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if ranks > 1 else None

    def __enter__(self) -> "Watchdog":
        self.report()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def report(self) -> None:
        """Something was done."""
        self._last = monotonic()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.seconds / 4)):
            if monotonic() - self._last > self.seconds:
                print(f"this rank made no progress for {self.seconds:.0f} s and ends:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.stderr)
                os._exit(LOST)
