"""Items and bags: the records that data sets hold, samplers yield and batchers move."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from xpmir_uform.data.draws import key_of
from xpmir_uform.data.vocabulary import Modality, Side

Link = tuple[int, int] | tuple[int, int, float]
"""``(anchor, other)`` or ``(anchor, other, weight)``, as positions in a bag's items."""


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of content.

    Args:
        modality: what ``content`` is.
        content: UTF-8 text or an encoded file.
        key: the item's identity in its data set, 0 <= key < 2**64; every random draw about the item is keyed by it.
        side: its part in late interaction.
        group: its temperature group.
        choices: legal answers, distinct byte values.
        targets: their probabilities, which sum to one; also as an array or tensor, such as a model's own answer.
    """

    modality: Modality
    content: bytes
    key: int
    side: Side = Side.NONE
    group: int = 0
    choices: bytes = b""
    targets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.targets, tuple):
            given: Any = self.targets
            given = given.tolist() if hasattr(given, "tolist") else given
            object.__setattr__(self, "targets", tuple(given) if isinstance(given, Iterable) else (given,))

    @classmethod
    def text(cls, text: str, key: int | None = None, **others) -> "Item":
        """A text item, keyed by its content unless ``key`` is given; ``others`` are the remaining fields.

        Raises:
            ValueError: a lone surrogate, as bytes that are no UTF-8 become in a command's arguments.
        """
        try:
            content = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text {text[:80]!r} is no UTF-8 ({error.reason}): decode its bytes as UTF-8"
            ) from error
        return cls(Modality.TEXT, content, key_of(text) if key is None else key, **others)

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
    """

    items: tuple[Item, ...]
    attract: tuple[Link, ...] = ()
    repel: tuple[Link, ...] = ()
    ignore: tuple[Link, ...] = ()
    key: int | None = None

    @property
    def identity(self) -> int:
        """The key, or that of the items."""
        return key_of(*(item.key for item in self.items)) if self.key is None else self.key

    @classmethod
    def alike(cls, items: Iterable[Item]) -> "Bag":
        """Items that all attract one another."""
        items = tuple(items)
        return cls(items, attract=tuple(permutations(range(len(items)), 2)))


def count_items(bags: Sequence[Bag]) -> int:
    """The number of items in ``bags``."""
    return sum(len(bag.items) for bag in bags)
