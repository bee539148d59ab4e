"""Files of JSON lines that only grow, are cut into parts by size, and can be taken back to an earlier step.

The newest lines are in ``name.jsonl``; older parts are ``name-0001.jsonl``, ``name-0002.jsonl``, ... in the order of
time. Each line ends with the CRC-32 of the rest, so that any changed byte of it is seen. JSON has no NaN and no
infinity: those are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

import json
import logging
import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

from xpmir_uform.base.atomic_files import sync
from xpmir_uform.base.checked_files import NotAFile, opened, refusal, replace_file

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

LINE_BYTES = 1 << 20
"""No line that is written is longer by far."""

MOST_TOLD = 20
"""Lines of a file that cannot be read and are told of one by one."""

SEAL = re.compile(rb'(?:, )?"crc": "([0-9a-f]{8})"}\n?\Z')
"""The end of a line: the CRC-32 of what the line would be without it."""

NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(entry: Mapping[str, Any]) -> bytes:
    """One line, with its checksum."""
    try:
        text = json.dumps(entry, allow_nan=False)
    except ValueError:
        text = json.dumps(_named(entry), allow_nan=False)
    return f'{text[:-1]}{", " if entry else ""}"crc": "{_checksum(text.encode())}"}}\n'.encode()


def _checksum(text: bytes) -> str:
    return f"{crc32(text):08x}"


def _named(value: Any) -> Any:
    """A value whose numbers that are not finite are their names."""
    if isinstance(value, Mapping):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode(line: bytes, sealed: bool = False) -> Entry | None:
    """The entry of a line, without its checksum; None: it is torn or damaged.

    Args:
        sealed: a line without a checksum is damaged too, as after one that has it; older versions wrote none.
    """
    found = SEAL.search(line)
    if found:
        line = line[: found.start()] + b"}"
        if found[1].decode() != _checksum(line):
            return None
    elif sealed:
        return None
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
            return None
        return _numbered(entry) if b"NaN" in line or b"Infinity" in line else entry
    except (ValueError, RecursionError):
        return None


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(part) for key, part in value.items()}
    return NUMBERS.get(value, value) if isinstance(value, str) else value


def parts(path: Path) -> list[Path]:
    """The files that exist of a journal, oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{4,}}){re.escape(path.suffix)}")
    older = {int(match[1]): path.parent / part for part in _names(path.parent) if (match := name.fullmatch(part))}
    return [*(older[number] for number in sorted(older)), *([path] if os.path.lexists(path) else [])]


def _names(folder: Path) -> list[str]:
    """What a folder holds; nothing if it does not exist. ``Path.glob`` finds nothing in one it cannot read, too."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def lines(path: Path) -> Iterator[tuple[bytes, int, Entry | None]]:
    """The lines of one file: the bytes, where they end, and the entry if it can be read.

    No more than ``LINE_BYTES`` are in memory: of a longer line the parts are lines that cannot be read.

    Raises:
        NotAFile: it is a link, a folder, a pipe or a device.
    """
    end, sealed, torn = 0, False, False
    with opened(path) as file:
        while line := file.readline(LINE_BYTES):
            end += len(line)
            entry = None if torn else decode(line, sealed)
            torn = not line.endswith(b"\n")
            sealed = sealed or (entry is not None and SEAL.search(line) is not None)
            yield line, end, entry


def read(path: Path) -> Iterator[Entry]:
    """Every entry, oldest first; a line that cannot be read is left out, with a warning unless it is the last."""
    for part in parts(path):
        number, unreadable = 0, 0
        try:
            for line, _, entry in lines(part):
                number += line.endswith(b"\n")
                if entry is not None:
                    yield entry
                elif line.endswith(b"\n"):
                    unreadable += 1
                    if unreadable <= MOST_TOLD:
                        logger.warning("line %d of %s cannot be read and is left out", number, part)
        except NotAFile as error:
            logger.warning("%s is left out: %s", part, error)
        if unreadable > MOST_TOLD:
            logger.warning("%d lines of %s cannot be read and are left out", unreadable, part)


def read_last(path: Path, count: int) -> list[Entry]:
    """The last ``count`` entries, oldest first."""
    found: list[Entry] = []
    for part in reversed(parts(path)):
        if len(found) < count:
            newest = deque((entry for _, _, entry in lines(part) if entry), maxlen=count - len(found))
            found = [*newest, *found]
    return found


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

    def restart(self, reason: object) -> None:
        """Sets every part aside and begins anew; nothing is deleted."""
        self.close()
        self._attempt(lambda: self._set_all_aside(reason))

    def _set_all_aside(self, reason: object) -> None:
        for part in parts(self.path):
            self._set_aside(part, reason)

    def _set_aside(self, part: Path, reason: object) -> None:
        free = (part.with_name(f"damaged-{part.name}-{number}") for number in count())
        target = next(name for name in free if not os.path.lexists(name))
        os.rename(part, target)
        logger.warning("%s was set aside as %s, and is begun anew: %s", part, target.name, reason)

    def _only_files(self) -> None:
        """Sets aside what lies in the place of a file and is none."""
        for part in parts(self.path):
            if not stat.S_ISREG(part.lstat().st_mode):
                self._set_aside(part, "it is a link, a folder, a pipe or a device")

    def _settle(self) -> None:
        if self._descriptor is None:
            self._only_files()
        while self._owed:
            self._owed[0]()
            del self._owed[0]

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, FLAGS, 0o666)
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
            ends = [end for line, end, entry in lines(part) if line.endswith(b"\n") and _is_by(entry, step)]
            if ends:
                os.truncate(part, ends[-1])
                return
            part.unlink()

    def _keep(self, wanted: Callable[[Entry], bool]) -> None:
        self.close()
        if not self.path.exists():
            return
        whole = [(line, entry) for line, _, entry in lines(self.path) if line.endswith(b"\n")]
        kept = b"".join(line for line, entry in whole if entry is None or wanted(entry))
        if len(kept) != self.path.stat().st_size:
            replace_file(self.path, kept)

    def _amend(self, changes: Mapping[str, Any]) -> None:
        self.close()
        whole = [(line, entry) for line, _, entry in lines(self.path)] if self.path.exists() else []
        if whole and whole[-1][1] is not None:
            before = b"".join(line for line, _ in whole[:-1])
            replace_file(self.path, before + encode({**whole[-1][1], **changes}))


def _is_by(entry: Entry | None, step: int) -> bool:
    found = 0 if entry is None else entry.get("step", 0)
    return entry is not None and isinstance(found, int) and found <= step
