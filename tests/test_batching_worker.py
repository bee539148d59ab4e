"""The batcher's worker: measured once, told to every rank, and planning again when memory runs out."""

import logging
from types import SimpleNamespace

import pytest
import torch
from xpm_torch.batchers import Batcher

from xpmir_uform.base.configuration import validate
from xpmir_uform.batching.bag_sizes import BagSize
from xpmir_uform.batching.batcher import UFormBatcher
from xpmir_uform.batching.cost import CostModel
from xpmir_uform.batching.memory_probe import is_out_of_memory
from xpmir_uform.batching.shape import BatchShape

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def worker(batch_size=8, **fields):
    return UFormBatcher.C(**fields).instance().initialize(batch_size)


def bags(*lengths):
    return [BagSize(range(number, number + 1), (length,), key=100 + number) for number, length in enumerate(lengths)]


def linear(lengths):
    """Saves exactly 40 bytes for each token and 8 for each item."""
    tokens = torch.ones(10 * sum(lengths), requires_grad=True)
    items = torch.ones(2 * len(lengths), requires_grad=True)
    ((tokens * torch.ones_like(tokens)).sum() + (items * torch.ones_like(items)).sum()).backward()


class Collect:
    """A process that keeps what it was given, and runs out of memory above some number of tokens."""

    def __init__(self, capacity=float("inf"), message=OUT_OF_MEMORY):
        self.capacity, self.message, self.tries = capacity, message, []

    def __call__(self, parts, count):
        self.tries.append([])
        for part in parts:
            tokens = sum(sum(bag.lengths) for bag in part)
            self.tries[-1].append(tokens)
            if tokens > self.capacity:
                raise RuntimeError(self.message)
        assert len(self.tries[-1]) == count
        return sum(self.tries[-1])


def test_it_is_a_batcher_and_leaves_identifiers_alone():
    assert issubclass(UFormBatcher, Batcher)
    plain, other = UFormBatcher.C(), UFormBatcher.C(memory=5, memory_fraction=0.5, shape=BatchShape.C(bags=3))
    assert plain.__xpm__.identifier.all == other.__xpm__.identifier.all


def test_without_bounds_a_step_is_one_microbatch():
    process, made = Collect(), worker()
    made.pre_train_setup(lambda lengths: pytest.fail("nothing needs to be measured"), None)
    assert made.process_withreplay(bags(3, 9, 4), process) == 16
    assert process.tries == [[16]]


def test_a_rank_without_bags_processes_no_microbatch():
    process = Collect()
    assert worker().process_withreplay([], process) == 0
    assert process.tries == [[]]


def test_the_shape_bounds_microbatches():
    process = Collect()
    worker(shape=BatchShape.C(rows=2, columns=10)).process_withreplay(bags(9, 9, 9, 2), process)
    assert process.tries == [[20, 9]]


def test_the_model_is_fitted_and_fills_the_given_memory():
    made = worker(memory=4000)
    made.pre_train_setup(linear, None)
    assert made.model.predict((5, 6)) == pytest.approx(40 * 11 + 8 * 2, rel=1e-3)
    parts = made.plan(bags(*[10] * 20))
    assert [len(part) for part in parts] == [9, 9, 2]  # of 408 bytes each
    assert [bag.key for bag in parts[0]] == list(range(100, 109))


def test_memory_without_a_measured_model_is_refused():
    with pytest.raises(ValueError, match="pre_train_setup"):
        worker(memory=4000).process_withreplay(bags(1), Collect())


def test_probes_can_be_given():
    seen = []
    worker(memory=10**6, probes=[[3, 4], [5]]).pre_train_setup(lambda n: (seen.append(tuple(n)), linear(n)), None)
    assert seen == [(3, 4), (5,)]


def test_running_out_of_memory_replays_the_whole_step_in_smaller_microbatches():
    process, made = Collect(capacity=30), worker()
    assert made.process_withreplay(bags(*[10] * 8), process) == 80
    assert process.tries[0] == [80]
    assert process.tries[-1] == [30, 30, 20]
    assert made.ceiling < 40
    made.process_withreplay(bags(*[10] * 8), again := Collect(capacity=30))
    assert again.tries == [[30, 30, 20]]


def test_it_shrinks_from_what_ran_not_from_a_budget_that_was_never_filled():
    process, made = Collect(capacity=30), worker(memory=10**9)
    made.pre_train_setup(linear, None)
    made.process_withreplay(bags(*[10] * 8), process)
    assert len(process.tries) <= 5
    assert process.tries[-1] == [30, 30, 20]


def test_memory_that_runs_out_on_one_bag_is_an_error():
    process = Collect(capacity=5)
    with pytest.raises(RuntimeError, match="out of memory"):
        worker().process_withreplay(bags(2, 10, 3), process)
    assert process.tries[-1] == [10]


def test_other_errors_pass():
    process = Collect(capacity=5, message="shapes do not match")
    with pytest.raises(RuntimeError, match="do not match"):
        worker().process_withreplay(bags(2, 10, 3), process)
    assert len(process.tries) == 1


@pytest.mark.parametrize("error", [RuntimeError(OUT_OF_MEMORY), torch.OutOfMemoryError("HIP out of memory")])
def test_memory_runs_out_on_gpus_of_any_make(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("out of luck"))


def test_a_bag_above_the_budget_goes_alone_with_one_warning(caplog):
    made = worker(memory=500)
    made.pre_train_setup(linear, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [[bag.key for bag in part] for part in made.plan(bags(5, 40, 6))] == [[101], [100, 102]]
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert len(caplog.records) == 1
    assert "0x0000000000000065" in caplog.text


class FakeFabric(SimpleNamespace):
    """Two ranks in one process: what rank 0 broadcasts is kept for rank 1; the maximum is over given values."""

    device = torch.device("cpu")
    world_size = 2
    shared: dict

    def broadcast(self, value, src=0):
        assert src == 0
        return self.shared.setdefault("told", value)

    def all_reduce(self, value, reduce_op):
        assert reduce_op == "max"
        return torch.maximum(value, torch.tensor(self.shared.get("other", 0.0), dtype=value.dtype))


def test_rank_0_measures_and_the_others_are_told():
    shared = {}
    first, second = worker(memory=4000), worker(memory=4000)
    first.pre_train_setup(linear, FakeFabric(global_rank=0, shared=shared))
    second.pre_train_setup(lambda lengths: pytest.fail("rank 1 measured"), FakeFabric(global_rank=1, shared=shared))
    assert second.model == first.model != CostModel()


def test_ranks_shrink_alike_whatever_ran_on_them():
    """One rank has a single bag, which it cannot split; the other ran 80 tokens: both replay with the same ceiling."""
    made = worker()
    made.pre_train_setup(linear, FakeFabric(global_rank=0, shared={"other": 80.0}))
    failures = iter([True, False])

    def process(parts, count):
        if next(failures):
            raise RuntimeError("CUDA out of memory. It happened on another rank.")
        return count

    assert made.process_withreplay(bags(7), process) == 1
    assert made.ceiling == pytest.approx(0.7 * 80)


def test_validation_keeps_the_stock_meaning():
    """Records of any kind, in slices of the batch size, smaller once memory ran out; what was done is not redone."""
    made, seen = worker(batch_size=4), []

    def process(records):
        if len(records) > 2:
            raise RuntimeError(OUT_OF_MEMORY)
        seen.append(records)

    made.process("abcdef", process)
    assert seen == ["ab", "cd", "ef"]
    assert worker(batch_size=4).reduce([1, 2, 3, 4, 5], lambda part, total: total + sum(part), 0) == 15


def test_a_resumed_run_plans_as_before():
    made, resumed, process = worker(), worker(), Collect(capacity=30)
    made.process_withreplay(bags(*[10] * 8), process)
    resumed.load_state_dict(made.state_dict())
    assert resumed.plan(bags(*[10] * 8)) == made.plan(bags(*[10] * 8))
    resumed.load_state_dict(worker().state_dict())
    assert len(resumed.plan(bags(*[10] * 8))) == 1


@pytest.mark.parametrize("fields", [{"memory_fraction": 0.0}, {"memory": -1}, {"probes": [[]]}, {"probes": [[3, 0]]}])
def test_fields_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError, match="expected"):
        validate(UFormBatcher.C(**fields))
