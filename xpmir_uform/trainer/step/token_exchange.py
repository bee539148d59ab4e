"""Late interaction within the exact step: from token vectors to scores, and from the scores' gradient back.

A rank scores its own queries against its own documents, with a graph. Where every document of the batch is scored,
those of the other ranks pass by, one rank at a time: first to be scored, without graph; and, once the loss has told how
it depends on the scores, again for their gradients, which are summed at the rank that owns the documents. So a rank
holds its own token vectors and those of one other rank.

Letters: N items of the batch, n items of this rank, k their kept tokens, W token width, q queries of this rank, D
documents of the batch, L listed pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from uform_kernels.ops.pair_loss.listed import ends, spread

from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.vocabulary import Side
from xpmir_uform.losses.late_interaction import LateInteractionLoss, numbers_of, places_of
from xpmir_uform.trainer.step.collectives import Ranks


class Spans(NamedTuple):
    """The first tokens of m items, as rows of packed token vectors.

    Args:
        rows: (t,) int64, the items one after another.
        offsets: (m + 1,) int64, where those of each begin.
    """

    rows: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, kept: Tensor, items: Tensor, most: int | None = None) -> "Spans":
        """The tokens of ``items`` (m,), at most ``most`` of each, among those that n items keep, ``kept`` (n,)."""
        lengths = kept[items] if most is None else kept[items].clamp(max=most)
        offsets = ends(lengths)
        begins = (kept.cumsum(0) - kept)[items] - offsets[:-1]
        return cls(spread(begins, lengths) + torch.arange(int(offsets[-1])), offsets)

    @property
    def tokens(self) -> int:
        """t."""
        return len(self.rows)

    @property
    def items(self) -> int:
        """m."""
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """What a rank scores with a graph to its token vectors.

    Args:
        vectors: (k, W), the leaf.
        queries, documents: token vectors of its queries and its documents.
        scores: (L,) or (q, own documents).
    """

    vectors: Tensor
    queries: Tensor
    documents: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory that a rank sets aside before anything is exchanged, so that it can take part whatever happens then.

    Args:
        block: (t, W), for the documents of any other rank.
        of_queries, of_documents: the gradients of its own, by what other ranks hold; zeros.
    """

    block: Tensor
    of_queries: Tensor
    of_documents: Tensor


def check_together(batch: Batch, shares: Sequence[range], pairs: Tensor | None) -> None:
    """Refuses listed pairs (L, 2) of the whole batch that two ranks share; the same on every rank.

    Raises:
        ValueError: naming both items.
    """
    if pairs is None:
        return
    owners = torch.bucketize(pairs, torch.tensor([share.stop for share in shares]), right=True)
    apart = (owners[:, 0] != owners[:, 1]).nonzero()
    if len(apart):
        query, document = map(batch.describe, pairs[int(apart[0])].tolist())
        raise ValueError(
            f"{query} and its {document} are on two ranks: put them into one bag, or let negatives be ambient"
        )


class Interaction:
    """The late interaction of one step on one rank; :meth:`score` comes before :meth:`gradient`.

    Args:
        loss: which says what is scored.
        ranks: who takes part.
        batch: the global batch.
        shares: the items of each rank.
        kept: (N,) int64, the kept tokens of every item.
    """

    def __init__(
        self, loss: LateInteractionLoss, ranks: Ranks, batch: Batch, shares: Sequence[range], kept: Tensor
    ) -> None:
        mine = shares[ranks.rank]
        queries = numbers_of(batch, Side.QUERY, mine)
        documents = [numbers_of(batch, Side.DOCUMENT, share) for share in shares]
        self.loss = loss
        self.ranks = ranks
        self.queries = Spans.of(kept[mine.start : mine.stop], queries - mine.start, loss.max_query_span)
        self.documents = [
            Spans.of(kept[share.start : share.stop], numbers - share.start)
            for share, numbers in zip(shares, documents, strict=True)
        ]
        pairs = loss.pairs(batch, mine)
        check_together(batch, shares, loss.pairs(batch, range(len(batch))))
        self.pairs = None if pairs is None else torch.stack(places_of(pairs, queries, documents[ranks.rank]), dim=1)
        self.streams = self.pairs is None and ranks.count > 1
        self.own: Own | None = None
        self.room: Room | None = None

    def columns(self, owner: int) -> slice:
        """Those of a rank's documents among all scores."""
        if self.pairs is not None:
            return slice(None)
        counts = [spans.items for spans in self.documents]
        return slice(sum(counts[:owner]), sum(counts[: owner + 1]))

    def score(self, vectors: Tensor, failed: bool) -> tuple[Tensor, RuntimeError | None]:
        """Scores (L,) or (q, D) without a graph, and how memory ran out, if it did.

        Args:
            vectors: (k, W) of this rank.
            failed: memory ran out before, and ``vectors`` is nothing to go by.
        """
        prepared, failure = (None, None) if failed else self.ranks.attempt(lambda: self._prepare(vectors))
        self.own, room = prepared or (None, None)
        scores = self._no_scores(vectors)
        if self.own is not None:
            scores[..., self.columns(self.ranks.rank)] = self.own.scores.detach()
        if self.streams and self._everyone_has(room):
            self.room = room
            failure = self._score_others(scores)
        return scores, failure

    def _no_scores(self, vectors: Tensor) -> Tensor:
        """Zeros, of the shape and type of the scores."""
        shape = self.queries.items, sum(spans.items for spans in self.documents)
        dtype = torch.promote_types(vectors.dtype, torch.float32)
        return vectors.new_zeros(shape if self.pairs is None else len(self.pairs), dtype=dtype)

    def _prepare(self, vectors: Tensor) -> tuple[Own, Room | None]:
        vectors = vectors.detach().requires_grad_()
        mine = self.documents[self.ranks.rank]
        queries, documents = vectors[self.queries.rows.to(vectors.device)], vectors[mine.rows.to(vectors.device)]
        own = Own(vectors, queries, documents, self._score(queries, documents, mine, self.pairs))
        if not self.streams:
            return own, None
        most = max(spans.tokens for owner, spans in enumerate(self.documents) if owner != self.ranks.rank)
        room = vectors.new_empty((most, vectors.shape[1]))
        return own, Room(room, torch.zeros_like(queries), torch.zeros_like(documents))

    def _score(self, queries: Tensor, documents: Tensor, spans: Spans, pairs: Tensor | None = None) -> Tensor:
        device = queries.device
        pairs = None if pairs is None else pairs.to(device)
        return self.loss.score(queries, self.queries.offsets.to(device), documents, spans.offsets.to(device), pairs)

    def _everyone_has(self, room: Room | None) -> bool:
        """Whether memory sufficed on all ranks so far: else none exchanges anything."""
        lacking = self.ranks.total(torch.tensor([float(room is None)], dtype=torch.float64))
        return not lacking.any()

    def _pass_by(self) -> Iterator[tuple[int, Tensor]]:
        """The document tokens of every rank, rank after rank; each block is gone when the next one is asked for."""
        assert self.own is not None
        assert self.room is not None
        for owner, spans in enumerate(self.documents):
            mine = owner == self.ranks.rank
            block = self.own.documents.detach() if mine else self.room.block[: spans.tokens]
            if spans.tokens:
                yield owner, self.ranks.broadcast(block, owner)

    def _score_others(self, scores: Tensor) -> RuntimeError | None:
        """Fills in the columns of the other ranks' documents."""
        assert self.own is not None
        queries, failure = self.own.queries.detach(), None
        for owner, block in self._pass_by():
            if owner == self.ranks.rank or failure is not None:
                continue
            found, failure = self.ranks.attempt(partial(self._score, queries, block, self.documents[owner]))
            if found is not None:
                scores[:, self.columns(owner)] = found
        return failure

    def gradient(self, slope: Tensor | None) -> tuple[Tensor | None, RuntimeError | None]:
        """(k, W) of this rank's token vectors, and how memory ran out, if it did; None: there is none.

        Args:
            slope: of the scores, the gradient of this rank's part of the loss.
        """
        assert slope is not None
        failure = None if self.room is None else self._collect(slope)
        if self.own is None or failure is not None:
            return None, failure
        return self.ranks.attempt(lambda: self._to_vectors(slope))

    def _collect(self, slope: Tensor) -> RuntimeError | None:
        """Sums up the gradients that queries here and documents there owe to one another."""
        assert self.room is not None
        failure = None
        for owner, block in self._pass_by():
            sent = block
            if owner == self.ranks.rank:
                sent = self.room.of_documents
            elif failure is None:
                part = slope[:, self.columns(owner)]
                found, failure = self.ranks.attempt(partial(self._gradients, block, self.documents[owner], part))
                if found is not None:
                    self.room.of_queries.add_(found[0])
                    sent = found[1].contiguous()
            # Without memory anything is sent, of the right size: nobody uses it.
            self.ranks.sum_at(sent, owner)
        return failure

    def _gradients(self, block: Tensor, spans: Spans, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Of the queries here and the documents of one other rank."""
        assert self.own is not None
        queries, documents = (leaf.detach().requires_grad_() for leaf in (self.own.queries, block))
        of_queries, of_documents = torch.autograd.grad(
            self._score(queries, documents, spans), (queries, documents), slope
        )
        return of_queries, of_documents

    def _to_vectors(self, slope: Tensor) -> Tensor:
        assert self.own is not None
        own, room = self.own, self.room
        slope = slope[..., self.columns(self.ranks.rank)]
        if room is None:
            return torch.autograd.grad(own.scores, own.vectors, slope)[0]
        roots, slopes = (own.scores, own.queries, own.documents), (slope, room.of_queries, room.of_documents)
        return torch.autograd.grad(roots, own.vectors, slopes)[0]
