"""What heads read of the states: answer slots, masked places, kept tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from xpmir_uform import AudioShape, ByteHead, ImageShape, PatchHead, PooledHead, TokenHead, UFormEncoder
from xpmir_uform.base.configuration import validate
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.targets import Questions
from xpmir_uform.data.vocabulary import Modality, Slot
from xpmir_uform.model import pack
from xpmir_uform.model.head_modules import unit
from xpmir_uform.model.rotary import rotate, rotation


@pytest.fixture(scope="module")
def model():
    made = UFormEncoder.C(
        depth=2, hidden=128, image=ImageShape.C(patch_side=2, max_side=8), audio=AudioShape.C(
            chunk_samples=5, sample_rate=10, max_seconds=4.0
        ), pooled=PooledHead.C(width=12), tokens=TokenHead.C(width=16), bytes=ByteHead.C(), patches=PatchHead.C(),
    ).instance()  # fmt: skip
    made.initialize()
    return made.double()


def segments():
    draw = np.random.default_rng(2)
    texts = [Segment(Modality.TEXT, draw.integers(0, 256, n).astype(np.int16), (1, 1, n)) for n in (4, 2, 4, 7, 4, 1)]
    image = Segment(Modality.IMAGE, draw.normal(size=(4, 12)).astype(np.float32), (1, 2, 2))
    sound = Segment(Modality.AUDIO, draw.normal(size=(3, 5)).astype(np.float32), (1, 1, 3))
    return [texts[0], image, *texts[1:4], sound, *texts[4:]]


def asked(*numbers):
    return [replace(segment, answers=number in numbers) for number, segment in enumerate(segments())]


def slot_alone(model, segment):
    """The state of the answer slot by plain attention over one item, with a mask that hides it from the tokens."""
    encoder, length = model.encoder, segment.tokens
    tokens = encoder.embed(pack([segment]))
    x = torch.cat([tokens, encoder.bytes.weight[Slot.ANSWER][None]])
    coordinates = torch.tensor([*np.ndindex(*segment.grid), (0, 0, length)], dtype=torch.int32)
    turn = rotation(coordinates, torch.tensor([segment.modality] * length + [Modality.TEXT]), torch.float64)
    seen = torch.ones(length + 1, length + 1, dtype=torch.bool)
    seen[:length, length] = False
    for block in encoder.blocks:
        mixed = block.attention.input(block.attention_norm(x)).unflatten(-1, (3, -1, 64))
        query, key, value = (
            part.transpose(0, 1) for part in (*(rotate(mixed[:, i], turn) for i in (0, 1)), mixed[:, 2])
        )
        mean = scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1).flatten(1)
        x = x + block.attention.output(mean)
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return encoder.norm(x)[length]


def test_an_answer_slot_sees_the_tokens_of_its_item(model):
    numbers = 0, 1, 3, 4, 5, 7
    logits = model(pack(asked(*numbers))).choices
    expected = torch.stack([model.byte_decoder(slot_alone(model, segments()[number])) for number in numbers])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


def test_offering_choices_changes_no_embedding_and_no_token(model):
    plain, offering = model(pack(segments())), model(pack(asked(0, 2, 5, 6)))
    torch.testing.assert_close(offering.embeddings, plain.embeddings, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(offering.states, plain.states, rtol=1e-12, atol=1e-14)
    assert plain.choices.shape == (0, 256)


def test_the_order_of_items_moves_the_answers_with_them(model):
    given = asked(0, 1, 3, 4, 5, 7)
    order = [5, 0, 6, 1, 7, 3, 2, 4]
    answering = [number for number in range(8) if given[number].answers]
    found = model(pack([given[number] for number in order])).choices
    expected = model(pack(given)).choices[[answering.index(number) for number in order if given[number].answers]]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_masked_patches_enter_as_the_mask_embedding(model):
    image = segments()[1]
    masked = replace(image, masked=np.array([1, 3]), truth=image.values[[1, 3]])
    packed = pack([segments()[0], masked])
    embedded = model.encoder.embed(packed)
    assert packed.patches[Modality.IMAGE].shape == (2, 12)
    assert torch.equal(embedded[[5, 7]], model.encoder.bytes.weight[[Slot.MASK] * 2])
    torch.testing.assert_close(embedded[[4, 6]], model.encoder.embed(pack([image]))[[0, 2]], rtol=1e-12, atol=1e-14)
    poisoned = replace(masked, values=np.where(np.isin(np.arange(4), [1, 3])[:, None], np.nan, image.values))
    assert torch.equal(model(pack([segments()[0], poisoned])).states, model(packed).states)


def test_every_patch_may_be_masked(model):
    sound = segments()[5]
    outputs = model(pack([replace(sound, masked=np.arange(3), truth=sound.values)]))
    assert outputs.patches[Modality.AUDIO].shape == (3, 5)
    assert outputs.states.isfinite().all()


def test_heads_read_the_states_that_are_asked_for(model):
    given = segments()
    given[3] = replace(given[3], masked=np.array([0, 2]), truth=np.array([65, 66]), kept=3)
    given[1] = replace(given[1], masked=np.array([2]), truth=given[1].values[[2]])
    given[4] = replace(given[4], kept=7)
    outputs = model(pack(given))
    starts = np.cumsum([0, *(segment.tokens for segment in given)])
    states = outputs.states
    torch.testing.assert_close(outputs.bytes, model.byte_decoder(states[[starts[3], starts[3] + 2]]))
    torch.testing.assert_close(outputs.patches[Modality.IMAGE], model.patch_decoders["image"](states[[starts[1] + 2]]))
    assert outputs.patches[Modality.AUDIO].shape == (0, 5)
    kept = [*range(starts[3], starts[3] + 3), *range(starts[4], starts[4] + 7)]
    torch.testing.assert_close(outputs.tokens, unit(model.token_projection.projection(states[kept])))
    torch.testing.assert_close(outputs.tokens.norm(dim=1), torch.ones(10, dtype=torch.float64))


def test_questions_are_put_in_the_order_of_the_answers():
    offering = Item.text("ab", choices=b"yn", targets=(0.25, 0.75))
    given = [
        Segment(Modality.TEXT, np.array([1, 2], np.int16), (1, 1, 2), answers=True),
        Segment(Modality.IMAGE, np.zeros((2, 3), np.float32), (1, 1, 2), np.array([1]), np.full((1, 3), 5, np.float32)),
        Segment(Modality.TEXT, np.array([1, Slot.MASK], np.int16), (1, 1, 2), np.array([1]), np.array([100])),
    ]
    questions = Questions.of(given, [offering])
    assert questions.bytes.tolist() == [100]
    assert questions.patches[Modality.IMAGE].tolist() == [[5, 5, 5]]
    assert (questions.choices.tolist(), questions.choice_offsets.tolist()) == ([121, 110], [0, 2])
    assert questions.targets.tolist() == [0.25, 0.75]


def test_a_zero_row_has_no_direction_and_no_gradient():
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    out = unit(rows)
    assert out.tolist() == [[0.0, 0.0], [pytest.approx(0.6), pytest.approx(0.8)]]
    out.sum().backward()
    assert rows.grad[0].tolist() == [0.0, 0.0]
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-20, 1e18, 1e20, 3e37])
def test_a_row_of_any_norm_has_a_direction(scale):
    rows = (torch.tensor([[3.0, -4.0], [0.0, 0.0]]) * scale).requires_grad_()
    out = unit(rows)
    assert out.tolist() == [[pytest.approx(0.6), pytest.approx(-0.8)], [0.0, 0.0]]
    out[:, 0].sum().backward()
    # d(x / |x|) / dx = y^2 / |x|^3
    assert rows.grad[0, 0] * scale == pytest.approx(16 / 125)
    assert rows.grad[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_not_hidden(bad):
    assert unit(torch.tensor([[bad, 1.0]])).isnan().any()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_scaling_changes_no_bit_of_an_ordinary_row(scale):
    rows = torch.randn(500, 48, generator=torch.Generator().manual_seed(5)) * scale
    plain, scaled = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    expected = plain * plain.square().sum(dim=1, keepdim=True).rsqrt()
    found = unit(scaled)
    assert torch.equal(found, expected)
    for each in (found, expected):
        each.square().mul(torch.arange(48)).sum().backward()
    assert torch.equal(plain.grad, scaled.grad)


def test_the_gradient_of_a_unit_row_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(unit, torch.randn(4, 3, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("width", [0, 12, -8])
def test_a_token_head_of_no_legal_width_is_refused(width):
    with pytest.raises(ValueError, match=f"width of the token head is {width}: expected a multiple of 8"):
        validate(TokenHead.C(width=width))
