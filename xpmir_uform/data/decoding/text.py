"""Texts become their UTF-8 bytes.

T tokens.
"""

import numpy as np

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.unreadable import UnreadableItem
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality, Slot


def decode(item: Item, shape: None = None) -> Segment:
    """One token for each byte, of any length; an empty text is the one token ``Slot.EMPTY``. A text needs no shape.

    Bytes that are not UTF-8 (another encoding, a lone surrogate, a text cut inside a character) are refused: a model
    would train on them without a word, and what was meant can be told only where the text comes from.

    Raises:
        UnreadableItem: the content is not UTF-8.
    """
    try:
        item.content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = item.content[error.start]
        raise UnreadableItem.of(item, f"byte {error.start} ({byte:#04x}) is not UTF-8 text ({error.reason})") from error
    ids = np.frombuffer(item.content, np.uint8).astype(np.int16)
    if not len(ids):
        ids = np.array([Slot.EMPTY], np.int16)
    return Segment(Modality.TEXT, ids, (1, 1, len(ids)))
