"""One model over texts, images, videos and sounds: real files in, embeddings out."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform import AudioShape, ImageShape, Item, Modality, PooledHead, UFormEncoder, VideoShape
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.model import pack

SHAPES = {
    "image": ImageShape.C(patch_side=4, max_side=8),
    "video": VideoShape.C(patch_side=4, tube_frames=2, max_side=8, max_frames=8),
    "audio": AudioShape.C(chunk_samples=400, sample_rate=16_000, max_seconds=2.0),
}


def encoder(**shapes):
    model = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=32), **shapes).instance()
    model.initialize()
    return model


@pytest.fixture(scope="module")
def items(media):
    frames = np.random.default_rng(0).integers(0, 256, (5, 8, 12, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(frames[0]).save(file, "PNG")
    tone = np.sin(np.arange(6_000) / 5)[:, None]
    return [
        Item.text("a text"),
        Item(Modality.IMAGE, file.getvalue(), 1),
        Item(Modality.VIDEO, media.video(frames), 2),
        Item(Modality.AUDIO, media.sound(tone), 3),
        Item(Modality.VIDEO, media.video(frames[::-1]), 4),
    ]


def test_each_item_is_embedded_as_it_is_alone(items):
    model = encoder(**SHAPES)
    together = model.encode(items)
    alone = torch.cat([model.encode([item]) for item in items])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert together.isfinite().all()
    assert torch.pdist(together).min() > 1e-3


def test_the_place_of_a_frame_counts(items):
    """The same tubes, played backwards, have other states: they differ by their positions alone."""
    model = encoder(**SHAPES)
    film = decode(items[2], model.shapes)
    layers = film.values.reshape(film.grid[0], -1, film.values.shape[1])
    backwards = replace(film, values=layers[::-1].reshape(film.values.shape))
    with torch.no_grad():
        states, others = (model(pack([segment])).states.unflatten(0, layers.shape[:2]) for segment in (film, backwards))
    assert (states - others.flip(0)).abs().max() > 1e-3


@pytest.mark.parametrize("name", SHAPES)
def test_a_modality_without_a_shape_is_refused(items, name):
    model = encoder(**{other: shape for other, shape in SHAPES.items() if other != name})
    with pytest.raises(ValueError, match=f"no {name} input; build it with {name}={name.title()}Shape"):
        model.encode(items)
