"""Loading: step t's global batch, this rank's part of it decoded, by any number of workers, in order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch.utils.data import DataLoader, Dataset

from xpmir_uform.base.keyed_random import WORD
from xpmir_uform.batching.bag_sizes import BagSize
from xpmir_uform.batching.balance import balance
from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.decoding.augmentation import Augmentation
from xpmir_uform.data.decoding.registry import Shapes, decode
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Bag, Item, count_items
from xpmir_uform.data.sampling import BagSampler
from xpmir_uform.data.targets import Questions
from xpmir_uform.data.unreadable_bags import salvage
from xpmir_uform.losses.base import BatchLoss
from xpmir_uform.model.inference.batches import most_tokens
from xpmir_uform.trainer.loader_workers import begin_worker, received


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """The global batch of one step as one rank sees it.

    Args:
        number: the step.
        batch: all its items, rank after rank, and their edges.
        shares: the items of each rank.
        bags: the bags of this rank.
        segments: the decoded items of this rank, in the batch's order, with what the losses ask of each.
        unreadable: why each item that could not be read was left out of the global batch.
    """

    number: int
    batch: Batch
    shares: Sequence[range]
    bags: Sequence[BagSize]
    segments: Sequence[Segment]
    unreadable: Sequence[str] = ()

    def collect(self, numbers: Sequence[int]) -> list[Segment]:
        """The segments of some of this rank's items, by their numbers in the batch."""
        start = self.bags[0].items.start
        return [self.segments[number - start] for number in numbers]

    def questions(self, numbers: Sequence[int]) -> Questions:
        """What is asked of some of this rank's items."""
        segments = self.collect(numbers)
        asked = zip(numbers, segments, strict=True)
        return Questions.of(segments, [self.batch.item(number) for number, segment in asked if segment.answers])


class StepDataset(Dataset):
    """Step t by its number.

    Args:
        sampler: whose bags of step t are a function of (seed, t).
        batch_size: bags of a global batch.
        shapes: how each modality is decoded.
        losses: what is asked of each item.
        augmentation: what is done to each item.
        rank, ranks: this one, and how many there are.
    """

    def __init__(
        self,
        sampler: BagSampler,
        batch_size: int,
        shapes: Shapes,
        losses: Sequence[BatchLoss] = (),
        augmentation: Augmentation | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.shapes = shapes
        self.losses = losses
        self.augmentation = augmentation
        self.rank = rank
        self.ranks = ranks

    def __getitem__(self, number: int) -> LoadedStep:
        bags, decoded, unreadable = self.readable(number)
        by_rank = share_out(bags, self.ranks, self.shapes)
        batch = Batch.of([bag for bags in by_rank for bag in bags], deduplicate=self.sampler.deduplicate)
        ends = [0, *accumulate(count_items(bags) for bags in by_rank)]
        shares = [range(start, stop) for start, stop in pairwise(ends)]
        mine = by_rank[self.rank]
        segments = [self.ask(decoded(item), item, number) for bag in mine for item in bag.items]
        sized = sizes(mine, segments, shares[self.rank].start, self.losses)
        return LoadedStep(number, batch, shares, sized, segments, unreadable)

    def readable(self, number: int) -> tuple[Sequence[Bag], Callable[[Item], Segment], Sequence[str]]:
        """The bags of step ``number``, what decodes their items, and why items were left out.

        To skip unreadable items, each rank decodes those of the whole global batch: the batch is then the same on every
        rank, its joint losses are exact, and no rank waits for another's answer.

        Raises:
            ValueError: nothing of the step is left.
        """
        bags = self.sampler.bags(number, self.batch_size)
        decoded = partial(self.decode, number=number)
        if self.sampler.on_bad_item == "fail":
            return bags, decoded, ()
        kept = salvage(bags, decoded)
        if not kept.bags:
            raise ValueError(f"no bag of step {number} is left without its unreadable items: {kept.unreadable[0]}")
        return kept.bags, kept.segment, kept.unreadable

    def decode(self, item: Item, number: int) -> Segment:
        """The decoded item as step ``number`` sees it."""
        if self.augmentation is None:
            return decode(item, self.shapes)
        return self.augmentation.decode(item, self.shapes, self.sampler.seed, number)

    def ask(self, segment: Segment, item: Item, number: int) -> Segment:
        """The segment with what the losses ask of it at step ``number``."""
        for loss in self.losses:
            segment = loss.ask(segment, item, self.sampler.seed, number)
        return segment


def share_out(bags: Sequence[Bag], ranks: int, shapes: Shapes) -> list[list[Bag]]:
    """The bags of each rank: every bag once, the token counts balanced, the same on every rank."""
    costs = [sum(most_tokens(item, shapes) for item in bag.items) for bag in bags]
    return [[bags[number] for number in part] for part in balance(costs, ranks)]


def sizes(
    bags: Sequence[Bag], segments: Sequence[Segment], first: int, losses: Sequence[BatchLoss] = ()
) -> list[BagSize]:
    """The sizes of consecutive bags whose first item is number ``first`` of the batch.

    Args:
        losses: which may count more of a bag than its items and tokens.
    """
    ends = [0, *accumulate(len(bag.items) for bag in bags)]
    parts = [segments[start:stop] for start, stop in pairwise(ends)]
    return [
        BagSize(
            items=range(first + start, first + start + len(part)),
            lengths=tuple(segment.tokens + segment.answers for segment in part),
            key=bag.items[0].key,
            choices=sum(len(item.choices) for item in bag.items),
            **{name: count for loss in losses for name, count in loss.load(bag.items, part).items()},
        )
        for bag, start, part in zip(bags, ends, parts, strict=False)
    ]


def iterate_steps(dataset: StepDataset, start: int, workers: int) -> Iterator[LoadedStep]:
    """The steps from ``start`` on, without end. The generator keeps torch's global random state out of it."""
    steps = iter(
        DataLoader(
            dataset,
            batch_size=None,
            sampler=range(start, WORD),
            num_workers=workers,
            generator=torch.Generator(),
            worker_init_fn=begin_worker,
        )
    )
    return received(steps, getattr(steps, "_workers", ()))
