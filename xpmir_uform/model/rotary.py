"""Rotary positions over as many axes as a modality has.

Each pair of coordinates of a head turns by ``frequency * coordinate``, so that the product of a query and a key
depends on the difference of their positions alone (Su et al., "RoFormer", 2021). The pairs of a head are split over
the axes of the modality, as in the axial form of Heo et al., "Rotary position embedding for vision transformer" (2024).

Letters: T tokens, A heads, F pairs of coordinates of a head.
"""

import numpy as np
import torch
from torch import Tensor

from xpmir_uform.data.vocabulary import Modality

HEAD_WIDTH = 64
PAIRS = HEAD_WIDTH // 2

AXIS_PAIRS = {
    Modality.TEXT: (0, 0, PAIRS),
    Modality.IMAGE: (0, PAIRS // 2, PAIRS // 2),
    Modality.VIDEO: (PAIRS // 4, PAIRS * 3 // 8, PAIRS * 3 // 8),
    Modality.AUDIO: (0, 0, PAIRS),
}
"""Pairs that turn with the frame, the row and the column."""

BASE = {Modality.TEXT: 10_000.0, Modality.IMAGE: 100.0, Modality.VIDEO: 100.0, Modality.AUDIO: 10_000.0}
"""The slowest frequency is about ``1 / base``: sequences are long, grids are small."""

AXES = np.stack([np.repeat(np.arange(3), AXIS_PAIRS[modality]) for modality in Modality])
"""(modalities, F) int64: the axis of each pair."""

FREQUENCIES = np.stack([np.concatenate([BASE[m] ** (-np.arange(n) / n) for n in AXIS_PAIRS[m] if n]) for m in Modality])
"""(modalities, F) float64: radians per step of the pair's axis."""


def rotation(positions: Tensor, modalities: Tensor, dtype: torch.dtype) -> Tensor:
    """The complex unit numbers by which the pairs of each token turn.

    Args:
        positions: (T, 3) int, (frame, row, column).
        modalities: (T,) int64.
        dtype: float32 or float64.

    Returns:
        (T, 1, F) complex, of the precision of ``dtype``.
    """
    axes = torch.from_numpy(AXES).to(positions.device)[modalities]
    frequencies = torch.from_numpy(FREQUENCIES).to(dtype).to(positions.device)[modalities]
    angles = (positions.gather(1, axes) * frequencies).unsqueeze(1)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(vectors: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair (2 f, 2 f + 1) of coordinates, in one pass as a complex product.

    Args:
        vectors: (..., A, 2 F).
        turn: (..., 1, F) complex, as :func:`rotation` gives it.

    Returns:
        (..., A, 2 F) of the type of ``vectors``; formed in the precision of ``turn``.
    """
    pairs = torch.view_as_complex(vectors.to(turn.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(vectors.dtype)
