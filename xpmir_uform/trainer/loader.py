"""Loading: step t's global batch, decoded, by any number of workers in the order of the steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.utils.data import DataLoader, Dataset

from xpmir_uform.data.augmentation import PictureAugmentation
from xpmir_uform.data.batch import Batch
from xpmir_uform.data.decoding import decode
from xpmir_uform.data.draws import WORD
from xpmir_uform.data.items import Item
from xpmir_uform.data.sampling import BagSampler
from xpmir_uform.data.segments import Segment
from xpmir_uform.data.shapes import ImageShape
from xpmir_uform.data.vocabulary import Modality

Shapes = Mapping[Modality, ImageShape]


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """The global batch of one step.

    Args:
        number: the step.
        batch: its items and edges.
        segments: the decoded items, in the batch's order.
    """

    number: int
    batch: Batch
    segments: Sequence[Segment]


class StepDataset(Dataset):
    """Step t by its number."""

    def __init__(
        self, sampler: BagSampler, batch_size: int, shapes: Shapes, augmentation: PictureAugmentation | None
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.shapes = shapes
        self.augmentation = augmentation

    def __getitem__(self, number: int) -> LoadedStep:
        bags = self.sampler.bags(number, self.batch_size)
        batch = Batch.of(bags, deduplicate=self.sampler.deduplicate)
        return LoadedStep(number, batch, [self.segment(item, number) for bag in bags for item in bag.items])

    def segment(self, item: Item, number: int) -> Segment:
        """The decoded item as step ``number`` sees it."""
        if self.augmentation is None:
            return decode(item, self.shapes)
        return self.augmentation.decode(item, self.shapes, self.sampler.seed, number)


def iterate_steps(dataset: StepDataset, start: int, workers: int) -> Iterator[LoadedStep]:
    """The steps from ``start`` on, without end. The generator keeps torch's global random state out of it."""
    return iter(
        DataLoader(
            dataset,
            batch_size=None,
            sampler=range(start, WORD),
            num_workers=workers,
            generator=torch.Generator(),
        )
    )


def bag_ranges(batch: Batch) -> list[range]:
    """The items of each bag: what batchers split a step into."""
    offsets = batch.bags.tolist()
    return [range(start, stop) for start, stop in pairwise(offsets)]


def collect(step: LoadedStep, bags: Sequence[range]) -> list[Segment]:
    """The segments of some bags of a step."""
    return [step.segments[number] for bag in bags for number in bag]
