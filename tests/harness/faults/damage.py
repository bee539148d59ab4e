"""Every file of the newest checkpoint damaged in many ways, and all of the checkpoints."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from faults.harness import Lab, Row, Trial
from xpmir_uform.checkpoints import manifest, store

FILES = (*manifest.FILES, manifest.NAME)
NEWEST = 10
Damage = Callable[[Path], object]


def changed(change: Callable[[bytes], bytes]) -> Damage:
    """Writes a file anew with other bytes."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flipped(share: float, bit: int) -> Damage:
    """One bit, at a place between 0 (the first byte) and 1 (the last)."""

    def change(data: bytes) -> bytes:
        place = round(share * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    return changed(change)


def older(path: Path) -> Path:
    """The file of that name in the checkpoint before."""
    return path.parents[1] / f"step-{int(path.parent.name[5:]) - 1:08d}" / path.name


def swap(path: Path, other: Path) -> None:
    """Exchanges two files."""
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def replaced(make: Callable[[Path], object]) -> Damage:
    """Removes a file and puts something else there."""
    return lambda path: (path.unlink(), make(path))


def zeroed(data: bytes) -> bytes:
    """A block of zeros where there was something."""
    start = len(data) // 3
    return data[:start] + bytes(512) + data[start + 512 :]


DAMAGES: dict[str, Damage] = {
    "first bit flipped": flipped(0.0, 0),
    "a bit of the ninth byte flipped": lambda path: flipped(8 / path.stat().st_size, 2)(path),
    "a bit at a tenth flipped": flipped(0.1, 3),
    "a bit in the middle flipped": flipped(0.5, 4),
    "a bit at nine tenths flipped": flipped(0.9, 6),
    "last bit flipped": flipped(1.0, 7),
    "cut to 0 bytes": changed(lambda data: b""),
    "cut to 8 bytes": changed(lambda data: data[:8]),
    "cut to half": changed(lambda data: data[: len(data) // 2]),
    "last byte cut": changed(lambda data: data[:-1]),
    "first byte cut": changed(lambda data: data[1:]),
    "a byte appended": changed(lambda data: data + b"\n"),
    "4096 bytes appended": changed(lambda data: data + bytes(4096)),
    "twice": changed(lambda data: data * 2),
    "a block of zeros": changed(zeroed),
    "zeros alone": changed(lambda data: bytes(len(data))),
    "two blocks exchanged": changed(lambda data: data[256:512] + data[:256] + data[512:]),
    "removed": Path.unlink,
    "replaced by a folder": replaced(Path.mkdir),
    "replaced by a broken link": replaced(lambda path: path.symlink_to("nowhere")),
    "replaced by a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "replaced by the older one's": lambda path: shutil.copy(older(path), path),
    "replaced by another file of the checkpoint": lambda path: shutil.copy(path.with_name(other(path.name)), path),
    "exchanged with another file of it": lambda path: swap(path, path.with_name(other(path.name))),
    "replaced by JSON of nothing": changed(lambda data: b"{}"),
    "replaced by a pickle": lambda path: torch.save({"weight": torch.zeros(2)}, path),
    "line ends changed": changed(lambda data: data.replace(b"\n", b"\r\n") if b"\n" in data else data + b"\r"),
    "text of another order": lambda path: reorder(path),
}


def other(name: str) -> str:
    """Another file."""
    return FILES[(FILES.index(name) + 1) % len(FILES)]


def reorder(path: Path) -> None:
    """JSON of the same values, written in another way; of a safetensors file, its tail in front."""
    data = path.read_bytes()
    text = json.dumps(json.loads(data)).encode() if path.suffix == ".json" else data[-64:] + data[:-64]
    path.write_bytes(text)


def renamed(folder: Path) -> None:
    """The older checkpoint under the newer name."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(f"step-{NEWEST - 1:08d}"), folder)


FOLDERS: dict[str, Damage] = {
    "emptied": lambda folder: [path.unlink() for path in folder.iterdir()],
    "the older one under its name": renamed,
    "its three files of the older one, its own manifest": lambda folder: [
        shutil.copy(older(folder / name), folder / name) for name in manifest.FILES
    ],
}


def rows(lab: Lab) -> Iterator[Row]:
    """Each file, the folder, and all checkpoints."""
    for name in FILES:
        row = Row(f"{name} of the newest one, {len(DAMAGES)} kinds")
        for kind in lab.spread(list(DAMAGES), 2):
            one(lab, row, kind, lambda folder, kind=kind, name=name: DAMAGES[kind](folder / name))
        yield row
    row = Row("the folder of the newest one")
    for kind, damage in lab.spread([*FOLDERS.items()], 2):
        one(lab, row, kind, damage)
    yield row
    yield all_of_them(lab)


def one(lab: Lab, row: Row, kind: str, damage: Damage) -> None:
    """Damages the newest checkpoint and submits the job again."""
    trial = lab.trial(NEWEST)
    damage(trial.checkpoints / f"step-{NEWEST:08d}")
    attempt = trial.attempt()
    unseen = [] if f"damaged-step-{NEWEST:08d}-0" in attempt.after.folders else ["it was not seen"]
    row.add(attempt.ending.status, [*unseen, *lab.check(trial, harmed=frozenset({NEWEST}))], kind)


def all_of_them(lab: Lab) -> Row:
    """Every checkpoint damaged: the job stops and touches nothing; with one put back, it goes on."""
    # The oldest has none to take a file of.
    kinds = [kind for kind in DAMAGES if kind != "replaced by the older one's"]
    row = Row(f"a file of every one, {len(kinds)} kinds")
    for number, kind in enumerate(lab.spread(kinds, 2)):
        trial, name = lab.trial(NEWEST), FILES[number % len(FILES)]
        shutil.copytree(trial.checkpoints, trial.folder / "copy", symlinks=True)
        for step in store.steps_in(trial.checkpoints):
            DAMAGES[kind](trial.checkpoints / store.name_of(step) / name)
        row.add(*stops_and_goes_on(lab, trial), kind)
    return row


def stops_and_goes_on(lab: Lab, trial: Trial) -> tuple[str, list[str]]:
    """A submission that must stop and touch nothing; one after the checkpoints were put back must end well."""
    attempt = trial.attempt()
    lost = [] if attempt.ending.status == "stopped" else ["it did not stop"]
    if attempt.before != attempt.after or attempt.steps:
        lost.append("something was touched")
    shutil.rmtree(trial.checkpoints)
    os.rename(trial.folder / "copy", trial.checkpoints)
    trial.attempt()
    return attempt.ending.status, [*lost, *lab.check(trial)]
