"""Items and bags: the records that data sets hold, samplers yield and batchers move."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from PIL import Image

from xpmir_uform.base.keyed_random import key_of
from xpmir_uform.data.file_contents import file_bytes, picture_bytes
from xpmir_uform.data.validation import as_items, as_links, check_bag, check_item, whole
from xpmir_uform.data.vocabulary import Modality, Side

Link = tuple[int, int] | tuple[int, int, float]
"""``(anchor, other)`` or ``(anchor, other, weight)``, as positions in a bag's items."""


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of content.

    Args:
        modality: what ``content`` is.
        content: UTF-8 text or an encoded file; it is first read where it is decoded.
        key: the item's identity in its data set, 0 <= key < 2**64; every random draw about the item is keyed by it.
        side: its part in late interaction.
        group: its temperature group, at least 0.
        choices: legal answers, distinct byte values.
        targets: their probabilities, which sum to one within 1e-3; also as an array or tensor, such as a model's own
            answer. None are needed where the model is asked.

    Raises:
        ValueError: a field is not so; names it.
    """

    modality: Modality
    content: bytes
    key: int
    side: Side = Side.NONE
    group: int = 0
    choices: bytes = b""
    targets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", whole(self.key))
        object.__setattr__(self, "group", whole(self.group))
        if not isinstance(self.targets, tuple):
            given: Any = self.targets
            given = given.tolist() if hasattr(given, "tolist") else given
            object.__setattr__(self, "targets", tuple(given) if isinstance(given, Iterable) else (given,))
        check_item(self)

    @classmethod
    def text(cls, text: str, key: int | None = None, **others: Any) -> "Item":
        """A text item, keyed by its content unless ``key`` is given; ``others`` are the remaining fields.

        Raises:
            ValueError: no str; or a lone surrogate, as bytes that are no UTF-8 become in a command's arguments.
        """
        if not isinstance(text, str):
            advice = ": decode it as UTF-8" if isinstance(text, bytes) else ""
            raise ValueError(f"a text is a {type(text).__name__}, expected a str{advice}")
        try:
            content = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text {text[:80]!r} is no UTF-8 ({error.reason}): decode its bytes as UTF-8"
            ) from error
        return cls(Modality.TEXT, content, key_of(text) if key is None else key, **others)

    @classmethod
    def image(cls, picture: "str | os.PathLike | bytes | Image.Image", key: int | None = None, **others: Any) -> "Item":
        """An image item: the path of a file, its bytes, or a picture of Pillow, which becomes a PNG file.

        Args:
            picture: a file is read now, once.
            key: None: a key of the file's bytes.
            others: the remaining fields.

        Raises:
            ValueError: it is none of these, or the file cannot be read.
        """
        given = picture_bytes(picture) if isinstance(picture, Image.Image) else picture
        return cls._of_file(Modality.IMAGE, given, key, others)

    @classmethod
    def audio(cls, sound: str | os.PathLike | bytes, key: int | None = None, **others: Any) -> "Item":
        """A sound item, as :meth:`image` of a path or of the bytes of a file."""
        return cls._of_file(Modality.AUDIO, sound, key, others)

    @classmethod
    def video(cls, video: str | os.PathLike | bytes, key: int | None = None, **others: Any) -> "Item":
        """A video item, as :meth:`image` of a path or of the bytes of a file."""
        return cls._of_file(Modality.VIDEO, video, key, others)

    @classmethod
    def _of_file(cls, modality: Modality, source: Any, key: int | None, others: dict[str, Any]) -> "Item":
        name = modality.name.lower()
        content = file_bytes(source, name)
        return cls(modality, content, key_of(name, content) if key is None else key, **others)

    def __str__(self) -> str:
        return f"item {self.key:#018x} ({self.modality.name.lower()}, {len(self.content)} bytes)"


@dataclass(frozen=True, slots=True)
class Bag:
    """Items that belong together: they land on one device and in one microbatch.

    Args:
        items: at least one.
        attract, repel, ignore: directed links between positions in ``items``; a symmetric relation lists both
            directions.
        key: what the bag is about, 0 <= key < 2**64. Bags of one key are copies of each other, whatever items stand
            for it in each: they never repel. None: the keys of the items, in order. :class:`BagSampler` sets it.

    Raises:
        ValueError: a field is not so; names the bag by its first item.
    """

    items: tuple[Item, ...]
    attract: tuple[Link, ...] = ()
    repel: tuple[Link, ...] = ()
    ignore: tuple[Link, ...] = ()
    key: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", as_items(self.items))
        object.__setattr__(self, "key", whole(self.key))
        for name in ("attract", "repel", "ignore"):
            object.__setattr__(self, name, as_links(getattr(self, name)))
        check_bag(self)

    @property
    def identity(self) -> int:
        """The key, or that of the items."""
        return key_of(*(item.key for item in self.items)) if self.key is None else self.key

    @classmethod
    def alike(cls, items: Iterable[Item], key: int | None = None) -> "Bag":
        """Items that all attract one another, in a bag of this key.

        Raises:
            ValueError: something is no item, or there is none.
        """
        items = as_items(items)
        return cls(items, attract=tuple(permutations(range(len(items)), 2)), key=key)


def as_bags(bags: Any) -> list[Bag]:
    """Bags, as a list.

    Raises:
        ValueError: there is one bag, or something is no bag; says how to make one.
    """
    if isinstance(bags, Bag) or not isinstance(bags, Iterable):
        raise ValueError(f"got one {type(bags).__name__}; expected a sequence of bags: put it in a list")
    found = list(bags)
    for number, bag in enumerate(found):
        if not isinstance(bag, Bag):
            advice = "Bag.alike([...]) or Bag((...,)) makes one of items"
            raise ValueError(f"bag {number} is a {type(bag).__name__}; expected a Bag: {advice}")
    return found


def count_items(bags: Sequence[Bag]) -> int:
    """The number of items in ``bags``."""
    return sum(len(bag.items) for bag in bags)
