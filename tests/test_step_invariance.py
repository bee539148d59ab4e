"""One identifier, one result: microbatches, batchers, ranks and resuming change no weight beyond rounding."""

import itertools
from collections import Counter
from pathlib import Path

import invariance
import pytest
import torch.distributed as dist
from invariance import EPOCHS, STEPS, Pieces, config, distance, relative, run_here, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from xpm_torch.batchers import PowerAdaptativeBatcher

from xpmir_uform import BatchShape, RankedForm, UFormBatcher, UFormEncoder, UFormTrainer
from xpmir_uform.model.head_modules import Pooling


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(config(keep=100), folder)
    return folder


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_microbatches_change_nothing(tmp_path, whole, size):
    run_here(config(Pieces.C(size=size)), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


@pytest.mark.parametrize(
    "batcher", [UFormBatcher.C(shape=BatchShape.C(bags=2)), invariance.SMALL_MEMORY], ids=["bags", "memory"]
)
def test_our_batcher_changes_nothing(tmp_path, whole, batcher, monkeypatch):
    parts = []
    forward = UFormTrainer.step
    monkeypatch.setattr(UFormTrainer, "step", lambda self, *args: parts.append(args[2]) or forward(self, *args))
    run_here(config(batcher), tmp_path)
    assert max(parts) > 1
    assert distance(tmp_path, whole) < 1e-10


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing_in_float32(tmp_path, size):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(config(precision="32-true", keep=100), whole)
    run_here(config(Pieces.C(size=size), precision="32-true"), parts)
    assert relative(parts, whole) < 1e-5


@pytest.mark.parametrize(("world", "size"), [(2, 7), (2, 1), (3, 2)])
def test_ranks_change_nothing(tmp_path, whole, world, size):
    run_ranks(world, lambda rank, folder: run_here(config(Pieces.C(size=size), devices=world), folder), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def test_a_rank_without_a_bag_changes_nothing(tmp_path):
    run_here(config(batch_size=2, keep=100), tmp_path / "one")
    run_ranks(3, lambda rank, folder: run_here(config(batch_size=2, devices=3), folder), tmp_path / "three")
    assert distance(tmp_path / "three", tmp_path / "one") < 1e-10


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_back_ends_change_nothing_in_float32(tmp_path, backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="needs the extra 'triton'")
    params = {"precision": "32-true", "epochs": 1, "keep": 100}
    run_here(config(backend="chunked", **params), tmp_path / "chunked")
    run_here(config(backend=backend, **params), tmp_path / backend)
    assert relative(tmp_path / backend, tmp_path / "chunked") < 1e-5


def test_bfloat16_trains_in_microbatches(tmp_path):
    run_here(config(precision="bf16-mixed", epochs=1, keep=100), tmp_path / "whole")
    run_here(config(Pieces.C(size=2), precision="bf16-mixed", epochs=1), tmp_path / "parts")
    # Embeddings have 3 digits: the first steps of AdamW, signs of gradients, differ where a gradient is about 0.
    assert relative(tmp_path / "parts", tmp_path / "whole") < 1e-2


def test_ranked_form_over_ranks(tmp_path):
    run_here(config(form=RankedForm.C(), keep=100), tmp_path / "one")
    work = config(Pieces.C(size=1), form=RankedForm.C(), devices=2)
    run_ranks(2, lambda rank, folder: run_here(work, folder), tmp_path / "two")
    assert distance(tmp_path / "two", tmp_path / "one") < 1e-10


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, whole):
    with pytest.raises(invariance.Killed):
        run_here(config(kill=11, checkpoint_steps=1), tmp_path)
    run_ranks(2, lambda rank, where: run_here(config(devices=2), where), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def _failing(times: int):
    """A pass through the head that runs out of memory the first ``times`` times."""
    remaining = [None] * times
    forward = Pooling.forward

    def fail(self, states, lengths):
        if remaining:
            remaining.pop()
            raise RuntimeError("CUDA out of memory. Tried to allocate.")
        return forward(self, states, lengths)

    return fail


def _one_runs_out_of_memory(rank: int, folder: Path) -> None:
    Pooling.forward = _failing(1 if rank == 0 else 0)
    task = run_here(config(PowerAdaptativeBatcher.C(), devices=2), folder)
    (folder / f"parts-{rank}").write_text(str(task.trainer.batcher_worker.current_divider))


def test_both_ranks_retry_when_one_runs_out_of_memory(tmp_path, whole):
    run_ranks(2, _one_runs_out_of_memory, tmp_path)
    assert [(tmp_path / f"parts-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert distance(tmp_path, whole) < 1e-10


def test_out_of_memory_on_one_device_replays_the_step(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(Pooling, "forward", _failing(2))
    task = run_here(config(PowerAdaptativeBatcher.C()), tmp_path)
    assert task.trainer.batcher_worker.current_divider > 1
    assert distance(tmp_path, whole) < 1e-10


def _count_collectives(rank: int, folder: Path) -> None:
    calls: Counter = Counter()
    steps: list[Counter] = []
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(dist, name, _counted(name, getattr(dist, name), calls))
    process = UFormTrainer.__getxpmtype__().value_type.process_batch

    def hook(state, bucket):
        calls[f"bucket {bucket.index()}"] += 1
        calls["all_reduce"] -= 1  # the one that the next line makes
        return allreduce_hook(None, bucket)

    def process_counted(trainer, batch):
        if not steps:
            trainer._fabric_model._forward_module.register_comm_hook(None, hook)
        calls.clear()
        process(trainer, batch)
        steps.append(Counter(calls))

    UFormTrainer.__getxpmtype__().value_type.process_batch = process_counted
    run_here(config(Pieces.C(size=1), devices=2), folder)
    assert len(steps) == EPOCHS * STEPS
    # Two sums: the counts before the forward passes, and losses with the verdict on memory after the backward ones.
    expected = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    for exact in steps:
        buckets = {name: count for name, count in exact.items() if name.startswith("bucket")}
        assert buckets, exact
        assert exact == {**expected, **dict.fromkeys(buckets, 1)}, exact


def _counted(name, original, calls):
    def call(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)

    return call


def test_a_step_makes_each_collective_call_once(tmp_path):
    run_ranks(2, _count_collectives, tmp_path)


# --- Negative controls: what must change the weights


def _without_world_factor(rank: int, folder: Path) -> None:
    UFormTrainer.__getxpmtype__().value_type.backward = lambda self, value: self.context.backward(value)
    run_here(config(devices=2), folder)


def test_control_a_missing_world_size_factor_is_seen(tmp_path, whole):
    """AdamW forgives a factor on the gradient; its epsilon does not."""
    run_ranks(2, _without_world_factor, tmp_path)
    assert distance(tmp_path, whole) > 1e-7


def test_control_a_dropped_temperature_gradient_is_seen(tmp_path, whole, monkeypatch):
    from xpmir_uform.trainer.step import exact

    monkeypatch.setattr(exact, "surrogate", lambda answers, gradient: (answers.embeddings * gradient.embeddings).sum())
    monkeypatch.setattr(UFormEncoder, "clamp_temperature", lambda self: None)
    run_here(config(), tmp_path)
    assert distance(tmp_path, whole) > 1e-4


def test_control_a_draw_keyed_by_position_is_seen(tmp_path, monkeypatch):
    """The number of draws so far, which a resumed run does not know, in the place of the epoch."""
    bag, drawn = invariance.Words.bag, itertools.count()
    monkeypatch.setattr(invariance.Words, "bag", lambda self, index, seed, epoch: bag(self, index, seed, next(drawn)))
    run_here(config(), tmp_path / "whole")
    drawn = itertools.count()
    with pytest.raises(invariance.Killed):
        run_here(config(kill=11, checkpoint_steps=1, keep=100), tmp_path / "resumed")
    drawn = itertools.count()
    run_here(config(keep=100), tmp_path / "resumed")
    assert distance(tmp_path / "whole", tmp_path / "resumed") > 1e-4


def test_control_a_restarted_permutation_is_seen(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(UFormTrainer, "iter_batches", lambda self: _restarting(self))
    run_here(config(), tmp_path)
    assert distance(tmp_path, whole) > 1e-4


def _restarting(trainer):
    from xpmir_uform.trainer.loader import iterate_steps

    while True:
        steps = iterate_steps(trainer.dataset, 0, 0)
        yield next(steps)
        yield next(steps)
