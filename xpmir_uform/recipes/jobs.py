"""Jobs as a person sees them: their progress, what became of them, and what they did before."""

import errno
import json
import os
import re
import shutil
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any

from experimaestro.scheduler.jobs import JobFailureStatus
from tqdm import tqdm

from xpmir_uform.checkpoints import store

SHOWN_LINES = 30
POLL_SECONDS = 0.2
LOGGED_SECONDS = 60.0
"""Between two states of a bar in a file, which keeps each of them"""

ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Timeout|Cancelled|Interrupt)(?:: .*)?")
"""The line of a traceback that names the error"""

BAR = re.compile(r"\s*(?:.*\d%\|.*\| .*)?(?:\x1b\[A)?\s*")
"""A line that a bar leaves in a log: one of its states, or none"""

FULL = os.strerror(errno.ENOSPC)
KILLED = (
    "it ended without a message, as a process does that is killed, for want of memory for one; the same command goes "
    "on from its newest checkpoint"
)
SPARE_BYTES = 2**20
"""With less than this free, a file system is full for a job that has no checkpoint."""


def job_of(task: Any) -> Any:
    """The job of a submitted task."""
    return task.__xpm__.job


def state_of(job: Any) -> Any:
    """Where a job is for the scheduler: the state of its files knows nothing of a job it waits for that failed."""
    return job.scheduler_state


def ended(job: Any) -> bool:
    """Whether nothing more will happen to a job: it has ended, or the scheduler has lost it.

    Until the scheduler is done with a job, its state may be an older one: it reads the file of an earlier attempt.
    """
    return job.finalState().done()


def lost(job: Any) -> bool:
    """Whether the scheduler does nothing more about a job that has no end for it.

    It ends so when it cannot write what became of the job, on a full disk for one.
    """
    return ended(job) and not state_of(job).finished()


def failed(job: Any) -> bool:
    """Whether a job that has ended did so without a result."""
    return lost(job) or state_of(job).is_error()


def watch(label: str, job: Any) -> None:
    """Shows the progress of one job until it ends."""
    seconds = POLL_SECONDS if sys.stderr.isatty() else LOGGED_SECONDS
    with tqdm(total=100, desc=label, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}") as bar:
        shown = time.monotonic()
        while not ended(job):
            levels = job.progress
            if levels:
                bar.n = 100 * levels[0].progress
                inner = [f"{level.desc or ''} {level.progress:.0%}" for level in levels[1:]]
                bar.set_postfix_str(", ".join(inner), refresh=False)
            if time.monotonic() - shown >= seconds:
                shown = time.monotonic()
                bar.refresh()
            time.sleep(POLL_SECONDS)
        bar.n = 0 if failed(job) else 100
        bar.set_postfix_str("failed" if failed(job) else "done")


def attempts(job: Any) -> int:
    """How many times a job has ended without a result, in this command and before."""
    try:
        return int(json.loads(job.status_path.read_text())["retry_count"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def history(job: Any, attempts: int) -> str | None:
    """What there is of a job that has just been submitted; None: nothing, it runs for the first time.

    Args:
        attempts: those before.
    """
    try:
        done = datetime.fromtimestamp(job.donepath.stat().st_mtime)
        return f"is done since {done:%Y-%m-%d %H:%M}, reused: {job.path}"
    except FileNotFoundError:
        pass
    steps = store.steps_in(job.path / "checkpoints")
    if not steps and not attempts:
        return None
    before = f" (ended without a result {'once' if attempts == 1 else f'{attempts} times'})" if attempts else ""
    return f"goes on from step {steps[-1]}{before}" if steps else f"begins anew{before}"


def failure(job: Any) -> str:
    """What a failed job printed last, or that it was not run."""
    if state_of(job).failure_reason is JobFailureStatus.DEPENDENCY:
        return f"\n{job.relpath} was not run: a job that it needs failed."
    return f"\n{job.relpath} failed. The last lines of {job.stderr}:\n{last_lines(job.stderr)}"


def last_lines(path: Path, count: int = SHOWN_LINES) -> str:
    """The last lines of a log that hold more than a bar, or why there are none."""
    try:
        with path.open(errors="replace") as file:
            return "".join(deque((line for line in file if not BAR.fullmatch(line)), count))
    except OSError as error:
        return f"(no log: {error})"


def summary(jobs: list[tuple[str, Any]]) -> str:
    """One line: which jobs failed, and why."""
    reasons = [
        f"{label}: {reason(job)}"
        for label, job in jobs
        if state_of(job).failure_reason is not JobFailureStatus.DEPENDENCY
    ]
    skipped = len(jobs) - len(reasons)
    others = [f"{skipped} that need it were not run"] if skipped else []
    return f"Failed. {'; '.join([*reasons, *others])}"


def reason(job: Any) -> str:
    """Why a job failed, in one line."""
    log = last_lines(job.stderr, 2000)
    if full := full_disk(job, FULL in log):
        return full
    errors = [line.strip() for line in log.splitlines() if ERROR.fullmatch(line.strip())]
    return f"{errors[-1] if errors else KILLED} ({job.stderr})"


def full_disk(job: Any, certain: bool) -> str | None:
    """Which file system is full and what a checkpoint takes; None: it is not.

    Args:
        certain: the job has said that there was no space.
    """
    needed = checkpoint_bytes(job.path)
    takes = f", and a checkpoint of this job takes {size(needed)}" if needed else ""
    told = full_file_system(job.path, certain, needed, takes)
    return told and f"{told} ({job.stderr})"


def full_file_system(path: Path, certain: bool = False, needed: int = 0, takes: str = "") -> str | None:
    """Which file system is full; None: it is not.

    Args:
        path: lies on it; what does not exist yet lies where its parent does.
        certain: it has been seen to be full.
        needed: bytes; with less free, it is full.
        takes: says what needs them.
    """
    place = next(each for each in (path.resolve(), *path.resolve().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if not certain and free >= max(needed, SPARE_BYTES):
        return None
    return (
        f"the file system {mount_of(place)} is full: {size(free)} are free{takes}. Make room and run the same command "
        "again"
    )


def checkpoint_bytes(folder: Path) -> int:
    """The size of the newest checkpoint of a job; 0: there is none."""
    checkpoints = folder / "checkpoints"
    steps = store.steps_in(checkpoints)
    return store.size_of(checkpoints / store.name_of(steps[-1])) if steps else 0


def mount_of(path: Path) -> Path:
    """Where the file system of ``path`` is mounted."""
    return next(each for each in (path, *path.parents) if os.path.ismount(each))


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
