"""Freezing: parameters that training leaves as they are."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> dict[str, int]:
    """Freezes the parameters whose name begins with what a pattern matches.

    Args:
        model: whose parameters; one that has several names is frozen by any of them.
        patterns: regular expressions; a plain prefix is one.

    Returns:
        By pattern, how many numbers it froze; what an earlier one froze is not counted again.

    Raises:
        ValueError: a pattern is no regular expression or matches no parameter, or nothing is left to train.
    """
    counts = {pattern: _freeze(model, pattern) for pattern in patterns}
    if counts and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"frozen is {list(patterns)}, which freezes every parameter: leave some to train")
    return counts


def expression(field: str, pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern.

    Raises:
        ValueError: it is none; with the name of the field that has it.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field} has {pattern!r}, expected a regular expression or a prefix: {error}") from error


def _freeze(model: nn.Module, pattern: str) -> int:
    names = expression("frozen", pattern)
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = [parameter for name, parameter in every.items() if names.match(name)]
    if not chosen:
        raise ValueError(f"frozen has {pattern!r}, which matches no parameter: their names are {', '.join(every)}")
    fresh = {id(parameter): parameter for parameter in chosen if parameter.requires_grad}
    for parameter in fresh.values():
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in fresh.values())


def count_parameters(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, int]:
    """How many numbers the parameters hold, and how many of them are trained: are not frozen, and have an optimizer."""
    optimized = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = sum(parameter.numel() for parameter in optimized if parameter.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters()), trained
