"""Directed edge sets over the items of a batch, as compressed sparse rows, and what is refused of them.

N items, R rows (anchors), E edges.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uform_kernels.checks import (
    FLOATING,
    LEAST_WEIGHT,
    MOST_WEIGHT,
    WEIGHTS,
    Describe,
    check_device,
    check_dtype,
    check_integers,
    check_offsets,
    check_shape,
    first_true,
    row_name,
)


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges from R anchors to items: row r points to `ids[offsets[r]:offsets[r + 1]]`.

    Lists and numpy arrays become tensors and integers become int64; nothing else is changed or checked here (see
    `check_edges`).

    offsets: (R + 1,) int64, from 0 to E, never decreasing
    ids: (E,) int64, strictly ascending within each row
    weights: (E,) float, 0 or from 1e-18 to 1e9; None: all one. An edge of weight 0 is no cell, but names the pair
    """

    offsets: Tensor
    ids: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", _integers(self.offsets))
        object.__setattr__(self, "ids", _integers(self.ids))
        if self.weights is not None:
            object.__setattr__(self, "weights", _reals(self.weights))

    @classmethod
    def empty(cls, rows: int, device: torch.device | str | None = None) -> "Edges":
        """No edge from any of `rows` anchors."""
        offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        return cls(offsets, offsets.new_empty(0))

    @classmethod
    def from_lists(cls, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> "Edges":
        """One list of ids for each anchor, and one of weights.

        Raises: ValueError when an anchor has more or fewer weights than ids.
        """
        counts = [len(row) for row in ids]
        if weights is not None and counts != [len(row) for row in weights]:
            raise ValueError(f"weights has {[*map(len, weights)]} entries; it must have as many as ids, {counts}.")
        offsets = torch.tensor([0, *itertools.accumulate(counts)])
        flat = torch.tensor([*itertools.chain.from_iterable(ids)], dtype=torch.int64)
        if weights is None:
            return cls(offsets, flat)
        return cls(offsets, flat, torch.tensor([*itertools.chain.from_iterable(weights)], dtype=torch.float64))

    @property
    def rows(self) -> int:
        """R, the number of anchors."""
        return self.offsets.numel() - 1

    @property
    def count(self) -> int:
        """E, the number of edges."""
        return self.ids.numel()

    def to(self, device: torch.device | str) -> "Edges":
        """The same edges on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Edges(self.offsets.to(device), self.ids.to(device), weights)

    def part(self, start: int, stop: int) -> "Edges":
        """The edges of the anchors start..stop - 1."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        weights = None if self.weights is None else self.weights[first:last]
        return Edges(self.offsets[start : stop + 1] - first, self.ids[first:last], weights)

    def anchors(self) -> Tensor:
        """(E,) int64: the row, from 0, that each edge leaves."""
        lengths = self.offsets.diff()
        return torch.repeat_interleave(torch.arange(self.rows, device=lengths.device), lengths, output_size=self.count)

    def weights_as(self, dtype: torch.dtype) -> Tensor:
        """(E,) the weights in `dtype`, ones where there are none."""
        if self.weights is None:
            return torch.ones(self.count, dtype=dtype, device=self.ids.device)
        return self.weights.to(dtype)


def check_edges(
    name: str, edges: Edges, rows: int, items: int, first_row: int = 0, describe: Describe = row_name
) -> None:
    """Refuses an edge set that breaks a rule of `Edges`, in O(E) without a loop.

    name: the argument to speak of, such as "attract"
    rows, items: how many anchors the set must have, and how many items its ids may name
    first_row: the item that row 0 speaks of; `describe(item)` says how an item is called in an error

    Raises: ValueError that names the argument and the item.
    """
    if not isinstance(edges, Edges):
        raise ValueError(f"{name} is a {type(edges).__name__}; it must be Edges.")
    check_shape(f"{name}.ids", edges.ids, "E")
    check_integers(f"{name}.ids", edges.ids)
    check_device(
        edges.ids.device, f"{name}.ids", **{f"{name}.offsets": edges.offsets, f"{name}.weights": edges.weights}
    )
    check_offsets(
        f"{name}.offsets", edges.offsets, edges.count, ends_at="len(ids)", first_row=first_row, describe=describe
    )
    if edges.rows != rows:
        raise ValueError(f"{name} has {edges.rows} rows; it must have one for each of the {rows} anchors.")
    _check_ids(name, edges, items, first_row, describe)
    if edges.weights is not None:
        _check_weights(name, edges, first_row, describe)


def check_disjoint(
    attract: Edges, repel: Edges, ignore: Edges, first_row: int = 0, describe: Describe = row_name
) -> None:
    """Refuses a pair that is in two of the edge sets, in O(E log E). Each set must have passed `check_edges`."""
    sets = {"attract": attract, "repel": repel, "ignore": ignore}
    width = 1 + max((int(s.ids.max()) for s in sets.values() if s.count), default=0)
    pairs, order = torch.cat([s.anchors() * width + s.ids for s in sets.values()]).sort(stable=True)
    place = first_true(pairs[1:] == pairs[:-1])
    if place is None:
        return
    row, item = divmod(int(pairs[place]), width)
    ends = torch.tensor([s.count for s in sets.values()]).cumsum(0)
    one, other = (list(sets)[int((ends <= int(order[place + k])).sum())] for k in range(2))
    raise ValueError(
        f"the pair {describe(first_row + row)} -> {item} is in both {one} and {other}; a pair may be in one edge set."
    )


def _check_ids(name: str, edges: Edges, items: int, first_row: int, describe: Describe) -> None:
    ids, anchors = edges.ids, edges.anchors()

    def refuse(mask: Tensor, reason: str) -> None:
        place = first_true(mask)
        if place is not None:
            owner = describe(first_row + int(anchors[place]))
            raise ValueError(f"{name}.ids[{place}] = {int(ids[place])} of {owner} {reason}")

    refuse((ids < 0) | (ids >= items), f"is out of range; ids must be in 0..{items - 1}.")
    refuse(ids == anchors + first_row, "is an edge to itself; an item may not attract, repel or ignore itself.")
    same_row = anchors[1:] == anchors[:-1]
    later = torch.zeros_like(ids, dtype=torch.bool)
    later[1:] = same_row & (ids[1:] == ids[:-1])
    refuse(later, "is repeated; ids must be strictly ascending within a row.")
    later[1:] = same_row & (ids[1:] < ids[:-1])
    refuse(later, "is below the id before it; ids must be strictly ascending within a row.")


def _check_weights(name: str, edges: Edges, first_row: int, describe: Describe) -> None:
    weights = edges.weights
    assert weights is not None
    check_shape(f"{name}.weights", weights, edges.count)
    check_dtype(f"{name}.weights", weights, FLOATING)
    wide = weights.double()
    place = first_true(~((wide == 0) | ((wide >= LEAST_WEIGHT) & (wide <= MOST_WEIGHT))))
    if place is not None:
        owner = describe(first_row + int(edges.anchors()[place]))
        raise ValueError(f"{name}.weights[{place}] = {float(weights[place])} of {owner}; weights must be {WEIGHTS}.")


def _integers(value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if isinstance(value, list | tuple) and not value:
        return tensor.to(torch.int64)
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return tensor.to(torch.int64) if whole else tensor


def _reals(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64) if isinstance(value, list | tuple) else torch.as_tensor(value)
