"""Rotary positions: products depend on differences of positions alone."""

import numpy as np
import pytest
import torch

from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.model.rotary import HEAD_WIDTH, rotate, rotation

TURNED = {Modality.TEXT: [2], Modality.IMAGE: [1, 2], Modality.VIDEO: [0, 1, 2], Modality.AUDIO: [2]}
"""The axes that each modality uses."""


def products(modality: Modality, query_at, key_at) -> float:
    draw = np.random.default_rng(0)
    vectors = torch.from_numpy(draw.normal(size=(2, 1, HEAD_WIDTH)))
    positions = torch.tensor([query_at, key_at], dtype=torch.int32)
    turned = rotate(vectors, rotation(positions, torch.full((2,), int(modality)), torch.float64))
    return float((turned[0] * turned[1]).sum())


@pytest.mark.parametrize("modality", Modality)
def test_only_differences_matter(modality):
    near = products(modality, (1, 2, 3), (3, 1, 7))
    far = products(modality, (11, 32, 503), (13, 31, 507))
    assert near == pytest.approx(far, abs=1e-9)


@pytest.mark.parametrize("modality", Modality)
@pytest.mark.parametrize("axis", range(3))
def test_each_axis_of_a_modality_matters_and_no_other(modality, axis):
    moved = [0, 0, 0]
    moved[axis] = 1
    same = products(modality, (0, 0, 0), (0, 0, 0))
    assert (abs(products(modality, moved, (0, 0, 0)) - same) > 1e-3) == (axis in TURNED[modality])


def test_text_follows_the_published_formula():
    draw = np.random.default_rng(1)
    vector = draw.normal(size=HEAD_WIDTH)
    position = 17
    expected = np.empty(HEAD_WIDTH)
    for pair in range(HEAD_WIDTH // 2):
        angle = position * 10_000 ** (-2 * pair / HEAD_WIDTH)
        x, y = vector[2 * pair], vector[2 * pair + 1]
        expected[2 * pair] = x * np.cos(angle) - y * np.sin(angle)
        expected[2 * pair + 1] = x * np.sin(angle) + y * np.cos(angle)
    turn = rotation(torch.tensor([[0, 0, position]], dtype=torch.int32), torch.tensor([0]), torch.float64)
    got = rotate(torch.from_numpy(vector).view(1, 1, -1), turn)
    np.testing.assert_allclose(got.flatten().numpy(), expected, rtol=0, atol=1e-13)


def test_lengths_are_kept_and_types_too():
    vectors = torch.randn(5, 3, HEAD_WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    turn = rotation(torch.arange(15, dtype=torch.int32).view(5, 3), torch.full((5,), 2), torch.float32)
    turned = rotate(vectors, turn)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float().norm(dim=-1), vectors.float().norm(dim=-1), rtol=5e-3, atol=0)
