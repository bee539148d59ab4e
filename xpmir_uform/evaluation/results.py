"""What evaluations write: the results of several problems, one file."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experimaestro import GracefulTimeout, TaskCancelled, taskglobals, tqdm

from xpmir_uform.base.checked_files import replace_file


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Writes a file as a whole: a reader sees the former one or this one."""
    replace_file(path, json.dumps(value, indent=indent).encode())


def write_each(path: Path, names: Iterable[str], evaluate: Callable[[str], dict[str, Any]]) -> None:
    """Writes what ``evaluate`` returns of each name, after each: one that fails costs none of the others.

    Raises:
        RuntimeError: some failed; says which and why.
    """
    names, found, failed = list(names), {}, {}
    # Experimaestro's bar is that of a job, and fails outside of one.
    job = taskglobals.Env.instance().taskpath is not None
    for name in tqdm(iter(names), total=len(names), desc="Evaluating") if job else names:
        try:
            found[name] = evaluate(name)
        except (TaskCancelled, GracefulTimeout):
            raise
        except Exception as error:
            failed[name] = error
        write_json(path, found)
    if failed:
        told = "; ".join(f"{name!r}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(names)} problems failed, the results of the others are in {path}: {told}"
        ) from next(iter(failed.values()))
