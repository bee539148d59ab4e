"""Initial weights are a function of seed, name and shape."""

import numpy as np
import pytest
import torch

from xpmir_uform.data.decoding.shapes import ImageShape
from xpmir_uform.model import PooledHead, UFormEncoder
from xpmir_uform.model.encoder import Encoder
from xpmir_uform.model.initialisation import initialise, truncated_normal


def build(**values) -> UFormEncoder:
    model = UFormEncoder.C(**{"depth": 2, "hidden": 128, **values}).instance()
    model.initialize()
    return model


def full(**values) -> UFormEncoder:
    return build(image=ImageShape.C(patch_side=4, max_side=16), pooled=PooledHead.C(width=32), **values)


def test_weights_do_not_depend_on_torchs_generator_nor_move_it():
    torch.manual_seed(1)
    first = full().state_dict()
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = full().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state), "initialising moved torch's generator"


def test_heads_and_inputs_do_not_change_other_weights():
    with_all, alone = full().state_dict(), build().state_dict()
    assert alone.keys() < with_all.keys()
    assert all(torch.equal(value, with_all[name]) for name, value in alone.items())


def test_depth_changes_the_residual_scale_alone():
    shallow, deep = build(depth=2).state_dict(), build(depth=8).state_dict()
    for name, value in shallow.items():
        factor = 0.5 if name.endswith(".output.weight") else 1.0
        torch.testing.assert_close(deep[name], value * factor, rtol=1e-6, atol=0)


def test_seeds_and_names_give_other_weights():
    assert not torch.equal(build(seed=0).encoder.bytes.weight, build(seed=1).encoder.bytes.weight)
    blocks = build().encoder.blocks
    assert not torch.equal(blocks[0].attention.input.weight, blocks[1].attention.input.weight)


def test_the_default_type_does_not_matter():
    single = full().state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        double = full().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(value.dtype == torch.float64 for value in double.values())
    for name, value in single.items():
        torch.testing.assert_close(double[name].float(), value, rtol=1e-6, atol=0)


def test_the_draw_is_a_truncated_normal():
    drawn = truncated_normal(0, "any", (300, 400)).numpy()
    assert abs(drawn.mean()) < 0.01
    assert drawn.std() == pytest.approx(1, abs=0.01)
    assert np.abs(drawn).max() < 2 / 0.8796
    # A truncated normal has less weight in the tails: its kurtosis is 2.37 against 3.
    assert (drawn**4).mean() == pytest.approx(2.37, abs=0.05)


def test_deviations_are_those_documented():
    state = full().state_dict()
    expected = {
        "encoder.bytes.weight": 0.3,
        "encoder.patches.image.weight": 48**-0.5,
        "encoder.blocks.0.attention.input.weight": 128**-0.5,
        "encoder.blocks.1.feed_forward.output.weight": 320**-0.5 / 2,
        "pooling.projection.weight": 128**-0.5,
    }
    assert {name: state[name].std().item() for name in expected} == pytest.approx(expected, rel=0.03)


def test_states_keep_the_scale_of_their_inputs():
    encoder = Encoder(6, 256)
    initialise(encoder, seed=0, depth=6)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 256, generator=draw)
    for block in encoder.blocks:
        with torch.no_grad():
            x = x + block.feed_forward(block.feed_forward_norm(x))
    assert 1.0 < x.std() < 2.0


def test_seeds_out_of_range_are_refused():
    with pytest.raises(ValueError, match="seed is -1"):
        build(seed=-1)
