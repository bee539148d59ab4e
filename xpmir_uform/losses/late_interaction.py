"""Late interaction: queries and documents compared token by token.

Letters: N items of the global batch, E edges, L listed pairs, q queries among some rows, D documents of the batch, C
cells, T tokens, W token width.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from experimaestro import Meta, Param
from torch import Tensor
from uform_kernels import Edges, maxsim
from uform_kernels.ops.pair_loss.listed import Cells, form_loss, weighted_mean

from xpmir_uform.base.configuration import default
from xpmir_uform.data.batch.batch import Batch
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Side
from xpmir_uform.losses.base import BACKENDS, Encoded, JointLoss, LossValue, named_zeros
from xpmir_uform.losses.contrastive import Negatives
from xpmir_uform.losses.forms import PairForm, RankedForm


def numbers_of(batch: Batch, side: Side, rows: range) -> Tensor:
    """The numbers of the items among ``rows`` that play a part, ascending, int64."""
    return rows.start + (batch.sides[rows.start : rows.stop] & int(side)).nonzero().squeeze(1)


def check_sides(batch: Batch) -> None:
    """Refuses attract and repel edges that cannot be meant as those of queries and documents.

    An anchor is a query, or a document alone: such an edge, as the other half of a symmetric relation or between two
    documents, speaks of a row that late interaction does not have, and is left to other losses. A query's edges lead
    to documents. Edges all of which lead from documents to queries are the wrong way round.

    Raises:
        ValueError: naming both items.
    """
    seen = []
    for name, edges in (("attract", batch.attract), ("repel", batch.repel)):
        one, other = batch.sides[edges.anchors()], batch.sides[edges.ids]
        forth, back = _joins(one, other), _joins(other, one)
        lost = ((one & int(Side.QUERY)) > 0) & ~forth & ~back
        _refuse(batch, name, edges, lost | (one == int(Side.NONE)))
        seen.append((forth, name, edges, back))
    if not any(forth.any() for forth, *_ in seen):
        for _, name, edges, back in seen:
            _refuse(batch, name, edges, back)


def _refuse(batch: Batch, name: str, edges: Edges, wrong: Tensor) -> None:
    if wrong.any():
        place = int(wrong.nonzero()[0])
        ends = (int(column[place]) for column in (edges.anchors(), edges.ids))
        one, other = (f"{batch.describe(end)} of side {Side(int(batch.sides[end])).name}" for end in ends)
        raise ValueError(
            f"the {name} edge from {one} to {other} is none from a query to a document, which late interaction takes "
            "it for: give the former the side QUERY and the latter DOCUMENT, or leave the edge out"
        )


def _joins(queries: Tensor, documents: Tensor) -> Tensor:
    """(E,) bool of sides (E,), (E,): whether the first is a query and the second a document."""
    return ((queries & int(Side.QUERY)) > 0) & ((documents & int(Side.DOCUMENT)) > 0)


def scored_edges(batch: Batch, edges: Edges, rows: range) -> tuple[Tensor, Tensor]:
    """The edges from a query among ``rows`` to a document: (E, 2) int64 item numbers, and weights (E,) float64."""
    part = edges.part(rows.start, rows.stop)
    anchors = rows.start + part.anchors()
    scored = _joins(batch.sides[anchors], batch.sides[part.ids])
    return torch.stack([anchors, part.ids], dim=1)[scored], part.weights_as(torch.float64)[scored]


def row_sums(values: Tensor, pairs: Tensor, rows: range) -> Tensor:
    """(len(rows),) float64: what the pairs of each anchor sum to."""
    return torch.bincount(pairs[:, 0] - rows.start, values, minlength=len(rows))


def named_cells(batch: Batch, rows: range) -> tuple[Tensor, Cells]:
    """The attract and repel edges from a query among ``rows`` to a document, as pairs (C, 2) of item numbers."""
    pulled, pulls = scored_edges(batch, batch.attract, rows)
    pushed, pushes = scored_edges(batch, batch.repel, rows)
    pairs = torch.cat([pulled, pushed])
    none = pulls.new_zeros
    cells = Cells(
        pairs[:, 0] - rows.start, torch.cat([pulls, none(len(pushes))]), torch.cat([none(len(pulls)), pushes])
    )
    return pairs, cells


def places_of(pairs: Tensor, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (L, 2) of item numbers as places among the queries and among the documents, both ascending."""
    one, other = pairs.T.contiguous()
    return torch.searchsorted(queries, one), torch.searchsorted(documents, other)


def ambient_cells(batch: Batch, rows: range, dtype: torch.dtype = torch.float64) -> Cells:
    """Every query among ``rows`` against every document of the batch, row by row: (q D) cells.

    A document that no edge of a query names repels it with weight 1; ignored ones, and the query itself, have no
    weight.
    """
    queries = numbers_of(batch, Side.QUERY, rows)
    documents = numbers_of(batch, Side.DOCUMENT, range(len(batch)))
    repel = (queries[:, None] != documents).to(dtype)
    attract = torch.zeros_like(repel)
    for edges, weights in ((batch.attract, attract), (batch.repel, repel), (batch.ignore, None)):
        pairs, values = scored_edges(batch, edges, rows)
        at = places_of(pairs, queries, documents)
        repel[at] = 0.0
        if weights is not None:
            weights[at] = values.to(dtype)
    anchors = torch.arange(len(queries)).repeat_interleave(len(documents))
    return Cells(anchors, attract.flatten(), repel.flatten())


class LateInteractionLoss(JointLoss):
    """Draws a query's tokens to those of the documents that it attracts, and away from those that it repels.

    The score of query q and document d is ``inverse_temperature * M(q, d) + bias``, with M by the kernel ``maxsim``:
    the sum over q's tokens of the largest product with a token of d (ColBERT, Khattab and Zaharia, SIGIR 2020, equation
    3). Its factor and bias are fixed: token vectors have unit length, so that ``M`` is bounded, and a row of the ranked
    form is moved by the factor alone.
    """

    __xpmid__ = "uform.late-interaction-loss"

    form: Param[PairForm] = default(factory=RankedForm.C)
    """How a row of scores becomes a loss"""

    negatives: Param[Negatives] = default(Negatives.NAMED)
    """Which documents repel beside the repel edges: ``NAMED`` or ``AMBIENT``"""

    max_query_span: Param[int] = default(128)
    """A query keeps its first tokens, at most so many; a document keeps all"""

    normalize: Param[bool] = default(True)
    """Whether ``M`` is divided by the query's number of tokens"""

    inverse_temperature: Param[float] = default(10.0)
    """Factor of ``M``"""

    bias: Param[float] = default(-5.0)
    """Added to the scaled ``M``. By default a score is zero half way, at ``M`` = 1/2"""

    max_query_tokens: Meta[int] = default(0)
    """Tokens of all queries of a microbatch; 0: no limit"""

    max_documents: Meta[int] = default(0)
    """Documents of a microbatch; 0: no limit"""

    max_document_tokens: Meta[int] = default(0)
    """Tokens of all documents of a microbatch; 0: no limit"""

    backend: Meta[str] = default("auto")
    """Kernel back end: ``auto``, ``reference``, ``chunked`` or ``triton``"""

    NAME = "late_interaction"
    HEADS = ("tokens",)
    STATS = ("attract_similarity", "repel_similarity")

    def __validate__(self):
        super().__validate__()
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, expected one of {', '.join(BACKENDS)}")
        if self.negatives == Negatives.ACROSS:
            raise ValueError(f"negatives is {self.negatives!s}, expected named or ambient")
        if self.max_query_span < 1:
            raise ValueError(f"max_query_span is {self.max_query_span}, expected at least 1 token")
        if not 0 < self.inverse_temperature < float("inf") or not abs(self.bias) < float("inf"):
            given = f"inverse_temperature is {self.inverse_temperature} and bias {self.bias}"
            raise ValueError(f"{given}, expected finite, and the former above 0")
        limits = {name: getattr(self, name) for name in ("max_query_tokens", "max_documents", "max_document_tokens")}
        if min(limits.values()) < 0:
            raise ValueError(f"the limits are {limits}, expected none below 0; 0 means no limit")

    @property
    def ambient(self) -> bool:
        """Whether every document of the batch is scored."""
        return self.negatives == Negatives.AMBIENT

    def ask(self, segment: Segment, item: Item, seed: int, step: int) -> Segment:
        """The vectors of a document's tokens, and of a query's first ones."""
        return replace(segment, kept=max(segment.kept, *self._spans(segment, item)))

    def _spans(self, segment: Segment, item: Item) -> tuple[int, int]:
        """Tokens of an item as a query and as a document."""
        query = min(segment.tokens, self.max_query_span) if item.side & Side.QUERY else 0
        return query, segment.tokens if item.side & Side.DOCUMENT else 0

    def limits(self) -> dict[str, int]:
        """The limits that are set."""
        named = {
            "query_tokens": self.max_query_tokens,
            "documents": self.max_documents,
            "document_tokens": self.max_document_tokens,
        }
        return {name: limit for name, limit in named.items() if limit}

    def load(self, items: Sequence[Item], segments: Sequence[Segment]) -> dict[str, int]:
        """What a bag adds to what :meth:`limits` bounds."""
        spans = [self._spans(segment, item) for segment, item in zip(segments, items, strict=True)]
        return {
            "query_tokens": sum(query for query, _ in spans),
            "documents": sum(document > 0 for _, document in spans),
            "document_tokens": sum(document for _, document in spans),
        }

    def counts(self, batch: Batch, rows: range) -> Tensor:
        """(3,) float64: attract weight, repel weight, anchors that have cells (in the ranked form: of both kinds).

        Raises:
            ValueError: an edge of a query leads to no document; see :func:`check_sides`.
        """
        check_sides(batch)
        pulled, pulls = scored_edges(batch, batch.attract, rows)
        pushed, pushes = scored_edges(batch, batch.repel, rows)
        attract, repel = row_sums(pulls, pulled, rows), row_sums(pushes, pushed, rows)
        if self.ambient:
            ignored, _ = scored_edges(batch, batch.ignore, rows)
            repel = repel + self._ambient_documents(batch, torch.cat([pulled, pushed, ignored]), rows)
        active = (attract > 0) & (repel > 0) if self.form.NAME == "ranked" else attract + repel > 0
        return torch.stack([attract.sum(), repel.sum(), active.sum().to(torch.float64)])

    def lacking(self, counts: Tensor) -> str:
        """Edges from a query to a document, or queries that have both kinds, where the form compares them."""
        attract, repel = (f"{kind} from a query to a document" for kind in ("attract edges", "edges that repel"))
        kinds = named_zeros(counts[:2], (attract, repel))
        return kinds or named_zeros(counts[2:], ("queries that have both kinds of edges to documents",))

    def _ambient_documents(self, batch: Batch, named: Tensor, rows: range) -> Tensor:
        """(len(rows),) float64: the documents that no edge of an anchor names, itself left out; 0 if it is no query."""
        sides = batch.sides[rows.start : rows.stop]
        own = ((sides & int(Side.DOCUMENT)) > 0).double()
        documents = len(numbers_of(batch, Side.DOCUMENT, range(len(batch))))
        left = documents - own - row_sums(torch.ones(len(named), dtype=torch.float64), named, rows)
        return torch.where((sides & int(Side.QUERY)) > 0, left, 0.0)

    def pairs(self, batch: Batch, rows: range) -> Tensor | None:
        """(L, 2) int64 numbers of the query, among ``rows``, and the document of each score; None: all with all."""
        return None if self.ambient else named_cells(batch, rows)[0]

    def score(
        self,
        queries: Tensor,
        query_offsets: Tensor,
        documents: Tensor,
        document_offsets: Tensor,
        pairs: Tensor | None = None,
    ) -> Tensor:
        """M of packed token vectors, as :func:`uform_kernels.maxsim` takes and gives them."""
        return maxsim(queries, query_offsets, documents, document_offsets, pairs, self.normalize, self.backend)

    def compute(self, encoded: Encoded, batch: Batch, rows: range, counts: Tensor) -> LossValue:
        """The part of the unweighted loss that the queries among ``rows`` add.

        Args:
            encoded: its ``scores`` are M, unscaled: (L,) of :meth:`pairs`, or (q, D), both in ascending order.
            batch: the global batch.
            rows: whose anchors are summed.
            counts: (3,) float64, the sum of :meth:`counts` over the whole batch.
        """
        assert encoded.scores is not None
        found = encoded.scores.flatten()
        cells = ambient_cells(batch, rows, found.dtype) if self.ambient else named_cells(batch, rows)[1]
        cells = Cells(cells.rows.to(found.device), cells.attract.to(found), cells.repel.to(found))
        scores = self.inverse_temperature * found + self.bias
        means = map(weighted_mean, cells[1:], (found, found), counts[:2])
        return LossValue(form_loss(self.form.NAME, scores, cells, counts), dict(zip(self.STATS, means, strict=True)))
