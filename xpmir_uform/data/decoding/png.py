"""What Pillow leaves undone for PNG files: texts and profiles that are no pixels, transparent colours of any depth."""

from collections.abc import Callable

import numpy as np
from PIL import Image, PngImagePlugin

SIGNATURE = b"\x89PNG\r\n\x1a\n"

NO_PIXELS = {b"tEXt", b"zTXt", b"iTXt", b"iCCP"}
"""Chunks of texts and of the colour profile. Pillow expands them at opening, and refuses a file where they are long."""

FULL_SCALE = {"L;2": 85, "L;4": 17}
"""What Pillow multiplies grey values of fewer than 8 bits by, by its name of how they are stored."""


def without_texts(content: bytes) -> bytes:
    """A PNG file without the chunks of ``NO_PIXELS``; any other file, and what cannot be parsed, as it is."""
    if not content.startswith(SIGNATURE):
        return content
    parts, place = [SIGNATURE], len(SIGNATURE)
    while place + 8 <= len(content):
        length, name = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        after = place + 12 + length
        if name == b"IDAT" or after > len(content):
            break
        if name not in NO_PIXELS:
            parts.append(content[place:after])
        place = after
    return b"".join([*parts, content[place:]])


def with_exact_transparency(picture: Image.Image, reopen: Callable[[], Image.Image]) -> Image.Image:
    """``picture`` with its transparent colour on the scale of its pixels (PNG specification, section 11.3.2.1, tRNS).

    Pillow compares the stored colour with pixels that it has scaled to 8 bits.

    Args:
        picture: any picture, whose pixels are not loaded yet.
        reopen: opens the same file again.
    """
    colour = picture.info.get("transparency")
    if not isinstance(picture, PngImagePlugin.PngImageFile) or colour is None or not picture.tile:
        return picture
    stored = picture.tile[0].args
    if stored in FULL_SCALE:
        picture.info["transparency"] = colour * FULL_SCALE[stored]
    elif stored == "RGB;16B":
        return _with_alpha(picture, _low_bytes(reopen()), colour)
    return picture


def _low_bytes(picture: Image.Image) -> Image.Image:
    """The lower halves of 16-bit colours, which Pillow reads when it takes them for little-endian."""
    picture.tile = [tile._replace(args="RGB;16L") for tile in picture.tile]  # type: ignore[attr-defined]
    picture.load()
    return picture


def _with_alpha(high: Image.Image, low: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    transparent = np.ones((high.height, high.width), bool)
    for channel, value in enumerate(colour):
        transparent &= np.asarray(high.getchannel(channel)) == value >> 8
        transparent &= np.asarray(low.getchannel(channel)) == value & 0xFF
    result = high.convert("RGB")
    result.info.pop("transparency", None)
    result.putalpha(Image.fromarray(np.where(transparent, 0, 255).astype(np.uint8)))
    return result
