"""Signals, time limits, two processes in one folder, lost ranks: training leaves in time and goes on bit for bit."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from experimaestro import Constant, GracefulTimeout, TaskCancelled, taskglobals
from experimaestro.xpmutils import DirectoryContext
from safetensors.torch import load_file
from torch.utils.data import Dataset
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.context import InitializationHook
from xpm_torch.learner import Learner
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base import atomic_files
from xpmir_uform.checkpoints import format, manifest
from xpmir_uform.learner import preemption
from xpmir_uform.learner.distributed import LOST, Member, lost, ranks_explained
from xpmir_uform.learner.job_lock import Occupied, only_one
from xpmir_uform.trainer.loader import iterate_steps
from xpmir_uform.trainer.loader_workers import PASSED_OVER, begin_worker

EPOCHS, STEPS = 3, 4
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
FORK = multiprocessing.get_context("fork")


class Numbers(BagSource):
    """A number in words and digits."""

    __xpmid__ = "test.numbers"

    def __len__(self):
        return 12

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(f"number {index}"), Item.text(f"{index} {epoch}", key=100 + index)])


class At(StepTrainingHook, InitializationHook):
    """Does something before a step, once; before step 0: while the task is initialised."""

    __xpmid__ = "test.at"
    version: Constant[str] = "1"
    acts: ClassVar[dict] = {}

    def before(self, state):
        self.acts.pop(state.steps, lambda: None)()


def send(*numbers):
    """Sends signals to this process."""
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


def config(cls=UFormLearner, devices=1, workers=0, precision="32-true", **params):
    return cls.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=Numbers.C()), batch_size=4, losses=[ContrastiveLoss.C()], num_workers=workers
        ),
        max_epochs=EPOCHS,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2, warmup_steps=2)),
        listeners=[],
        hooks=[At.C()],
        fabric_config=FabricConfiguration.C(devices=str(devices), accelerator="cpu", precision=precision),
        **params,
    )


def job(folder):
    return folder / "workspace" / "jobs" / "task" / "job"


def checkpoints(folder):
    return job(folder) / "checkpoints"


def content(folder):
    """Weights, optimizer, and all of the state but durations."""
    last = checkpoints(folder) / "last"
    state = json.loads((last / "state.json").read_text())
    state["metrics"].pop("step_seconds")
    tensors = {**load_file(last / "model.safetensors"), **load_file(last / "optimizer.safetensors")}
    return {name: tensor.tolist() for name, tensor in tensors.items()}, state


def everything(folder):
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in folder.rglob("*")
    }


def last_step(folder):
    return manifest.verify(checkpoints(folder) / "last")["step"]


@pytest.fixture(autouse=True)
def nothing_left():
    """No act is left over, and the handlers are those of before."""
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    yield
    assert At.acts == {}
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    job(folder).mkdir(parents=True)
    taskglobals.Env.instance().taskpath = job(folder)
    config().instance(context=DirectoryContext(job(folder))).execute()
    return content(folder)


# Signals


@pytest.mark.parametrize(("number", "step"), [(TERM, 1), (INT, 6), (signal.SIGUSR2, 8), (TERM, 12)])
def test_a_signal_finishes_the_step_saves_and_leaves_to_be_run_again(execute, tmp_path, whole, number, step):
    At.acts[step] = send(number)
    with pytest.raises(GracefulTimeout, match=f"{number.name} was received: step {step} is saved, run the task again"):
        execute(config(), tmp_path)
    assert last_step(tmp_path) == step
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


def test_every_signal_that_asks_to_end_is_noted():
    """A batch system may send any of them before a limit or a preemption, a terminal the others."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        with preemption.Interruptions() as interruptions:
            os.kill(os.getpid(), signal.Signals[name])
            assert interruptions.due()
            assert interruptions.reason == f"{name} was received"


def test_the_kernel_repeats_its_signal_of_a_time_limit():
    with preemption.Interruptions() as interruptions:
        send(signal.SIGXCPU, signal.SIGXCPU, signal.SIGXCPU)()
        assert interruptions.due()
        with pytest.raises(TaskCancelled, match="SIGQUIT was received after SIGXCPU"):
            send(signal.SIGQUIT)()


def test_nohup_holds():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with preemption.Interruptions() as interruptions:
        send(signal.SIGHUP)()
        assert not interruptions.due()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_a_signal_in_a_forward_pass_loses_nothing(execute, tmp_path, whole, monkeypatch):
    forward, seen = UFormTrainer.forward, []

    def interrupted(self, microbatch):
        seen.append(0)
        if len(seen) == 7:
            os.kill(os.getpid(), TERM)
        return forward(self, microbatch)

    with monkeypatch.context() as patched:
        patched.setattr(UFormTrainer, "forward", interrupted)
        with pytest.raises(GracefulTimeout):
            execute(config(), tmp_path)
    assert last_step(tmp_path) == 7
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


def test_a_second_signal_saves_nothing_and_leaves_the_checkpoint_before_whole(execute, tmp_path, whole):
    At.acts[6] = send(TERM, TERM)
    with pytest.raises(TaskCancelled, match="nothing more is saved"):
        execute(config(), tmp_path)
    assert last_step(tmp_path) == 4
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


@pytest.mark.parametrize(("numbers", "error", "step"), [((TERM,), GracefulTimeout, 4), ((TERM, INT), TaskCancelled, 0)])
def test_signals_while_saving(execute, tmp_path, whole, monkeypatch, numbers, error, step):
    write = manifest.write

    def interrupted(folder, values):
        if values["step"] == 4:
            send(*numbers)()
        write(folder, values)

    with monkeypatch.context() as patched:
        patched.setattr(manifest, "write", interrupted)
        with pytest.raises(error):
            execute(config(), tmp_path)
    assert last_step(tmp_path) == (step and 5)
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


@pytest.mark.parametrize(("numbers", "error"), [((TERM,), GracefulTimeout), ((TERM, TERM), TaskCancelled)])
def test_signals_while_loading_change_nothing(execute, tmp_path, whole, monkeypatch, numbers, error):
    At.acts[6] = send(TERM)
    with pytest.raises(GracefulTimeout):
        execute(config(), tmp_path)
    before = everything(checkpoints(tmp_path))
    read = format.read
    with monkeypatch.context() as patched:
        patched.setattr(format, "read", lambda folder: send(*numbers)() and read(folder))
        with pytest.raises(error):
            execute(config(), tmp_path)
    assert everything(checkpoints(tmp_path)) == before
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


def test_a_signal_before_training_leaves_with_the_first_checkpoint(execute, tmp_path, whole):
    At.acts[0] = send(USR1)
    with pytest.raises(GracefulTimeout):
        execute(config(), tmp_path)
    assert last_step(tmp_path) == 0
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


def test_signals_to_the_loader_too_as_batch_systems_send_them(execute, tmp_path, whole):
    def to_all():
        processes = [*multiprocessing.active_children(), multiprocessing.current_process()]
        subprocess.run(["kill", "-TERM", *(str(process.pid) for process in processes)], check=True)
        time.sleep(0.2)

    At.acts[6] = to_all
    with pytest.raises(GracefulTimeout, match="step 6 is saved"):
        execute(config(workers=1), tmp_path)
    execute(config(workers=2), tmp_path)
    assert content(tmp_path) == whole


@pytest.mark.parametrize("number", PASSED_OVER)
def test_a_second_signal_ends_a_loader_worker(number):
    def work():
        begin_worker(0)
        os.kill(os.getpid(), number)
        while number in signal.sigpending():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(60)

    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -number


def test_a_loader_worker_ends_with_what_it_raises_and_at_the_exit_of_its_parent(tmp_path):
    class Broken(Dataset):
        def __getitem__(self, number):
            if number == 2:
                raise ValueError("bag 2 is broken")
            return number

    def train():
        # A module holds the loader beyond the error, as a traceback does.
        multiprocessing.loader = iterate_steps(Broken(), 0, 2)
        try:
            assert [*multiprocessing.loader] == []
        except ValueError as error:
            (tmp_path / "said").write_text(f"{error}")
        sys.exit(3)

    process = FORK.Process(target=train)
    process.start()
    process.join(60)
    assert process.exitcode == 3
    assert "bag 2 is broken" in (tmp_path / "said").read_text()


def test_what_fails_after_a_signal_is_run_again(execute, tmp_path, whole):
    def lost():
        os.kill(os.getpid(), TERM)
        raise RuntimeError("a worker exited unexpectedly")

    At.acts[6] = lost
    with pytest.raises(GracefulTimeout, match="a worker exited unexpectedly"):
        execute(config(), tmp_path)
    assert last_step(tmp_path) == 4
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


def test_a_process_forked_meanwhile_is_ended_by_the_signal():
    ready = FORK.Event()

    def work():
        ready.set()
        time.sleep(60)

    with preemption.Interruptions() as interruptions:
        process = FORK.Process(target=work)
        process.start()
        assert ready.wait(20)
        os.kill(process.pid, TERM)
        process.join(20)
        assert process.exitcode == -TERM
        assert not interruptions.due()


class Limit:
    """A launcher that knows when the job ends."""

    def __init__(self, seconds):
        self.seconds = seconds

    def remaining_time(self):
        return self.seconds


@pytest.mark.parametrize(("left", "leaves"), [(30, True), (500, False), (None, False)])
def test_a_near_time_limit_saves_and_leaves(execute, tmp_path, whole, monkeypatch, left, leaves):
    monkeypatch.setattr(taskglobals.Env.instance(), "launcher_info", Limit(left))
    if leaves:
        with pytest.raises(GracefulTimeout, match="30 s are left, less than 120"):
            execute(config(), tmp_path)
        assert last_step(tmp_path) == 0
        monkeypatch.undo()
    execute(config(), tmp_path)
    assert content(tmp_path) == whole


def test_the_launcher_is_asked_now_and_then_alone():
    asked = []
    interruptions = preemption.Interruptions(lambda: asked.append(0), 5)
    assert not any(interruptions.due() for _ in range(1000))
    assert len(asked) == 1


# One process in a folder


def test_a_second_process_leaves_with_a_message_and_touches_nothing(execute, tmp_path):
    job(tmp_path).mkdir(parents=True)
    with only_one(job(tmp_path)):
        with pytest.raises(
            Occupied, match=rf"another process \(number {os.getpid()} on .*\) trains in .* changed nothing"
        ):
            execute(config(), tmp_path)
        assert not checkpoints(tmp_path).exists()
    execute(config(), tmp_path)


def test_of_many_at_once_one_wins(tmp_path):
    begin, end = FORK.Event(), FORK.Event()

    def race():
        begin.wait()
        try:
            with only_one(tmp_path):
                end.wait()
        except Occupied:
            os._exit(3)

    processes = [FORK.Process(target=race) for _ in range(6)]
    for process in processes:
        process.start()
    begin.set()
    deadline = time.monotonic() + 30
    while sum(process.exitcode is None for process in processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    end.set()
    for process in processes:
        process.join(20)
    assert sorted(process.exitcode for process in processes) == [0, 3, 3, 3, 3, 3]


def test_a_killed_process_gives_the_folder_back(tmp_path):
    held = FORK.Event()

    def hold():
        with only_one(tmp_path):
            held.set()
            time.sleep(60)

    process = FORK.Process(target=hold)
    process.start()
    assert held.wait(20)
    with pytest.raises(Occupied), only_one(tmp_path):
        pass
    process.kill()
    process.join()
    with only_one(tmp_path):
        pass


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(atomic_files.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(atomic_files.fcntl, "flock", refuse)
    with only_one(tmp_path):
        pass
    assert "do not write it by two processes at once" in caplog.text


def test_the_stock_learner_trains_twice_in_one_folder(execute, tmp_path):
    """When this fails, xpm-torch locks its folder."""
    job(tmp_path).mkdir(parents=True)
    with only_one(job(tmp_path)):
        execute(config(Learner), tmp_path)
    assert (checkpoints(tmp_path) / "last" / "info.json").is_file()


# Several ranks


def rank_main(rank, world, port, folder, acts, params):
    """One rank; its exit status says how it ended."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    sys.stderr = open(folder / f"rank-{rank}.txt", "w", buffering=1)  # noqa: SIM115
    At.acts = acts.get(rank, {})
    taskglobals.Env.instance().taskpath = job(folder)
    try:
        config(devices=world, **params).instance(context=DirectoryContext(job(folder))).execute()
        dist.destroy_process_group()
    except GracefulTimeout:
        os._exit(10)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(20)
    os._exit(0)


def run_ranks(folder, acts, limit=60, **params):
    """The exit status of each of two ranks, and how long they took."""
    job(folder).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [(rank, 2, port, folder, acts, params) for rank in range(2)]
    processes = [FORK.Process(target=rank_main, args=each) for each in arguments]
    start = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, start + limit - time.monotonic()))
    taken = time.monotonic() - start
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes], taken


def test_a_signal_to_one_rank_stops_both_at_one_step(tmp_path):
    assert run_ranks(tmp_path / "whole", {})[0] == [0, 0]
    assert run_ranks(tmp_path / "run", {1: {6: send(TERM)}})[0] == [10, 10]
    assert last_step(tmp_path / "run") == 6
    assert run_ranks(tmp_path / "run", {})[0] == [0, 0]
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_a_dead_rank_ends_the_other(tmp_path):
    statuses, taken = run_ranks(tmp_path, {1: {6: lambda: os.kill(os.getpid(), signal.SIGKILL)}}, rank_timeout=20.0)
    assert statuses == [20, -signal.SIGKILL]
    assert taken < 40
    assert last_step(tmp_path) == 4
    told = (tmp_path / "rank-0.txt").read_text()
    assert re.search(r"rank 0 of 2 ends, since rank 1 \(process \d+ on \S+\) was lost .*run the task again", told)


def test_a_rank_of_another_machine_is_named_where_those_of_this_one_live():
    here, there = Member(0, socket.gethostname(), os.getpid()), Member(1, "elsewhere", 1)
    assert lost([here, there], 0.0) == (
        "rank 1 (process 1 on elsewhere) was lost or did not answer: the processes on this machine live"
    )
    assert lost([here], 0.0) == "another rank was lost or did not answer"


@pytest.mark.parametrize("text", ["[gloo/transport] Connection closed by peer [::1]:4", "NCCL error: unhandled"])
def test_the_rank_that_a_lost_one_ends_is_named(text):
    pair = SimpleNamespace(world_size=2, global_rank=1)
    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 ends, .* lost .*run the task again"), ranks_explained(pair):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match=r"^shapes do not fit"), ranks_explained(pair):
        raise RuntimeError("shapes do not fit")


def test_a_rank_that_hangs_ends_both_in_time(tmp_path):
    statuses, taken = run_ranks(tmp_path, {1: {6: lambda: time.sleep(600)}}, rank_timeout=6.0)
    assert set(statuses) <= {20, LOST}
    assert statuses[1] == LOST
    assert taken < 40
    assert "made no progress for 6 s" in (tmp_path / "rank-1.txt").read_text()
    assert last_step(tmp_path) == 4


def test_a_checkpoint_that_cannot_be_written_ends_both_ranks(tmp_path):
    def full():
        def fail(*args):
            raise OSError(28, "No space left on device")

        manifest.write = fail

    statuses, _ = run_ranks(tmp_path, {0: {6: full}})
    assert statuses == [20, 20]
    assert "No space left on device" in (tmp_path / "rank-0.txt").read_text()
    assert "rank 0 failed, and this rank ends with it" in (tmp_path / "rank-1.txt").read_text()
    assert last_step(tmp_path) == 4


def test_a_damaged_checkpoint_is_set_aside_once_for_both_ranks(tmp_path):
    assert run_ranks(tmp_path, {1: {6: send(TERM)}})[0] == [10, 10]
    Path.unlink(checkpoints(tmp_path) / "step-00000006" / "state.json")
    assert run_ranks(tmp_path, {})[0] == [0, 0]
    assert (checkpoints(tmp_path) / "damaged-step-00000006-0").is_dir()
    assert last_step(tmp_path) == EPOCHS * STEPS
