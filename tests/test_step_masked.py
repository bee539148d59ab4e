"""Masked reconstruction: microbatches, ranks, workers and resuming change no mask and no weight beyond rounding."""

import itertools
import weakref

import invariance
import pytest
from invariance import ALONE, JOINT, Pieces, bits, config, distance, run_here, run_ranks

from xpmir_uform import ContrastiveLoss, UFormTrainer
from xpmir_uform.losses import masked


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(config(**JOINT, keep=100), folder)
    return folder


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing(tmp_path, whole, size):
    run_here(config(Pieces.C(size=size), **JOINT), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def test_microbatches_change_nothing_without_a_joint_loss(tmp_path):
    run_here(config(**ALONE, keep=100), tmp_path / "whole")
    run_here(config(Pieces.C(size=2), **ALONE), tmp_path / "parts")
    assert distance(tmp_path / "parts", tmp_path / "whole") < 1e-10


def test_ranks_change_nothing(tmp_path, whole):
    run_ranks(2, lambda rank, folder: run_here(config(Pieces.C(size=2), devices=2, **JOINT), folder), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def test_a_rank_without_a_bag_changes_nothing(tmp_path):
    run_here(config(batch_size=2, keep=100, **JOINT), tmp_path / "one")
    run_ranks(3, lambda rank, folder: run_here(config(batch_size=2, devices=3, **JOINT), folder), tmp_path / "three")
    assert distance(tmp_path / "three", tmp_path / "one") < 1e-10


def test_workers_and_resuming_change_no_bit(tmp_path, whole):
    run_here(config(workers=2, **JOINT), tmp_path / "workers")
    assert bits(tmp_path / "workers", whole) == 0
    with pytest.raises(invariance.Killed):
        run_here(config(kill=7, checkpoint_steps=1, **JOINT), tmp_path / "resumed")
    run_here(config(**JOINT), tmp_path / "resumed")
    assert bits(tmp_path / "resumed", whole) == 0


def test_the_first_pass_keeps_nothing_for_the_losses_that_add_up(tmp_path, monkeypatch):
    """Logits of masked bytes and told patches take more memory than embeddings: only one microbatch's may live."""
    outputs, alive = [], []
    forward, compute = UFormTrainer.forward, ContrastiveLoss.compute

    def noted(self, microbatch):
        answers = forward(self, microbatch)
        outputs.append([weakref.ref(tensor) for tensor in (answers.bytes, *answers.patches.values())])
        return answers

    def compared(self, *args):
        alive.append([any(reference() is not None for reference in each) for each in outputs])
        outputs.clear()
        return compute(self, *args)

    monkeypatch.setattr(UFormTrainer, "forward", noted)
    monkeypatch.setattr(ContrastiveLoss, "compute", compared)
    run_here(config(Pieces.C(size=4), epochs=1, **JOINT), tmp_path)
    assert alive[0] == [False, False, True]


def test_both_losses_are_logged(whole):
    names = invariance.losses(whole)
    assert {"contrastive", "masked", "masked/text_loss", "masked/image_places"} <= names.keys()


def test_control_a_mask_keyed_by_position_is_seen(tmp_path, monkeypatch):
    """The number of masks so far, which a resumed run does not know, in the place of the step."""
    keyed, drawn = masked.generator, itertools.count()
    monkeypatch.setattr(masked, "generator", lambda seed, purpose, step, key: keyed(seed, purpose, next(drawn), key))
    run_here(config(**JOINT), tmp_path / "whole")
    drawn = itertools.count()
    with pytest.raises(invariance.Killed):
        run_here(config(kill=11, checkpoint_steps=1, keep=100, **JOINT), tmp_path / "resumed")
    drawn = itertools.count()
    run_here(config(keep=100, **JOINT), tmp_path / "resumed")
    assert distance(tmp_path / "whole", tmp_path / "resumed") > 1e-4
