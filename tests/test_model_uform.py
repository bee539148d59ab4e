"""UFormEncoder: forward, encode, and what it refuses."""

from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
import torch
from lightning import Fabric
from PIL import Image

from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.shapes import ImageShape
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.model import PooledHead, UFormEncoder, decays, pack
from xpmir_uform.model.inference.batches import batches, evaluating, most_tokens

SHAPE = ImageShape.C(patch_side=4, max_side=16)


def build(pooled=True, image=True, **values) -> UFormEncoder:
    head = PooledHead.C(width=48, groups=2) if pooled else None
    config = UFormEncoder.C(**{"depth": 1, "hidden": 128, **values}, pooled=head, image=SHAPE if image else None)
    model = config.instance()
    model.initialize()
    return model


def picture(key: int, width: int, height: int) -> Item:
    pixels = np.random.default_rng(key).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), key)


def items() -> list[Item]:
    texts = ["hello", "", "a somewhat longer name", "é", "hello"]
    made = [Item.text(text, key) for key, text in enumerate(texts)]
    return [made[0], picture(10, 16, 16), *made[1:3], picture(11, 3, 16), *made[3:]]


def packed(model, some):
    return pack([decode(item, model.shapes) for item in some])


def test_forward_answers_states_embeddings_temperature_and_bias():
    model = build()
    batch = packed(model, items())
    out = model(batch)
    assert out.states.shape == (batch.tokens, 128)
    assert out.embeddings.shape == (7, 48)
    assert out.inverse_temperature.shape == out.bias.shape == (2,)
    assert out.inverse_temperature.tolist() == pytest.approx([10.0, 10.0])
    assert torch.equal(out.bias, model.pooling.bias)


def test_every_parameter_has_a_gradient():
    model = build()
    out = model(packed(model, items()))
    (out.embeddings.pow(2).sum() + out.inverse_temperature.sum() + out.bias.sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_model_without_heads_answers_states_alone():
    model = build(pooled=False)
    out = model(packed(model, items()))
    assert out.states.isfinite().all()
    assert (out.embeddings, out.inverse_temperature, out.bias) == (None, None, None)
    model.clamp_temperature()
    with pytest.raises(ValueError, match="no pooled head"):
        model.encode(items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encode_equals_forward_item_by_item_in_any_batching(dtype):
    model = build().to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected = torch.cat([model(packed(model, [item])).embeddings for item in items()]).detach()
    for budget in (1, 7, 30, 16_384):
        got = model.encode(items(), batch_tokens=budget)
        assert got.dtype == dtype
        assert not got.requires_grad
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(model.encode(items()[::-1]).flip(0), expected, rtol=0, atol=tolerance)


def test_encode_runs_in_evaluation_mode_and_restores_each_mode():
    model = build()
    model.train()
    model.encoder.norm.eval()
    seen = []
    hook = model.encoder.register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    model.encode(items())
    hook.remove()
    assert seen == [(False, False)]
    assert model.training
    assert model.pooling.training
    assert not model.encoder.norm.training


def test_modes_are_restored_after_an_error():
    model = build().train()
    with pytest.raises(RuntimeError, match="stop"), evaluating(model):
        raise RuntimeError("stop")
    assert all(part.training for part in model.modules())


def test_nothing_encodes_to_nothing():
    assert build().encode([]).shape == (0, 48)


def test_equal_texts_have_equal_embeddings_and_others_not():
    got = build().encode(items())
    torch.testing.assert_close(got[0], got[-1])
    assert not torch.allclose(got[0], got[2])


def test_an_item_of_a_modality_without_input_is_refused_by_key_before_any_work():
    model = build(image=False)
    with pytest.raises(ValueError, match=r"item 0x0+b \(image, \d+ bytes\): this model has no image input.*ImageShape"):
        model.encode([Item.text("a", 1), picture(11, 4, 4)])
    with pytest.raises(ValueError, match="no video input"):
        model.encode([Item(Modality.VIDEO, b"", 3)])


def test_wrong_widths_are_refused():
    with pytest.raises(ValueError, match="hidden is 100: expected a multiple of 128"):
        build(hidden=100)


def test_batches_keep_the_budget_and_every_item():
    sizes = np.random.default_rng(0).integers(1, 50, 200)
    found = list(batches(sizes, 64))
    assert sorted(np.concatenate(found).tolist()) == list(range(200))
    assert all(sizes[batch].sum() <= 64 for batch in found)
    assert all(sizes[a].sum() + sizes[b[0]] > 64 for a, b in pairwise(found)), "batches are full"
    assert [batch.tolist() for batch in batches(np.array([3, 100, 1]), 4)] == [[2, 0], [1]]


def test_the_bound_of_tokens_holds():
    model = build()
    for item in [*items(), picture(1, 40, 7), picture(2, 1, 1)]:
        assert decode(item, model.shapes).tokens <= most_tokens(item, model.shapes)


def test_norms_temperatures_and_biases_do_not_decay():
    model = build()
    kept = {name for name, parameter in model.named_parameters() if not decays(name, parameter)}
    assert kept == {
        "encoder.blocks.0.attention_norm.weight",
        "encoder.blocks.0.feed_forward_norm.weight",
        "encoder.norm.weight",
        "pooling.log_inverse_temperature",
        "pooling.bias",
    }
    assert decays("_forward_module.encoder.bytes.weight", model.encoder.bytes.weight)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 0.0), ("64-true", 1e-5), ("bf16-mixed", 0.1)])
def test_forward_under_fabric(precision, tolerance):
    model = build()
    batch = packed(model, items())
    expected = model(batch).embeddings.detach()
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    wrapped = build().setup_with_fabric(fabric)
    out = wrapped(batch)
    torch.testing.assert_close(out.embeddings.float(), expected, rtol=0, atol=tolerance)
    assert out.inverse_temperature.dtype == torch.float32
    fabric.backward(out.embeddings.sum())
    assert wrapped.encoder.bytes.weight.grad.isfinite().all()
