"""What the folder of a job says: its state, and the configuration that it was given."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import read_bytes
from xpmir_uform.learner.job_lock import machine

TELEMETRY = "telemetry.jsonl"
PARAMS = "params.json"
MARK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class State:
    """How a job stands.

    Args:
        name: ``done``, ``failed``, ``stopped``, ``running``, ``killed`` or ``unknown``.
        why: what says so.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration as a tree.

    Args:
        name: of the parameter that holds it.
        value: what is shown beside the name: a value, or the type of a configuration.
        identifier: the configuration's hash; empty for a value.
        children: its parameters, or the entries of a list.
    """

    name: str
    value: str
    identifier: str = ""
    children: tuple["Setting", ...] = ()


def check(job: Path) -> None:
    """Refuses what is no job of a learner.

    Raises:
        ValueError: the folder is missing, holds no job, or a job without telemetry.
    """
    if not job.is_dir():
        raise ValueError(f"{job} is no folder, expected the folder of a job: .../jobs/uform.learner/<identifier>")
    if any(job.glob("telemetry*.jsonl")):
        return
    if not (job / PARAMS).is_file():
        raise ValueError(
            f"{job} is no folder of a job: it holds neither {PARAMS} nor {TELEMETRY}; expected "
            ".../jobs/uform.learner/<identifier>"
        )
    raise ValueError(
        f"{job} has no {TELEMETRY}: the job has made no step yet, is no learner, or could not write it (its log, "
        "*.err, would say so)"
    )


def alive(process: Mapping[str, Any], host: str) -> bool | None:
    """Whether a process lives; None for one that a scheduler runs, or of another machine or one that is not known.

    Args:
        host: the machine on which training was begun last.
    """
    if process.get("type") != "local" or host != socket.gethostname():
        return None
    try:
        os.kill(int(process["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_state(job: Path) -> State:
    """The state, by the marks that experimaestro leaves."""
    if any(job.glob("*.done")):
        return State("done", "the job left its mark of success")
    for mark in job.glob("*.failed"):
        return failure(mark)
    for mark in job.glob("*.pid"):
        host = machine(job)
        try:
            lives = alive(json.loads(read_bytes(mark, MARK_BYTES)), host)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return State("unknown", f"{mark.name} cannot be read")
        if lives is None:
            return State(
                "unknown", f"its process is on {f'another machine, {host}' if host else 'a machine that is not known'}"
            )
        if lives is False:
            return State("killed", "its process is gone and left neither a mark of success nor of failure")
        return State("running", "its process lives")
    return State("unknown", "no mark says that it runs, or how it ended: killed, or started by hand")


def failure(mark: Path) -> State:
    """What a mark of failure says: a job that left in time, and is to be run again, is stopped."""
    try:
        said = read_bytes(mark, MARK_BYTES).decode(errors="replace").strip()
    except (OSError, ValueError) as error:
        return State("failed", f"{mark.name} cannot be read: {error}")
    try:
        content = json.loads(said)
        if content["reason"] == "timeout":
            return State("stopped", f"it is saved, run the task again to go on: {content.get('message') or said}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return State("failed", f"{mark.name}: {said or 'no reason given'}")


def read_configuration(job: Path) -> tuple[Setting | None, str]:
    """The task's configuration, or None and why."""
    path = job / PARAMS
    if not path.exists():
        return None, f"{PARAMS} is not there: the job was not submitted by experimaestro"
    try:
        objects = json.loads(read_bytes(path))["objects"]
        return configuration("task", objects[-1]["id"], {one["id"]: one for one in objects}, {}), ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return None, f"{PARAMS} cannot be read ({type(error).__name__}: {error})"


def tree(name: str, value: Any, objects: Mapping[Any, Mapping[str, Any]], seen: dict[Any, None]) -> Setting:
    """A value of ``params.json``; a configuration that several hold is written out once."""
    if isinstance(value, Mapping) and value.get("type") == "python":
        return configuration(name, value["value"], objects, seen)
    if isinstance(value, Mapping) and "value" in value:
        return Setting(name, str(value["value"]))
    if isinstance(value, Mapping) and value.get("type") == "set":
        value = value["items"]
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        children = tuple(tree(str(key), entry, objects, seen) for key, entry in value.items())
        count = f"{len(children)} {'entry' if len(children) == 1 else 'entries'}"
        return Setting(name, count if children else "none", children=children)
    return Setting(name, json.dumps(value, ensure_ascii=False))


def configuration(name: str, key: Any, objects: Mapping[Any, Mapping[str, Any]], seen: dict[Any, None]) -> Setting:
    """One object of ``params.json``, its fields below it the first time that it is met."""
    one = objects[key]
    if key in seen:
        return Setting(name, f"{one['type']}, as above", str(one["identifier"]))
    seen[key] = None
    fields = tuple(tree(field, entry, objects, seen) for field, entry in one["fields"].items())
    return Setting(name, one["type"], str(one["identifier"]), fields)


def read_histories(job: Path, task: Setting | None) -> dict[str, dict[str, dict[str, float]]]:
    """What each listener recorded in its ``history.json``, by its id, then epoch and measure.

    What cannot be read, and what is no number, is left out.
    """
    listeners = [child for child in (task.children if task else ()) if child.name == "listeners"]
    names = {
        listener.name: field.value.strip('"')
        for listener in (listeners[0].children if listeners else ())
        for field in listener.children
        if field.name == "id"
    }
    histories = {}
    for path in sorted(job.glob("out/listeners/*/history.json")):
        try:
            content = json.loads(read_bytes(path)).items()
            history = {epoch: numbers(values) for epoch, values in content if int(epoch) >= 0}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            continue
        histories[names.get(path.parent.name, path.parent.name)] = history
    return histories


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that can be drawn."""
    return {name: value for name, value in values.items() if type(value) in (int, float)}
