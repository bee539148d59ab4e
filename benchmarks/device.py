"""Checks every Triton kernel on a GPU against its float64 reference, then times it; `device.sh` starts it.

A kernel that is wrong is not timed. Under TRITON_INTERPRET=1 the checks alone run, on small inputs and the CPU: that
tries this script, and says nothing of a GPU.
"""

import argparse
import datetime
import importlib
import importlib.util
import itertools
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from uform_kernels import Edges, choice_loss, maxsim, pair_loss

DRY_RUN = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if DRY_RUN else "cuda"
# The interpreter is wrong for bfloat16.
DTYPES = [torch.float32, torch.float16] if DRY_RUN else [torch.float32, torch.float16, torch.bfloat16]

Outputs = list[Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    options = parser.parse_args()
    if not (DRY_RUN or torch.cuda.is_available()):
        print("No GPU here: nothing was checked and nothing timed.", file=sys.stderr)
        return 2
    rows: list[str] = []
    failed = 0
    for op in options.ops:
        faults = faults_of(op)
        failed += len(faults)
        print(f"{op}: {'right' if not faults else 'WRONG'}", flush=True)
        print(*(f"    {fault}" for fault in faults), sep="\n", end="\n" if faults else "", flush=True)
        if not (faults or DRY_RUN):
            rows += TIMINGS[op]()
            torch.cuda.empty_cache()
    failed += sum("MISSED" in row for row in rows)
    _print_table(rows, failed)
    return 1 if failed else 0


def faults_of(op: str) -> list[str]:
    """What the op's checks find wrong; a kernel that does not run is wrong."""
    try:
        importlib.import_module(f"uform_kernels.ops.{op}.kernel")
        return [fault for fault in CHECKS[op]() if fault]
    except Exception as error:  # the other kernels are to be checked still
        return [f"{op}: {type(error).__name__}: {str(error)[:300]}"]


def _print_table(rows: list[str], failed: int) -> None:
    name = "Triton's interpreter" if DRY_RUN else torch.cuda.get_device_name()
    print(f"\n{name}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}")
    print(f"{datetime.date.today()}, forward and backward, medians; {failed} wrong or missed")
    print(*rows, sep="\n")


# Checks


def compare(label: str, ours: Outputs, plain: Outputs, truth: Outputs) -> str:
    """Empty when no output errs more than twice as much as plain torch in the same dtype, else what is wrong."""
    names = ("value", *(f"gradient {place}" for place in range(len(truth) - 1)))
    for name, one, other, true in zip(names, ours, plain, truth, strict=True):
        scale = float(true.norm().clamp(min=1e-30))
        made, allowed = (float((x.double() - true).norm()) / scale for x in (one, other))
        if not made <= max(2 * allowed, torch.finfo(torch.float32).eps):
            return f"{label}: error of the {name} {made:.1e}, plain torch's {allowed:.1e}"
    return ""


def with_gradients(call: Callable[..., Tensor], *leaves: Tensor) -> Outputs:
    """The value and its gradients under fixed random weights."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    value = call(*leaves)
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(value)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)


def unit(count: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1).to(DEVICE, dtype)


def plain_maxsim(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
    """Scores (Q, D) in the tokens' own dtype."""
    spans = [list(itertools.pairwise(offsets.tolist())) for offsets in (query_offsets, document_offsets)]
    rows = [
        torch.stack([(queries[q:r] @ documents[d:e].T).max(1).values.mean() for d, e in spans[1]]) for q, r in spans[0]
    ]
    return torch.stack(rows)


def check_maxsim() -> Iterator[str]:
    queries, documents = offsets_of([33, 1, 2, 65]), offsets_of([130, 1, 65, 2, 200])
    pairs = torch.tensor([[3, 0], [0, 2], [1, 1], [3, 0], [2, 4]], device=DEVICE)
    for width, dtype in itertools.product([3, 128] if DRY_RUN else [1, 3, 48, 96, 100, 127, 128, 257], DTYPES):
        leaves = unit(int(queries[-1]), width, 1, dtype), unit(int(documents[-1]), width, 2, dtype)
        wide = [leaf.double() for leaf in leaves]
        for label, listed in (("all", None), ("listed", pairs)):

            def ours(q: Tensor, d: Tensor, listed: Tensor | None = listed) -> Tensor:
                return maxsim(q, queries, d, documents, listed, backend="triton")

            def plain(q: Tensor, d: Tensor, listed: Tensor | None = listed) -> Tensor:
                scores = plain_maxsim(q, queries, d, documents)
                return scores if listed is None else scores[listed[:, 0], listed[:, 1]]

            results = (with_gradients(ours, *leaves), with_gradients(plain, *leaves), with_gradients(plain, *wide))
            yield compare(f"maxsim {label} width {width} {dtype}", *results)
            again = (with_gradients(ours, *leaves) for _ in range(2 if DRY_RUN else 30))
            if not all(torch.equal(one, other) for run in again for one, other in zip(run, results[0], strict=True)):
                yield f"maxsim {label} width {width} {dtype}: two runs differ"
    yield from check_maxsim_corners()
    if not DRY_RUN:
        yield check_far_entries()


def check_maxsim_corners() -> Iterator[str]:
    tokens = torch.full((200, 4), -1.0, device=DEVICE)
    tokens[[70, 140]] = 1
    query, ends = torch.ones(2, 4, device=DEVICE), (offsets_of([2]), offsets_of([200]))
    _, gradient = with_gradients(lambda d: maxsim(query, ends[0], d, ends[1], backend="triton"), tokens)
    if gradient.any(1).nonzero().flatten().tolist() != [70]:
        yield "maxsim: a later maximum took the gradient of the first"
    half = torch.tensor([[-150.0], [200.0]], device=DEVICE, dtype=torch.float16)
    if maxsim(half[:1], offsets_of([1]), half[1:], offsets_of([1]), backend="triton").item() != -30000:
        yield "maxsim: a float16 product of -30000 is lost"
    tokens[150, 1] = float("nan")
    if not maxsim(query, ends[0], tokens, ends[1], backend="triton").isnan().all():
        yield "maxsim: a NaN does not show in its score"


def check_far_entries() -> str:
    """More entries than 2^31, and more documents than 65,535 on one axis."""
    tokens, count = 32768, 65600
    queries, documents = unit(tokens, 16, 1, torch.float16), unit(2 * count, 16, 2, torch.float16).requires_grad_()
    ends = torch.arange(0, tokens + 1, 32, device=DEVICE), torch.arange(0, 2 * count + 1, 2, device=DEVICE)
    scores = maxsim(queries, ends[0], documents, ends[1], backend="triton")
    (gradient,) = torch.autograd.grad(scores[-32:, -40:].sum(), documents)
    leaf = documents.detach()[-80:].double().requires_grad_()
    expected = plain_maxsim(queries[-1024:].double(), ends[0][:33], leaf, ends[1][:41])
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    close = torch.allclose(scores[-32:, -40:].double(), expected, atol=1e-5)
    close &= torch.allclose(gradient[-80:].double(), wanted, rtol=2e-3, atol=2e-3) and not gradient[:-80].any()
    return "" if close else "maxsim: wrong beyond 2^31 entries"


def choices_of(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    bytes_ = torch.cat([torch.randperm(256, generator=generator)[:count] for count in counts])
    targets = torch.cat([torch.rand(count, generator=generator).softmax(0) for count in counts])
    return bytes_.to(DEVICE, torch.uint8), offsets_of(counts), targets.to(DEVICE)


def plain_choice_loss(logits: Tensor, choices: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
    """The loss over a full row: illegal bytes at -inf, targets spread over 256 bytes."""
    rows = torch.arange(len(logits), device=DEVICE).repeat_interleave(offsets.diff())
    legal = torch.zeros(logits.shape, dtype=torch.bool, device=DEVICE)
    legal[rows, choices.long()] = True
    spread = torch.zeros_like(logits)
    spread[rows, choices.long()] = targets.to(logits.dtype)
    masked = logits.masked_fill(~legal, -torch.inf).log_softmax(1)
    return -(spread * masked.masked_fill(~legal, 0)).sum(1).mean()


def check_choice_loss() -> Iterator[str]:
    for counts, dtype in itertools.product([[1, 2, 63, 65, 130, 255, 256], [3] * 77], DTYPES):
        offers = choices_of(counts)
        logits = torch.randn(len(counts), 256, generator=torch.Generator().manual_seed(4)).mul(3).to(DEVICE, dtype)
        results = (
            with_gradients(lambda x, offers=offers: choice_loss(x, *offers, backend="triton"), logits),
            with_gradients(lambda x, offers=offers: plain_choice_loss(x, *offers), logits),
            with_gradients(lambda x, offers=offers: choice_loss(x, *offers, backend="reference"), logits.double()),
        )
        yield compare(f"choice_loss {len(counts)} rows {dtype}", *results)
    row = torch.tensor([[2.0, 1.0, -torch.inf] + [0.0] * 253], device=DEVICE)
    offer = torch.tensor([0, 1, 2], device=DEVICE, dtype=torch.uint8), offsets_of([3])
    targets = torch.tensor([0.7, 0.3, 0.0], device=DEVICE)
    loss, gradient = with_gradients(lambda x: choice_loss(x, *offer, targets, backend="triton") * 1.0, row)
    if abs(loss.item() - 0.613262) > 1e-5 or not gradient.isfinite().all():
        yield "choice_loss: wrong where a choice of probability 0 has logit -inf"


def cluster_edges(count: int, size: int = 2) -> Edges:
    """Clusters of neighbours that attract one another: `size - 1` positives an anchor."""
    ids = torch.arange(count // size * size).view(-1, 1, size).expand(-1, size, -1)
    others = ids[:, ~torch.eye(size, dtype=torch.bool)].reshape(-1)
    offsets = (torch.arange(count + 1) * (size - 1)).clamp(max=len(others))
    return Edges(offsets, others).to(DEVICE)


# What a relative error of the loss and its gradients may be: some units in the last place of the dtype.
PAIR_LOSS_ERROR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check_pair_loss() -> Iterator[str]:
    counts, widths = ([65], [48]) if DRY_RUN else ([2, 63, 65, 130, 700], [1, 3, 100, 128, 257, 768])
    for form, count, width in itertools.product(("balanced", "sigmoid", "ranked"), counts, widths):
        for dtype, levels in itertools.product(DTYPES, (None, (width // 2, width)) if width > 3 else (None,)):
            embeddings, edges = unit(count, width, 5, dtype), cluster_edges(count)
            scalars = torch.tensor([10.0], device=DEVICE), torch.tensor([-3.0], device=DEVICE)

            def loss(
                e: Tensor, t: Tensor, b: Tensor, backend: str, form: str = form, edges: Edges = edges,
                levels: tuple[int, ...] | None = levels,
            ) -> Tensor:  # fmt: skip
                return pair_loss(
                    e, edges, form=form, inverse_temperature=t, bias=b, dimensions=levels, backend=backend
                ).loss

            ours = with_gradients(lambda *x, loss=loss: loss(*x, "triton"), embeddings, *scalars)
            wide = [x.double() for x in (embeddings, *scalars)]
            truth = with_gradients(lambda *x, loss=loss: loss(*x, "reference"), *wide)
            for name, one, true in zip(("loss", "embeddings", "temperature", "bias"), ours, truth, strict=True):
                error = float((one.double() - true).norm() / true.norm().clamp(min=1e-6))
                if not error <= PAIR_LOSS_ERROR[dtype]:
                    yield f"pair_loss {form} N {count} d {width} {dtype} levels {levels}: {name} errs {error:.1e}"


# Timings


def milliseconds(call: Callable[[], object], runs: int = 10) -> float:
    """Median time of a call on the GPU, after two for warming up."""
    call(), call()
    times = []
    for _ in range(runs):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def row(label: str, value: float, unit_: str, limit: float | None = None) -> str:
    verdict = "" if limit is None else f"  <= {limit:g} {'ok' if value <= limit else 'MISSED'}"
    return f"{label:68} {value:10.3f} {unit_}{verdict}"


def time_maxsim() -> list[str]:
    """256 queries of 32 tokens, 2,048 documents of 256, all pairs, width 128, bfloat16."""
    shape = 256, 32, 2048, 256
    queries, documents = (unit(shape[i] * shape[i + 1], 128, i, torch.bfloat16).requires_grad_() for i in (0, 2))
    ends = [torch.arange(shape[i] + 1, device=DEVICE) * shape[i + 1] for i in (0, 2)]
    weights = torch.randn(shape[0], shape[2], device=DEVICE)

    def step(scores: Tensor) -> None:
        torch.autograd.grad((scores * weights).sum(), (queries, documents))

    def plain() -> None:
        products = torch.einsum("qtw,dsw->qtds", queries.view(*shape[:2], 128), documents.view(*shape[2:], 128))
        step(products.max(-1).values.float().mean(1))

    calls = {
        "maxsim": lambda: step(maxsim(queries, ends[0], documents, ends[1], backend="triton")),
        "einsum and max": plain,
        "one product of all tokens": lambda: [queries.detach() @ part.T for part in documents.detach().chunk(8)],
    }
    if importlib.util.find_spec("flash_maxsim"):
        flash = importlib.import_module("flash_maxsim").flash_maxsim_batched_train
        views = queries.view(*shape[:2], 128), documents.view(*shape[2:], 128)
        calls["flash-maxsim"] = lambda: step(flash(*views, shared_docs=True))
    times = {name: milliseconds(call) for name, call in calls.items()}
    with torch.no_grad():
        forward = milliseconds(lambda: maxsim(queries, ends[0], documents, ends[1], backend="triton"))
    rows = [row(f"maxsim 256 x 32, 2048 x 256, w 128, bf16: {name}", time, "ms") for name, time in times.items()]
    rows.append(row("maxsim, the forward pass alone", forward, "ms"))
    if "flash-maxsim" in times:
        rows.append(row("maxsim / flash-maxsim", times["maxsim"] / times["flash-maxsim"], "", 1.0))
    return rows


def time_choice_loss() -> list[str]:
    """65,536 rows of 8 choices, bfloat16."""
    offers = choices_of([8] * 65536)
    logits = torch.randn(65536, 256, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    calls = {"choice_loss": choice_loss, "masked softmax": plain_choice_loss}
    times = {
        name: milliseconds(lambda call=call: torch.autograd.grad(call(logits, *offers), logits))
        for name, call in calls.items()
    }
    return [row(f"choice_loss 65536 x 8, bf16: {name}", time, "ms") for name, time in times.items()]


def plain_pair_loss(embeddings: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    """Balanced form, neighbours 2k and 2k + 1 attracting one another, with the N x N matrix of scores."""
    unit_ = F.normalize(embeddings, dim=1)
    scores = temperature * (unit_ @ unit_.T).float() + bias
    every = torch.arange(len(unit_), device=scores.device)
    pulls, pushes = scores[every, every ^ 1], F.softplus(scores)
    repelled = pushes.sum() - pushes.diagonal().sum() - pushes[every, every ^ 1].sum()
    return F.softplus(-pulls).mean() + repelled / (len(unit_) * (len(unit_) - 2))


def time_pair_loss() -> list[str]:
    """N = 32,768 and 262,144, d = 768, bfloat16, balanced, ambient, one positive an anchor."""
    count, width = 32768, 768
    leaves = [
        torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_(),
        *(torch.tensor([value], device=DEVICE, requires_grad=True) for value in (10.0, -10.0)),
    ]

    def step(count: int) -> Callable[[], object]:
        edges, embeddings = cluster_edges(count), leaves[0]
        if count > len(embeddings):
            embeddings = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        inputs = embeddings, *leaves[1:]
        return lambda: torch.autograd.grad(
            pair_loss(embeddings, edges, inverse_temperature=leaves[1], bias=leaves[2], backend="triton").loss, inputs
        )

    def products() -> None:
        unit_ = leaves[0].detach()
        scores = unit_ @ unit_.T
        scores @ unit_, scores.T @ unit_

    compiled = torch.compile(plain_pair_loss)
    ours, bare = milliseconds(step(count)), milliseconds(products)
    plain = milliseconds(lambda: torch.autograd.grad(compiled(*leaves), leaves))
    torch.cuda.empty_cache()
    large = step(262144)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    slow = milliseconds(large, 1)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    label = "pair_loss N 32768, d 768, bf16"
    return [
        row(label, ours, "ms"),
        row(f"{label}: torch.compile of the plain loss", plain, "ms"),
        row(f"{label}: the three bare products", bare, "ms"),
        row(f"{label} / torch.compile", ours / plain, "", 0.5),
        row(f"{label} / the three bare products", ours / bare, "", 2.0),
        row("pair_loss N 262144, d 768, bf16", slow, "ms"),
        row("pair_loss N 262144: memory above the inputs", peak, "GiB", 12.0),
    ]


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "maxsim": check_maxsim,
    "choice_loss": check_choice_loss,
    "pair_loss": check_pair_loss,
}
TIMINGS: dict[str, Callable[[], list[str]]] = {
    "maxsim": time_maxsim,
    "choice_loss": time_choice_loss,
    "pair_loss": time_pair_loss,
}


if __name__ == "__main__":
    sys.exit(main())
