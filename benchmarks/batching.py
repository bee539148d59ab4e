"""The batcher: how fast it plans, how full its microbatches are, how well it predicts memory.

    python benchmarks/batching.py [--quick]

Plans are checked before they are timed. The command fails when a target is missed: 10,000 bags in 50 ms, 85 % of the
budget used, memory predicted within 10 % (batcher) and 20 % (before submission). On one core it takes about 20 seconds.

Letters: B bags, L tokens of an item.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from xpmir_uform import PooledHead, UFormEncoder
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.batching.bag_sizes import BagSize
from xpmir_uform.batching.balance import balance
from xpmir_uform.batching.cost import CostModel, fit
from xpmir_uform.batching.footprint import cost_of
from xpmir_uform.batching.memory_probe import probe, probe_lengths, saved_bytes
from xpmir_uform.batching.packer import pack
from xpmir_uform.data.decoding.segment import blank_text
from xpmir_uform.model.packing import pack as pack_segments

BAGS, LONGEST = 10_000, 300
TARGET_SECONDS, TARGET_USE, TARGET_ERROR, TARGET_FAKE_ERROR = 0.050, 0.85, 0.10, 0.20
HELD_OUT = [(1,), (700,), (3,) * 200, (97,) * 11, (500, 400, 2, 1), tuple(range(1, 60)), (33, 34) * 20]
CPU = torch.device("cpu")


def drawn_bags() -> list[BagSize]:
    """10,000 bags of two items of log-normal lengths."""
    drawn = generator(0, Purpose.ORDER).lognormal(3.2, 0.8, (BAGS, 2)).astype(int).clip(1, LONGEST)
    return [BagSize(range(2 * b, 2 * b + 2), (int(one), int(two)), 2 * b) for b, (one, two) in enumerate(drawn)]


def seconds(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median and least time of ``rounds`` calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times), min(times)


def planning(bags: Sequence[BagSize], model: CostModel, rounds: int) -> bool:
    """Prints a row for each budget; whether all targets are met."""
    whole = model.predict([length for bag in bags for length in bag.lengths])
    print(f"{'planning':34}{'ms':>8}{'least':>8}{'parts':>8}{'used':>8}")
    good = True
    for name, budget, limits in [
        ("memory for 1/50 of the batch", whole / 50, {}),
        ("memory for 1/1000", whole / 1000, {}),
        ("memory for 1/50, 16,384 tokens", whole / 50, {"tokens": 16_384, "longest": LONGEST}),
        ("512 items, 65,536 tokens", float("inf"), {"tokens": 65_536, "items": 512}),
        ("each bag alone", float("inf"), {"bags": 1}),
    ]:
        parts = pack(bags, limits, model, budget)
        assert sorted(number for part in parts for number in part) == list(range(len(bags)))
        costs = [model.predict([length for number in part for length in bags[number].lengths]) for part in parts]
        assert max(costs) <= budget
        usual, least = seconds(lambda limits=limits, budget=budget: pack(bags, limits, model, budget), rounds)
        bounded = budget < float("inf")
        used = min(costs[:-1]) / budget
        good &= least < TARGET_SECONDS and (used >= TARGET_USE or not bounded)
        print(f"{name:34}{usual * 1e3:8.1f}{least * 1e3:8.1f}{len(parts):8}{f'{used:8.1%}' if bounded else '':>8}")
    usual, least = seconds(lambda: balance([float(sum(bag.lengths)) for bag in bags], 8), rounds)
    print(f"{'balance over 8 ranks':34}{usual * 1e3:8.1f}{least * 1e3:8.1f}")
    return good and least < TARGET_SECONDS


def predicting(model: UFormEncoder, fitted: CostModel) -> bool:
    """Prints the errors on shapes that were not probed; whether they are small enough."""
    fake = cost_of_fake()
    print(f"{'predicting':34}{'bytes':>12}{'batcher':>10}{'before':>10}")
    good = True
    for lengths in HELD_OUT:
        taken = saved_bytes(lambda lengths=lengths: run(model, lengths))
        errors = [abs(cost.predict(lengths) - taken) / taken for cost in (fitted, fake)]
        good &= errors[0] < TARGET_ERROR and errors[1] < TARGET_FAKE_ERROR
        name = f"{len(lengths)} items, {sum(lengths)} tokens"
        print(f"{name:34}{taken:12}{errors[0]:10.4%}{errors[1]:10.4%}")
    return good


def cost_of_fake() -> CostModel:
    """The cost model by fake tensors, as it is found before anything is submitted."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return cost_of(encoder(), LONGEST, None)


def encoder() -> UFormEncoder:
    """A small encoder."""
    model = UFormEncoder.C(depth=2, hidden=128, pooled=PooledHead.C(width=64)).instance()
    model.initialize()
    return model


def run(model: UFormEncoder, lengths: Sequence[int]) -> None:
    """A forward and a backward pass."""
    model(pack_segments([blank_text(length) for length in lengths])).embeddings.sum().backward()


def main() -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 15
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, numpy {np.__version__}, one thread, {platform.machine()}; {BAGS} bags")
    model = encoder()
    fitted = fit(probe(lambda lengths: run(model, lengths), probe_lengths(LONGEST, CPU), CPU))
    print(f"cost model: {fitted.to_json()}")
    good = [planning(drawn_bags(), fitted, rounds), predicting(model, fitted)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
