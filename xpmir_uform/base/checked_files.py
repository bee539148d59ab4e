"""Files that others read, wrote or may have changed.

What is read is a regular file of a bounded size, and a refused permission is called that; what is copied shares nothing
with its source; what is written has the mode that the umask gives.
"""

import fcntl
import hashlib
import json
import os
import pwd
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EISDIR, ELOOP, ENXIO
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

JSON_BYTES = 16 << 20
"""Larger files of JSON are not read: manifests and definitions take a few hundred kilobytes at most."""

SHOWN = "\n\u200c\u200d"
"""Not printable for Python, and harmless: ends of lines, and Unicode's joiners, which emoji and many scripts use."""

_FICLONE = 0x40049409


class NotAFile(OSError):
    """In the place of a file there is a folder, a link, a pipe, a device or a socket."""


@contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Says of a refused permission where on the way to ``path`` it was met, who owns that, and what to do.

    Raises:
        PermissionError: in place of one that says less.
    """
    try:
        yield
    except PermissionError as error:
        raise PermissionError(error.errno, refusal(path), str(path)) from error


def refusal(path: Path) -> str:
    """Who refuses a permission: the first folder on the way that may not be entered, else ``path``, and its owner."""
    effective = os.access in os.supports_effective_ids
    parents = [*reversed(path.absolute().parents)]
    last = path if os.path.lexists(path) else path.parent
    at = next((part for part in parents if not os.access(part, os.X_OK, effective_ids=effective)), last)
    try:
        found = at.stat()
        owner = f"belongs to {_user(found.st_uid)} and has mode {stat.S_IMODE(found.st_mode):04o}"
    except OSError as error:
        owner = f"cannot be looked at ({error.strerror})"
    return f"permission denied: {at} {owner}, and this process runs as {_user(os.geteuid())}; ask for access to it"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


@contextmanager
def opened(path: Path, follow: bool = False) -> Iterator[BufferedReader]:
    """A regular file, open for reading; never waits.

    Args:
        follow: a link to a file is one.

    Raises:
        NotAFile: it is none.
        PermissionError: names the owner.
    """
    with permitted(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        except OSError as error:
            if error.errno in (ELOOP, ENXIO, EISDIR):
                raise NotAFile(error.errno, "it is a link, a pipe or a device, expected a file", str(path)) from error
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile(EISDIR, "it is a folder, a pipe or a device, expected a file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_bytes(path: Path, most: int = JSON_BYTES, follow: bool = False) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises:
        ValueError: it is larger.
        OSError: as :func:`opened`.
    """
    with opened(path, follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, expected at most that many")
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file that is whole or absent, whenever the process is killed; an older one is replaced.

    A link that lies there, or in the place of what is written first, is replaced too: nothing is written through it. A
    folder is set aside as ``damaged-NAME-0``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with permitted(path):
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            if path.is_dir() and not path.is_symlink():
                free = (path.with_name(f"damaged-{path.name}-{number}") for number in count())
                os.rename(path, next(name for name in free if not os.path.lexists(name)))
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def describe(path: Path, follow: bool = False) -> dict[str, Any]:
    """Size and sha256 of a regular file."""
    with opened(path, follow) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def change(path: Path, expected: Mapping[str, Any], follow: bool = False) -> str:
    """How a file differs from what :func:`describe` returned of it earlier; empty: it does not.

    A file of another size is not read.
    """
    with opened(path, follow) as file:
        found: dict[str, Any] = {"size": os.fstat(file.fileno()).st_size}
        if found["size"] == expected["size"]:
            found["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return difference(found, expected)


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """How two :func:`describe` differ; empty: they do not."""
    key = next((key for key in ("size", "sha256") if found.get(key) != expected[key]), None)
    return f"was changed: its {key} is {found[key]}, expected {quoted(expected[key])}" if key else ""


def is_description(value: Any) -> bool:
    """Whether a value that a file brought is what :func:`describe` returns."""
    return isinstance(value, Mapping) and type(value.get("size")) is int and isinstance(value.get("sha256"), str)


def hash_of(values: Any) -> str:
    """sha256 of a value's JSON."""
    return hashlib.sha256(sealed_text(values).encode()).hexdigest()


def sealed_text(values: Any) -> str:
    """The one form in which sealed values are written."""
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def seal(values: Mapping[str, Any]) -> str:
    """The text of values with their digest."""
    return sealed_text({**values, "digest": hash_of(values)})


def unseal(text: bytes) -> dict[str, Any]:
    """The inverse of :func:`seal`.

    Raises:
        ValueError: it is not what was written, to the byte.
    """
    try:
        values = json.loads(text)
        digest = values.pop("digest")
        whole = digest == hash_of(values) and text == seal(values).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is not a manifest ({type(error).__name__}: {error})") from error
    if not whole:
        raise ValueError("was changed: its digest is of other content")
    return values


def copy_file(source: Path, target: Path) -> None:
    """Copies a file to one that is not there; the two share blocks where the file system can, and nothing else.

    Raises:
        FileExistsError: ``target`` is there.
    """
    with permitted(source), source.open("rb") as given, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy, _FICLONE, given.fileno())
        except OSError:
            shutil.copyfileobj(given, copy, 1 << 20)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives ``path``, which the block writes by a library of its own, the mode of a file that is opened for writing.

    safetensors makes files of mode 0600, whatever the umask.
    """
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield path
    path.chmod(mode)


def printable(text: Any) -> str:
    """A text whose characters that a terminal may obey are written as Python writes them."""
    return "".join(part if part.isprintable() or part in SHOWN else ascii(part)[1:-1] for part in str(text))


def quoted(text: Any, most: int = 80) -> str:
    """What a file brought as a part of a message: on one line, of at most ``most`` characters, and printable."""
    text = str(text)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(part if part.isprintable() else ascii(part)[1:-1] for part in text)
