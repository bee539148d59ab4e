"""Masked reconstruction: values by hand, nothing masked, everything masked, and what may not change a mask."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ByteHead,
    ContrastiveLoss,
    ImageShape,
    Item,
    MaskedLoss,
    Modality,
    PatchHead,
    PooledHead,
    UFormEncoder,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.targets import Questions
from xpmir_uform.data.vocabulary import Slot
from xpmir_uform.losses.base import Answers
from xpmir_uform.losses.masked import byte_loss, patch_loss
from xpmir_uform.model import pack
from xpmir_uform.trainer.loader import StepDataset, iterate_steps

SHAPES = {Modality.IMAGE: ImageShape.C(patch_side=4, max_side=16).instance()}
NOTHING = {"token_mask_probability": 0.0, "image_mask_ratio": 0.0}
EVERYTHING = {"token_mask_probability": 1.0, "image_mask_ratio": 1.0}


def picture(number, side=16):
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), 1000 + number)


def model_of(**heads):
    heads = {"bytes": ByteHead.C(), "patches": PatchHead.C(), **heads}
    made = UFormEncoder.C(depth=1, hidden=128, image=ImageShape.C(patch_side=4, max_side=16), **heads).instance()
    made.initialize()
    return made.double()


@pytest.fixture(scope="module")
def model():
    return model_of()


ITEMS = [Item.text("a small red apple on a table"), picture(1), Item.text(""), Item.text("x"), picture(2, side=4)]


def ask(loss, items=ITEMS, step=0):
    return [loss.ask(decode(item, SHAPES), item, 3, step) for item in items]


def answer(model, segments):
    return Answers(*model(pack(segments))[1:]), Questions.of(segments, [])


def value_of(model, loss, segments):
    answers, questions = answer(model, segments)
    return loss.compute(answers, questions, loss.counts(questions))


def test_a_hidden_value_that_is_no_number_does_not_leak():
    """Selected before the operation: behind a product or a late selection the gradient is NaN."""
    v = torch.tensor([[2.0], [math.nan]], requires_grad=True)
    loss = patch_loss(v[torch.tensor([0])], torch.zeros(1, 1))
    loss.backward()
    assert loss.item() == 4.0
    assert v.grad.flatten().tolist() == [4.0, 0.0]


def test_the_mean_is_over_masked_places_alone():
    """Squared errors 1, 4, 9, of which the last two are masked: 6.5; without a masked place 0."""
    loss = MaskedLoss.C().instance()
    states = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    bytes_ = torch.zeros(0, 256)
    for places, expected, gradient in (([1, 2], 6.5, [0.0, 2.0, 3.0]), ([], 0.0, [0.0, 0.0, 0.0])):
        answers = Answers(bytes=bytes_, patches={Modality.IMAGE: states[places]})
        questions = replace(Questions.of([], []), patches={Modality.IMAGE: torch.zeros(len(places), 1)})
        value = loss.compute(answers, questions, loss.counts(questions)).value
        assert value.item() == expected
        (found,) = torch.autograd.grad(value, states)
        assert found.flatten().tolist() == gradient


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_modality_of_weight_0_may_be_told_anything(value):
    """Its answers get gradients of 0, not none: as the others they take part on every rank."""
    loss = MaskedLoss.C(image_weight=0.0, text_weight=0.0).instance()
    told = {modality: torch.full((2, 3), value, requires_grad=True) for modality in (Modality.IMAGE, Modality.AUDIO)}
    told[Modality.AUDIO] = torch.ones(2, 3, requires_grad=True)
    logits = torch.full((1, 256), value, requires_grad=True)
    questions = replace(
        Questions.of([], []), patches={modality: torch.zeros(2, 3) for modality in told}, bytes=torch.tensor([65])
    )
    found = loss.compute(Answers(bytes=logits, patches=told), questions, loss.counts(questions))
    assert found.value.item() == 1.0
    found.value.backward()
    assert all(not silent.grad.any() for silent in (logits, told[Modality.IMAGE]))
    torch.testing.assert_close(told[Modality.AUDIO].grad, torch.full((2, 3), 1 / 3))


def test_a_byte_by_hand():
    """Logits that are all alike: ln 256; a byte that is e times as likely as every other: ln(255 + e) - 1."""
    logits = torch.zeros(2, 256)
    logits[1, 65] = 1.0
    expected = math.log(256) + math.log(255 + math.e) - 1
    assert byte_loss(logits, torch.tensor([7, 65])).item() == pytest.approx(expected, rel=1e-6)


def test_gradients_are_those_of_finite_differences():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 256, generator=draw, dtype=torch.float64, requires_grad=True)
    told = torch.randn(3, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    truth = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda rows: byte_loss(rows, torch.tensor([1, 2, 255])), (logits,))
    assert torch.autograd.gradcheck(lambda rows: patch_loss(rows, truth), (told,))
    exact = truth.clone().requires_grad_()
    assert not torch.autograd.grad(patch_loss(exact, truth), exact)[0].any()


def test_half_precision_is_widened():
    told = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert patch_loss(told, torch.zeros(1, 4)).item() == pytest.approx(90_000)


def test_the_loss_is_that_of_the_masked_places(model):
    """The whole against its parts, one after another, told from the states that the model gives."""
    loss = MaskedLoss.C(token_mask_probability=0.4, token_mean_span=3.0, text_weight=0.5, image_weight=2.0).instance()
    segments = ask(loss)
    states = model(pack(segments)).states
    starts = np.cumsum([0, *(segment.tokens for segment in segments)])
    texts, images = [], []
    for start, segment in zip(starts, segments, strict=False):
        for place, truth in () if segment.masked is None else zip(segment.masked, segment.truth, strict=True):
            state = states[start + place]
            if segment.modality is Modality.TEXT:
                texts.append(-model.byte_decoder(state).log_softmax(0)[truth])
            else:
                told = model.patch_decoders["image"](state)
                images.append((told - torch.from_numpy(truth)).square().mean())
    found = value_of(model, loss, segments)
    means = [torch.stack(part).mean().item() for part in (texts, images)]
    assert found.value.item() == pytest.approx(0.5 * means[0] + 2 * means[1], rel=1e-12)
    assert found.stats["text_loss"] == pytest.approx(means[0], rel=1e-12)
    assert found.stats["image_loss"] == pytest.approx(means[1], rel=1e-12)
    assert (found.stats["text_places"], found.stats["image_places"]) == (len(texts), len(images))
    assert found.stats["video_loss"] == found.stats["audio_places"] == 0


def test_a_ratio_of_zero_masks_nothing_and_is_not_the_default(model):
    segments = ask(MaskedLoss.C(**NOTHING).instance())
    for segment, item in zip(segments, ITEMS, strict=True):
        assert np.array_equal(segment.values, decode(item, SHAPES).values)
        assert segment.masked is None or not len(segment.masked)
    found = value_of(model, MaskedLoss.C(**NOTHING).instance(), segments)
    assert found.value.item() == 0
    assert sum(found.stats.values()) == 0
    gradients = torch.autograd.grad(found.value, list(model.parameters()), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    default = ask(MaskedLoss.C().instance(), [picture(number) for number in range(20)])
    assert sum(len(segment.masked) for segment in default) == 20 * 12


def test_everything_masked_is_finite(model):
    loss = MaskedLoss.C(replace_fraction=1.0, random_fraction=0.0, **EVERYTHING).instance()
    segments = ask(loss)
    assert set(segments[0].values.tolist()) == {Slot.MASK}
    found = value_of(model, loss, segments)
    assert found.stats["text_places"] == len("a small red apple on a table") + 1
    assert found.stats["image_places"] == 16 + 1
    assert found.value.isfinite()
    gradients = torch.autograd.grad(found.value, list(model.parameters()), allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("item", [Item.text("x"), picture(5, side=4)], ids=["text", "picture"])
def test_one_token_masked_or_not_is_finite(model, item):
    loss = MaskedLoss.C(token_mask_probability=0.5, image_mask_ratio=0.5).instance()
    counts = set()
    for step in range(20):
        (segment,) = ask(loss, [item], step)
        found = value_of(model, loss, [segment])
        counts.add(len(segment.masked))
        assert found.value.isfinite()
        assert (found.value.item() == 0) == (len(segment.masked) == 0)
    assert counts == {0, 1}


def test_a_modality_without_masked_places_adds_nothing(model):
    both = ask(MaskedLoss.C(image_mask_ratio=0.0, token_mask_probability=0.5).instance())
    texts = [segment for segment in both if segment.modality is Modality.TEXT]
    loss = MaskedLoss.C().instance()
    assert value_of(model, loss, both).value.item() == pytest.approx(value_of(model, loss, texts).value.item())
    assert value_of(model, loss, both).value.item() > 0


def test_a_model_of_texts_alone_is_trained():
    made = UFormEncoder.C(depth=1, hidden=128, bytes=ByteHead.C(), patches=PatchHead.C()).instance()
    made.initialize()
    loss = MaskedLoss.C(token_mask_probability=0.5).instance()
    optimizer = torch.optim.AdamW(made.parameters(), lr=2e-3)
    values = []
    for step in range(60):
        found = value_of(made, loss, ask(loss, [Item.text("ab" * 30), Item.text("cd" * 30)], step))
        values.append(found.value.item())
        optimizer.zero_grad()
        found.value.backward()
        optimizer.step()
    assert values[0] > 4
    assert np.mean(values[-10:]) < 1.2


class Mixed(BagSource):
    """Texts and pictures."""

    __xpmid__ = "test.mixed"

    def __len__(self):
        return 6

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(f"text number {index} of six, and of this length"), picture(index)])


class Shuffled(Mixed):
    """The same items, each in a bag of its own, with other neighbours."""

    __xpmid__ = "test.shuffled"

    def __len__(self):
        return 12

    def bag(self, index, seed, epoch):
        item = super().bag(index // 2, seed, epoch).items[index % 2]
        return Bag((item,))


def masks(source, batch_size, workers=0, rank=0, ranks=1, number=4):
    """What each item looks like at one step, by its key."""
    sampler = BagSampler.C(source=source.C()).instance()
    sampler.initialize(np.random.RandomState(0))
    losses = [ContrastiveLoss.C().instance(), MaskedLoss.C(token_mean_span=3.0).instance()]
    dataset = StepDataset(sampler, batch_size, SHAPES, losses, rank=rank, ranks=ranks)
    step = next(iterate_steps(dataset, number, workers))
    keys = [step.batch.item(place).key for place in step.shares[rank]]
    return {
        key: (segment.values.tolist(), segment.masked.tolist(), segment.truth.tolist())
        for key, segment in zip(keys, step.segments, strict=True)
    }


def test_masks_do_not_depend_on_neighbours_order_workers_or_ranks():
    whole = masks(Mixed, 6)
    assert len(whole) == 12
    assert masks(Shuffled, 12) == whole
    assert masks(Mixed, 6, workers=2) == whole
    assert {key: mask for rank in range(3) for key, mask in masks(Mixed, 6, rank=rank, ranks=3).items()} == whole
    assert masks(Mixed, 6, number=5) != whole


def test_the_joint_objective_serves_both_losses_from_one_corrupted_input():
    made = model_of(pooled=PooledHead.C(width=8))
    loss = MaskedLoss.C(token_mask_probability=0.5).instance()
    masked = made(pack(ask(loss)))
    plain = made(pack([decode(item, SHAPES) for item in ITEMS]))
    assert masked.embeddings.shape == plain.embeddings.shape
    assert not torch.allclose(masked.embeddings[0], plain.embeddings[0])
    torch.testing.assert_close(masked.embeddings[2], plain.embeddings[2])
    assert masked.bytes.shape[0] > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"token_mask_probability": 1.5}, r"token_mask_probability is 1.5, expected 0 \(nothing\) to 1 \(everything\)"),
        ({"image_mask_ratio": -0.1}, "image_mask_ratio is -0.1"),
        ({"video_mask_ratio": math.nan}, "video_mask_ratio is nan"),
        ({"audio_mask_ratio": 75.0}, "audio_mask_ratio is 75"),
        ({"replace_fraction": 0.95}, "replace_fraction is 0.95 and random_fraction 0.1, expected at least 0 and at"),
        ({"random_fraction": -0.1}, "random_fraction -0.1"),
        ({"token_mean_span": 0.5}, "token_mean_span is 0.5, expected 1 to 10000 bytes"),
        ({"text_weight": -1.0}, "text_weight is -1"),
        ({"image_weight": math.inf}, "image_weight is inf"),
    ],
)
def test_impossible_settings_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        validate(MaskedLoss.C(**params))


@pytest.mark.parametrize("params", [{}, NOTHING, EVERYTHING, {"replace_fraction": 0.0, "random_fraction": 0.0}])
def test_the_limits_are_legal(params):
    validate(MaskedLoss.C(**params))
