"""Training augmentation of pictures, by keyed draws: the same step and item give the same picture.

Letters: H, W sides of a picture, C channels.
"""

from collections.abc import Mapping

import numpy as np
from experimaestro import Config, Param

from xpmir_uform.data import draws
from xpmir_uform.data.decoding import decode
from xpmir_uform.data.decoding.image import open_image, patches
from xpmir_uform.data.fields import default
from xpmir_uform.data.items import Item
from xpmir_uform.data.segments import Segment
from xpmir_uform.data.shapes import ImageShape
from xpmir_uform.data.vocabulary import Modality


def shifted(picture: np.ndarray, down: int, right: int) -> np.ndarray:
    """(H, W, C): the picture moved by whole pixels, its border rows and columns repeated into the gap."""
    height, width = picture.shape[:2]
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return picture[rows[:, None], columns]


def noisy(picture: np.ndarray, deviation: float, draw: np.random.Generator) -> np.ndarray:
    """(H, W, C) float32: the picture plus normal noise of ``deviation`` grey levels, not clipped."""
    noise = draw.standard_normal(picture.shape, dtype=np.float32)
    return picture.astype(np.float32) + np.float32(deviation) * noise


class PictureAugmentation(Config):
    """Moves a training picture by a few pixels and adds a little noise."""

    __xpmid__ = "uform.picture-augmentation"

    shift: Param[int] = default(2)
    """Greatest move in pixels, up, down, left and right alike"""

    noise: Param[float] = default(0.0)
    """Standard deviation of the noise, in grey levels of 255"""

    def __call__(self, picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """The augmented picture: (H, W, C)."""
        down, right = draw.integers(-self.shift, self.shift, size=2, endpoint=True).tolist()
        picture = shifted(picture, down, right)
        return noisy(picture, self.noise, draw) if self.noise else picture

    def decode(self, item: Item, shapes: Mapping[Modality, ImageShape], seed: int, step: int) -> Segment:
        """The segment of ``item`` at ``step``: other modalities than pictures are left as they are."""
        shape = shapes.get(Modality.IMAGE)
        if item.modality is not Modality.IMAGE or shape is None:
            return decode(item, shapes)
        draw = draws.generator(seed, draws.Purpose.AUGMENTATION, step, item.key)
        return patches(self(open_image(item, shape), draw), shape)
