"""Shapes: how each modality other than text is cut into the tokens of an encoder.

The decoder and the model share them, so that a saved model carries all that decoding its inputs needs.
"""

from math import isfinite

from experimaestro import Config, Constant, Param

from xpmir_uform.base.configuration import default


class ImageShape(Config):
    """Square patches of an image, read row by row."""

    __xpmid__ = "uform.image-shape"

    version: Constant[int] = 3
    """Of what decoding keeps of a file"""

    patch_side: Param[int]
    """Side of a patch, in pixels."""

    max_side: Param[int]
    """The longer side of an image after resizing, in pixels; at least ``patch_side``."""

    channels: Param[int] = default(3)
    """3 (RGB) or 1 (grey)."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of an image."""
        return (self.max_side // self.patch_side) ** 2

    @property
    def patch_values(self) -> int:
        """Number of values of one patch, ``patch_side ** 2 * channels``."""
        return self.patch_side**2 * self.channels

    def __post_init__(self):
        self.__validate__()

    def __validate__(self):
        _check_picture("an image", self)


class VideoShape(Config):
    """Tubes of a video: square patches through some frames, read frame by frame, then row by row."""

    __xpmid__ = "uform.video-shape"

    version: Constant[int] = 2
    """Of what decoding keeps of a file"""

    patch_side: Param[int]
    """Side of a patch, in pixels."""

    tube_frames: Param[int]
    """Frames of a tube, after the stride; the last frame is repeated to fill the last tube."""

    max_side: Param[int]
    """The longer side of a frame after resizing, in pixels; at least ``patch_side``."""

    max_frames: Param[int]
    """Most frames that are kept of a video, at least 1; one with more is refused."""

    frame_stride: Param[int] = default(1)
    """Every so many of the file's frames is kept, the first among them."""

    channels: Param[int] = default(3)
    """3 (RGB) or 1 (grey)."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of a video."""
        return -(-self.max_frames // self.tube_frames) * (self.max_side // self.patch_side) ** 2

    @property
    def patch_values(self) -> int:
        """Number of values of one tube, ``tube_frames * patch_side ** 2 * channels``."""
        return self.tube_frames * self.patch_side**2 * self.channels

    def __post_init__(self):
        self.__validate__()

    def __validate__(self):
        _check_picture("a video", self)
        if min(self.tube_frames, self.frame_stride, self.max_frames) < 1:
            raise ValueError(
                f"a video shape of tube_frames {self.tube_frames}, frame_stride {self.frame_stride} and max_frames "
                f"{self.max_frames} keeps no frame: give at least 1 each"
            )


class AudioShape(Config):
    """Chunks of a sound, one after another."""

    __xpmid__ = "uform.audio-shape"

    version: Constant[int] = 2
    """Of what decoding keeps of a file"""

    chunk_samples: Param[int]
    """Samples of a chunk; the last chunk is filled with zeros."""

    sample_rate: Param[int]
    """Samples of a second, in hertz, that every sound is resampled to."""

    max_seconds: Param[float]
    """Longest sound, in seconds; a longer one is refused."""

    @property
    def most_samples(self) -> int:
        """Most samples of a sound at ``sample_rate``."""
        return max(1, round(self.max_seconds * self.sample_rate))

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sound."""
        return -(-self.most_samples // self.chunk_samples)

    @property
    def patch_values(self) -> int:
        """Number of values of one chunk, ``chunk_samples``."""
        return self.chunk_samples

    def __post_init__(self):
        self.__validate__()

    def __validate__(self):
        if self.chunk_samples < 1 or self.sample_rate < 1 or not (self.max_seconds > 0 and isfinite(self.max_seconds)):
            raise ValueError(
                f"an audio shape of chunk_samples {self.chunk_samples}, sample_rate {self.sample_rate} and max_seconds "
                f"{self.max_seconds} holds no sound: give at least 1 of the first two, and seconds above 0"
            )


PictureShape = ImageShape | VideoShape
"""What has patches of pixels."""

Shape = ImageShape | VideoShape | AudioShape
"""Of any modality other than text."""


def _check_picture(name: str, shape: PictureShape) -> None:
    if shape.patch_side < 1 or shape.max_side < shape.patch_side:
        raise ValueError(
            f"{name} shape of patch_side {shape.patch_side} and max_side {shape.max_side} holds no patch: "
            "give 1 <= patch_side <= max_side"
        )
    if shape.channels not in (1, 3):
        raise ValueError(f"channels is {shape.channels}: give 3 (RGB) or 1 (grey)")
