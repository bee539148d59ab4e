"""Training augmentation by keyed draws: the same step and item give the same segment.

Letters: H, W sides of a picture, C channels, T tokens of a text.
"""

from collections.abc import Mapping
from dataclasses import replace

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


def thinned(text: Segment, drop: float, draw: np.random.Generator) -> Segment:
    """The text without some of its tokens, each left out with probability ``drop``; at least one is kept."""
    kept = draw.random(text.tokens) >= drop
    kept[draw.integers(text.tokens)] = True
    return replace(text, values=text.values[kept], grid=(1, 1, int(kept.sum())))


class Augmentation(Config):
    """Moves a training picture by a few pixels and adds a little noise; leaves out a few bytes of a training text."""

    __xpmid__ = "uform.augmentation"

    shift: Param[int] = default(0)
    """Greatest move of a picture in pixels, up, down, left and right alike"""

    noise: Param[float] = default(0.0)
    """Standard deviation of the noise on a picture, in grey levels of 255"""

    drop: Param[float] = default(0.0)
    """Probability that a byte of a text is left out"""

    def __validate__(self):
        if self.shift < 0 or self.noise < 0 or not 0 <= self.drop < 1:
            raise ValueError(
                f"shift is {self.shift}, noise {self.noise} and drop {self.drop}, "
                "expected shift and noise of at least 0 and drop in [0, 1)"
            )

    def decode(self, item: Item, shapes: Mapping[Modality, ImageShape], seed: int, step: int) -> Segment:
        """The segment of ``item`` at ``step``."""
        draw = draws.generator(seed, draws.Purpose.AUGMENTATION, step, item.key)
        if item.modality is Modality.IMAGE and item.modality in shapes:
            shape = shapes[item.modality]
            return patches(self.picture(open_image(item, shape), draw), shape)
        segment = decode(item, shapes)
        return thinned(segment, self.drop, draw) if item.modality is Modality.TEXT and self.drop else segment

    def picture(self, picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """The augmented picture: (H, W, C)."""
        if self.shift:
            picture = shifted(picture, *draw.integers(-self.shift, self.shift, size=2, endpoint=True).tolist())
        return noisy(picture, self.noise, draw) if self.noise else picture
