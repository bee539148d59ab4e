"""Training augmentation by keyed draws: the same step and item give the same segment.

Letters: F frames of a video, H, W sides of a picture, C channels, S samples of a sound, T tokens of a text.
"""

from dataclasses import replace

import numpy as np
from experimaestro import Config, Param

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import check_least, default
from xpmir_uform.data.decoding.audio import chunks, open_audio
from xpmir_uform.data.decoding.image import open_image, patches
from xpmir_uform.data.decoding.registry import Shapes, decode
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.shapes import AudioShape
from xpmir_uform.data.decoding.video import open_video, tubes
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality


def shifted(picture: np.ndarray, down: int, right: int) -> np.ndarray:
    """(H, W, C), or (F, H, W, C): all moved alike by whole pixels, border rows and columns repeated into the gap."""
    height, width = picture.shape[-3:-1]
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return picture[..., rows[:, None], columns, :]


def noisy(values: np.ndarray, deviation: float, draw: np.random.Generator) -> np.ndarray:
    """float32 of the same shape: pixels or samples plus normal noise of ``deviation`` in their unit, not clipped."""
    noise = draw.standard_normal(values.shape, dtype=np.float32)
    return values.astype(np.float32) + np.float32(deviation) * noise


def delayed(samples: np.ndarray, most: int, draw: np.random.Generator) -> np.ndarray:
    """(S + n,) of (S,): n samples of silence before a sound, n at most ``most``, each as likely."""
    return np.concatenate([np.zeros(int(draw.integers(most, endpoint=True)), samples.dtype), samples])


def thinned(text: Segment, drop: float, draw: np.random.Generator) -> Segment:
    """The text without some of its tokens, each left out with probability ``drop``; at least one is kept."""
    kept = draw.random(text.tokens) >= drop
    kept[draw.integers(text.tokens)] = True
    return replace(text, values=text.values[kept], grid=(1, 1, int(kept.sum())))


class Augmentation(Config):
    """Moves training pictures and videos by a few pixels, delays sounds a little, adds a little noise to all three, and
    leaves out a few bytes of training texts."""

    __xpmid__ = "uform.augmentation"

    shift: Param[int] = default(0)
    """Greatest move of a picture, or of all frames of a video, in pixels, up, down, left and right alike"""

    noise: Param[float] = default(0.0)
    """Standard deviation of the noise on pictures and videos, in grey levels of 255"""

    hiss: Param[float] = default(0.0)
    """Standard deviation of the noise on sounds, whose samples lie in -1..1"""

    delay: Param[float] = default(0.0)
    """Longest silence before a sound, in seconds; it shifts what stands in each chunk"""

    drop: Param[float] = default(0.0)
    """Probability that a byte of a text is left out"""

    def __validate__(self):
        check_least(0, shift=self.shift, noise=self.noise, hiss=self.hiss, delay=self.delay)
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}, expected in [0, 1)")

    def decode(self, item: Item, shapes: Shapes, seed: int, step: int) -> Segment:
        """The segment of ``item`` at ``step``."""
        shape = shapes.get(item.modality)
        draw = keyed_random.generator(seed, keyed_random.Purpose.AUGMENTATION, step, item.key)
        if shape is not None and item.modality is Modality.IMAGE:
            return patches(self.picture(open_image(item, shape), draw), shape)
        if shape is not None and item.modality is Modality.VIDEO:
            return tubes(self.picture(open_video(item, shape), draw), shape)
        if shape is not None and item.modality is Modality.AUDIO:
            return chunks(self.sound(open_audio(item, shape), shape, draw), shape)
        segment = decode(item, shapes)
        return thinned(segment, self.drop, draw) if item.modality is Modality.TEXT and self.drop else segment

    def picture(self, picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """The augmented picture (H, W, C) or video (F, H, W, C)."""
        if self.shift:
            picture = shifted(picture, *draw.integers(-self.shift, self.shift, size=2, endpoint=True).tolist())
        return noisy(picture, self.noise, draw) if self.noise else picture

    def sound(self, samples: np.ndarray, shape: AudioShape, draw: np.random.Generator) -> np.ndarray:
        """The augmented sound (S,), no longer than ``shape`` allows."""
        if self.delay:
            most = min(round(self.delay * shape.sample_rate), shape.most_samples - len(samples))
            samples = delayed(samples, most, draw)
        return noisy(samples, self.hiss, draw) if self.hiss else samples
