"""A disk that is full, becomes read-only, or fails at any operation on a file."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.harness import Lab, Row, Setup, before, inject, nothing
from faults.injection import fail_at

STEP = 11
LOADED = 8
"""The end of an epoch"""
SIZE = 24 * 2**20
CODES = {"EIO": errno.EIO, "EACCES": errno.EACCES, "ENOSPC": errno.ENOSPC}


def rows(lab: Lab) -> Iterator[Row]:
    """A real file system first, where one may be mounted, then errors by injection."""
    with tmpfs(lab.root / "mount") as mount:
        if mount is None:
            print("full and read-only disks are left out: no file system can be mounted here", file=sys.stderr)
        else:
            yield from mounted(lab, mount)
    # A mounted one cannot be made read-only while files on it are open.
    yield injected(lab, "a disk that becomes read-only, from an operation of a save on", errno.EROFS, STEP, True)
    for first, (name, code) in enumerate(CODES.items()):
        yield injected(lab, f"{name} once, at an operation of a save", code, STEP, False, 2 * first)
        yield injected(lab, f"{name} from an operation of a save on", code, STEP, True)
        if name != "ENOSPC":
            yield injected(
                lab, f"{name} once, at an operation of beginning and loading", code, 0, False, [*CODES].index(name)
            )
            yield injected(lab, f"{name} from an operation of beginning and loading on", code, 0, True)


@contextmanager
def tmpfs(place: Path) -> Iterator[Path | None]:
    """A small file system of its own; None: this user may not mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mounted(lab: Lab, mount: Path) -> Iterator[Row]:
    """Full to the last bytes, and read-only; from the beginning, and from a step on."""
    sizes = [0, 100, 4096, *(round(share * 3.0e6) for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.9, 1.0))]
    for title, at in (("a disk full but for 0 to 3 MB, of a job that begins", 0), ("the same, inside an epoch", STEP)):
        row = Row(title)
        for free in lab.spread(sizes, 2):
            once(lab, row, mount, at, lambda free=free: fill(mount, free), lambda: (mount / "ballast").unlink())
        yield row
    row = Row("a read-only disk, of a job that begins or goes on")
    for at in (0, -STEP):
        once(lab, row, mount, at, lambda: remount(mount, "ro"), lambda: remount(mount, "rw"))
    yield row


def once(lab: Lab, row: Row, mount: Path, at: int, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """One submission while the disk is bad, and one after that.

    Args:
        at: 0: a job that never ran; negative: one that begins again; positive: from before that step on.
    """
    trial = lab.trial(abs(at) - 1 if at else 0, mount / "job")
    trial.job.mkdir(parents=True, exist_ok=True)
    setup: Setup = nothing
    if at > 0:
        setup = before(at, begin)
    else:
        begin()
    trial.attempt(setup)
    end()
    lab.resubmit(row, trial, silent=True)
    shutil.rmtree(mount / "job")


def fill(mount: Path, free: int) -> None:
    """Leaves so many bytes."""
    with (mount / "ballast").open("wb") as file:
        state = os.statvfs(mount)
        size = state.f_bavail * state.f_frsize - free
        os.posix_fallocate(file.fileno(), 0, max(1, size))


def remount(mount: Path, how: str) -> None:
    """Makes it read-only, though files may be open, or not."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(mount)], check=True)


def injected(lab: Lab, title: str, code: int, step: int, always: bool, first: int = 0) -> Row:
    """An error at every sixth operation from ``first`` on, so that the kinds of errors share them, or at some for good.

    A job that begins has telemetry of two steps more than its newest checkpoint.
    """
    row = Row(title)
    for at in lab.spread(range(first, operations(lab, step), 16 if always else 6), 2):
        trial = lab.trial(STEP - 1) if step else lab.trial(LOADED, ahead=2)
        trial.attempt(inject(trial, fail_at(at, code, always), step, reads=True))
        lab.resubmit(row, trial, f"operation {at}", silent=True)
    return row


def operations(lab: Lab, step: int) -> int:
    """How many operations beginning and loading make, or a step and its save."""
    trial = lab.trial(STEP - 1) if step else lab.trial(LOADED, ahead=2)
    file = trial.folder / "count"

    def setup(rank: int) -> None:
        count = inject(trial, fail_at(-1, 0), step, reads=True)(rank)
        before(step + 1 if step else LOADED + 1, lambda: file.write_text(str(len(count.seen))))(rank)

    trial.attempt(setup)
    return int(file.read_text())
