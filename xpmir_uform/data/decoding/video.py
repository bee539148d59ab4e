"""Videos of any size, ratio and length become whole tubes.

F frames that are kept, H rows and W columns of pixels, C channels, T tubes (tokens), P values of one tube.
"""

from collections.abc import Iterator

import numpy as np
from av import VideoFrame
from PIL import Image

from xpmir_uform.data.decoding.chains import parts_of
from xpmir_uform.data.decoding.image import MIDDLE, as_patches, whole_patches
from xpmir_uform.data.decoding.media import frames, reading, refusing
from xpmir_uform.data.decoding.pixels import flatten
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.shapes import VideoShape
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

QUARTER_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
"""How a stored frame is turned, by its rotation in degrees, counter-clockwise."""


def decode(item: Item, shape: VideoShape) -> Segment:
    """The tubes of a video file: :func:`open_video`, then :func:`tubes`.

    Raises:
        UnreadableItem: the file is of no known format, is truncated or damaged, or has no frame or too many.
    """
    return tubes(open_video(item, shape), shape)


def open_video(item: Item, shape: VideoShape) -> np.ndarray:
    """(F, H, W, C) uint8: every ``frame_stride``-th frame of a video file from the first on, upright, on white.

    Frames are counted as they are shown: those that an edit list leaves out are not, and where the rate varies each
    counts once, however long it is shown. All are resized as an image of the first one's size is. Pixels are taken as
    square.

    Raises:
        UnreadableItem: as in :func:`decode`.
    """
    kept: list[np.ndarray] = []
    with refusing(item):
        for number, frame in enumerate(_shown(item)):
            if number % shape.frame_stride:
                continue
            if len(kept) == shape.max_frames:
                raise ValueError(_too_long(shape))
            picture = _upright(frame, shape.channels)
            rows, columns = _grid(kept[0] if kept else None, picture, shape)
            kept.append(as_patches(picture, rows, columns, shape))
        if not kept:
            raise ValueError("it has no frame")
    return np.stack(kept)


def tubes(pixels: np.ndarray, shape: VideoShape) -> Segment:
    """Cuts frames into standardised tubes, tube row by tube row; the last frame is repeated to fill the last tubes.

    Args:
        pixels: (F, H, W, C) of any dtype, values in 0..255; H and W are multiples of ``patch_side``.
        shape: of the encoder.

    Returns:
        values (T, P) float32, x / 127.5 - 1, P in the order frame, row, column, channel; grid
        (ceil(F / tube_frames), H / patch_side, W / patch_side).

    Raises:
        ValueError: another number of channels, or sides that are not whole patches.
    """
    side, depth, channels = shape.patch_side, shape.tube_frames, shape.channels
    if pixels.ndim != 4 or pixels.shape[3] != channels or not pixels.size or any(n % side for n in pixels.shape[1:3]):
        raise ValueError(
            f"pixels have shape {pixels.shape}; expected (F, H, W, {channels}), H and W multiples of {side}. "
            "open_video() resizes to whole patches."
        )
    count, height, width = pixels.shape[:3]
    layers, rows, columns = -(-count // depth), height // side, width // side
    filled = pixels[np.minimum(np.arange(layers * depth), count - 1)]
    cut = filled.reshape(layers, depth, rows, side, columns, side, channels).transpose(0, 2, 4, 1, 3, 5, 6)
    values = cut.reshape(layers * rows * columns, -1).astype(np.float32) / MIDDLE - 1
    return Segment(Modality.VIDEO, values, (layers, rows, columns))


def _shown(item: Item) -> Iterator[VideoFrame]:
    """The frames that a player shows, of a chain of Ogg files those of each part."""
    for content in parts_of(item.content):
        with reading(item, "video", content) as (container, stream):
            yield from frames(container, stream)


def _too_long(shape: VideoShape) -> str:
    stride = f" of every {shape.frame_stride}" if shape.frame_stride > 1 else ""
    return f"it has more than {shape.max_frames} frames{stride}, the limit of the video shape (max_frames)"


def _upright(frame: VideoFrame, channels: int) -> Image.Image:
    """A frame as it is to be shown, in mode RGB or L."""
    transparent = any(component.is_alpha for component in frame.format.components) or frame.format.has_palette
    picture = Image.fromarray(frame.to_ndarray(format="rgba" if transparent else "rgb24", threads=1))
    turn = QUARTER_TURNS.get(frame.rotation % 360)
    picture = flatten(picture, channels)
    return picture if turn is None else picture.transpose(turn)


def _grid(first: np.ndarray | None, picture: Image.Image, shape: VideoShape) -> tuple[int, int]:
    if first is None:
        return whole_patches(picture.height, picture.width, shape)
    return first.shape[0] // shape.patch_side, first.shape[1] // shape.patch_side
