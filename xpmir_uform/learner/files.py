"""Files that are whole or absent, whenever the process is killed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from xpmir_uform.data.disk import refusal


def sync(path: Path) -> None:
    """Waits until ``path`` (a file or a folder's entries) is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside(path: Path) -> Path:
    """Where ``path`` is written before it takes its name."""
    return path.with_name(f".{path.name}.part")


def remove(path: Path) -> None:
    """Removes a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Removes a folder that others read: it loses its name first, so that none of them finds half of it."""
    if path.is_symlink() or not path.is_dir():
        remove(path)
        return
    gone = path.with_name(f".{path.name}.gone")
    remove(gone)
    os.rename(path, gone)
    remove(gone)


def commit_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Makes the folder ``path`` with what ``write`` puts into it; an older folder of that name is replaced."""
    part = aside(path)
    remove(part)
    part.mkdir(parents=True)
    try:
        write(part)
        for entry in sorted(part.rglob("*")):
            sync(entry)
        sync(part)
        discard(path)
        os.rename(part, path)
    except Exception:
        # What could not be written leaves its room to others; what was committed before is as it was.
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync(path.parent)


def point(link: Path, target: str) -> None:
    """Makes ``link`` a relative symbolic link to its sibling ``target``, unless it is one."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    part = aside(link)
    remove(part)
    part.symlink_to(target)
    if link.is_dir() and not link.is_symlink():
        discard(link)
    os.replace(part, link)
    sync(link.parent)


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Says of an error of the system what it was met by, and what to do: those of open files name none.

    Raises:
        OSError: of the same number.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", errno.EIO)
        if code is None:
            raise
        owner = f"; {refusal(Path(error.filename))}" if isinstance(error, PermissionError) and error.filename else ""
        raise OSError(code, f"{what} ({error}{owner}): {remedy}") from error
