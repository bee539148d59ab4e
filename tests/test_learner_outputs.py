"""What a submitted learner offers: each loader and checkpoint is named by its weights and exists when it has ended."""

import json
import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from experimaestro import Constant, GracefulTimeout, Param, RunMode, experiment
from experimaestro.run import TaskRunner
from experimaestro.xpmutils import DirectoryContext
from forks import fork
from safetensors.torch import load_file
from xpm_torch import ModuleLoader, Random
from xpm_torch.learner import LearnerListener
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    Checkpoint,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    Retrieval,
    RetrievalEvaluation,
    RetrievalSet,
    RetrievalValidation,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import default
from xpmir_uform.checkpoints import manifest
from xpmir_uform.export.pretrained import load_model, save_model

EPOCHS, STEPS = 5, 2
WORDS = ["ant", "bee", "cat", "dog", "elk", "fox"]


class Reversed(BagSource):
    """A word and its reverse."""

    __xpmid__ = "test.reversed"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(WORDS[index][::-1])])


class Search(RetrievalSet):
    """Words by their reverse, of which some are the right ones."""

    __xpmid__ = "test.search-of-some"
    shift: Param[int] = default(0)

    def load(self):
        documents = [Item.text(word) for word in WORDS]
        right = [[(number + self.shift) % len(WORDS)] for number in range(len(WORDS))]
        return Retrieval([Item.text(word[::-1]) for word in WORDS], documents, right)


class Spoiled(StepTrainingHook):
    """Sets the weights of the last epochs to noise, so that the best ones come first; ends a run where it is told."""

    __xpmid__ = "test.spoiled"
    version: Constant[str] = "1"
    interruptions: ClassVar[list[int]] = []

    def after(self, state):
        if state.steps in self.interruptions:
            self.interruptions.remove(state.steps)
            os.kill(os.getpid(), signal.SIGTERM)
        if state.steps > 2 * STEPS:
            with torch.no_grad():
                for parameter in state.unwrapped_model().parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(state.steps)))


class StopsAnytime(LearnerListener):
    """May ask training to stop."""

    __xpmid__ = "test.stops-anytime"


def validation(name, **params):
    shift = params.pop("shift", 0)
    return RetrievalValidation.C(id=name, retrieval=Search.C(shift=shift), **params)


def learner(**params):
    return UFormLearner.C(
        **{
            "random": Random.C(seed=3),
            "model": UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
            "trainer": UFormTrainer.C(
                sampler=BagSampler.C(source=Reversed.C()), batch_size=3, losses=[ContrastiveLoss.C()]
            ),
            "max_epochs": EPOCHS,
            "steps_per_epoch": STEPS,
            "optimizers": adamw(CosineSchedule.C(learning_rate=1e-2)),
            "listeners": [],
            "hooks": [Spoiled.C()],
            **params,
        }
    )


def submitted(made, folder):
    """Its output, as ``submit`` makes it."""
    made.__xpm__.seal(DirectoryContext(folder))
    made.__xpm__.task = made
    return UFormLearner.__submit__(made, made.__xpm__.mark_output, lambda action: None)


def offered(output):
    """Every loader and checkpoint of an output by where it is found."""
    return {
        "learned_model": output.learned_model,
        **{f"listeners[{name!r}]": loader for name, loader in output.listeners.items()},
        **{f"checkpoints[{name!r}]": loader for name, loader in output.checkpoints.items()},
    }


def identifier(config):
    return config.__xpm__.identifier.all.hex()


def evaluation(model, loader):
    made = RetrievalEvaluation.C(model=model, retrievals={"words": Search.C()})
    made.__xpm__.set_init_tasks([loader])
    return made


def beginning(model, start):
    """A training that starts from a loader, or from a checkpoint."""
    if not isinstance(start, ModuleLoader):
        return learner(model=model, resume_from=start)
    made = learner(model=model)
    made.__xpm__.set_init_tasks([start])
    return made


def test_whatever_a_learner_offers_is_named_by_its_weights(tmp_path):
    listeners = [
        validation("best"),
        validation("often", interval=2),
        validation("recall", measure="R@1"),
        validation("other", shift=2),
    ]
    found = []
    for seed in (3, 4):
        made = learner(random=Random.C(seed=seed), listeners=listeners, keep=3)
        output = submitted(made, tmp_path / str(seed))
        assert list(offered(output)) == [
            "learned_model", *(f"listeners['{each.id}']" for each in listeners),
            "checkpoints['last']", "checkpoints[3]", "checkpoints[4]", "checkpoints[5]",
        ]  # fmt: skip
        loaders = [each for each in offered(output).values() if isinstance(each, ModuleLoader)]
        found += [identifier(each) for each in offered(output).values()]
        found += [identifier(evaluation(made.model, loader)) for loader in loaders]
        found += [identifier(beginning(made.model, start)) for start in offered(output).values()]
        # Those of the other training are made of other configurations.
        listeners = [validation(each.id, measure=each.measure, interval=each.interval) for each in listeners[:3]]
        listeners.append(validation("other", shift=2))
    assert len(set(found)) == len(found)


def test_two_listeners_that_keep_the_same_weights_offer_the_same(tmp_path):
    output = submitted(learner(listeners=[validation("a"), validation("b")]), tmp_path)
    assert len({identifier(loader) for loader in output.listeners.values()}) == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [4, 5]),
        ({"keep": 1}, [5]),
        ({"keep": 100}, [0, 1, 2, 3, 4, 5]),
        ({"keep": 3, "checkpoint_interval": 2}, [2, 4, 5]),
        ({"keep": 3, "checkpoint_interval": 9}, [0, 5]),
        ({"keep": 2, "checkpoint_steps": 1}, [4, 5]),
        ({"keep": 3, "listeners": [validation("v"), StopsAnytime.C(id="stop")]}, []),
    ],
)
def test_the_epochs_on_offer_are_those_that_are_there_at_the_end(params, expected, tmp_path):
    output = submitted(learner(**params), tmp_path)
    assert [name for name in output.checkpoints if name != "last"] == expected


@pytest.mark.parametrize("params", [{"keep": 2}, {"keep": 3, "checkpoint_steps": 3, "checkpoint_interval": 2}])
def test_what_is_on_offer_is_there_however_often_training_was_interrupted(params, tmp_path, execute):
    Spoiled.interruptions = [5, 7, 8, 9]
    for _ in range(4):
        with pytest.raises(GracefulTimeout):
            execute(learner(**params), tmp_path)
    execute(learner(**params), tmp_path)
    output = submitted(learner(**params), tmp_path / "workspace" / "jobs" / "task" / "job")
    steps = {name: STEPS * (EPOCHS if name == "last" else name) for name in output.checkpoints}
    assert {name: manifest.verify(each.path)["step"] for name, each in output.checkpoints.items()} == steps
    assert manifest.verify(output.learned_model.path)["step"] == STEPS * EPOCHS


def test_the_last_epoch_is_on_offer_wherever_training_resumes(tmp_path):
    begin = Checkpoint.C(path=tmp_path, sha256="0" * 64)
    output = submitted(learner(keep=4, resume_from=begin), tmp_path)
    assert list(output.checkpoints) == ["last", EPOCHS]


def run(job, name):
    log = job / "out.log"
    status = fork(lambda: TaskRunner(str(job / f"{name}.py"), [str(job / f"{name}.lock")]).run(), log)
    assert status == 0, log.read_text()


def submit(folder, names=()):
    """The jobs of a training, and of the evaluations of what it offers under some names."""

    def work():
        with experiment(folder, "jobs", run_mode=RunMode.GENERATE_ONLY, no_environmental_impact=True):
            made = learner(listeners=[validation("best")], keep=3)
            loaders = offered(made.submit())
            tasks = {name: RetrievalEvaluation.C(model=made.model, retrievals={"w": Search.C()}) for name in names}
            for name, task in tasks.items():
                task.submit(init_tasks=[loaders[name]])
            found = {name: str(task.__xpm__.job.path) for name, task in {"training": made, **tasks}.items()}
            (folder / "found.json").write_text(json.dumps(found))

    assert fork(work, folder / "submit.log") == 0, (folder / "submit.log").read_text()
    return {name: Path(path) for name, path in json.loads((folder / "found.json").read_text()).items()}


def test_the_best_weights_the_last_and_those_of_an_epoch_are_evaluated_by_jobs_of_their_own(tmp_path):
    training = submit(tmp_path)["training"]
    run(training, "learner")
    (history,) = (json.loads(path.read_text()) for path in training.rglob("history.json"))
    measured = {int(epoch): values["MRR"] for epoch, values in history.items()}
    expected = {
        "listeners['best']": max(measured.values()),
        "learned_model": measured[EPOCHS],
        "checkpoints[3]": measured[3],
    }
    jobs = submit(tmp_path, list(expected))
    assert jobs.pop("training") == training
    for job in jobs.values():
        run(job, "retrieval-evaluation")
    told = {name: json.loads((job / "results.json").read_text())["w"]["measures"]["MRR"] for name, job in jobs.items()}
    assert told == expected
    assert len(set(told.values())) == len(set(jobs.values())) == 3


def test_a_saved_model_does_not_name_the_data_that_chose_it(tmp_path, execute):
    """The class of that data may be the author's own, and its files on the author's machine."""
    made = learner(listeners=[validation("best")])
    execute(made, tmp_path)
    folder = tmp_path / "workspace" / "jobs" / "task" / "job"
    output = submitted(learner(listeners=[validation("best")]), folder)
    save_model(output.listeners["best"], tmp_path / "model")
    definition = (tmp_path / "model" / "experimaestro.json").read_text()
    assert "search-of-some" not in definition
    assert str(tmp_path) not in definition
    assert output.listeners["best"].settings is not None
    expected = load_file(output.listeners["best"].path / "model.safetensors")
    assert all(
        torch.equal(value, expected[name]) for name, value in load_model(tmp_path / "model").state_dict().items()
    )
