"""Chooses block sizes of every Triton kernel on this GPU and prints rows for the kernels' tables.

    PYTHONPATH=kernels python benchmarks/tune_kernels.py [--ops maxsim pair_loss choice_loss]

Needs torch, triton and numpy alone; some minutes. From the row that holds now, one setting at a time is changed as
long as that makes the call faster. A candidate is timed only where it agrees with the float64 reference. A printed row
replaces the one of its architecture, or adds one; `make kernels-compile` then shows whether it spills there.
Under TRITON_INTERPRET=1 small inputs are checked on the CPU and nothing is timed: that tries this script, no GPU.
Ends with 0, with 1 where a candidate was wrong or no row runs, with 2 where there is no GPU.
"""

import argparse
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import triton
from device import (
    DEVICE,
    DRY_RUN,
    PAIR_LOSS_ERROR,
    choices_of,
    cluster_edges,
    milliseconds,
    offsets_of,
    unit,
    with_gradients,
)
from torch import Tensor
from uform_kernels import choice_loss, maxsim, pair_loss
from uform_kernels.targets import architecture, row_for

# The functions of the package hide its folders of the same names.
maxsim_tiles = importlib.import_module("uform_kernels.ops.maxsim.tiles")
pair_loss_kernel = importlib.import_module("uform_kernels.ops.pair_loss.kernel")
choice_loss_kernel = importlib.import_module("uform_kernels.ops.choice_loss.kernel")

# Where Triton interprets, bfloat16 is wrong.
HALF = torch.float16 if DRY_RUN else torch.bfloat16
# A change is kept when the call then takes at most this share of its time: less is noise.
FASTER = 0.98

Call = Callable[[], object]
Problem = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Search:
    """A row to choose: its table, what may change in it, what is wrong with results, and what sets up a timed call."""

    place: str
    rows: dict[str, dict[str, int]]
    grid: dict[str, tuple[int, ...]]
    fault: Callable[[], str]
    prepare: Callable[[], Call]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(SEARCHES), choices=list(SEARCHES))
    options = parser.parse_args()
    if not (DRY_RUN or torch.cuda.is_available()):
        print("Block sizes are chosen by timing, which needs a GPU; there is none here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    name = "Triton's interpreter" if DRY_RUN else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    right = [tune(search) for op in options.ops for search in SEARCHES[op]()]
    return 0 if all(right) else 1


def tune(search: Search) -> bool:
    """Prints the best row; whether no candidate was wrong and one runs."""
    target, call = architecture(torch.device(DEVICE)), search.prepare()
    found: dict[tuple[int, ...], tuple[float, str]] = {}

    def time(row: dict[str, int]) -> float:
        key = tuple(row.values())
        if key not in found:
            found[key] = measure(search, row, call)
        return found[key][0]

    # The interpreter has no warps.
    grid = {name: values for name, values in search.grid.items() if not (DRY_RUN and name.startswith("num_"))}
    now = row_for(search.rows, target)
    best = descend(now, grid, time)
    if time(best) == math.inf:
        print(f"{search.place}: no candidate is right and fits.", file=sys.stderr)
        return False
    verdict = f"{time(best):.3f} ms, before {time(now):.3f}, of {len(found)} candidates"
    print(f'{search.place}: "{target}": {best},  # {verdict}'.replace("'", '"'), flush=True)
    return not any(fault for _, fault in found.values())


def descend(
    row: dict[str, int], grid: dict[str, tuple[int, ...]], time: Callable[[dict[str, int]], float]
) -> dict[str, int]:
    """The row that no change of one setting makes clearly faster, found by such changes."""
    best = row
    for name, values in grid.items():
        for value in values:
            if time(best | {name: value}) < FASTER * time(best):
                best = best | {name: value}
    return best if best == row else descend(best, grid, time)


def measure(search: Search, row: dict[str, int], call: Call) -> tuple[float, str]:
    """Milliseconds of the call with this row, infinite where it cannot run or is wrong; and what is wrong."""
    fault = ""
    with mock.patch.dict(search.rows, {"": row}, clear=True):
        try:
            fault = search.fault()
            if not fault:
                return time_of(call), ""
            print(f"{search.place}: {row}: WRONG: {fault}", file=sys.stderr)
        except Exception as error:  # some candidates do not fit the device, which compilers say in many ways
            print(f"{search.place}: {row}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return math.inf, fault


def time_of(call: Call) -> float:
    """Milliseconds; the interpreter's are worth nothing, so there the call is only made."""
    if DRY_RUN:
        call()
        return 0.0
    return milliseconds(call, 5)


def checker(problem: Problem, dtype: torch.dtype) -> Callable[[], str]:
    """Says which of the Triton value and gradients strays from the float64 reference, if any."""
    loss, leaves = problem
    truth = with_gradients(lambda *x: loss(*x, "reference"), *(leaf.double() for leaf in leaves))

    def fault() -> str:
        found = with_gradients(lambda *x: loss(*x, "triton"), *leaves)
        errors = [float((one.double() - true).norm() / true.norm()) for one, true in zip(found, truth, strict=True)]
        return "" if all(error <= PAIR_LOSS_ERROR[dtype] for error in errors) else f"relative errors {errors}"

    return fault


# MaxSim

MAXSIM_GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"BQ": (64, 128), "BD": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    "listed": {"BQ": (32, 64), "BD": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "query gradient": {"BE": (8, 16, 32), "num_warps": (1, 2, 4), "num_stages": (1, 2, 3)},
    "document gradient": {"BD": (32, 64, 128), "BT": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
}


def maxsim_searches() -> Iterator[Search]:
    for kernel, dtype in itertools.product(MAXSIM_GRIDS, (HALF, torch.float32)):
        key, listed = (kernel, dtype.itemsize), 2 * (kernel == "listed")
        lengths = ([33, 1, 2], [70, 1]) if DRY_RUN else ([33, 1, 2, 65], [130, 1, 65, 2, 200])
        fault = checker(maxsim_problem(*lengths, listed, dtype), dtype)
        place = f'ops/maxsim/tiles.py, TABLE["{kernel}", {dtype.itemsize}]'
        yield Search(place, maxsim_tiles.TABLE[key], MAXSIM_GRIDS[kernel], fault, partial(timed_maxsim, kernel, dtype))


def maxsim_problem(queries: list[int], documents: list[int], listed: int, dtype: torch.dtype) -> Problem:
    """All pairs, or `listed` documents a query; tokens of width 128."""
    ends, pairs = (offsets_of(queries), offsets_of(documents)), None
    if listed:
        rows = torch.arange(len(queries), device=DEVICE).repeat_interleave(listed)
        pairs = torch.stack([rows, torch.randint(len(documents), rows.shape, device=DEVICE)], 1)

    def scores(q: Tensor, d: Tensor, backend: str) -> Tensor:
        return maxsim(q, ends[0], d, ends[1], pairs, backend=backend)

    return scores, (unit(sum(queries), 128, 1, dtype), unit(sum(documents), 128, 2, dtype))


def timed_maxsim(kernel: str, dtype: torch.dtype) -> Call:
    """256 queries of 32 tokens, 1,024 documents of 256: a call whose time depends on the row of this kernel alone."""
    lengths = ([32] * 2, [40] * 3) if DRY_RUN else ([32] * 256, [256] * 1024)
    scores, leaves = maxsim_problem(*lengths, 8 * (kernel == "listed"), dtype)
    if not kernel.endswith("gradient"):
        return lambda: scores(*leaves, "triton")
    leaf = leaves[kernel.startswith("document")].requires_grad_()
    result = scores(*leaves, "triton")
    weights = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, leaf, weights, retain_graph=True)


# Pair losses


def pair_loss_searches() -> Iterator[Search]:
    grid = {"R": (4, 8, 16, 32, 64), "C": (64, 128, 256), "num_warps": (4, 8, 16)}
    # Half-precision forces are bfloat16's alone.
    for dtype in (torch.float32,) if DRY_RUN else (torch.bfloat16, torch.float32):
        rows, place = pair_loss_kernel.TABLE[dtype.itemsize], f"ops/pair_loss/kernel.py, TABLE[{dtype.itemsize}]"
        yield Search(place, rows, grid, checker(pair_loss_problem(dtype), dtype), partial(timed_forces, dtype))


def pair_loss_problem(dtype: torch.dtype) -> Problem:
    """Symmetric forces (balanced) and those that are not (ranked), in tiles that end within a block."""
    count, side = (130, 70) if DRY_RUN else (700, 300)
    edges = cluster_edges(count)
    scalars = torch.tensor([10.0], device=DEVICE), torch.tensor([-3.0], device=DEVICE)

    def loss(e: Tensor, t: Tensor, b: Tensor, backend: str) -> Tensor:
        options = {"inverse_temperature": t, "bias": b, "backend": backend}
        with mock.patch.object(pair_loss_kernel.FusedWalk, "side", side):
            return sum(pair_loss(e, edges, form=form, **options).loss for form in ("balanced", "ranked"))

    return loss, (unit(count, 48, 5, dtype), *scalars)


def timed_forces(dtype: torch.dtype) -> Call:
    """The kernel alone on a whole tile, both kinds of forces, some times over so that launches overlap."""
    side, times = (64, 1) if DRY_RUN else (pair_loss_kernel.SIDE, 5)
    products = torch.rand(side, side, device=DEVICE) - 0.5
    forces, line = products.to(dtype), torch.ones(side, device=DEVICE)
    # The scales, and both sides' temperatures, offsets and costs; no families.
    lines = [line] * 8 + [products] * 2
    flags = {"SCALED": dtype.itemsize == 2, "MIRRORED": True, "MIXED": False, "STORE": True}

    def call() -> None:
        for same in (True, False) * times:
            pair_loss_kernel.tile_forces(products, forces, lines, SAME=same, PER_ANCHOR=not same, **flags)

    return call


# Choices


def choice_loss_searches() -> Iterator[Search]:
    grid = {"entries": (256, 512, 1024, 2048, 4096), "num_warps": (1, 2, 4, 8)}
    counts = [1, 2, 63, 65, 130, 255, 256, *[3] * 77]
    offers = choices_of(counts)
    logits = torch.randn(len(counts), 256, generator=torch.Generator().manual_seed(4)).to(DEVICE, HALF)

    def loss(x: Tensor, backend: str) -> Tensor:
        return choice_loss(x, *offers, backend=backend)

    fault = checker((loss, (logits,)), HALF)
    yield Search("ops/choice_loss/kernel.py, TABLE", choice_loss_kernel.TABLE, grid, fault, timed_choice_loss)


def timed_choice_loss() -> Call:
    """Forward and backward for 524,288 rows of 8 choices, without the checks of the arguments, which take longer."""
    count = 16 if DRY_RUN else 1 << 19
    first = torch.randint(256, (count, 1), device=DEVICE)
    choices = ((first + 31 * torch.arange(8, device=DEVICE)) % 256).flatten().to(torch.uint8)
    offsets, targets = torch.arange(count + 1, device=DEVICE) * 8, torch.full((8 * count,), 1 / 8, device=DEVICE)
    logits = torch.randn(count, 256, device=DEVICE, dtype=HALF).requires_grad_()
    return lambda: torch.autograd.grad(choice_loss_kernel.choice_loss(logits, choices, offsets, targets), logits)


SEARCHES: dict[str, Callable[[], Iterator[Search]]] = {
    "maxsim": maxsim_searches,
    "pair_loss": pair_loss_searches,
    "choice_loss": choice_loss_searches,
}


if __name__ == "__main__":
    sys.exit(main())
