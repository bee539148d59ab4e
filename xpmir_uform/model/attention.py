"""Attention within each item of a packed microbatch.

Letters: T tokens, A heads, D width of a head, N items of one block, L their length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """Each token's attention to all tokens of its own item, without work on padding.

    One dense attention for each length that occurs. On a CPU this is faster than rounding lengths up and masking, and
    than chunks with block-diagonal masks, and each block is a view.

    Args:
        query, key, value: (T, A, D), in packed order.
        blocks: (N, L) of each run of items of one length; the products sum to T.

    Returns:
        (T, A, D): ``softmax(query key^T / sqrt(D)) value`` within each item.
    """
    sizes = [items * length for items, length in blocks]
    parts = zip(query.split(sizes), key.split(sizes), value.split(sizes), blocks, strict=True)
    results = [_attend_block(q, k, v, block) for q, k, v, block in parts]
    # Without items the sum has no rows, and keeps the graph whole.
    return torch.cat(results) if results else query + key + value


def _attend_block(query: Tensor, key: Tensor, value: Tensor, block: tuple[int, int]) -> Tensor:
    q, k, v = (part.unflatten(0, block).transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
