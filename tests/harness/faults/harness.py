"""Runs the training in forked processes, with a fault or without, and keeps what was seen of it."""

import io
import json
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from experimaestro import GracefulTimeout, TaskCancelled
from experimaestro.notifications import xpm_tqdm

from faults import checker, training
from faults.checker import Attempt, Ending, Expected, Witness
from faults.injection import Act, Operations
from faults.training import Acts, WatchedTrainer

LIMIT_SECONDS = 120
T = TypeVar("T")
Setup = Callable[[int], object]
"""What is done in a process, given its rank, before the task runs there"""


def nothing(rank: int) -> None:
    """No fault."""


def before(step: int, act: Callable[[], object], rank: int = 0) -> Setup:
    """Does something before a step, on one rank."""

    def setup(here: int) -> None:
        if here == rank:
            Acts.before_step = {**Acts.before_step, step: act}

    return setup


def send(*numbers: int) -> Callable[[], object]:
    """Sends signals to this process."""
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


@dataclass
class Row:
    """One kind of fault: how often it was injected, what became of it, what was lost."""

    fault: str
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    def add(self, outcome: str, lost: Sequence[str], where: str = "") -> None:
        """One injection."""
        self.outcomes[outcome] += 1
        self.lost += [f"{where}: {text}" if where else text for text in lost]


class Trial:
    """One job and its submissions.

    Args:
        folder: where its processes tell how they ended.
        place: where the job lies, if elsewhere.
    """

    def __init__(self, folder: Path, place: Path | None = None) -> None:
        self.folder = folder
        self.job = (place or folder) / "jobs" / "task" / "job"
        self.checkpoints = self.job / "checkpoints"
        self.attempts: list[Attempt] = []

    def attempt(
        self,
        setup: Setup = nothing,
        ranks: int = 1,
        during: Callable[[int], object] | None = None,
        seconds: float = LIMIT_SECONDS,
        **params,
    ) -> Attempt:
        """Submits the job once and waits for its end.

        Args:
            setup: the fault.
            during: called with the number of the first process once it runs.
            seconds: after which it is killed.
            params: of the configuration.
        """
        before_it = checker.shelf(self.checkpoints)
        children = self.start(setup, ranks, **params)
        if during is not None:
            during(children[0])
        self.wait(children, seconds)
        return self.finish(before_it, ranks)

    def start(self, setup: Setup = nothing, ranks: int = 1, **params) -> list[int]:
        """Starts the processes of the job."""
        for folder in (self.folder, self.job):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "seen.jsonl").write_bytes(b"")
        port = free_port() if ranks > 1 else 0
        return [self.fork(rank, ranks, port, setup, params) for rank in range(ranks)]

    def fork(self, rank: int, ranks: int, port: int, setup: Setup, params: dict[str, Any]) -> int:
        (self.folder / f"ending-{rank}.json").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                if ranks > 1:
                    join_ranks(rank, ranks, port)
                self._run(rank, setup, {"devices": ranks, **params})
            finally:
                os._exit(1)
        return child

    def _run(self, rank: int, setup: Setup, params: dict[str, Any]) -> None:
        """In the child: the task, and how it ended."""
        ending = os.open(self.folder / f"ending-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        log = os.open(self.folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        WatchedTrainer.seen = os.open(self.folder / "seen.jsonl", os.O_WRONLY | os.O_APPEND)
        # The bars' own lock is shared by forked processes: one that is killed while it holds it would stop all others.
        xpm_tqdm.set_lock(threading.RLock())
        status, message, kind = "done", "", ""
        counted: Operations | None = None
        try:
            counted = setup(rank)  # type: ignore[assignment]
            training.execute(training.config(**params), self.job)
        except GracefulTimeout as error:
            status, message = "again", str(error)
        except TaskCancelled as error:
            status, message = "cancelled", str(error)
        except BaseException as error:
            status, message, kind = "stopped", str(error), type(error).__name__
        seen = counted.seen if isinstance(counted, Operations) else []
        said = {"status": status, "message": message, "kind": kind, "operations": seen}
        training.append(ending, json.dumps(said).encode())
        if dist.is_initialized() and status == "done":
            dist.destroy_process_group()
        os._exit(0)

    def wait(self, children: Sequence[int], seconds: float = LIMIT_SECONDS) -> bool:
        """Waits for the ends of processes; those that are late are killed. Whether none was."""
        limit, late = time.monotonic() + seconds, False
        for child in children:
            descriptor = os.pidfd_open(child)
            if not select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
                late = True
            os.close(descriptor)
            os.waitpid(child, 0)
        return not late

    def finish(self, before_it: checker.Shelf, ranks: int = 1) -> Attempt:
        """Takes down what a submission has left."""
        said = [self.ending(rank) for rank in range(ranks)]
        lines = [json.loads(line) for line in (self.folder / "seen.jsonl").read_text().splitlines()]
        attempt = Attempt(
            before_it,
            checker.shelf(self.checkpoints),
            [Ending(end["status"], end["message"], end["kind"]) for end in said],
            [(line["step"], line["keys"]) for line in lines],
            said[0]["operations"],
        )
        self.attempts.append(attempt)
        return attempt

    def ending(self, rank: int) -> dict[str, Any]:
        """What a process wrote of its end; one that was killed wrote nothing."""
        file = self.folder / f"ending-{rank}.json"
        text = file.read_text() if file.exists() else ""
        return json.loads(text) if text else {"status": "killed", "message": "", "kind": "", "operations": []}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join_ranks(rank: int, ranks: int, port: int) -> None:
    """Makes this process one of several."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


class Lab:
    """Where trials are made.

    Args:
        root: a folder for all of them.
        quick: a spread of the faults alone.
    """

    def __init__(self, root: Path, quick: bool = False) -> None:
        self.root = root
        self.quick = quick
        self.count = 0
        self._templates: dict[tuple[int, int], Trial] = {}
        first = Trial(root / "whole")
        # In this process, so that all that is loaded on the way is there in each fork of it.
        first.job.mkdir(parents=True)
        WatchedTrainer.seen = os.open(first.folder / "seen.jsonl", os.O_WRONLY | os.O_CREAT)
        with redirect_stderr(io.StringIO()):
            training.execute(training.config(), first.job)
        WatchedTrainer.seen = None
        (first.folder / "ending-0.json").write_text('{"status": "done", "message": "", "kind": "", "operations": []}')
        self.whole: Witness = checker.witness(first.job, [first.finish(checker.Shelf({}, None))])
        shutil.rmtree(first.folder)

    def trial(self, at: int = 0, place: Path | None = None, ahead: int = 0) -> Trial:
        """A job whose newest checkpoint is of step ``at``, and which was killed ``ahead`` steps later.

        Args:
            at: 0: it never ran. With steps ahead: the end of an epoch.
        """
        self.count += 1
        trial = Trial(self.root / f"trial-{self.count}", place)
        if at:
            template = self._template(at, ahead)
            trial.folder.mkdir()
            shutil.copytree(template.job, trial.job, symlinks=True)
            trial.attempts = list(template.attempts)
        return trial

    def _template(self, at: int, ahead: int) -> Trial:
        if (at, ahead) not in self._templates:
            trial = Trial(self.root / f"template-{at}-{ahead}")
            trial.attempt(before(at + ahead + 1, send(signal.SIGKILL)), checkpoint_steps=0 if ahead else 1)
            self._templates[at, ahead] = trial
        return self._templates[at, ahead]

    def spread(self, cases: Sequence[T], quick: int) -> Sequence[T]:
        """All cases, or in a hurry ``quick`` of them, spread evenly."""
        if not self.quick or len(cases) <= quick:
            return cases
        return [cases[number * len(cases) // quick] for number in range(quick)]

    def reference(self, setup: Setup = nothing, ranks: int = 1, **params) -> Witness:
        """What an uninterrupted run ends with."""
        trial = self.trial()
        trial.attempt(setup, ranks, **params)
        found = checker.witness(trial.job, trial.attempts)
        shutil.rmtree(trial.folder)
        return found

    def check(self, trial: Trial, whole: Witness | None = None, **expected) -> list[str]:
        """What was lost in a trial, against the plain run or another one; its folder goes if it was nothing."""
        lost = checker.violations(trial.job, trial.attempts, whole or self.whole, Expected(**expected))
        if not lost:
            shutil.rmtree(trial.folder, ignore_errors=True)
        return lost

    def resubmit(self, row: Row, trial: Trial, where: str = "", again: Setup = nothing, **expected) -> None:
        """Submits a job whose first submission met a fault once more, without it, and checks the end."""
        outcome = trial.attempts[-1].ending.status
        trial.attempt(again)
        row.add(outcome, self.check(trial, **expected), where)


def inject(trial: Trial, act: Act, step: int = 0, reads: bool = False) -> Setup:
    """Begins an injection into file operations before a step; 0: before the task."""

    def setup(rank: int) -> Operations:
        operations = Operations(trial.job, act, reads)
        if step:
            before(step, operations.install)(rank)
        else:
            operations.install()
        return operations

    return setup
