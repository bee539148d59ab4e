"""MaxSim in Triton: what is launched, forward and backward, and what a compile check needs to know of it.

Q queries, D documents, P listed pairs, T query tokens in all, E entries (a query token of a pair), W width.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from uform_kernels.ops.maxsim import programs
from uform_kernels.ops.maxsim.packing import averaged, entry_offsets, grouped, segment_of, slopes
from uform_kernels.ops.maxsim.tiles import launch, launch_sizes, program_documents


def maxsim(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None,
    normalize: bool,
) -> Tensor:
    """As `uform_kernels.maxsim`, for float32, bfloat16 and float16; keeps one int32 for each query token and pair."""
    return _MaxSim.apply(queries, query_offsets, documents, document_offsets, pairs, normalize)


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        query_offsets: Tensor,
        documents: Tensor,
        document_offsets: Tensor,
        pairs: Tensor | None,
        normalize: bool,
    ) -> Tensor:
        packed = queries.contiguous(), query_offsets.contiguous(), documents.contiguous(), document_offsets.contiguous()
        pairs = None if pairs is None else pairs.contiguous()
        with torch.cuda.device_of(queries):
            sums, winners = _score_all(*packed) if pairs is None else _score_listed(*packed, pairs)
        ctx.save_for_backward(*packed, pairs, winners)
        ctx.normalize = normalize
        return averaged(sums, query_offsets, pairs, normalize)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, query_offsets, documents, document_offsets, pairs, winners = ctx.saved_tensors
        packed = queries, query_offsets, documents, document_offsets
        slope = slopes(grad, query_offsets, pairs, ctx.normalize, torch.float32)
        of_queries = of_documents = None
        with torch.cuda.device_of(slope):
            if ctx.needs_input_grad[0]:
                of_queries = _differentiate_queries(*packed, pairs, winners, slope)
            if ctx.needs_input_grad[2]:
                of_documents = _differentiate_documents(*packed, pairs, winners, slope)
        return of_queries, None, of_documents, None, None, None


def _score_all(
    queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over a query's tokens (Q, D), and the winners (D, T) int32."""
    number, count, tokens = query_offsets.numel() - 1, document_offsets.numel() - 1, len(queries)
    sums = torch.empty(number, count, dtype=torch.float32, device=queries.device)
    winners = torch.empty(count, tokens, dtype=torch.int32, device=queries.device)
    if winners.numel() == 0:
        return sums, winners
    best = torch.empty(count, tokens, dtype=torch.float32, device=queries.device)
    sizes = launch("forward", queries)
    blocks = triton.cdiv(tokens, sizes["BQ"])
    each = program_documents(blocks, count)
    grid = (blocks * triton.cdiv(count, each),)
    programs.all_pairs[grid](queries, documents, document_offsets, best, winners, tokens, count, each, **sizes)
    sizes = launch("sums", queries)
    programs.sums[(number * triton.cdiv(count, sizes["BS"]),)](best, query_offsets, sums, tokens, count, **sizes)
    return sums, winners


def _score_listed(
    queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over a query's tokens (P,), and the winners (E,) int32."""
    entries = entry_offsets(pairs, query_offsets)
    sums = torch.empty(len(pairs), dtype=torch.float32, device=queries.device)
    winners = torch.empty(int(entries[-1]), dtype=torch.int32, device=queries.device)
    if len(pairs):
        programs.listed_pairs[(len(pairs),)](
            queries, query_offsets, documents, document_offsets, pairs, entries, sums, winners,
            **launch("listed", queries),
        )  # fmt: skip
    return sums, winners


def _listing(pairs: Tensor | None, side: int, groups: int, query_offsets: Tensor) -> tuple[Tensor | None, ...]:
    """Listed pairs grouped by their query (side 0) or document (side 1): order, groups, pairs, entries."""
    if pairs is None:
        return None, None, None, None
    return *grouped(pairs[:, side].contiguous(), groups), pairs, entry_offsets(pairs, query_offsets)


def _differentiate_queries(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None,
    winners: Tensor,
    slope: Tensor,
) -> Tensor:
    grad = torch.zeros_like(queries)
    if winners.numel():
        sizes = launch("query gradient", queries)
        tokens, count = len(queries), document_offsets.numel() - 1
        listing = _listing(pairs, 0, query_offsets.numel() - 1, query_offsets)
        programs.query_gradient[(tokens, triton.cdiv(queries.shape[1], sizes["BW"]))](
            documents, document_offsets, winners, slope, segment_of(query_offsets, tokens), query_offsets, *listing,
            grad, tokens, count, LISTED=pairs is not None, **sizes,
        )  # fmt: skip
    return grad


def _differentiate_documents(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None,
    winners: Tensor,
    slope: Tensor,
) -> Tensor:
    grad = torch.zeros_like(documents)
    if winners.numel():
        sizes = launch("document gradient", documents)
        tokens, count = len(queries), document_offsets.numel() - 1
        blocks = triton.cdiv(int(document_offsets.diff().max()), sizes["BD"])
        listing = _listing(pairs, 1, count, query_offsets)
        peaks = _peaks(slope, listing[0], listing[1], count, documents.dtype)
        programs.document_gradient[(count * blocks, triton.cdiv(documents.shape[1], sizes["BW"]))](
            queries, query_offsets, document_offsets, winners, slope, peaks,
            segment_of(query_offsets, tokens), *listing, grad, tokens, count, blocks, LISTED=pairs is not None,
            **sizes,
        )  # fmt: skip
    return grad


def _peaks(slope: Tensor, order: Tensor | None, groups: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    """(D,) the number that each document's slopes are divided by before they are rounded to `dtype`.

    Their largest in float16, where a slope may vanish or overflow; one elsewhere, which changes nothing.
    """
    peaks = torch.ones(count, dtype=slope.dtype, device=slope.device)
    if dtype != torch.float16:
        return peaks
    if order is None:
        largest = slope.abs().amax(0)
    else:
        largest = torch.segment_reduce(slope[order].abs(), "max", offsets=groups, initial=0)
    return torch.where(largest > 0, largest, peaks)


Case = tuple[str, triton.JITFunction, dict[str, str], dict[str, Any], dict[str, Any]]


def compile_cases(target: str = "sm_90") -> list[Case]:
    """Name, kernel, signature, constants and options of what a call may launch on `target`, for a compile check."""
    cases: list[Case] = [
        ("maxsim sums", programs.sums, _signature(programs.sums, "fp32"), *launch_sizes("sums", 4, 1, target))
    ]
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        # Vectors wider than a tile take another path, which float32 takes at 128 too.
        for width in (128, 320) if dtype == "bf16" else (128,):
            for name, kernel in (("forward", programs.all_pairs), ("listed", programs.listed_pairs)):
                sizes = launch_sizes(name, size, width, target)
                cases.append((f"maxsim {name} {dtype} {width}", kernel, _signature(kernel, dtype), *sizes))
        gradients = {"query gradient": programs.query_gradient, "document gradient": programs.document_gradient}
        for name, kernel in gradients.items():
            blocks, options = launch_sizes(name, size, 128, target)
            for listed in (False, True):
                absent = {} if listed else dict.fromkeys(("order", "groups", "pairs", "entries"))
                label = f"maxsim {name} {dtype} 128" + " listed" * listed
                constants = blocks | absent | {"LISTED": listed}
                cases.append((label, kernel, _signature(kernel, dtype), constants, options))
    return cases


def _signature(kernel: triton.JITFunction, dtype: str) -> dict[str, str]:
    """Types of a kernel's arguments: tokens and their gradients in `dtype`, offsets int64, entries 4 bytes."""
    types = dict.fromkeys(("queries", "documents", "grad"), f"*{dtype}")
    types |= dict.fromkeys(("best", "sums", "slope", "peaks"), "*fp32")
    types |= {"winners": "*i32", "tokens": "i32", "count": "i32", "each": "i32", "blocks": "i32"}
    return {name: types.get(name, "*i64") for name in kernel.arg_names if not name.isupper()}
