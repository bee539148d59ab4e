"""The encoder: one transformer over the bytes and patches of a packed microbatch.

Letters: T tokens, S answer slots, H hidden, A heads, D width of a head, K patches, P values of one patch.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from xpmir_uform.data.vocabulary import BYTE_VOCABULARY, Modality
from xpmir_uform.model.attention import attend
from xpmir_uform.model.packing import Packed
from xpmir_uform.model.rotary import HEAD_WIDTH, rotate, rotation

HIDDEN_MULTIPLE = 128
EPSILON = 1e-6


class Attention(nn.Module):
    """Multi-head attention within each item, with rotary positions."""

    def __init__(self, hidden: int):
        super().__init__()
        self.input = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self, x: Tensor, turn: Tensor, blocks: Sequence[tuple[int, int]], answers: Sequence[int] = ()
    ) -> Tensor:
        hidden = x.shape[-1]
        both, value = self.input(x).unflatten(-1, (-1, HEAD_WIDTH)).tensor_split([2 * hidden // HEAD_WIDTH], dim=1)
        query, key = rotate(both, turn).chunk(2, dim=1)  # (T, A, D)
        return self.output(attend(query, key, value, blocks, answers).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020), about 8/3 H wide."""

    def __init__(self, hidden: int):
        super().__init__()
        inner = 64 * round(hidden / 24)
        self.input = nn.Linear(hidden, 2 * inner, bias=False)
        self.output = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.input(x).chunk(2, dim=-1)
        return self.output(silu(gate) * value)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.attention = Attention(hidden)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.feed_forward = FeedForward(hidden)

    def forward(
        self, x: Tensor, turn: Tensor, blocks: Sequence[tuple[int, int]], answers: Sequence[int] = ()
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn, blocks, answers)
        return x + self.feed_forward(self.feed_forward_norm(x))


def check_size(depth: int, hidden: int) -> None:
    """Refuses sizes that cannot be built.

    Raises:
        ValueError: naming the one that is wrong.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}: expected at least 1 block")
    if hidden < 1 or hidden % HIDDEN_MULTIPLE:
        raise ValueError(f"hidden is {hidden}: expected a multiple of {HIDDEN_MULTIPLE}")


class Encoder(nn.Module):
    """Bytes and patches to final-norm states.

    Args:
        depth: number of blocks.
        hidden: H, a multiple of 128.
        patch_values: P of each modality other than text that the encoder reads.

    Raises:
        ValueError: ``depth`` or ``hidden`` is not one that can be built.
    """

    def __init__(self, depth: int, hidden: int, patch_values: Mapping[Modality, int] | None = None):
        super().__init__()
        check_size(depth, hidden)
        self.hidden = hidden
        self.bytes = nn.Embedding(BYTE_VOCABULARY, hidden)
        self.patches = nn.ModuleDict(
            {m.name.lower(): nn.Linear(p, hidden, bias=False) for m, p in sorted((patch_values or {}).items())}
        )
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)

    def forward(self, packed: Packed) -> Tensor:
        """The final-norm states of all tokens and answer slots.

        Returns:
            (T + S, H), each in item order.

        Raises:
            ValueError: a modality that this encoder does not read, or patches of another size.
        """
        x = self.embed(packed)
        wide = torch.promote_types(self.bytes.weight.dtype, torch.float32)
        turn = rotation(packed.positions, packed.modalities, wide)
        for block in self.blocks:
            x = block(x, turn, packed.blocks, packed.answers)
        x = self.norm(x)
        return x if packed.places is None else x.index_select(0, packed.places)

    def embed(self, packed: Packed) -> Tensor:
        """(T + S, H): the embeddings of tokens and answer slots in packed order.

        Every embedding takes part, also in a batch without its modality, so that the gradient of each parameter exists
        on every rank.
        """
        self._check(packed)
        parts = [self.bytes(packed.byte_ids)]
        for name, embedding in self.patches.items():
            weight = cast(nn.Linear, embedding).weight
            values = packed.patches.get(Modality[name.upper()], weight.new_zeros((0, weight.shape[1])))
            parts.append(embedding(values.to(weight.dtype)))
        x = torch.cat(parts) if len(parts) > 1 else parts[0]
        return x if packed.sources is None else x.index_select(0, packed.sources)

    def _check(self, packed: Packed) -> None:
        for modality, values in packed.patches.items():
            name = modality.name.lower()
            if name not in self.patches:
                raise ValueError(
                    f"this encoder has no {name} input: it reads text{''.join(', ' + m for m in self.patches)}"
                )
            expected = cast(nn.Linear, self.patches[name]).in_features
            if values.shape[1] != expected:
                raise ValueError(f"{name} patches have {values.shape[1]} values, this encoder expects {expected}")
