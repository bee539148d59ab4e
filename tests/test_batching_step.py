"""The batcher in training: microbatches chosen by memory, also after it ran out, change no weight beyond rounding."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from invariance import EPOCHS, STEPS, config, distance, run_here, run_ranks

from xpmir_uform.batching.batcher import UFormBatcher, UFormBatcherWorker
from xpmir_uform.batching.shape import BatchShape
from xpmir_uform.model.head_modules import Pooling

MEMORY = 3_000_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(config(keep=100), folder)
    return folder


@pytest.fixture
def counted(monkeypatch):
    """The number of microbatches of each plan."""
    counts, plan = [], UFormBatcherWorker.plan

    def noted(self, bags):
        parts = plan(self, bags)
        counts.append(len(parts))
        return parts

    monkeypatch.setattr(UFormBatcherWorker, "plan", noted)
    return counts


@pytest.mark.parametrize(
    "fields", [{"memory": MEMORY}, {"shape": BatchShape.C(segments=5)}, {}], ids=["memory", "shape", "no bound"]
)
def test_the_batcher_changes_nothing(tmp_path, whole, counted, fields):
    run_here(config(UFormBatcher.C(**fields)), tmp_path)
    assert len(counted) == EPOCHS * STEPS
    assert (max(counted) > 1) == bool(fields)
    assert distance(tmp_path, whole) < 1e-10


def _two_ranks(rank: int, folder: Path) -> None:
    """Rank 1 runs out of memory once."""
    forward, failed = Pooling.forward, []

    def fail_once(self, states, lengths):
        if rank == 1 and len(lengths) > 3 and states.requires_grad and not failed and (folder / "trained").exists():
            failed.append(True)
            raise RuntimeError("CUDA out of memory. Tried to allocate.")
        return forward(self, states, lengths)

    process = UFormBatcherWorker.process_withreplay

    def noted(self, *args):
        (folder / "trained").touch()
        return process(self, *args)

    Pooling.forward, UFormBatcherWorker.process_withreplay = fail_once, noted
    worker = run_here(config(UFormBatcher.C(memory=MEMORY), devices=2), folder).trainer.batcher_worker
    told = {"model": asdict(worker.model), "failed": bool(failed), **worker.state_dict()}
    (folder / f"told-{rank}").write_text(json.dumps(told))


def test_two_ranks_know_one_model_and_shrink_together(tmp_path, whole):
    run_ranks(2, _two_ranks, tmp_path)
    first, second = (json.loads((tmp_path / f"told-{rank}").read_text()) for rank in (0, 1))
    assert (first["failed"], second["failed"]) == (False, True)
    assert first["model"] == second["model"]
    assert first["ceiling"] == second["ceiling"] < MEMORY
    assert distance(tmp_path, whole) < 1e-10
