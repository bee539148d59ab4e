"""Images of any size and ratio become whole square patches.

H rows and W columns of pixels, C channels, T patches (tokens), P values of one patch.
"""

import struct
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from xpmir_uform.data.decoding.pixels import flatten
from xpmir_uform.data.decoding.png import with_exact_transparency, without_texts
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.shapes import ImageShape, PictureShape
from xpmir_uform.data.decoding.unreadable import UnreadableItem, out_of_memory
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

PIXEL_LIMIT = 1 << 26
"""A file that declares more pixels (67 million) is refused before they are expanded."""

HEAVIER = {"JPEG2000": 4, "WEBP": 2, "AVIF": 2}
"""Formats whose decoders hold several copies of the pixels: a file may declare so many times fewer of them."""

FORMATS = (
    *("JPEG", "PNG", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "DIB", "JPEG2000"),
    *("PPM", "TGA", "QOI", "PSD", "PCX", "SGI"),
)
"""Formats whose pixels lie in the file and are declared in its header. Pillow's others run programs or nest files."""

SIDE_LIMIT = 1 << 16
"""A file that declares more pixels on one side is refused: JPEG and WebP cannot, and no camera does."""

TILE = (322, 323)
"""The tags TileWidth and TileLength (TIFF 6.0, section 15)."""

TILE_PIXELS = 1 << 20
"""Tiles of so many pixels may be larger than their picture: its sides are filled up to whole tiles."""

REDUCING_GAP = 4.0

CODESTREAM, SIZE_OF_SAMPLES = b"\xff\x4f\xff\x51", 42
"""How a JPEG 2000 codestream begins, and where after it the first component has its depth (ISO 15444-1, A.5.1)."""

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How a stored picture is turned, by the value of the tag Orientation (Exif 2.32, 4.6.4)."""

MIDDLE = np.float32(127.5)
"""Pixel values x in 0..255 are standardised as x / MIDDLE - 1, in -1..1."""

# Damaged files raise nearly anything in Pillow; a bare Exception would also catch the signals of a job that is stopped.
DAMAGE = (
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
        return fit(flatten(upright(_opened(item.content, shape)), shape.channels), shape)
    except UnidentifiedImageError as error:
        raise UnreadableItem.of(item, f"it is no image of a known format ({', '.join(FORMATS)})") from error
    except MemoryError as error:
        raise out_of_memory(item) from error
    except DAMAGE as error:
        raise UnreadableItem.of(item, str(error) or type(error).__name__) from error


def fit(picture: Image.Image, shape: PictureShape) -> np.ndarray:
    """(H, W, C) uint8: a picture, resized as :func:`whole_patches` says, by :func:`as_patches`."""
    return as_patches(picture, *whole_patches(picture.height, picture.width, shape), shape)


def as_patches(picture: Image.Image, rows: int, columns: int, shape: PictureShape) -> np.ndarray:
    """(H, W, C) uint8: a picture as that many patches, by Pillow's antialiased bicubic filter.

    A side that shrinks more than ``2 * REDUCING_GAP`` times is first averaged over blocks of pixels, which bounds the
    memory and the time of the filter.
    """
    height, width = rows * shape.patch_side, columns * shape.patch_side
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=REDUCING_GAP)
    return np.asarray(picture).reshape(height, width, shape.channels)


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


def upright(picture: Image.Image) -> Image.Image:
    """``picture``, turned as its EXIF orientation says. The rest of EXIF is not read, and may be damaged."""
    picture.load()
    orientation = 1
    with suppress(*DAMAGE):
        orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
    turn = TURNS.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def _opened(content: bytes, shape: ImageShape) -> Image.Image:
    """The picture in a file, within the limits, its pixels not yet decoded where that can be put off."""
    content = without_texts(content)
    picture: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
    width, height = picture.size
    most = PIXEL_LIMIT // HEAVIER.get(picture.format or "", 1)
    if width * height > most or max(width, height) > SIDE_LIMIT:
        raise ValueError(
            f"it declares {width} x {height} pixels, expected at most {most}, and at most {SIDE_LIMIT} on a side"
        )
    if width * height == 0:
        raise ValueError(f"it has no pixels ({width} x {height})")
    _check_tiles(picture)
    rows, columns = whole_patches(height, width, shape)
    # A JPEG is decoded at a half, a quarter or an eighth of its size where that leaves twice the side that is kept.
    picture.draft(None, (2 * columns * shape.patch_side, 2 * rows * shape.patch_side))
    _check_depth(picture, content)
    picture = _white_is_high(picture)
    return with_exact_transparency(picture, lambda: Image.open(BytesIO(content), formats=("PNG",)))


def _check_tiles(picture: Image.Image) -> None:
    """Refuses a TIFF whose tiles, which are expanded whole, are larger than itself, unless they are small."""
    if picture.format == "TIFF":
        width, height = (picture.tag_v2.get(tag, 1) for tag in TILE)  # type: ignore[attr-defined]
        if width * height > max(TILE_PIXELS, picture.width * picture.height):
            raise ValueError(f"it declares tiles of {width} x {height} pixels, more than its own")


def _check_depth(picture: Image.Image, content: bytes) -> None:
    """Refuses JPEG 2000 colours of more than 8 bits, of which Pillow rounds the brightest to the darkest."""
    place = content.find(CODESTREAM) + SIZE_OF_SAMPLES
    if picture.format == "JPEG2000" and picture.mode not in ("L", "I;16") and place < len(content):
        bits = (content[place] & 0x7F) + 1
        if bits > 8:
            raise ValueError(f"it is a JPEG 2000 of {bits} bits a colour, expected 8: convert it")


def _white_is_high(picture: Image.Image) -> Image.Image:
    """A 16-bit TIFF whose zeros are white with its values turned about, as Pillow does for those of fewer bits."""
    if picture.format != "TIFF" or not picture.mode.startswith("I;16"):
        return picture
    if picture.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) != 0:  # type: ignore[attr-defined]
        return picture
    return Image.fromarray(65535 - np.asarray(picture))


def _nearest(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
