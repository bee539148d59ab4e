"""What a training leaves for TensorBoard and for the report: one run, each point once, the names that the docs list."""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from experimaestro import GracefulTimeout, pathgenerator, taskglobals
from experimaestro.xpmutils import DirectoryContext
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from xpm_torch import Random
from xpm_torch.learner import LearnerListener, LearnerListenerStatus

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    LateInteractionLoss,
    PooledHead,
    Retrieval,
    RetrievalSet,
    RetrievalValidation,
    Side,
    TokenHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.evaluation.measures import MEASURES
from xpmir_uform.monitoring.telemetry import read_telemetry
from xpmir_uform.reports.job.folder import read_histories
from xpmir_uform.reports.job.sections import validations

DOCS = Path(__file__).parent.parent / "docs" / "telemetry.md"
WORDS = ["ant", "bee", "cat", "dog"]
EPOCHS, STEPS = 3, 2


class Reversed(BagSource):
    """A word and its reverse."""

    __xpmid__ = "test.curves-reversed"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        both = Side.QUERY_AND_DOCUMENT
        return Bag.alike([Item.text(WORDS[index], side=both), Item.text(WORDS[index][::-1], side=both)])


class Search(RetrievalSet):
    """Words by their reverse."""

    __xpmid__ = "test.curves-search"

    def load(self):
        return Retrieval(
            [Item.text(word[::-1]) for word in WORDS], [Item.text(word) for word in WORDS], [[0], [1], [2], [3]]
        )


class Norms(LearnerListener):
    """A listener of one's own, which knows nothing of this package but where the report looks."""

    __xpmid__ = "test.curves-norms"
    may_stop = False
    historypath: Annotated[Path, pathgenerator("history.json")]
    interruptions: ClassVar[list[int]] = []

    def __call__(self, state):
        past = json.loads(self.historypath.read_text()) if self.historypath.exists() else {}
        norm = sum(float(parameter.detach().norm()) for parameter in state.model.parameters())
        self.historypath.parent.mkdir(parents=True, exist_ok=True)
        self.historypath.write_text(json.dumps({**past, str(state.epoch): {"sum of norms": norm}}))
        if state.epoch in self.interruptions:
            self.interruptions.remove(state.epoch)
            os.kill(os.getpid(), signal.SIGTERM)
        return LearnerListenerStatus.NO_DECISION


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a job that was stopped in its third epoch, and ran again."""
    folder = tmp_path_factory.mktemp("curves")
    before, taskglobals.Env.instance().taskpath = taskglobals.Env.instance().taskpath, folder

    def run():
        learner = UFormLearner.C(
            random=Random.C(seed=3),
            model=UFormEncoder.C(
                depth=1, hidden=128, pooled=PooledHead.C(width=16), tokens=TokenHead.C(width=16), seed=3
            ),
            trainer=UFormTrainer.C(
                sampler=BagSampler.C(source=Reversed.C()),
                batch_size=2,
                losses=[ContrastiveLoss.C(weight=0.5), LateInteractionLoss.C(weight=3.0)],
            ),
            max_epochs=EPOCHS,
            steps_per_epoch=STEPS,
            optimizers=adamw(CosineSchedule.C(learning_rate=1e-3)),
            listeners=[RetrievalValidation.C(id="search", retrieval=Search.C()), Norms.C(id="norms")],
            hooks=[],
        )
        learner.instance(context=DirectoryContext(folder)).execute()

    Norms.interruptions = [2]
    with pytest.raises(GracefulTimeout):
        run()
    run()
    taskglobals.Env.instance().taskpath = before
    return folder


@pytest.fixture(scope="module")
def events(trained):
    """The one run that TensorBoard shows of the job."""
    (run,) = {path.parent for path in trained.rglob("events.out.tfevents.*")}
    found = EventAccumulator(str(run), {"scalars": 0})
    found.Reload()
    return found


def documented():
    """The names of scalars that the table of the docs lists."""
    table = DOCS.read_text().partition("## TensorBoard")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def test_the_scalars_are_those_that_the_docs_list(events):
    expected = set()
    for name in documented() - {"alerts/NAME", "train/unreadable_items"}:
        for loss in (ContrastiveLoss, LateInteractionLoss):
            for statistic in loss.STATS:
                for measure in MEASURES:
                    values = {"LOSS": loss.NAME, "STATISTIC": statistic, "MEASURE": measure, "ID": "search"}
                    values |= {"OPTIMIZER": "1", "GROUP": "1"}
                    expected.add(re.sub("|".join(values), lambda word, values=values: values[word[0]], name))
    # ``adamw`` makes two optimizers.
    expected.add("train/learning_rate/2/1")
    assert {tag for tag in events.Tags()["scalars"] if not tag.startswith("alerts/")} == expected


def test_each_point_is_there_once_though_the_training_was_interrupted(events):
    for tag in events.Tags()["scalars"]:
        steps = [point.step for point in events.Scalars(tag)]
        assert max(Counter(steps).values()) == 1, tag
        if not tag.startswith("alerts/"):
            expected = [EPOCHS * STEPS] if "/best/" in tag else [STEPS * (epoch + 1) for epoch in range(EPOCHS)]
            assert steps == expected, tag


def test_train_loss_is_the_weighted_sum_of_the_losses(trained, events):
    totals = [line["loss"] for line in read_telemetry(trained)]
    means = [sum(totals[start : start + STEPS]) / STEPS for start in range(0, len(totals), STEPS)]
    assert [point.value for point in events.Scalars("train/loss")] == pytest.approx(means, rel=1e-6)
    parts = [(0.5, f"train/{ContrastiveLoss.NAME}"), (3.0, f"train/{LateInteractionLoss.NAME}")]
    sums = [sum(weight * events.Scalars(tag)[epoch].value for weight, tag in parts) for epoch in range(EPOCHS)]
    assert sums == pytest.approx(means, rel=1e-6)


def test_a_listener_of_ones_own_is_in_the_report(trained):
    found = read_histories(trained, None)
    (norms,) = (history for history in found.values() if "sum of norms" in history["1"])
    assert list(norms) == ["1", "2", "3"]
    assert len(validations(found)) == 2
    path = next(path for path in trained.rglob("history.json") if "sum of norms" in path.read_text())
    history = json.loads(path.read_text())
    history["2"] |= {"note": "a text", "list": [1], "flag": True, "none": None}
    path.write_text(json.dumps(history))
    (norms,) = (history for history in read_histories(trained, None).values() if "sum of norms" in history["1"])
    assert list(norms["2"]) == ["sum of norms"]
    assert len(validations(read_histories(trained, None))) == 2
