"""Checkpoints of a small context: what is written, what damage does, what fits, and that nothing is lost by a fault."""

import errno
import json
import os
import shutil
import signal
import socket
import stat
from collections import Counter
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import lightning as L
import pytest
import torch
from experimaestro import TaskCancelled
from safetensors import safe_open

from xpmir_uform.base import atomic_files
from xpmir_uform.base.checked_files import seal
from xpmir_uform.checkpoints import format, lineage, manifest, provenance, store
from xpmir_uform.checkpoints.compatibility import Subject
from xpmir_uform.checkpoints.manifest import Damaged
from xpmir_uform.learner.context import UFormContext
from xpmir_uform.learner.optimizers import Optimizers
from xpmir_uform.model import weights as model_files

SUBJECT = Subject("test.learner/0", {"batch_size": 5, "model.hidden": 128}, "0" * 64)
FABRIC = L.Fabric(accelerator="cpu", devices=1)


class Model(torch.nn.Module):
    """Tied, strided, empty and scalar tensors."""

    def __init__(self, width=3):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0 * width).reshape(4, width))
        self.tied = self.weight
        self.strided = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))


def made(folder, keep=2, subject=SUBJECT, width=3, rate=0.1, **params):
    model = Model(width)
    optimizers = Optimizers()
    optimizers.optimizers = [torch.optim.AdamW(model.parameters(), lr=rate)]
    optimizers.scheduler_factories, optimizers.scheduler_steps, optimizers.scaler = [None], -1, None
    trainer = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    context = UFormContext(
        folder, folder, 10_000, 1, trainer, model, optimizers, fabric=FABRIC, keep=keep, subject=subject, **params
    )
    context.alerts = []
    context.alert = lambda name, message: context.alerts.append((name, message))
    return context


def train(context, to):
    """Steps whose gradients are a function of the step."""
    while context.steps < to:
        context.begin_step()
        draw = torch.Generator().manual_seed(context.steps)
        for parameter in context.state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        context.state.optimizer.optimizers[0].step()
        context.counters["seen"] = context.steps * 7
        context.end_step()
    return context


def saved(folder, steps, **params):
    """A run that saved at each of ``steps``."""
    context = made(folder, **params)
    for step in steps:
        train(context, step).save_checkpoint()
    return context


def content(context):
    """All that a checkpoint must bring back."""
    optimizer, rest = format.split_optimizers(context.state.optimizer.state_dict()["optimizers"])
    tensors = {**context.state.model.state_dict(), **optimizer}
    rest = json.loads(json.dumps(rest))
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}, rest, context.steps, context.counters


def expected(step, folder):
    return content(train(made(folder / "never"), step))


def loaded(folder, **params):
    context = made(folder, **params)
    assert context.load_bestcheckpoint(10_000)
    return context


def everything(folder):
    """Every name and byte below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in folder.rglob("*")
    }


# Writing


def test_tied_strided_empty_and_scalar_tensors_come_back(tmp_path):
    context = saved(tmp_path, [0, 3])
    assert content(loaded(tmp_path)) == content(context) == expected(3, tmp_path)
    again = loaded(tmp_path).state.model
    assert again.tied is again.weight
    assert again.empty.shape == (0, 3)


def test_weights_bear_step_and_identifier(tmp_path):
    saved(tmp_path, [2])
    with safe_open(tmp_path / "last" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"source": "step 2 of test.learner/0"}


def test_the_manifest_says_what_where_and_after_what(tmp_path):
    saved(tmp_path, [0, 2])
    found = manifest.read(tmp_path / "last")
    assert found["step"] == 2
    assert found["identifier"] == "test.learner/0"
    assert found["previous"]["step"] == 0
    assert set(found["hashes"]) == {"config", "data", "model_layout", "optimizer_layout"}
    assert found["device"] == "cpu"
    assert found["precision"] == "32-true"
    assert found["versions"]["torch"] == torch.__version__
    assert found["git"] is None or set(found["git"]) == {"commit", "dirty"}
    assert os.uname().nodename not in json.dumps(found["environment"])
    assert [path.name for path, _ in lineage.chain(tmp_path / "last")] == ["step-00000002", "step-00000000"]


def test_a_step_under_way_cannot_be_saved(tmp_path):
    context = saved(tmp_path, [1])
    before = everything(tmp_path)
    context.begin_step()
    with pytest.raises(RuntimeError, match="step 2 is under way"):
        context.save_checkpoint()
    assert everything(tmp_path) == before


def test_saving_disturbs_nothing(tmp_path):
    assert content(saved(tmp_path, [1, 2, 3, 4, 5])) == expected(5, tmp_path)


# What is kept


def test_pruning_sorts_by_number(tmp_path):
    saved(tmp_path, [900], keep=1)
    context = loaded(tmp_path, keep=1)
    train(context, 1000).save_checkpoint()
    assert store.steps_in(tmp_path) == [1000]
    assert os.readlink(tmp_path / "last") == "step-00001000"


def test_a_hundred_million_steps_sort_after_fewer(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        (tmp_path / store.name_of(step)).mkdir()
    store.prune(tmp_path, 100_000_000, 1)
    assert store.steps_in(tmp_path) == [100_000_000]


def test_a_stale_later_checkpoint_neither_counts_nor_is_gone_on_from(tmp_path):
    saved(tmp_path / "other", [50])
    saved(tmp_path / "run", [9, 10])
    shutil.copytree(tmp_path / "other" / "step-00000050", tmp_path / "run" / "step-00000050")
    context = loaded(tmp_path / "run")
    assert context.steps == 10
    train(context, 11).save_checkpoint()
    assert store.steps_in(tmp_path / "run") == [10, 11, 50]
    train(context, 50).save_checkpoint()
    assert content(loaded(tmp_path / "run")) == expected(50, tmp_path)
    assert (tmp_path / "run" / "stale-step-00000050-0").is_dir()


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match=f"keep is {keep}, expected at least 1"):
        made(tmp_path, keep=keep)


def test_the_best_is_a_copy_that_outlives_what_happens_to_the_epochs(tmp_path):
    context = train(made(tmp_path / "run"), 1)
    context.copy(tmp_path / "best")
    for name in (*manifest.FILES, manifest.NAME):
        assert not os.path.samefile(tmp_path / "best" / name, tmp_path / "run" / "last" / name)
    for step in (2, 3, 4):
        train(context, step).save_checkpoint()
    assert store.steps_in(tmp_path / "run") == [3, 4]
    assert manifest.verify(tmp_path / "best")["step"] == 1
    context.copy(tmp_path / "best")
    assert manifest.verify(tmp_path / "best")["step"] == 4
    (tmp_path / "best" / "model.safetensors").write_bytes(b"written in place")
    assert manifest.verify(tmp_path / "run" / "last")["step"] == 4


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_and_folders_have_the_mode_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        context = saved(tmp_path / "run", [1, 2])
        context.copy(tmp_path / "best")
    finally:
        os.umask(before)
    paths = [tmp_path / "best", *(tmp_path / "best").iterdir(), *(tmp_path / "run").rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes == {path: (0o777 if path.is_dir() else 0o666) & ~mask for path in paths}
    assert len(paths) >= 13


def test_equal_states_are_equal_files(tmp_path):
    first, second = ((saved(tmp_path / name, [3]), tmp_path / name / "last")[1] for name in ("a", "b"))
    for name in manifest.FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes()


# Damage

FILES = (*manifest.FILES, manifest.NAME)


def cut(length):
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[: length(len(data))])

    return damage


def flip(place, bit=1):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[place(len(data))] ^= bit
        path.write_bytes(data)

    return damage


def become_folder(path):
    path.unlink()
    path.mkdir()


def break_link(path):
    path.unlink()
    path.symlink_to("nowhere")


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def pickled(path):
    torch.save({"weight": torch.zeros(2)}, path)


DAMAGES = {
    "missing": Path.unlink,
    "empty": cut(lambda n: 0),
    "8 bytes": cut(lambda n: 8),
    "half": cut(lambda n: n // 2),
    "all but one": cut(lambda n: n - 1),
    "one more": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "twice": lambda path: path.write_bytes(path.read_bytes() * 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first bit": flip(lambda n: 0),
    "middle bit": flip(lambda n: n // 2, 16),
    "last bit": flip(lambda n: n - 1, 128),
    "a tenth": flip(lambda n: n // 10, 4),
    "a folder": become_folder,
    "a broken link": break_link,
    "a link to itself": link_to_itself,
    "a pickle": pickled,
    "deep JSON": lambda path: path.write_bytes(b"[" * 100_000),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "no text": lambda path: path.write_bytes(b"\x80\x81" * 50),
    "null": lambda path: path.write_text("null"),
    "list": lambda path: path.write_text("[]"),
    "empty object": lambda path: path.write_text("{}"),
    "the older one's": lambda path: shutil.copy(path.parents[1] / "step-00000001" / path.name, path),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_set_aside_and_the_one_before_is_used(tmp_path, file, damage):
    saved(tmp_path / "run", [1, 2])
    folder = tmp_path / "run" / "step-00000002"
    DAMAGES[damage](folder / file)
    before = everything(folder)
    context = loaded(tmp_path / "run")
    assert content(context) == expected(1, tmp_path)
    assert everything(tmp_path / "run" / "damaged-step-00000002-0") == before
    reason = (tmp_path / "run" / "damaged-step-00000002-0.txt").read_text()
    assert file in reason or damage == "the older one's"
    assert [name for name, _ in context.alerts] == ["damaged checkpoint"]
    assert os.readlink(tmp_path / "run" / "last") == "step-00000001"
    train(context, 2).save_checkpoint()
    assert content(loaded(tmp_path / "run")) == expected(2, tmp_path)


def test_a_whole_older_checkpoint_under_a_newer_name_is_seen(tmp_path):
    saved(tmp_path, [1, 2])
    shutil.rmtree(tmp_path / "step-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    context = loaded(tmp_path)
    assert content(context) == expected(1, tmp_path)
    assert "holds the checkpoint of step 1" in context.alerts[0][1]


def test_every_bit_of_a_manifest_counts(tmp_path):
    saved(tmp_path, [1])
    path = tmp_path / "last" / manifest.NAME
    data = path.read_bytes()
    for place in range(0, len(data), 37):
        for bit in (1, 2, 32):
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            with pytest.raises(Damaged):
                manifest.read(tmp_path / "last")


def test_a_manifest_cannot_name_other_files(tmp_path):
    saved(tmp_path, [1])
    values = manifest.read(tmp_path / "last")
    values["files"]["../../secret"] = values["files"].pop("state.json")
    (tmp_path / "last" / manifest.NAME).write_text(seal(values))
    with pytest.raises(Damaged, match=r"is not a manifest: files lacks state\.json"):
        manifest.verify(tmp_path / "last")


def remove_step(values):
    del values["step"]


def make_git_a_list(values):
    values["git"] = []


def make_the_size_huge(values):
    values["files"]["state.json"]["size"] = 10**400


def make_the_audits_flat(values):
    values["audits"] = [{"time": "now"}]


def make_the_source_a_word(values):
    values["previous"] = "the one before"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (remove_step, "it lacks step"),
        (make_git_a_list, "git is no object"),
        (make_the_size_huge, "size is '1000"),
        (make_the_audits_flat, "audits lacks source, fields, reason"),
        (make_the_source_a_word, "previous is no object"),
    ],
)
def test_a_manifest_of_other_fields_is_damage_and_the_one_before_is_used(tmp_path, edit, said):
    saved(tmp_path, [1, 2])
    values = manifest.read(tmp_path / "last")
    edit(values)
    (tmp_path / "last" / manifest.NAME).write_text(seal(values))
    with pytest.raises(Damaged, match=f"is not a manifest: {said}"):
        manifest.read(tmp_path / "last")
    assert loaded(tmp_path).steps == 1


@pytest.mark.parametrize("name", [*manifest.FILES, manifest.NAME])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "socket"])
def test_what_is_no_file_is_damage_and_never_waited_for(tmp_path, name, kind):
    saved(tmp_path / "run", [1, 2])
    path = (tmp_path / "run" / "last" / name).resolve()
    path.rename(tmp_path / name)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / name)
    else:
        with socket.socket(socket.AF_UNIX) as server, chdir(path.parent):
            server.bind(path.name)
    assert loaded(tmp_path / "run").steps == 1


def test_all_damaged_stops_and_leaves_everything_as_it_is(tmp_path):
    saved(tmp_path, [1, 2])
    for step in (1, 2):
        cut(lambda n: n // 2)(tmp_path / store.name_of(step) / "model.safetensors")
    before = everything(tmp_path)
    for _ in range(2):
        context = made(tmp_path)
        with pytest.raises(ValueError, match=r"no checkpoint in .* is whole.*Nothing was deleted"):
            context.load_bestcheckpoint(10_000)
        assert everything(tmp_path) == before
        assert content(context) == expected(0, tmp_path)


def test_the_last_one_gone_does_not_mean_the_beginning(tmp_path):
    saved(tmp_path, [1, 2])
    Path.unlink(tmp_path / "step-00000002" / "state.json")
    loaded(tmp_path)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(ValueError, match="damaged-step-00000002-0"):
        made(tmp_path).load_bestcheckpoint(10_000)


def test_stray_files_and_a_broken_last_are_no_damage(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to("nowhere")
    (tmp_path / "step-00000002" / ".nfs0001").write_text("stray")
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    assert content(loaded(tmp_path)) == expected(2, tmp_path)
    assert os.readlink(tmp_path / "last") == "step-00000002"


@pytest.mark.parametrize("copied", [1, 2])
@pytest.mark.parametrize("kind", ["a folder", "a text", "absent"])
def test_a_workspace_that_was_copied_without_links_goes_on(tmp_path, kind, copied):
    saved(tmp_path, [1, 2])
    (tmp_path / "last").unlink()
    if kind == "a folder":
        shutil.copytree(tmp_path / store.name_of(copied), tmp_path / "last")
    elif kind == "a text":
        (tmp_path / "last").write_text(store.name_of(copied))
    assert store.resolve(tmp_path).resolve().name in (store.name_of(2), store.name_of(copied))
    assert content(loaded(tmp_path)) == expected(2, tmp_path)
    assert os.readlink(tmp_path / "last") == store.name_of(2)


def test_where_there_are_no_links_last_is_a_copy(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    saved(tmp_path, [1, 2, 3])
    assert manifest.verify(tmp_path / "last") == manifest.verify(tmp_path / store.name_of(3))
    assert not (tmp_path / "last").is_symlink()
    assert content(loaded(tmp_path)) == expected(3, tmp_path)


def test_a_link_to_a_folder_elsewhere_is_no_checkpoint(tmp_path):
    saved(tmp_path / "other", [7])
    saved(tmp_path / "run", [1, 2])
    (tmp_path / "run" / store.name_of(7)).symlink_to(tmp_path / "other" / store.name_of(7))
    (tmp_path / "run" / "last").unlink()
    (tmp_path / "run" / "last").symlink_to(tmp_path / "other" / store.name_of(7))
    assert loaded(tmp_path / "run").steps == 2
    assert os.readlink(tmp_path / "run" / "last") == store.name_of(2)


def test_committed_but_not_yet_named_last_is_the_newest(tmp_path):
    saved(tmp_path, [1, 2])
    atomic_files.point(tmp_path / "last", "step-00000001")
    assert loaded(tmp_path).steps == 2
    assert os.readlink(tmp_path / "last") == "step-00000002"


def test_another_format_is_refused_and_left(tmp_path):
    saved(tmp_path, [1])
    values = {**manifest.read(tmp_path / "last"), "format": 99}
    (tmp_path / "last" / manifest.NAME).write_text(seal(values))
    before = everything(tmp_path)
    with pytest.raises(ValueError, match="format 99, expected 1"):
        made(tmp_path).load_bestcheckpoint(10_000)
    assert everything(tmp_path) == before


# Errors that say nothing about the content

PASSING = {
    "an I/O error": OSError(errno.EIO, "input/output error"),
    "no permission": PermissionError(errno.EACCES, "no"),
    "stale handle": OSError(errno.ESTALE, "stale"),
    "memory": MemoryError(),
    "device": RuntimeError("CUDA error: device-side assert triggered"),
    "cancelled": TaskCancelled("by a signal"),
}


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.parametrize("where", ["open", "read_bytes", "parse", "apply"])
def test_a_passing_error_is_raised_and_touches_nothing(tmp_path, monkeypatch, error, where):
    saved(tmp_path, [1, 2, 3], keep=3)
    before = everything(tmp_path)
    context = made(tmp_path, keep=3)

    def fail(*args, **kwargs):
        raise PASSING[error]

    with monkeypatch.context() as patched:
        if where == "open":
            patched.setattr(manifest.hashlib, "file_digest", fail)
        elif where == "read_bytes":
            patched.setattr(manifest, "read_bytes", fail)
        elif where == "parse":
            patched.setattr(format, "load", fail)
        else:
            patched.setattr(context.state.model, "load_state_dict", fail)
        with pytest.raises(type(PASSING[error])):
            context.load_bestcheckpoint(10_000)
    assert everything(tmp_path) == before
    assert context.steps == 0
    assert content(context) == expected(0, tmp_path)
    assert content(loaded(tmp_path, keep=3)) == expected(3, tmp_path)


def reseal(folder, file, change):
    """Changes a file as its writer could have: the manifest is of the changed one."""
    values = manifest.read(folder)
    change(folder / file)
    manifest.write(folder, {key: value for key, value in values.items() if key not in ("files", "format")})


def test_a_half_that_cannot_be_read_leaves_nothing_applied(tmp_path):
    """The manifest is of the cut file, so that only parsing can tell."""
    saved(tmp_path, [1])
    reseal(tmp_path / "last", "optimizer.safetensors", cut(lambda n: n // 2))
    context = made(tmp_path)
    with pytest.raises(Damaged, match="cannot be read"):
        context.load_bestcheckpoint(10_000)
    assert content(context) == expected(0, tmp_path)


def test_what_is_missing_from_the_state_is_named(tmp_path):
    saved(tmp_path, [1])
    reseal(tmp_path / "last", "state.json", lambda path: path.write_text('{"epoch": 0}'))
    with pytest.raises(Damaged, match=r"state\.json lacks steps, metrics"):
        made(tmp_path).load_bestcheckpoint(10_000)


# What fits

OTHERS = {
    "config": (Subject(SUBJECT.identifier, {**SUBJECT.config, "batch_size": 7}, SUBJECT.data), r"batch_size +5 +7"),
    "new parameter": (
        Subject(SUBJECT.identifier, {**SUBJECT.config, "drop": 0.5}, SUBJECT.data),
        r"drop +\(none\) +0.5",
    ),
    "data": (Subject(SUBJECT.identifier, SUBJECT.config, "1" * 64), r"data +0{39}… +1{39}…"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_whole_one_that_does_not_fit_is_refused_side_by_side_and_left(tmp_path, what):
    saved(tmp_path, [1, 2])
    before = everything(tmp_path)
    other, message = OTHERS[what]
    context = made(tmp_path, subject=other)
    with pytest.raises(ValueError, match=message):
        context.load_bestcheckpoint(10_000)
    assert everything(tmp_path) == before
    assert content(context) == expected(0, tmp_path)


@pytest.mark.parametrize("what", OTHERS)
def test_a_reason_goes_on_and_is_kept_in_every_later_checkpoint(tmp_path, what):
    saved(tmp_path, [1, 2])
    context = loaded(tmp_path, subject=OTHERS[what][0], force_resume="the data were repaired")
    assert content(context) == expected(2, tmp_path)
    train(context, 3).save_checkpoint()
    context = loaded(tmp_path, subject=OTHERS[what][0])
    train(context, 4).save_checkpoint()
    audits = manifest.read(tmp_path / "last")["audits"]
    assert [audit["source"]["step"] for audit in audits] == [2, 3]
    assert audits[0]["reason"] == "the data were repaired"
    assert len(audits[0]["fields"]) == 1
    assert audits[0]["time"].endswith("+00:00")
    assert audits[1]["fields"] == {}


def test_tensors_that_do_not_fit_cannot_be_forced(tmp_path):
    saved(tmp_path, [1])
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=r"model layout weight +float32\[4, 3\] +float32\[4, 5\]"):
        made(tmp_path, width=5, force_resume="please").load_bestcheckpoint(10_000)
    assert everything(tmp_path) == before


def test_other_versions_are_told_and_recorded(tmp_path, monkeypatch):
    saved(tmp_path, [1])
    monkeypatch.setattr("xpmir_uform.checkpoints.provenance.versions", lambda: {"torch": "9.9"})
    context = loaded(tmp_path)
    assert [name for name, _ in context.alerts] == ["other versions"]
    assert context.audits[0]["fields"]["version of torch"] == [torch.__version__, "9.9"]


# Faults while saving


class Fault:
    """Counts the file operations of a save and does something at one of them."""

    NAMES: ClassVar = {
        os: ("fsync", "rename", "replace", "open"),
        Path: ("mkdir", "write_text", "symlink_to", "unlink", "open"),
        shutil: ("rmtree",),
    }

    def __init__(self, monkeypatch, at=-1, act=None):
        self.at, self.act, self.seen = at, act, Counter()
        for owner, names in self.NAMES.items():
            for name in names:
                monkeypatch.setattr(owner, name, self.wrap(name, getattr(owner, name)))
        monkeypatch.setattr(model_files, "save_file", self.wrap("save_file", model_files.save_file, half))

    def wrap(self, name, real, partly=None):
        def call(*args, **kwargs):
            number = self.seen.total()
            self.seen[name] += 1
            if number == self.at:
                if partly:
                    partly(real, *args)
                self.act()
            return real(*args, **kwargs)

        return call


def half(real, tensors, path, *rest):
    """Writes half of a file."""
    real(tensors, path, *rest)
    os.truncate(path, os.stat(path).st_size // 2)


@pytest.fixture
def operations(tmp_path, monkeypatch):
    """How many operations the third save makes."""
    context = train(saved(tmp_path / "counted", [1, 2]), 3)
    with monkeypatch.context() as patched:
        fault = Fault(patched)
        context.save_checkpoint()
    return fault.seen.total()


def run_and_check(run, tmp_path, old, new):
    """After a fault: the older or the newer state, whole; training goes on to the same end."""
    context = loaded(run)
    assert context.alerts == []
    assert content(context) in (expected(old, tmp_path), expected(new, tmp_path))
    found = context.steps
    assert os.readlink(run / "last") == store.name_of(found)
    train(context, 5).save_checkpoint()
    assert content(loaded(run)) == expected(5, tmp_path)
    assert len(store.steps_in(run)) == 2
    assert not list(run.glob(".*"))
    return found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_an_error_at_each_operation_of_saving_loses_nothing(tmp_path, monkeypatch, operations, number):
    assert operations >= 16

    def fail():
        raise OSError(number, os.strerror(number))

    found = Counter()
    for at in range(operations):
        run = tmp_path / f"run-{at}"
        context = train(saved(run, [1, 2]), 3)
        with monkeypatch.context() as patched:
            Fault(patched, at, fail)
            try:
                context.save_checkpoint()
                found["saved"] += 1
            except OSError:
                found["raised"] += 1
        assert {1, 2} <= set(store.steps_in(run)) or {2, 3} <= set(store.steps_in(run))
        found[run_and_check(run, tmp_path, 2, 3)] += 1
    assert found["raised"] > found["saved"]
    assert found[2] > 0
    assert found[3] > 0


def test_a_kill_at_each_operation_of_saving_loses_nothing(tmp_path, monkeypatch, operations):
    found = Counter()
    for at in range(operations):
        run = tmp_path / f"run-{at}"
        context = train(saved(run, [1, 2]), 3)
        child = os.fork()
        if child == 0:
            Fault(monkeypatch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            context.save_checkpoint()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found[run_and_check(run, tmp_path, 2, 3)] += 1
    assert found[2] > 0
    assert found[3] > 0


def test_an_interrupted_first_save_begins_anew(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            made(tmp_path).save_checkpoint()
    assert not made(tmp_path).load_bestcheckpoint(10_000)
    assert list(tmp_path.iterdir()) == []


def computing(context, backend):
    """A context whose trainer has a loss of that back end."""
    context.state.trainer.losses = [SimpleNamespace(NAME="contrastive", backend=backend), SimpleNamespace(NAME="plain")]
    return context


def test_another_way_of_computing_is_told_and_recorded(tmp_path, monkeypatch):
    context = computing(made(tmp_path), "auto")
    train(context, 1)
    context.save_checkpoint()
    found = manifest.read(tmp_path / "last")
    assert found["environment"]["backend of contrastive"] == "auto, so chunked"
    assert found["environment"]["float32_matmul"] == torch.get_float32_matmul_precision()
    again = computing(made(tmp_path), "auto")
    assert again.load_bestcheckpoint(10_000)
    assert again.alerts == []
    assert again.audits[0]["fields"] == {}

    before = torch.get_float32_matmul_precision()
    other = computing(made(tmp_path), "reference")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setattr(other.fabric.strategy.precision, "precision", "bf16-mixed")
    try:
        torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
        now = torch.get_float32_matmul_precision()
        assert other.load_bestcheckpoint(10_000)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [name for name, _ in other.alerts] == ["other arithmetic"]
    assert other.audits[0]["fields"] == {
        "precision": ["32-true", "bf16-mixed"],
        "backend of contrastive": ["auto, so chunked", "reference"],
        "float32_matmul": [before, now],
        "tf32_override": [None, "0"],
    }


def test_another_device_is_told(tmp_path):
    here = provenance.arithmetic(FABRIC, [])
    there = {**here, "device": "cuda", "environment": {**here["environment"], "device_name": "NVIDIA H200"}}
    assert provenance.arithmetic_differences(there, here) == {
        "device": ["cuda", "cpu"],
        "device_name": ["NVIDIA H200", here["environment"]["device_name"]],
    }
