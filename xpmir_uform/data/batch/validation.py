"""What is refused of a batch: one function for each kind of rule, over whole arrays.

N items, B bags, C choices.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from uform_kernels import check_disjoint, check_edges
from uform_kernels.checks import check_filled, check_offsets

from xpmir_uform.data.batch.tape import Tape
from xpmir_uform.data.validation import TARGET_TOLERANCE
from xpmir_uform.data.vocabulary import Modality, Side

if TYPE_CHECKING:
    from xpmir_uform.data.batch.batch import Batch


def check_batch(batch: "Batch") -> None:
    """Refuses a batch that breaks a rule of :class:`~xpmir_uform.data.batch.batch.Batch`.

    Raises:
        ValueError: says which rule, and names the item by its number and key, or the bag.
    """
    _check_columns(batch)
    _check_values(batch)
    _check_bags(batch)
    _check_keys(batch)
    _check_choices(batch)
    _check_edges(batch)


def check_choice_counts(batch: "Batch", most: int) -> None:
    """Refuses an item that offers more than ``most`` choices.

    Raises:
        ValueError: names the item by its number and key.
    """
    counts = batch.choices.lengths()
    number = _first(counts > most)
    if number is not None:
        raise ValueError(
            f"{batch.describe(number)} offers {counts[number]} choices and max_choices_per_item of the batch shape is "
            f"{most}: raise it, or offer fewer"
        )


def name_item(number: int, key: Any, modality: int, size: int) -> str:
    """How messages name an item of a batch: ``item 3 (key 0x000000000000002a, text, 12 bytes)``."""
    key = f"{int(key):#018x}" if isinstance(key, int | np.integer) else repr(key)
    kind = Modality(modality).name.lower() if modality in set(Modality) else f"modality {modality!r}"
    return f"item {number} (key {key}, {kind}, {size} bytes)"


def _check_columns(batch: "Batch") -> None:
    if not isinstance(batch.keys, np.ndarray) or batch.keys.dtype != np.uint64 or batch.keys.ndim != 1:
        raise ValueError("keys must be a numpy array (N,) of uint64.")
    columns = {name: getattr(batch, name) for name in ("modalities", "sides", "groups")}
    for name, column in columns.items():
        if not isinstance(column, Tensor) or column.dtype != torch.int64 or column.shape != (len(batch),):
            raise ValueError(f"{name} must be a tensor ({len(batch)},) of int64, one for each of keys.")
    for name, tape in (("contents", batch.contents), ("choices", batch.choices)):
        if not isinstance(tape, Tape):
            raise ValueError(f"{name} is a {type(tape).__name__}; it must be a Tape.")
        if len(tape) != len(batch):
            raise ValueError(f"{name} has {len(tape)} entries for {len(batch)} items; it must have one for each.")
    if not isinstance(batch.targets, Tensor):
        raise ValueError(f"targets is a {type(batch.targets).__name__}; it must be a tensor of float64.")
    if batch.targets.dtype != torch.float64 or batch.targets.shape != batch.choices.data.shape:
        given, wanted = tuple(batch.targets.shape), batch.choices.data.shape
        raise ValueError(f"targets are {batch.targets.dtype} of shape {given}; the choices take float64 of {wanted}.")


def _check_values(batch: "Batch") -> None:
    modalities, sides, groups = (column.numpy() for column in (batch.modalities, batch.sides, batch.groups))
    sizes = batch.contents.lengths()
    rules = {
        "has no modality of Modality": (modalities < min(Modality)) | (modalities > max(Modality)),
        "has no side of Side": (sides < Side.NONE) | (sides > Side.QUERY_AND_DOCUMENT),
        "has a negative group": groups < 0,
        "is empty; only a text may be": (sizes == 0) & (modalities != Modality.TEXT),
    }
    for rule, broken in rules.items():
        number = _first(broken)
        if number is not None:
            raise ValueError(f"{batch.describe(number)} {rule}.")


def _check_bags(batch: "Batch") -> None:
    def describe(bag: int) -> str:
        return f"bag {bag}"

    if not isinstance(batch.bags, np.ndarray) or batch.bags.dtype != np.int64 or batch.bags.ndim != 1:
        raise ValueError("bags must be a numpy array (B + 1,) of int64.")
    offsets = torch.from_numpy(batch.bags)
    check_offsets("bags", offsets, len(batch), ends_at="the number of items", describe=describe)
    check_filled("bags", offsets, describe)
    keys = batch.bag_keys
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.shape != (len(batch.bags) - 1,):
        raise ValueError(f"bag_keys must be a numpy array ({len(batch.bags) - 1},) of uint64, one for each bag.")


def _check_keys(batch: "Batch") -> None:
    order = np.argsort(batch.keys, kind="stable")
    again = np.flatnonzero(batch.keys[order[1:]] == batch.keys[order[:-1]])
    for one, other in zip(order[again].tolist(), order[again + 1].tolist(), strict=True):
        same = batch.modalities[one] == batch.modalities[other] and batch.contents[one] == batch.contents[other]
        if not same:
            raise ValueError(
                f"{batch.describe(one)} and {batch.describe(other)} have one key and are not the same thing; "
                "give each piece of content its own key, over all data sets that meet in a batch."
            )


def _check_choices(batch: "Batch") -> None:
    owners = np.repeat(np.arange(len(batch)), batch.choices.lengths())
    named = np.sort(owners * 256 + batch.choices.data)
    place = _first(named[1:] == named[:-1])
    if place is not None:
        number, byte = divmod(int(named[place]), 256)
        raise ValueError(f"{batch.describe(number)} offers byte {byte:#04x} twice; choices must be distinct bytes.")
    targets = batch.targets.numpy()
    place = _first(~(np.isfinite(targets) & (targets >= 0)))
    if place is not None:
        owner = batch.describe(int(owners[place]))
        raise ValueError(f"{owner} has the target {targets[place]}; targets must be finite and at least 0.")
    sums = np.bincount(owners, targets, len(batch))
    place = _first((np.abs(sums - 1) > TARGET_TOLERANCE) & (batch.choices.lengths() > 0))
    if place is not None:
        raise ValueError(f"{batch.describe(place)} has targets that sum to {sums[place]:.6g}; they must sum to one.")


def _check_edges(batch: "Batch") -> None:
    for name in ("attract", "repel", "ignore"):
        check_edges(name, getattr(batch, name), len(batch), len(batch), describe=batch.describe)
    check_disjoint(batch.attract, batch.repel, batch.ignore, describe=batch.describe)
    if batch.ignore.weights is not None:
        owner = f" of {batch.describe(int(batch.ignore.anchors()[0]))}" if batch.ignore.count else ""
        raise ValueError(
            f"the ignore edges{owner} have weights; a pair is ignored or it is not. Leave the weights out."
        )


def _first(broken: np.ndarray) -> int | None:
    """The first place where the mask is true."""
    return int(np.argmax(broken)) if broken.any() else None
