"""From an item's bytes to the tokens of an encoder: one file for each modality, and the registry of them.

A decoder is a pure function ``decode(item, shape) -> Segment``; it draws nothing and keeps nothing, so that it may
run in any worker process. It refuses content that it cannot read with :class:`UnreadableItem`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from xpmir_uform.data.decoding import audio, image, text, video
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.unreadable import UnreadableItem
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

__all__ = ["DECODERS", "Shapes", "UnreadableItem", "decode"]

Shapes = Mapping[Modality, Any]
"""The shape that an encoder has for each modality it takes, such as an ``ImageShape``; a text needs none."""

DECODERS: dict[Modality, Callable[[Item, Any], Segment]] = {
    Modality.TEXT: text.decode,
    Modality.IMAGE: image.decode,
    Modality.VIDEO: video.decode,
    Modality.AUDIO: audio.decode,
}


def decode(item: Item, shapes: Shapes) -> Segment:
    """The tokens of ``item``: at least one.

    Raises:
        UnreadableItem: the content cannot be read.
        ValueError: ``shapes`` has no shape for the item's modality, or there is no decoder for it.
    """
    name = item.modality.name.lower()
    if item.modality not in DECODERS:
        raise ValueError(f"{item} cannot be decoded: there is no decoder of {name} items.")
    shape = shapes.get(item.modality)
    if shape is None and item.modality is not Modality.TEXT:
        raise ValueError(f"{item} cannot be decoded: the encoder has no shape for {name} items. Give it one.")
    return DECODERS[item.modality](item, shape)
