"""Descriptions of Debian's programs: the short one of a package names its long one.

They are read at run time from apt's lists (Packages and Translation-en of ``main``) into a file whose sha256 is the
identity of the data; they carry the licences of their packages.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from experimaestro import Constant, Meta, Param

from xpmir_uform.base.configuration import check_seed, check_sha256, default
from xpmir_uform.data.sampling import OtherData
from xpmir_uform.datasets.pairs import Pair, PairCollection
from xpmir_uform.datasets.splits import check_counts, held_out_first

FILE = "packages.jsonl"
TAG = re.compile(r"([\w.+-]+)::(\{[^}]*\}|[^\s,]+)")
ROLE = "role::program"


class CannotFetch(RuntimeError):
    """The descriptions cannot be had on this machine."""


def fetch(folder: Path) -> Path:
    """The file of descriptions in ``folder``, made from apt's lists if it is not there.

    The lists are downloaded from the machine's own sources into a folder that is removed; the system's are left alone.

    Raises:
        CannotFetch: this is no Debian, or apt cannot download.
    """
    file = folder / FILE
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as lists:
        update(Path(lists))
        rows = sorted(programs(Path(lists)))
    if not rows:
        raise CannotFetch("apt's lists of this machine describe no program: its sources lack Debian's `main`")
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(part, file)
    return file


def update(lists: Path) -> None:
    """Downloads apt's lists of ``main`` with the English descriptions.

    Raises:
        CannotFetch: there is no apt, or it fails.
    """
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::lists": lists.absolute(),
        "Dir::Cache": lists.absolute() / "cache",
        "Acquire::Languages": "en",
        "Acquire::GzipIndexes": "false",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "update", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise CannotFetch(f"`apt-get update` failed, which takes Debian and a network: {reason}") from error


def programs(lists: Path) -> Iterator[tuple[str, str, str]]:
    """Name, short and long description of the first program of each source package, by name."""
    from debian.deb822 import Deb822

    texts = {
        (entry["Package"], entry["Description-md5"]): entry["Description-en"]
        for file in sorted(lists.glob("*_main_i18n_Translation-en"))
        for entry in Deb822.iter_paragraphs(lines(file))
    }
    packages = [
        entry
        for file in sorted(lists.glob("*_main_binary-*_Packages"))
        for entry in Deb822.iter_paragraphs(lines(file))
        if ROLE in tags(entry.get("Tag", ""))
    ]
    seen = set()
    for entry in sorted(packages, key=lambda entry: entry["Package"]):
        source = entry.get("Source", entry["Package"]).split()[0]
        text = texts.get((entry["Package"], entry.get("Description-md5")))
        if text and source not in seen:
            seen.add(source)
            short, _, long = text.partition("\n")
            yield entry["Package"], short.strip(), unwrapped(long)


def lines(file: Path) -> list[str]:
    """The lines of a text; U+2028 and the like, at which ``str.splitlines`` cuts, are content."""
    return file.read_bytes().decode("utf-8").split("\n")


def tags(field: str) -> set[str]:
    """The debtags of a package: ``use::{checking,viewing}`` is two."""
    return {
        f"{facet}::{value.strip()}" for facet, values in TAG.findall(field) for value in values.strip("{}").split(",")
    }


def unwrapped(text: str) -> str:
    """A long description as one line: a leading space on each line and lone dots between paragraphs go."""
    return " ".join(line.strip() for line in text.split("\n") if line.strip() != ".")


class PackagePairs(PairCollection):
    """The long description of a program, cut to some bytes, by its short one."""

    __xpmid__ = "uform.package-pairs"

    sha256: Param[str]
    """Of the file of descriptions"""

    document_bytes: Param[int] = default(200)
    """Longest document, cut at the end of a word; packages without a long description are left out"""

    held_out: Param[int] = default(500)
    """How many pairs are kept from training, with all that share a text with them"""

    limit: Param[int] = default(0)
    """Keep this many pairs in all, held-out ones included; 0 keeps every one"""

    split_seed: Param[int] = default(0)
    """Seed of the split"""

    version: Constant[int] = 2
    """Of the split: 2 is by content"""

    path: Meta[Path]
    """Where the file of descriptions is"""

    def __validate__(self):
        if self.document_bytes < 1:
            raise ValueError(f"document_bytes is {self.document_bytes}, expected at least 1")
        check_counts(self.held_out, self.limit, "pairs")
        check_sha256("sha256", self.sha256)
        check_seed("split_seed", self.split_seed)

    @classmethod
    def fetched(cls, folder: Path, **params) -> "PackagePairs":
        """The collection in ``folder``, fetched if it is not there, as a configuration.

        Raises:
            CannotFetch: it cannot be had on this machine.
        """
        path = fetch(folder)
        return cls.C(sha256=sha256(path.read_bytes()).hexdigest(), path=path.absolute(), **params)

    @cached_property
    def all(self) -> list[Pair]:
        """Every pair in keyed order, the held-out ones first.

        Raises:
            ValueError: the file is not the one that this configuration was made for, or there are too few pairs.
        """
        data = self.path.read_bytes()
        found = sha256(data).hexdigest()
        if found != self.sha256:
            raise OtherData(
                f"{self.path} has sha256 {found}, expected {self.sha256}: "
                "restore that file, or make a new configuration"
            )
        rows = map(json.loads, data.splitlines())
        pairs = [Pair(name, short, cut(long, self.document_bytes)) for name, short, long in rows if long]
        return held_out_first(
            pairs,
            lambda pair: pair.contents,
            seed=self.split_seed,
            limit=self.limit,
            held_out=self.held_out,
            name="pairs",
        )

    def test(self) -> list[Pair]:
        """The held-out pairs."""
        return self.all[: self.held_out]

    def train(self) -> list[Pair]:
        """The other pairs."""
        return self.all[self.held_out :]


def cut(text: str, size: int) -> str:
    """The whole words of ``text`` that fit into ``size`` bytes, at least a part of the first."""
    data = text.encode("utf-8")
    if len(data) <= size:
        return text
    head = data[:size]
    words = head if data[size : size + 1].isspace() else head.rpartition(b" ")[0] or head
    return words.decode("utf-8", errors="ignore")
