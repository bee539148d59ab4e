"""Files that are whole or absent, whenever the process is killed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


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


def commit_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Makes the folder ``path`` with what ``write`` puts into it; an older folder of that name is replaced."""
    part = aside(path)
    remove(part)
    part.mkdir(parents=True)
    write(part)
    for entry in sorted(part.rglob("*")):
        sync(entry)
    sync(part)
    remove(path)
    os.rename(part, path)
    sync(path.parent)


def point(link: Path, target: str) -> None:
    """Makes ``link`` a relative symbolic link to its sibling ``target``."""
    part = aside(link)
    remove(part)
    part.symlink_to(target)
    os.replace(part, link)
    sync(link.parent)
