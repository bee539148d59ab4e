"""Show, verify, trace, compare or export checkpoints.

PATH is a checkpoint, or the folder of a job (then its newest one; ``verify``: all of them).

    show PATH           what it is, of which task and settings, made where
    verify PATH         whether every byte is what was written; status 1 if not
    lineage PATH        what it follows, and each time training was resumed
    diff PATH PATH      what differs: configuration, data, versions, tensors
    export PATH FOLDER  writes its model to a folder for load_model; --step or --best choose one of a job
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import printable

SHOWN = 20
"""Tensors that ``diff`` lists."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (function, places) in ACTIONS.items():
        action = actions.add_parser(name, help=(function.__doc__ or "").partition("\n")[0])
        for place in places:
            action.add_argument(place, metavar=place.upper(), type=Path, help=PLACES[place])
        if name == "export":
            one = action.add_mutually_exclusive_group()
            one.add_argument("--step", type=int, help="the checkpoint of that step")
            one.add_argument("--best", action="store_true", help="the checkpoint that the job's validation kept")
            action.add_argument(
                "--trust", action="append", default=[], metavar="MODULE.CLASS", help="of your own model"
            )


def run(arguments: argparse.Namespace) -> int:
    """Prints; returns 1 if a checkpoint is damaged.

    Raises:
        ValueError: a checkpoint is damaged, or is not there.
    """
    function, places = ACTIONS[arguments.action]
    options = {name: getattr(arguments, name) for name in ("step", "best", "trust") if hasattr(arguments, name)}
    return function(*(getattr(arguments, place) for place in places), **options)


def say(text: Any) -> None:
    """Prints what a file may have brought, on one line: no character that a terminal obeys."""
    print(printable(text).replace("\n", "\\n"))


def export(path: Path, folder: Path, step: int | None, best: bool, trust: list[str]) -> int:
    """Writes the model of a checkpoint."""
    from xpmir_uform.export.pretrained import export_checkpoint

    checkpoint = export_checkpoint(path, folder, step, best, trust)
    say(f"The model of {checkpoint} is in {folder}: load_model({str(folder)!r})")
    return 0


def show(path: Path) -> int:
    """Prints one manifest, with every setting."""
    from xpmir_uform.checkpoints import manifest, store

    folder = store.resolve(path)
    for name, value in _described(folder.resolve(), manifest.verify(folder)):
        say(f"{name:<16}  {value}")
    return 0


def _described(folder: Path, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(folder)
    yield "step", f"{found['step']}, epoch {found['epoch']}"
    yield "task", found["identifier"]
    for name, file in found["files"].items():
        yield "file", f"{name}  {file['size']:,} bytes  {file['sha256'][:16]}"
    ranks = f"{found['ranks']} rank{'s' if found['ranks'] > 1 else ''}"
    yield "made on", f"{found['device']} ({found['environment']['device_name']}), {found['precision']}, {ranks}"
    yield "versions", ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    git = found["git"]
    yield "git", f"{git['commit'][:12]}{', with changes' if git['dirty'] else ''}" if git else "none"
    yield "follows", _named(found["previous"]) if found["previous"] else "nothing: it is the first"
    for name, value in found["hashes"].items():
        yield name.replace("_", " "), value[:16]
    for name, value in found.get("settings", found["config"]).items():
        yield "", f"{name} = {value}"


def _named(reference: Mapping[str, Any]) -> str:
    return f"step {reference['step']} of {reference['identifier']} ({reference['sha256'][:12]})"


def verify(path: Path) -> int:
    """Checks one checkpoint, or all of a job."""
    from xpmir_uform.checkpoints import manifest, store

    folder = store.shelf_of(path)
    several = not (path / manifest.NAME).exists() and store.steps_in(folder)
    damaged = 0
    for each in [folder / store.name_of(step) for step in store.steps_in(folder)] if several else [store.resolve(path)]:
        try:
            manifest.verify(each)
            say(f"whole    {each}")
        except manifest.Damaged as error:
            damaged += 1
            say(f"DAMAGED  {each}: {error}")
    return 1 if damaged else 0


def lineage(path: Path) -> int:
    """Prints the checkpoints that one follows, and its resumes."""
    from xpmir_uform.checkpoints import lineage, store

    folders = list(lineage.chain(store.resolve(path)))
    for folder, found in folders:
        say(f"step {found['step']:>8}  {folder}")
    before = folders[-1][1]["previous"]
    if before:
        say(f"step {before['step']:>8}  {before['identifier']}, not here any more")
    for audit in folders[0][1]["audits"]:
        say(f"resumed {audit['time']} from {_named(audit['source'])}{_because(audit)}")
    return 0


def _because(audit: Mapping[str, Any]) -> str:
    fields = ", ".join(f"{name}: {theirs} -> {ours}" for name, (theirs, ours) in audit["fields"].items())
    return f"; {audit['reason'] or 'with'}: {fields}" if fields else ""


def diff(path: Path, other: Path) -> int:
    """Prints what two checkpoints do not share."""
    from xpmir_uform.checkpoints import format, lineage, store
    from xpmir_uform.checkpoints.compatibility import side_by_side

    first, second = (format.read(store.resolve(each)) for each in (path, other))
    fields = lineage.manifest_differences(first.manifest, second.manifest)
    table = side_by_side(fields, ("field", "first", "second")) if fields else "The manifests agree."
    for line in table.split("\n"):
        say(line)
    tensors = lineage.tensor_differences(first, second)
    say(f"{len(tensors)} tensors differ." if tensors else "Every tensor is the same, bit for bit.")
    for name, said in list(tensors.items())[:SHOWN]:
        say(f"  {name}  {said}")
    if len(tensors) > SHOWN:
        say(f"  and {len(tensors) - SHOWN} more")
    return 0


PLACES = {
    "path": "a checkpoint, or the folder of a job",
    "other": "another one",
    "folder": "what to write; an older model there is replaced",
}
ACTIONS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "show": (show, ("path",)),
    "verify": (verify, ("path",)),
    "lineage": (lineage, ("path",)),
    "diff": (diff, ("path", "other")),
    "export": (export, ("path", "folder")),
}
