"""``encode`` as programs of ``torch.export``, which run without this package.

Attention over blocks of items of one length, as training does it, has a shape for each length that occurs; a program
has one. So the programs take padded batches, and mask what is padded.

Letters: N items, L tokens of the longest, H hidden, W embedding width, P values of a patch, A heads, F pairs of
coordinates of a head.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.functional import scaled_dot_product_attention

from xpmir_uform.base.atomic_files import check_replaceable, commit_folder
from xpmir_uform.data.decoding.audio import GAIN
from xpmir_uform.data.decoding.image import MIDDLE
from xpmir_uform.data.vocabulary import Modality, Slot
from xpmir_uform.model.encoder import Encoder
from xpmir_uform.model.head_modules import Pooling
from xpmir_uform.model.rotary import AXES, FREQUENCIES, HEAD_WIDTH

CONTRACT = "contract.json"
FORMAT = 2


def turned(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotary turn in real numbers, of (N, L, A, 2 F) by (N, L, 1, F)."""
    even, odd = vectors.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)


def attended(block: Any, x: Tensor, cosine: Tensor, sine: Tensor, shown: Tensor) -> Tensor:
    """(N, L, H): a ``Block`` of the encoder over padded items; ``shown`` (N, L) bool says what is no padding."""
    mixed = block.attention.input(block.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
    query, key, value = mixed.unbind(2)
    query, key = (turned(each, cosine, sine) for each in (query, key))
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    mean = scaled_dot_product_attention(query, key, value, attn_mask=shown[:, None, None])
    x = x + block.attention.output(mean.transpose(1, 2).flatten(2))
    return x + block.feed_forward(block.feed_forward_norm(x))


class PaddedEncoder(nn.Module):
    """Embeddings of one modality's items from padded batches.

    Args:
        encoder, pooling: of the model; they are copied.
        modality: of the items.
    """

    axes: Tensor
    frequencies: Tensor

    def __init__(self, encoder: Encoder, pooling: Pooling, modality: Modality) -> None:
        super().__init__()
        self.blocks = deepcopy(encoder.blocks)
        self.norm = deepcopy(encoder.norm)
        self.projection = deepcopy(pooling.projection)
        name = modality.name.lower()
        self.embedding = deepcopy(encoder.bytes if modality == Modality.TEXT else encoder.patches[name])
        self.dtype = encoder.bytes.weight.dtype
        wide = torch.promote_types(self.dtype, torch.float32)
        self.register_buffer("axes", torch.from_numpy(AXES[modality]))
        self.register_buffer("frequencies", torch.from_numpy(FREQUENCIES[modality]).to(wide))

    def embeddings(self, x: Tensor, grids: Tensor) -> Tensor:
        """(N, W), not normalised.

        Args:
            x: (N, L, H), embedded tokens.
            grids: (N, 3) int64, (frames, rows, columns) of each item's tokens, the last running fastest.
        """
        # Counted, since a range would bind the program to the device on which it was made.
        token = torch.ones_like(x[:, :, 0], dtype=torch.int64).cumsum(1) - 1
        rows, columns = grids[:, 1, None], grids[:, 2, None]
        places = torch.stack([token // (rows * columns), token // columns % rows, token % columns], dim=-1)
        angles = (places[:, :, self.axes] * self.frequencies).unsqueeze(2)
        shown = token < grids.prod(dim=1, keepdim=True)
        x = torch.where(shown.unsqueeze(-1), x, 0)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = attended(block, x, cosine, sine, shown)
        states = torch.where(shown.unsqueeze(-1), self.norm(x), 0).to(torch.float64)
        mean = states.sum(dim=1) / shown.sum(dim=1, keepdim=True)
        return self.projection(mean.to(x.dtype))


class PaddedTexts(PaddedEncoder):
    """Embeddings of texts."""

    def forward(self, byte_ids: Tensor, lengths: Tensor) -> Tensor:
        """(N, W), not normalised.

        Args:
            byte_ids: (N, L) int64: the UTF-8 bytes of each text, then anything from 0 to 256.
            lengths: (N,) int64, from 1 to L; an empty text is the one id 256.
        """
        ones = torch.ones_like(lengths)
        return self.embeddings(self.embedding(byte_ids), torch.stack([ones, ones, lengths], dim=1))


class PaddedPatches(PaddedEncoder):
    """Embeddings of images, videos or sounds."""

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """(N, W), not normalised.

        Args:
            patches: (N, L, P) float32: the standardised patches of each item, then any finite values.
            grids: (N, 3) int64, (frames, rows, columns) of patches, whose product is at most L.
        """
        return self.embeddings(self.embedding(patches.to(self.dtype)), grids)


def exported(model: Any, modality: Modality) -> ExportedProgram:
    """The program of one modality, for any number of items of any length, at least one of each.

    Args:
        model: a ``UFormEncoder``.

    Raises:
        ValueError: it has no pooled head, or does not read the modality.
    """
    model.initialize()
    if model.pooling is None:
        raise ValueError("this model has no pooled head, and nothing to export: build it with pooled=PooledHead(...)")
    batch, length = Dim("batch", min=1), Dim("length", min=1)
    if modality == Modality.TEXT:
        program: nn.Module = PaddedTexts(model.encoder, model.pooling, modality)
        example = (torch.full((2, 5), int(Slot.EMPTY)), torch.tensor([5, 3]))
        shapes = ({0: batch, 1: length}, {0: batch})
    else:
        if modality not in model.shapes:
            raise ValueError(f"this model has no {modality.name.lower()} input")
        program = PaddedPatches(model.encoder, model.pooling, modality)
        values = model.shapes[modality].patch_values
        example = (torch.zeros(2, 6, values), torch.tensor([[1, 2, 3], [1, 2, 2]]))
        shapes = ({0: batch, 1: length}, {0: batch})
    return torch.export.export(program.cpu().eval().requires_grad_(False), example, dynamic_shapes=shapes)


def contract(model: Any) -> dict[str, Any]:
    """The numbers between a decoded file and the inputs of a program: how values are scaled and cut into patches."""
    shapes = {
        modality.name.lower(): {name: getattr(shape, name) for name in type(shape).__getxpmtype__().arguments}
        for modality, shape in model.shapes.items()
    }
    return {
        "format": FORMAT,
        "width": len(model.pooling.projection.weight),
        "empty_text": int(Slot.EMPTY),
        "pixel_middle": float(MIDDLE),
        "sample_gain": float(GAIN),
        "modalities": {"text": {}, **shapes},
    }


def export_programs(model: Any, folder: str | Path) -> None:
    """Writes ``text.pt2``, one such file for each other modality that the model reads, and ``contract.json``.

    Args:
        model: a ``UFormEncoder`` with a pooled head, on any device.
        folder: is complete or absent; an older export there is replaced.

    Raises:
        ValueError: the model has no pooled head, or the folder holds what is not of an export.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder, [CONTRACT, *(f"{modality.name.lower()}.pt2" for modality in Modality)], "an export")
    programs = {modality: exported(model, modality) for modality in (Modality.TEXT, *model.shapes)}

    def write(part: Path) -> None:
        for modality, program in programs.items():
            torch.export.save(program, part / f"{modality.name.lower()}.pt2")
        (part / CONTRACT).write_text(json.dumps(contract(model), indent=1))

    commit_folder(folder, write)
