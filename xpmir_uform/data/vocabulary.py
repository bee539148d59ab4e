"""The closed sets of words that items, batches and the model share."""

from enum import IntEnum, IntFlag


class Modality(IntEnum):
    """What an item's bytes are."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class Side(IntFlag):
    """The part an item plays in late interaction."""

    NONE = 0
    QUERY = 1
    DOCUMENT = 2
    QUERY_AND_DOCUMENT = 3


class Slot(IntEnum):
    """Special slots of the byte vocabulary, after the 256 byte values."""

    EMPTY = 256
    """The one token of an empty text."""
    MASK = 257
    """Stands where a byte was hidden from the encoder."""
    ANSWER = 258
    """Appended to an item that offers choices; the byte decoder reads its final state."""


BYTE_VOCABULARY = 256 + len(Slot)
