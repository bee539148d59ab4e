"""Which bags share a microbatch.

Bags are atomic, and heavy ones come first: a microbatch is opened for the heaviest bag that has none, and takes, going
down, each bag that still fits. That is first-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973: at
most 11/9 of the fewest bins, plus one), filled bin by bin.

Letters: B bags, R hard limits.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import le, sub

import numpy as np
from experimaestro import Config

from xpmir_uform.batching.bag_sizes import BagSize, Sizes
from xpmir_uform.batching.cost import CostModel
from xpmir_uform.batching.shape import BatchShape, refuse


def first_fit(costs: np.ndarray, budget: float, needs: np.ndarray, limits: Sequence[int]) -> list[list[int]]:
    """The numbers of the bags of each microbatch.

    Args:
        costs: (B,) float, at least 0.
        budget: what the costs of a microbatch sum to at most; a bag that costs more comes alone.
        needs: (B, R) int, no row above ``limits``.
        limits: what each column sums to at most.

    Returns:
        Ascending numbers, microbatch by microbatch. Bags of equal cost and needs keep their order, and no other order
        of the bags is looked at. O(B log B) in all.
    """
    heavy_first = np.lexsort((*-needs.T, -costs))
    falling = (-costs[heavy_first]).tolist()
    rows = needs[heavy_first].tolist()
    numbers = heavy_first.tolist()
    least = needs.min(axis=0, initial=np.iinfo(np.int64).max).tolist()
    free = list(range(len(numbers) + 1))
    parts = []
    while (place := next_free(free, 0)) < len(numbers):
        part = fill(place, free, falling, budget, rows, limits, least)
        parts.append(sorted([numbers[place] for place in part]))
    return parts


def fill(
    place: int,
    free: list[int],
    falling: Sequence[float],
    budget: float,
    rows: Sequence[Sequence[int]],
    limits: Sequence[int],
    least: Sequence[int],
) -> list[int]:
    """The places of one microbatch, whose first is ``place``; they are taken from ``free``.

    Args:
        falling: negative costs, ascending.
        rows: needs in the same order.
        least: below it nothing fits.

    Bags that the budget excludes are skipped at once. Where another limit excludes one, ever longer steps are taken
    towards the lighter ones, so that a microbatch costs O(log B) beyond its bags.
    """
    part: list[int] = []
    step = 1
    while place < len(rows):
        if part and falling[place] < -budget:
            place = next_free(free, bisect_left(falling, -budget, lo=place))
        elif part and not all(map(le, rows[place], limits)):
            place, step = next_free(free, min(len(rows), place + step)), 2 * step
        else:
            part.append(place)
            free[place] = place + 1
            budget += falling[place]
            limits = list(map(sub, limits, rows[place]))
            if not all(map(le, least, limits)):
                break
            place, step = next_free(free, place + 1), 1
    return part


def next_free(free: list[int], place: int) -> int:
    """The first place from ``place`` on that is not taken; paths to it are halved on the way."""
    while free[place] != place:
        free[place] = free[free[place]]
        place = free[place]
    return place


def pack(
    bags: Sequence[BagSize], limits: Mapping[str, int], model: CostModel, budget: float = float("inf")
) -> list[list[int]]:
    """The numbers of the bags of each microbatch, ascending; as few microbatches as first-fit decreasing needs.

    Args:
        limits: hard limits of the columns of :class:`~xpmir_uform.batching.bag_sizes.Sizes`; ``longest`` is of an item.
        model: what a microbatch costs.
        budget: what it may cost; a bag that alone costs more comes alone.

    Raises:
        ValueError: a bag alone exceeds a hard limit; the message gives its key.
    """
    if not bags:
        return []
    sizes = Sizes.of(bags)
    refuse(bags, sizes, limits)
    room = budget - model.constant
    if model == CostModel():
        room = min(room, limits.get("tokens", room))
    summed = [name for name in limits if name != "longest"]
    needs = (
        np.stack([getattr(sizes, name) for name in summed], axis=1) if summed else np.zeros((len(bags), 0), np.int64)
    )
    return first_fit(model.of_bags(sizes), room, needs, [limits[name] for name in summed])


class BagPacker(Config):
    """Packs the heaviest bags first into as few microbatches as limits and memory allow."""

    __xpmid__ = "uform.bag-packer"

    def plan(
        self,
        bags: Sequence[BagSize],
        shape: BatchShape | None,
        model: CostModel,
        budget: float,
        limits: Mapping[str, int] | None = None,
    ) -> list[list[int]]:
        """The numbers of the bags of each microbatch: every bag once, ascending within a microbatch.

        Args:
            limits: beside those of ``shape``, of further columns of :class:`~xpmir_uform.batching.bag_sizes.Sizes`.

        Raises:
            ValueError: a bag alone exceeds a limit; the message gives its key.
        """
        return pack(bags, {**(shape.limits() if shape else {}), **(limits or {})}, model, budget)
