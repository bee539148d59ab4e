"""Files that were made to do harm: refused, never run, and never half applied.

They are put in place of a file as they are, and once more with hashes and digests made to fit, so that they reach the
parsers.
"""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from faults.damage import FILES, NEWEST, stops_and_goes_on
from faults.harness import Lab, Row
from xpmir_uform.checkpoints import manifest

MODEL, OPTIMIZER, STATE = manifest.FILES


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def torch_file(harm: Harm) -> bytes:
    """As ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save({"weight": harm}, file)
    return file.getvalue()


def archive(harm: Harm) -> bytes:
    """A zip archive whose members lie outside it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("../../../canary", "harm")
        zipped.writestr("data.pkl", pickle.dumps(harm))
    return file.getvalue()


def header(values: Any, body: bytes = bytes(64), length: int | None = None) -> bytes:
    """A safetensors file with this header."""
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def tensor(start: int, stop: int, shape: list[int], kind: str = "F32") -> dict[str, Any]:
    """An entry of a header."""
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


PICKLES: dict[str, Callable[[Harm], bytes]] = {
    **{f"a pickle of protocol {n}": lambda harm, n=n: pickle.dumps(harm, protocol=n) for n in (0, 1, 2, 4, 5)},
    "a file of torch.save": torch_file,
    "a zip archive": archive,
    "a pickle after a header": lambda harm: header({}, pickle.dumps(harm)),
    "a pickle in the metadata": lambda harm: header({"__metadata__": {"code": pickle.dumps(harm, 0).decode()}}),
}
"""Of any file"""

HEADERS = {
    "a header of 2^64-1 bytes": b"\xff" * 8 + bytes(64),
    "a header of 2^63 bytes": header({}, length=2**63),
    "a header of 100 MB and one byte": header({}, length=100_000_001),
    "a header one byte longer than the file": header({"a": tensor(0, 64, [16])}, b"", length=10_000),
    "a header that is no JSON": header(b"{'a': 1}"),
    "a header that is no text": header(b"\x80\x81\xff" * 9),
    "a header in a header": header(b'{"a":' * 50_000),
    "tensors that overlap": header({"a": tensor(0, 64, [16]), "b": tensor(32, 64, [8])}),
    "one tensor's bytes for two": header({"a": tensor(0, 64, [16]), "b": tensor(0, 64, [16])}),
    "a hole between tensors": header({"a": tensor(0, 16, [4]), "b": tensor(32, 64, [8])}),
    "a tensor beyond the end": header({"a": tensor(0, 2**40, [2**38])}),
    "a tensor that ends before it begins": header({"a": tensor(64, 0, [16])}),
    "a negative offset": header({"a": tensor(-64, 0, [16])}),
    "a shape that overflows": header({"a": tensor(0, 64, [2**62, 2**62])}),
    "a shape of other size": header({"a": tensor(0, 64, [17])}),
    "an unknown type": header({"a": tensor(0, 64, [16], "OBJECT")}),
    "bytes that no tensor owns": header({"a": tensor(0, 16, [4])}),
    "a name that is a path": header({"../../x/0/exp_avg": tensor(0, 64, [16])}),
    "another model": header({"a": tensor(0, 64, [16])}),
}
"""Of a safetensors file"""

TEXTS = {
    "100,000 lists in one another": b"[" * 100_000 + b"]" * 100_000,
    "100,000 objects in one another": b'{"a":' * 100_000,
    "an integer of a million digits": b'{"steps": ' + b"9" * 1_000_000 + b"}",
    "a name twice": b'{"steps": 1, "steps": 2}',
    "UTF-16": '{"steps": 1}'.encode("utf-16"),
    "text after the end": b'{"steps": 1} import os',
    "not text": b"\x00\xff" * 100,
    "a list": b"[]",
    "nothing": b"",
}
"""Of a JSON file"""


def changed(**values: Any) -> Callable[[bytes], bytes]:
    """Some values of the state are others."""
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


STATES: dict[str, Callable[[bytes], bytes]] = {
    "a step that is text": changed(steps="8"),
    "a step of another checkpoint": changed(steps=7),
    "a step below zero": changed(steps=-1),
    "an epoch of nothing": changed(epoch=None),
    "metrics that are a list": changed(metrics=[]),
    "metrics without a count": changed(metrics={"loss": [1.0]}),
    "counters that are a number": changed(counters=3),
    "no optimizer": changed(optimizers=[]),
    "an optimizer that is text": changed(optimizers="adam"),
    "groups of other parameters": changed(optimizers=[{"groups": [{"params": [99]}], "numbers": {}}]),
    "schedule steps that are text": changed(scheduler_steps="3"),
}
"""Of the state, with the right names"""


def rows(lab: Lab) -> Iterator[Row]:
    """As they are; then with hashes that fit."""
    row = Row("hostile files in place of each file: pickles, headers, JSON")
    for name, file, content in lab.spread(list(contents()), 5):
        trial = lab.trial(NEWEST)
        canary = trial.folder / "canary"
        (trial.checkpoints / f"step-{NEWEST:08d}" / file).write_bytes(content(Harm(canary)))
        attempt = trial.attempt()
        lost = [] if f"damaged-step-{NEWEST:08d}-0" in attempt.after.folders else ["it was not seen"]
        lost += ["it was run"] if canary.exists() else []
        row.add(attempt.ending.status, [*lost, *lab.check(trial, harmed=frozenset({NEWEST}))], f"{name} as {file}")
    yield row
    row = Row("the same, with hashes that fit")
    for name, file, content in lab.spread(list(contents()), 5):
        sealed(lab, row, f"{name} as {file}", file, lambda data, harm, content=content: content(harm))
    yield row
    row = Row("a state of wrong values, with hashes that fit")
    for name, change in lab.spread(list(STATES.items()), 3):
        sealed(lab, row, name, STATE, lambda data, harm, change=change: change(data))
    yield row


def contents() -> Iterator[tuple[str, str, Callable[[Harm], bytes]]]:
    """Name, file and content of each."""
    yield from ((name, file, make) for file in FILES for name, make in PICKLES.items())
    yield from ((name, file, lambda harm, c=c: c) for file in (MODEL, OPTIMIZER) for name, c in HEADERS.items())
    yield from ((name, file, lambda harm, c=c: c) for file in (STATE, manifest.NAME) for name, c in TEXTS.items())


def sealed(lab: Lab, row: Row, name: str, file: str, make: Callable[[bytes, Harm], bytes]) -> None:
    """A file that the manifest vouches for: the job stops, nothing is run, and with a copy put back it goes on."""
    trial = lab.trial(NEWEST)
    canary = trial.folder / "canary"
    shutil.copytree(trial.checkpoints, trial.folder / "copy", symlinks=True)
    folder = trial.checkpoints / f"step-{NEWEST:08d}"
    path = folder / file
    path.write_bytes(make(path.read_bytes(), Harm(canary)))
    if file == manifest.NAME:
        # Nothing vouches for the manifest: as it is, it is damage; so are the older ones.
        for older in trial.checkpoints.glob(f"step-*/{file}"):
            older.write_bytes(path.read_bytes())
    else:
        reseal(folder)
    status, lost = stops_and_goes_on(lab, trial)
    row.add(status, [*lost, *(["it was run"] if canary.exists() else [])], name)


def reseal(folder: Path) -> None:
    """Makes hashes and digest fit."""
    values = manifest.read(folder)
    for name in ("files", "format", "digest"):
        values.pop(name, None)
    manifest.write(folder, values)
