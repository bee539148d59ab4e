"""What people hold of a picture, a sound or a video, as the bytes of a file: a path, bytes, or a picture of Pillow."""

import os
from io import BytesIO
from pathlib import Path

from PIL import Image

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of Pillow that a PNG file holds without loss."""


def file_bytes(source: str | os.PathLike | bytes, name: str) -> bytes:
    """The bytes of a file, which is read once, now; or those that are given.

    Args:
        name: of the modality, in messages.

    Raises:
        ValueError: there is no such file, it cannot be read, or ``source`` is no path and no bytes.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"{name} content is a {type(source).__name__}: expected the path of its file, or the bytes of that"
        )
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"the {name} file {os.fspath(source)!r} cannot be read: {error.strerror}") from error


def picture_bytes(picture: Image.Image) -> bytes:
    """A PNG file of the pixels, upright as the EXIF orientation says, and of no metadata; the same for the same pixels.

    Modes that PNG does not hold become the 8-bit RGB pixels that a model sees of them.
    """
    # Decoding knows items, which are made here.
    from xpmir_uform.data.decoding.image import upright
    from xpmir_uform.data.decoding.pixels import flatten

    turned = upright(picture)
    turned = turned if turned.mode in PNG_MODES else flatten(turned, channels=3)
    file = BytesIO()
    turned.save(file, "PNG", exif=b"", icc_profile=None)
    return file.getvalue()
