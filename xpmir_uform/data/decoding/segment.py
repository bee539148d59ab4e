"""Segments: decoded items, ready for an encoder.

Letters: T tokens of one item, K masked tokens, P values of one patch.
"""

from dataclasses import dataclass

import numpy as np

from xpmir_uform.data.vocabulary import Modality, Slot


@dataclass(frozen=True, slots=True)
class Segment:
    """One decoded item: at least one token, in reading order; and what a model is asked about it.

    Args:
        modality: of the item.
        values: TEXT: (T,) int16, byte values and :class:`~xpmir_uform.data.vocabulary.Slot` numbers; otherwise
            (T, P) float32, standardised patches with the last grid axis running fastest.
        grid: (frames, rows, columns) of the tokens, whose product is T; a text or a sound is (1, 1, T).
        masked: (K,) int64 ascending, the tokens that are to be reconstructed; None: none. In a text ``values`` holds
            what stands in their place; a patch gives way to the mask embedding whatever its values are.
        truth: what is to be reconstructed: (K,) int64 bytes, or (K, P) float32.
        answers: whether an answer slot follows the tokens.
        kept: how many of the first tokens have their vectors kept for late interaction.
    """

    modality: Modality
    values: np.ndarray
    grid: tuple[int, int, int]
    masked: np.ndarray | None = None
    truth: np.ndarray | None = None
    answers: bool = False
    kept: int = 0

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.values)


def blank_text(length: int) -> Segment:
    """A text of ``length`` empty slots: what stands in for content where only its size matters."""
    return Segment(Modality.TEXT, np.full(length, Slot.EMPTY, dtype=np.int16), (1, 1, length))
