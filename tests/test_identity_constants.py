"""Constants and defaults that decide results: each is frozen by its name, so that none changes or is added unnoticed.

Identifiers hold what is given, not what is written in the code. A constant that changes is a changed result under an
old identifier, unless the classes that use it get another ``Constant`` version.
"""

import ast
import importlib
import json
import pkgutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from experimaestro import Config, Task, experiment, stop_tags
from experimaestro.scheduler.workspace import RunMode
from forks import fork
from safetensors.numpy import save_file

import xpmir_uform
from xpmir_uform import LexicalEvaluation, UFormEncoder
from xpmir_uform.base import configuration
from xpmir_uform.base.configuration import refuse_unnamed, validate
from xpmir_uform.datasets import EmojiCollection, EmojiPairs, EmojiRetrieval, Judgements

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "assets" / "constants.json"

DECIDE = [
    *(f"xpmir_uform/{layer}" for layer in ("data", "datasets", "model", "losses", "evaluation", "trainer")),
    "kernels/uform_kernels",
    *(f"xpmir_uform/base/{name}.py" for name in ("configuration", "devices", "keyed_random")),
    "xpmir_uform/checkpoints/compatibility.py",
    *(f"xpmir_uform/learner/{name}.py" for name in ("freezing", "nonfinite", "optimizers", "redundant_settings")),
]
"""The sources that decide what is computed. Those left out plan, write, report or export what these compute."""

SIZES = "how much is computed at once: rounding alone"
REMAIN = {
    "xpmir_uform.model.weights": "how files are read and written",
    "xpmir_uform.model.inference.batches": SIZES,
    "xpmir_uform.model.inference.scoring.CELLS": SIZES,
    "xpmir_uform.evaluation.search.CELLS": SIZES,
    "xpmir_uform.trainer.loader_workers": "how processes end",
    "xpmir_uform.learner.nonfinite.BAD_BATCH": "the name of a report",
    "xpmir_uform.learner.nonfinite.SHOWN": "the length of a report",
    "uform_kernels.ops.choice_loss.chunked": SIZES,
    "uform_kernels.ops.choice_loss.kernel": SIZES,
    "uform_kernels.ops.maxsim.chunked": SIZES,
    "uform_kernels.ops.maxsim.kernel": SIZES,
    "uform_kernels.ops.maxsim.tiles": SIZES,
    "uform_kernels.ops.pair_loss.kernel": SIZES,
    "uform_kernels.ops.pair_loss.row_sums": SIZES,
    "uform_kernels.ops.pair_loss.tiles": SIZES,
    "uform_kernels.ops.pair_loss.threads": SIZES,
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
        "xpmir_uform.base.keyed_random.Purpose.MASK",
        "xpmir_uform.losses.masking.EPSILON",
        "xpmir_uform.data.decoding.audio.GAIN",
        "xpmir_uform.trainer.optimizers.adamw(eps)",
        "uform_kernels.ops.pair_loss.problem.SOFTPLUS_LINEAR",
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


# Places


CONTENT = {
    "Checkpoint.path": "Checkpoint.sha256 or task, compared with the manifest",
    "Judgements.path": "Judgements.sha256, compared when read, or the task that writes it",
    "PackagePairs.path": "PackagePairs.sha256, compared when read",
}
"""What names the content of each place that a configuration is given."""

STRINGS = {"device", "backend", "force_resume", "id", "fail_on_alert"}
"""Fields of text that identifiers leave out and that are no places."""


def all_configs() -> Iterator[type[Config]]:
    """Every configuration class of the package."""
    for module in pkgutil.walk_packages(xpmir_uform.__path__, "xpmir_uform."):
        importlib.import_module(module.name)
    queue = [Config]
    while queue:
        for cls in queue.pop().__subclasses__():
            queue.append(cls)
            if cls.__module__.startswith("xpmir_uform.") and not cls.__name__.endswith("XPMConfig"):
                yield cls


def test_the_content_of_every_place_is_named():
    """A place is not a part of identifiers: its content has to be."""
    given = set()
    for cls in all_configs():
        for name, argument in cls.__getxpmtype__().arguments.items():
            kind = str(argument.type).lower()
            if (
                argument.ignored
                and not argument.generator
                and ("path" in kind or ("str" in kind and name not in STRINGS))
            ):
                given.add(f"{cls.__name__}.{name}")
    assert given == set(CONTENT)


def test_judgements_that_nothing_names_are_refused(tmp_path):
    collection = EmojiPairs.C(
        collection=EmojiCollection.C(sha256="0" * 64, emoji_version="1", openmoji_version="1", languages=["en", "fr"])
    )
    with pytest.raises(ValueError, match="nothing names the content of"):
        validate(Judgements.C(collection=collection, path=tmp_path / "file"))
    save_file({"others": np.zeros((1, 1), np.int64)}, tmp_path / "file")
    name = sha256((tmp_path / "file").read_bytes()).hexdigest()
    named = Judgements.C(collection=collection, path=tmp_path / "file", sha256=name)
    validate(named)
    assert named.instance().read()["others"].shape == (1, 1)
    save_file({"others": np.ones((1, 1), np.int64)}, tmp_path / "file")
    with pytest.raises(ValueError, match="has the sha256"):
        named.instance().read()
    other = Judgements.C(collection=collection, path=tmp_path / "file", sha256="1" * 64)
    assert other.__xpm__.identifier.all != named.__xpm__.identifier.all


def test_weights_that_nothing_names_are_refused(tmp_path):
    """Two loaders of two places would be one task."""
    loader = UFormEncoder.C(depth=1, hidden=128).loader_config(tmp_path)
    with pytest.raises(ValueError, match="nothing in an identifier names the weights at"):
        refuse_unnamed([loader])
    with pytest.raises(ValueError, match="nothing in an identifier names the weights at"):
        refuse_unnamed([stop_tags(loader)])
    loader.__xpm__.task = loader
    refuse_unnamed([loader, stop_tags(loader)])


TASKS = [cls for cls in all_configs() if issubclass(cls, Task) and not cls.__name__.endswith("XPMValue")]


@pytest.mark.parametrize("cls", TASKS, ids=lambda cls: cls.__name__)
def test_every_task_is_checked_by_whomever_it_is_submitted(cls, tmp_path, monkeypatch):
    """Not by the experiments' helper alone: ``submit`` of experimaestro validates nothing."""
    monkeypatch.setattr(configuration, "validate", lambda task: None)
    task = cls.C()
    task.__xpm__.set_init_tasks([stop_tags(UFormEncoder.C(depth=1, hidden=128).loader_config(tmp_path))])
    submit = cls.__getxpmtype__().value_type.__submit__
    with pytest.raises(ValueError, match="nothing in an identifier names the weights at"):
        submit(task, lambda config: config, None)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="lacks "):
        submit(cls.C(), lambda config: config, None)


def test_a_task_that_is_submitted_by_itself_is_what_submit_returns(tmp_path):
    collection = EmojiCollection.C(sha256="0" * 64, emoji_version="1", openmoji_version="1", languages=["en", "fr"])
    retrievals = {"names": EmojiRetrieval.C(collection=collection, direction="text-text")}

    def work():
        with experiment(tmp_path, "jobs", run_mode=RunMode.GENERATE_ONLY, no_environmental_impact=True):
            task = LexicalEvaluation.C(retrievals=retrievals)
            assert task.submit() is task
            with pytest.raises(ValueError, match="depth"):
                LexicalEvaluation.C(retrievals=retrievals, depth=0).submit()

    assert fork(work, tmp_path / "log") == 0, (tmp_path / "log").read_text()
