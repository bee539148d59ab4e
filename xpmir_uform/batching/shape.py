"""The hard limits of one microbatch."""

from collections.abc import Mapping, Sequence

import numpy as np
from experimaestro import Config, Meta

from xpmir_uform.base.configuration import default
from xpmir_uform.batching.bag_sizes import BagSize, Sizes


def refuse(bags: Sequence[BagSize], sizes: Sizes, limits: Mapping[str, int]) -> None:
    """Refuses bags that no microbatch can hold.

    Args:
        sizes: of ``bags``.
        limits: of columns of ``sizes``, by name.

    Raises:
        ValueError: naming the first such bag by its key.
    """
    for name, limit in limits.items():
        column = getattr(sizes, name)
        over = np.flatnonzero(column > limit)
        if len(over):
            what = "tokens in one item" if name == "longest" else name.replace("_", " ")
            raise ValueError(
                f"bag {bags[over[0]].key:#018x} has {column[over[0]]} {what} and a microbatch holds at most {limit}: "
                "raise that limit, of the batch shape or of a loss, or make the bag smaller"
            )


LIMITS = ("rows", "columns", "segments", "bags", "choices", "max_choices_per_item")
"""The fields of a batch shape."""


class BatchShape(Config):
    """What one microbatch on one device may hold at most; 0: no limit.

    Microbatches run without padding, so that ``rows`` and ``columns`` bound what a padded batch of that shape would
    hold: ``rows * columns`` tokens in all. ``columns`` alone bounds the length of each item.
    """

    __xpmid__ = "uform.batch-shape"

    rows: Meta[int] = default(0)
    """With ``columns``: a microbatch has at most ``rows * columns`` tokens"""

    columns: Meta[int] = default(0)
    """Tokens of one item"""

    segments: Meta[int] = default(0)
    """Items"""

    bags: Meta[int] = default(0)
    """Bags"""

    choices: Meta[int] = default(0)
    """Choices that the items offer, all together"""

    max_choices_per_item: Meta[int] = default(0)
    """Choices that one item may offer; an item with more is refused"""

    def __validate__(self):
        given = {name: getattr(self, name) for name in LIMITS}
        if min(given.values()) < 0:
            raise ValueError(f"the batch shape is {given}, expected no negative limit; 0 means no limit")
        if self.rows and not self.columns:
            raise ValueError(f"rows is {self.rows} without columns, expected both: tokens are bounded by their product")

    def limits(self) -> dict[str, int]:
        """The limits that are set, by the name of a column of :class:`~xpmir_uform.batching.bag_sizes.Sizes`."""
        named = {
            "longest": self.columns,
            "tokens": self.rows * self.columns,
            "items": self.segments,
            "bags": self.bags,
            "choices": self.choices,
        }
        return {name: limit for name, limit in named.items() if limit}
