"""The names of xpm-torch and experimaestro that ours overrides, calls or was written after.

An upgrade that moves or changes one fails here, and not a run. ``assets/upstream.json`` holds

    overrides   by method of ours, the method that it overrides
    parameters  of what ours calls or overrides, by name
    fields      of the configurations that ours extends or fills: whether the identifier leaves them out
    sources     sha256 of the methods that ours was written after: a change is to be read, and followed or not

docs/upstream.md says why ours differs.
"""

import hashlib
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import xpmir_uform

FROZEN = json.loads((Path(__file__).parent / "assets" / "upstream.json").read_text())
UPSTREAM = ("xpm_torch.", "experimaestro.")


def our_classes() -> list[type]:
    """Every class of the package."""
    found = []
    for each in pkgutil.walk_packages(xpmir_uform.__path__, "xpmir_uform."):
        members = vars(importlib.import_module(each.name)).values()
        found += [cls for cls in members if inspect.isclass(cls) and cls.__module__ == each.name]
    return found


def overridden(cls: type, name: str) -> type | None:
    """The class upstream whose method one of ours overrides."""
    base = next((base for base in cls.__mro__[1:] if name in vars(base)), object)
    return base if base.__module__.startswith(UPSTREAM) else None


def overrides() -> dict[str, tuple[Callable, str]]:
    """By method of ours: itself, and what it overrides upstream."""
    return {
        f"{cls.__name__}.{name}": (method, f"{base.__module__}.{base.__qualname__}.{name}")
        for cls in our_classes()
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and (base := overridden(cls, name))
    }


OURS = overrides()


def upstream(name: str):
    """What a dotted name is."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def parameters(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)


def digest(function: Callable) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def fields(cls: type) -> dict[str, str]:
    arguments = cls.__getxpmtype__().arguments.items()
    return {name: "Meta" if argument.ignored else "Param" for name, argument in arguments}


@pytest.mark.parametrize("name", FROZEN["overrides"])
def test_what_ours_overrides_is_still_there(name):
    assert OURS.get(name, (None, "nothing"))[1] == FROZEN["overrides"][name]


@pytest.mark.parametrize("name", sorted(OURS))
def test_ours_takes_what_the_method_that_it_overrides_takes(name):
    ours, theirs = OURS[name][0], upstream(OURS[name][1])
    if name.endswith(".__init__"):
        return
    kinds = inspect.signature(theirs).parameters.values()
    named = [each.name for each in kinds if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    extra = list(inspect.signature(ours).parameters.values())[len(named) :]
    assert parameters(ours)[: len(named)] == named
    assert all(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.default is not each.empty for each in extra)


@pytest.mark.parametrize("name", FROZEN["parameters"])
def test_what_ours_calls_takes_what_it_took(name):
    assert parameters(upstream(name)) == FROZEN["parameters"][name]


@pytest.mark.parametrize("name", FROZEN["fields"])
def test_configurations_have_the_fields_they_had(name):
    assert fields(upstream(name)) == FROZEN["fields"][name]


@pytest.mark.parametrize("name", FROZEN["sources"])
def test_what_ours_was_written_after_is_unchanged(name):
    assert digest(upstream(name)) == FROZEN["sources"][name], (
        f"{name} has changed upstream: compare it with ours, then freeze it anew in assets/upstream.json"
    )


# --- The table of faults

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "upstream.md").read_text()
NAMED = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", DOCUMENT))


def found_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE))


def test_every_test_that_the_table_names_exists():
    assert len(NAMED) > 80
    assert {(file, name) for file, name in NAMED if name not in found_in(file)} == set()


def test_every_row_of_the_table_names_its_tests():
    rows = [line.strip("|").split(" | ") for line in DOCUMENT.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows if row[0].strip() not in ("the library", "---") for cell in row[2:]]
    assert len(cells) > 80
    assert all("::test_" in cell or cell.strip() == "the same" for cell in cells)


@pytest.mark.parametrize("file", ["test_stock_learner.py", "test_stock_experimaestro.py"])
def test_the_table_names_every_test_of_a_fault(file):
    assert found_in(file) - {name for _, name in NAMED} == set()
