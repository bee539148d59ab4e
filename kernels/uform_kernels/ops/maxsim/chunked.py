"""MaxSim in tiles: products of a tile of tokens that fits the caches, their row maxima, and nothing else kept.

Q queries, D documents, P listed pairs, T query tokens in all, E entries (a query token of a listed pair), W width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from uform_kernels.ops.maxsim.packing import averaged, entry_offsets, grouped, segment_of, slopes

# Products of a tile: 8 MiB of float32, few enough to stay in a cache, enough to keep threads from waiting on tiles.
TILE_CELLS = 1 << 21
# Document tokens of a tile: enough for a good product, few enough that the tile keeps many query tokens.
RUN_TOKENS = 1024
# Entries whose gradients are sorted and summed at once.
GRADIENT_ENTRIES = 1 << 17


def maxsim(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None,
    normalize: bool,
) -> Tensor:
    """As `uform_kernels.maxsim`, on any device; keeps one int32 for each query token and pair."""
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
        dtype = torch.promote_types(queries.dtype, torch.float32)
        tokens, against = queries.to(dtype), documents.to(dtype)
        if pairs is None:
            best, winners = _best_of_all(tokens, against, document_offsets)
            sums = torch.segment_reduce(best, "sum", offsets=query_offsets, axis=0)
        else:
            best, winners = _best_of_pairs(tokens, query_offsets, against, document_offsets, pairs)
            sums = torch.segment_reduce(best, "sum", offsets=entry_offsets(pairs, query_offsets), axis=0)
        ctx.save_for_backward(queries, query_offsets, documents, document_offsets, pairs, winners)
        ctx.normalize = normalize
        return averaged(sums, query_offsets, pairs, normalize)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Bags, sorts and elementwise sums alone: nothing here that autocast would lower.
        queries, query_offsets, documents, document_offsets, pairs, winners = ctx.saved_tensors
        dtype = torch.promote_types(queries.dtype, torch.float32)
        slope = slopes(grad, query_offsets, pairs, ctx.normalize, dtype)
        packing = query_offsets, document_offsets, winners, slope
        of_queries = of_documents = None
        if ctx.needs_input_grad[0]:
            sums = (
                _query_gradient(documents.to(dtype), *packing)
                if pairs is None
                else _listed_gradient(0, documents.to(dtype), *packing, pairs)
            )
            of_queries = sums.to(queries.dtype)
        if ctx.needs_input_grad[2]:
            sums = (
                _document_gradient(queries.to(dtype), *packing)
                if pairs is None
                else _listed_gradient(1, queries.to(dtype), *packing, pairs)
            )
            of_documents = sums.to(documents.dtype)
        return of_queries, None, of_documents, None, None, None


def _cut(sizes: Sequence[Sequence[int]], cost: Callable[..., int], limit: int) -> Iterator[tuple[int, int]]:
    """Cuts a list into runs (start, stop) whose count times the cost of the largest sizes is within `limit`.

    A run holds at least one, whatever it costs.
    """
    start = 0
    largest: tuple[int, ...] = ()
    for place, size in enumerate(sizes):
        grown = tuple(map(max, largest, size)) if place > start else tuple(size)
        if place > start and (place + 1 - start) * cost(*grown) > limit:
            yield start, place
            start, grown = place, tuple(size)
        largest = grown
    if sizes:
        yield start, len(sizes)


def _filled(begins: Tensor, lengths: Tensor, length: int) -> Tensor:
    """(segments, length) rows of a packed tensor, each segment's last row repeated up to `length`.

    A copy of the last token can only tie with it and comes later: the first maximum stays the same, and no sentinel
    has to be below every product.
    """
    within = torch.arange(length, device=begins.device).minimum(lengths[:, None] - 1)
    return begins[:, None] + within


def _best_of_all(queries: Tensor, documents: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Largest product of each query token with each document (T, D), and the first token that reaches it, int32."""
    shape = len(queries), offsets.numel() - 1
    best = queries.new_empty(shape)
    winners = torch.empty(shape, dtype=torch.int32, device=queries.device)
    last = offsets.diff() - 1
    for columns, run in _document_runs(documents, offsets):
        count, length, _ = run.shape
        step = max(1, TILE_CELLS // (count * length))
        for first in range(0, len(queries), step):
            products = queries[first : first + step] @ run.flatten(0, 1).T
            values, places = products.view(-1, count, length).max(-1)
            best[first : first + step, columns] = values
            winners[first : first + step, columns] = places.minimum(last[columns]).to(torch.int32)
    return best, winners


def _document_runs(documents: Tensor, offsets: Tensor) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """Runs of documents of similar length: which they are, and their tokens (count, length, W)."""
    lengths, order = offsets.diff().sort(stable=True)
    begins = offsets[:-1][order]
    sizes, places = lengths.tolist(), order.tolist()
    for start, stop in _cut([(size,) for size in sizes], lambda length: length, RUN_TOKENS):
        count, length = stop - start, sizes[stop - 1]
        if sizes[start] == length and places[stop - 1] - places[start] == count - 1:
            begin = int(begins[start])
            yield (
                slice(places[start], places[start] + count),
                documents[begin:][: count * length].view(count, length, -1),
            )
        else:
            yield order[start:stop], documents[_filled(begins[start:stop], lengths[start:stop], length)]


def _best_of_pairs(
    queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """As `_best_of_all`, for the entries of the listed pairs alone: (E,) and (E,) int32."""
    entries = entry_offsets(pairs, query_offsets)
    best = queries.new_empty(int(entries[-1]))
    winners = torch.empty(best.shape, dtype=torch.int32, device=best.device)
    rows, columns = query_offsets.diff()[pairs[:, 0]], document_offsets.diff()[pairs[:, 1]]
    order = (columns * (rows.max() + 1) + rows).argsort(stable=True) if len(pairs) else rows
    sizes = torch.stack([rows[order], columns[order]], 1).tolist()
    for start, stop in _cut(sizes, lambda r, c: max(r * c, (r + c) * queries.shape[1]), TILE_CELLS):
        run = order[start:stop]
        height, width = map(max, zip(*sizes[start:stop], strict=True))
        left = queries[_filled(query_offsets[pairs[run, 0]], rows[run], height)]
        right = documents[_filled(document_offsets[pairs[run, 1]], columns[run], width)]
        values, places = (left @ right.mT).max(-1)
        # A product may round differently by where it lies in a matrix: a copy that won stands for the last token.
        places = places.minimum(columns[run, None] - 1)
        real = torch.arange(height, device=best.device) < rows[run, None]
        targets = _filled(entries[run], rows[run], height)[real]
        best[targets], winners[targets] = values[real], places[real].to(torch.int32)
    return best, winners


def _query_gradient(
    documents: Tensor, query_offsets: Tensor, document_offsets: Tensor, winners: Tensor, slope: Tensor
) -> Tensor:
    """(T, W): each query token gathers the tokens that it chose, one of each document."""
    total, count = winners.shape
    out = documents.new_zeros(total, documents.shape[1])
    owner = segment_of(query_offsets, total)
    step = max(1, GRADIENT_ENTRIES // max(1, count))
    for first in range(0, total if count else 0, step):
        block = slice(first, first + step)
        tokens = winners[block] + document_offsets[:-1]
        out[block] = embedding_bag(tokens, documents, mode="sum", per_sample_weights=slope[owner[block]])
    return out


def _document_gradient(
    queries: Tensor, query_offsets: Tensor, document_offsets: Tensor, winners: Tensor, slope: Tensor
) -> Tensor:
    """(document tokens, W): each document token sums the query tokens that chose it, in their order."""
    total, count = winners.shape
    bounds = document_offsets.tolist()
    out = queries.new_zeros(bounds[-1], queries.shape[1])
    owner = segment_of(query_offsets, total)
    step = max(1, GRADIENT_ENTRIES // max(1, total))
    for first in range(0, count if total else 0, step):
        last = min(first + step, count)
        keys = winners[:, first:last] + (document_offsets[first:last] - bounds[first])
        sources = torch.arange(total, device=keys.device)[:, None].expand_as(keys)
        weights = slope[owner, first:last]
        rows = slice(bounds[first], bounds[last])
        out[rows] = _bag_sum(
            keys.flatten(), sources.flatten(), weights.flatten(), queries, bounds[last] - bounds[first]
        )
    return out


def _listed_gradient(
    side: int,
    others: Tensor,
    query_offsets: Tensor,
    document_offsets: Tensor,
    winners: Tensor,
    slope: Tensor,
    pairs: Tensor,
) -> Tensor:
    """Gradient of the queries' (side 0) or the documents' (side 1) tokens from the listed pairs."""
    offsets = (query_offsets, document_offsets)[side]
    bounds, entries, lengths = offsets.tolist(), entry_offsets(pairs, query_offsets), query_offsets.diff()[pairs[:, 0]]
    out = others.new_zeros(bounds[-1], others.shape[1])
    order, groups = grouped(pairs[:, side], len(bounds) - 1)
    loads = groups.new_zeros(len(groups) - 1).index_add_(0, pairs[:, side], lengths)
    begins = groups.tolist()
    for first, last in _cut([(load,) for load in loads.tolist()], lambda load: load, GRADIENT_ENTRIES):
        run = order[begins[first] : begins[last]]
        pair = run.repeat_interleave(lengths[run])
        begin = lengths[run].cumsum(0) - lengths[run]
        within = torch.arange(len(pair), device=pair.device) - begin.repeat_interleave(lengths[run])
        tokens = (
            query_offsets[pairs[pair, 0]] + within,
            document_offsets[pairs[pair, 1]] + winners[entries[pair] + within],
        )
        keys, sources = tokens[side] - bounds[first], tokens[1 - side]
        out[bounds[first] : bounds[last]] = _bag_sum(keys, sources, slope[pair], others, bounds[last] - bounds[first])
    return out


def _bag_sum(keys: Tensor, sources: Tensor, weights: Tensor, table: Tensor, size: int) -> Tensor:
    """(size, W): row k sums `weights * table[sources]` where `keys` is k, in the order given: no atomics."""
    ordered, order = keys.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(size + 1, device=keys.device))
    return embedding_bag(
        sources[order], table, bounds, mode="sum", per_sample_weights=weights[order], include_last_offset=True
    )
