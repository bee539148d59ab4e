"""Clocks that jump, files that do not belong there, links that are broken."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.harness import Lab, Row, Setup, Trial, before, send

STEP = 8
NEWEST = f"step-{STEP:08d}"
YEAR = 365 * 86400.0
real_time = time.time


def rows(lab: Lab) -> Iterator[Row]:
    """Clocks, stray files, links."""
    row = Row("the clock jumps by up to a year, back and forth; then SIGKILL")
    for seed in lab.spread(range(4), 1):
        trial = lab.trial()
        trial.attempt(kill_with_clock(seed))
        lab.resubmit(row, trial, again=jump(seed + 100))
    yield row
    row = Row("times of files in the future, the past, in reverse")
    for name, change in lab.spread([*TIMES.items()], 1):
        trial = lab.trial(STEP)
        touch(trial.job, change)
        trial.attempt()
        row.add(trial.attempts[-1].ending.status, lab.check(trial), name)
    yield row
    for title, cases in (("stray files and folders", STRAY), ("links and locks", LINKS)):
        row = Row(title)
        for name, change in lab.spread([*cases.items()], 4):
            trial = lab.trial(STEP)
            change(trial)
            trial.attempt()
            row.add(trial.attempts[-1].ending.status, lab.check(trial, harmed=HARMED.get(name, frozenset())), name)
        yield row
    row = Row("telemetry that is torn, damaged, or no file")
    for name, change in lab.spread([*TELEMETRY.items()], 3):
        trial = lab.trial(STEP)
        change(trial.job / "telemetry.jsonl")
        trial.attempt()
        row.add(trial.attempts[-1].ending.status, lab.check(trial, silent=name in SILENT), name)
    yield row


def jump(seed: int) -> Setup:
    """A clock that is never right."""

    def setup(rank: int) -> None:
        draw = random.Random(seed)
        time.time = lambda: real_time() + draw.uniform(-YEAR, YEAR)

    return setup


def kill_with_clock(seed: int) -> Setup:
    """The same, and the end of the process."""

    def setup(rank: int) -> None:
        jump(seed)(rank)
        before(STEP - 1, send(signal.SIGKILL))(rank)

    return setup


TIMES: dict[str, Callable[[int], float]] = {
    "future": lambda number: real_time() + YEAR,
    "past": lambda number: 0.0,
    "reverse": lambda number: real_time() - number,
}


def touch(folder: Path, change: Callable[[int], float]) -> None:
    """Sets the times of all files."""
    for number, path in enumerate(sorted(folder.rglob("*"))):
        os.utime(path, (change(number),) * 2, follow_symlinks=False)


def make(name: str, folder: bool = False, text: str = "nothing") -> Callable[[Trial], None]:
    """Puts a file, or a folder with one, among the checkpoints."""

    def change(trial: Trial) -> None:
        path = trial.checkpoints / name
        if folder:
            path.mkdir()
            path /= "model.safetensors"
        path.write_text(text)

    return change


def also(name: str) -> Callable[[Trial], object]:
    """A copy of the newest checkpoint under another name."""
    return lambda trial: shutil.copytree(trial.checkpoints / NEWEST, trial.checkpoints / name)


STRAY: dict[str, Callable[[Trial], object]] = {
    "a file": make("notes.txt"),
    "a folder of another name": make("step-abc", folder=True),
    "a file with the name of a checkpoint": make("step-00000011"),
    "a link with the name of a checkpoint": lambda trial: (trial.checkpoints / "step-00000011").symlink_to("nowhere"),
    "half of a checkpoint that was being written": make(".step-00000009.part", folder=True),
    "half of one that was being removed": make(".step-00000006.gone", folder=True),
    "a half-made link": lambda trial: (trial.checkpoints / ".last.part").symlink_to("nowhere"),
    "a copy made by hand": also("copy-of-8"),
    "one set aside before": also("damaged-step-00000009-0"),
    "half of a later checkpoint": make("step-00000010", folder=True),
    "a later one that is a copy": also("step-00000011"),
}
HARMED = {"half of a later checkpoint": frozenset({10}), "a later one that is a copy": frozenset({11})}


def relink(make_it: Callable[[Path], object]) -> Callable[[Trial], object]:
    """Puts something else in the place of ``last``."""

    def change(trial: Trial) -> None:
        (trial.checkpoints / "last").unlink()
        make_it(trial.checkpoints / "last")

    return change


def moved(trial: Trial) -> None:
    """The checkpoints lie elsewhere, behind a link."""
    elsewhere = trial.folder / "elsewhere"
    os.rename(trial.checkpoints, elsewhere)
    trial.checkpoints.symlink_to(elsewhere)


LINKS: dict[str, Callable[[Trial], object]] = {
    "last is gone": relink(lambda link: None),
    "last names nothing": relink(lambda link: link.symlink_to("step-00000099")),
    "last names itself": relink(lambda link: link.symlink_to("last")),
    "last names an older one": relink(lambda link: link.symlink_to(f"step-{STEP - 1:08d}")),
    "last is a file": relink(lambda link: link.write_text("nothing")),
    "last is an absolute link": relink(lambda link: link.symlink_to(link.with_name(NEWEST).absolute())),
    "the checkpoints lie behind a link": moved,
    "a lock that a dead process left": lambda trial: (trial.job / ".training.lock").write_text("999999\n"),
    "a lock with other content": lambda trial: (trial.job / ".training.lock").write_bytes(b"\xff\x00" * 99),
}

TELEMETRY: dict[str, Callable[[Path], object]] = {
    "a torn last line": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "a torn line after the last": lambda path: path.write_bytes(path.read_bytes() + b'{"step": 9, "lo'),
    "a line of later steps": lambda path: path.write_bytes(
        path.read_bytes() + path.read_bytes().splitlines(True)[-1].replace(b'"step": 8', b'"step": 9')
    ),
    "a damaged line": lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 3', b'"st\xffp: 3')),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
SILENT = ("a torn last line", "a damaged line", "gone", "a folder")
