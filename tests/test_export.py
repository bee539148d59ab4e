"""A trained model as a folder."""

import pytest
import torch

from xpmir_uform import Item, PooledHead, UFormEncoder, load_model, save_model


def config():
    return UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=8), seed=5)


def test_a_saved_model_answers_as_before(tmp_path, caplog):
    model = config().instance()
    model.initialize()
    model.save_model(tmp_path / "weights")
    save_model(config().loader_config(tmp_path / "weights"), tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"experimaestro.json", "model.safetensors"}
    loaded = load_model(tmp_path / "model")
    assert not [record for record in caplog.records if "config.json" in record.getMessage()]
    items = [Item.text("red apple"), Item.text("pomme rouge")]
    assert torch.equal(loaded.encode(items), model.encode(items))
    assert not loaded.training


@pytest.mark.parametrize("name", ["absent", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match=f"there is no folder {name}, expected one that save_model wrote"):
        load_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no experimaestro\.json, expected a folder that save_model wrote"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_a_damaged_definition_is_refused_by_name(tmp_path, content):
    (tmp_path / "experimaestro.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"experimaestro\.json (is damaged|describes no model).*: save it again"):
        load_model(tmp_path)
