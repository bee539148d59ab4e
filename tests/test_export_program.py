"""Programs of torch.export: they answer what encode does, in a process that cannot import this package."""

import json
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform import AudioShape, ImageShape, Item, Modality, PooledHead, UFormEncoder, VideoShape, export_programs
from xpmir_uform.data.decoding import decode
from xpmir_uform.data.segments import Segment
from xpmir_uform.export.program import exported
from xpmir_uform.model import pack

DOCUMENTED = Path(__file__).parents[1] / "docs" / "export.md"
BLOCKED = ["xpmir_uform", "uform_kernels", "experimaestro", "xpm_torch", "lightning"]
TEXTS = ["hello", "", "a somewhat longer name", "é", "hello", "x" * 300]
SIZES = [(16, 16), (3, 40), (9, 7), (64, 33), (1, 1)]


def build(**params):
    shapes = {
        "image": ImageShape.C(patch_side=4, max_side=24),
        "video": VideoShape.C(patch_side=4, tube_frames=2, max_side=8, max_frames=6),
        "audio": AudioShape.C(chunk_samples=20, sample_rate=100, max_seconds=2.0),
    }
    model = UFormEncoder.C(
        **{"depth": 1, "hidden": 128, "pooled": PooledHead.C(width=24), **shapes, **params}
    ).instance()
    model.initialize()
    return model


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "exported"
    export_programs(model, folder)
    return folder


def pictures():
    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in SIZES]


def item(picture, key):
    file = BytesIO()
    picture.save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), key)


def test_programs_run_without_this_package(model, folder, tmp_path):
    """The documented program as it stands, where importing this package fails."""
    given = pictures()
    for number, picture in enumerate(given):
        picture.save(tmp_path / f"{number}.png")
    documented = re.findall(r"```python\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)[-1]
    code = (
        f"import sys\nfor name in {BLOCKED}: sys.modules[name] = None\n{documented}\n"
        f"texts = {TEXTS!r}\n"
        f"opened = [Image.open(f'{tmp_path}/{{number}}.png') for number in range({len(given)})]\n"
        "found = {'texts': encode_texts(texts), 'pictures': encode_pictures(opened),\n"
        "    'text': encode_texts(texts[1:2]), 'picture': encode_pictures(opened[4:])}\n"
        f"np.savez('{tmp_path}/found.npz', **{{name: value.numpy() for name, value in found.items()}})\n"
        "assert not any(name.startswith('xpmir_uform.') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    items = [item(picture, key) for key, picture in enumerate(given)]
    for name, things in [("texts", TEXTS), ("pictures", items), ("text", TEXTS[1:2]), ("picture", items[4:])]:
        np.testing.assert_allclose(found[name], model.encode(things).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["a" * 3000, "no" * 1000])
def test_a_long_uniform_text_is_no_less_exact(model, folder, text):
    program = torch.export.load(folder / "text.pt2").module()
    found = program(torch.tensor([list(text.encode())]), torch.tensor([len(text)]))
    torch.testing.assert_close(found, model.encode([text]), rtol=1e-5, atol=2e-6)


def padded(values, most):
    filled = np.full((most, values.shape[1]), 7.0, np.float32)
    filled[: len(values)] = values
    return torch.from_numpy(filled)


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO])
def test_videos_and_sounds_are_exported(model, folder, modality):
    draw = np.random.default_rng(1)
    grids = {Modality.VIDEO: [(2, 1, 2), (3, 2, 2), (1, 1, 1)], Modality.AUDIO: [(1, 1, 3), (1, 1, 9), (1, 1, 1)]}[
        modality
    ]
    width = model.shapes[modality].patch_values
    segments = [Segment(modality, draw.normal(size=(np.prod(g), width)).astype(np.float32), g) for g in grids]
    with torch.no_grad():
        expected = model(pack(segments)).embeddings
    program = torch.export.load(folder / f"{modality.name.lower()}.pt2").module()
    patches = torch.stack([padded(segment.values, 13) for segment in segments])
    torch.testing.assert_close(program(patches, torch.tensor(grids)), expected, rtol=1e-5, atol=1e-5)


def test_what_is_padded_has_no_influence(folder):
    program = torch.export.load(folder / "text.pt2").module()
    ids = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 9, 1])
    other = ids.clone()
    for row, length in zip(other, lengths.tolist(), strict=True):
        row[length:] = 0
    expected = program(ids, lengths)
    torch.testing.assert_close(program(other, lengths), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(program(ids[:, :9], lengths), expected, rtol=1e-5, atol=1e-6)


def test_the_contract_tells_how_inputs_are_cut(folder):
    told = json.loads((folder / "contract.json").read_text())
    assert told["width"] == 24
    assert told["empty_text"] == 256
    assert told["modalities"]["image"] == {"patch_side": 4, "max_side": 24, "channels": 3}
    assert list(told["modalities"]) == ["text", "image", "video", "audio"]
    assert {path.stem for path in folder.glob("*.pt2")} == set(told["modalities"])


def test_a_model_in_float64_is_exported_as_it_is():
    wide = build(depth=2, image=None, video=None, audio=None).double()
    program = exported(wide, Modality.TEXT).module()
    ids = torch.tensor([list(b"hello"), [*b"yes", 256, 256]])
    segments = [decode(Item.text(text), {}) for text in ("hello", "yes")]
    with torch.no_grad():
        expected = wide(pack(segments)).embeddings
    torch.testing.assert_close(program(ids, torch.tensor([5, 3])), expected, rtol=1e-12, atol=1e-12)


def test_an_export_replaces_an_export_and_nothing_else(model, tmp_path):
    (tmp_path / "a").write_text("dear")
    with pytest.raises(ValueError, match="is there and is no export: choose another place, or remove it"):
        export_programs(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_exported_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no pooled head, and nothing to export"):
        export_programs(build(pooled=None), tmp_path / "a")
    with pytest.raises(ValueError, match="this model has no video input"):
        exported(build(video=None), Modality.VIDEO)
