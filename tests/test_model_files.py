"""Saved models: round trips, refusals, loading as an init task, and in another process."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from experimaestro import Param, Task
from experimaestro.core.objects import ConfigInformation
from safetensors.torch import load_file
from xpm_torch.module import SimpleModuleLoader

from xpmir_uform.data.decoding.shapes import ImageShape
from xpmir_uform.data.items import Item
from xpmir_uform.model import PooledHead, UFormEncoder
from xpmir_uform.model.weights import save_weights

TEXTS = ["hello", "", "another name"]


def config(width: int = 16, seed: int = 0, image: bool = True):
    return UFormEncoder.C(
        depth=1,
        hidden=128,
        image=ImageShape.C(patch_side=4, max_side=16) if image else None,
        pooled=PooledHead.C(width=width),
        seed=seed,
    )


def build(**values) -> UFormEncoder:
    model = config(**values).instance()
    model.initialize()
    return model


def embeddings(model) -> torch.Tensor:
    return model.encode([Item.text(text, key) for key, text in enumerate(TEXTS)])


class EmbedTask(Task):
    """Writes the embeddings of TEXTS by the model it is given."""

    __xpmid__ = "uform.test.embed"

    model: Param[UFormEncoder]
    target: Param[Path]

    def execute(self):
        np.save(self.target, embeddings(self.model).numpy())


@pytest.mark.parametrize("name", ["model.safetensors", "folder", "deep/folder"])
def test_round_trip_to_a_file_or_folder(tmp_path, name):
    trained = build(seed=1)
    trained.save_model(tmp_path / name)
    other = build(seed=2)
    assert not torch.equal(embeddings(other), embeddings(trained))
    other.load_model(tmp_path / name)
    assert torch.equal(embeddings(other), embeddings(trained))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_checkpoint_folder_with_a_model_in_it(tmp_path):
    trained = build(seed=1)
    trained.save_model(tmp_path / "model")
    other = build(seed=2)
    other.load_model(tmp_path)
    assert torch.equal(embeddings(other), embeddings(trained))


def test_a_model_that_was_not_initialised_loads(tmp_path):
    build(seed=1).save_model(tmp_path)
    other = config(seed=2).instance()
    other.load_model(tmp_path)
    assert torch.equal(embeddings(other), embeddings(build(seed=1)))


def test_types_and_modes_stay(tmp_path):
    trained = build(seed=1)
    trained.save_model(tmp_path)
    other = build(seed=2).double().eval()
    other.load_model(tmp_path)
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float64}
    assert not other.training
    torch.testing.assert_close(embeddings(other).float(), embeddings(trained), rtol=0, atol=1e-5)


def test_tied_and_strided_tensors_are_saved_in_full(tmp_path):
    base = torch.arange(6.0).view(2, 3)
    save_weights({"a": base, "tied": base, "turned": base.T, "part": base[:, 1]}, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found["tied"].tolist() == found["a"].tolist() == base.tolist()
    assert found["turned"].tolist() == base.T.tolist()
    assert found["part"].tolist() == [1.0, 4.0]


def test_a_model_with_tied_and_strided_parameters_round_trips(tmp_path):
    def tie(model):
        first = model.encoder.blocks[0].attention
        first.output.weight = torch.nn.Parameter(first.output.weight.detach().T)
        model.encoder.norm.weight = model.encoder.blocks[0].attention_norm.weight
        return model

    trained = tie(build(seed=1))
    trained.save_model(tmp_path)
    other = tie(build(seed=2))
    other.load_model(tmp_path)
    assert torch.equal(embeddings(other), embeddings(trained))
    assert other.encoder.norm.weight is other.encoder.blocks[0].attention_norm.weight


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"width": 8}, r"of another shape: pooling.projection.weight \(16, 128\) for \(8, 128\)\)"),
        ({"image": False}, r"unexpected: encoder.patches.image.weight\)"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_loaded(tmp_path, other, said):
    build(seed=1).save_model(tmp_path)
    model = build(seed=2, **other)
    before = embeddings(model)
    with pytest.raises(ValueError, match=said):
        model.load_model(tmp_path)
    assert torch.equal(embeddings(model), before)


def test_missing_tensors_are_named(tmp_path):
    build(image=False).save_model(tmp_path)
    with pytest.raises(ValueError, match=r"missing: encoder.patches.image.weight"):
        build().load_model(tmp_path)


@pytest.mark.parametrize("kept", [0, 8, 1000, -1])
def test_a_damaged_file_is_refused(tmp_path, kept):
    file = tmp_path / "model.safetensors"
    build().save_model(file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        build().load_model(file)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights at"):
        build().load_model(tmp_path / "nothing")


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    def cut_short(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    file = tmp_path / "model.safetensors"
    save_weights({"old": torch.ones(1)}, file)
    monkeypatch.setattr("xpmir_uform.model.weights.save_file", cut_short)
    with pytest.raises(OSError, match="no space left"):
        save_weights({"new": torch.ones(1)}, file)
    assert list(load_file(file)) == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_process_gives_equal_bits(tmp_path):
    build(seed=1).save_model(tmp_path)
    script = (
        "import sys, numpy as np\nfrom pathlib import Path\n"
        "from xpmir_uform.data.items import Item\n"
        "from xpmir_uform import ImageShape, PooledHead, UFormEncoder\n"
        "shape = ImageShape.C(patch_side=4, max_side=16)\n"
        "model = UFormEncoder.C(depth=1, hidden=128, image=shape, pooled=PooledHead.C(width=16)).instance()\n"
        "model.load_model(Path(sys.argv[1]))\n"
        f"items = [Item.text(text, key) for key, text in enumerate({TEXTS!r})]\n"
        "np.save(Path(sys.argv[1]) / 'embeddings.npy', model.encode(items).numpy())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    found = np.load(tmp_path / "embeddings.npy")
    assert np.array_equal(found, embeddings(build(seed=1)).numpy())


def test_a_loader_is_the_init_task_of_another_task(tmp_path):
    trained = build(seed=1)
    trained.save_model(tmp_path)
    model = config(seed=2)
    loader = model.loader_config(tmp_path)
    task = EmbedTask.C(model=model, target=tmp_path / "embeddings.npy")
    task.__xpm__.set_init_tasks([loader])
    running = ConfigInformation.fromParameters(json.loads(task.__json__()))  # as a job does
    running.execute()
    assert isinstance(loader, SimpleModuleLoader)
    assert np.array_equal(np.load(tmp_path / "embeddings.npy"), embeddings(trained).numpy())
