"""The Triton programs of MaxSim: products, row maxima and their places in one pass; gradients without atomics.

Q queries, D documents, P listed pairs, T query tokens in all, E entries (a query token of a pair), W width.
An entry is one query token against one document. Entries lie document by document, (D, T), or pair by pair, (E,).
A program's blocks: BQ or BT query tokens, BD document tokens, BW coordinates, BE entries, BS documents.
"""

import triton
import triton.language as tl


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
def all_pairs(
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
def sums(best, offsets, sums, tokens, count, BS: tl.constexpr, BT: tl.constexpr):
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
def listed_pairs(
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
def query_gradient(
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
def document_gradient(
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
