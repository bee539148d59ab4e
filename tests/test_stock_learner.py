"""What the classes of xpm-torch do that ours work around: each fault is seen in the stock class.

Others are beside the tests of what replaces them; docs/upstream.md names all of them. Where a new release repairs a
fault, its test fails here and says what may go.
"""

import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import invariance
import lightning as L
import numpy as np
import pytest
import torch
from experimaestro import Meta
from experimaestro.core.objects.config import sealed_set
from experimaestro.xpmutils import DirectoryContext
from invariance import run_here, run_ranks
from torch import nn
from xpm_mlboard import TensorboardService
from xpm_torch import Module, Random, SampleIterator, Sampler
from xpm_torch.batchers import (
    BatchDimsProvider,
    Batcher,
    BatcherWorker,
    PredictiveBatcher,
    PredictiveBatcherWorker,
    ProbePoint,
)
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.datasets import IndexedDataset, LineFileDataset
from xpm_torch.learner import Learner, LearnerListener, LearnerListenerStatus
from xpm_torch.losses import Loss
from xpm_torch.metrics import Metrics
from xpm_torch.optim import SGD, GradientClippingHook, ParameterOptimizer, RegexParameterFilter, ScheduledOptimizer
from xpm_torch.schedulers import CosineWithWarmup
from xpm_torch.trainers import LossTrainer
from xpm_torch.trainers.context import TrainerContext
from xpm_torch.trainers.validation import TrainerValidationLoss

from xpmir_uform import CosineSchedule, UFormBatcher, UFormTrainer
from xpmir_uform.base.configuration import default
from xpmir_uform.learner.distributed import limit_waiting

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

RECORDS = [1.0 + number / 8 for number in range(40)]
STEPS = 5


def repaired(what: str) -> str:
    """What an assertion that a fault is there says when it is not."""
    return f"repaired upstream: {what} can go"


@contextmanager
def fault(error: type[BaseException], message: str, what: str) -> Iterator[None]:
    """Within it that error is raised; else what works around it can go."""
    try:
        yield
    except error as raised:
        if not re.search(message, str(raised)):
            raise
    else:
        pytest.fail(repaired(what))


class Line(Module):
    """y = weight x + bias."""

    __xpmid__ = "test.line"

    def __initialize__(self):
        self.linear = nn.Linear(1, 1)
        nn.init.ones_(self.linear.weight)
        nn.init.ones_(self.linear.bias)

    def forward(self, numbers):
        return self.linear(torch.tensor(numbers).unsqueeze(1))


class Numbers(Sampler):
    """What the stock trainer's signature asks for."""

    __xpmid__ = "test.numbers"


class Exact(IndexedDataset):
    """Its position is that of the next record."""

    def iter_from(self, start, end):
        for index in range(start, end):
            self._position = index + 1
            yield self.source[index]


class Pieces(Batcher):
    """Microbatches of ``size`` records, and of ``skew`` more on each further rank."""

    __xpmid__ = "test.stock-pieces"
    size: Meta[int] = default(1)
    skew: Meta[int] = default(0)

    def initialize(self, batch_size):
        return PiecesWorker(self.size + self.skew * int(os.environ.get("RANK", "0")))


class PiecesWorker(BatcherWorker):
    """Cuts batches into pieces."""

    def process(self, batch, process, *args, raise_oom=False, **kwargs):
        for start in range(0, len(batch), self.batch_size):
            process(batch[start : start + self.batch_size], *args, **kwargs)


class Mean(LossTrainer):
    """The mean square of the model's answers, as the stock trainer means its subclasses to be."""

    __xpmid__ = "test.mean"

    def initialize(self, generator, context):
        super().initialize(generator, context)
        self.seen = []
        self.model.initialize()
        self._create_dataloader(Exact(RECORDS), list)

    def process_batch(self, batch):
        self.seen.append(list(batch))
        super().process_batch(batch)

    def value(self, records):
        return self._fabric_model(records).square().mean()

    def train_batch(self, records):
        self.context.add_loss(Loss("mean", self.value(records), 1.0))


class ByRanker(Mean):
    """Runs the model that the trainer holds since before it was wrapped."""

    __xpmid__ = "test.by-ranker"

    def value(self, records):
        return self.ranker(records).square().mean()


class InBatch(Mean):
    """Each number repels the others of its batch."""

    __xpmid__ = "test.in-batch"

    def value(self, records):
        answers = self._fabric_model(records)
        return nn.functional.cross_entropy(-(answers - answers.T).abs(), torch.arange(len(records)))


class Spoilt(Mean):
    """The loss of one record of the second epoch is infinite."""

    __xpmid__ = "test.spoilt"

    def value(self, records):
        return super().value(records) * (math.inf if RECORDS[28] in records else 1.0)


def trainer(cls=Mean, **params):
    return cls.C(sampler=Numbers.C(), **{"batch_size": 4, "num_workers": 0, **params})


def stock(trained=None, max_epochs=2, listeners=(), hooks=(), devices=1, fabric=FabricConfiguration):
    """A stock learner with two optimizers, since it fails with one."""
    sgd = SGD.C(lr=1e-2)
    return Learner.C(
        random=Random.C(seed=3),
        model=Line.C(),
        trainer=trained or trainer(),
        max_epochs=max_epochs,
        steps_per_epoch=STEPS,
        optimizers=[
            ParameterOptimizer.C(optimizer=sgd, filter=RegexParameterFilter.C(includes=["weight"])),
            ParameterOptimizer.C(optimizer=sgd),
        ],
        listeners=list(listeners),
        hooks=list(hooks),
        fabric_config=fabric.C(accelerator="cpu", devices=str(devices)),
    )


# --- Microbatches


def prepared(made):
    """A stock trainer about to make a step, and its context."""
    model = Line.C().instance()
    optimizers = ScheduledOptimizer()
    optimizers.scaler, optimizers.optimizers = None, []
    context = TrainerContext(
        Path(), Path(), 1, 1, made, model, optimizers, fabric=L.Fabric(accelerator="cpu", devices=1)
    )
    made.initialize(np.random.RandomState(0), context)
    made._fabric_model = model
    return made, context


def gradient(records, size, cls=Mean):
    """The gradient that a stock trainer makes of a batch, in microbatches of ``size``."""
    made, context = prepared(trainer(cls, batcher=Pieces.C(size=size)).instance())
    context.metrics = Metrics()
    made.process_batch(records)
    return torch.cat([parameter.grad.flatten() for parameter in made.model.parameters()])


def test_the_stock_gradient_grows_with_the_number_of_microbatches():
    """Ours does not change (test_step_exact.py, test_step_invariance.py)."""
    alike = [1.0] * 8
    whole = gradient(alike, 8)
    for size, factor in ((4, 2.0), (2, 4.0)):
        assert torch.equal(gradient(alike, size), factor * whole), repaired("the own process_batch of UFormTrainer")
    whole, parts = gradient(RECORDS[:7], 7), gradient(RECORDS[:7], 3)
    assert 2.5 < parts.norm() / whole.norm() < 3.5
    assert torch.cosine_similarity(whole, parts, dim=0) < 0.9999, repaired("the own process_batch of UFormTrainer")
    assert LossTrainer.__getxpmtype__().arguments["batcher"].ignored


def test_stock_negatives_are_those_of_the_microbatch():
    """A batch of pairs, one pair at a time, has no negatives and no gradient at all."""
    records = [1.0, 3.0, 7.0, 13.0]
    assert gradient(records, 4, InBatch).norm() > 0
    assert gradient(records, 1, InBatch).norm() == 0, repaired("the exact step")


# --- Several ranks


def ranks_tell(made, folder):
    """What each of two ranks ended with: an error, or what ``made`` answers."""

    def work(rank, where):
        try:
            told = made(where)
        except RuntimeError as error:
            told = str(error)
        (where / f"rank-{rank}.json").write_text(json.dumps(told))
        # A process group that waits for a rank cannot be closed in order.
        os._exit(0)

    run_ranks(2, work, folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


class Impatient(FabricConfiguration):
    """A rank that waits two seconds for another gives up, where it would wait for ever."""

    __xpmid__ = "test.impatient"

    def _get_fabric(self, **kwargs):
        fabric = super()._get_fabric(**kwargs)
        limit_waiting(fabric, 2.0)
        return fabric


def test_a_stock_rank_is_given_the_position_of_rank_0(tmp_path):
    """Ours: the state is the step (test_step_invariance.py, test_learner_telemetry.py)."""

    def made(folder):
        run_here(stock(max_epochs=1, devices=2), folder)
        resumed = run_here(stock(devices=2), folder).trainer.seen
        whole = run_here(stock(devices=2), folder / "whole").trainer.seen
        return resumed, whole[STEPS:]

    (resumed, whole), (resumed_1, whole_1) = ranks_tell(made, tmp_path)
    assert resumed == whole
    assert all(found != expected for found, expected in zip(resumed_1, whole_1, strict=True)), repaired(
        "UFormTrainer.state_dict"
    )


@pytest.mark.parametrize("cls", [Mean, ByRanker])
def test_stock_ranks_that_use_their_ranker_train_apart(tmp_path, cls):
    """Ours use the wrapped model (test_learner_runs.py) and train as one (test_step_invariance.py)."""

    def made(folder):
        done = run_here(stock(trainer(cls), max_epochs=1, devices=2), folder)
        return [parameter.item() for parameter in done.model.parameters()]

    first, second = ranks_tell(made, tmp_path)
    if cls is Mean:
        assert first == second
    else:
        assert first != second, repaired("the hint in docs/upstream.md")


@pytest.mark.parametrize("skew", [0, 1])
def test_stock_ranks_with_unequal_microbatches_wait_for_ever(tmp_path, skew):
    """Ours make as many collective calls, whatever their microbatches (test_step_invariance.py)."""
    fabric = Impatient if skew else FabricConfiguration

    def made(folder):
        batcher = Pieces.C(size=1, skew=skew)
        run_here(stock(trainer(batch_size=4, batcher=batcher), max_epochs=1, devices=2, fabric=fabric), folder)
        return "ended"

    told = ranks_tell(made, tmp_path)
    if skew:
        assert any("Timed out" in each for each in told), repaired("UFormTrainer.unsynchronised")
    else:
        assert told == ["ended", "ended"]


class StopOn(LearnerListener):
    """Asks to stop after the first epoch, on one rank."""

    __xpmid__ = "test.stop-on"
    rank: Meta[int] = default(0)

    def __call__(self, state):
        here = int(os.environ["RANK"]) == self.rank
        return LearnerListenerStatus.STOP if here else LearnerListenerStatus.NO_DECISION


def test_a_listener_that_stops_one_stock_rank_leaves_the_other_waiting(tmp_path):
    def made(folder):
        run_here(stock(listeners=[StopOn.C(id="stop", rank=1)], devices=2, fabric=Impatient), folder)
        return "ended"

    assert any("Timed out" in told for told in ranks_tell(made, tmp_path)), repaired("UFormLearner._ask_listeners")


def test_our_ranks_follow_one_decision(tmp_path):
    def made(folder):
        steps = []
        for rank in range(2):
            learner = invariance.config(devices=2, epochs=2)
            learner.listeners = [StopOn.C(id="stop", rank=rank)]
            steps.append(run_here(learner, folder / str(rank)).context.steps)
        return steps

    # Rank 0 decides.
    assert ranks_tell(made, tmp_path) == [[invariance.STEPS, 2 * invariance.STEPS]] * 2


# --- Data sets


def test_the_stock_indexed_data_set_repeats_a_record_on_resume():
    data = IndexedDataset(RECORDS)
    records = iter(data)
    seen = [next(records) for _ in range(3)]
    again = IndexedDataset(RECORDS)
    again.load_state_dict(data.state_dict())
    assert next(iter(again)) == seen[-1], repaired("the own loader of UFormTrainer")


def test_the_stock_line_data_set_loses_a_record_where_a_shard_begins_with_it(tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:03}\n" for number in range(12)))
    read = [
        int(record)
        for shard in range(3)
        for record in LineFileDataset(path, str).iter_shard(shard, 3)
    ]  # fmt: skip
    assert sorted(set(range(12)) - set(read)) == [4, 8], repaired("the own loader of UFormTrainer")


class Four(SampleIterator):
    """Four records."""

    __xpmid__ = "test.four"

    def __iter__(self):
        return iter(RECORDS[:4])


def test_stock_batches_of_an_iterator_grow():
    sizes = [len(batch) for batch in Four.C().instance().__batch_iter__(2)]
    assert sizes == [2, 4], repaired("the hint in docs/upstream.md")


def test_nothing_of_ours_reads_by_the_stock_data_sets():
    sources = {path: path.read_text() for path in (ROOT / "xpmir_uform").rglob("*.py")}
    assert len(sources) > 50
    used = [path for path, text in sources.items() if "xpm_torch.datasets" in text or "SampleIterator" in text]
    assert used == []


# --- The predictive batcher


class Lengths(BatchDimsProvider):
    """Batches of numbers."""

    __xpmid__ = "test.lengths"

    def compute_batch_dims(self, batch):
        return {"n": len(batch)}

    def build_probe_batch(self, dims):
        return RECORDS[: dims["n"]]


def predictive():
    points = [ProbePoint.C(values={"n": n}) for n in (1, 2)]
    return PredictiveBatcher.C(
        formula="a*n",
        coefficient_names={"a"},
        variable_names={"n"},
        batch_size_variable="n",
        dims_provider=Lengths.C(probe_dims=sealed_set(*points)),
    )


def test_the_stock_predictive_batcher_can_be_neither_made_nor_submitted(tmp_path):
    for act in (lambda made: made.instance(), lambda made: made.__xpm__.seal(DirectoryContext(tmp_path))):
        with fault(NotImplementedError, "Cannot handle a value of type <class 'set'>", "UFormBatcher in part"):
            act(predictive())
    assert UFormBatcher.C().instance().initialize(4).plan([]) == []


def predicting(memory_fraction=1.0):
    """A worker of the stock batcher, whose fields are those of a batcher that could be made."""
    fields = SimpleNamespace(
        formula="a*n", coefficient_names={"a"}, variable_names={"n"}, memory_fraction=memory_fraction,
        extra_overhead_bytes=0, dims_provider=SimpleNamespace(
            probe_dims=[SimpleNamespace(values={"n": n}) for n in (1, 2)],
            build_probe_batch=lambda dims: RECORDS[: dims["n"]],
        ),
    )  # fmt: skip
    return PredictiveBatcherWorker(4, fields)


def test_the_probe_of_the_stock_predictive_batcher_fails():
    """Ours: test_batching_worker.py, test_batching_step.py."""
    made, _ = prepared(trainer().instance())
    made.batcher_worker = predicting()
    with fault(AssertionError, "Not within an optimization step", "UFormTrainer.pre_train_setup"):
        made.pre_train_setup(None)


def test_the_stock_budget_leaves_out_what_the_allocator_holds_and_would_reuse(monkeypatch):
    """Ours: test_batching_cost.py."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=0: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=0: 0)
    assert predicting().current_budget_bytes() == 10.0, repaired("probing.budget")


# --- One run


def test_the_stock_clipping_hook_fails_at_an_infinite_gradient_on_every_run(execute, tmp_path):
    """Ours skips the step (test_learner_guard.py)."""
    for _ in range(3):
        with fault(RuntimeError, "non-finite", "clip_norm of UFormLearner"):
            execute(stock(trainer(Spoilt), hooks=[GradientClippingHook.C(max_norm=1.0)]), tmp_path)


def test_the_stock_learner_does_not_seed_pythons_generator(execute, tmp_path):
    """Ours draws by key (test_learner_resume.py)."""
    before = random.getstate()
    execute(stock(max_epochs=1), tmp_path)
    assert random.getstate() == before, repaired("the hint in docs/reliability.md")


class Batches(SampleIterator):
    """Validation data."""

    __xpmid__ = "test.batches"

    def __iter__(self):
        return iter(RECORDS)


def test_the_stock_validation_cannot_be_submitted_and_keeps_the_highest_loss(execute, tmp_path):
    """Ours keeps the best (test_learner_runs.py)."""
    trained = trainer()
    loss = TrainerValidationLoss.C(id="loss", data=Batches.C(), batch_size=40, trainer=trained)
    made = stock(trained, listeners=[loss])
    made.__xpm__.seal(DirectoryContext(tmp_path))
    with fault(TypeError, "add_action", "the hint in docs/upstream.md"):
        Learner.__submit__(made, lambda loader: loader, lambda action: None)
    loss = TrainerValidationLoss.C(id="loss", data=Batches.C(), batch_size=40, trainer=trained)
    done = execute(stock(trained, listeners=[loss]), tmp_path / "run")
    kept = json.loads(done.listeners[0].info.read_text())
    weights = done.model(RECORDS).square().mean().item()
    assert weights < kept["value"]
    assert kept["epoch"] == 1, repaired("the hint in docs/upstream.md")


def test_where_a_stock_learner_logs_is_unknown_until_it_is_submitted():
    with fault(KeyError, "logpath", "the order of UFormExperiment.train"):
        _ = stock().logpath


def test_a_stock_run_without_a_tag_is_not_linked(tmp_path):
    """Ours is refused (test_experiment_helper.py), and a tagged one linked (test_experiment_quickstart.py)."""
    service = TensorboardService(tmp_path / "runs")
    service.active = True
    service.path.mkdir()
    made = stock()
    service.add(made, tmp_path / "logs")
    assert list(service.path.iterdir()) == [], repaired("the refusal of UFormExperiment.train")
    made.tag("seed", 1)
    service.add(made, tmp_path / "logs")
    assert (service.path / "seed=1").is_symlink()


def test_the_stock_cosine_schedule_needs_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with fault(ImportError, "transformers", "CosineSchedule in part"):
        CosineWithWarmup.C(num_warmup_steps=2).instance()(optimizer, 10)
    CosineSchedule.C(learning_rate=1.0, warmup_steps=2).instance()(optimizer, 10)


def test_another_number_of_workers_is_another_stock_task():
    """Ours: another number is the same task (test_identity.py), and no bit differs (test_step_masked.py)."""
    names = {trainer(num_workers=number).__xpm__.identifier.all for number in (0, 2)}
    assert len(names) == 2, repaired("UFormTrainer.num_workers as a Meta")
    assert not LossTrainer.__getxpmtype__().arguments["num_workers"].ignored
    assert UFormTrainer.__getxpmtype__().arguments["num_workers"].ignored
