"""Refusals that the kernels share: each names the argument, says what was given and what was expected."""

import operator
from collections.abc import Callable, Collection

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Positive weights of cells. Within them float32 holds the product of what the weights of two rows sum to, over any
# number of cells that memory holds, and one over it.
LEAST_WEIGHT, MOST_WEIGHT = 1e-18, 1e9
WEIGHTS = f"finite and at least 0 (above 0 from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g})"

Describe = Callable[[int], str]


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuses a word that is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def check_tensor(name: str, value: object) -> None:
    """Refuses what is not a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor.")


def check_shape(name: str, tensor: Tensor, *shape: int | str) -> None:
    """Refuses another shape. A word in `shape` stands for any size: `check_shape("embeddings", e, "N", "d")`."""
    check_tensor(name, tensor)
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({wanted}).")


def check_dtype(name: str, tensor: Tensor, allowed: Collection[torch.dtype] = FLOATING) -> None:
    """Refuses a dtype outside `allowed` (by default the floating types that the kernels take)."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, allowed))}. Convert it first.")


def check_integers(name: str, tensor: Tensor) -> None:
    """Refuses floating, complex and bool tensors where whole numbers are meant."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is {tensor.dtype}; it must hold integers.")


def check_whole(name: str, value: object) -> int:
    """The value as an int; refuses what is no whole number, booleans among them."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} holds {value!r}; it must hold whole numbers.")
    return operator.index(value)


def check_weight(name: str, weight: float) -> None:
    """Refuses a weight that is neither 0 nor within the bounds."""
    if not (weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT):
        raise ValueError(f"{name} is {weight}; it must be {WEIGHTS}.")


def check_device(device: torch.device, against: str, **tensors: Tensor | None) -> None:
    """Refuses tensors that are not on `device`, the device of the argument called `against`. None passes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and {against} on {device}; move one of them.")


def first_true(mask: Tensor) -> int | None:
    """Position of the first true entry of a 1-D mask, or None."""
    return int(mask.to(torch.uint8).argmax()) if bool(mask.any()) else None


def row_name(row: int) -> str:
    """How a row is named where the caller gave no better description."""
    return f"row {row}"


def check_offsets(
    name: str, offsets: Tensor, end: int, *, ends_at: str, first_row: int = 0, describe: Describe = row_name
) -> None:
    """Refuses offsets (rows + 1,) that are not whole, do not start at 0, decrease, or do not end at `end`.

    `ends_at` says in words what the last offset must equal, such as "len(ids)".
    """
    check_tensor(name, offsets)
    check_integers(name, offsets)
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}; it must be (rows + 1,), for no rows [0].")
    if int(offsets[0]) != 0:
        raise ValueError(f"{name} starts at {int(offsets[0])}; it must start at 0.")
    row = first_true(offsets[1:] < offsets[:-1])
    if row is not None:
        low, high = int(offsets[row]), int(offsets[row + 1])
        raise ValueError(f"{name} decreases from {low} to {high} at {describe(first_row + row)}.")
    if int(offsets[-1]) != end:
        raise ValueError(f"{name} ends at {int(offsets[-1])}; it must end at {ends_at} = {end}.")


def check_filled(name: str, offsets: Tensor, describe: Describe = row_name) -> None:
    """Refuses an empty segment."""
    row = first_true(offsets[1:] == offsets[:-1])
    if row is not None:
        raise ValueError(f"{name} gives {describe(row)} nothing; every segment must hold at least one entry.")
