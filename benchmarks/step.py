"""The exact step in k microbatches against the direct step on the same batch.

    python benchmarks/step.py [--quick]

With k microbatches, k - 1 of them run forward twice: with a backward pass as dear as two forward passes the ratio is
(4 - 1/k) / 3, 1.25 for k = 4. Gradients are compared before anything is timed. Fails if the ratio for k = 4 is above
1.40. On two cores it takes about a minute.
"""

import argparse
import platform
import sys
import time
from statistics import median

import numpy as np
import torch

from xpmir_uform import Bag, BagSampler, BagSource, ContrastiveLoss, Item, PooledHead, UFormEncoder
from xpmir_uform.losses.base import Answers
from xpmir_uform.model import pack
from xpmir_uform.reports.tables import table
from xpmir_uform.trainer.loader import LoadedStep, StepDataset
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step

BAGS, TOKENS, TARGET = 128, 24, 1.40


class Texts(BagSource):
    """Pairs of texts of like lengths."""

    __xpmid__ = "bench.texts"

    def __len__(self):
        return BAGS

    def bag(self, index, seed, epoch):
        """The bag of one number."""
        words = f"{index:03d} " * TOKENS
        return Bag.alike([Item.text(words[: TOKENS + index % 8]), Item.text(words[1 : TOKENS + index % 5])])


def cut(loaded: LoadedStep, parts: int) -> Share:
    """The batch in ``parts`` microbatches."""
    size = -(-BAGS // parts)
    microbatches = []
    for start in range(0, BAGS, size):
        numbers = [number for bag in loaded.bags[start : start + size] for number in bag.items]
        microbatches.append(Microbatch(pack(loaded.collect(numbers)), torch.tensor(numbers)))
    return Share(loaded.batch, loaded.shares, microbatches)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    repeats = 5 if parser.parse_args().quick else 15
    torch.set_num_threads(2)
    model = UFormEncoder.C(depth=2, hidden=128, pooled=PooledHead.C(width=128)).instance()
    model.initialize()
    sampler = BagSampler.C(source=Texts.C()).instance()
    sampler.initialize(np.random.RandomState(0))
    loaded = StepDataset(sampler, BAGS, {})[0]
    losses = [ContrastiveLoss.C().instance()]
    shares = {parts: cut(loaded, parts) for parts in (1, 2, 4, 8)}

    def forward(microbatch: Microbatch) -> Answers:
        outputs = model(microbatch.packed)
        return Answers(*outputs[1:])

    def run(parts: int) -> torch.Tensor:
        model.zero_grad()
        exact_step(Engine(forward, torch.Tensor.backward), shares[parts], losses)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = run(1)
    for parts in shares:
        torch.testing.assert_close(run(parts), whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))
    seconds: dict[int, list[float]] = {parts: [] for parts in shares}
    for _ in range(repeats):
        for parts in shares:
            start = time.perf_counter()
            run(parts)
            seconds[parts].append(time.perf_counter() - start)
    ratios = {parts: median(a / b for a, b in zip(times, seconds[1], strict=True)) for parts, times in seconds.items()}
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 2 threads, {repeats} repeats")
    print(
        table(
            ["microbatches", "milliseconds", "of the direct step", "bound (4 - 1/k) / 3"],
            [[str(k), f"{1e3 * median(seconds[k]):.1f}", f"{ratios[k]:.2f}", f"{(4 - 1 / k) / 3:.2f}"] for k in shares],
        )
    )
    print(f"k = 4: {ratios[4]:.2f}, at most {TARGET}")
    sys.exit(0 if ratios[4] <= TARGET else 1)


if __name__ == "__main__":
    main()
