"""Reads settings from YAML and ``-c``: every key is known, every value has its type, and what is wrong is one line.

experimaestro 2.7 passes over keys that no field has, so that a misspelt one leaves the default in place.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import attr
import click
from experimaestro.experiments.configuration import MISSING
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import core_schema

from xpmir_uform.recipes.jobs import full_file_system

T = TypeVar("T")


def read_settings(kind: type[T], data: Any, path: str = "") -> T:
    """An instance of a class of settings, from nested mappings.

    A number is taken for a string where a string is expected: ``devices: 1`` is ``"1"``.

    Args:
        kind: made by experimaestro's ``configuration``.
        data: what YAML holds at ``path``, the dotted name of these settings within the file.

    Raises:
        ValueError: a key is unknown, a required one is missing, or a value has another type.
    """
    fields = attr.fields_dict(attr.resolve_types(kind))  # type: ignore[arg-type, type-var]
    if not isinstance(data, Mapping):
        raise ValueError(f"{path or 'the file'} is {data!r}, expected a section with some of {', '.join(fields)}")
    prefix = f"{path}." if path else ""
    for key in data:
        if key not in fields:
            raise ValueError(f"{prefix}{key} is no setting{_hint(str(key), kind, prefix)}")
    for name, field in fields.items():
        if name not in data and field.default in (attr.NOTHING, MISSING):
            raise ValueError(f"{prefix}{name} is missing, expected a value for it")
    return kind(**{name: _value(fields[name].type, value, f"{prefix}{name}") for name, value in data.items()})


def _hint(key: str, kind: type, prefix: str) -> str:
    """The nearest setting, here or in another section; else all that there are here."""
    here = list(attr.fields_dict(kind))
    if near := get_close_matches(key, here, 1):
        return f": did you mean {prefix}{near[0]}?"
    if elsewhere := [name for name in _names(kind) if name.rpartition(".")[2] == key]:
        return f" here: did you mean {' or '.join(prefix + name for name in elsewhere)}?"
    return f", expected some of {', '.join(here)}"


def _names(kind: type) -> Iterator[str]:
    """The dotted names of all settings."""
    for name, field in attr.fields_dict(kind).items():
        yield name
        if field.type is not None and attr.has(field.type):
            yield from (f"{name}.{below}" for below in _names(field.type))


def _value(kind: Any, value: Any, path: str) -> Any:
    """A value of the type ``kind``; settings may be nested in optional fields, lists and mappings."""
    if attr.has(kind):
        return read_settings(kind, value, path)
    if get_origin(kind) in (Union, UnionType) and value is not None:
        parts = [part for part in get_args(kind) if part is not type(None)]
        if len(parts) == 1:
            return _value(parts[0], value, path)
    nested = [part for part in get_args(kind) if attr.has(part)]
    if nested and isinstance(value, Mapping) and get_origin(kind) is dict:
        return {key: read_settings(nested[0], part, f"{path}.{key}") for key, part in value.items()}
    if nested and isinstance(value, list) and get_origin(kind) is list:
        return [read_settings(nested[0], part, f"{path}.{number}") for number, part in enumerate(value)]
    if isinstance(value, bool) and kind in (int, float):
        raise ValueError(f"{path} is {value!r}, expected a number")
    try:
        return TypeAdapter(kind, config=ConfigDict(coerce_numbers_to_str=True)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{path} is {value!r}: {error.errors()[0]['msg']}") from None


def read_by(plan: Callable, read: Callable[[type, Any], Any]) -> Callable:
    """The plan of an experiment file, whose settings experimaestro's command makes by ``read(class, mapping)``.

    The command makes the second argument from the plan's annotation: here, a type that pydantic makes by ``read``.
    """
    signature = inspect.signature(plan)
    kind = list(get_type_hints(plan).values())[-1:]
    if len(signature.parameters) != 2 or not kind or not attr.has(kind[0]):
        return plan

    class Settings:
        """What the command takes for the class of the settings."""

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
            return core_schema.no_info_plain_validator_function(lambda data: read(kind[0], data))

    @functools.wraps(plan)
    def planned(helper: Any, settings: Any) -> Any:
        return plan(helper, settings)

    helper, settings = signature.parameters.values()
    planned.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[helper, settings.replace(annotation=Settings)]
    )
    return planned


def check_options() -> None:
    """Refuses a ``-c`` without ``=``, which experimaestro's command passes over.

    Raises:
        ValueError: there is one.
    """
    for option in _parameter("extra_conf") or ():
        if "=" not in option:
            raise ValueError(f"-c {option} sets nothing, expected -c name=value")


def check_room() -> None:
    """Refuses a ``--workdir`` on a full disk, of which experimaestro's command tells by a traceback.

    Raises:
        ValueError: which file system is full.
    """
    folder = _parameter("workdir")
    if folder and (full := full_file_system(Path(folder))):
        raise ValueError(full)


def _parameter(name: str) -> Any:
    """What experimaestro's command was given for an option; None: nothing, or another program runs."""
    context = click.get_current_context(silent=True)
    return context.params.get(name) if context else None
