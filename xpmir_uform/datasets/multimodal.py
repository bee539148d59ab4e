"""Emoji that are seen, read, heard and seen moving: pictures, names, spoken names and moving pictures.

Names and pictures are those of the emoji collection; names are spoken by eSpeak NG and pictures moved by PyAV when they
are first asked for, as WAV and Matroska files that stay in memory (31 and 8 kB each on average). Speech and motion vary
in training; held-out emoji speak with the first voice and the first speed, and move each in its own way.
"""

import io
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import metadata
from typing import TypeVar

import numpy as np
from experimaestro import Config, Param
from PIL import Image

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import check_sha256, default
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.problems import Retrieval, RetrievalSet
from xpmir_uform.data.sampling import BagSource
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.datasets.emoji import Emoji, EmojiCollection
from xpmir_uform.datasets.motion import MOTIONS, encode, move
from xpmir_uform.datasets.speech import speak, speech_fingerprint, speech_version

MODALITIES = ("text", "image", "video", "audio")
VOICES = ("en-us", "en-us+f2", "en-us+m3", "en-gb-scotland")
SPEEDS = (175, 210)
FRAMES = 8

T = TypeVar("T")


def read(picture: bytes) -> Image.Image:
    """A picture file."""
    return Image.open(io.BytesIO(picture))


def one_of(draw: np.random.Generator, options: Sequence[T]) -> T:
    """One of ``options``."""
    return options[int(draw.integers(len(options)))]


class MultimodalEmoji(Config):
    """The emoji of a collection in four modalities."""

    __xpmid__ = "uform.multimodal-emoji"

    collection: Param[EmojiCollection]
    """Their names, the English one first, their pictures, and which are held out"""

    speech_sha256: Param[str]
    """Fingerprint of the engine that speaks"""

    speech_version: Param[str]
    """Version of the package ``espeakng-loader``"""

    video_version: Param[str]
    """Version of the package ``av``, which writes the videos; they are lossless"""

    voices: Param[list[str]]
    """Voices of eSpeak NG; held-out emoji speak with the first"""

    speeds: Param[list[int]]
    """Words per minute; held-out emoji speak with the first"""

    def __validate__(self):
        if not self.voices or not self.speeds or min(self.speeds) < 1:
            given = f"voices are {self.voices} and speeds {self.speeds}"
            raise ValueError(f"{given}, expected at least one of each, speeds above 0")
        check_sha256("speech_sha256", self.speech_sha256)

    @classmethod
    def installed(
        cls, collection: EmojiCollection, voices: Sequence[str] = VOICES, speeds: Sequence[int] = SPEEDS
    ) -> "MultimodalEmoji":
        """The emoji as the installed packages speak and move them, as a configuration.

        Raises:
            ModuleNotFoundError: ``espeakng-loader`` is not installed.
            ValueError: the engine has no such voice, or the speed is out of range.
        """
        try:
            for voice in voices:
                speak("a", voice, SPEEDS[0])
            for speed in speeds:
                speak("a", VOICES[0], speed)
            return cls.C(
                collection=collection,
                speech_sha256=speech_fingerprint(),
                speech_version=speech_version(),
                video_version=metadata.version("av"),
                voices=list(voices),
                speeds=list(speeds),
            )
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: install the extra, pip install 'xpmir-uform[demo-audio]'") from error

    def training(self, emoji: Emoji, modality: str, seed: int, epoch: int) -> Item:
        """An item for training; how it speaks or moves is keyed by (seed, epoch, emoji, modality)."""
        draw = keyed_random.generator(seed, keyed_random.Purpose.BAG, epoch, keyed_random.key_of(modality, emoji.key))
        if modality == "audio":
            return self.audio(emoji, one_of(draw, self.voices), one_of(draw, self.speeds))
        if modality == "video":
            return self.video(emoji, one_of(draw, list(MOTIONS)))
        return self.still(emoji, modality)

    def test(self, emoji: Emoji, modality: str) -> Item:
        """An item for testing: the first voice and speed, and a motion by the emoji's key."""
        if modality == "audio":
            return self.audio(emoji, self.voices[0], self.speeds[0])
        if modality == "video":
            return self.video(emoji, list(MOTIONS)[emoji.key % len(MOTIONS)])
        return self.still(emoji, modality)

    def still(self, emoji: Emoji, modality: str) -> Item:
        """The name or the picture."""
        return emoji.image() if modality == "image" else emoji.name(self.language)

    def audio(self, emoji: Emoji, voice: str, speed: int) -> Item:
        """The spoken name."""
        key = keyed_random.key_of("emoji-speech", voice, speed, emoji.characters)
        return self.kept(Modality.AUDIO, key, lambda: speak(emoji.names[self.language], voice, speed))

    def video(self, emoji: Emoji, motion: str) -> Item:
        """The picture, moving."""
        key = keyed_random.key_of("emoji-video", motion, emoji.characters)
        return self.kept(Modality.VIDEO, key, lambda: encode(move(read(emoji.picture), motion, FRAMES)))

    def kept(self, modality: Modality, key: int, make: Callable[[], bytes]) -> Item:
        """An item that is made once."""
        if key not in self.made:
            self.made[key] = Item(modality, make(), key)
        return self.made[key]

    @property
    def language(self) -> str:
        """The language of the names: the first of the collection."""
        return self.collection.languages[0]

    @cached_property
    def made(self) -> dict[int, Item]:
        """What has been said and moved so far, by key.

        Raises:
            ValueError: the installed engine is not the one of this configuration.
        """
        found = speech_fingerprint()
        if found != self.speech_sha256:
            raise ValueError(
                f"the installed eSpeak NG has sha256 {found}, expected {self.speech_sha256}: install "
                f"espeakng-loader=={self.speech_version}, or make a new configuration"
            )
        return {}


class MultimodalBags(BagSource):
    """A bag is one emoji in some of the four modalities, drawn anew each epoch, all attracting."""

    __xpmid__ = "uform.multimodal-bags"

    emoji: Param[MultimodalEmoji]
    """Where the items come from"""

    size: Param[int] = default(3)
    """How many modalities a bag holds"""

    def __validate__(self):
        if not 1 <= self.size <= len(MODALITIES):
            raise ValueError(f"size is {self.size}, expected 1 to {len(MODALITIES)}, the number of modalities")

    @cached_property
    def train(self) -> list[Emoji]:
        """The training emoji."""
        return self.emoji.collection.train()

    def __len__(self) -> int:
        return len(self.train)

    def bag(self, index: int, seed: int, epoch: int) -> Bag:
        """The bag of one training emoji; its modalities are keyed by (seed, epoch, emoji)."""
        emoji = self.train[index]
        draw = keyed_random.generator(seed, keyed_random.Purpose.BAG, epoch, emoji.key)
        chosen = keyed_random.choose(draw, MODALITIES, self.size)
        return Bag.alike([self.emoji.training(emoji, modality, seed, epoch) for modality in chosen])


class MultimodalRetrieval(RetrievalSet):
    """Held-out emoji in one modality searched by themselves in another; each query has one relevant document."""

    __xpmid__ = "uform.multimodal-retrieval"

    emoji: Param[MultimodalEmoji]
    """Where the items come from"""

    queries: Param[str]
    """``text``, ``image``, ``video`` or ``audio``"""

    documents: Param[str]
    """Likewise, another"""

    def __validate__(self):
        if self.queries == self.documents or not {self.queries, self.documents} <= set(MODALITIES):
            raise ValueError(
                f"queries are {self.queries!r}, documents {self.documents!r}, expected two of {', '.join(MODALITIES)}"
            )

    def load(self) -> Retrieval:
        """Queries and documents of the held-out emoji."""
        self.__validate__()
        held_out = self.emoji.collection.test()
        queries, documents = ([self.emoji.test(e, name) for e in held_out] for name in (self.queries, self.documents))
        return Retrieval(queries, documents, [[number] for number in range(len(held_out))])
