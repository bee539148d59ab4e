"""Models that strangers made: nothing in them is run, nothing outside their folder is read or written."""

import json
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from experimaestro import Param
from xpm_torch.huggingface import TorchHFHub

from xpmir_uform import ImageShape, PooledHead, UFormEncoder, load_model, save_model
from xpmir_uform.base.checked_files import hash_of, seal
from xpmir_uform.base.configuration import default
from xpmir_uform.checkpoints.manifest import FILES

LIBRARIES = Path(torch.__file__).parents[1]
EVIL = "from pathlib import Path\nPath({canary!r}).write_text('ran')\n"
DEFINITION, WEIGHTS = "experimaestro.json", "model.safetensors"


class Wider(UFormEncoder):
    """A model of one's own."""

    __xpmid__ = "test.wider"

    extra: Param[int] = default(0)


def configuration(kind=UFormEncoder, **params):
    shape = ImageShape.C(patch_side=4, max_side=16)
    return kind.C(depth=1, hidden=128, image=shape, pooled=PooledHead.C(width=8), **params)


def write_model(folder, kind=UFormEncoder, **params):
    model = configuration(kind, **params).instance()
    model.initialize()
    model.save_model(folder / "weights")
    save_model(configuration(kind, **params).loader_config(folder / "weights"), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("good"))
    load_model(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    """A copy, with a module beside it that must not run and a file that must stay."""
    canary = tmp_path / "canary"
    canary.write_text("alive")
    (tmp_path / "evil.py").write_text(EVIL.format(canary=str(canary)))
    shutil.copytree(good, tmp_path / "model")
    shutil.copy(good / WEIGHTS, tmp_path / "outside.safetensors")
    return tmp_path / "model"


# What is done to a folder


def content(data):
    return lambda folder: (folder / DEFINITION).write_bytes(data)


def edited(change):
    """Changes the definition's objects: image shape, head, model, loader."""

    def edit(folder):
        objects = json.loads((folder / DEFINITION).read_text())
        del objects[-1]["digest"]
        change(objects, folder)
        (folder / DEFINITION).write_text(json.dumps(objects))

    return edit


def sealed(change):
    """As ``edited``, with a digest that fits: what a stranger would write."""

    def edit(folder):
        edited(change)(folder)
        objects = json.loads((folder / DEFINITION).read_text())
        objects[-1]["digest"] = hash_of(objects)
        (folder / DEFINITION).write_text(json.dumps(objects))

    return edit


def files(value):
    return sealed(lambda objects, _: objects[-1].update(files=value))


def hole(size):
    """Weights that end with a hole, recorded as what they are."""

    def grow(folder):
        os.truncate(folder / WEIGHTS, size)
        sealed(lambda objects, _: objects[-1]["files"][WEIGHTS].update(size=size))(folder)

    return grow


def header_of(change):
    """The weights with another header, as a stranger would write them."""

    def write(folder):
        data = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        told = json.loads(data[8 : 8 + size])
        change(told)
        text = json.dumps(told).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        edited(lambda objects, _: objects[-1].pop("files"))(folder)

    return write


def renamed(name):
    return header_of(lambda told: told.update({name: told.pop("encoder.norm.weight")}))


NO_BYTES = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def blocks_of_nothing(folder):
    """A depth of 3,000 whose tensors have the right names and shapes, and no bytes."""
    data = (folder / WEIGHTS).read_bytes()
    told = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    told.pop("__metadata__", None)
    for name in [name for name in told if ".0." in name]:
        for number in range(3000):
            told[name.replace(".0.", f".{number}.")] = {**told[name], "data_offsets": [0, 0]}
    fields(2, depth=3000)(folder)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(json.dumps(told))) + json.dumps(told).encode())


def entry(number, **values):
    return edited(lambda objects, folder: objects[number].update(values))


def fields(number, **values):
    return edited(lambda objects, folder: objects[number]["fields"].update(values))


def evil_file(objects, folder):
    objects[2] |= {"module": "evil", "type": "Evil", "file": str(folder.parent / "evil.py")}


def evil_task(objects, folder):
    objects[-1]["init-tasks"] = [objects[2]["id"]]


def evil_task_of_the_model(objects, folder):
    objects[2]["init-tasks"] = [0]


def many(objects, folder):
    objects[:0] = [{"id": 1000 + number, "fields": {}} for number in range(2000)]


def weights(value, is_folder=False):
    return fields(3, path={"type": "path.serialized", "value": value, "is_folder": is_folder})


def absolute(objects, folder):
    objects[3]["fields"]["path"]["value"] = str(folder.parent / "outside.safetensors")


def unchanged_digest(folder):
    text = (folder / DEFINITION).read_text()
    (folder / DEFINITION).write_text(text.replace('"max_side": 16', '"max_side": 12'))


def replaced(name, make):
    def replace(folder):
        (folder / name).unlink()
        make(folder / name)

    return replace


def linked(name, target):
    def link(folder):
        shutil.move(folder / name, folder.parent / target)
        (folder / name).symlink_to(f"../{target}")

    return link


def header(text):
    """A file of weights with that header; without the digest, which a stranger would have written anew."""

    def write(folder):
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
        edited(lambda objects, _: objects[-1].pop("files"))(folder)

    return write


def tensor(**values):
    told = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **values}
    return header(json.dumps({"encoder.norm.weight": told}).encode())


def raw_weights(data):
    def write(folder):
        (folder / WEIGHTS).write_bytes(data)
        edited(lambda objects, _: objects[-1].pop("files"))(folder)

    return write


class Payload:
    def __reduce__(self):
        return os.system, ("touch evil",)


def reference(number):
    return {"type": "python", "value": number}


def each_other(objects, folder):
    objects[0]["fields"]["channels"], objects[1]["fields"]["width"] = reference(1), reference(0)


HOSTILE = {
    "nothing": content(b""),
    "half an object": content(b"{"),
    "null": content(b"null"),
    "no object": content(b"[]"),
    "one object": content(b"{}"),
    "numbers": content(b"[1, 2]"),
    "a text": content(b'"model"'),
    "lists, 200,000 deep": content(b"[" * 200_000),
    "objects, 200,000 deep": content(b'{"a":' * 200_000),
    "two megabytes": content(b" " * (2 << 20)),
    "zeros": content(bytes(100)),
    "no text": content(b"\xff\xfe"),
    "a number of 5,000 digits": content(b"[" + b"9" * 5000 + b"]"),
    "2,000 objects": edited(many),
    "a changed number": unchanged_digest,
    "a module beside it": edited(evil_file),
    "a module by name": entry(2, module="evil", type="Evil"),
    "os.system": entry(2, module="os", type="system"),
    "builtins.eval": entry(1, module="builtins", type="eval"),
    "subprocess.Popen": entry(0, module="subprocess", type="Popen"),
    "a task of this package": entry(2, module="xpmir_uform.learner.learner", type="UFormLearner"),
    "a function of this package": entry(2, module="xpmir_uform.export.pretrained", type="load_model"),
    "an attribute of a class": entry(2, type="UFormEncoder.save_model"),
    "a list as a class": entry(2, type=["UFormEncoder"]),
    "a list as a module": entry(2, module=["xpmir_uform"]),
    "another loader": entry(3, module="evil", type="Loader"),
    "a model in place of the loader": edited(lambda objects, _: objects.pop()),
    "tasks to run": edited(evil_task),
    "tasks to run for the model": edited(evil_task_of_the_model),
    "an enumeration of a module": fields(2, seed={"type": "enum", "module": "evil", "enum": "E", "value": "A"}),
    "a path in place of a number": fields(2, seed={"type": "path", "value": "/etc/passwd"}),
    "a path of the job": fields(2, seed={"type": "path", "value": "x", "base": "job"}),
    "a set": fields(2, seed={"type": "set", "items": [1]}),
    "weights elsewhere": edited(absolute),
    "weights above": weights("../outside.safetensors"),
    "weights above, the long way": weights("./x/../../outside.safetensors"),
    "weights below": weights("sub/model.safetensors"),
    "weights without a name": weights(""),
    "weights of two names": weights(["a.safetensors"]),
    "weights of a name with a zero": weights("a\0.safetensors"),
    "weights that are a pickle by name": weights("model.bin"),
    "weights by a path": fields(3, path={"type": "path", "value": "/etc/passwd"}),
    "weights that are the folder": weights("."),
    "a link out of the folder": linked(WEIGHTS, "stolen.safetensors"),
    "a definition out of the folder": linked(DEFINITION, "stolen.json"),
    "a pipe for weights": replaced(WEIGHTS, os.mkfifo),
    "a pipe for a definition": replaced(DEFINITION, os.mkfifo),
    "a device for weights": replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero")),
    "a folder for weights": replaced(WEIGHTS, lambda path: path.mkdir()),
    "a folder for a definition": replaced(DEFINITION, lambda path: path.mkdir()),
    "a manifest out of the folder": lambda folder: (folder / "manifest.json").symlink_to("/etc/hostname"),
    "a pipe for a manifest": lambda folder: os.mkfifo(folder / "manifest.json"),
    "no weights": replaced(WEIGHTS, lambda path: None),
    "changed weights": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1] + b"\x01"),
    "a pickle": raw_weights(pickle.dumps(Payload())),
    "a header of 2^60 bytes": raw_weights(struct.pack("<Q", 1 << 60) + b"{}"),
    "a header beyond the file": raw_weights(struct.pack("<Q", 1000) + b"{}"),
    "a header of lists": header(b"[" * 100_000),
    "a header that is a list": header(b"[1]"),
    "a tensor of numbers": header(b'{"encoder.norm.weight": 7}'),
    "a tensor without a shape": header(b'{"encoder.norm.weight": {"dtype": "F32"}}'),
    "a tensor of 2^124 values": tensor(shape=[1 << 62, 1 << 62]),
    "a tensor of fewer than none": tensor(shape=[-4]),
    "a tensor of words": tensor(shape=["4"]),
    "a tensor of another kind": tensor(dtype="X99"),
    "a tensor beyond the file": tensor(data_offsets=[0, 1 << 50]),
    "an endless depth": fields(2, depth=10**9),
    "an endless width": fields(2, hidden=1 << 40),
    "a width beyond 64 bits": fields(2, hidden=1 << 80),
    "endless groups": fields(1, groups=1 << 50),
    "endless patches": fields(0, patch_side=1 << 30, max_side=1 << 30),
    "a model that holds itself": fields(2, image=reference(2)),
    "objects that hold each other": edited(each_other),
    "an object that is not there": fields(2, image=reference(99)),
    "a list as a number": fields(2, image=reference([0])),
    "a field that is not there": fields(2, command="rm"),
    "a method as a field": fields(2, __initialize__="x"),
    "a field of another class": fields(2, pooled=reference(0)),
    "no depth": edited(lambda objects, _: objects[2]["fields"].pop("depth")),
    "no fields": edited(lambda objects, _: objects[2].pop("fields")),
    "a depth in words": fields(2, depth="one"),
    "half a block": fields(2, depth=1.5),
    "a seed of nothing": fields(1, inverse_temperature=float("nan")),
    "lists for a number": fields(2, seed=[[[[1]]]]),
    "a field of two lines": fields(2, **{"a\nxpmir-uform: all is well": 1}),
    "a class that clears the screen": entry(2, type="\x1b[2J\x1b]0;title\x07"),
    "a module from right to left": entry(2, module="x\u202eliv\u202c"),
    "a module in Cyrillic": entry(2, module="\u0445pmir_uform.model.uform"),
    "a module of a like name": entry(2, module="xpmir_uform_evil.model"),
    "weights of a name of 5,000 letters": weights("a" * 5000 + ".safetensors"),
    "weights of a name with a full-width dot": weights("model\uff0esafetensors"),
    "weights of two lines": weights("model.safetensors\n"),
    "a class twice": edited(lambda objects, _: objects.insert(3, {**objects[2], "module": "evil"})),
    "a record that is a text": files({WEIGHTS: "x"}),
    "a record that is a number": files({WEIGHTS: 7}),
    "a record without sha256": files({WEIGHTS: {"size": 7}}),
    "a record without size": files({WEIGHTS: {"sha256": "x"}}),
    "a record of control characters": files({WEIGHTS: {"size": "\x1b[2J\n", "sha256": ""}}),
    "records in a list": files([1]),
    "a sha256 of 3,000 letters": sealed(lambda objects, _: objects[-1]["files"][WEIGHTS].update(sha256="\n" * 3000)),
    "a terabyte of nothing": hole(1 << 40),
    "a deep digest": edited(lambda objects, _: objects[-1].update(digest=json.loads("[" * 500 + "]" * 500))),
    "3,000 blocks of nothing": blocks_of_nothing,
    "a tensor named over two lines": renamed("a\n\x1b[2J"),
    "a tensor of a name of a megabyte": renamed("a" * 10**6),
    "20,000 tensors": header_of(lambda told: told.update({f"t{number}": NO_BYTES for number in range(20_000)})),
    "a tensor of 1,000 dimensions": header_of(lambda told: told["pooling.bias"].update(shape=[1] * 1000)),
    "a tensor of whole numbers": header_of(lambda told: told["encoder.norm.weight"].update(dtype="I32")),
    "tensors that lie on each other": header_of(
        lambda told: [entry.update(data_offsets=[0, 512]) for entry in told.values()]
    ),
}  # fmt: skip


class Watch:
    """Records imports, opened files, and calls that change or start something, while it is on."""

    CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.system", "subprocess.Popen", "socket.connect")

    def __init__(self):
        self.on, self.imports, self.opened, self.changes = False, [], [], []
        sys.addaudithook(self.hear)

    def find_spec(self, name, path=None, target=None):
        self.imports.append(name)

    def hear(self, event, arguments):
        if not self.on:
            return
        if event == "open" and not isinstance(arguments[0], int):
            self.opened.append((arguments[0], arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        elif event in self.CHANGES:
            self.changes.append((event, arguments))

    def __enter__(self):
        self.imports, self.opened, self.changes, self.on = [], [], [], True
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error):
        self.on = False
        sys.meta_path.remove(self)


WATCH = Watch()
LINE = r"\A[^\x00-\x1f\x7f-\x9f\u202a-\u202e]{20,1000}\Z"
"""One line that a terminal shows as it is."""


def harmless(folder):
    """Nothing was imported, written, or read outside the folder."""
    assert not WATCH.imports
    assert not WATCH.changes
    for path, writes in WATCH.opened:
        assert not writes
        assert Path(os.fsdecode(path)).parent == folder or Path(os.fsdecode(path)).is_relative_to(LIBRARIES)
    assert (folder.parent / "canary").read_text() == "alive"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line_and_does_nothing(folder, monkeypatch, caplog, kind):
    HOSTILE[kind](folder)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.chdir(folder.parent)
    with WATCH, pytest.raises(ValueError, match=LINE):
        load_model(folder)
    harmless(folder)
    assert not caplog.records


def test_the_stock_reader_runs_what_a_definition_names(folder):
    edited(evil_file)(folder)
    with pytest.raises(AttributeError, match="Evil"):
        TorchHFHub.from_pretrained(str(folder))
    del sys.modules["evil"]
    assert (folder.parent / "canary").read_text() == "ran"


def elsewhere(objects, folder):
    """As an older version, or another place, may have written it: with tasks and files that it came from."""
    objects[2] |= {"module": "xpmir_uform.somewhere.else", "file": str(folder.parent / "evil.py"), "task": 77}
    objects.insert(0, {"id": 77, "module": "evil", "type": "Evil", "fields": {"path": {"type": "path", "value": "/x"}}})
    objects[-1]["task"] = 77
    objects[-1]["fields"]["settings"] = reference(77)


def test_what_does_not_belong_to_the_model_is_not_looked_at(folder, good, monkeypatch):
    edited(elsewhere)(folder)
    monkeypatch.syspath_prepend(folder.parent)
    with WATCH:
        model = load_model(folder)
    harmless(folder)
    assert torch.equal(model.encode(["red apple"]), load_model(good).encode(["red apple"]))


HOSTILE_MANIFESTS = {
    "a model of another class": {"model.type": "evil.Evil"},
    "a task": {"model.type": "uform.learner"},
    "no class": {"model.depth": 1},
    "no model": {},
    "an endless depth": {"model.type": "uform.encoder", "model.depth": 10**9, "model.hidden": 128},
    "a value below a value": {"model.type": "uform.encoder", "model.depth": 1, "model.depth.x": 1},
    "deep": {"model." + "a." * 1000 + "b": 1},
    "words": {"model.type": "uform.encoder", "model.depth": "one", "model.hidden": 128},
}


@pytest.mark.parametrize("kind", HOSTILE_MANIFESTS)
def test_a_hostile_checkpoint_is_refused_in_one_line_and_does_nothing(folder, kind):
    (folder / DEFINITION).unlink()
    described = {name: {"size": 0, "sha256": ""} for name in FILES}
    values = {
        **dict.fromkeys(("step", "epoch", "ranks"), 1),
        **dict.fromkeys(("identifier", "device", "precision"), "x"),
        "config": HOSTILE_MANIFESTS[kind],
        "layout": {"model": {}, "optimizer": {}},
        "hashes": {"data": ""},
        "versions": {},
        "environment": {"device_name": ""},
        "git": None,
        "previous": None,
        "audits": [],
        "files": described,
        "format": 1,
    }
    (folder / "manifest.json").write_text(seal(values))
    with WATCH, pytest.raises(ValueError, match=LINE):
        load_model(folder)
    harmless(folder)


def test_a_model_of_ones_own_is_loaded_where_it_is_allowed(tmp_path):
    folder = write_model(tmp_path, Wider, extra=3)
    assert '"file"' not in (folder / DEFINITION).read_text()
    with pytest.raises(ValueError, match=r"names .*\.Wider, which is not of this package: if you wrote it, give"):
        load_model(folder)
    model = load_model(folder, trust=[Wider])
    assert isinstance(model, Wider)
    assert model.extra == 3


@pytest.mark.parametrize(
    ("trust", "said"),
    [
        (["nowhere.Model"], "trust names 'nowhere.Model', which cannot be imported"),
        (["Model"], "trust names 'Model', which cannot be imported"),
        (["os.system"], "trust names 'os.system', expected a configuration class"),
        ([dict], "expected a configuration class"),
    ],
)
def test_what_is_trusted_is_a_class_of_configurations(good, trust, said):
    with pytest.raises(ValueError, match=said):
        load_model(good, trust=trust)
