"""Late interaction in training: microbatches, limits and ranks change no weight beyond rounding."""

from collections import Counter
from pathlib import Path

import invariance
import pytest
import torch.distributed as dist
from invariance import Pieces, config, distance, run_here, run_ranks
from xpm_torch.batchers import PowerAdaptativeBatcher

from xpmir_uform import LateInteractionLoss, UFormTrainer

SHORT = {"epochs": 1}
OBJECTIVES = {"named": {**SHORT, **invariance.NAMED}, "ambient": {**SHORT, **invariance.AMBIENT}}
LIMITED = {**SHORT, **invariance.LIMITED}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folders of uninterrupted runs in one microbatch."""
    folders = {}
    for name, objective in OBJECTIVES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        run_here(config(keep=100, **objective), folders[name])
    return folders


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing(tmp_path, whole, name, size):
    run_here(config(Pieces.C(size=size), **OBJECTIVES[name]), tmp_path)
    assert distance(tmp_path, whole[name]) < 1e-10


def test_limits_are_honoured_and_change_nothing(tmp_path, whole, monkeypatch):
    parts = []
    step = UFormTrainer.step

    def noted(self, loaded, bags, count):
        bags = list(bags)
        parts.append(bags)
        assert sorted(bag.key for part in bags for bag in part) == sorted(bag.key for bag in loaded.bags)
        return step(self, loaded, iter(bags), count)

    monkeypatch.setattr(UFormTrainer, "step", noted)
    run_here(config(**LIMITED), tmp_path)
    limits = {"query_tokens": 17, "documents": 9, "document_tokens": 190}
    for name, limit in limits.items():
        found = [sum(getattr(bag, name) for bag in part) for bags in parts for part in bags]
        assert max(found) <= limit
    assert min(map(len, parts)) > 1
    assert distance(tmp_path, whole["named"]) < 1e-10


def test_limits_that_no_batcher_honours_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the losses bound query_tokens, documents, document_tokens of a microbatch"):
        run_here(config(PowerAdaptativeBatcher.C(), **LIMITED), tmp_path)


@pytest.mark.parametrize(("name", "world", "size"), [("named", 2, 2), ("ambient", 2, 7), ("ambient", 3, 1)])
def test_ranks_change_nothing(tmp_path, whole, name, world, size):
    work = config(Pieces.C(size=size), devices=world, **OBJECTIVES[name])
    run_ranks(world, lambda rank, folder: run_here(work, folder), tmp_path)
    assert distance(tmp_path, whole[name]) < 1e-10


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_rank_without_an_item_changes_nothing(tmp_path, name):
    objective = {**OBJECTIVES[name], "batch_size": 2}
    run_here(config(keep=100, **objective), tmp_path / "one")
    run_ranks(3, lambda rank, folder: run_here(config(devices=3, **objective), folder), tmp_path / "three")
    assert distance(tmp_path / "three", tmp_path / "one") < 1e-10


def _failing(at: int):
    """A score that runs out of memory once, at one call: its own, of the other rank, for the gradients of the other."""
    score, calls = LateInteractionLoss.score, []

    def fail(self, *args):
        calls.append(None)
        if len(calls) == at + 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate.")
        return score(self, *args)

    return fail


@pytest.mark.parametrize("at", [0, 1, 2], ids=["own", "others", "gradients"])
def test_both_ranks_retry_when_one_runs_out_of_memory(tmp_path, whole, at):
    def work(rank: int, folder: Path) -> None:
        if rank == 0:
            LateInteractionLoss.__getxpmtype__().value_type.score = _failing(at)
        batcher = PowerAdaptativeBatcher.C()
        task = run_here(config(batcher, devices=2, **OBJECTIVES["ambient"]), folder)
        (folder / f"parts-{rank}").write_text(str(task.trainer.batcher_worker.current_divider))

    run_ranks(2, work, tmp_path)
    assert [(tmp_path / f"parts-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert distance(tmp_path, whole["ambient"]) < 1e-10


def _count_collectives(rank: int, folder: Path) -> None:
    """Two passes of the documents of each rank, one sum of their gradients at each, and one verdict on memory."""
    calls: Counter = Counter()
    steps: list[Counter] = []
    for name in ("broadcast", "reduce"):
        setattr(dist, name, _counted(name, getattr(dist, name), calls))
    process = UFormTrainer.__getxpmtype__().value_type.process_batch

    def process_counted(trainer, batch):
        calls.clear()
        process(trainer, batch)
        steps.append(Counter(calls))

    UFormTrainer.__getxpmtype__().value_type.process_batch = process_counted
    run_here(config(Pieces.C(size=1), devices=2, **OBJECTIVES["ambient"]), folder)
    assert steps == [{"broadcast": 4, "reduce": 2}] * invariance.STEPS


def _counted(name, original, calls):
    def call(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)

    return call


def test_documents_pass_by_twice_whatever_the_microbatches(tmp_path):
    run_ranks(2, _count_collectives, tmp_path)


def test_control_a_lost_gradient_of_foreign_documents_is_seen(tmp_path, whole):
    def work(rank: int, folder: Path) -> None:
        dist.reduce = lambda values, dst: None
        run_here(config(devices=2, **OBJECTIVES["ambient"]), folder)

    run_ranks(2, work, tmp_path)
    assert distance(tmp_path, whole["ambient"]) > 1e-4
