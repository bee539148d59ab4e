"""Speed and memory of `pair_loss` (chunked) on a CPU, against bare matrix products and the plain N x N loss.

    python benchmarks/pair_loss.py [--quick]

About 4 minutes on two cores (--quick: 2). Every case runs in a process of its own with 2 threads, in float32 with
d = 256 unless it says otherwise, forward and backward; times are medians of runs that alternate with what they are
compared with, memory is what a call adds to the process's peak. Each case is first checked against the float64
reference. Exits with 1 when a target is missed.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from uform_kernels import Edges, pair_loss

THREADS = 2
COUNT, WIDTH = 8192, 256
CHECK_COUNT = 777

Call = Callable[[], object]


def cluster_edges(count: int, size: int) -> Edges:
    """Clusters of `size` items, scattered over the batch, that attract one another: `size - 1` positives an anchor."""
    generator = torch.Generator().manual_seed(0)
    members = torch.randperm(count, generator=generator)[: count // size * size].view(-1, size)
    lists: list[list[int]] = [[] for _ in range(count)]
    for cluster in members.sort(1).values.tolist():
        for item in cluster:
            lists[item] = [other for other in cluster if other != item]
    return Edges.from_lists(lists)


class Case:
    """One setting of the loss, on random embeddings."""

    def __init__(self, form: str, count: int = COUNT, width: int = WIDTH, cluster: int = 2) -> None:
        generator = torch.Generator().manual_seed(1)
        self.form, self.attract = form, cluster_edges(count, cluster)
        self.embeddings = torch.randn(count, width, generator=generator).requires_grad_()
        self.temperature = torch.tensor([10.0], requires_grad=True)
        self.bias = torch.tensor([-10.0], requires_grad=True)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.embeddings, self.temperature, self.bias

    def loss(self, dimensions: tuple[int, ...] | None = None, backend: str = "chunked") -> Tensor:
        """The loss by one of the package's back ends."""
        embeddings, temperature, bias = self.inputs()
        return pair_loss(
            embeddings, self.attract, form=self.form, inverse_temperature=temperature, bias=bias,
            dimensions=dimensions, backend=backend,
        ).loss  # fmt: skip

    def step(self, dimensions: tuple[int, ...] | None = None) -> None:
        """Forward and backward."""
        torch.autograd.grad(self.loss(dimensions), self.inputs())

    def plain(self) -> None:
        """Forward and backward of the loss as one writes it with an N x N matrix of scores."""
        embeddings, temperature, bias = self.inputs()
        unit = F.normalize(embeddings, dim=1)
        scores = temperature * (unit @ unit.T) + bias
        anchors, count = self.attract.anchors(), len(unit)
        repels = ~torch.eye(count, dtype=torch.bool)
        repels[anchors, self.attract.ids] = False
        pulls, pushes = F.softplus(-scores[anchors, self.attract.ids]), F.softplus(scores) * repels
        weights = (len(pulls), repels.sum()) if self.form == "balanced" else (count, count)
        torch.autograd.grad(pulls.sum() / weights[0] + pushes.sum() / weights[1], self.inputs())

    def products(self) -> None:
        """The three products of N x N x d that no full computation goes without."""
        unit = self.embeddings.detach()
        scores = unit @ unit.T
        scores @ unit, scores.T @ unit

    def check(self, cluster: int, dimensions: tuple[int, ...] | None = None) -> None:
        """Refuses to go on unless a smaller case agrees with the float64 reference."""
        case = Case(self.form, CHECK_COUNT, self.embeddings.shape[1], cluster)
        got = torch.autograd.grad(case.loss(dimensions), case.inputs(), allow_unused=True)
        for name in ("embeddings", "temperature", "bias"):
            setattr(case, name, getattr(case, name).detach().double().requires_grad_())
        want = torch.autograd.grad(case.loss(dimensions, "reference"), case.inputs(), allow_unused=True)
        for name, one, other in zip(("embeddings", "temperature", "bias"), got, want, strict=True):
            error = (one - other).norm() / other.norm().clamp(min=1e-6)
            if not error < 1e-5:
                raise SystemExit(f"wrong gradient of {name} ({self.form}, {dimensions}): relative error {error:.1e}")


def medians(repeats: int, **calls: Call) -> dict[str, float]:
    """Median seconds of each call; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def growth(form: str, count: int, plain: bool) -> dict[str, float]:
    """MiB that one call adds to the peak of this process."""
    small = Case(form, 64)
    small.step(), small.plain()
    case = Case(form, count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case.plain() if plain else case.step()
    return {"growth": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def pointwise(form: str, repeats: int) -> dict[str, float]:
    case = Case(form)
    case.check(2)
    return medians(repeats, step=case.step, products=case.products, plain=case.plain)


def ranked_one(repeats: int) -> dict[str, float]:
    case = Case("ranked")
    case.check(2)
    return medians(repeats, step=case.step, products=case.products)


def ranked_many(repeats: int) -> dict[str, float]:
    case, sigmoid = Case("ranked", cluster=65), Case("sigmoid")
    case.check(65)
    return medians(repeats, step=case.step, sigmoid=sigmoid.step)


def levels(dimensions: tuple[int, ...], repeats: int) -> dict[str, float]:
    case = Case("balanced", width=dimensions[-1])
    case.check(2, dimensions)

    def separate() -> None:
        for dimension in dimensions:
            case.step((dimension,))

    return medians(repeats, step=lambda: case.step(dimensions), separate=separate)


CASES: dict[str, Callable[[int], dict[str, float]]] = {
    "balanced": lambda repeats: pointwise("balanced", repeats),
    "sigmoid": lambda repeats: pointwise("sigmoid", repeats),
    "ranked, 1 positive": ranked_one,
    "ranked, 64 positives": ranked_many,
    "5 levels to 256": lambda repeats: levels((16, 32, 64, 128, 256), repeats),
    "8 levels to 512": lambda repeats: levels(tuple(range(64, 513, 64)), repeats),
    **{
        f"memory {form}{count}{' plain' * plain}": lambda _, f=form, c=count, p=plain: growth(f, c, p)
        for form, count, plain in (
            ("balanced", COUNT, False), ("balanced", COUNT, True), ("sigmoid", COUNT, False), ("sigmoid", COUNT, True),
            ("balanced", 4096, False), ("balanced", 16384, False),
        )
    },
}  # fmt: skip


def run_case(name: str, repeats: int) -> dict[str, float]:
    """The case's measurements, from a process of its own."""
    command = [sys.executable, __file__, "--case", name, "--repeats", str(repeats)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"{name}: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


def rows(measured: dict[str, dict[str, float]]) -> list[tuple[str, str, float, float, bool]]:
    """Case, what is measured, value, target, and whether the value must be below it (else above)."""
    table = []
    for form in ("balanced", "sigmoid"):
        times = measured[form]
        memory = measured[f"memory {form}{COUNT}"]["growth"] / measured[f"memory {form}{COUNT} plain"]["growth"]
        table += [
            (form, "time / three products", times["step"] / times["products"], 0.65, True),
            (form, "times as fast as the plain loss", times["plain"] / times["step"], 4.0, False),
            (form, "peak growth / that of the plain loss", memory, 1 / 12, True),
        ]
    one, many = measured["ranked, 1 positive"], measured["ranked, 64 positives"]
    table += [
        ("ranked, 1 positive", "time / three products", one["step"] / one["products"], 0.9, True),
        ("ranked, 64 positives", "time / sigmoid form", many["step"] / many["sigmoid"], 3.0, True),
    ]
    for name, target in (("5 levels to 256", 0.85), ("8 levels to 512", 0.5)):
        times = measured[name]
        table.append((name, "time / separate calls", times["step"] / times["separate"], target, True))
    ratio = measured["memory balanced16384"]["growth"] / measured["memory balanced4096"]["growth"]
    return [*table, ("N = 4096 -> 16384", "peak growth, times", ratio, 4.4, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 runs of each case in place of 7")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.case:
        print(json.dumps(CASES[options.case](options.repeats)))
        return
    measured = {}
    for number, name in enumerate(CASES, 1):
        print(f"\r{number}/{len(CASES)} {name:<40}", end="", file=sys.stderr, flush=True)
        measured[name] = run_case(name, 3 if options.quick else options.repeats)
    print(f"\r{' ' * 60}\r", end="", file=sys.stderr)
    print(f"pair_loss, N = {COUNT}, float32, {THREADS} threads, {platform.machine()}, torch {torch.__version__}")
    missed = 0
    for case, what, value, target, below in rows(measured):
        good = value <= target if below else value >= target
        missed += not good
        sign = "<=" if below else ">="
        print(f"{case:<22} {what:<38} {value:7.3f}  {sign} {target:.3f}  {'ok' if good else 'MISSED'}")
    for name, values in measured.items():
        units = ", ".join(
            f"{key} {value:.3f} s" if key != "growth" else f"{value:.0f} MiB" for key, value in values.items()
        )
        print(f"  {name}: {units}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
