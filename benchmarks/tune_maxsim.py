"""Times candidate block sizes of MaxSim's Triton kernels on this GPU and prints the best, as rows for `tiles.py`.

    PYTHONPATH=kernels python benchmarks/tune_maxsim.py

Some minutes. What it prints replaces the row of the architecture, or adds one, in the table of
`kernels/uform_kernels/maxsim/tiles.py`; `benchmarks/compile_kernels.py` then tells whether every target holds it.
"""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
import triton
from device import milliseconds, unit
from torch import Tensor
from uform_kernels import maxsim

tiles = importlib.import_module("uform_kernels.maxsim.tiles")

# 256 queries of 32 tokens; 1,024 documents of 256, or 8 listed documents a query.
QUERIES, QUERY_TOKENS, DOCUMENTS, DOCUMENT_TOKENS, WIDTH, LISTED = 256, 32, 1024, 256, 128, 8

GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"BQ": (64, 128), "BD": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    "listed": {"BQ": (32, 64), "BD": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "query gradient": {"BE": (8, 16, 32), "num_warps": (1, 2, 4), "num_stages": (1, 2, 3)},
    "document gradient": {"BD": (32, 64, 128), "BT": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
}


def main() -> int:
    if not torch.cuda.is_available():
        print("No GPU here: nothing was timed.", file=sys.stderr)
        return 2
    target = tiles.architecture(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for kernel, dtype in itertools.product(GRIDS, (torch.bfloat16, torch.float32)):
        time, best = min(times(kernel, dtype, target), key=lambda row: row[0])
        print(f'("{kernel}", {dtype.itemsize}): "{target}": {best}  # {time:.3f} ms', flush=True)
    return 0


def times(kernel: str, dtype: torch.dtype, target: str) -> Iterator[tuple[float, dict[str, int]]]:
    """Milliseconds of the call that the kernel is part of, for each candidate that runs."""
    call, key = problem(kernel, dtype), (kernel, dtype.itemsize)
    now = tiles.launch_sizes(kernel, dtype.itemsize, WIDTH, target)[0]
    before, fixed = tiles.TABLE[key], {"BW": now["BW"]} if now["BW"] != WIDTH else {}
    try:
        for values in itertools.product(*GRIDS[kernel].values()):
            candidate = dict(zip(GRIDS[kernel], values, strict=True)) | fixed
            tiles.TABLE[key] = {"": candidate}
            try:
                yield milliseconds(call, 5), candidate
            except triton.runtime.errors.OutOfResources:
                continue
    finally:
        tiles.TABLE[key] = before


def problem(kernel: str, dtype: torch.dtype) -> Callable[[], object]:
    """A call whose time differs between candidates by this kernel alone."""
    queries, documents = (
        unit(QUERIES * QUERY_TOKENS, WIDTH, 1, dtype),
        unit(DOCUMENTS * DOCUMENT_TOKENS, WIDTH, 2, dtype),
    )
    offsets = [
        torch.arange(count + 1, device="cuda") * tokens
        for count, tokens in ((QUERIES, QUERY_TOKENS), (DOCUMENTS, DOCUMENT_TOKENS))
    ]
    pairs = None
    if kernel == "listed":
        rows = torch.arange(QUERIES, device="cuda").repeat_interleave(LISTED)
        pairs = torch.stack([rows, torch.randint(DOCUMENTS, rows.shape, device="cuda")], 1)

    def scores(q: Tensor, d: Tensor) -> Tensor:
        return maxsim(q, offsets[0], d, offsets[1], pairs, backend="triton")

    if not kernel.endswith("gradient"):
        return lambda: scores(queries, documents)
    leaf = (queries if kernel.startswith("query") else documents).requires_grad_()
    result = scores(queries, documents)
    weights = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, leaf, weights, retain_graph=True)


if __name__ == "__main__":
    sys.exit(main())
