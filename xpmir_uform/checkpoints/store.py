"""The folder of a task's checkpoints: which there are, which is the newest whole one, which may go.

checkpoints/
    step-00000640/, step-00000720/    committed ones
    last -> step-00000720             the newest
    damaged-step-00000800-0/          set aside, and why: damaged-step-00000800-0.txt
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from xpmir_uform.base.atomic_files import aside, discard, point, remove, sync
from xpmir_uform.base.checked_files import permitted, replace_file
from xpmir_uform.checkpoints import manifest
from xpmir_uform.checkpoints.manifest import Damaged

logger = logging.getLogger(__name__)

COMMITTED = re.compile(r"step-(\d{8,})")
LAST = "last"
Alert = Callable[[str, str], None]


def name_of(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def folders_in(folder: Path) -> list[Path]:
    """The folders in ``folder``, by name, without links to any; none if it does not exist.

    Raises:
        OSError: it cannot be read; ``Path.glob`` would find nothing there, and training begin anew.
    """
    try:
        with permitted(folder):
            return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []


def steps_in(folder: Path) -> list[int]:
    """The steps that have a committed checkpoint, ascending by number."""
    return sorted(int(match[1]) for path in folders_in(folder) if (match := COMMITTED.fullmatch(path.name)))


def resolve(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest in the folder of a job or of its checkpoints.

    Raises:
        FileNotFoundError: there is none.
    """
    if (path / manifest.NAME).exists() or COMMITTED.fullmatch(path.resolve().name):
        return path
    folder = shelf_of(path)
    steps = steps_in(folder)
    if not steps:
        raise FileNotFoundError(f"{path} holds no checkpoint, expected one, or the folder of a job that has trained")
    last = last_in(folder)
    return folder / (
        name_of(steps[-1]) if last not in steps else LAST if (folder / LAST).is_symlink() else name_of(last)
    )


def last_in(folder: Path) -> int | None:
    """The step that ``last`` names: a link, or a copy where a file system has no links; None: neither tells."""
    path = folder / LAST
    if path.is_symlink():
        found = COMMITTED.fullmatch(os.readlink(path))
        return int(found[1]) if found else None
    try:
        return manifest.read(path)["step"]
    except ValueError:
        return None


def shelf_of(path: Path) -> Path:
    """The folder of checkpoints that ``path`` is, or that the job at ``path`` has."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def newest(folder: Path, alert: Alert) -> tuple[Path, Mapping[str, Any]] | None:
    """The newest whole checkpoint and its manifest; damaged ones before it are set aside. None: there is none at all.

    Raises:
        ValueError: there are checkpoints, and all are damaged; they stay as they are. Errors of the file system, which
            may pass, are raised as they are.
    """
    damaged: dict[Path, str] = {}
    for step in candidates(folder):
        path = folder / name_of(step)
        try:
            found = manifest.verify(path)
            if found["step"] != step:
                raise Damaged(f"{path} holds the checkpoint of step {found['step']}")
        except Damaged as error:
            damaged[path] = str(error)
            continue
        point(folder / LAST, path.name)
        for bad, reason in damaged.items():
            alert("damaged checkpoint", f"{reason}. It was set aside as {set_aside(bad, reason)}; going on from {path}")
        return path, found
    lost = [path.name for path in folders_in(folder) if path.name.startswith("damaged-")]
    if damaged or lost:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(damaged.values()) or ', '.join(lost)}. Nothing was "
            "deleted: put one back from a copy, or move them all away to train from the beginning"
        )
    return None


def candidates(folder: Path) -> list[int]:
    """The steps to try, the best first: what was committed after ``last``, it, and those before it.

    A later step that does not follow ``last`` is of another run and is passed over.
    """
    steps = steps_in(folder)
    current = last_in(folder)
    if current is None or current not in steps:
        return steps[::-1]
    followers = [step for step in steps if step > current and _follows(folder, step, current)]
    for stale in {step for step in steps if step > current} - set(followers):
        logger.warning("%s does not follow %s: it is passed over", folder / name_of(stale), name_of(current))
    return followers[::-1] + [step for step in steps[::-1] if step <= current]


def _follows(folder: Path, step: int, current: int) -> bool:
    """Whether ``step`` was committed after ``current`` by the same run, or is damaged and may have been."""
    try:
        previous = manifest.read(folder / name_of(step))["previous"]
        return previous == manifest.reference(folder / name_of(current), manifest.read(folder / name_of(current)))
    except Damaged:
        return True


def set_aside(path: Path, reason: str, label: str = "damaged") -> Path:
    """Renames a checkpoint that cannot be used and writes the reason beside it; nothing is deleted."""
    free = (path.with_name(f"{label}-{path.name}-{number}") for number in count())
    target = next(name for name in free if not name.exists())
    os.rename(path, target)
    replace_file(target.with_name(f"{target.name}.txt"), f"{reason}\n".encode())
    sync(path.parent)
    return target


def size_of(path: Path) -> int:
    """The bytes of the files of a checkpoint."""
    return sum(file.stat().st_size for file in path.iterdir())


def prune(folder: Path, step: int, keep: int, planned: Callable[[int], bool] = lambda step: True) -> None:
    """Removes all up to ``step`` but the newest ``keep``, and the newest ``keep`` of those that are planned.

    Later ones are of another run: they neither count nor go.

    Args:
        planned: whether every run of the task saves a checkpoint at that step. Those that an interruption adds do not
            displace them, so that which of them are left does not depend on interruptions.
    """
    found = [old for old in steps_in(folder) if old <= step]
    kept = {*found[-keep:], *list(filter(planned, found))[-keep:]}
    for old in [old for old in found if old not in kept]:
        try:
            discard(folder / name_of(old))
        except OSError as error:
            logger.warning("%s cannot be removed (%s): it stays", folder / name_of(old), error)


def sweep(folder: Path) -> None:
    """Removes what a killed process was writing or removing."""
    for path in [*folder.glob(aside(Path("step-*")).name), *folder.glob(".step-*.gone")]:
        remove(path)
