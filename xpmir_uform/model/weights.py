"""Weights in safetensors files."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from xpmir_uform.base.checked_files import (
    change,
    hash_of,
    is_description,
    new_file,
    opened,
    permitted,
    quoted,
    read_bytes,
    unseal,
)

FILE_NAME = "model.safetensors"
DEFINITION = "experimaestro.json"
"""The configuration of a model that was saved with its weights, which it has the sha256 of."""

MANIFEST = "manifest.json"
"""Of a checkpoint, which has the sha256 of its weights."""

HEADER_BYTES = 16 << 20

LISTED = 8
"""Tensors that a message names."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path, source: str = "") -> None:
    """Writes a safetensors file: the same bytes for the same tensors and source.

    Args:
        source: is put into the metadata; a single entry, since safetensors writes several in any order.
    """
    with new_file(path):
        save_file(dict(tensors), str(path), {"source": source} if source else None)


def save_weights(state: Mapping[str, Tensor], path: Path, source: str = "") -> None:
    """Write a state dict to a ``.safetensors`` file, or to ``model.safetensors`` in a folder.

    Tied and strided tensors are written in full. A file that is there is replaced at once, or not at all.

    Args:
        source: where the weights are from, for the file's metadata.
    """
    target = path if path.suffix == ".safetensors" else path / FILE_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        write_tensors(whole, partial, source)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def weights_file(path: Path) -> Path:
    """The file of weights that ``path`` is, or that the folder ``path`` holds.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it cannot be looked for.
    """
    candidates = [path, path / FILE_NAME, path / "model" / FILE_NAME]
    with permitted(path):
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"no weights at {path}: expected a .safetensors file or a folder with {FILE_NAME}. If a training wrote "
            "them there, they were removed since: put them back, or train again in a fresh folder"
        )
    return file


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file, or a folder that holds ``model.safetensors`` or ``model/model.safetensors``.

    The manifest or definition beside it, if there is one, says what the file has to hold.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ValueError: it is not a whole safetensors file, or not the one that was written.
    """
    file = weights_file(path)
    check_unchanged(file)
    return read_tensors(file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ValueError: it is none, or not whole.
    """
    try:
        check_header(file)
        return load_file(str(file))
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): save the model again") from error


def check_unchanged(file: Path, follow: bool = True) -> None:
    """Refuses weights that are not what the manifest or definition beside them says.

    Args:
        follow: a link to a file is one.

    Raises:
        ValueError: they are not, or it cannot be read.
    """
    record = recorded(file, follow)
    with opened(file, follow):
        said = change(file, record, follow) if record else ""
    if said:
        raise ValueError(
            f"{file} {said}. Something changed it after it was written: put it back from a copy, save it again from "
            "its training, or train again in a fresh folder"
        )


def recorded(file: Path, follow: bool = True) -> Mapping[str, Any] | None:
    """Size and sha256 of a file of weights, as the manifest or definition beside it has them; None: there is neither.

    Raises:
        ValueError: there is one, and it was changed.
    """
    for name, read in ((MANIFEST, unseal), (DEFINITION, _definition)):
        beside = file.with_name(name)
        with permitted(beside):
            if not os.path.lexists(beside):
                continue
        try:
            files = read(read_bytes(beside, follow=follow)).get("files", {})
            record = files.get(file.name) if isinstance(files, dict) else files
            if record is not None and not is_description(record):
                raise ValueError(f"does not tell size and sha256 of {file.name}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{beside} {error}: put it back from a copy, or save the model again") from error
        return record
    return None


def _definition(text: bytes) -> dict[str, Any]:
    """The last entry of a definition, which describes the weights; empty if it is of another program.

    Raises:
        ValueError: it was changed.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is damaged ({error})") from error
    last = entries[-1] if isinstance(entries, list) and entries else None
    if not isinstance(last, dict) or "digest" not in last:
        return {}
    rest = {name: value for name, value in last.items() if name != "digest"}
    if last["digest"] != hash_of([*entries[:-1], rest]):
        raise ValueError("was changed: its digest is of other content")
    return rest


def check_header(file: Path, follow: bool = True) -> dict[str, Any]:
    """The header of a safetensors file: type and shape of each tensor by name, which fill the file to its end.

    Raises:
        SafetensorError: it has none, one that is too large, or one of another file.
    """
    with opened(file, follow) as content:
        size = int.from_bytes(content.read(8), "little")
        if size > HEADER_BYTES:
            raise SafetensorError(f"its header has {size:,} bytes, expected at most {HEADER_BYTES:,}")
        header = content.read(size)
    try:
        found = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise SafetensorError(f"its header is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SafetensorError("its header is no JSON object")
    found.pop("__metadata__", None)
    try:
        with safe_open(str(file), "pt"):
            return found
    except SafetensorError as error:
        raise SafetensorError(quoted(error, 200)) from error


def check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights of another model.

    Raises:
        ValueError: naming the tensors that are missing, unexpected, or of another shape or type.
    """
    misshapen = [
        f"{name} {quoted(tuple(found[name].shape))} for {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    whole = [
        f"{name} {found[name].dtype}"
        for name, value in expected.items()
        if name in found and found[name].is_floating_point() != value.is_floating_point()
    ]
    faults = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": misshapen,
        "of another type": whole,
    }
    said = "; ".join(f"{fault}: {_listed(names)}" for fault, names in faults.items() if names)
    if said:
        raise ValueError(
            f"the weights at {path} are not of this model ({said}): load them into the model they came from"
        )


def _listed(names: Sequence[str]) -> str:
    """The first of some names of tensors, which the file brought, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(quoted(name, 120) for name in names[:LISTED]) + more
