"""The report of jobs that really trained: interrupted and resumed, with checkpoints, alerts and validations."""

import json
from typing import ClassVar

import pytest
from experimaestro import Constant
from xpm_torch import Random
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    Retrieval,
    RetrievalSet,
    RetrievalValidation,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.commands import main
from xpmir_uform.monitoring.alerts import Alerts
from xpmir_uform.reports.job.page import contents

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]


class Doubled(BagSource):
    """A word and its double."""

    __xpmid__ = "test.doubled"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(2 * WORDS[index])])


class Search(RetrievalSet):
    """Words by their double."""

    __xpmid__ = "test.search"

    def load(self):
        queries, documents = ([Item.text(times * word) for word in WORDS] for times in (2, 1))
        return Retrieval(queries, documents, [[i] for i in range(len(WORDS))])


class Killed(BaseException):
    """What no handler of errors catches."""


class KillAt(StepTrainingHook):
    """Ends the run before the given step, once."""

    __xpmid__ = "test.report-kill-at"
    version: Constant[str] = "1"
    steps: ClassVar[set[int]] = set()

    def before(self, state):
        if state.steps in self.steps:
            self.steps.discard(state.steps)
            raise Killed


def config(epochs=2, steps=6, **params):
    return UFormLearner.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
        trainer=UFormTrainer.C(sampler=BagSampler.C(source=Doubled.C()), batch_size=4, losses=[ContrastiveLoss.C()]),
        max_epochs=epochs,
        steps_per_epoch=steps,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2, warmup_steps=3)),
        listeners=[RetrievalValidation.C(id="words", retrieval=Search.C())],
        hooks=[KillAt.C()],
        **params,
    )


@pytest.fixture
def interrupted(execute, tmp_path):
    """The folder of a job that was killed twice, raised an alert, and ended."""
    KillAt.steps = {5, 9}
    made = {"checkpoint_steps": 2, "alerts": Alerts.C(learning_rate=5e-3), "window": 4}
    for _ in range(2):
        with pytest.raises(Killed):
            execute(config(**made), tmp_path)
    execute(config(**made), tmp_path)
    return tmp_path / "workspace" / "jobs" / "task" / "job"


def test_a_job_that_was_killed_twice(interrupted, capsys):
    assert main(["report", str(interrupted)]) == 0
    page = (interrupted / "report.html").read_text()
    assert "12 lines of telemetry, of the steps 1 to 12: each step has its line." in page
    lineage = page[page.index('<section id="lineage">') : page.index('<section id="environment">')]
    newest = json.loads((interrupted / "checkpoints" / "last" / "manifest.json").read_text())
    assert [audit["source"]["step"] for audit in newest["audits"]] == [4, 8]
    resumed = contents(interrupted, 0.0)["curves"][0].events
    assert resumed == [(4, "resumed"), (8, "resumed")]
    for audit in newest["audits"]:
        assert f"<td>{audit['time']}</td>" in lineage
    assert f"step 10, {newest['previous']['sha256'][:12]}" in lineage
    assert "no longer here" in lineage
    assert "step-00000012" in lineage
    assert "best of listener 0" in lineage
    assert newest["versions"]["torch"] in page
    assert "<td>learning_rate</td>" in page
    assert 'alt="Validation: 0: ' in page
    assert "params.json is not there" in page


def test_a_damaged_checkpoint_is_told_of(interrupted):
    damaged = interrupted / "checkpoints" / "step-00000012" / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"step": 12', '"step": 13'))
    aside = interrupted / "checkpoints" / "damaged-step-00000006-0"
    aside.mkdir()
    aside.with_name(f"{aside.name}.txt").write_text("model.safetensors was <cut>\n")
    assert main(["report", str(interrupted)]) == 0
    page = (interrupted / "report.html").read_text()
    assert "manifest.json was changed: its digest is of other content" in page
    assert "last; " in page
    assert "set aside: model.safetensors was &lt;cut&gt;" in page


def test_the_configuration_as_experimaestro_writes_it(interrupted):
    objects = config(checkpoint_steps=2).__xpm__.__json__()
    (interrupted / "params.json").write_text(f'{{"objects": {objects}}}')
    shown = contents(interrupted, 0.0)
    task = {child.name: child for child in shown["configuration"].children}
    assert shown["configuration"].value == "UFormLearner"
    assert task["checkpoint_steps"].value == "2"
    assert task["model"].value == "UFormEncoder"
    assert {child.name: child.value for child in task["model"].children}["hidden"] == "128"
    assert [child.value for child in task["optimizers"].children] == ["ParameterOptimizer"] * 2
    assert "Validation: words" in [panel.title for panel in shown["curves"]]
