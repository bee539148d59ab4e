"""Constants and defaults that decide results: each is frozen by its name, so that none changes or is added unnoticed.

Identifiers hold what is given, not what is written in the code. A constant that changes is a changed result under an
old identifier, unless the classes that use it get another ``Constant`` version.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "assets" / "constants.json"

DECIDE = [
    *(f"xpmir_uform/{layer}" for layer in ("data", "model", "losses", "evaluation", "trainer")),
    "kernels/uform_kernels",
    *(f"xpmir_uform/learner/{name}.py" for name in ("fit", "freezing", "guard", "redundant", "scaling")),
]
"""The sources that decide what is computed. Those left out plan, write, report or export what these compute."""

SIZES = "how much is computed at once: rounding alone"
REMAIN = {
    "xpmir_uform.data.disk": "how files are read",
    "xpmir_uform.model._HOMES": "where names are imported from",
    "xpmir_uform.model.files": "how files are read and written",
    "xpmir_uform.model.running": SIZES,
    "xpmir_uform.model.scoring.CELLS": SIZES,
    "xpmir_uform.evaluation.search.CELLS": SIZES,
    "xpmir_uform.trainer.workers": "how processes end",
    "xpmir_uform.learner.guard.BAD_BATCH": "the name of a report",
    "xpmir_uform.learner.guard.SHOWN": "the length of a report",
    "uform_kernels.choice_loss.chunked": SIZES,
    "uform_kernels.choice_loss.kernel": SIZES,
    "uform_kernels.maxsim.chunked": SIZES,
    "uform_kernels.maxsim.kernel": SIZES,
    "uform_kernels.maxsim.tiles": SIZES,
    "uform_kernels.pair_loss.kernel": SIZES,
    "uform_kernels.pair_loss.rows": SIZES,
    "uform_kernels.pair_loss.tiles": SIZES,
    "uform_kernels.pair_loss.workers": SIZES,
}
"""Constants, or modules of them, that may change without a result, and why."""


def constants_of(text: str, module: str) -> Iterator[tuple[str, str]]:
    """Name and expression of each module-level constant, member of an enumeration and default of an argument."""
    for node in ast.parse(text).body:
        yield from _assigned(node, module, lambda name: name.isupper())
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            for place, member in enumerate(node.body):
                for name, value in _assigned(member, f"{module}.{node.name}", lambda _: True):
                    yield name, f"{place}: {value}" if value == "auto()" else value
    yield from _defaults_in(ast.parse(text), module)


def _defaults_in(scope: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """The defaults of the public functions and constructors of a module or class, but for None and switches."""
    for node in getattr(scope, "body", ()):
        if isinstance(node, ast.ClassDef):
            yield from _defaults_in(node, f"{prefix}.{node.name}")
        if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
            for name, value in _defaults(node.args):
                if isinstance(value, ast.Constant | ast.UnaryOp) and ast.unparse(value) not in (
                    "None",
                    "True",
                    "False",
                ):
                    yield f"{prefix}.{node.name}({name})", ast.unparse(value)


def _assigned(node, prefix, wanted) -> Iterator[tuple[str, str]]:
    """What a statement assigns; one name of several for all of them."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    value = ast.unparse(node.value) if targets and node.value is not None else "TypeVar"
    if not value.startswith("TypeVar"):
        yield from ((f"{prefix}.{name}", value) for name in names if wanted(name))


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    first = len(positional) - len(arguments.defaults)
    yield from ((argument.arg, value) for argument, value in zip(positional[first:], arguments.defaults, strict=True))
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from ((argument.arg, value) for argument, value in named if value is not None)


def found() -> dict[str, str]:
    """Every constant of the sources that decide results."""
    files = [
        file for place in DECIDE for file in ([ROOT / place] if place[-3:] == ".py" else (ROOT / place).rglob("*.py"))
    ]
    constants: dict[str, str] = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part not in ("kernels", "__init__"))
        constants |= dict(constants_of(file.read_text(), module))
    return constants


def remains(name: str) -> bool:
    """Whether no result depends on a constant."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in REMAIN for count in range(1, len(parts) + 1))


def test_every_constant_that_decides_a_result_is_frozen():
    deciding = {name: value for name, value in found().items() if not remains(name)}
    frozen = json.loads(FROZEN.read_text())
    differing = {
        name: [frozen.get(name), deciding.get(name)]
        for name in sorted(frozen.keys() | deciding.keys())
        if frozen.get(name) != deciding.get(name)
    }
    assert not differing, (
        f"frozen, and now: give the classes whose results change a Constant version; then write what is new into "
        f"{FROZEN.name}, or into REMAIN of this file with the reason why no result depends on it"
    )


def test_what_may_change_is_there():
    assert [name for name in REMAIN if not any(each.startswith(name) for each in found())] == []


@pytest.mark.parametrize(
    "name",
    [
        "xpmir_uform.model.rotary.BASE",
        "xpmir_uform.model.encoder.EPSILON",
        "xpmir_uform.evaluation.retrieval.DEPTH",
        "xpmir_uform.data.draws.Purpose.MASK",
        "xpmir_uform.data.masking.EPSILON",
        "xpmir_uform.data.decoding.audio.GAIN",
        "xpmir_uform.trainer.optimizers.adamw(eps)",
        "uform_kernels.pair_loss.problem.SOFTPLUS_LINEAR",
    ],
)
def test_known_ones_are_among_them(name):
    assert name in found()
    assert not remains(name)


def test_each_kind_of_constant_is_found():
    text = """
EPSILON = 1e-6
LIMIT: int = 3
FIRST, SECOND = 1, 2
lower = 4
class Purpose(IntEnum):
    MASK = 7
    DRAW = auto()
class Other:
    HIDDEN = 5
    def f(self, a, b=2, /, c=3.5, *, d=None, e=-1): ...
"""
    assert dict(constants_of(text, "m")) == {
        "m.EPSILON": "1e-06", "m.LIMIT": "3", "m.FIRST": "(1, 2)", "m.SECOND": "(1, 2)",
        "m.Purpose.MASK": "7", "m.Purpose.DRAW": "1: auto()",
        "m.Other.f(b)": "2", "m.Other.f(c)": "3.5", "m.Other.f(e)": "-1",
    }  # fmt: skip
