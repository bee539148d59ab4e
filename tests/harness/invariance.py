"""One identifier, one result: what an identifier leaves out is varied, and the weights are compared.

    python tests/harness/invariance.py [--quick]

One small configuration of texts and pictures, 20 steps. Prints a row for each thing varied and fails if one misses its
bound. On two cores it takes about two minutes (``--quick``: one, the rows that run without several processes).
"""

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.distributed as dist
import torch.multiprocessing as mp
from experimaestro import Meta, taskglobals
from experimaestro.xpmutils import DirectoryContext
from PIL import Image
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.batchers import Batcher, BatcherWorker, PowerAdaptativeBatcher
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    BatchShape,
    ByteHead,
    ChoicesLoss,
    ContrastiveLoss,
    CosineSchedule,
    ImageShape,
    Item,
    LateInteractionLoss,
    MaskedLoss,
    Modality,
    Negatives,
    PatchHead,
    PooledHead,
    RankedForm,
    Side,
    TokenHead,
    UFormBatcher,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import default
from xpmir_uform.base.keyed_random import Purpose, generator, key_of
from xpmir_uform.losses.base import Encoded
from xpmir_uform.model.packing import pack
from xpmir_uform.reports.tables import table
from xpmir_uform.trainer.loader import LoadedStep, StepDataset

EPOCHS, STEPS, BATCH = 4, 5, 11
LIMIT_SECONDS = 60
BACKENDS = ("reference", "chunked", "triton")
WORDS = "ant bee cat dog elk fox gnu hen ibex jay koi lynx mole newt orca puma quail".split()


def picture(index: int) -> bytes:
    """A small picture whose shape and colours depend on ``index``."""
    size = (8 + 8 * (index % 3), 16)
    pixels = generator(index, Purpose.SPLIT).integers(0, 256, size=(size[1], size[0], 3), dtype="uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Words(BagSource):
    """A word, a copy of it that is mangled anew each epoch, and for every other word a picture or a long text."""

    __xpmid__ = "test.words"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        """The bag of one word; bags differ in cost."""
        letters = list(WORDS[index])
        generator(seed, Purpose.BAG, epoch, index).shuffle(letters)
        items = [Item.text(WORDS[index]), Item.text("".join(letters) + "?")]
        if index % 2:
            items.append(Item(Modality.IMAGE, picture(index), key_of("picture", index)))
        if index % 3 == 0:
            items.append(Item.text(WORDS[index] * (1 + index)))
        return Bag.alike(items)


class Asked(Words):
    """The same with sides: a word asks for what is made of it; a neighbour repels it; some have two queries."""

    __xpmid__ = "test.asked"

    def bag(self, index, seed, epoch):
        """The bag of one word, its edges both ways."""
        word, *answers = super().bag(index, seed, epoch).items
        queries = [replace(word, side=Side.QUERY)]
        if index % 4 == 0:
            queries.append(Item.text(f"what is {WORDS[index]}", side=Side.QUERY_AND_DOCUMENT))
        documents = [replace(answer, side=Side.DOCUMENT) for answer in answers]
        asked = [(q, d) for q in range(len(queries)) for d in range(len(queries), len(queries) + len(documents))]
        other = Item.text(WORDS[index - 1][::-1], side=Side.DOCUMENT)
        last = len(queries) + len(documents)
        return Bag(
            (*queries, *documents, other),
            attract=(*asked, *((d, q) for q, d in asked)),
            repel=tuple((q, last) for q in range(len(queries))),
        )


class Offering(Words):
    """The same with choices: every other word offers some, with targets of its own."""

    __xpmid__ = "test.offering"

    def bag(self, index, seed, epoch):
        """The bag of one word."""
        bag = super().bag(index, seed, epoch)
        if index % 2:
            return bag
        weights = [1 + (index + place) % 3 for place in range(2 + index % 3)]
        targets = tuple(weight / sum(weights) for weight in weights)
        first = replace(bag.items[0], choices=b"yn?!"[: len(weights)], targets=targets)
        return replace(bag, items=(first, *bag.items[1:]))


class Pieces(Batcher):
    """Microbatches of ``size`` bags."""

    __xpmid__ = "test.pieces"
    size: Meta[int] = default(1)

    def initialize(self, batch_size):
        """The worker."""
        return PiecesWorker(batch_size, self.size)


class PiecesWorker(BatcherWorker):
    """Cuts batches into pieces."""

    def __init__(self, batch_size, size):
        super().__init__(batch_size)
        self.size = size

    def process_withreplay(self, batch, process, *args, **kwargs):
        """Processes the pieces."""
        parts = [batch[start : start + self.size] for start in range(0, len(batch), self.size)]
        return process(iter(parts), len(parts), *args, **kwargs)


LONG = {"epochs": 40, "learning_rate": 1e-3}
"""200 steps. At ten times this rate training is chaotic: in float32, rounding alone moves the weights by a percent."""

MASKED = MaskedLoss.C(token_mask_probability=0.3, token_mean_span=2.0, image_mask_ratio=0.5)
JOINT = {
    "losses": [ContrastiveLoss.C(), MASKED],
    "heads": {"pooled": PooledHead.C(width=16), "bytes": ByteHead.C(), "patches": PatchHead.C()},
}
"""Contrast and masked reconstruction in one forward pass."""

ALONE = {"losses": [MASKED], "heads": {"bytes": ByteHead.C(), "patches": PatchHead.C()}}
"""Masked reconstruction by a model without a pooled head."""

NAMED = {
    "source": Asked.C(),
    "losses": [LateInteractionLoss.C(max_query_span=5)],
    "heads": {"tokens": TokenHead.C(width=16)},
}
"""Late interaction by a model without a pooled head."""

AMBIENT = {
    "source": Asked.C(),
    "losses": [ContrastiveLoss.C(), LateInteractionLoss.C(negatives=Negatives.AMBIENT, max_query_span=5), MASKED],
    "heads": {**JOINT["heads"], "tokens": TokenHead.C(width=16)},
}
"""Contrast, late interaction with every document of the batch, and masked reconstruction in one forward pass."""

LIMITED = {
    **NAMED,
    "losses": [LateInteractionLoss.C(max_query_span=5, max_query_tokens=17, max_documents=9, max_document_tokens=190)],
}
"""Late interaction that bounds microbatches."""

CHOICES = {
    "source": Offering.C(),
    "losses": [ContrastiveLoss.C(), ChoicesLoss.C(weight=0.5)],
    "heads": {"pooled": PooledHead.C(width=16), "bytes": ByteHead.C()},
}
"""Contrast and choices in one forward pass."""

SMALL_MEMORY = UFormBatcher.C(memory=1_500_000)
"""Fits about a third of a batch."""


def offered(bags: int = 0) -> UFormBatcher:
    """Microbatches of at most so many bags (0: of all), whose items offer at most four choices."""
    return UFormBatcher.C(shape=BatchShape.C(bags=bags, max_choices_per_item=4))


class Killed(BaseException):
    """What no handler of errors catches."""


class KillAt(StepTrainingHook):
    """Ends the run before one step."""

    __xpmid__ = "test.kill-at"
    step: Meta[int] = default(0)

    def before(self, state):
        """Called before each step."""
        if state.steps == self.step:
            raise Killed


def config(
    batcher=None, devices=1, precision="64-true", form=None, batch_size=BATCH, workers=0, backend="auto", kill=0,
    epochs=EPOCHS, learning_rate=1e-2, losses=None, heads=None, source=None, **params,
):  # fmt: skip
    """The configuration that everything here runs."""
    contrast = ContrastiveLoss.C(backend=backend, **({"form": form} if form else {}))
    heads = heads or {"pooled": PooledHead.C(width=16)}
    return UFormLearner.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, image=ImageShape.C(patch_side=8, max_side=24), seed=1, **heads),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=source or Words.C()),
            batch_size=batch_size,
            losses=losses or [contrast],
            num_workers=workers,
            **({"batcher": batcher} if batcher else {}),
        ),
        max_epochs=epochs,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=learning_rate, warmup_steps=2)),
        listeners=[],
        hooks=[KillAt.C(step=kill)],
        fabric_config=FabricConfiguration.C(precision=precision, accelerator="cpu", devices=str(devices)),
        **params,
    )


def job(folder: Path) -> Path:
    """Where the task of ``folder`` runs."""
    return folder / "workspace" / "jobs" / "task" / "job"


def run_here(made, folder: Path):
    """Executes a task as its job would; answers the instance that ran."""
    job(folder).mkdir(parents=True, exist_ok=True)
    taskglobals.Env.instance().taskpath = job(folder)
    task = made.instance(context=DirectoryContext(job(folder)))
    task.execute()
    return task


def _rank(rank: int, world: int, port: int, work: Callable, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    work(rank, folder)
    dist.destroy_process_group()


def run_ranks(world: int, work: Callable[[int, Path], object], folder: Path) -> None:
    """Runs ``work(rank, folder)`` in ``world`` processes.

    Raises:
        RuntimeError: they have not ended within a minute; they are killed.
    """
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
    raise RuntimeError(f"{world} ranks did not end within {LIMIT_SECONDS} s")


def weights(folder: Path, checkpoint: str = "last") -> torch.Tensor:
    """All weights of a checkpoint, flat, in float64."""
    tensors = load_file(job(folder) / "checkpoints" / checkpoint / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def optimizer(folder: Path) -> torch.Tensor:
    """All of the newest optimizer state, flat."""
    tensors = load_file(job(folder) / "checkpoints" / "last" / "optimizer.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def distance(found: Path, expected: Path) -> float:
    """The norm of the difference of the final weights, relative to their change since initialisation."""
    change = weights(expected) - weights(expected, "step-00000000")
    return float((weights(found) - weights(expected)).norm() / change.norm())


def relative(found: Path, expected: Path) -> float:
    """The norm of the difference of the final weights, relative to the weights."""
    return float((weights(found) - weights(expected)).norm() / weights(expected).norm())


def losses(folder: Path) -> dict[str, list[float]]:
    """The sums and counts of what the last epoch logged, durations left out."""
    state = json.loads((job(folder) / "checkpoints" / "last" / "state.json").read_text())
    return {name: value for name, value in state["metrics"].items() if name != "step_seconds"}


def bits(found: Path, expected: Path) -> float:
    """0 if weights, optimizer and the last epoch's losses are bit for bit the same, else infinity."""
    same = (
        torch.equal(weights(found), weights(expected))
        and torch.equal(optimizer(found), optimizer(expected))
        and losses(found) == losses(expected)
    )
    return 0.0 if same else float("inf")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the worst of several comparisons and its bound."""

    varied: str
    compared: str
    worst: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the bound holds."""
        return self.worst <= self.bound


class Matrix:
    """Runs everything in folders below ``root``, against one uninterrupted run per precision."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0

    def folder(self) -> Path:
        """A fresh folder."""
        self.count += 1
        path = self.root / str(self.count)
        path.mkdir()
        return path

    def run(self, ranks: int = 1, **params) -> Path:
        """The folder of one run."""
        folder = self.folder()
        if ranks == 1:
            run_here(config(**params), folder)
        else:
            run_ranks(ranks, lambda rank, where: run_here(config(devices=ranks, **params), where), folder)
        return folder

    def resumed(self, steps: list[int], ranks: int = 1, **params) -> Path:
        """The folder of a run that was ended before each of ``steps`` and goes on with ``ranks`` at last."""
        folder = self.folder()
        for step in steps:
            try:
                run_here(config(kill=step, checkpoint_steps=1, **params), folder)
            except Killed:
                continue
            raise RuntimeError(f"the run was not ended before step {step}")
        if ranks == 1:
            run_here(config(**params), folder)
        else:
            run_ranks(ranks, lambda rank, where: run_here(config(devices=ranks, **params), where), folder)
        return folder

    def another_process(self, hash_seed: int) -> Path:
        """The folder of a run by a fresh interpreter with its own hash seed."""
        folder = self.folder()
        subprocess.run(
            [sys.executable, __file__, "--one", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            check=True,
            capture_output=True,
        )
        return folder


def single_process_rows(matrix: Matrix, whole: Path) -> Iterator[Row]:
    """What varies within one process."""
    runs = [matrix.run(batcher=Pieces.C(size=size)) for size in (1, 2, 3, 5, 7)]
    yield Row(
        "microbatches of 1, 2, 3, 5, 7 of 11 bags", "weights, 64-true", max(distance(run, whole) for run in runs), 1e-10
    )
    batchers = Batcher.C(), PowerAdaptativeBatcher.C(), UFormBatcher.C(shape=BatchShape.C(bags=2)), SMALL_MEMORY
    runs = [matrix.run(batcher=batcher) for batcher in batchers]
    yield Row("stock batchers and ours", "weights, 64-true", max(distance(run, whole) for run in runs), 1e-10)
    ranked = matrix.run(form=RankedForm.C(), keep=100)
    runs = [matrix.run(form=RankedForm.C(), batcher=Pieces.C(size=size)) for size in (1, 3)]
    yield Row("microbatches, ranked form", "weights, 64-true", max(distance(run, ranked) for run in runs), 1e-10)
    runs = [matrix.run(workers=workers) for workers in (1, 2)]
    yield Row("1, 2 loader workers", "weights, optimizer, losses", max(bits(run, whole) for run in runs), 0.0)
    runs = [matrix.run(checkpoint_interval=3, keep=1), matrix.run(checkpoint_steps=1)]
    yield Row("checkpoint intervals", "weights, optimizer, losses", max(bits(run, whole) for run in runs), 0.0)
    runs = [matrix.another_process(seed) for seed in (0, 1)]
    yield Row("Python hash seed", "weights, optimizer, losses", max(bits(run, whole) for run in runs), 0.0)
    runs = [matrix.resumed([step]) for step in range(1, EPOCHS * STEPS + 1)]
    yield Row("ended before each of 20 steps", "weights, optimizer, losses", max(bits(run, whole) for run in runs), 0.0)
    yield Row("ended twice", "weights, optimizer, losses", bits(matrix.resumed([4, 11]), whole), 0.0)
    for name, objective in (("joint with masked", JOINT), ("masked alone", ALONE)):
        masked = matrix.run(**objective, keep=100)
        runs = [matrix.run(**objective, batcher=Pieces.C(size=size)) for size in (1, 3, 7)]
        yield Row(f"microbatches, {name}", "weights, 64-true", max(distance(run, masked) for run in runs), 1e-10)
    for name, objective in (("late interaction, named", NAMED), ("late interaction, ambient, joint", AMBIENT)):
        late = matrix.run(**objective, keep=100)
        runs = [matrix.run(**objective, batcher=Pieces.C(size=size)) for size in (1, 3, 7)]
        runs += [matrix.run(**LIMITED)] if objective is NAMED else []
        yield Row(f"microbatches, {name}", "weights, 64-true", max(distance(run, late) for run in runs), 1e-10)
    asked = matrix.run(**CHOICES, batcher=offered(), keep=100)
    runs = [matrix.run(**CHOICES, batcher=offered(bags)) for bags in (1, 3, 7)]
    yield Row("microbatches, joint with choices", "weights, 64-true", max(distance(run, asked) for run in runs), 1e-10)
    single = matrix.run(precision="32-true", **LONG)
    runs = [matrix.run(precision="32-true", **LONG, batcher=Pieces.C(size=2))]
    yield Row("microbatches, 200 steps", "weights, 32-true", max(relative(run, single) for run in runs), 1e-5)
    yield Row("back ends, 20 steps", "losses, gradients, 32-true", back_end_error(), 1e-5)


def back_end_error() -> float:
    """The worst relative difference between back ends of loss and gradients, over the steps of a training."""
    made = config(precision="32-true").instance(context=DirectoryContext(Path()))
    made.model.initialize()
    sampler = made.trainer.sampler
    sampler.initialize(np.random.RandomState(3))
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    worst = 0.0
    for number in range(EPOCHS * STEPS):
        step = StepDataset(sampler, BATCH, made.model.shapes)[number]
        outputs = made.model(pack(step.segments))
        leaves = Encoded(outputs.embeddings, outputs.inverse_temperature, outputs.bias)
        found = [loss_and_gradients(name, leaves, step) for name in BACKENDS]
        worst = max([worst, *(float((f - found[0]).norm() / found[0].norm()) for f in found[1:])])
        optimizer.zero_grad()
        outputs.embeddings.backward(found[0][1 : 1 + outputs.embeddings.numel()].view_as(outputs.embeddings))
        optimizer.step()
    return worst


def loss_and_gradients(backend: str, encoded: Encoded, step: LoadedStep) -> torch.Tensor:
    """The loss and its gradients with respect to embeddings, temperature and bias, flat."""
    leaves = Encoded(*(leaf.detach().requires_grad_() for leaf in (encoded.embeddings, *scale_of(encoded))))
    loss = ContrastiveLoss.C(backend=backend).instance()
    rows = range(len(step.batch))
    value = loss.compute(leaves, step.batch, rows, loss.counts(step.batch, rows)).value
    gradients = torch.autograd.grad(value, (leaves.embeddings, *scale_of(leaves)))
    return torch.cat([value.detach().reshape(1), *(gradient.flatten() for gradient in gradients)])


def scale_of(encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperature and bias."""
    return encoded.inverse_temperature, encoded.bias


def rank_rows(matrix: Matrix, whole: Path) -> Iterator[Row]:
    """What varies over processes."""
    runs = [matrix.run(2), matrix.run(2, batcher=Pieces.C(size=1)), matrix.run(3, batcher=Pieces.C(size=2))]
    yield Row("2, 3 ranks, unequal shares", "weights, 64-true", max(distance(run, whole) for run in runs), 1e-10)
    single = matrix.run(precision="32-true", **LONG)
    both = matrix.run(2, precision="32-true", **LONG, batcher=Pieces.C(size=2))
    yield Row("2 ranks, microbatches, 200 steps", "weights, 32-true", relative(both, single), 1e-5)
    few = matrix.run(batch_size=2, keep=100)
    yield Row("3 ranks, one without a bag", "weights, 64-true", distance(matrix.run(3, batch_size=2), few), 1e-10)
    masked = matrix.run(**JOINT, keep=100)
    runs = [matrix.run(2, **JOINT), matrix.run(2, **JOINT, batcher=Pieces.C(size=2))]
    yield Row("2 ranks, joint with masked", "weights, 64-true", max(distance(run, masked) for run in runs), 1e-10)
    for name, objective in (("late interaction, named", NAMED), ("late interaction, ambient, joint", AMBIENT)):
        late = matrix.run(**objective, keep=100)
        runs = [matrix.run(2, **objective), matrix.run(3, **objective, batcher=Pieces.C(size=2))]
        yield Row(f"2, 3 ranks, {name}", "weights, 64-true", max(distance(run, late) for run in runs), 1e-10)
    few = matrix.run(**AMBIENT, batch_size=2, keep=100)
    runs = [matrix.run(3, **AMBIENT, batch_size=2)]
    yield Row("3 ranks, one without an item", "weights, 64-true", max(distance(run, few) for run in runs), 1e-10)
    asked = matrix.run(**CHOICES, batcher=offered(), keep=100)
    runs = [matrix.run(2, **CHOICES, batcher=offered(bags)) for bags in (0, 2)]
    yield Row("2 ranks, joint with choices", "weights, 64-true", max(distance(run, asked) for run in runs), 1e-10)
    yield Row("gone on with 2 ranks", "weights, 64-true", distance(matrix.resumed([11], ranks=2), whole), 1e-10)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what needs several processes")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        run_here(config(keep=100), arguments.one)
        return
    with tempfile.TemporaryDirectory() as root:
        matrix = Matrix(Path(root))
        whole = matrix.run(keep=100)
        rows = list(single_process_rows(matrix, whole))
        if not arguments.quick:
            rows += rank_rows(matrix, whole)
    print(
        table(
            ["varied", "compared", "worst", "bound", ""],
            [
                [row.varied, row.compared, f"{row.worst:.1e}", f"{row.bound:.0e}", "holds" if row.holds else "FAILS"]
                for row in rows
            ],
        )
    )
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
