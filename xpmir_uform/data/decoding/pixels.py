"""Pictures of any Pillow mode become 8-bit grey or RGB pixels.

H rows, W columns, C channels (1: grey, 3: RGB).
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image, ImageCms

BAND = 1 << 20
"""Pixels that are converted at once."""

FLOAT_TOPS = (1.0, 255.0, 65535.0)
"""The values that white usually has in a floating-point picture."""


def flatten(picture: Image.Image, channels: int) -> Image.Image:
    """``picture`` on a white ground, in mode RGB (3 channels) or L (1 channel), 8 bits each.

    - 8-bit modes are converted by Pillow, LAB through sRGB; embedded colour profiles are not applied;
    - transparency, in an alpha channel or a transparent colour, is composited over white;
    - 16-bit values keep their high byte; so do 32-bit integers where all lie in 0..65535 (as 16-bit files may become),
      otherwise their own range is spread over 0..255;
    - floating-point values are scaled from the first of 0..1, 0..255, 0..65535 that holds them all, else from their own
      range;
    - one channel is the ITU-R 601-2 luma.

    Raises:
        ValueError: a floating-point picture holds a NaN or an infinity.
    """
    mode = "RGB" if channels == 3 else "L"
    picture = _eight_bits(picture)
    if picture.has_transparency_data:
        return _composited(picture, mode)
    return picture if picture.mode == mode else picture.convert(mode)


def _composited(picture: Image.Image, mode: str) -> Image.Image:
    """``picture`` over white, a band of rows at a time: whole copies would take several times its memory."""
    result = Image.new(mode, picture.size)
    rows = max(1, BAND // picture.width)
    for top in range(0, picture.height, rows):
        band = picture.crop((0, top, picture.width, min(top + rows, picture.height))).convert("RGBA")
        ground = Image.new("RGBA", band.size, "white")
        result.paste(Image.alpha_composite(ground, band).convert(mode), (0, top))
    return result


def _eight_bits(picture: Image.Image) -> Image.Image:
    """``picture`` in an 8-bit mode that Pillow converts to RGB and RGBA without clipping."""
    if picture.mode.startswith("I;16"):
        return _from_16_bits(np.asarray(picture), picture.info.get("transparency"))
    if picture.mode == "I":
        return Image.fromarray(_from_32_bits(np.asarray(picture)))
    if picture.mode == "F":
        return Image.fromarray(_from_floats(np.asarray(picture)))
    if picture.mode == "LAB":
        return ImageCms.applyTransform(picture, _lab_to_srgb())  # type: ignore[return-value]
    return picture.convert("LA") if picture.mode == "La" else picture


def _by_bands(values: np.ndarray, scale: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(H, W) uint8: ``scale``, which works in 64 bits, of a band of rows of (H, W) values at a time."""
    result = np.empty(values.shape, np.uint8)
    rows = max(1, BAND // values.shape[1])
    for top in range(0, len(values), rows):
        result[top : top + rows] = scale(values[top : top + rows])
    return result


def _from_16_bits(values: np.ndarray, transparent: int | None) -> Image.Image:
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if transparent is None:
        return grey
    alpha = np.where(values == transparent, 0, 255).astype(np.uint8)
    return Image.merge("LA", (grey, Image.fromarray(alpha)))


def _from_32_bits(values: np.ndarray) -> np.ndarray:
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high <= 65535:
        low, high = 0, 65535
    return _by_bands(values, lambda band: (band.astype(np.int64) - low) * 256 // (high - low + 1))


def _from_floats(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("some pixels are NaN or infinite")
    if low >= 0 and high <= FLOAT_TOPS[-1]:
        low, high = 0.0, next(top for top in FLOAT_TOPS if high <= top)
    span = high - low if high > low else 1.0
    return _by_bands(values, lambda band: np.rint((band.astype(np.float64) - low) * (255 / span)))


@cache
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB")
