"""One process at a time in the folder of a job."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xpmir_uform.base.atomic_files import Occupied, explained, lock
from xpmir_uform.base.checked_files import read_bytes

NAME = ".training.lock"
HOLDER_BYTES = 300

__all__ = ["NAME", "Occupied", "machine", "only_one"]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Holds the folder until the end of the block, or of the process however it ends.

    experimaestro's own lock is given back on SIGTERM, while the last step may still be saved.

    Raises:
        Occupied: another process holds it; nothing was touched.
    """
    with explained(f"{folder / NAME} cannot be opened", "make the folder one that can be written, run the task again"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    try:
        with explained(f"{folder / NAME} cannot be locked", "run the task again once the file system answers"):
            _hold(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _hold(descriptor: int, folder: Path) -> None:
    try:
        lock(descriptor, folder / NAME)
    except Occupied:
        holder = os.pread(descriptor, HOLDER_BYTES, 0).decode(errors="replace").strip() or "unknown"
        raise Occupied(
            f"another process (number {holder}) trains in {folder}: this one leaves and has changed nothing. "
            "Wait until that one ends, or end it"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def machine(folder: Path) -> str:
    """The name of the machine on which training was begun last in a job's folder; empty: nobody wrote it down."""
    try:
        return read_bytes(folder / NAME, HOLDER_BYTES).decode(errors="replace").partition(" on ")[2].strip()
    except (OSError, ValueError):
        return ""
