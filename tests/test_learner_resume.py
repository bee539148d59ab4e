"""Going on: rates, draws, data order, another task's checkpoint, finished tasks; bit for bit what one run does."""

import json
import os
import random
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from experimaestro import Constant, Meta, taskglobals
from experimaestro.xpmutils import DirectoryContext
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.learner import LearnerListener, LearnerListenerStatus
from xpm_torch.optim import AdamW, ParameterOptimizer
from xpm_torch.schedulers import LinearWithWarmup
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    Checkpoint,
    ContrastiveLoss,
    Item,
    Modality,
    PooledHead,
    Retrieval,
    RetrievalSet,
    RetrievalValidation,
    Side,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    checkpoint_at,
)
from xpmir_uform.base.configuration import default, validate
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.checkpoints import manifest
from xpmir_uform.checkpoints.compatibility import PROBES, config_of, fingerprint
from xpmir_uform.monitoring.telemetry import read_telemetry

COUNT, BATCH = 10, 2


class Masked(BagSource):
    """Texts of which a span is masked and that are cropped, by draws keyed by epoch and bag."""

    __xpmid__ = "test.masked"
    changed: ClassVar[int] = -1

    def __len__(self):
        return COUNT

    def bag(self, index, seed, epoch):
        draw = generator(seed, Purpose.BAG, epoch, index)
        text = f"text number {index}{'!' if index == self.changed else ''} of a few words"
        start, length = (int(n) for n in draw.integers(1, 8, 2))
        masked = text[:start] + "_" * length + text[start + length :]
        return Bag.alike([Item.text(text[: 12 + start], key=index), Item.text(masked, key=100 + index)])


class Dropped(UFormEncoder):
    """Draws from torch's global generator."""

    __xpmid__ = "test.dropped"

    def forward(self, packed):
        outputs = super().forward(packed)
        dropped = torch.nn.functional.dropout(outputs.embeddings, 0.3, self.training)
        return outputs._replace(embeddings=dropped)


class Disturb(LearnerListener):
    """Uses up and reseeds every global generator between epochs."""

    __xpmid__ = "test.disturb"

    def __call__(self, state):
        torch.manual_seed(int(torch.rand(3).sum() * 100) + state.epoch)
        np.random.seed(int(np.random.rand() * 100))
        random.seed(random.random())
        return LearnerListenerStatus.NO_DECISION


class Killed(BaseException):
    """What no handler of errors catches."""


class Watch(StepTrainingHook):
    """Notes the rate of each step, and ends the run before some, once each."""

    __xpmid__ = "test.watch"
    version: Constant[str] = "1"
    note: Meta[str] = default("")
    kills: ClassVar[list[int]] = []
    rates: ClassVar[list[float]] = []

    def before(self, state):
        if state.steps in self.kills:
            self.kills.remove(state.steps)
            raise Killed
        self.rates.append(state.optimizer.optimizers[0].param_groups[0]["lr"])


class Search(RetrievalSet):
    """A few texts."""

    __xpmid__ = "test.search"

    def load(self):
        texts = [Item.text(f"text number {index}") for index in range(COUNT)]
        return Retrieval(texts, texts[::-1], [[COUNT - 1 - index] for index in range(COUNT)])


@pytest.fixture
def used(monkeypatch):
    """The keys of the items of each step that is made, in order."""
    seen, process = [], UFormTrainer.process_batch

    def note(self, loaded):
        process(self, loaded)
        seen.append([bag.key for bag in loaded.bags])

    monkeypatch.setattr(UFormTrainer, "process_batch", note)
    return seen


def config(epochs=3, steps=2, model=Dropped, workers=0, seed=3, hidden=128, listeners=(), **params):
    adamw = AdamW.C(lr=1e-3)
    return UFormLearner.C(
        random=Random.C(seed=seed),
        model=model.C(depth=1, hidden=hidden, pooled=PooledHead.C(width=8), seed=3),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=Masked.C()), batch_size=BATCH, losses=[ContrastiveLoss.C()], num_workers=workers
        ),
        max_epochs=epochs,
        steps_per_epoch=steps,
        optimizers=[
            ParameterOptimizer.C(optimizer=adamw, module=None, scheduler=LinearWithWarmup.C(num_warmup_steps=2))
        ],
        listeners=list(listeners) or [Disturb.C(id="disturb")],
        hooks=[Watch.C()],
        **params,
    )


def job(folder):
    return folder / "workspace" / "jobs" / "task" / "job"


def last(folder):
    return job(folder) / "checkpoints" / "last"


def content(path):
    """Weights, optimizer, and all of the state but durations."""
    state = json.loads((path / "state.json").read_text())
    state["metrics"].pop("step_seconds")
    tensors = {**load_file(path / "model.safetensors"), **load_file(path / "optimizer.safetensors")}
    return {name: tensor.tolist() for name, tensor in tensors.items()}, state


def run_in_pieces(execute, folder, kills, **params):
    """Ends a run before some steps and goes on each time."""
    Watch.kills = list(kills)
    for _ in kills:
        with pytest.raises(Killed):
            execute(config(checkpoint_steps=1, **params), folder)
    return execute(config(checkpoint_steps=1, **params), folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run, which keeps every checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    job(folder).mkdir(parents=True)
    taskglobals.Env.instance().taskpath = job(folder)
    Watch.rates.clear()
    config(checkpoint_steps=1, keep=100).instance(context=DirectoryContext(job(folder))).execute()
    return folder


@pytest.fixture(autouse=True)
def fresh():
    Watch.rates.clear()
    Watch.kills = []


# Rates


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_rates_go_on_where_they_were(execute, tmp_path, whole, stop):
    run_in_pieces(execute, tmp_path, [stop + 1])
    assert Watch.rates == pytest.approx([0, 0.5e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3], abs=1e-18)
    optimizer = load_file(last(tmp_path) / "optimizer.safetensors")
    assert {float(value) for name, value in optimizer.items() if name.endswith("/step")} == {6.0}
    assert content(last(tmp_path)) == content(last(whole))


def test_a_longer_schedule_moves_the_rate_and_is_recorded(execute, tmp_path, whole):
    """Raising the end from step 6 to 12 moves the rate of the fourth step from 0.75 to 0.9."""
    begin = checkpoint_at(job(whole) / "checkpoints" / "step-00000003")
    execute(config(epochs=6, resume_from=begin), tmp_path)
    assert Watch.rates[0] == pytest.approx(0.9e-3, abs=1e-18)
    assert len(Watch.rates) == 9
    (audit,) = manifest.read(last(tmp_path))["audits"]
    assert audit["fields"] == {"max_epochs": [3, 6]}
    assert audit["source"]["step"] == 3


@pytest.mark.parametrize(("steps", "epochs", "first"), [(1, 5, 4), (3, 2, 2), (4, 2, 1)])
def test_epochs_are_those_of_this_task_not_of_the_one_it_begins_with(execute, tmp_path, whole, steps, epochs, first):
    """The checkpoint is of step 3, in an epoch of two steps: its second."""
    begin = checkpoint_at(job(whole) / "checkpoints" / "step-00000003")
    execute(config(steps=steps, epochs=epochs, resume_from=begin), tmp_path)
    lines = list(read_telemetry(job(tmp_path)))
    assert lines[0]["epoch"] == first
    assert [line["epoch"] for line in lines] == [-(-line["step"] // steps) for line in lines]
    assert (manifest.read(last(tmp_path))["step"], manifest.read(last(tmp_path))["epoch"]) == (steps * epochs, epochs)


# Draws


@pytest.mark.parametrize("kills", [[4], [3, 5], [2, 3, 4, 5, 6]])
def test_draws_of_model_and_data_are_those_of_one_run(execute, tmp_path, whole, kills):
    run_in_pieces(execute, tmp_path, kills)
    assert content(last(tmp_path)) == content(last(whole))


def test_control_dropout_is_drawn(execute, tmp_path, whole):
    execute(config(model=UFormEncoder), tmp_path)
    assert content(last(tmp_path))[0] != content(last(whole))[0]


# Data order


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_bag_is_used_once_an_epoch_however_often_it_is_interrupted(execute, tmp_path, used, workers):
    execute(config(steps=5), tmp_path / "whole")
    expected = list(used)
    assert len(expected) == 15
    for start in (0, 5, 10):
        assert sorted(key for step in expected[start : start + 5] for key in step) == list(range(COUNT))
    pieces = [[k, k + 1] for k in (1, 3, 6)] if workers == 0 else [[2, 5]]
    for kills in pieces:
        used.clear()
        run_in_pieces(execute, tmp_path / str(kills), kills, steps=5, workers=workers)
        assert used == expected


# Another task's checkpoint


def test_a_copy_of_the_task_that_begins_in_the_middle_ends_alike(execute, tmp_path, whole):
    begin = checkpoint_at(job(whole) / "checkpoints" / "step-00000003")
    execute(config(resume_from=begin), tmp_path)
    assert content(last(tmp_path)) == content(last(whole))
    assert manifest.read(last(tmp_path))["audits"][0]["fields"] == {}


def test_a_beginning_survives_being_killed(execute, tmp_path, whole):
    begin = {"resume_from": checkpoint_at(job(whole) / "checkpoints" / "step-00000003")}
    Watch.kills = [4]
    with pytest.raises(Killed):
        execute(config(**begin), tmp_path)
    assert os.readlink(last(tmp_path)) == "step-00000003"
    Watch.kills = [6]
    with pytest.raises(Killed):
        execute(config(**begin), tmp_path)
    execute(config(**begin), tmp_path)
    assert content(last(tmp_path)) == content(last(whole))


def test_the_beginning_is_a_parameter_and_its_place_is_not(tmp_path, whole):
    def identifier(**params):
        return config(**params).__xpm__.identifier.all.hex()

    two = [checkpoint_at(job(whole) / "checkpoints" / f"step-0000000{step}") for step in (3, 4)]
    moved = Checkpoint.C(path=tmp_path, sha256=two[0].sha256)
    assert identifier(resume_from=two[0]) == identifier(resume_from=moved)
    assert len({identifier(), identifier(resume_from=two[0]), identifier(resume_from=two[1])}) == 3


def test_another_checkpoint_at_that_place_is_refused(execute, tmp_path, whole):
    begin = checkpoint_at(job(whole) / "checkpoints" / "step-00000003")
    with pytest.raises(ValueError, match="names another checkpoint"):
        execute(config(resume_from=Checkpoint.C(path=last(whole), sha256=begin.sha256)), tmp_path)
    assert not (job(tmp_path) / "checkpoints").exists()


def test_another_tasks_damaged_checkpoint_stops_and_stays(execute, tmp_path, whole):
    source = tmp_path / "source"
    shutil.copytree(job(whole) / "checkpoints" / "step-00000003", source)
    begin = checkpoint_at(source)
    (source / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(manifest.Damaged, match=r"model\.safetensors was changed"):
        execute(config(resume_from=begin), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "workspace"]
    assert len(list(source.iterdir())) == 4


def test_a_beginning_that_is_gone_is_not_missed_later(execute, tmp_path, whole):
    source = tmp_path / "source"
    shutil.copytree(job(whole) / "checkpoints" / "step-00000003", source)
    begin = {"resume_from": checkpoint_at(source)}
    Watch.kills = [5]
    with pytest.raises(Killed):
        execute(config(**begin), tmp_path)
    shutil.rmtree(source)
    execute(config(**begin), tmp_path)
    assert content(last(tmp_path)) == content(last(whole))


def test_a_checkpoint_beyond_the_end_is_refused(execute, tmp_path, whole):
    with pytest.raises(ValueError, match="is of step 6, expected at most 4"):
        execute(config(epochs=2, resume_from=checkpoint_at(job(whole))), tmp_path)


def test_the_newest_of_a_job_is_taken(execute, tmp_path, whole):
    execute(config(epochs=4, resume_from=Checkpoint.C(path=job(whole), task="task/job")), tmp_path)
    assert manifest.read(last(tmp_path))["audits"][0]["source"]["step"] == 6
    assert len(Watch.rates) == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "has the sha256 '' and the task '', expected one of them"),
        ({"sha256": "0" * 64, "task": "task/job"}, "expected one of them"),
        ({"sha256": "0" * 63}, "expected 64 hexadecimal digits"),
        ({"sha256": "not a hash"}, "expected 64 hexadecimal digits"),
    ],
)
def test_a_checkpoint_that_nothing_names_is_refused_when_submitted_and_when_run(
    execute, tmp_path, whole, names, message
):
    """Its place is not a part of the identifier: two of them would be one task."""
    made = config(resume_from=Checkpoint.C(path=last(whole), **names))
    with pytest.raises(ValueError, match=message):
        validate(made)
    with pytest.raises(ValueError, match=message):
        execute(made, tmp_path)


def test_a_task_that_names_a_checkpoint_is_depended_on(whole):
    """Else it could still be training."""
    begin = Checkpoint.C(path=last(whole), task="task/job")
    with pytest.raises(ValueError, match="names the task task/job and does not depend on it"):
        validate(config(resume_from=begin))
    begin.__xpm__.task = config()
    validate(config(resume_from=begin))


def test_the_checkpoint_of_another_task_is_refused(execute, tmp_path, whole):
    with pytest.raises(ValueError, match="has the identifier task/job, expected task/other: resume_from names another"):
        execute(config(resume_from=Checkpoint.C(path=last(whole), task="task/other")), tmp_path)


def test_a_submitted_learner_offers_its_last_checkpoint(tmp_path):
    made = config()
    made.__xpm__.seal(DirectoryContext(tmp_path))
    offered = []
    output = UFormLearner.__submit__(made, lambda value: offered.append(value) or value, lambda action: None)
    assert output.checkpoints["last"] in offered
    assert output.checkpoints["last"].path == tmp_path / "checkpoints" / "last"
    assert output.checkpoints["last"].task == "/".join(tmp_path.parts[-2:])


# Configuration and data


def test_what_is_meta_is_no_other_configuration():
    def values(**params):
        return config_of(config(**params).instance(context=DirectoryContext(Path())))

    meta = {"workers": 2, "keep": 5, "checkpoint_steps": 2, "force_resume": "x", "rank_timeout": 5.0}
    assert values() == values(**meta)
    other = [Disturb.C(id="a"), RetrievalValidation.C(id="b", retrieval=Search.C())]
    assert values() == values(listeners=other)
    assert values() != values(seed=4)
    assert values(hidden=256)["model.hidden"] == 256
    assert values()["optimizers.0.scheduler.num_warmup_steps"] == 2
    assert values()["hooks.0.version"] == "1"


def test_changed_data_are_seen_and_refused(execute, tmp_path, monkeypatch):
    Watch.kills = [4]
    with pytest.raises(Killed):
        execute(config(), tmp_path)
    monkeypatch.setattr(Masked, "changed", 7)
    with pytest.raises(ValueError, match=r"data +[0-9a-f]{39}… +[0-9a-f]{39}…"):
        execute(config(), tmp_path)
    assert os.readlink(last(tmp_path)) == "step-00000002"
    execute(config(force_resume="text 7 was repaired"), tmp_path)
    assert manifest.read(last(tmp_path))["audits"][0]["reason"] == "text 7 was repaired"


class Big:
    """A thousand bags, which counts how many are looked into."""

    def __init__(self, count=1000):
        self.count, self.asked, self.others = count, [], {}

    def __len__(self):
        return self.count

    def bag(self, index, seed, epoch):
        self.asked.append(index)
        return self.others.get(index, Bag.alike([Item.text(str(index)), Item.text(f"{index}!")]))


class Order:
    """A sampler."""

    seed = 1

    def __init__(self, source):
        self.source = source


def test_a_fingerprint_is_cheap_and_sees_what_it_looks_into():
    source = Big()
    first = fingerprint(Order(source))
    assert len(source.asked) == PROBES
    assert first == fingerprint(Order(Big()))
    assert first != fingerprint(Order(Big(999)))
    place = source.asked[5]
    bag = source.bag(place, 0, 0)
    source.others[place] = replace(bag, items=(replace(bag.items[0], content=b"else"), bag.items[1]))
    assert first != fingerprint(Order(source))
    source.others[place] = replace(bag, attract=((1, 0),), repel=((0, 1),))
    assert first != fingerprint(Order(source))
    source.others = {source.asked[5] + 1: bag}
    assert first == fingerprint(Order(source))


@pytest.mark.parametrize(
    "changes",
    [
        {"modality": Modality.IMAGE},
        {"content": b"else"},
        {"key": 5},
        {"side": Side.QUERY},
        {"group": 1},
        {"choices": b"ny"},
        {"targets": (0.5, 0.5)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_fingerprint_sees_each_field_of_an_item(changes):
    item = Item.text("0", choices=b"yn", targets=(0.25, 0.75))
    found = []
    for each in (item, replace(item, **changes)):
        source = Big()
        source.others[0] = Bag((each, Item.text("1")))
        found.append(fingerprint(Order(source)))
    assert found[0] != found[1]


def test_every_field_of_an_item_is_one_of_those():
    assert [field.name for field in fields(Item)] == [
        "modality", "content", "key", "side", "group", "choices", "targets"
    ]  # fmt: skip


# Finished tasks


def test_a_finished_task_run_again_makes_no_step_and_touches_nothing(execute, tmp_path, used):
    def made():
        return config(listeners=[RetrievalValidation.C(id="v", retrieval=Search.C())])

    execute(made(), tmp_path)
    assert len(used) == 6
    kept = [*job(tmp_path).rglob("best/*"), *(job(tmp_path) / "checkpoints").rglob("*")]
    before = {path: (os.stat(path).st_mtime_ns, os.stat(path).st_ino) for path in kept if path.is_file()}
    execute(made(), tmp_path)
    assert len(used) == 6
    assert {path: (os.stat(path).st_mtime_ns, os.stat(path).st_ino) for path in before if path.is_file()} == before


def test_weights_that_are_gone_fail_who_needs_them_with_a_message(execute, tmp_path):
    execute(config(), tmp_path)
    model = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=8))
    loader = model.loader_config(last(tmp_path))
    loader.instance().execute()
    (last(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights at .*last.*they were removed since"):
        loader.instance().execute()


def test_the_best_of_each_validation_is_a_checkpoint_of_its_own(execute, tmp_path):
    execute(config(keep=1, listeners=[RetrievalValidation.C(id="v", retrieval=Search.C())]), tmp_path)
    best = next(job(tmp_path).rglob("history.json")).parent / "best"
    history = {
        int(epoch): values["MRR"] for epoch, values in json.loads((best.parent / "history.json").read_text()).items()
    }
    expected = max(history, key=lambda epoch: (history[epoch], -epoch))
    assert manifest.verify(best)["epoch"] == expected
    assert sorted(p.name for p in (job(tmp_path) / "checkpoints").iterdir()) == ["last", "step-00000006"]
    if expected == 3:
        assert os.path.samefile(best / "model.safetensors", last(tmp_path) / "model.safetensors")
