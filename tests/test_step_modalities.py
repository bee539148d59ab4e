"""The exact step over four modalities: each microbatch lacks some, and the sum is that of a plain loop over items."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform import (
    AudioShape,
    Bag,
    Batch,
    ByteHead,
    ContrastiveLoss,
    ImageShape,
    Item,
    MaskedLoss,
    Modality,
    PatchHead,
    PooledHead,
    UFormEncoder,
    VideoShape,
)
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.losses.base import Answers, Encoded
from xpmir_uform.model.packing import pack
from xpmir_uform.trainer.loader import LoadedStep, sizes
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step

NAMES = ("text", "image", "video", "audio")
WEIGHTS = dict(zip(NAMES, (0.5, 2.0, 3.0, 0.25), strict=True))
HIDING = {"token_mask_probability": 0.5, "token_mean_span": 3.0, "video_mask_ratio": 0.5, "image_mask_ratio": 0.5}
SEED, STEP = 3, 4


def noise(number, *shape):
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def picture(number, side):
    file = io.BytesIO()
    Image.fromarray(noise(number, side, 16, 3)).save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), 100 + number)


@pytest.fixture(scope="module")
def items(media):
    """Pairs, of which no two hold the same modalities."""
    videos = [Item(Modality.VIDEO, media.video(noise(n, 3 + n, 8, 8, 3)), 200 + n) for n in range(2)]
    sounds = [Item(Modality.AUDIO, media.sound(noise(n, 600 + 300 * n, 1) / 256, 8000), 300 + n) for n in range(2)]
    return [
        (Item.text("a small red apple"), Item.text("")),
        (picture(0, 16), Item.text("an old tree by the lake")),
        (videos[0], sounds[0]),
        (picture(1, 8), videos[1]),
        (sounds[1], Item.text("x")),
    ]


@pytest.fixture(scope="module")
def model():
    made = UFormEncoder.C(
        depth=1,
        hidden=128,
        image=ImageShape.C(patch_side=4, max_side=16),
        video=VideoShape.C(patch_side=4, tube_frames=2, max_side=8, max_frames=4),
        audio=AudioShape.C(chunk_samples=200, sample_rate=8000, max_seconds=1.0),
        pooled=PooledHead.C(width=12),
        bytes=ByteHead.C(),
        patches=PatchHead.C(),
    ).instance()
    made.initialize()
    return made.double()


def load(model, items, losses):
    bags = [Bag.alike(pair) for pair in items]
    segments = [decode(item, model.shapes) for pair in items for item in pair]
    for loss in losses:
        segments = [
            loss.ask(segment, item, SEED, STEP)
            for segment, item in zip(segments, (item for pair in items for item in pair), strict=True)
        ]
    batch = Batch.of(bags)
    return LoadedStep(STEP, batch, [range(len(batch))], sizes(bags, segments, 0, losses), segments)


def in_parts(model, step, losses, size):
    model.zero_grad()
    numbers = [[n for bag in step.bags[at : at + size] for n in bag.items] for at in range(0, len(step.bags), size)]
    parts = [Microbatch(pack(step.collect(part)), torch.tensor(part), step.questions(part)) for part in numbers]
    engine = Engine(lambda part: Answers(*model(part.packed)[1:]), torch.Tensor.backward)
    values = exact_step(engine, Share(step.batch, step.shares, parts), losses)
    return values, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def item_by_item(model, step, contrast):
    """One forward pass for each item alone, means by hand, and one backward pass."""
    told, embeddings = {name: [] for name in NAMES}, []
    for segment in step.segments:
        outputs = model(pack([segment]))
        embeddings.append(outputs.embeddings)
        name = segment.modality.name.lower()
        for place, truth in () if segment.masked is None else zip(segment.masked, segment.truth, strict=True):
            if name == "text":
                told[name].append(-model.byte_decoder(outputs.states[place]).log_softmax(0)[truth])
            else:
                value = model.patch_decoders[name](outputs.states[place])
                told[name].append(((value - torch.from_numpy(truth)) ** 2).mean())
    masked = sum(WEIGHTS[name] * sum(parts) / len(parts) for name, parts in told.items() if parts)
    encoded, rows = Encoded(torch.cat(embeddings), outputs.inverse_temperature, outputs.bias), range(len(step.batch))
    paired = contrast.compute(encoded, step.batch, rows, contrast.counts(step.batch, rows)).value
    found = torch.autograd.grad(
        0.7 * masked + paired, list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    gradients = dict(zip((name for name, _ in model.named_parameters()), found, strict=True))
    return masked.item(), {name: len(parts) for name, parts in told.items()}, gradients


@pytest.mark.parametrize("hiding", [HIDING, {**HIDING, "audio_mask_ratio": 0.0}], ids=["four", "no sound is masked"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_masked_and_contrast_together_are_those_of_a_plain_loop(model, items, size, hiding):
    masked = MaskedLoss.C(weight=0.7, **hiding, **{f"{name}_weight": w for name, w in WEIGHTS.items()}).instance()
    contrast = ContrastiveLoss.C().instance()
    step = load(model, items, [masked, contrast])
    value, places, expected = item_by_item(model, step, contrast)
    values, found = in_parts(model, step, [masked, contrast], size)
    assert values["masked"].value.item() == pytest.approx(value, rel=1e-6)
    assert {name: values["masked"].stats[f"{name}_places"] for name in NAMES} == places
    assert (places["audio"] == 0) == ("audio_mask_ratio" in hiding)
    assert all(places[name] for name in ("text", "image", "video"))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    assert found["patch_decoders.audio.weight"].any() == bool(places["audio"])
