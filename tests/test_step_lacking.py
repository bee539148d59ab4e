"""A batch that a loss learns nothing from: the run says what is missing."""

import pytest
import torch
from invariance import config, job, run_here
from xpm_torch.learner import LearnerListener, LearnerListenerStatus
from xpm_torch.parameters import RegexParametersIterator
from xpm_torch.trainers.hooks import LayerFreezer

from xpmir_uform import (
    Bag,
    BagSource,
    BalancedForm,
    BatchShape,
    ByteHead,
    ChoicesLoss,
    ContrastiveLoss,
    Item,
    LateInteractionLoss,
    MaskedLoss,
    Negatives,
    PatchHead,
    PooledHead,
    RankedForm,
    Side,
    TokenHead,
    UFormBatcher,
)
from xpmir_uform.monitoring.telemetry import read_alerts, read_telemetry


class Lonely(BagSource):
    """Two texts without an edge, both queries."""

    __xpmid__ = "test.lonely"

    def __len__(self):
        return 16

    def bag(self, index, seed, epoch):
        return Bag((Item.text(f"a{index}", side=Side.QUERY), Item.text(f"b{index}", side=Side.QUERY)))


HEADS = {
    "pooled": PooledHead.C(width=16),
    "tokens": TokenHead.C(width=16),
    "bytes": ByteHead.C(),
    "patches": PatchHead.C(),
}
EVERY = {
    "contrastive": (ContrastiveLoss.C(), "attract edges"),
    "late_interaction": (
        LateInteractionLoss.C(form=BalancedForm.C()),
        "attract edges from a query to a document and edges that repel from a query to a document",
    ),
    "choices": (ChoicesLoss.C(), "items that offer choices"),
    "masked": (MaskedLoss.C(token_mask_probability=0.0), "masked places"),
}


def test_every_loss_says_what_it_lacks_once(tmp_path):
    made = config(
        UFormBatcher.C(shape=BatchShape.C(max_choices_per_item=4)),
        precision="32-true",
        epochs=1,
        source=Lonely.C(),
        losses=[loss for loss, _ in EVERY.values()],
        heads=HEADS,
    )
    run_here(made, tmp_path)
    lines = list(read_telemetry(job(tmp_path)))
    assert all(line["lacking"] == {name: what for name, (_, what) in EVERY.items()} for line in lines)
    (alert,) = read_alerts(job(tmp_path))
    assert (alert["name"], alert["step"]) == ("lacking", 1)
    assert "late_interaction lacks attract edges from a query to a document" in alert["message"]


def test_a_batch_that_has_all_lacks_nothing(tmp_path):
    run_here(config(precision="32-true", epochs=1), tmp_path)
    assert not list(read_alerts(job(tmp_path)))
    assert all(line["lacking"] == {} for line in read_telemetry(job(tmp_path)))


@pytest.mark.parametrize(
    ("loss", "counts", "lacking"),
    [
        (ContrastiveLoss.C(), [0, 3, 2], "attract edges"),
        (ContrastiveLoss.C(negatives=Negatives.NAMED), [4, 0, 2], "cells that repel"),
        (
            ContrastiveLoss.C(form=RankedForm.C()),
            [1, 1, 0],
            "anchors that have both attract edges and cells that repel",
        ),
        (LateInteractionLoss.C(), [2, 1, 0], "queries that have both kinds of edges to documents"),
        (LateInteractionLoss.C(), [2, 1, 1], ""),
        (MaskedLoss.C(), [0, 0, 5, 0], ""),
        (ChoicesLoss.C(), [3], ""),
    ],
)
def test_normalisers_that_are_zero_are_named(loss, counts, lacking):
    assert loss.instance().lacking(torch.tensor(counts, dtype=torch.float64)) == lacking


# --- The other facts of a line


class StopsAfter(LearnerListener):
    """Asks to stop after the first epoch."""

    __xpmid__ = "test.stops-after"

    def __call__(self, state):
        return LearnerListenerStatus.STOP

    def init_task(self, learner, dep, add_action):
        return None

    def update_metrics(self, metrics):
        pass


def test_a_training_that_is_stopped_is_a_whole_one_and_what_hooks_freeze_is_not_trained(tmp_path):
    made = config(precision="32-true", epochs=4)
    made.listeners = [StopsAfter.C(id="stop")]
    made.hooks = [LayerFreezer.C(selector=RegexParametersIterator.C(regex="^encoder", model=made.model))]
    task = run_here(made, tmp_path)
    lines = list(read_telemetry(job(tmp_path)))
    assert [line["percent"] for line in lines] == [5.0, 10.0, 15.0, 20.0, 100.0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["eta_seconds"] == 0.0
    head = sum(p.numel() for name, p in task.context.unwrapped_model().named_parameters() if name.startswith("pooling"))
    assert {line["parameters"]["trainable"] for line in lines} == {head}
    assert lines[0]["parameters"]["total"] > head
