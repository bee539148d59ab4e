"""Programs of torch.export: they answer what encode does, in a process that cannot import this package."""

import json
import re
import struct
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from xpmir_uform import AudioShape, ImageShape, Item, Modality, PooledHead, UFormEncoder, VideoShape, export_programs
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.segment import Segment
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


def bytes_of(picture, kind="PNG", **options):
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def image_files():
    """Every way in which the pixels of a file are not those of an upright RGB picture of 8 bits."""
    draw = np.random.default_rng(0)
    colours = [Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in SIZES]
    smooth = Image.fromarray(np.add.outer(np.arange(90), np.arange(150)).astype(np.uint8)).convert("RGB")
    alpha = Image.fromarray(draw.integers(0, 256, (20, 31), dtype=np.uint8))
    deep = draw.integers(0, 1 << 16, (20, 31), dtype=np.uint16)
    large = Image.fromarray(draw.integers(0, 256, (330, 500, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    transparent = smooth.resize((31, 20))
    transparent.putalpha(alpha)
    return [
        *(bytes_of(picture) for picture in colours),
        bytes_of(large),
        bytes_of(smooth, "JPEG", quality=95),
        bytes_of(smooth, "JPEG", exif=turned),
        bytes_of(smooth.convert("CMYK"), "JPEG"),
        bytes_of(transparent),
        bytes_of(transparent.convert("LA")),
        bytes_of(smooth.convert("P"), transparency=3),
        bytes_of(smooth.convert("1")),
        bytes_of(Image.fromarray(deep)),
        bytes_of(Image.fromarray(deep), transparency=int(deep[0, 0])),
        bytes_of(Image.fromarray(deep), "TIFF", tiffinfo={262: 0}),
        bytes_of(Image.fromarray(deep.astype(np.int32) - 9000), "TIFF"),
        bytes_of(Image.fromarray(deep.astype(np.float32) / 65535), "TIFF"),
        bytes_of(transparent, "WEBP", lossless=True),
    ]


def sound_files():
    draw = np.random.default_rng(1)
    files = []
    for count, channels, rate, kind, subtype in [
        (77, 1, 100, "WAV", "PCM_16"), (800, 2, 441, "WAV", "PCM_U8"), (900, 3, 800, "WAV", "PCM_24"),
        (50, 2, 100, "WAV", "FLOAT"), (4000, 2, 8000, "FLAC", "PCM_16"), (9000, 1, 16000, "OGG", "VORBIS"),
    ]:  # fmt: skip
        file = BytesIO()
        loud = 1.5 if subtype == "FLOAT" else 0.5
        soundfile.write(file, draw.uniform(-loud, loud, (count, channels)), rate, format=kind, subtype=subtype)
        files.append(file.getvalue())
    return files


def video_files(media):
    draw = np.random.default_rng(2)
    frames = draw.integers(0, 256, (9, 12, 20, 3), dtype=np.uint8)
    shown = Image.fromarray(frames[0]).quantize(7)
    turned = bytearray(media.video(frames[:2], "mov", "png", "rgb24"))
    place = turned.index(b"tkhd") + 4 + 40
    turned[place : place + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    return [
        bytes(turned),
        media.video(frames[:3]),
        media.video(frames[:4, :8], pixels="yuv420p", codec="mpeg4", container="mp4"),
        media.video(frames[:1, :3, :3]),
        bytes_of(shown, "GIF", save_all=True, append_images=[shown.rotate(90)], transparency=2),
    ]


def test_programs_run_without_this_package(model, folder, tmp_path, media):
    """The documented program as it stands, where importing this package fails."""
    given = {"image": image_files(), "video": video_files(media), "audio": sound_files()}
    for modality, files in given.items():
        for number, content in enumerate(files):
            (tmp_path / f"{modality}{number}").write_bytes(content)
    counts = {modality: len(files) for modality, files in given.items()}
    documented = re.findall(r"```python\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)[-1]
    code = (
        f"import sys\nfor name in {BLOCKED}: sys.modules[name] = None\n{documented}\n"
        f"texts, root, counts = {TEXTS!r}, Path({str(tmp_path)!r}), {counts!r}\n"
        "files = {name: [str(root / f'{name}{number}') for number in range(count)] for name, count in counts.items()}\n"
        "found = {'text': encode_texts(texts), 'one': encode_texts(texts[1:2])}\n"
        "found |= {name: encode_files(name, paths) for name, paths in files.items()}\n"
        "np.savez(root / 'found.npz', **{name: value.numpy() for name, value in found.items()})\n"
        "assert not any(name.startswith('xpmir_uform.') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    expected = {"text": model.encode(TEXTS), "one": model.encode(TEXTS[1:2])}
    for modality, files in given.items():
        expected[modality] = model.encode(
            [Item(Modality[modality.upper()], content, key) for key, content in enumerate(files)]
        )
    for name, embeddings in expected.items():
        np.testing.assert_allclose(found[name], embeddings.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


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
    assert (told["empty_text"], told["pixel_middle"], told["sample_gain"]) == (256, 127.5, 8.0)
    assert told["modalities"]["image"] == {"patch_side": 4, "max_side": 24, "channels": 3, "version": 3}
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
    with pytest.raises(ValueError, match="holds a, which is not of an export and would be lost: choose another folder"):
        export_programs(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_exported_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no pooled head, and nothing to export"):
        export_programs(build(pooled=None), tmp_path / "a")
    with pytest.raises(ValueError, match="this model has no video input"):
        exported(build(video=None), Modality.VIDEO)
