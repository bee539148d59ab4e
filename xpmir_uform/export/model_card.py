"""The README of a saved model: what it is, from what data, and how good."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import printable, read_bytes
from xpmir_uform.checkpoints import manifest

NAME = "README.md"

Measures = Mapping[str, Mapping[str, float]]
"""By validation, then by measure."""

USE = '```python\nfrom xpmir_uform import load_model\n\nmodel = load_model("path/to/this/folder")\n```'


def measures(checkpoint: Path) -> dict[str, dict[str, float]]:
    """What the validations of its job measured at the epoch of a checkpoint, by the place of each among the listeners.

    Files that are not there or cannot be read are left out.
    """
    folder = next((parent for parent in checkpoint.parents if (parent / "out" / "listeners").is_dir()), None)
    epoch = str(manifest.read(checkpoint)["epoch"])
    found = {}
    for path in sorted(folder.glob("out/listeners/*/history.json")) if folder else ():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            values = json.loads(read_bytes(path))[epoch].items()
            found[path.parent.name] = {str(name): float(value) for name, value in values}
    return found


def text(model: Any, header: Mapping[str, Any], facts: Mapping[str, Any] | None, found: Measures) -> str:
    """The README.

    Args:
        model: its configuration.
        header: of its file of weights.
        facts: the manifest of the checkpoint that it comes from, if there is one.
        found: what was measured at that checkpoint.
    """
    parts = [f"# {_title(model)}", *_model(model, header), USE]
    if facts is not None:
        parts += ["## Training", *_training(facts)]
    if found:
        parts += ["## Measures", "Of the validation data, at the epoch of these weights:", _block(_measured(found))]
    return "\n\n".join(parts) + "\n"


def _title(model: Any) -> str:
    return f"A model of type {model.__xpmtype__.identifier}"


def _model(model: Any, header: Mapping[str, Any]) -> Iterator[str]:
    count = sum(prod(entry["shape"]) for entry in header.values())
    kinds = ", ".join(sorted({str(entry["dtype"]) for entry in header.values()}))
    yield f"{count:,} values ({kinds}) in {len(header)} tensors. Its settings:"
    yield _block(_settings(model))


def _settings(config: Any, prefix: str = "") -> Iterator[str]:
    """Every field of a configuration, defaults too, by dotted name."""
    for argument, value in config.__xpm__.xpmvalues():
        name = f"{prefix}{argument.name}"
        if hasattr(value, "__xpm__"):
            yield f"{name} = {value.__xpmtype__.identifier}"
            yield from _settings(value, f"{name}.")
        elif value is not None:
            yield f"{name} = {value}"


def _training(facts: Mapping[str, Any]) -> Iterator[str]:
    git = facts["git"]
    source = f", commit {git['commit']}{' with changes' if git['dirty'] else ''}" if git else ""
    yield (
        f"Trained for {facts['step']:,} steps (epoch {facts['epoch']}) in {facts['precision']} on {facts['ranks']} "
        f"{'device' if facts['ranks'] == 1 else 'devices'} of kind {printable(facts['device'])}, by the task"
    )
    yield _block([facts["identifier"]])
    yield f"with {', '.join(f'{name} {version}' for name, version in map(_plain, facts['versions'].items()))}{source}."
    yield f"Data (fingerprint `{printable(facts['hashes']['data'])[:64]}`), losses and all that decides the result:"
    rest = (item for item in map(_plain, facts["config"].items()) if not item[0].startswith("model."))
    yield _block(f"{name} = {value}" for name, value in rest)


def _measured(found: Measures) -> Iterator[str]:
    for validation, values in found.items():
        yield f"validation {validation}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def _plain(item: tuple[Any, Any]) -> tuple[str, str]:
    """A name and a value as texts; the place of a file says nothing elsewhere, and is left out."""
    name, value = map(str, item)
    return name, "(a path)" if value.startswith(("/", "~")) else value


def _block(lines: Any) -> str:
    return "\n".join(["```", *(printable(line).replace("`", "'") for line in lines), "```"])
