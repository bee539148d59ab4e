"""Batches: all the bags of one step, as arrays.

N items, B bags, C choices of all items.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from uform_kernels import Edges

from xpmir_uform.data.batch.columns import bag_keys, bag_offsets, byte_tape, integers, link_edges, target_column
from xpmir_uform.data.batch.duplicates import hash_things, ignore_duplicates
from xpmir_uform.data.batch.tape import Tape
from xpmir_uform.data.batch.validation import check_batch, name_item
from xpmir_uform.data.items import Bag, Item, Link, as_bags
from xpmir_uform.data.vocabulary import Modality, Side

__all__ = ["Batch", "Edges"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A global batch: the items of its bags one after another, and the edges between them.

    An item's number is its place in the batch. Two items may share a key only where they are the same thing (equal
    modality and content), as when two bags hold one document: every random draw about a key is about one thing.

    Args:
        modalities, sides, groups: (N,) int64.
        keys: (N,) uint64.
        contents: N entries.
        choices: N entries, empty for an item that offers none.
        targets: (C,) float64, one for each byte of ``choices``; those of an item sum to one within 1e-3.
        bags: (B + 1,) int64; bag b is the items from ``bags[b]`` up to ``bags[b + 1]``, at least one.
        bag_keys: (B,) uint64, equal where two bags are copies of one.
        attract, repel, ignore: N rows over N items, each pair in one of them at most; ``ignore`` has no weights.

    Raises:
        ValueError: one of these rules is broken; the message names the item by its number and key.
    """

    modalities: Tensor
    keys: np.ndarray
    sides: Tensor
    groups: Tensor
    contents: Tape
    choices: Tape
    targets: Tensor
    bags: np.ndarray
    bag_keys: np.ndarray
    attract: Edges
    repel: Edges
    ignore: Edges

    def __post_init__(self) -> None:
        check_batch(self)

    @classmethod
    def of(cls, bags: Iterable[Bag], deduplicate: bool = True) -> "Batch":
        """The batch of ``bags`` in their order.

        Args:
            bags: each link may stand at any place of its set.
            deduplicate: adds the ignore edges of :func:`~xpmir_uform.data.batch.duplicates.ignore_duplicates`.

        Raises:
            ValueError: as :class:`Batch`; or something is no bag.
        """
        bags = as_bags(bags)
        items = [item for bag in bags for item in bag.items]
        offsets = bag_offsets(bags)
        batch = cls(
            modalities=torch.from_numpy(integers("modality", items)),
            keys=integers("key", items),
            sides=torch.from_numpy(integers("side", items)),
            groups=torch.from_numpy(integers("group", items)),
            contents=byte_tape("content", items),
            choices=byte_tape("choices", items),
            targets=torch.from_numpy(target_column(items)),
            bags=offsets,
            bag_keys=bag_keys(bags),
            attract=link_edges("attract", bags, offsets),
            repel=link_edges("repel", bags, offsets),
            ignore=link_edges("ignore", bags, offsets),
        )
        return batch.deduplicated() if deduplicate else batch

    def deduplicated(self) -> "Batch":
        """This batch with the ignore edges of :func:`~xpmir_uform.data.batch.duplicates.ignore_duplicates`."""
        hashes = hash_things(self.modalities.tolist(), self.contents)
        ignore = ignore_duplicates(hashes, self.bags, self.bag_keys, self.attract, self.repel, self.ignore)
        return replace(self, ignore=ignore)

    def __len__(self) -> int:
        """N."""
        return len(self.keys)

    @property
    def families(self) -> Tensor:
        """(N,) int64: what ``across`` tells apart, here the modality."""
        return self.modalities

    def describe(self, number: int) -> str:
        """How messages name an item: by its number, key, modality and size."""
        size = int(self.contents.offsets[number + 1] - self.contents.offsets[number])
        return name_item(number, self.keys[number], int(self.modalities[number]), size)

    def item(self, number: int) -> Item:
        """Item ``number``."""
        start, stop = (int(end) for end in self.choices.offsets[number : number + 2])
        return Item(
            modality=Modality(int(self.modalities[number])),
            content=self.contents[number],
            key=int(self.keys[number]),
            side=Side(int(self.sides[number])),
            group=int(self.groups[number]),
            choices=self.choices[number],
            targets=tuple(self.targets[start:stop].tolist()),
        )

    def bag(self, number: int) -> Bag:
        """Bag ``number``, with the links between its own items."""
        start, stop = (int(end) for end in self.bags[number : number + 2])
        return Bag(
            items=tuple(map(self.item, range(start, stop))),
            attract=_links(self.attract, start, stop),
            repel=_links(self.repel, start, stop),
            ignore=_links(self.ignore, start, stop),
            key=int(self.bag_keys[number]),
        )


def _links(edges: Edges, start: int, stop: int) -> tuple[Link, ...]:
    first, last = int(edges.offsets[start]), int(edges.offsets[stop])
    ids = edges.ids[first:last]
    anchors = torch.repeat_interleave(torch.arange(stop - start), edges.offsets[start : stop + 1].diff())
    inside = (ids >= start) & (ids < stop)
    ends = [anchors[inside].tolist(), (ids - start)[inside].tolist()]
    if edges.weights is not None:
        ends.append(edges.weights[first:last][inside].tolist())
    return tuple(zip(*ends, strict=True))
