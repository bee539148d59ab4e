"""Attention within items against its formula, item by item."""

import pytest
import torch

from xpmir_uform.model.attention import attend


def plain(query, key, value, lengths):
    """softmax(q k^T / sqrt(D)) v of each item and head, spelled out."""
    result = torch.empty_like(value)
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        for head in range(query.shape[1]):
            scores = query[span, head] @ key[span, head].T / query.shape[-1] ** 0.5
            weights = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
            result[span, head] = weights @ value[span, head]
        start += length
    return result


def inputs(tokens: int, heads: int, width: int):
    draw = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, width, generator=draw, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("blocks", [((1, 1),), ((3, 1), (2, 4)), ((1, 2), (1, 3), (5, 7)), ((2, 65),)])
def test_equals_the_formula(blocks):
    lengths = [length for items, length in blocks for _ in range(items)]
    query, key, value = inputs(sum(lengths), heads=2, width=64)
    got = attend(query, key, value, blocks)
    torch.testing.assert_close(got, plain(query, key, value, lengths), rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula():
    blocks, lengths = ((2, 1), (2, 3)), [1, 1, 3, 3]
    parts = [part.requires_grad_() for part in inputs(8, heads=2, width=4)]
    weight = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours = torch.autograd.grad((attend(*parts, blocks) * weight).sum(), parts)
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    rows = torch.autograd.grad((plain(*leaves, lengths) * weight).sum(), leaves)
    for got, expected in zip(ours, rows, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *p: attend(*p, blocks), parts)


def test_strided_inputs_and_no_item():
    query, key, value = inputs(6, heads=4, width=8)
    blocks = ((2, 3),)
    strided = [torch.stack((part, part), dim=2)[:, :, 0] for part in (query, key, value)]
    torch.testing.assert_close(attend(*strided, blocks), attend(query, key, value, blocks))
    assert attend(query[:0], key[:0], value[:0], ()).shape == (0, 4, 8)
