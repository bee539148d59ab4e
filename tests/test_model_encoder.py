"""The encoder against a plain NumPy transformer that reads one item at a time, and its invariances."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.vocabulary import BYTE_VOCABULARY, Modality, Slot
from xpmir_uform.model.encoder import Encoder
from xpmir_uform.model.head_modules import mean_of_items
from xpmir_uform.model.initialisation import initialise
from xpmir_uform.model.packing import pack

PATCH = 12
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def build(depth=2, hidden=128, dtype=torch.float32) -> Encoder:
    encoder = Encoder(depth, hidden, {Modality.IMAGE: PATCH, Modality.VIDEO: 2 * PATCH})
    initialise(encoder, seed=5, depth=depth)
    with torch.no_grad():
        for index, norm in enumerate(p for p in encoder.parameters() if p.ndim == 1):
            norm.copy_(torch.linspace(0.5, 1.5 + 0.1 * index, len(norm)))
    return encoder.to(dtype)


def segments() -> list[Segment]:
    draw = np.random.default_rng(3)
    texts = [draw.integers(0, 256, size) for size in (5, 1, 12, 5, 2)] + [np.array([Slot.EMPTY])]
    made = [Segment(Modality.TEXT, text.astype(np.int16), (1, 1, len(text))) for text in texts]
    for modality, grid, values in [
        (Modality.IMAGE, (1, 2, 3), PATCH),
        (Modality.IMAGE, (1, 1, 1), PATCH),
        (Modality.VIDEO, (2, 1, 3), 2 * PATCH),
        (Modality.IMAGE, (1, 4, 3), PATCH),
    ]:
        patches = draw.normal(size=(int(np.prod(grid)), values)).astype(np.float32)
        made.insert(2, Segment(modality, patches, grid))
    return made


def norm(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def turned(x, segment):
    """Rotate the pairs of (T, 64), one token and one pair at a time."""
    shares = {Modality.TEXT: (0, 0, 32), Modality.IMAGE: (0, 16, 16), Modality.VIDEO: (8, 12, 12)}[segment.modality]
    base = 10_000.0 if segment.modality == Modality.TEXT else 100.0
    result = np.empty_like(x)
    for token, coordinates in enumerate(np.ndindex(*segment.grid)):
        angles = [c * base ** (-k / n) for c, n in zip(coordinates, shares, strict=True) for k in range(n)]
        pairs = (x[token, 0::2] + 1j * x[token, 1::2]) * np.exp(1j * np.array(angles))
        result[token, 0::2], result[token, 1::2] = pairs.real, pairs.imag
    return result


def plain(encoder: Encoder, segment: Segment) -> np.ndarray:
    """(T, H) float64: the states of one item."""
    w = {name: value.double().numpy() for name, value in encoder.state_dict().items()}
    if segment.modality == Modality.TEXT:
        x = w["bytes.weight"][segment.values]
    else:
        x = segment.values.astype(np.float64) @ w[f"patches.{segment.modality.name.lower()}.weight"].T
    hidden = x.shape[1]
    for index in range(len(encoder.blocks)):
        at = f"blocks.{index}."
        mixed = norm(x, w[at + "attention_norm.weight"]) @ w[at + "attention.input.weight"].T
        heads = []
        for start in range(0, hidden, 64):
            query, key, value = (mixed[:, part * hidden + start :][:, :64] for part in range(3))
            scores = np.exp(turned(query, segment) @ turned(key, segment).T / 8)
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ value)
        x = x + np.concatenate(heads, axis=1) @ w[at + "attention.output.weight"].T
        gate, value = np.split(
            norm(x, w[at + "feed_forward_norm.weight"]) @ w[at + "feed_forward.input.weight"].T, 2, 1
        )
        x = x + gate / (1 + np.exp(-gate)) * value @ w[at + "feed_forward.output.weight"].T
    return norm(x, w["norm.weight"])


@pytest.mark.parametrize(("depth", "hidden"), [(1, 128), (2, 128), (3, 256)])
def test_equals_a_plain_transformer(depth, hidden):
    encoder = build(depth, hidden, torch.float64)
    items = segments()
    expected = np.concatenate([plain(encoder, item) for item in items])
    got = encoder(pack(items))
    assert got.dtype == torch.float64
    assert got.shape == (sum(item.tokens for item in items), hidden)
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_item_does_not_depend_on_its_neighbours(dtype):
    encoder, items = build(dtype=dtype), segments()

    def means(some):
        packed = pack(some)
        return mean_of_items(encoder(packed), packed.lengths).detach()

    together = means(items)
    alone = torch.cat([means([item]) for item in items])
    order = np.random.default_rng(1).permutation(len(items))
    shuffled = torch.empty_like(together)
    shuffled[torch.from_numpy(order)] = means([items[index] for index in order])
    for other in (alone, shuffled):
        torch.testing.assert_close(other, together, rtol=0, atol=TOLERANCE[dtype])


def test_neighbours_do_not_matter_even_when_they_are_not_finite():
    encoder, items = build(), segments()
    alone = encoder(pack(items[:2]))
    poison = Segment(Modality.IMAGE, np.full((5, PATCH), np.nan, np.float32), (1, 1, 5))
    beside = encoder(pack([*items[:2], poison]))[: len(alone)]
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)


def test_gradients_do_not_depend_on_the_split_into_microbatches():
    encoder, items = build(dtype=torch.float64), segments()

    def gradients(parts):
        encoder.zero_grad()
        for part in parts:
            packed = pack(part)
            mean_of_items(encoder(packed), packed.lengths).pow(3).sum().backward()
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    whole = gradients([items])
    split = gradients([items[:4], items[4:5], items[5:]])
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kept", [Modality.TEXT, Modality.IMAGE])
def test_every_parameter_has_a_gradient_also_without_its_modality(kept):
    encoder = build()
    encoder(pack([item for item in segments() if item.modality == kept])).sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert bool(gradients["bytes.weight"].any()) == (kept == Modality.TEXT)
    assert bool(gradients["patches.image.weight"].any()) == (kept == Modality.IMAGE)


def test_every_parameter_is_used():
    encoder = build()
    encoder(pack(segments())).pow(3).sum().backward()
    assert all(parameter.grad.any() for parameter in encoder.parameters())


def test_an_empty_microbatch_gives_no_state_and_zero_gradients():
    encoder = build()
    states = encoder(pack([]))
    assert states.shape == (0, 128)
    states.sum().backward()
    assert all(not parameter.grad.any() for parameter in encoder.parameters())


def test_bytes_and_slots_all_have_an_embedding():
    values = np.arange(BYTE_VOCABULARY, dtype=np.int16)
    assert build()(pack([Segment(Modality.TEXT, values, (1, 1, len(values)))])).isfinite().all()


@pytest.mark.parametrize("hidden", [0, 64, 127, 192, -128])
def test_a_width_that_is_no_multiple_of_128_is_refused(hidden):
    with pytest.raises(ValueError, match=f"hidden is {hidden}: expected a multiple of 128"):
        Encoder(1, hidden)


def test_no_depth_is_refused():
    with pytest.raises(ValueError, match="depth is 0"):
        Encoder(0, 128)


def test_inputs_of_another_encoder_are_refused():
    picture = Segment(Modality.IMAGE, np.zeros((4, 7), np.float32), (1, 2, 2))
    with pytest.raises(ValueError, match=r"no image input: it reads text$"):
        Encoder(1, 128)(pack([picture]))
    with pytest.raises(ValueError, match="image patches have 7 values, this encoder expects 12"):
        build()(pack([picture]))


def test_bfloat16_autocast_stays_close():
    encoder, packed = build(), pack(segments())
    exact = encoder(packed)
    with torch.autocast("cpu", torch.bfloat16):
        rough = encoder(packed)
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=0.1)


def test_the_plain_modules_need_no_framework():
    script = (
        "import sys\n"
        "from xpmir_uform.model import attention, encoder, head_modules, initialisation, packing, rotary\n"
        "loaded = {'experimaestro', 'xpm_torch', 'lightning'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
