"""Packing: the segments of a microbatch as flat tensors, without padding.

Letters: N items, T tokens of all items, B bytes, K patches of one modality, P values of one patch.

Tokens have two orders. In *item order* the items follow one another as given. In *packed order* they are sorted by
length, stably, so that the items of one length are one dense (items, length) block: attention then needs neither masks
nor copies.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xpmir_uform.data.segments import Segment
from xpmir_uform.data.vocabulary import Modality


class Packed(NamedTuple):
    """A microbatch, ready for an encoder.

    Args:
        lengths: (N,) int64, tokens of each item, in item order.
        blocks: (items, length) of each block of items of one length, in packed order.
        byte_ids: (B,) int64, rows of the byte embedding.
        patches: (K, P) float32 of each modality that is present, other than text.
        sources: (T,) int64, for each token in packed order its row in the concatenation of the bytes and the patches
            by ascending modality; None when they are in packed order already.
        positions: (T, 3) int32, coordinates (frame, row, column) in packed order.
        modalities: (T,) int64, in packed order.
        places: (T,) int64, for each token in item order its place in packed order; None when the orders agree.
    """

    lengths: Tensor
    blocks: tuple[tuple[int, int], ...]
    byte_ids: Tensor
    patches: Mapping[Modality, Tensor]
    sources: Tensor | None
    positions: Tensor
    modalities: Tensor
    places: Tensor | None

    @property
    def items(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.modalities)

    def to(self, device: torch.device | str) -> "Packed":
        """The same microbatch on ``device``; types are kept."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Packed(
            move(self.lengths),
            self.blocks,
            move(self.byte_ids),
            {modality: move(values) for modality, values in self.patches.items()},
            None if self.sources is None else move(self.sources),
            move(self.positions),
            move(self.modalities),
            None if self.places is None else move(self.places),
        )


def pack(segments: Sequence[Segment]) -> Packed:
    """The segments of a microbatch, in item order, as flat tensors.

    Raises:
        ValueError: a segment has no token, or its grid does not hold its tokens.
    """
    lengths = np.array([segment.tokens for segment in segments], dtype=np.int64)
    grids = np.array([segment.grid for segment in segments], dtype=np.int64).reshape(-1, 3)
    _check(lengths, grids)
    order = np.argsort(lengths, kind="stable")
    arranged = [segments[item] for item in order]
    kinds = np.array([segment.modality for segment in arranged], dtype=np.int64)
    modalities = np.repeat(kinds, lengths[order])
    byte_ids = _concatenate(arranged, Modality.TEXT)
    return Packed(
        lengths=torch.from_numpy(lengths),
        blocks=_blocks(lengths),
        byte_ids=torch.from_numpy(np.zeros(0, np.int64) if byte_ids is None else byte_ids.astype(np.int64)),
        patches=_patches(arranged),
        sources=_unless_in_order(np.argsort(np.argsort(modalities, kind="stable"), kind="stable")),
        positions=torch.from_numpy(_coordinates(lengths[order], grids[order])),
        modalities=torch.from_numpy(modalities),
        places=_unless_in_order(_places(lengths, order)),
    )


def _check(lengths: np.ndarray, grids: np.ndarray) -> None:
    wrong = np.flatnonzero((lengths < 1) | (grids.prod(axis=1) != lengths))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"segment {at} has {lengths[at]} tokens and the grid {tuple(grids[at].tolist())}: "
            "expected at least one token and a grid whose product is their number"
        )


def _blocks(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    length, items = np.unique(lengths, return_counts=True)
    return tuple(zip(items.tolist(), length.tolist(), strict=True))


def _concatenate(segments: Sequence[Segment], modality: Modality) -> np.ndarray | None:
    values = [segment.values for segment in segments if segment.modality == modality]
    return np.concatenate(values) if values else None


def _patches(segments: Sequence[Segment]) -> dict[Modality, Tensor]:
    found = {modality: _concatenate(segments, modality) for modality in Modality if modality != Modality.TEXT}
    return {modality: torch.from_numpy(values) for modality, values in found.items() if values is not None}


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _coordinates(lengths: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """(T, 3) int32: where each token lies in its item's grid, whose last axis runs fastest."""
    token = np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
    rows, columns = np.repeat(grids[:, 1], lengths), np.repeat(grids[:, 2], lengths)
    return np.stack((token // (rows * columns), token // columns % rows, token % columns), axis=1).astype(np.int32)


def _places(lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(T,) int64: for each token in item order its place in packed order."""
    packed_starts = np.empty_like(lengths)
    packed_starts[order] = _starts(lengths[order])
    return np.arange(lengths.sum()) + np.repeat(packed_starts - _starts(lengths), lengths)


def _unless_in_order(index: np.ndarray) -> Tensor | None:
    return None if np.array_equal(index, np.arange(len(index))) else torch.from_numpy(index)
