"""Choices joined with contrast: microbatches and ranks change no weight beyond rounding."""

import pytest
from invariance import CHOICES, config, distance, losses, offered, run_here, run_ranks

from xpmir_uform import ChoicesLoss


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(config(offered(), **CHOICES, keep=100), folder)
    return folder


@pytest.mark.parametrize("bags", [1, 3])
def test_microbatches_change_nothing(tmp_path, whole, bags):
    run_here(config(offered(bags), **CHOICES), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


@pytest.mark.parametrize(("world", "bags"), [(2, 2), (3, 0)])
def test_ranks_change_nothing(tmp_path, whole, world, bags):
    run_ranks(world, lambda rank, folder: run_here(config(offered(bags), devices=world, **CHOICES), folder), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def test_a_rank_without_a_bag_changes_nothing(tmp_path):
    run_here(config(offered(), batch_size=2, keep=100, **CHOICES), tmp_path / "one")
    made = config(offered(), batch_size=2, devices=3, **CHOICES)
    run_ranks(3, lambda rank, folder: run_here(made, folder), tmp_path / "three")
    assert distance(tmp_path / "three", tmp_path / "one") < 1e-10


def test_accuracy_and_the_number_asked_are_of_the_global_batch(tmp_path, whole):
    run_here(config(offered(2), **CHOICES), tmp_path)
    found, expected = losses(tmp_path), losses(whole)
    assert {"choices", "choices/accuracy", "choices/asked"} <= expected.keys()
    for name in ("choices", "choices/accuracy", "choices/asked"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9)


def test_control_a_mean_over_each_microbatch_is_seen(tmp_path, whole, monkeypatch):
    compute = ChoicesLoss.compute
    monkeypatch.setattr(
        ChoicesLoss, "compute", lambda self, a, questions, counts: compute(self, a, questions, self.counts(questions))
    )
    run_here(config(offered(3), **CHOICES), tmp_path)
    assert distance(tmp_path, whole) > 1e-4
