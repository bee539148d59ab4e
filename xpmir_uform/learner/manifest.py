"""The manifest of a checkpoint: what it holds, of which task, and where it comes from.

``manifest.json`` is written last and in one form alone (sorted keys, one digest of everything else), so that any
changed byte of it is seen; it holds size and sha256 of every other file, so that any changed byte of theirs is.
"""

import errno
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
"""What a checkpoint holds beside its manifest."""
ABSENT = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


class Damaged(ValueError):
    """The content of a checkpoint is not what was written: it is missing, cut or changed."""


def hash_of(values: Any) -> str:
    """sha256 of a value's JSON."""
    return hashlib.sha256(_text(values).encode()).hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def write(folder: Path, values: Mapping[str, Any]) -> None:
    """Describes the files of ``folder`` and writes its manifest."""
    whole = {**values, "format": FORMAT, "files": {name: describe(folder / name) for name in FILES}}
    (folder / NAME).write_text(_text({**whole, "digest": hash_of(whole)}))


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; the other files are not looked at.

    Raises:
        Damaged: it is missing or not what was written.
        ValueError: it is of another format.
    """
    text = content(folder / NAME)
    try:
        values = json.loads(text)
        digest = values.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder / NAME} is not a manifest ({type(error).__name__}: {error})") from error
    if digest != hash_of(values) or text != _text({**values, "digest": digest}).encode():
        raise Damaged(f"{folder / NAME} was changed: its digest is of other content")
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{folder} is a checkpoint of format {values.get('format')}, expected {FORMAT}: read it with the version "
            "of xpmir-uform that wrote it"
        )
    if set(values["files"]) != set(FILES):
        raise Damaged(f"{folder / NAME} lists {sorted(values['files'])}, expected {sorted(FILES)}")
    return values


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is what was written.

    Raises:
        Damaged: one is not. Errors of the file system are raised as they are: they say nothing about the content.
    """
    manifest = read(folder)
    for name, expected in manifest["files"].items():
        try:
            found = describe(folder / name)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            raise Damaged(f"{folder / name} is missing or no file") from error
        _compare(folder / name, found, expected)
    return manifest


def verified(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """The content of one file, read once and checked.

    Raises:
        Damaged: it is not what was written.
    """
    data = content(folder / name)
    _compare(folder / name, {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}, manifest["files"][name])
    return data


def content(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        Damaged: there is no such file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        raise Damaged(f"{path} is missing or no file") from error


def reference(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """How a later checkpoint names this one: its step, its task and the sha256 of its manifest."""
    return {
        "step": manifest["step"],
        "identifier": manifest["identifier"],
        "sha256": hashlib.sha256(content(folder / NAME)).hexdigest(),
    }


def _text(values: Any) -> str:
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def _compare(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key in ("size", "sha256"):
        if found[key] != expected[key]:
            raise Damaged(f"{path} was changed: its {key} is {found[key]}, expected {expected[key]}")
