"""The manifest of a checkpoint: what it holds, of which task, and where it comes from.

``manifest.json`` is written last and in one form alone (sorted keys, one digest of everything else), so that any
changed byte of it is seen; it holds size and sha256 of every other file, so that any changed byte of theirs is.
"""

import errno
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import JSON_BYTES, NotAFile, change, describe, difference, read_bytes, seal, unseal
from xpmir_uform.model.weights import MANIFEST

NAME = MANIFEST
FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
"""What a checkpoint holds beside its manifest."""
ABSENT = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def _is_pairs(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())


_REFERENCE = {"step": _is_count, "identifier": str, "sha256": str}
_AUDIT = {"time": str, "source": _REFERENCE, "fields": _is_pairs, "reason": (str, None)}
_SHAPE: Mapping[str, Any] = {
    "step": _is_count,
    "epoch": _is_count,
    "identifier": str,
    "config": dict,
    "layout": {"model": dict, "optimizer": dict},
    "hashes": {"data": str},
    "versions": dict,
    "git": ({"commit": str, "dirty": bool}, None),
    "environment": {"device_name": str},
    "device": str,
    "precision": str,
    "ranks": _is_count,
    "previous": (_REFERENCE, None),
    "audits": [_AUDIT],
    "files": {name: {"size": _is_count, "sha256": str} for name in FILES},
}
"""What each field has to be: a type, a test, the fields of an object, the parts of a list, or one of several."""


def fault(value: Any, shape: Any, name: str = "it") -> str:
    """What is wrong with a field of a manifest; empty: nothing."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{name} is no object"
        lacking = [key for key in shape if key not in value]
        if lacking:
            return f"{name} lacks {', '.join(lacking)}"
        return next(filter(None, (fault(value[key], part, key) for key, part in shape.items())), "")
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{name} is no list"
        return next(filter(None, (fault(part, shape[0], name) for part in value)), "")
    if isinstance(shape, tuple):
        return "" if value is None else fault(value, shape[0], name)
    right = isinstance(value, shape) if isinstance(shape, type) else shape(value)
    return "" if right else f"{name} is {str(value)[:40]!r}"


class Damaged(ValueError):
    """The content of a checkpoint is not what was written: it is missing, cut or changed."""


def write(folder: Path, values: Mapping[str, Any]) -> None:
    """Describes the files of ``folder`` and writes its manifest."""
    whole = {**values, "format": FORMAT, "files": {name: describe(folder / name) for name in FILES}}
    (folder / NAME).write_text(seal(whole))


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; the other files are not looked at.

    Raises:
        Damaged: it is missing or not what was written.
        ValueError: it is of another format.
    """
    try:
        values = unseal(content(folder / NAME))
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"{folder / NAME} {error}") from error
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{folder} is a checkpoint of format {values.get('format')}, expected {FORMAT}: read it with the version "
            "of xpmir-uform that wrote it"
        )
    said = fault(values, _SHAPE)
    if said or set(values["files"]) != set(FILES):
        raise Damaged(f"{folder / NAME} is not a manifest: {said or 'it lists other files'}")
    return values


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is what was written.

    Raises:
        Damaged: one is not. Errors of the file system are raised as they are: they say nothing about the content.
    """
    manifest = read(folder)
    for name, expected in manifest["files"].items():
        try:
            said = change(folder / name, expected)
        except OSError as error:
            raise _damage(folder / name, error) from error
        if said:
            raise Damaged(f"{folder / name} {said}")
    return manifest


def verified(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """The content of one file, read once and checked.

    Raises:
        Damaged: it is not what was written.
    """
    expected = manifest["files"][name]
    data = content(folder / name, expected["size"])
    said = difference({"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}, expected)
    if said:
        raise Damaged(f"{folder / name} {said}")
    return data


def content(path: Path, most: int = JSON_BYTES) -> bytes:
    """The bytes of a file of at most ``most``.

    Raises:
        Damaged: there is no such file, or it is larger.
    """
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise _damage(path, error) from error
    except ValueError as error:
        raise Damaged(str(error)) from error


def _damage(path: Path, error: OSError) -> OSError | Damaged:
    """What is missing or no file is damage; other errors say nothing about the content and stay what they are."""
    if error.errno in ABSENT or isinstance(error, NotAFile):
        return Damaged(f"{path} is missing or no file")
    return error


def reference(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """How a later checkpoint names this one: its step, its task and the sha256 of its manifest."""
    return {
        "step": manifest["step"],
        "identifier": manifest["identifier"],
        "sha256": hashlib.sha256(content(folder / NAME)).hexdigest(),
    }
