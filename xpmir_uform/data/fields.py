"""Fields of configurations."""

from collections.abc import Callable
from typing import Any

from experimaestro import field


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
