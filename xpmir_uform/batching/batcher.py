"""The batcher: plans microbatches by predicted memory, and plans again when memory runs out all the same."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from experimaestro import Meta
from xpm_torch.batchers import Batcher, PowerAdaptativeBatcherWorker

from xpmir_uform.base.configuration import default
from xpmir_uform.batching import memory_probe
from xpmir_uform.batching.bag_sizes import BagSize
from xpmir_uform.batching.cost import CostModel, fit
from xpmir_uform.batching.packer import BagPacker
from xpmir_uform.batching.shape import BatchShape

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHRINKAGE = 0.7
"""What is left of the cost of the heaviest microbatch after memory ran out."""


class UFormBatcherWorker(PowerAdaptativeBatcherWorker):
    """Runs the bags of a step in microbatches.

    ``process`` and ``reduce``, which validations use on records of any kind, are those of the stock adaptive batcher.

    Attributes:
        model: what a microbatch costs; until it is fitted, and where memory has no bound, its tokens.
        ceiling: what a microbatch may cost since memory ran out; the same on every rank.
        limits: hard limits beside the batch shape's, by the name of a column of
            :class:`~xpmir_uform.batching.bag_sizes.Sizes`.
        predicted: bytes of the heaviest microbatch of the last step; None: the model is not fitted.
    """

    def __init__(self, batcher: "UFormBatcher", batch_size: int):
        super().__init__(batch_size)
        self.batcher = batcher
        self.fabric: Any = None
        self.device = torch.device("cpu")
        self.model = CostModel()
        self.reach: int | None = None
        self.ceiling = float("inf")
        self.fitted = False
        self.limits: Mapping[str, int] = {}
        self.predicted: float | None = None
        self.warned: set[int] = set()

    def pre_train_setup(self, probe_fn: Callable[[Sequence[int]], None], fabric=None) -> None:
        """Fits the cost model on rank 0 and tells the others; to be called before the model is wrapped.

        Args:
            probe_fn: one forward and backward pass on items of the given lengths, which adds to gradients and does not
                clear them.
            fabric: of the learner; None: this process alone, on the first GPU if there is one.
        """
        self.fabric = fabric
        self.device = (
            fabric.device if fabric is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        if self.device.type != "cuda" and not self.batcher.memory:
            logger.info("memory has no bound: microbatches are bounded by the batch shape alone")
            return
        told = self._fit(probe_fn).to_json() if fabric is None or fabric.global_rank == 0 else ""
        self.model = CostModel.from_json(told if fabric is None else fabric.broadcast(told, src=0))
        self.fitted = True
        if self.device.type == "cuda":
            self.reach = memory_probe.reachable(self.device)

    def _fit(self, probe_fn: Callable[[Sequence[int]], None]) -> CostModel:
        lengths = self.batcher.probes or memory_probe.probe_lengths(self.batcher.longest, self.device)
        model = fit(memory_probe.probe(probe_fn, lengths, self.device))
        logger.info("bytes of a microbatch: %s", model.to_json())
        return model

    def budget(self) -> float:
        """What a microbatch may cost now."""
        if not self.fitted:
            return self.ceiling
        given = self.batcher.memory or memory_probe.budget(self.device, self.batcher.memory_fraction, self.reach)
        return min(given, self.ceiling)

    def plan(self, bags: Sequence[BagSize]) -> list[list[BagSize]]:
        """The microbatches of some bags, heaviest bags first, in ascending order within each.

        Raises:
            ValueError: a bag alone exceeds a hard limit (named by its key), or ``memory`` is given and
                the model has not been measured.
        """
        if self.batcher.memory and not self.fitted:
            raise ValueError(f"memory is {self.batcher.memory} bytes and no model was measured: call pre_train_setup")
        budget = self.budget()
        numbers = self.batcher.plan(bags, self.model, budget, self.limits)
        parts = [[bags[number] for number in part] for part in numbers]
        self._warn(parts, budget)
        return parts

    def _warn(self, parts: Sequence[Sequence[BagSize]], budget: float) -> None:
        """Names, once, each bag that is heavier than the budget."""
        for bag in (part[0] for part in parts if len(part) == 1):
            if bag.key not in self.warned and (cost := self.model.predict(bag.lengths)) > budget:
                self.warned.add(bag.key)
                logger.warning("bag %#018x takes %.3g of a budget of %.3g, and goes alone", bag.key, cost, budget)

    def process_withreplay(self, batch: Sequence[BagSize], process: Callable[..., T], *args, **kwargs) -> T:
        """Processes the bags of a step in microbatches, again from the start in smaller ones when memory runs out.

        With several ranks ``process`` must run out of memory on all of them if on one.

        Args:
            process: takes an iterator of microbatches and their number.

        Raises:
            RuntimeError: memory ran out although every microbatch was one bag.
        """
        while True:
            parts = self.plan(batch)
            self.predicted = max(map(self.cost, parts), default=0.0) if self.fitted else None
            try:
                return process(iter(parts), len(parts), *args, **kwargs)
            except RuntimeError as error:
                if not memory_probe.is_out_of_memory(error) or not self._shrink(parts):
                    raise
            memory_probe.release(self.device)

    def _shrink(self, parts: Sequence[Sequence[BagSize]]) -> bool:
        """Lowers the ceiling below the heaviest microbatch that can be split; False: on no rank there is one."""
        costs = [self.cost(part) for part in parts if len(part) > 1]
        heaviest = self._agree(max(costs, default=0.0))
        if heaviest:
            self.ceiling = SHRINKAGE * heaviest
            logger.warning("out of memory: microbatches are planned again, with at most %.3g each", self.ceiling)
        return heaviest > 0

    def cost(self, part: Sequence[BagSize]) -> float:
        """What a microbatch is predicted to cost: bytes, or tokens while the model is not fitted."""
        return self.model.predict([length for bag in part for length in bag.lengths])

    def _agree(self, value: float) -> float:
        """The greatest value of all ranks."""
        if self.fabric is None or self.fabric.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        return float(self.fabric.all_reduce(tensor, reduce_op="max"))

    def state_dict(self) -> dict[str, float | None]:
        """What a resumed run needs in order to plan as before; JSON."""
        return {"ceiling": None if self.ceiling == float("inf") else self.ceiling}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        ceiling = state["ceiling"]
        self.ceiling = float("inf") if ceiling is None else ceiling


class UFormBatcher(Batcher):
    """Splits a step into as few microbatches as the batch shape and the device's memory allow.

    It changes nothing but rounding: where memory is measured, and other processes use the same device, plans may differ
    from run to run. Give ``memory`` where bits matter.
    """

    __xpmid__ = "uform.batcher"

    shape: Meta[BatchShape | None] = default()
    """Hard limits of a microbatch"""

    packer: Meta[BagPacker | None] = default()
    """Which bags share a microbatch; None: the plain one"""

    memory_fraction: Meta[float] = default(0.9)
    """Of the memory that is free before a step, what a microbatch may take"""

    memory: Meta[int] = default(0)
    """Bytes that a microbatch may take; 0: measured on a GPU, without bound elsewhere"""

    probes: Meta[list[list[int]]] = default([])
    """Tokens of the items of each microbatch that is measured beforehand; empty: a few that tell the terms apart"""

    def __validate__(self):
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction}, expected above 0 and at most 1")
        if self.memory < 0:
            raise ValueError(f"memory is {self.memory} bytes, expected 0 or more")
        if any(not lengths or min(lengths) < 1 for lengths in self.probes):
            raise ValueError(f"probes are {self.probes}, expected at least one item in each, of at least one token")

    def plan(
        self, bags: Sequence[BagSize], model: CostModel, budget: float, limits: Mapping[str, int] | None = None
    ) -> list[list[int]]:
        """The numbers of the bags of each microbatch.

        Args:
            limits: beside those of ``shape``.

        Raises:
            ValueError: a bag alone exceeds a limit; the message gives its key.
        """
        # Not a default made by a factory: experimaestro 2.7 makes no instance of one within another.
        packer = self.packer or BagPacker.C().instance()
        return packer.plan(bags, self.shape, model, budget, limits)

    @property
    def longest(self) -> int:
        """Most tokens of one item; 0: unknown."""
        return self.shape.columns if self.shape else 0

    def initialize(self, batch_size: int) -> UFormBatcherWorker:
        """The worker of this process."""
        return UFormBatcherWorker(self, batch_size)
