"""Sampling: the bags of step t are a pure function of (seed, t).

The bags of one epoch follow a fresh keyed permutation of the data set; epochs follow one another without a gap, so that
every bag is seen equally often whatever the batch size. The whole state is the number of the next step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
from experimaestro import Config, Constant, Param, copyconfig
from xpm_torch import Sampler

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import default
from xpmir_uform.data.items import Bag

ON_BAD_ITEM = ("fail", "skip")


def places(seed: int, step: int, batch_size: int, count: int) -> Iterator[tuple[int, int]]:
    """The (epoch, index) of each of the ``batch_size`` bags of ``step``, out of ``count``."""
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, count)
        yield epoch, int(keyed_random.permutation(seed, keyed_random.Purpose.ORDER, epoch, count)[place])


class OtherData(ValueError):
    """The data of this machine are not those of the configuration."""


class BagSource(Config, ABC):
    """A data set of bags."""

    __xpmid__ = "uform.bag-source"

    @abstractmethod
    def __len__(self) -> int:
        """The number of bags."""

    @abstractmethod
    def bag(self, index: int, seed: int, epoch: int) -> Bag:
        """Bag ``index``, a pure function of its arguments: what it draws is keyed by (seed, epoch, what it is about).

        Copies of one bag in a batch know each other by ``index``, or by ``Bag.key`` where it is given.
        """


def check_size(count: int, batch_size: int) -> None:
    """Refuses steps that take more bags than there are.

    Raises:
        ValueError: with both numbers.
    """
    if not count:
        raise ValueError("the data set is empty, expected at least one bag: hold out less, or add data")
    if not 0 < batch_size <= count:
        raise ValueError(
            f"batch_size is {batch_size}, expected 1 to {count}, the number of bags in the data set: "
            "lower batch_size or add data"
        )


_SIZES: dict[bytes, int | None] = {}
"""What :func:`known_size` found, by identifier: an experiment trains many times on one data set."""


def known_size(source: BagSource) -> int | None:
    """The number of bags of a data set as a configuration, which stays as it is; None: its data are not here.

    Raises:
        ValueError: as the data set does, if it is impossible.
    """
    name = cast(Any, source).__xpm__.identifier.all
    if name not in _SIZES:
        try:
            _SIZES[name] = len(cast(Any, _copied(source)).instance())
        except (ImportError, OSError, OtherData):
            _SIZES[name] = None
    return _SIZES[name]


def _copied(value: Any) -> Any:
    """A configuration and all that it holds, anew: an instance of the copy does not seal the original."""
    if isinstance(value, Config):
        held = cast(Any, value).__xpm__.values
        return copyconfig(value, **{name: _copied(part) for name, part in held.items()})
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


class BagSampler(Sampler):
    """Yields the bags of each step in keyed order."""

    __xpmid__ = "uform.bag-sampler"

    source: Param[BagSource]
    """The data set"""

    deduplicate: Param[bool] = default(True)
    """Whether items with equal content, and copies of one bag, are never each other's ambient negatives"""

    on_bad_item: Param[str] = default("fail")
    """What an item that cannot be read does: ``fail`` stops the run and names it; ``skip`` leaves it out, counted, with
    what :func:`~xpmir_uform.data.unreadable_bags.without` says, and changes no other item's place"""

    version: Constant[int] = 2
    """Of the batches: 2 knows a bag again by its place in the data set, where a batch takes two epochs' copies of it"""

    def __validate__(self):
        if self.on_bad_item not in ON_BAD_ITEM:
            raise ValueError(f"on_bad_item is {self.on_bad_item!r}, expected one of {', '.join(ON_BAD_ITEM)}")

    def initialize(self, random: np.random.RandomState | None):
        """Takes the seed of all draws of this run from ``random``."""
        super().initialize(random)
        self.seed = keyed_random.seed_from(self.random)

    def bags(self, step: int, batch_size: int) -> list[Bag]:
        """The ``batch_size`` bags of ``step``.

        Raises:
            ValueError: the data set has fewer bags than one step takes.
        """
        count = len(self.source)
        check_size(count, batch_size)
        found = places(self.seed, step, batch_size, count)
        return [_keyed(self.source.bag(index, self.seed, epoch), index) for epoch, index in found]


def _keyed(bag: Bag, index: int) -> Bag:
    """``bag`` with its place in the data set as its key, unless it has one."""
    return replace(bag, key=index) if bag.key is None else bag
