"""Segments: decoded items, ready for an encoder.

Letters: T tokens of one item, P values of one patch.
"""

from dataclasses import dataclass

import numpy as np

from xpmir_uform.data.vocabulary import Modality, Slot


@dataclass(frozen=True, slots=True)
class Segment:
    """One decoded item: at least one token, in reading order.

    Args:
        modality: of the item.
        values: TEXT: (T,) int16, byte values and :class:`~xpmir_uform.data.vocabulary.Slot` numbers; otherwise
            (T, P) float32, standardised patches with the last grid axis running fastest.
        grid: (frames, rows, columns) of the tokens, whose product is T; a text or a sound is (1, 1, T).
    """

    modality: Modality
    values: np.ndarray
    grid: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.values)


def blank_text(length: int) -> Segment:
    """A text of ``length`` empty slots: what stands in for content where only its size matters."""
    return Segment(Modality.TEXT, np.full(length, Slot.EMPTY, dtype=np.int16), (1, 1, length))
