"""Fields of configurations, and their validation before submission."""

import re
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import Any, cast

from experimaestro import Config, field
from experimaestro.core.objects import ConfigMixin, ConfigWrapper

from xpmir_uform.base.keyed_random import WORD


def default(value: Any = None, *, factory: Callable[[], Any] | None = None, overrides: bool = False) -> Any:
    """A default that the identifier leaves out, so that a field can be added without changing old identifiers.

    Args:
        value: of the field when none is given.
        factory: makes that value, where it is a configuration; its identifier is hashed as if it had been given.
        overrides: the field redefines one of a base class.
    """
    if factory is not None:
        return field(default_factory=factory, overrides=overrides)
    return field(default=value, ignore_default=True, overrides=overrides)


def check_sha256(name: str, value: str) -> None:
    """Refuses what is no hash.

    Raises:
        ValueError: with the name.
    """
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{name} is {value!r}, expected a sha256: 64 hexadecimal digits in lower case")


def check_seed(name: str, value: int) -> None:
    """Refuses what keyed draws cannot be keyed by.

    Raises:
        ValueError: with the name.
    """
    if not 0 <= value < WORD:
        raise ValueError(f"{name} is {value}, expected an integer in [0, 2**64)")


def check_least(least: float, **values: float) -> None:
    """Refuses the first value that is below ``least`` or NaN.

    Raises:
        ValueError: with its name alone.
    """
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} is {value}, expected at least {least}")


CHECKS: dict[type, Callable[[Any], None]] = {}
"""Checks of classes that are not ours, and have no ``__validate__`` of their own."""


def validate(config: Config) -> None:
    """Runs the ``__validate__`` of a configuration and of every one that it holds, innermost first.

    experimaestro 2.7 means to, but the class it makes of a configuration hides the method behind an empty one.

    Raises:
        ValueError: as the first configuration that is not legal says; or one lacks a required field, or is an instance.
    """
    if not isinstance(config, ConfigMixin):
        raise ValueError(f"{type(config).__name__} was called without .C: configurations are made by .C(...)")
    for part in _parts(config):
        validate(part)
    for name, value in cast(Any, config).__xpm__.values.items():
        # experimaestro takes a None that was given for a value, and hashes it.
        if value is None and (usual := type(config).__xpmtype__.arguments[name].default) is not None:
            raise ValueError(f"{name} is None, expected a value; leave it out for its default, {usual!r}")
    _check_complete(config)
    own = getattr(type(config).__xpmtype__.value_type, "__validate__", None)
    if own is not None:
        own(config)
    for kind, check in CHECKS.items():
        if isinstance(config, kind):
            check(config)
    for name, value in cast(Any, config).__xpm__.values.items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name} is {value}, expected a finite number")
        if isinstance(value, int) and not -WORD // 2 <= value < WORD // 2:
            # An identifier has eight bytes for it.
            raise ValueError(f"{name} is {value}, expected an integer in [-2**63, 2**63)")


def _check_complete(config: Config) -> None:
    """Refuses a configuration without a required field, which experimaestro finds out later, or by a KeyError."""
    kind, held = type(config).__xpmtype__, cast(Any, config).__xpm__.values
    missing = [
        name
        for name, argument in kind.arguments.items()
        if argument.required and argument.generator is None and name not in held
    ]
    if missing:
        raise ValueError(
            f"{kind.value_type.__name__} lacks {', '.join(missing)}, expected {missing[0]}=... in its .C(...)"
        )


def refuse_unnamed(loaders: Iterable[Any]) -> None:
    """Refuses init tasks whose weights nothing in an identifier names: the place of a file is not a part of it.

    Args:
        loaders: as ``submit`` takes them, ``stop_tags`` around some of them.

    Raises:
        ValueError: one is no output of a submitted task.
    """
    for given in loaders:
        loader: Any = given.value if isinstance(given, ConfigWrapper) else given
        if hasattr(loader, "path") and loader.__xpm__.task is None:
            raise ValueError(
                f"nothing in an identifier names the weights at {loader.path}: start from what a submitted task "
                "returns (learned_model, listeners or checkpoints of a learner)"
            )


def check_submitted(task: Any) -> None:
    """Refuses a submitted task that :func:`validate` refuses, or weights that it begins with and nothing names.

    Raises:
        ValueError: says which.
    """
    validate(task)
    refuse_unnamed(task.__xpm__.init_tasks)


class CheckedTask:
    """Lets a task be checked whoever submits it, and not by the experiments' helper alone."""

    def __submit__(self, dep, add_action):
        """The task itself.

        Raises:
            ValueError: as :func:`check_submitted` says.
        """
        check_submitted(self)
        return self


def _parts(value: Any) -> Iterator[Config]:
    """The configurations directly below a configuration, or in a list or dictionary."""
    held = cast(Any, value).__xpm__.values if isinstance(value, Config) else value
    for part in held.values() if isinstance(held, dict) else held:
        if isinstance(part, Config):
            yield part
        elif isinstance(part, (list, dict)):
            yield from _parts(part)
