"""Images of any size and ratio become whole square patches.

H rows and W columns of pixels, C channels, T patches (tokens), P values of one patch.
"""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from xpmir_uform.data.decoding.pixels import flatten
from xpmir_uform.data.decoding.unreadable import UnreadableItem, out_of_memory
from xpmir_uform.data.items import Item
from xpmir_uform.data.segments import Segment
from xpmir_uform.data.shapes import ImageShape, PictureShape
from xpmir_uform.data.vocabulary import Modality

PIXEL_LIMIT = 1 << 26
"""A file that declares more pixels (67 million) is refused before they are expanded."""

FORMATS = (
    *("JPEG", "PNG", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "DIB", "JPEG2000"),
    *("PPM", "TGA", "QOI", "PSD", "PCX", "SGI"),
)
"""Formats whose pixels lie in the file and are declared in its header. Pillow's others run programs or nest files."""

MIDDLE = np.float32(127.5)
"""Pixel values x in 0..255 are standardised as x / MIDDLE - 1, in -1..1."""

# Damaged files raise nearly anything in Pillow; a bare Exception would also catch the signals of a job that is stopped.
_DAMAGE = (
    *(OSError, EOFError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError),
    *(RuntimeError, struct.error, zlib.error, Image.DecompressionBombError),
)


def decode(item: Item, shape: ImageShape) -> Segment:
    """The patches of an image file: :func:`open_image`, then :func:`patches`.

    Raises:
        UnreadableItem: the file is of no known format, is truncated or damaged, has no pixels or too many.
    """
    return patches(open_image(item, shape), shape)


def open_image(item: Item, shape: ImageShape) -> np.ndarray:
    """(H, W, C) uint8: an image file's first frame, upright, on white, resized as :func:`fit` says.

    Raises:
        UnreadableItem: as in :func:`decode`.
    """
    try:
        return fit(flatten(_upright(item.content, shape), shape.channels), shape)
    except UnidentifiedImageError as error:
        raise UnreadableItem.of(item, f"it is no image of a known format ({', '.join(FORMATS)})") from error
    except MemoryError as error:
        raise out_of_memory(item) from error
    except _DAMAGE as error:
        raise UnreadableItem.of(item, str(error) or type(error).__name__) from error


def fit(pixels: np.ndarray, shape: PictureShape) -> np.ndarray:
    """Resizes (H, W, C) uint8 pixels as :func:`whole_patches` says, by :func:`resize`."""
    return resize(pixels, *whole_patches(pixels.shape[0], pixels.shape[1], shape), shape)


def resize(pixels: np.ndarray, rows: int, columns: int, shape: PictureShape) -> np.ndarray:
    """(H, W, C) uint8 pixels as that many patches, by Pillow's antialiased bicubic filter."""
    side = shape.patch_side
    if pixels.shape[:2] == (rows * side, columns * side):
        return pixels
    picture = Image.fromarray(pixels if shape.channels == 3 else pixels[:, :, 0])
    resized = picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    return np.asarray(resized).reshape(rows * side, columns * side, shape.channels)


def whole_patches(height: int, width: int, shape: PictureShape) -> tuple[int, int]:
    """(rows, columns) of patches of an image of that many pixels.

    The image is shrunk, keeping its ratio, until its longer side is at most ``max_side``; it is never enlarged so. Then
    each side is resized to the nearest whole number of patches, halves upwards: at least one, so that an image of any
    ratio, or smaller than a patch, has a token, and at most ``max_side // patch_side``. Nothing is cut off.
    """
    longest = max(height, width, shape.max_side)
    rows, columns = (_nearest(side * shape.max_side, longest * shape.patch_side) for side in (height, width))
    most = shape.max_side // shape.patch_side
    return min(max(rows, 1), most), min(max(columns, 1), most)


def patches(pixels: np.ndarray, shape: ImageShape) -> Segment:
    """Cuts pixels into standardised patches, row by row.

    Args:
        pixels: (H, W, C) of any dtype, values in 0..255; H and W are multiples of ``patch_side``.
        shape: of the encoder.

    Returns:
        values (T, P) float32, P in the order row, column, channel; grid (1, H / patch_side, W / patch_side).

    Raises:
        ValueError: another number of channels, or sides that are not whole patches.
    """
    side, channels = shape.patch_side, shape.channels
    if pixels.ndim != 3 or pixels.shape[2] != channels or not pixels.size or any(n % side for n in pixels.shape[:2]):
        raise ValueError(
            f"pixels have shape {pixels.shape}; expected (H, W, {channels}), H and W multiples of {side}. "
            "fit() resizes to whole patches."
        )
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    tiles = pixels.reshape(rows, side, columns, side, channels).swapaxes(1, 2)
    values = tiles.reshape(rows * columns, -1).astype(np.float32) / MIDDLE - 1
    return Segment(Modality.IMAGE, values, (1, rows, columns))


def _upright(content: bytes, shape: ImageShape) -> Image.Image:
    picture: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
    width, height = picture.size
    if width * height > PIXEL_LIMIT:
        raise ValueError(f"it declares {width} x {height} pixels, more than the limit of {PIXEL_LIMIT}")
    if width * height == 0:
        raise ValueError(f"it has no pixels ({width} x {height})")
    rows, columns = whole_patches(height, width, shape)
    # A JPEG is decoded at a half, a quarter or an eighth of its size where that leaves twice the side that is kept.
    picture.draft(None, (2 * columns * shape.patch_side, 2 * rows * shape.patch_side))
    ImageOps.exif_transpose(picture, in_place=True)
    return picture


def _nearest(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
