"""A trained model as a folder."""

import json
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from xpm_torch.actions import DirectInteraction
from xpm_torch.huggingface import TorchHFHub

from xpmir_uform import Item, PooledHead, UFormEncoder, load_model, save_model
from xpmir_uform.base import atomic_files
from xpmir_uform.checkpoints import manifest, store
from xpmir_uform.model.weights import save_weights
from xpmir_uform.monitoring.jsonl import read as read_journal

NAMES = {"experimaestro.json", "model.safetensors", "README.md"}


def config(seed=5, width=8):
    return UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=width), seed=seed)


def trained(folder, seed=5):
    """A loader of weights in a folder."""
    model = config(seed).instance()
    model.initialize()
    model.save_model(folder)
    return config(seed).loader_config(folder)


def saved(folder, seed=5):
    save_model(trained(folder / "weights", seed), folder / "model")
    return folder / "model"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_saved_model_answers_as_before(tmp_path):
    model = trained(tmp_path / "weights").model.instance()
    model.load_model(tmp_path / "weights")
    save_model(model.__config__.loader_config(tmp_path / "weights"), tmp_path / "model")
    assert set(content(tmp_path / "model")) == NAMES
    loaded = load_model(tmp_path / "model")
    items = [Item.text("red apple"), Item.text("pomme rouge")]
    assert torch.equal(loaded.encode(items), model.encode(items))
    assert not loaded.training
    stock = TorchHFHub.from_pretrained(str(tmp_path / "model")).eval()
    assert torch.equal(stock.encode(items), model.encode(items))


def test_saving_over_a_model_touches_nothing_that_it_came_from(tmp_path):
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    before = content(tmp_path / "a")
    for loader in (first, second, second):
        save_model(loader, tmp_path / "model")
        assert not os.path.samefile(tmp_path / "model" / "model.safetensors", loader.path / "model.safetensors")
    assert content(tmp_path / "a") == before
    assert content(tmp_path / "model")["model.safetensors"] == content(tmp_path / "b")["model.safetensors"]
    (tmp_path / "model" / "model.safetensors").write_bytes(b"copied over it")
    assert content(tmp_path / "b")["model.safetensors"] != b"copied over it"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_stock_action_writes_through_a_link(tmp_path):
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    before = content(tmp_path / "a")
    for loader in (first, second):
        TorchHFHub(loader).save_pretrained(tmp_path / "model")
    assert content(tmp_path / "a") != before
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_action_of_experimaestro_saves_in_the_same_way(tmp_path):
    loader = trained(tmp_path / "weights")
    action = config().export_action(loader, default_name="last").instance()
    (tmp_path / "model").mkdir()
    for _ in range(2):
        action.execute(DirectInteraction(folder=tmp_path / "model"))
    assert set(content(tmp_path / "model")) == NAMES
    weights = tmp_path / "weights" / "model.safetensors"
    assert not os.path.samefile(tmp_path / "model" / "model.safetensors", weights)
    assert load_model(tmp_path / "model").seed == 5


@pytest.mark.parametrize("exchange", [True, False])
def test_an_older_model_is_there_until_the_new_one_is(tmp_path, monkeypatch, exchange):
    folder = saved(tmp_path)
    before = content(folder)
    rename = os.rename

    def fail(source, target):
        if Path(target) == folder and Path(source).name.endswith(".part"):
            raise OSError(5, "I/O error")
        rename(source, target)

    def swap(one, other):
        if exchange:
            raise OSError(5, "I/O error")
        return False

    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(atomic_files, "swap", swap)
    with pytest.raises(OSError, match="I/O error"):
        save_model(trained(tmp_path / "other", 2), folder)
    assert content(folder) == before


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    folder = saved(tmp_path)
    (folder / "notes.txt").write_text("dear")
    before = content(folder)
    with pytest.raises(ValueError, match=r"model holds notes\.txt, which is not of a saved model and would be lost"):
        save_model(trained(tmp_path / "other", 2), folder)
    assert content(folder) == before


def test_a_saved_model_is_the_same_bytes_and_names_no_path(tmp_path):
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other")
    assert content(one) == content(other)
    for data in content(one).values():
        assert str(tmp_path).encode() not in data
    readme = (one / "README.md").read_text()
    for text in ("type uform.encoder", "depth = 1", "pooled.width = 8", "pooled.max_inverse_temperature = 100.0"):
        assert text in readme


def test_weights_with_metadata_are_the_same_bytes(tmp_path):
    state = {name: torch.arange(3.0) for name in "zyxabc"}
    for name in ("a", "b"):
        save_weights(state, tmp_path / name, "step 3 of x")
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("place", [9, -1, -500])
def test_a_changed_byte_of_the_weights_is_refused(tmp_path, place):
    file = saved(tmp_path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors (was changed: its sha256 is|is not a whole)"):
        load_model(file.parent)
    with pytest.raises(ValueError, match="was changed"):
        config().instance().load_model(file.parent)
    with pytest.raises(ValueError, match=r"was changed.*nothing was written"):
        save_model(config().loader_config(file.parent), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_model_of_an_older_version_is_loaded_without_a_digest(tmp_path):
    folder = saved(tmp_path)
    objects = json.loads((folder / "experimaestro.json").read_text())
    del objects[-1]["digest"], objects[-1]["files"]
    (folder / "experimaestro.json").write_text(json.dumps(objects))
    assert load_model(folder).seed == 5


@pytest.mark.parametrize("name", ["absent", "/no/such/folder", "a/b/c", "runs/model", "org/name"])
def test_a_folder_that_is_not_there_is_refused_without_asking_anybody(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("a hub was asked"))
    with pytest.raises(ValueError, match=f"there is no folder {name}, expected one that save_model wrote"):
        load_model(name)


@pytest.mark.parametrize(("name", "revision"), [("hf://org/na.me", None), ("hf://org/na.me@v1.0", "v1.0")])
def test_a_repository_of_the_hub_is_named_as_one(tmp_path, monkeypatch, name, revision):
    asked = []
    folder = saved(tmp_path)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)

    def download(repository, revision, **kwargs):
        asked.append((repository, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_model(name).seed == 5
    assert asked == [("org/na.me", revision)]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no experimaestro\.json, expected a folder that save_model wrote"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_a_damaged_definition_is_refused_by_name(tmp_path, content):
    (tmp_path / "experimaestro.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"experimaestro\.json (is damaged|describes no model).*: save it again"):
        load_model(tmp_path)


@contextmanager
def unreadable(path, mode):
    """Within the block ``path`` has that mode, and this process is not root."""
    root = os.geteuid() == 0
    path.chmod(mode)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "mode"), [("model.safetensors", 0o000), ("experimaestro.json", 0o000), (".", 0o000), (".", 0o600)]
)
def test_a_refused_permission_is_called_that_and_names_the_owner(name, mode):
    with tempfile.TemporaryDirectory() as public:
        Path(public).chmod(0o755)
        folder = saved(Path(public))
        path = (folder / name).resolve()
        said = rf"permission denied: {path} belongs to \w+ and has mode {mode:04o}"
        with unreadable(path, mode):
            with pytest.raises(PermissionError, match=said):
                load_model(folder)
            with pytest.raises(PermissionError, match=said):
                config().instance().load_model(folder)


def test_telemetry_and_checkpoints_that_may_not_be_read_name_their_owner():
    with tempfile.TemporaryDirectory() as public:
        Path(public).chmod(0o755)
        journal, shelved = Path(public) / "telemetry.jsonl", Path(public) / "checkpoints"
        journal.write_text('{"step": 1}\n')
        (shelved / "step-00000001").mkdir(parents=True)
        (shelved / "step-00000001" / "manifest.json").write_text("{}")
        for path, read in [
            (journal, lambda: list(read_journal(journal))),
            (shelved, lambda: store.steps_in(shelved)),
            (shelved / "step-00000001" / "manifest.json", lambda: manifest.read(shelved / "step-00000001")),
        ]:
            said = rf"permission denied: {path} belongs to \w+ and has mode 0000"
            with unreadable(path, 0), pytest.raises(PermissionError, match=said):
                read()


def test_a_saved_model_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        folder = saved(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_loader_of_other_things_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a loader of one file of weights"):
        save_model(config(), tmp_path / "model")
