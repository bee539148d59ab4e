"""Shapes: how each modality other than text is cut into the tokens of an encoder.

The decoder and the model share them, so that a saved model carries all that decoding its inputs needs.
"""

from experimaestro import Config, Param

from xpmir_uform.data.fields import default


class ImageShape(Config):
    """Square patches of an image, read row by row."""

    __xpmid__ = "uform.image-shape"

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
        if self.patch_side < 1 or self.max_side < self.patch_side:
            raise ValueError(
                f"an image shape of patch_side {self.patch_side} and max_side {self.max_side} holds no patch: "
                "give 1 <= patch_side <= max_side"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels}: give 3 (RGB) or 1 (grey)")
