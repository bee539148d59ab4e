"""Motion: a picture that pans, zooms or turns, as a small video file in memory.

Letters: F frames, H, W sides of the picture.
"""

import io
from dataclasses import dataclass
from fractions import Fraction
from math import cos, radians, sin
from typing import cast

import av
import numpy as np
from av.video import VideoStream
from PIL import Image

FRAMES_PER_SECOND = 8
SHRINK = 2
"""A frame is drawn at the size of the picture and then made smaller by this factor, which smooths its edges."""
CODEC, PIXELS = "ffv1", "bgr0"
"""Lossless: the decoded frames are the drawn ones."""


@dataclass(frozen=True, slots=True)
class View:
    """How a picture is seen in one frame.

    Args:
        right, down: where its centre lies, from the frame's, in sides of the picture.
        zoom: its size.
        turn: clockwise, in degrees.
    """

    right: float = 0.0
    down: float = 0.0
    zoom: float = 1.0
    turn: float = 0.0

    def between(self, other: "View", share: float) -> "View":
        """The view at ``share`` of the way to ``other``."""
        return View(*(a + share * (b - a) for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        """The fields in order."""
        return self.right, self.down, self.zoom, self.turn


MOTIONS: dict[str, tuple[View, View]] = {
    "left": (View(right=0.125), View(right=-0.125)),
    "right": (View(right=-0.125), View(right=0.125)),
    "up": (View(down=0.125), View(down=-0.125)),
    "down": (View(down=-0.125), View(down=0.125)),
    "nearer": (View(zoom=0.8), View(zoom=1.2)),
    "farther": (View(zoom=1.2), View(zoom=0.8)),
    "clockwise": (View(turn=-20.0), View(turn=20.0)),
    "anticlockwise": (View(turn=20.0), View(turn=-20.0)),
}
"""The first and the last view of each motion, which is even in between."""


def move(picture: Image.Image, motion: str, frames: int) -> np.ndarray:
    """(F, H / 2, W / 2, 3) uint8: the picture moving over white.

    Raises:
        ValueError: there is no such motion, or less than one frame.
    """
    if motion not in MOTIONS:
        raise ValueError(f"motion is {motion!r}, expected one of {', '.join(MOTIONS)}")
    if frames < 1:
        raise ValueError(f"frames is {frames}, expected at least 1")
    first, last = MOTIONS[motion]
    picture = picture.convert("RGB")
    return np.stack([_seen(picture, first.between(last, number / max(1, frames - 1))) for number in range(frames)])


def encode(frames: np.ndarray) -> bytes:
    """A video file of (F, H, W, 3) uint8 frames: FFV1 in Matroska, the same bytes for the same frames."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska", options={"fflags": "+bitexact"}) as container:
        stream = cast(VideoStream, container.add_stream(CODEC, rate=FRAMES_PER_SECOND))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = PIXELS
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        stream.thread_count = 1
        stream.options = {"flags": "+bitexact"}
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _seen(picture: Image.Image, view: View) -> np.ndarray:
    """One frame: each of its pixels looks up where in the picture it lies."""
    width, height = picture.size
    along, across = cos(radians(view.turn)) / view.zoom, sin(radians(view.turn)) / view.zoom
    x, y = width * (0.5 + view.right), height * (0.5 + view.down)
    back = (along, across, width / 2 - along * x - across * y, -across, along, height / 2 + across * x - along * y)
    frame = picture.transform(picture.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR, fillcolor="white")
    return np.asarray(frame.reduce(SHRINK))
