"""Files of JSON lines that only grow, are cut into parts by size, and can be taken back to an earlier step.

The newest lines are in ``name.jsonl``; older parts are ``name-0001.jsonl``, ``name-0002.jsonl``, ... in the order of
time. JSON has no NaN and no infinity: those are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from xpmir_uform.data.disk import permitted, refusal
from xpmir_uform.learner.files import sync

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(entry: Mapping[str, Any]) -> bytes:
    """One line."""
    try:
        text = json.dumps(entry, allow_nan=False)
    except ValueError:
        text = json.dumps(_named(entry), allow_nan=False)
    return text.encode() + b"\n"


def _named(value: Any) -> Any:
    """A value whose numbers that are not finite are their names."""
    if isinstance(value, Mapping):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode(line: bytes) -> Entry | None:
    """The entry of a line; None: it is torn or damaged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    return _numbered(entry) if b"NaN" in line or b"Infinity" in line else entry


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(part) for key, part in value.items()}
    return NUMBERS.get(value, value) if isinstance(value, str) else value


def parts(path: Path) -> list[Path]:
    """The files that exist of a journal, oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{4,}}){re.escape(path.suffix)}")
    older = {int(match[1]): path.parent / part for part in _names(path.parent) if (match := name.fullmatch(part))}
    return [*(older[number] for number in sorted(older)), *([path] if path.exists() else [])]


def _names(folder: Path) -> list[str]:
    """What a folder holds; nothing if it does not exist. ``Path.glob`` finds nothing in one it cannot read, too."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def read(path: Path) -> Iterator[Entry]:
    """Every entry, oldest first; a line that cannot be read is left out, with a warning unless it is the last."""
    for part in parts(path):
        with permitted(part), part.open("rb") as file:
            for number, line in enumerate(file, 1):
                entry = decode(line)
                if entry is not None:
                    yield entry
                elif line.endswith(b"\n"):
                    logger.warning("line %d of %s cannot be read and is left out", number, part)


def read_last(path: Path, count: int) -> list[Entry]:
    """The last ``count`` entries, oldest first."""
    backwards = (entry for part in reversed(parts(path)) for line in _lines(part)[::-1] if (entry := decode(line)))
    return list(islice(backwards, count))[::-1]


def _lines(part: Path) -> list[bytes]:
    with permitted(part):
        return part.read_bytes().splitlines(keepends=True)


class Journal:
    """Appends entries; what cannot be written is warned of once and left out.

    Args:
        path: the file.
        part_bytes: a larger file becomes an older part; 0: never.
    """

    def __init__(self, path: Path, part_bytes: int = 0) -> None:
        self.path = path
        self.part_bytes = part_bytes
        self.warned = False
        self._descriptor: int | None = None
        self._size = 0
        self._owed: list[Callable[[], None]] = []
        """What is to be done before anything is added, else a step would be there twice."""

    def append(self, entry: Mapping[str, Any]) -> bool:
        """Adds a line, whole or not at all; answers whether it is there."""
        line = encode(entry)
        return self._attempt(self._settle) and self._attempt(lambda: self._append(line))

    def sync(self) -> bool:
        """Waits until every line is on the disk."""
        return self._attempt(lambda: None if self._descriptor is None else os.fsync(self._descriptor))

    def rewind(self, step: int) -> bool:
        """Drops the entries of later steps, and a torn last line."""
        self._owed.append(lambda: self._rewind(step))
        return self._attempt(self._settle)

    def keep(self, wanted: Callable[[Entry], bool]) -> bool:
        """Drops the entries that are not wanted, of a journal of one part."""
        self._owed.append(lambda: self._keep(wanted))
        return self._attempt(self._settle)

    def amend(self, changes: Mapping[str, Any]) -> bool:
        """Changes fields of the newest entry, all or none of them."""
        self._owed.append(lambda: self._amend(changes))
        return self._attempt(self._settle)

    def close(self) -> None:
        """Ends the writing; an entry that is added later begins it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _attempt(self, work: Callable[[], object]) -> bool:
        try:
            work()
            return True
        except OSError as error:
            if not self.warned:
                owner = f"; {refusal(self.path)}" if isinstance(error, PermissionError) else ""
                logger.warning("%s cannot be written, training goes on without it: %s%s", self.path, error, owner)
            self.warned = True
            return False

    def _settle(self) -> None:
        while self._owed:
            self._owed[0]()
            del self._owed[0]

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = os.fstat(self._descriptor).st_size
            sync(self.path.parent)
        return self._descriptor

    def _append(self, line: bytes) -> None:
        descriptor = self._open()
        if self.part_bytes and self._size and self._size + len(line) > self.part_bytes:
            os.fsync(descriptor)
            self._rotate()
            descriptor = self._open()
        if os.fstat(descriptor).st_size > self._size:
            # What a failed write has left.
            os.ftruncate(descriptor, self._size)
        written = 0
        while written < len(line):
            written += os.write(descriptor, line[written:])
        self._size += written

    def _rotate(self) -> None:
        numbers = [int(part.stem.rsplit("-", 1)[1]) for part in parts(self.path) if part != self.path]
        name = f"{self.path.stem}-{max(numbers, default=0) + 1:04d}{self.path.suffix}"
        os.rename(self.path, self.path.with_name(name))
        self.close()

    def _rewind(self, step: int) -> None:
        self.close()
        for part in reversed(parts(self.path)):
            lines = _lines(part)
            kept = next((n for n in range(len(lines), 0, -1) if _ends_by(lines[n - 1], step)), 0)
            if kept:
                os.truncate(part, sum(map(len, lines[:kept])))
                return
            part.unlink()

    def _keep(self, wanted: Callable[[Entry], bool]) -> None:
        self.close()
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = b"".join(encode(entry) for entry in read(self.path) if wanted(entry))
        if kept != content:
            self._replace(kept)

    def _amend(self, changes: Mapping[str, Any]) -> None:
        self.close()
        lines = _lines(self.path) if self.path.exists() else []
        newest = decode(lines[-1]) if lines else None
        if newest is not None:
            self._replace(b"".join([*lines[:-1], encode({**newest, **changes})]))

    def _replace(self, content: bytes) -> None:
        aside = self.path.with_name(f".{self.path.name}.part")
        aside.write_bytes(content)
        os.replace(aside, self.path)


def _ends_by(line: bytes, step: int) -> bool:
    entry = decode(line) if line.endswith(b"\n") else None
    return entry is not None and entry.get("step", 0) <= step
