"""What is kept of a step's bags when some of their items cannot be read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xpmir_uform.data.decoding.registry import UnreadableItem
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Bag, Item, Link


@dataclass(frozen=True, slots=True)
class Salvage:
    """The readable part of some bags.

    Args:
        bags: in their order, as :func:`without` leaves them.
        segments: of every item in ``bags``, by its ``id``.
        unreadable: why each item that cannot be read is left out; the message names its key.
    """

    bags: list[Bag]
    segments: dict[int, Segment]
    unreadable: list[str]

    def segment(self, item: Item) -> Segment:
        """The decoded item, one of ``bags``."""
        return self.segments[id(item)]


def salvage(bags: Sequence[Bag], decode: Callable[[Item], Segment]) -> Salvage:
    """Decodes every item of ``bags`` and leaves out what cannot be read.

    It is a function of the bags alone, so that ranks that do it for the whole global batch agree about it without a
    word between them.

    Args:
        bags: of a global batch.
        decode: raises :class:`UnreadableItem` for what cannot be read; other errors pass.
    """
    kept, segments, unreadable = [], {}, []
    for bag in bags:
        bad = set()
        for place, item in enumerate(bag.items):
            try:
                segments[id(item)] = decode(item)
            except UnreadableItem as error:
                bad.add(place)
                unreadable.append(str(error))
        rest = without(bag, bad)
        if rest is not None:
            kept.append(rest)
    return Salvage(kept, segments, unreadable)


def without(bag: Bag, bad: set[int]) -> Bag | None:
    """``bag`` without the items at the places ``bad``, and without their links.

    An item that attracted others, or was attracted, and now has none of them left goes too: a query without its
    positives teaches nothing. So does a bag of which no item is left, or no attract link where it had one.
    """
    if not bad:
        return bag
    attract = [link for link in bag.attract if not bad.intersection(link[:2])]
    widowed = _ends(bag.attract) - _ends(attract)
    kept = [place for place in range(len(bag.items)) if place not in bad and place not in widowed]
    if not kept or (bag.attract and not attract):
        return None
    moved = {old: new for new, old in enumerate(kept)}
    return replace(
        bag,
        items=tuple(bag.items[place] for place in kept),
        attract=_moved(bag.attract, moved),
        repel=_moved(bag.repel, moved),
        ignore=_moved(bag.ignore, moved),
    )


def _ends(links: Sequence[Link]) -> set[int]:
    return {place for link in links for place in link[:2]}


def _moved(links: Sequence[Link], moved: dict[int, int]) -> tuple[Link, ...]:
    """The links between kept items, by their new places."""
    kept = (link for link in links if link[0] in moved and link[1] in moved)
    return tuple((moved[link[0]], moved[link[1]], *link[2:]) for link in kept)
