"""What must hold after a fault and a plain resubmission: nothing is lost. One checker for all faults.

N steps of the whole training
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from xpmir_uform.monitoring.telemetry import read_telemetry

KEEP = 2
ASIDE = ("damaged-", "stale-")
REMEDY = re.compile(
    r"run the task again|run it again|put one back|move (it|them|that) |Restore what|Wait until|make room|give fewer"
)
LINE = ("step", "epoch", "loss", "losses", "learning_rate", "phase", "gradient_norm", "skipped", "counts", "items")
"""Of a line of telemetry: what the clock and the machine have no part in."""

Folders = Mapping[str, str]


@dataclass(frozen=True)
class Shelf:
    """What lies in a folder of checkpoints.

    Args:
        folders: a hash of the content of each, by name; those being written are left out.
        last: what ``last`` names; None: nothing.
    """

    folders: Folders
    last: str | None

    @property
    def committed(self) -> dict[int, str]:
        """The hash of each checkpoint that bears the name of a step."""
        return {int(name[5:]): digest for name, digest in self.folders.items() if re.fullmatch(r"step-\d{8}", name)}


def shelf(folder: Path) -> Shelf:
    """Looks at a folder of checkpoints."""
    names = sorted(path.name for path in folder.glob("*") if path.is_dir() and not path.is_symlink())
    link = folder / "last"
    return Shelf({name: content(folder / name) for name in names}, os.readlink(link) if link.is_symlink() else None)


def content(folder: Path) -> str:
    """A hash of every name and byte below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        held = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.relative_to(folder)} {len(held)} ".encode() + held)
    return digest.hexdigest()


@dataclass(frozen=True)
class Ending:
    """How a process ended: ``done``, ``again``, ``cancelled``, ``stopped`` or ``killed``; what it said; its type."""

    status: str
    message: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Attempt:
    """One submission.

    Args:
        before, after: the checkpoints.
        endings: of each rank.
        steps: number and keys of each step that was made.
        operations: of files, if they were counted.
    """

    before: Shelf
    after: Shelf
    endings: Sequence[Ending]
    steps: Sequence[tuple[int, list[int]]]
    operations: Sequence[str] = ()

    @property
    def ending(self) -> Ending:
        """Of the first rank."""
        return self.endings[0]


@dataclass(frozen=True)
class Witness:
    """What a training ended with: tensors, the rest of its state, its telemetry, the keys of each step."""

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, str]
    lines: Sequence[tuple[int, str]]
    keys: Mapping[int, list[int]] = field(default_factory=dict)


def witness(job: Path, attempts: Sequence[Attempt]) -> Witness:
    """Looks at what a job has left."""
    last = job / "checkpoints" / "last"
    state = json.loads((last / "state.json").read_text())
    state["metrics"].pop("step_seconds", None)
    tensors = {
        f"{name}: {key}": tensor
        for name in ("model", "optimizer")
        for key, tensor in load_file(last / f"{name}.safetensors").items()
    }
    # As text: a NaN is not equal to itself.
    told = read_telemetry(job) if (job / "telemetry.jsonl").is_file() else ()
    lines = [(line["step"], json.dumps({name: line[name] for name in LINE})) for line in told]
    state = {name: json.dumps(value, sort_keys=True) for name, value in state.items()}
    return Witness(tensors, state, lines, {step: keys for attempt in attempts for step, keys in attempt.steps})


@dataclass(frozen=True)
class Expected:
    """How the checks are to be read.

    Args:
        harmed: the checkpoints that the fault damaged, by step.
        ends: how the last attempt ends.
        silent: steps whose telemetry the fault may have kept from being written.
        names: what the message of a stop must name besides a remedy: empty: the job's folder; None: it needs neither.
        tolerance: of the tensors, relative; 0: bit for bit.
    """

    harmed: frozenset[int] = frozenset()
    ends: str = "done"
    silent: bool = False
    names: str | None = ""
    tolerance: float = 0.0
    keep: int = KEEP


def violations(job: Path, attempts: Sequence[Attempt], whole: Witness, expected: Expected = Expected()) -> list[str]:
    """What was lost; empty: nothing.

    Args:
        attempts: all submissions, the one with the fault among them, in order.
        whole: of the uninterrupted run.
    """
    found = [
        f"attempt {number}: {text}"
        for number, attempt in enumerate(attempts, 1)
        for check in (told, nothing_removed, little_repeated, last_is_newest)
        for text in check(job, attempt, whole, expected)
    ]
    status = attempts[-1].ending.status
    if status != expected.ends:
        found.append(f"it ended {status}, expected {expected.ends}: {attempts[-1].ending.message[:200]}")
    return [*found, *same_end(job, attempts, whole, expected)] if status == "done" else found


def told(job: Path, attempt: Attempt, whole: Witness, expected: Expected) -> Iterator[str]:
    """A stop says which file and what to do."""
    for ending in attempt.endings:
        if ending.status != "stopped" or expected.names is None:
            continue
        if (expected.names or str(job)) not in ending.message:
            yield f"the message does not name {expected.names or job}: {ending.message[:300]}"
        if not REMEDY.search(ending.message):
            yield f"the message has no remedy: {ending.message[:300]}"


def nothing_removed(job: Path, attempt: Attempt, whole: Witness, expected: Expected) -> Iterator[str]:
    """A checkpoint may go only when ``keep`` newer ones have come, and be set aside only when it is damaged."""
    aside = {name: digest for name, digest in attempt.after.folders.items() if name.startswith(ASIDE)}
    for step, digest in attempt.before.committed.items():
        if attempt.after.committed.get(step) == digest:
            continue
        newer = [other for other in attempt.after.committed if other > step]
        if step in expected.harmed and digest in aside.values():
            continue
        if len(newer) < expected.keep:
            yield f"the checkpoint of step {step} is gone, and only {newer} are newer"
    for name in aside.keys() - attempt.before.folders.keys():
        if int(name.split("-")[2]) not in expected.harmed:
            yield f"{name} was set aside and had no damage"
    for name, digest in attempt.before.folders.items():
        if name.startswith(ASIDE) and attempt.after.folders.get(name) != digest:
            yield f"{name}, which had been set aside, was touched"


def little_repeated(job: Path, attempt: Attempt, whole: Witness, expected: Expected) -> Iterator[str]:
    """The first step is the one after the newest whole checkpoint, and the others follow it."""
    sound = [step for step in attempt.before.committed if step not in expected.harmed]
    first = max(sound, default=0) + 1
    made = [step for step, _ in attempt.steps]
    if made and made != list(range(first, first + len(made))):
        yield f"the steps {made[0]} to {made[-1]} were made, expected {first} and so on"


def last_is_newest(job: Path, attempt: Attempt, whole: Witness, expected: Expected) -> Iterator[str]:
    """``last`` names the newest one when the task is done, and one that is there whenever there was one."""
    named = attempt.after.last
    if attempt.ending.status == "done":
        newest = f"step-{max(attempt.after.committed, default=0):08d}"
        if named != newest:
            yield f"the task is done, last is {named}, and {newest} is the newest"
    elif attempt.before.last in attempt.before.folders and named not in attempt.after.folders:
        yield f"last is {named}, which is not there"


def same_end(job: Path, attempts: Sequence[Attempt], whole: Witness, expected: Expected) -> Iterator[str]:
    """Tensors, state, losses, order and number of the records are those of the uninterrupted run."""
    found = witness(job, attempts)
    yield from same_tensors(found.tensors, whole.tensors, expected.tolerance)
    exact = expected.tolerance == 0
    if exact and found.state != whole.state:
        different = [name for name in whole.state if whole.state[name] != found.state.get(name)]
        yield f"the state differs in {different}"
    steps = [step for step, _ in found.lines]
    if steps != sorted(set(steps)) or (not expected.silent and steps != [step for step, _ in whole.lines]):
        yield f"telemetry has the steps {steps}"
    if exact and any(line not in whole.lines for line in found.lines):
        yield "the telemetry of a step differs"
    yield from same_records(attempts, whole)


def same_tensors(
    found: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], tolerance: float
) -> Iterator[str]:
    """Weights and optimizer."""
    if found.keys() != whole.keys():
        yield f"the tensors {sorted(found.keys() ^ whole.keys())[:3]} are on one side alone"
    for name in found.keys() & whole.keys():
        ours, theirs = found[name].double(), whole[name].double()
        if not (torch.equal(found[name], whole[name]) or (ours - theirs).norm() <= tolerance * theirs.norm()):
            yield f"{name} differs by up to {float((ours - theirs).abs().max()):.2g}"
            return


def same_records(attempts: Sequence[Attempt], whole: Witness) -> Iterator[str]:
    """Each step was made of the same records, and each record is in the final training as often."""
    for step, keys in (made for attempt in attempts for made in attempt.steps):
        if sorted(whole.keys.get(step, [])) != sorted(keys):
            yield f"step {step} was made of other records"
            return
    final = {step: keys for attempt in attempts for step, keys in attempt.steps}
    seen, expected = (Counter(key for keys in steps.values() for key in keys) for steps in (final, whole.keys))
    if seen != expected:
        yield f"records were seen {sorted((seen - expected) + (expected - seen))[:5]} more or less often"
