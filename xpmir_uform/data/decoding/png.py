"""What Pillow leaves undone for PNG files: texts and profiles that are no pixels, transparent colours of any depth."""

import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image, PngImagePlugin

SIGNATURE = b"\x89PNG\r\n\x1a\n"

NO_PIXELS = {b"tEXt", b"zTXt", b"iTXt", b"iCCP"}
"""Chunks of texts and of the colour profile. Pillow expands them as it reads, and refuses long ones."""

TURNING = {b"XML:com.adobe.xmp", b"Raw profile type exif"}
"""Keywords of texts that may tell how the picture is turned: XMP, and Exif as ImageMagick and exiftool wrote it before
PNG had a chunk for it."""

TEXT_LIMIT = 1 << 18
"""Such a text is kept up to this size, expanded."""

FULL_SCALE = {"L;2": 85, "L;4": 17}
"""What Pillow multiplies grey values of fewer than 8 bits by, by its name of how they are stored."""


def without_texts(content: bytes) -> bytes:
    """A PNG file without the chunks of ``NO_PIXELS``, wherever they are, but those that may tell how it is turned.

    Any other file, and what cannot be parsed, stays as it is.
    """
    if not content.startswith(SIGNATURE):
        return content
    parts, place = [SIGNATURE], len(SIGNATURE)
    while place + 8 <= len(content):
        length, name = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        after = place + 12 + length
        if after > len(content):
            break
        if name not in NO_PIXELS or _may_turn(name, content[place + 8 : after - 4]):
            parts.append(content[place:after])
        place = after
    return b"".join([*parts, content[place:]])


def _may_turn(name: bytes, data: bytes) -> bool:
    """Whether a text is one of ``TURNING``, and of no more than ``TEXT_LIMIT`` bytes (PNG specification, 11.3.3)."""
    keyword, _, rest = data.partition(b"\0")
    if keyword not in TURNING or len(data) > TEXT_LIMIT:
        return False
    if name == b"tEXt" or (name == b"iTXt" and rest[:1] == b"\0"):
        return True
    packed = rest[1:] if name == b"zTXt" else rest[2:].split(b"\0", 2)[-1]
    expander = zlib.decompressobj()
    try:
        expander.decompress(packed, TEXT_LIMIT)
    except zlib.error:
        return False
    return expander.eof


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
