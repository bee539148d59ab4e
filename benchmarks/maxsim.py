"""Speed and memory of `maxsim` (chunked) on a CPU, against the products and maxima as one writes them in plain torch.

    python benchmarks/maxsim.py [--quick]

About a minute on two cores (--quick: half). 64 queries of 32 tokens, 256 documents of 128, width 128, float32,
forward and backward, 2 threads. Every case runs in a process of its own; times are medians of runs that alternate with
the plain form, memory is what one call adds to the process's peak. Each case is first checked against the float64
reference. Exits with 1 when a target is missed.
"""

import argparse
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from uform_kernels import maxsim

THREADS = 2
QUERIES, QUERY_TOKENS, DOCUMENTS, DOCUMENT_TOKENS, WIDTH = 64, 32, 256, 128, 128


class Case:
    """Queries of one length, documents of the given ones, and weights that stand for a loss's gradient."""

    def __init__(self, lengths: Sequence[int], queries: int = QUERIES, listed: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths, self.count = list(lengths), queries
        self.queries = _tokens(queries * QUERY_TOKENS, generator)
        self.documents = _tokens(sum(lengths), generator)
        self.query_offsets = torch.arange(queries + 1) * QUERY_TOKENS
        self.document_offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        self.pairs = None
        if listed:
            others = torch.randint(len(lengths), (queries * listed,), generator=generator)
            self.pairs = torch.stack([torch.arange(queries).repeat_interleave(listed), others], 1)
        shape = (queries, len(lengths)) if self.pairs is None else (len(self.pairs),)
        self.weights = torch.randn(shape, generator=generator)

    def scores(self, backend: str = "chunked") -> Tensor:
        """Scores by one of the package's back ends."""
        return maxsim(
            self.queries, self.query_offsets, self.documents, self.document_offsets, self.pairs, backend=backend
        )

    def plain_scores(self) -> Tensor:
        """Scores by einsum and max: documents padded to the longest where they differ, listed pairs gathered."""
        queries = self.queries.view(self.count, QUERY_TOKENS, WIDTH)
        longest, real = max(self.lengths), None
        if min(self.lengths) == longest:
            documents = self.documents.view(len(self.lengths), longest, WIDTH)
        else:
            token = torch.arange(longest)
            real = token < torch.tensor(self.lengths)[:, None]
            documents = self.documents[torch.where(real, self.document_offsets[:-1, None] + token, 0)]
        if self.pairs is not None:
            products = torch.einsum("ptw,psw->pts", queries[self.pairs[:, 0]], documents[self.pairs[:, 1]])
        else:
            products = torch.einsum("qtw,dsw->qtds", queries, documents)
        if real is not None:
            products = products.masked_fill(~(real if self.pairs is None else real[self.pairs[:, 1], None]), -torch.inf)
        return products.max(-1).values.mean(1)

    def step(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        return self._step(self.scores())

    def plain(self) -> tuple[Tensor, ...]:
        """Forward and backward of the plain form."""
        return self._step(self.plain_scores())

    def _step(self, scores: Tensor) -> tuple[Tensor, ...]:
        weights = self.weights.to(scores.dtype)
        return scores.detach(), *torch.autograd.grad((scores * weights).sum(), (self.queries, self.documents))


def _tokens(count: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(count, WIDTH, generator=generator), dim=1).requires_grad_()


CASES: dict[str, Callable[[], Case]] = {
    "all pairs": lambda: Case([DOCUMENT_TOKENS] * DOCUMENTS),
    "all pairs, 64 to 192 tokens": lambda: Case([64 + 128 * i // 255 for i in _scattered(DOCUMENTS)]),
    "8 listed documents a query": lambda: Case([DOCUMENT_TOKENS] * DOCUMENTS, listed=8),
}


def _scattered(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()


def check(name: str) -> None:
    """Refuses to go on unless the case agrees with the float64 reference on its first queries, and with plain torch."""
    case = CASES[name]()
    for what, one, other in zip(("scores", "queries", "documents"), case.step(), case.plain(), strict=True):
        _refuse(name, what, one, other)
    small = Case(case.lengths[:20], queries=3, listed=5 if case.pairs is not None else 0)
    got = small.step()
    small.queries, small.documents = (x.detach().double().requires_grad_() for x in (small.queries, small.documents))
    want = small._step(small.scores("reference"))
    for what, one, other in zip(("scores", "queries", "documents"), got, want, strict=True):
        _refuse(name, what, one, other)


def _refuse(name: str, what: str, one: Tensor, other: Tensor) -> None:
    error = float((one - other).norm() / other.norm())
    if not error < 1e-5:
        raise SystemExit(f"{name}: wrong {what}, relative error {error:.1e}")


def times(name: str, repeats: int) -> dict[str, float]:
    """Median seconds of our step and of the plain one; they take turns."""
    check(name)
    case = CASES[name]()
    taken: dict[str, list[float]] = {"step": [], "plain": []}
    for _ in range(repeats):
        for call in taken:
            start = time.perf_counter()
            getattr(case, call)()
            taken[call].append(time.perf_counter() - start)
    return {call: statistics.median(values) for call, values in taken.items()}


def growth(name: str, call: str) -> dict[str, float]:
    """MiB that one call adds to the peak of this process."""
    small = Case([3, 4], queries=2)
    small.step(), small.plain()
    case = CASES[name]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    getattr(case, call)()
    return {"growth": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def measure(name: str, what: str, repeats: int) -> dict[str, float]:
    """One measurement, from a process of its own."""
    command = [sys.executable, __file__, "--case", name, "--what", what, "--repeats", str(repeats)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"{name}: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


# Ratios to plain torch that the package promises.
TARGETS = {"all pairs": {"time": 0.45, "memory": 0.2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the case with targets alone, 3 runs in place of 9")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=9, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.case:
        answer = times(options.case, options.repeats) if options.what == "times" else growth(options.case, options.what)
        print(json.dumps(answer))
        return
    print(f"maxsim, float32, {THREADS} threads, {platform.machine()}, torch {torch.__version__}")
    print(f"{'case':30} {'':7} {'maxsim':>10} {'plain':>10} {'ratio':>7}")
    missed = 0
    for name in TARGETS if options.quick else CASES:
        seconds = measure(name, "times", 3 if options.quick else options.repeats)
        missed += _print_row(name, "time", seconds["step"] * 1e3, seconds["plain"] * 1e3, "ms")
        peaks = [measure(name, call, 1)["growth"] for call in ("step", "plain")]
        missed += _print_row(name, "memory", *peaks, "MiB")
    sys.exit(missed > 0)


def _print_row(name: str, what: str, ours: float, plain: float, unit: str) -> bool:
    """Prints one row; true when a target is missed."""
    ratio, target = ours / plain, TARGETS.get(name, {}).get(what)
    verdict = "" if target is None else f"<= {target}  {'ok' if ratio <= target else 'MISSED'}"
    print(f"{name:30} {what:7} {ours:6.1f} {unit:3} {plain:6.1f} {unit:3} {ratio:7.3f}  {verdict}".rstrip(), flush=True)
    return target is not None and ratio > target


if __name__ == "__main__":
    main()
