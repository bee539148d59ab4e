"""Duplicates: items of a global batch that are the same thing, and the ignore edges that keep them from repelling.

Two items of one modality with equal bytes are the same **thing**. Neither is an ambient negative of the other, nor of
what the other attracts. Written out, the cell (i, j) of anchor i and item j != i that no edge names is ignored when

- i and j are the same thing, or
- an attract edge k -> l, other than j -> i itself, joins the things of i and j, in either direction,

or where i and j are of two copies of one bag, by its key, whatever items stand for it in each: an emoji that stands on
both sides of an epoch's end brings other names of itself.

Where no item has a duplicate there is no such k -> l, so edges in one direction keep their meaning: an item that
attracts nothing still repels what attracts it. Explicit attract, repel and ignore edges stand.

The join is a pure function of hashes and edges, so that ranks which hold the contents of their own items alone can make
it from each other's hashes.

N items, U things, L links (unordered pairs of items that attract), P pairs of things, E edges, R edges that result.
Time is O((N + E + R) log); R grows with the square of how often one thing occurs in the batch, as the rule does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from uform_kernels import Edges


def hash_things(modalities: Iterable[int], contents: Iterable[bytes]) -> np.ndarray:
    """(N, 2) int64: 128 bits of each item's content, by BLAKE2b keyed with its modality; alike on every machine."""
    digests = (
        blake2b(content, digest_size=16, person=bytes([modality])).digest()
        for modality, content in zip(modalities, contents, strict=True)
    )
    return np.frombuffer(b"".join(digests), "<i8").reshape(-1, 2)


def ignore_duplicates(
    hashes: np.ndarray, bags: np.ndarray, bag_keys: np.ndarray, attract: Edges, repel: Edges, ignore: Edges
) -> Edges:
    """The edges of ``ignore`` and those that duplicates add.

    Args:
        hashes: (N, 2) int64, equal where two items are the same thing, as :func:`hash_things` makes them.
        bags: (B + 1,) int64, where the items of each bag begin.
        bag_keys: (B,) uint64, equal where two bags are copies of one.
        attract, repel, ignore: N rows over N items, well-formed and disjoint, on the CPU.

    Returns:
        N rows, no weights.
    """
    items = len(hashes)
    found = np.union1d(_same_things(hashes, attract), _copies(bags, bag_keys))
    found = _without(found, np.concatenate([_codes(attract), _codes(repel)]))
    return _edges(np.union1d(found, _codes(ignore)), items)


def _same_things(hashes: np.ndarray, attract: Edges) -> np.ndarray:
    """The cells, as codes, that are ignored since a thing occurs more than once."""
    items = len(hashes)
    things = _Things.of(hashes)
    links = _links(attract, things.numbers)
    joined, times = _joined(things.numbers[links], len(things.sizes))
    i, j = things.expand(things.repeated(joined))
    # The opposite cell of the one link between two things has no duplicate to blame.
    one, other = links[:, times == 1]
    return _without((i * items + j)[i != j], np.concatenate([one * items + other, other * items + one]))


def _copies(bags: np.ndarray, bag_keys: np.ndarray) -> np.ndarray:
    """The cells, as codes, between items of different bags that are copies of one."""
    owners = np.repeat(np.arange(len(bag_keys)), np.diff(bags))
    named = _Things.of(bag_keys[owners, None])
    i, j = named.expand(named.repeated(np.empty((2, 0), np.int64)))
    return (i * len(owners) + j)[owners[i] != owners[j]]


@dataclass(frozen=True, slots=True)
class _Things:
    """Which items are which thing.

    numbers (N,): each item's thing; order (N,): the items by thing; starts, sizes (U,): where each thing lies in order.
    """

    numbers: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray) -> "_Things":
        order = np.lexsort(hashes.T)
        ordered = hashes[order]
        first = np.ones(len(hashes), bool)
        first[1:] = (ordered[1:] != ordered[:-1]).any(1)
        numbers = np.empty(len(hashes), np.int64)
        numbers[order] = np.cumsum(first) - 1
        starts = np.flatnonzero(first)
        return cls(numbers, order, starts, np.diff(starts, append=len(hashes)))

    def repeated(self, joined: np.ndarray) -> np.ndarray:
        """(2, P) directed pairs of things to ignore: repeated things with themselves, joined things both ways."""
        joined = joined[:, self.sizes[joined].max(0, initial=0) > 1]
        alone = np.flatnonzero(self.sizes > 1)
        return np.concatenate([np.stack([alone, alone]), joined, joined[::-1]], axis=1)

    def expand(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items i and j of every cell between the things of each pair."""
        heights, widths = self.sizes[pairs]
        above, left = self.starts[pairs]
        rows = self.order[_ranges(above, heights)]
        widths, left = np.repeat(widths, heights), np.repeat(left, heights)
        return np.repeat(rows, widths), self.order[_ranges(left, widths)]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[0], starts[0] + 1, ...``, ``lengths[0]`` of them, then those of ``starts[1]``, and so on."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)


def _links(attract: Edges, things: np.ndarray) -> np.ndarray:
    """(2, L) the pairs of items of unequal things that attract in some direction, each once, lesser item first."""
    i, j = _ends(attract)
    unequal = things[i] != things[j]
    codes = np.unique((np.minimum(i, j) * len(things) + np.maximum(i, j))[unequal])
    return np.stack(np.divmod(codes, len(things)))


def _joined(pairs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(2, P) the pairs of things, each once, and (L,) how many links join the things of each link."""
    codes, place, times = np.unique(pairs.min(0) * count + pairs.max(0), return_inverse=True, return_counts=True)
    return np.stack(np.divmod(codes, count)), times[place]


def _codes(edges: Edges) -> np.ndarray:
    """(E,) each edge i -> j as the number i * N + j."""
    i, j = _ends(edges)
    return i * edges.rows + j


def _ends(edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """(E,) the anchor and (E,) the item of each edge."""
    return np.repeat(np.arange(edges.rows), np.diff(edges.offsets.numpy())), edges.ids.numpy()


def _without(codes: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """``codes``, sorted, but for those in ``removed``."""
    codes = np.sort(codes)
    places = np.searchsorted(codes, removed)
    hits = places[places < len(codes)]
    hits = hits[codes[hits] == removed[places < len(codes)]]
    return np.delete(codes, hits)


def _edges(codes: np.ndarray, items: int) -> Edges:
    """The edges of sorted ``codes``."""
    anchors = np.arange(items)
    offsets = np.searchsorted(codes, np.append(anchors, items) * items)
    return Edges(torch.from_numpy(offsets), torch.from_numpy(codes - np.repeat(anchors * items, np.diff(offsets))))
