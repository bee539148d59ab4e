"""Where a checkpoint comes from, and how two of them differ."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from xpmir_uform.checkpoints import manifest, store
from xpmir_uform.checkpoints.compatibility import differences, layout_of
from xpmir_uform.checkpoints.format import Loaded

PLAIN = ("step", "identifier", "device", "precision", "ranks")


def chain(path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A checkpoint, the one it follows, and so on as far as they still lie beside it; each with its manifest.

    Raises:
        Damaged: a manifest on the way is not what was written.
    """
    folder: Path | None = path.resolve()
    while folder is not None:
        found = manifest.read(folder)
        yield folder, found
        folder = _before(folder.parent, found["previous"])


def _before(folder: Path, reference: Mapping[str, Any] | None) -> Path | None:
    if reference is None:
        return None
    path = folder / store.name_of(reference["step"])
    there = path.is_dir() and manifest.reference(path, manifest.read(path)) == reference
    return path if there else None


def manifest_differences(found: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What two manifests say differently of task, data, layouts, versions and machine: by name, the value of each."""
    plain = {
        **_pairs("", *({name: side[name] for name in PLAIN} for side in (found, other))),
        **_pairs("version of ", found["versions"], other["versions"]),
        **_pairs("environment: ", found["environment"], other["environment"]),
    }
    return {**plain, **differences(found, other)}


def _pairs(prefix: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[Any]]:
    pairs = {f"{prefix}{name}": [ours.get(name), theirs.get(name)] for name in sorted(ours.keys() | theirs.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def tensor_differences(found: Loaded, other: Loaded) -> dict[str, str]:
    """How each tensor that is not bit for bit the same differs: the largest difference, or the layouts."""
    told = {}
    for kind, (ours, theirs) in {
        "weight ": (found.weights, other.weights),
        "optimizer ": (_flat(found), _flat(other)),
    }.items():
        for name in sorted(ours.keys() | theirs.keys()):
            said = _difference(ours.get(name), theirs.get(name))
            if said:
                told[f"{kind}{name}"] = said
    return told


def _flat(loaded: Loaded) -> dict[str, torch.Tensor]:
    return {
        f"{number}/{parameter}/{key}": value
        for number, state in enumerate(loaded.optimizer["optimizers"])
        for parameter, entries in state["state"].items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def _difference(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> str:
    if ours is None or theirs is None:
        return "only in the second" if ours is None else "only in the first"
    if layout_of(ours) != layout_of(theirs):
        return f"{layout_of(ours)} and {layout_of(theirs)}"
    if ours.view(torch.uint8).equal(theirs.view(torch.uint8)) if ours.ndim else ours.equal(theirs):
        return ""
    return f"differs by up to {(ours.double() - theirs.double()).abs().max().item():.3g}"
