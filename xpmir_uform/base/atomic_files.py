"""Files that are whole or absent, whenever the process is killed."""

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from xpmir_uform.base.checked_files import copy_file, refusal

logger = logging.getLogger(__name__)

LINKLESS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What a file system without symbolic links answers."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's ``renameat2``: paths are of the working folder; names are exchanged."""

SWAPLESS = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""What a system or a file system answers that cannot exchange two names."""

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
"""What a file system without locks answers; NFS has none of folders."""


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
    """Makes the folder ``path`` with what ``write`` puts into it; an older folder of that name is replaced.

    Raises:
        Occupied: another process is doing so; nothing was touched.
    """
    with _held(aside(path)) as part:
        try:
            for entry in part.iterdir():
                remove(entry)
            write(part)
            for entry in sorted(part.rglob("*")):
                sync(entry)
            sync(part)
            _exchange(part, path)
        except Exception:
            # What could not be written leaves its room to others; what was committed before is as it was.
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync(path.parent)


def _exchange(part: Path, path: Path) -> None:
    """Renames ``part`` to ``path``; what was there goes once the new one has its name, and is put back if it fails."""
    gone = path.with_name(f".{path.name}.gone")
    remove(gone)
    if path.is_dir() and not path.is_symlink():
        # Whoever opens ``part`` while it is the older folder is to find it locked.
        with _open_folder(path) as descriptor:
            lock(descriptor, path)
            if swap(part, path):
                os.rename(part, gone)
                remove(gone)
                return
    older = os.path.lexists(path)
    if older:
        os.rename(path, gone)
    try:
        os.rename(part, path)
    except OSError:
        if older:
            os.rename(gone, path)
        raise
    remove(gone)


def swap(one: Path, other: Path) -> bool:
    """Exchanges the names of two files or folders at once, so that there is no moment without either.

    Returns:
        False: the system or the file system cannot (it is Linux's ``renameat2``); nothing was touched.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in SWAPLESS:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _held(part: Path) -> Iterator[Path]:
    """Holds the folder ``part``, which is made if it is not there, for this process alone."""
    while True:
        if part.is_symlink() or not part.is_dir():
            remove(part)
            part.mkdir(parents=True)
        with _open_folder(part) as descriptor:
            lock(descriptor, part)
            # Whoever held it may have committed it since it was opened.
            if part.is_dir() and os.path.samestat(os.fstat(descriptor), part.stat()):
                yield part
                return


class Occupied(RuntimeError):
    """Another process works in this folder."""


def lock(descriptor: int, path: Path) -> None:
    """Locks an open file or folder until it is closed; without a lock where the file system has none.

    Raises:
        Occupied: another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Occupied(f"another process writes {path}: wait until it ends, or end it, and try again") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("%s cannot be locked (%s): do not write it by two processes at once", path, error)


def check_replaceable(folder: Path, names: Iterable[str], what: str) -> None:
    """Refuses to replace a folder that holds anything but files of those names.

    Raises:
        ValueError: names what else is there.
    """
    if not folder.exists():
        return
    others = sorted({path.name for path in folder.iterdir()} - set(names)) if folder.is_dir() else [folder.name]
    if others:
        raise ValueError(
            f"{folder} holds {', '.join(others[:3])}{', ...' if others[3:] else ''}, which is not of {what} and would "
            "be lost: choose another folder, or move it away"
        )


def point(link: Path, target: str) -> None:
    """Makes ``link`` a relative symbolic link to its sibling ``target``, unless it is one.

    Where the file system has no links it is a copy, whose files share their blocks where it can.
    """
    if link.is_symlink() and os.readlink(link) == target:
        return
    part = aside(link)
    remove(part)
    try:
        part.symlink_to(target)
    except OSError as error:
        if error.errno not in LINKLESS:
            raise
        _copy(link, link.with_name(target))
        return
    if link.is_dir() and not link.is_symlink():
        discard(link)
    os.replace(part, link)
    sync(link.parent)


def _copy(path: Path, source: Path) -> None:
    def copy_all(folder: Path) -> None:
        for file in source.iterdir():
            if file.is_file():
                copy_file(file, folder / file.name)

    commit_folder(path, copy_all)


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
