"""One identifier, one result: microbatches, batchers, ranks and resuming change no weight beyond rounding."""

import os
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from experimaestro import Meta, taskglobals
from experimaestro.xpmutils import DirectoryContext
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.batchers import Batcher, BatcherWorker, PowerAdaptativeBatcher
from xpm_torch.configuration import FabricConfiguration

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    RankedForm,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.data.fields import default

EPOCHS, STEPS, BATCH = 4, 5, 5
LIMIT_SECONDS = 60
WORDS = "ant bee cat dog elk fox gnu hen ibex jay koi lynx mole newt orca puma quail".split()


class Pairs(BagSource):
    """A word, its copies, and a text whose length grows with the word's number: bags of unequal cost."""

    __xpmid__ = "test.pairs"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        word = WORDS[index]
        texts = [word, word[::-1] + "!", *([word * (1 + index)] if index % 2 else [])]
        return Bag.alike(Item.text(text) for text in texts)


class Pieces(Batcher):
    """Microbatches of ``size`` bags."""

    __xpmid__ = "test.pieces"
    size: Meta[int] = default(1)

    def initialize(self, batch_size):
        return PiecesWorker(batch_size, self.size)


class PiecesWorker(BatcherWorker):
    def __init__(self, batch_size, size):
        super().__init__(batch_size)
        self.size = size

    def process_withreplay(self, batch, process, *args, **kwargs):
        parts = [batch[start : start + self.size] for start in range(0, len(batch), self.size)]
        return process(iter(parts), len(parts), *args, **kwargs)


def config(batcher=None, devices=1, precision="64-true", form=None, batch_size=BATCH, **params):
    return UFormLearner.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=1),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=Pairs.C()),
            batch_size=batch_size,
            losses=[ContrastiveLoss.C(**({"form": form} if form else {}))],
            **({"batcher": batcher} if batcher else {}),
        ),
        max_epochs=EPOCHS,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2, warmup_steps=2)),
        listeners=[],
        fabric_config=FabricConfiguration.C(precision=precision, accelerator="cpu", devices=str(devices)),
        **params,
    )


def job(folder: Path) -> Path:
    return folder / "workspace" / "jobs" / "task" / "job"


def run_here(made, folder: Path) -> None:
    job(folder).mkdir(parents=True, exist_ok=True)
    taskglobals.Env.instance().taskpath = job(folder)
    made.instance(context=DirectoryContext(job(folder))).execute()


def weights(folder: Path, checkpoint="last") -> torch.Tensor:
    tensors = load_file(job(folder) / "checkpoints" / checkpoint / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def distance(found: Path, expected: Path) -> float:
    """The norm of the difference of the final weights, relative to their change since initialisation."""
    change = weights(expected) - weights(expected, "step-00000000")
    return float((weights(found) - weights(expected)).norm() / change.norm())


def _rank(rank: int, world: int, port: int, work, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    work(rank, folder)
    dist.destroy_process_group()


def run_ranks(world: int, work, folder: Path) -> None:
    """Runs ``work(rank, folder)`` in ``world`` processes; fails if one fails or they hang."""
    job(folder).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.start_processes(_rank, (world, port, work, folder), world, join=False, start_method="fork")
    for _ in range(LIMIT_SECONDS):
        if context.join(timeout=1):
            return
    for process in context.processes:
        process.kill()
    raise AssertionError(f"{world} ranks did not end within {LIMIT_SECONDS} s")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(config(keep=100), folder)
    return folder


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_microbatches_change_nothing(tmp_path, whole, size):
    run_here(config(Pieces.C(size=size)), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing_in_float32(tmp_path, size):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(config(precision="32-true", keep=100), whole)
    run_here(config(Pieces.C(size=size), precision="32-true"), parts)
    assert float((weights(parts) - weights(whole)).norm() / weights(whole).norm()) < 1e-5


@pytest.mark.parametrize(("world", "size"), [(2, 7), (2, 1), (3, 2)])
def test_ranks_change_nothing(tmp_path, whole, world, size):
    run_ranks(world, lambda rank, folder: run_here(config(Pieces.C(size=size), devices=world), folder), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def test_a_rank_without_a_bag_changes_nothing(tmp_path):
    run_here(config(batch_size=2, keep=100), tmp_path / "one")
    run_ranks(3, lambda rank, folder: run_here(config(batch_size=2, devices=3), folder), tmp_path / "three")
    assert distance(tmp_path / "three", tmp_path / "one") < 1e-10


def test_ranked_form_over_ranks(tmp_path):
    run_here(config(form=RankedForm.C(), keep=100), tmp_path / "one")
    work = config(Pieces.C(size=1), form=RankedForm.C(), devices=2)
    run_ranks(2, lambda rank, folder: run_here(work, folder), tmp_path / "two")
    assert distance(tmp_path / "two", tmp_path / "one") < 1e-10


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, whole):
    run_here(config(keep=100), tmp_path)
    folder = job(tmp_path) / "checkpoints"
    for path in folder.glob("step-*"):
        if int(path.name[5:]) > 10:
            for file in path.rglob("*.*"):
                file.unlink()
            (path / "model").rmdir()
            path.rmdir()
    (folder / "last").unlink()
    run_ranks(2, lambda rank, where: run_here(config(devices=2, keep=100), where), tmp_path)
    assert distance(tmp_path, whole) < 1e-10


def _one_runs_out_of_memory(rank: int, folder: Path) -> None:
    failed = []

    def fail(module, arguments, output):
        if rank == 0 and not failed:
            failed.append(True)
            raise RuntimeError("CUDA out of memory. Tried to allocate.")

    made = config(PowerAdaptativeBatcher.C(), devices=2)
    taskglobals.Env.instance().taskpath = job(folder)
    task = made.instance(context=DirectoryContext(job(folder)))
    task.model.initialize()
    task.model.pooling.register_forward_hook(fail)
    task.execute()
    (folder / f"parts-{rank}").write_text(str(task.trainer.batcher_worker.current_divider))


def test_both_ranks_retry_when_one_runs_out_of_memory(tmp_path, whole):
    run_ranks(2, _one_runs_out_of_memory, tmp_path)
    assert [(tmp_path / f"parts-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert distance(tmp_path, whole) < 1e-10


def test_out_of_memory_on_one_device_replays_the_step(tmp_path, whole):
    failed = []

    def fail(module, arguments, output):
        if len(failed) < 2:
            failed.append(True)
            raise RuntimeError("CUDA out of memory. Tried to allocate.")

    made = config(PowerAdaptativeBatcher.C())
    job(tmp_path).mkdir(parents=True)
    taskglobals.Env.instance().taskpath = job(tmp_path)
    task = made.instance(context=DirectoryContext(job(tmp_path)))
    task.model.initialize()
    task.model.pooling.register_forward_hook(fail)
    task.execute()
    assert task.trainer.batcher_worker.current_divider > 1
    assert distance(tmp_path, whole) < 1e-10


def _count_collectives(rank: int, folder: Path) -> None:
    calls = Counter()
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        original = getattr(dist, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls[_name] += 1
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    taskglobals.Env.instance().taskpath = job(folder)
    task = config(Pieces.C(size=1), devices=2).instance(context=DirectoryContext(job(folder)))
    process = type(task.trainer).process_batch
    per_step = []

    def hook(state, bucket):
        calls["bucket"] += 1
        return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(None, bucket)

    def counted_step(trainer, batch):
        if "hooked" not in calls:
            calls["hooked"] = 1
            trainer._fabric_model._forward_module.register_comm_hook(None, hook)
        before = Counter(calls)
        process(trainer, batch)
        per_step.append({name: calls[name] - before[name] for name in calls if name != "hooked"})

    type(task.trainer).process_batch = counted_step
    task.execute()
    assert len(per_step) == EPOCHS * STEPS
    # Two sums: the counts before the forward passes, and losses with the verdict on memory after the backward ones.
    assert per_step[-1] == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "bucket": 1}, per_step


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
    from xpmir_uform.trainer import step

    monkeypatch.setattr(step, "surrogate", lambda output, rows, scale: (output.embeddings * rows).sum())
    monkeypatch.setattr(UFormEncoder, "clamp_temperature", lambda self: None)
    run_here(config(), tmp_path)
    assert distance(tmp_path, whole) > 1e-4


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
