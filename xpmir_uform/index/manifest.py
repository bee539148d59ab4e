"""What an index holds: ``index.json``, written last, with size and sha256 of every other file.

It is sealed: a byte of it, or of what it lists, that is not what was written is seen when the index is opened, before
a library maps a file. Names are given by the number of shards, so that no other file is ever opened.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import (
    NotAFile,
    describe,
    difference,
    is_description,
    opened,
    quoted,
    read_bytes,
    seal,
    unseal,
)

NAME = "index.json"
GRAPH = "pooled.usearch"
FORMAT = 2
KINDS = {"model": str, "documents": int, "shards": int, "files": dict}
"""The types of what the manifest tells."""


def shard_name(number: int) -> str:
    """Of the file of shard ``number``."""
    return f"{number:05}.safetensors"


def write_manifest(folder: Path, model: str, documents: int, shards: int) -> None:
    """Describes what is in ``folder``.

    Args:
        model: its fingerprint.
    """
    files = {path.name: describe(path) for path in sorted(folder.iterdir())}
    told = {"format": FORMAT, "model": model, "documents": documents, "shards": shards, "files": files}
    (folder / NAME).write_text(seal(told))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest alone; the other files are not looked at.

    Raises:
        ValueError: it is missing, not what was written, or of another format.
    """
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no {NAME}: expected a folder that xpmir-uform index wrote")
    try:
        told = unseal(read_bytes(path))
    except (ValueError, NotAFile) as error:
        raise ValueError(
            f"{path} is damaged, or of another format than {FORMAT} ({error}): build the index again"
        ) from error
    if told.get("format") != FORMAT:
        raise ValueError(
            f"{folder} has the format {quoted(told.get('format'))}, expected {FORMAT}: build the index again"
        )
    wrong = any(type(told.get(name)) is not kind for name, kind in KINDS.items())
    if wrong or not all(map(is_description, told["files"].values())):
        raise ValueError(f"{path} is damaged (its fields are of other types): build the index again")
    names = [shard_name(number) for number in range(told["shards"])] if 0 < told["shards"] <= len(told["files"]) else []
    if sorted(told["files"]) not in (names, sorted([*names, GRAPH])) or not names:
        raise ValueError(f"{path} is damaged (it lists other files than those of an index): build the index again")
    return told


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of an index whose every file is what was written.

    Raises:
        ValueError: one is not; names it.
    """
    told = read_manifest(folder)
    for name, expected in told["files"].items():
        path = folder / name
        try:
            said = _change(path, expected)
        except (FileNotFoundError, NotAFile) as error:
            said = f"is missing or no file ({error})"
        if said:
            raise ValueError(f"{path} {said}: put it back from a copy, or build the index again")
    return told


def _change(path: Path, expected: Mapping[str, Any]) -> str:
    """How a file differs from what is expected; empty: it does not. A file of another size is not read."""
    with opened(path) as file:
        found = os.fstat(file.fileno())
    if found.st_size != expected["size"]:
        return difference({"size": found.st_size}, expected)
    return difference(_described(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns), expected)


@lru_cache(maxsize=65_536)
def _described(path: Path, *identity: int) -> dict[str, Any]:
    """Size and sha256 of a file, which is read once in this process as long as it is the same one."""
    return describe(path)
