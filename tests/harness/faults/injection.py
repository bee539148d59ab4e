"""File operations of a run, each of which can be killed, made to fail, or counted.

What a training does below its job's folder goes through ``os``, ``open`` and safetensors; all three are replaced in the
process that trains, for its main thread. TensorBoard writes in a thread of its own and is not touched.
"""

import io
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from xpm_torch import loggers  # noqa: F401  (loaded before the functions that it takes are replaced)

from xpmir_uform.model import weights as model_files

CHANGES = (
    "mkdir", "rmdir", "unlink", "rename", "replace", "link", "symlink", "truncate", "open", "write", "pwrite", "fsync",
    "ftruncate",
)  # fmt: skip
READS = ("readlink", "stat", "lstat", "scandir", "listdir")
TARGET_SECOND = ("rename", "replace", "link", "symlink")

Act = Callable[[int, str, str], None]
"""Called before operation ``number`` with its name and its path; may raise, or end the process."""


class Operations:
    """Calls ``act`` before every operation below ``folder``.

    A write is two operations: before it, and with half of it done.

    Args:
        reads: whether operations that change nothing count too.
    """

    def __init__(self, folder: Path, act: Act = lambda number, name, path: None, reads: bool = False) -> None:
        self.folder = str(folder)
        self.act = act
        self.seen: list[str] = []
        self.main = threading.get_ident()
        self.busy = False
        self.reads = reads
        self.before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """From now on."""
        for name in (*CHANGES, *(READS if self.reads else ())):
            self._put(os, name, self._wrap(name, getattr(os, name)))
        self._put(io, "open", self._open(io.open))
        self._put(model_files, "save_file", self._save(model_files.save_file))

    def remove(self) -> None:
        """No longer."""
        for owner, name, real in self.before:
            setattr(owner, name, real)
        self.before.clear()

    def __enter__(self) -> "Operations":
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _put(self, owner: Any, name: str, call: Any) -> None:
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, call)

    def tell(self, name: str, path: str) -> None:
        """An operation begins."""
        if self.busy or threading.get_ident() != self.main or not path.startswith(self.folder):
            return
        if f"{self.folder}/runs" in path:
            return
        self.busy = True
        try:
            self.seen.append(f"{name} {path.removeprefix(self.folder)}")
            self.act(len(self.seen) - 1, name, path)
        finally:
            self.busy = False

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args, **kwargs):
            path = self._path(args[1] if name in TARGET_SECOND else args[0] if args else ".", kwargs)
            self.tell(name, path)
            if name in ("write", "pwrite"):
                return self._half(real, args, path)
            return real(*args, **kwargs)

        return call

    def _half(self, real: Any, args: Sequence[Any], path: str) -> int:
        descriptor, data, *rest = args
        part = len(data) // 2
        written = real(descriptor, data[:part], *rest) if part else 0
        self.tell("half", path)
        return written or real(descriptor, data, *rest)

    def _open(self, real: Any) -> Any:
        def call(file, mode="r", *args, **kwargs):
            writes = bool({*mode} & {*"wax+"})
            path = self._path(file, {})
            if writes or self.reads:
                self.tell("open", path)
            opened = real(file, mode, *args, **kwargs)
            return Watched(opened, path, self, writes) if path.startswith(self.folder) else opened

        return call

    def _save(self, real: Any) -> Any:
        def call(tensors, path, *rest):
            self.tell("save", str(path))
            real(tensors, path, *rest)
            if str(path).startswith(self.folder):
                data = Path(path).read_bytes()
                os.truncate(path, len(data) // 2)
                self.tell("half", str(path))
                Path(path).write_bytes(data)

        return call

    def _path(self, path: Any, keywords: dict[str, Any]) -> str:
        """The path that an operation is about, absolute; of a descriptor too."""
        before, self.busy = self.busy, True
        try:
            if isinstance(path, int):
                return readlink(f"/proc/self/fd/{path}")
            folder = keywords.get("dir_fd")
            base = readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
            return os.path.join(base, os.fsdecode(path))
        except OSError:
            return ""
        finally:
            self.busy = before


readlink = os.readlink


class Watched:
    """An open file whose reads and writes are told."""

    def __init__(self, file: Any, path: str, operations: Operations, writes: bool) -> None:
        self.file, self.path, self.operations, self.writes = file, path, operations, writes

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __iter__(self):
        return iter(self.file)

    def write(self, data):
        """Two operations."""
        self.operations.tell("write", self.path)
        half = len(data) // 2
        written = self.file.write(data[:half])
        self.file.flush()
        self.operations.tell("half", self.path)
        return written + self.file.write(data[half:])

    def read(self, *args):
        """One operation."""
        if self.operations.reads:
            self.operations.tell("read", self.path)
        return self.file.read(*args)

    def readinto(self, buffer):
        """One operation."""
        if self.operations.reads:
            self.operations.tell("read", self.path)
        return self.file.readinto(buffer)


def kill_at(at: int) -> Act:
    """Kills the process at one operation."""

    def act(number: int, name: str, path: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def fail_at(at: int, code: int, always: bool = False) -> Act:
    """Fails one operation, or it and all after it, as the system does."""

    def act(number: int, name: str, path: str) -> None:
        if number == at or (always and number > at):
            fail(code, name, path)

    return act


def fail(code: int, name: str, path: str) -> None:
    """The error of a system call; those on open files do not name them."""
    if name in ("save",) or (name == "half" and path.endswith((".tmp", ".safetensors"))):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")
    if name in ("write", "half", "pwrite", "read", "fsync", "ftruncate"):
        raise OSError(code, os.strerror(code))
    raise OSError(code, os.strerror(code), path)
