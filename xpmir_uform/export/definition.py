"""Definitions of models: what is written beside the weights, and a reader that anybody's file may be given to.

The layout is that of xpm-torch's model hub: a list of objects that name one another by number, the loader of the
weights last. experimaestro's own reader imports the modules and files that a definition names and follows its paths;
this one makes configurations of known classes from plain values, and nothing else.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from experimaestro import Config
from experimaestro.core.context import SerializationContext
from experimaestro.core.types import EnumType, ObjectType
from xpm_torch.module import SimpleModuleLoader

from xpmir_uform.base.checked_files import NotAFile, hash_of, quoted, read_bytes
from xpmir_uform.base.configuration import validate
from xpmir_uform.model.uform import UFormEncoder
from xpmir_uform.model.weights import DEFINITION, FILE_NAME

DEFINITION_BYTES = 1 << 20
MOST_ENTRIES = 1000
DEEPEST = 16
WEIGHTS = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}\.safetensors", re.ASCII)
"""A plain name, which leads out of no folder."""

OWN = "xpmir_uform."
CORE = "xpm.core"
"""The logger of experimaestro's configurations."""

LOADER = (SimpleModuleLoader.__module__, SimpleModuleLoader.__qualname__)
KEYS = ("id", "module", "type", "typename", "identifier", "fields")

Classes = Mapping[tuple[str, str], Any]
"""Configuration classes by module and qualified name."""


# Writing


def as_config(model: Any) -> Any:
    """The configuration of a model, which may be one, or have been made from one or from a file."""
    if getattr(model, "__config__", None) is not None:
        return model.__config__
    if not isinstance(model, Config) or hasattr(model, "__xpm__"):
        return model
    kind: Any = type(model)
    names = [name for name, argument in kind.__getxpmtype__().arguments.items() if not argument.constant]
    return kind.C(**{name: as_config(getattr(model, name)) for name in names})


def define(model: Any, record: Mapping[str, Any]) -> str:
    """The text of a definition.

    Args:
        model: a configuration.
        record: size and sha256 of the file of weights, named ``model.safetensors``.

    Raises:
        ValueError: the model names files, which would not be there elsewhere.
    """
    entries = _reachable(model.__xpm__.__get_objects__([], SerializationContext()))
    for entry in entries:
        for name, value in entry["fields"].items():
            if isinstance(value, dict) and str(value.get("type", "")).startswith("path"):
                raise ValueError(f"{entry['type']}.{name} is a path, expected a model that its weights are all of")
    loader = SimpleModuleLoader.C(value=model, path=Path(FILE_NAME))
    last = {
        "id": len(entries),
        "module": LOADER[0],
        "type": LOADER[1],
        "typename": loader.__xpmtype__.name(),
        "identifier": loader.__xpm__.identifier.state_dict(),
        "fields": {
            "value": {"type": "python", "value": len(entries) - 1},
            "settings": None,
            "path": {"type": "path.serialized", "value": FILE_NAME, "is_folder": False},
        },
        "files": {FILE_NAME: dict(record)},
    }
    whole = [*entries, last]
    return json.dumps([*entries, {**last, "digest": hash_of(whole)}], indent=1) + "\n"


def _reachable(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects that the last one is made of, numbered from 0, without tasks and files that they came from."""
    known = {entry["id"]: entry for entry in entries}
    wanted, waiting = set(), [entries[-1]["id"]]
    while waiting:
        number = waiting.pop()
        if number not in wanted:
            wanted.add(number)
            waiting += _references(known[number]["fields"])
    kept = [entry for entry in entries if entry["id"] in wanted]
    numbers = {entry["id"]: number for number, entry in enumerate(kept)}
    return [_renumbered({key: entry[key] for key in KEYS if key in entry}, numbers) for entry in kept]


def _references(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and value.get("type") == "python":
        yield value["value"]
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _references(part)


def _renumbered(value: Any, numbers: Mapping[Any, int]) -> Any:
    if isinstance(value, dict):
        if value.get("type") == "python":
            return {"type": "python", "value": numbers[value["value"]]}
        found = {key: _renumbered(part, numbers) for key, part in value.items()}
        return {**found, "id": numbers[value["id"]]} if "fields" in value else found
    return [_renumbered(part, numbers) for part in value] if isinstance(value, list) else value


# Reading


def read(folder: Path, trust: Iterable[str | type] = (), follow: bool = False) -> tuple[Config, str]:
    """The model's configuration in the definition of a folder, and the name of its file of weights.

    Args:
        trust: configuration classes of one's own that it may name, as classes or as ``"module.Class"``.
        follow: files may be links, as the hub's client makes them.

    Raises:
        ValueError: it is damaged, or names or asks for anything else.
    """
    path = folder / DEFINITION
    try:
        return _Reader(_entries(path, follow), known_classes(trust)).model()
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except Refused as error:
        raise ValueError(f"{path} is no definition that can be read: {error}") from error


class Refused(ValueError):
    """A definition holds what it may not."""


def _entries(path: Path, follow: bool) -> list[Any]:
    try:
        entries = json.loads(read_bytes(path, DEFINITION_BYTES, follow).decode())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} holds no {path.name}, expected a folder that save_model wrote") from error
    except NotAFile as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged (it is no text): save it again") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): save it again") from error
    if not entries:
        raise ValueError(f"{path} describes no model: save it again")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Refused("expected a list of objects")
    if len(entries) > MOST_ENTRIES:
        raise Refused(f"it has {len(entries)} objects, expected at most {MOST_ENTRIES}")
    last = entries[-1]
    rest = {name: value for name, value in last.items() if name != "digest"}
    if "digest" in last and last["digest"] != hash_of([*entries[:-1], rest]):
        raise Refused("it was changed after it was written")
    return entries


class _Reader:
    """Makes the configurations of a definition's objects."""

    def __init__(self, entries: list[dict[str, Any]], classes: Classes) -> None:
        self.entries = entries
        self.classes = classes
        self.known = {entry.get("id"): entry for entry in entries if isinstance(entry.get("id"), int)}
        self.made: dict[int, Config] = {}
        self.open: set[int] = set()

    def model(self) -> tuple[Config, str]:
        """Follows the loader, the last object."""
        last = self.entries[-1]
        if (last.get("module"), last.get("type")) != LOADER:
            raise Refused(f"its last object is {_name(last)}, expected {'.'.join(LOADER)}")
        _check_tasks(last)
        fields = _fields(last)
        path = fields.get("path")
        name = path.get("value") if isinstance(path, dict) and path.get("type") == "path.serialized" else None
        if not isinstance(name, str) or not WEIGHTS.fullmatch(name):
            raise Refused(f"its weights are at {quoted(path)}, expected the name of a .safetensors file beside it")
        model = self.value(fields.get("value"), None)
        if not isinstance(model, Config):
            raise Refused("it names no model")
        return model, name

    def value(self, value: Any, kind: Any, depth: int = 0) -> Any:
        """A plain value, a list or dictionary of them, or a configuration."""
        if depth > DEEPEST:
            raise Refused(f"values lie more than {DEEPEST} deep")
        if isinstance(value, list):
            return [self.value(part, getattr(kind, "type", None), depth + 1) for part in value]
        if not isinstance(value, dict):
            return value
        if "type" not in value:
            return {name: self.value(part, getattr(kind, "valuetype", None), depth + 1) for name, part in value.items()}
        if value["type"] == "python":
            return self.configuration(value.get("value"), depth)
        if value["type"] == "enum" and isinstance(kind, EnumType) and value.get("value") in kind.type.__members__:
            return kind.type[value["value"]]
        raise Refused(f"it holds {quoted(value)}, expected numbers, texts and configurations")

    def configuration(self, number: Any, depth: int) -> Config:
        """The configuration that an object describes."""
        if not isinstance(number, int) or number not in self.known:
            raise Refused(f"it names object {quoted(number)}, which is not there")
        if number in self.open:
            raise Refused(f"object {number} holds itself")
        if number not in self.made:
            self.open.add(number)
            self.made[number] = self._make(self.known[number], depth)
            self.open.remove(number)
        return self.made[number]

    def _make(self, entry: Mapping[str, Any], depth: int) -> Config:
        _check_tasks(entry)
        kind = class_of(entry, self.classes)
        known = kind.__getxpmtype__().arguments
        values = {}
        for name, value in _fields(entry).items():
            if name not in known:
                raise Refused(f"{_name(entry)} has no field {quoted(name)}: a later version may have saved it")
            found = self.value(value, known[name].type, depth + 1)
            if not known[name].constant:
                values[name] = found
            elif found != known[name].default:
                raise Refused(f"{_name(entry)} has {name} {quoted(found)}, expected {known[name].default}")
        return make(kind, values)


def make(kind: Any, values: Mapping[str, Any]) -> Config:
    """A configuration of a class, checked.

    Raises:
        Refused: a field is missing, unknown, or of a value that it may not have.
    """
    known = kind.__getxpmtype__().arguments
    missing = [name for name, argument in known.items() if argument.required and values.get(name) is None]
    if missing:
        raise Refused(f"{kind.__qualname__} lacks {', '.join(missing)}")
    try:
        with _unlogged():
            config = kind.C(**values)
        validate(config)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, AssertionError) as error:
        raise Refused(f"{kind.__qualname__} cannot be made: {quoted(str(error).partition(chr(10))[0])}") from error
    return config


@contextmanager
def _unlogged() -> Iterator[None]:
    """experimaestro logs the traceback of an error that it then raises."""
    logger = logging.getLogger(CORE)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def class_of(entry: Mapping[str, Any], classes: Classes) -> Any:
    """The class of an object.

    Raises:
        Refused: it is not one of ``classes``.
    """
    module, name = entry.get("module"), entry.get("type")
    if isinstance(module, str) and isinstance(name, str):
        place = (OWN, name) if module.startswith(OWN) else (module, name)
        if place in classes:
            return classes[place]
    raise Refused(
        f"it names {_name(entry)}, which is not of this package: if you wrote it, give load_model "
        f'trust=["{_name(entry)}"]'
    )


def known_classes(trust: Iterable[str | type] = ()) -> dict[tuple[str, str], Any]:
    """The classes that a definition may name: those that make up a ``UFormEncoder``, the given ones and theirs.

    Raises:
        ValueError: a given one cannot be imported, or is no configuration.
    """
    own = {(OWN, kind.__qualname__): kind for kind in _parts(UFormEncoder)}
    given = [kind for name in trust for kind in _parts(_given(name))]
    return own | {(kind.__module__, kind.__qualname__): kind for kind in given}


def _given(name: str | type) -> Any:
    kind: Any = name
    if isinstance(name, str):
        module, _, cls = name.rpartition(".")
        try:
            kind = getattr(import_module(module), cls)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"trust names {name!r}, which cannot be imported ({error})") from error
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        raise ValueError(f"trust names {name!r}, expected a configuration class")
    return kind.__getxpmtype__().value_type


def _parts(kind: Any) -> list[Any]:
    """A configuration class, and those that its fields are declared to hold."""
    found, waiting = [], [kind]
    while waiting:
        one = waiting.pop()
        if one not in found and one is not Config:
            found.append(one)
            waiting += [part for argument in one.__getxpmtype__().arguments.values() for part in _held(argument.type)]
    return found


def _held(kind: Any) -> Iterator[Any]:
    if isinstance(kind, ObjectType):
        yield kind.value_type
    for inner in (*getattr(kind, "types", ()), getattr(kind, "type", None), getattr(kind, "valuetype", None)):
        if inner is not None and not isinstance(inner, type):
            yield from _held(inner)


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    fields = entry.get("fields")
    if not isinstance(fields, dict):
        raise Refused(f"{_name(entry)} has no fields")
    return fields


def _check_tasks(entry: Mapping[str, Any]) -> None:
    if entry.get("init-tasks"):
        raise Refused(f"{_name(entry)} asks for tasks to be run")


def _name(entry: Mapping[str, Any]) -> str:
    return f"{quoted(entry.get('module'))}.{quoted(entry.get('type'))}"


# From a checkpoint


def from_checkpoint(settings: Mapping[str, Any], trust: Iterable[str | type] = ()) -> Config:
    """The model's configuration from the dotted names and plain values of a checkpoint's manifest.

    Raises:
        Refused: it names a class that is not known, or a value that cannot be.
    """
    kinds = {str(kind.__getxpmtype__().identifier): kind for kind in known_classes(trust).values()}
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        if path[:1] == ["model"] and len(path) <= DEEPEST:
            at = nested
            for part in path[1:]:
                at = at.setdefault(part, {})
                if not isinstance(at, dict):
                    raise Refused(f"{quoted(name)} is below a plain value")
            at[last] = value
    model = _nested(nested, kinds)
    if not isinstance(model, Config):
        raise Refused("it names no model")
    return model


def _nested(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    if "type" not in values:
        if values and all(name.isdecimal() for name in values):
            return [_plain(values[name], kinds) for name in sorted(values, key=int)]
        return {name: _plain(value, kinds) for name, value in values.items()}
    kind = kinds.get(str(values["type"]))
    if kind is None:
        raise Refused(
            f"it is of a model of type {quoted(values['type'])}, which is not of this package: if you wrote it, give "
            "load_model its class by trust=[...]"
        )
    known = kind.__getxpmtype__().arguments
    given = {name: _plain(value, kinds) for name, value in values.items() if name != "type"}
    return make(kind, {name: value for name, value in given.items() if name not in known or not known[name].constant})


def _plain(value: Any, kinds: Mapping[str, Any]) -> Any:
    return _nested(value, kinds) if isinstance(value, Mapping) else value
