"""Attention within each item of a packed microbatch.

Letters: T tokens, S answer slots, A heads, D width of a head, N items of one block, L their length, n of them that
have an answer slot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[tuple[int, int]], answers: Sequence[int] = ()
) -> Tensor:
    """Each token's attention to all tokens of its own item, without work on padding.

    One dense attention for each length that occurs. On a CPU this is faster than rounding lengths up and masking, and
    than chunks with block-diagonal masks, and each block is a view. An answer slot attends to itself and to the tokens
    of its item, which do not attend to it.

    Args:
        query, key, value: (T + S, A, D): the tokens in packed order, then the answer slots in that of their items.
        blocks: (N, L) of each run of items of one length; the products sum to T.
        answers: of each block n, the number of its last items that have an answer slot; empty: none has.

    Returns:
        (T + S, A, D): ``softmax(query key^T / sqrt(D)) value`` within each item.
    """
    sizes = [items * length for items, length in blocks]
    tokens = sum(sizes)
    parts = zip(*(part[:tokens].split(sizes) for part in (query, key, value)), blocks, strict=True)
    results = [_attend_block(q, k, v, block) for q, k, v, block in parts]
    if answers:
        slots = [part[tokens:].split(list(answers)) for part in (query, key, value)]
        whole = [part[:tokens].split(sizes) for part in (key, value)]
        results += map(_attend_slots, *slots, *whole, blocks)
    # Without items the sum has no rows, and keeps the graph whole.
    return torch.cat(results) if results else query + key + value


def _attend_block(query: Tensor, key: Tensor, value: Tensor, block: tuple[int, int]) -> Tensor:
    q, k, v = (part.unflatten(0, block).transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def _attend_slots(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, block: tuple[int, int]
) -> Tensor:
    """(n, A, D): the attention of the answer slots of a block's last items.

    Args:
        query, key, value: (n, A, D), of the slots.
        keys, values: (N * L, A, D), of the tokens.
    """
    first = block[0] - len(query)
    k, v = (
        torch.cat([tokens.unflatten(0, block)[first:], own.unsqueeze(1)], dim=1).transpose(1, 2)
        for tokens, own in ((keys, key), (values, value))
    )
    return scaled_dot_product_attention(query.unsqueeze(2), k, v).squeeze(2)
