"""MaxSim in Triton: products, row maxima and their places in one pass; gradients by gathers, without atomics.

Q queries, D documents, P listed pairs, T query tokens in all, E entries (a query token of a pair), W width.
An entry is one query token against one document. Entries lie document by document, (D, T), or pair by pair, (E,).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .packing import averaged, entry_offsets, grouped, segment_of, slopes
from .tiles import launch, launch_sizes, program_documents


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


@triton.jit
def _best_tokens(
    queries, rows, live, documents, start, length,
    W: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Largest product of BQ query tokens with one document's, and the first of its tokens that reaches it."""
    best = tl.full((BQ,), float("-inf"), tl.float32)
    winner = tl.zeros((BQ,), tl.int32)
    total = tl.zeros((BQ,), tl.float32)
    lane = tl.arange(0, BW)
    if W <= BW:
        left = tl.load(queries + rows[:, None] * W + lane[None, :], mask=live[:, None] & (lane < W)[None, :], other=0)
    for first in range(0, length, BD):
        column = first + tl.arange(0, BD)
        # Past the end comes the last token again: it may tie, but later, so that no sentinel is needed.
        token = (start + tl.minimum(column, length - 1))[None, :] * W
        product = tl.zeros((BQ, BD), tl.float32)
        if W <= BW:
            right = tl.load(documents + token + lane[:, None], mask=(lane < W)[:, None], other=0)
            product = tl.dot(left, right, product, input_precision="ieee")
        else:
            for k in range(0, W, BW):
                inside = k + lane < W
                both = live[:, None] & inside[None, :]
                left = tl.load(queries + rows[:, None] * W + (k + lane)[None, :], mask=both, other=0)
                right = tl.load(documents + token + (k + lane)[:, None], mask=inside[:, None], other=0)
                product = tl.dot(left, right, product, input_precision="ieee")
        largest = tl.max(product, 1)
        # "Not below" holds for a NaN too, so that a place is always one of the document's.
        place = tl.min(tl.where(product < largest[:, None], length, column[None, :]), 1)
        winner = tl.where(largest > best, tl.minimum(place, length - 1), winner)
        best = tl.maximum(best, largest)
        total += tl.sum(product, 1)
    # A maximum passes over NaNs, a sum does not.
    return tl.where(total == total, best, total), winner


@triton.jit
def _forward(
    queries, documents, offsets, best, winners, tokens, count, each,
    W: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Entries (D, T) of BQ query tokens, of whatever queries, with `each` documents."""
    blocks = tl.cdiv(tokens, BQ)
    rows = (tl.program_id(0) % blocks).to(tl.int64) * BQ + tl.arange(0, BQ)
    live = rows < tokens
    first = (tl.program_id(0) // blocks) * each
    entry = first.to(tl.int64) * tokens + rows
    for document in range(first, tl.minimum(first + each, count)):
        start = tl.load(offsets + document)
        length = (tl.load(offsets + document + 1) - start).to(tl.int32)
        value, winner = _best_tokens(queries, rows, live, documents, start, length, W, BQ, BD, BW)
        tl.store(best + entry, value, mask=live)
        tl.store(winners + entry, winner, mask=live)
        entry += tokens


@triton.jit
def _sums(best, offsets, sums, tokens, count, BS: tl.constexpr, BT: tl.constexpr):
    """sums (Q, D): entries (D, T) added over a query's tokens, in order, for BS documents."""
    blocks = tl.cdiv(count, BS)
    query = (tl.program_id(0) // blocks).to(tl.int64)
    document = (tl.program_id(0) % blocks).to(tl.int64) * BS + tl.arange(0, BS)
    start = tl.load(offsets + query)
    length = (tl.load(offsets + query + 1) - start).to(tl.int32)
    total = tl.zeros((BS,), tl.float32)
    for first in range(0, length, BT):
        token = first + tl.arange(0, BT)
        live = (document < count)[:, None] & (token < length)[None, :]
        entry = document[:, None] * tokens + (start + token)[None, :]
        total += tl.sum(tl.load(best + entry, mask=live, other=0), 1)
    tl.store(sums + query * count + document, total, mask=document < count)


@triton.jit
def _listed(
    queries, query_offsets, documents, document_offsets, pairs, entries, sums, winners,
    W: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """sums (P,) and winners (E,) of one listed pair, BQ query tokens at a time."""
    pair = tl.program_id(0).to(tl.int64)
    query, document = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    begin, start = tl.load(query_offsets + query), tl.load(document_offsets + document)
    tokens = (tl.load(query_offsets + query + 1) - begin).to(tl.int32)
    length = (tl.load(document_offsets + document + 1) - start).to(tl.int32)
    entry = tl.load(entries + pair)
    total = tl.zeros((BQ,), tl.float32)
    for first in range(0, tokens, BQ):
        within = first + tl.arange(0, BQ)
        live = within < tokens
        value, winner = _best_tokens(queries, begin + within, live, documents, start, length, W, BQ, BD, BW)
        total += tl.where(live, value, 0.0)
        tl.store(winners + entry + within, winner, mask=live)
    tl.store(sums + pair, tl.sum(total, 0))


@triton.jit
def _query_gradient(
    documents, document_offsets, winners, slope, owner, query_offsets, order, groups, pairs, entries, grad,
    tokens, count,
    LISTED: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """grad (T, W): one query token gathers the document tokens that it chose, BE at a time."""
    row = tl.program_id(0).to(tl.int64)
    query = tl.load(owner + row)
    lane = tl.program_id(1) * BW + tl.arange(0, BW)
    if LISTED:
        begin = tl.load(groups + query)
        number = tl.load(groups + query + 1) - begin
        within = row - tl.load(query_offsets + query)
    else:
        number = count
    total = tl.zeros((BE, BW), tl.float32)
    for first in range(0, number, BE):
        item = first + tl.arange(0, BE).to(tl.int64)
        live = item < number
        if LISTED:
            pair = tl.load(order + begin + item, mask=live, other=0)
            document = tl.load(pairs + 2 * pair + 1, mask=live, other=0)
            entry = tl.load(entries + pair, mask=live, other=0) + within
            weight = tl.load(slope + pair, mask=live, other=0)
        else:
            document = item
            entry = item * tokens + row
            weight = tl.load(slope + query * count + item, mask=live, other=0)
        winner = tl.load(winners + entry, mask=live, other=0)
        token = tl.load(document_offsets + document, mask=live, other=0) + winner
        inside = live[:, None] & (lane < W)[None, :]
        chosen = tl.load(documents + token[:, None] * W + lane[None, :], mask=inside, other=0)
        total += weight[:, None] * chosen.to(tl.float32)
    tl.store(grad + row * W + lane, tl.sum(total, 0).to(grad.dtype.element_ty), mask=lane < W)


@triton.jit
def _add_chosen(
    total, queries, begin, tokens, choices, column, weights, owner, weight_stride, peak, lane,
    PER_ROW: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Adds to `total` (BD, BW) the query tokens that chose each document token, times their slopes over `peak`.

    A one-hot matrix of the choices times the query tokens: as many operations as the forward pass, on the same units.
    """
    for first in range(0, tokens, BT):
        within = first + tl.arange(0, BT)
        live = within < tokens
        winner = tl.load(choices + within, mask=live, other=-1)
        if PER_ROW:
            query = tl.load(owner + within, mask=live, other=0)
            weight = tl.load(weights + query * weight_stride, mask=live, other=0)
        else:
            weight = tl.load(weights + tl.zeros((BT,), tl.int32))
        inside = live[:, None] & (lane < W)[None, :]
        chosen = tl.load(queries + (begin + within)[:, None] * W + lane[None, :], mask=inside, other=0)
        choice = tl.where(winner[None, :] == column[:, None], (weight / peak)[None, :], 0.0)
        total = tl.dot(choice.to(chosen.dtype), chosen, total, input_precision="ieee")
    return total


@triton.jit
def _document_gradient(
    queries, query_offsets, document_offsets, winners, slope, peaks, owner, order, groups, pairs, entries, grad,
    tokens, count, blocks,
    LISTED: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """grad (document tokens, W): BD tokens of one document, summed over its entries in their order."""
    document = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.load(document_offsets + document)
    length = (tl.load(document_offsets + document + 1) - start).to(tl.int32)
    first = (tl.program_id(0) % blocks) * BD
    column = first + tl.arange(0, BD)
    lane = tl.program_id(1) * BW + tl.arange(0, BW)
    peak = tl.load(peaks + document)
    total = tl.zeros((BD, BW), tl.float32)
    if first < length:
        if LISTED:
            for item in range(tl.load(groups + document), tl.load(groups + document + 1)):
                pair = tl.load(order + item)
                query = tl.load(pairs + 2 * pair)
                begin = tl.load(query_offsets + query)
                number = (tl.load(query_offsets + query + 1) - begin).to(tl.int32)
                choices = winners + tl.load(entries + pair)
                total = _add_chosen(
                    total, queries, begin, number, choices, column, slope + pair, owner, 0, peak, lane, False, W, BT
                )
        else:
            # Row 0 as an int64: row * W may pass 2^31.
            total = _add_chosen(
                total, queries, document * 0, tokens, winners + document * tokens, column, slope + document, owner,
                count, peak, lane, True, W, BT,
            )  # fmt: skip
        inside = (column < length)[:, None] & (lane < W)[None, :]
        place = (start + column)[:, None] * W + lane[None, :]
        tl.store(grad + place, (total * peak).to(grad.dtype.element_ty), mask=inside)


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
    _forward[grid](queries, documents, document_offsets, best, winners, tokens, count, each, **sizes)
    sizes = launch("sums", queries)
    _sums[(number * triton.cdiv(count, sizes["BS"]),)](best, query_offsets, sums, tokens, count, **sizes)
    return sums, winners


def _score_listed(
    queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over a query's tokens (P,), and the winners (E,) int32."""
    entries = entry_offsets(pairs, query_offsets)
    sums = torch.empty(len(pairs), dtype=torch.float32, device=queries.device)
    winners = torch.empty(int(entries[-1]), dtype=torch.int32, device=queries.device)
    if len(pairs):
        _listed[(len(pairs),)](
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
        _query_gradient[(tokens, triton.cdiv(queries.shape[1], sizes["BW"]))](
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
        _document_gradient[(count * blocks, triton.cdiv(documents.shape[1], sizes["BW"]))](
            queries, query_offsets, document_offsets, winners, slope, _peaks(slope, pairs, count, documents.dtype),
            segment_of(query_offsets, tokens), *listing, grad, tokens, count, blocks, LISTED=pairs is not None,
            **sizes,
        )  # fmt: skip
    return grad


def _peaks(slope: Tensor, pairs: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    """(D,) the number that each document's slopes are divided by before they are rounded to `dtype`.

    Their largest in float16, where a slope may vanish or overflow; one elsewhere, which changes nothing.
    """
    peaks = torch.ones(count, dtype=slope.dtype, device=slope.device)
    if dtype != torch.float16:
        return peaks
    largest = (
        slope.abs().amax(0)
        if pairs is None
        else torch.zeros_like(peaks).scatter_reduce(0, pairs[:, 1], slope.abs(), "amax")
    )
    return torch.where(largest > 0, largest, peaks)


Case = tuple[str, triton.JITFunction, dict[str, str], dict[str, Any], dict[str, Any]]


def compile_cases(target: str = "sm_90") -> list[Case]:
    """Name, kernel, signature, constants and options of what a call may launch on `target`, for a compile check."""
    cases: list[Case] = [("maxsim sums", _sums, _signature(_sums, "fp32"), *launch_sizes("sums", 4, 1, target))]
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        # Vectors wider than a tile take another path, which float32 takes at 128 too.
        for width in (128, 320) if dtype == "bf16" else (128,):
            for name, kernel in (("forward", _forward), ("listed", _listed)):
                sizes = launch_sizes(name, size, width, target)
                cases.append((f"maxsim {name} {dtype} {width}", kernel, _signature(kernel, dtype), *sizes))
        for name, kernel in (("query gradient", _query_gradient), ("document gradient", _document_gradient)):
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
