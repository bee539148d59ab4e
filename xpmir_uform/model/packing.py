"""Packing: the segments of a microbatch as flat tensors, without padding.

Letters: N items, T tokens of all items, S answer slots, B rows of the byte embedding, K patches of one modality, P
values of one patch.

Tokens have two orders. In *item order* the items follow one another as given. In *packed order* they are sorted by
length, stably, so that the items of one length are one dense (items, length) block: attention then needs neither masks
nor copies. Among the items of one length those with an answer slot come last. The answer slots follow all tokens, in
either order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.vocabulary import Modality, Slot


class Reads(NamedTuple):
    """Which states the heads read, as numbers of tokens in item order.

    Args:
        kept: (n,) int64, tokens whose vectors are kept for late interaction.
        bytes: (R,) int64, masked places of texts.
        patches: (k,) int64 of each modality other than text that has masked patches.
    """

    kept: Tensor
    bytes: Tensor
    patches: Mapping[Modality, Tensor]


class Packed(NamedTuple):
    """A microbatch, ready for an encoder.

    Args:
        lengths: (N,) int64, tokens of each item, in item order.
        blocks: (items, length) of each block of items of one length, in packed order.
        answers: of each block the number of its last items that have an answer slot; empty: none has.
        byte_ids: (B,) int64, rows of the byte embedding: bytes, masked patches, answer slots, in packed order.
        patches: (K, P) float32 of each modality that is present, other than text.
        sources: (T + S,) int64, for each token in packed order its row in the concatenation of the bytes and the
            patches by ascending modality; None when they are in packed order already.
        positions: (T + S, 3) int32, coordinates (frame, row, column) in packed order.
        modalities: (T + S,) int64, in packed order; an answer slot counts as text.
        places: (T + S,) int64, for each token in item order its place in packed order; None when the orders agree.
        reads: what the heads read.
    """

    lengths: Tensor
    blocks: tuple[tuple[int, int], ...]
    answers: tuple[int, ...]
    byte_ids: Tensor
    patches: Mapping[Modality, Tensor]
    sources: Tensor | None
    positions: Tensor
    modalities: Tensor
    places: Tensor | None
    reads: Reads

    @property
    def items(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.modalities) - sum(self.answers)

    def to(self, device: torch.device | str) -> "Packed":
        """The same microbatch on ``device``; types are kept."""
        return moved(self, device)


def moved(value: Any, device: torch.device | str) -> Any:
    """``value`` with every tensor that it holds on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: moved(each, device) for key, each in value.items()}
    if isinstance(value, (Packed, Reads)):
        return type(value)(*(moved(each, device) for each in value))
    return value


def pack(segments: Sequence[Segment]) -> Packed:
    """The segments of a microbatch, in item order, as flat tensors.

    Raises:
        ValueError: a segment has no token, or its grid does not hold its tokens.
    """
    lengths = np.array([segment.tokens for segment in segments], dtype=np.int64)
    answers = np.array([segment.answers for segment in segments], dtype=bool)
    grids = np.array([segment.grid for segment in segments], dtype=np.int64).reshape(-1, 3)
    _check(lengths, grids)
    order = np.lexsort((answers, lengths))
    answering = order[answers[order]]
    arranged = [segments[item] for item in order]
    kinds = np.array([segment.modality for segment in arranged], dtype=np.int64)
    slots = np.full(len(answering), Modality.TEXT, np.int64)
    inputs = np.concatenate([*map(_inputs, arranged), slots])
    coordinates = _coordinates(lengths[order], grids[order])
    return Packed(
        lengths=torch.from_numpy(lengths),
        blocks=_blocks(lengths),
        answers=_answers_of_blocks(lengths, answers),
        byte_ids=torch.from_numpy(np.append(_byte_ids(arranged), np.full(len(answering), Slot.ANSWER, np.int64))),
        patches=_patches(arranged),
        sources=_unless_in_order(np.argsort(np.argsort(inputs, kind="stable"), kind="stable")),
        positions=torch.from_numpy(np.concatenate([coordinates, _behind(lengths[answering])])),
        modalities=torch.from_numpy(np.append(np.repeat(kinds, lengths[order]), slots)),
        places=_unless_in_order(np.append(_places(lengths, order), lengths.sum() + np.argsort(answering))),
        reads=_reads(segments, _starts(lengths)),
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


def _answers_of_blocks(lengths: np.ndarray, answers: np.ndarray) -> tuple[int, ...]:
    if not answers.any():
        return ()
    _, block = np.unique(lengths, return_inverse=True)
    return tuple(np.bincount(block, answers).astype(int).tolist())


def _shown(segment: Segment) -> np.ndarray:
    """(T,) bool: the patches that the encoder sees."""
    shown = np.ones(segment.tokens, bool)
    if segment.masked is not None:
        shown[segment.masked] = False
    return shown


def _inputs(segment: Segment) -> np.ndarray:
    """(T,) int64: the embedding that each token goes through: that of its modality, and of bytes for a masked patch."""
    if segment.modality == Modality.TEXT or segment.masked is None:
        return np.full(segment.tokens, segment.modality, np.int64)
    return np.where(_shown(segment), segment.modality, Modality.TEXT).astype(np.int64)


def _byte_ids(segments: Sequence[Segment]) -> np.ndarray:
    """(B,) int64: texts as they are, and a mask for each masked patch."""
    parts = [
        segment.values
        if segment.modality == Modality.TEXT
        else np.full(0 if segment.masked is None else len(segment.masked), Slot.MASK)
        for segment in segments
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _patches(segments: Sequence[Segment]) -> dict[Modality, Tensor]:
    found: dict[Modality, list[np.ndarray]] = {}
    for segment in segments:
        if segment.modality != Modality.TEXT:
            shown = segment.values if segment.masked is None else segment.values[_shown(segment)]
            found.setdefault(segment.modality, []).append(shown)
    return {modality: torch.from_numpy(np.concatenate(values)) for modality, values in found.items()}


def _reads(segments: Sequence[Segment], starts: np.ndarray) -> Reads:
    """The tokens that heads read; ``starts`` (N,) are the first tokens of the items."""
    masked: dict[Modality, list[np.ndarray]] = {modality: [] for modality in Modality}
    kept = [np.zeros(0, np.int64)]
    for start, segment in zip(starts.tolist(), segments, strict=True):
        if segment.masked is not None and len(segment.masked):
            masked[segment.modality].append(start + segment.masked)
        if segment.kept:
            kept.append(np.arange(start, start + segment.kept))
    texts = masked.pop(Modality.TEXT)
    return Reads(
        kept=torch.from_numpy(np.concatenate(kept)),
        bytes=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *texts])),
        patches={modality: torch.from_numpy(np.concatenate(rows)) for modality, rows in masked.items() if rows},
    )


def _behind(lengths: np.ndarray) -> np.ndarray:
    """(S, 3) int32: the places of the answer slots of items of these lengths: after the last token, as in a text."""
    return np.stack([np.zeros_like(lengths), np.zeros_like(lengths), lengths], axis=1).astype(np.int32)


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
