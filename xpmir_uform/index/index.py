"""An index that is there: opened at once, searched by pooled vectors, its hits reordered by token vectors.

Letters: Q queries, D documents, k results, d embedding width.
"""

from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from uform_kernels import maxsim

from xpmir_uform.base.checked_files import quoted
from xpmir_uform.data.items import Item
from xpmir_uform.evaluation.search import unit
from xpmir_uform.index.fingerprint import fingerprint
from xpmir_uform.index.graph import graph_nearest, open_graph
from xpmir_uform.index.manifest import GRAPH, verify
from xpmir_uform.index.nearest import exact_nearest
from xpmir_uform.index.shards import Shard, shard_path
from xpmir_uform.model.inference.batches import as_items, check_count


class Hit(NamedTuple):
    """A document that was found.

    Args:
        id: of the document.
        score: by which hits are ordered: late interaction if the model has a token head, else the cosine.
        cosine: of the pooled embeddings.
        text: of the document; empty for another modality.
    """

    id: str
    score: float
    cosine: float
    text: str


class Index:
    """The vectors of a collection on disk: they are mapped, and only what a search touches comes into memory.

    Args:
        folder: that :func:`build_index` wrote.
        model: by which it was built.

    Raises:
        ValueError: the folder is no whole index, or it was built by another model.
    """

    def __init__(self, folder: str | Path, model: Any) -> None:
        self.folder, self.model = Path(folder), model
        told, own = verify(self.folder), fingerprint(model)
        if told["model"] != own:
            raise ValueError(
                f"{folder} was built by another model (its fingerprint is {quoted(told['model'], 12)}, this model's is "
                f"{own[:12]}): open it with that model, or build it again"
            )
        widths = {"pooled": model.pooling.projection.out_features}
        if model.token_projection is not None:
            widths["tokens"] = model.token_projection.projection.out_features
        self.shards = [Shard(shard_path(self.folder, number), widths) for number in range(told["shards"])]
        self.starts = np.array([0, *accumulate(map(len, self.shards))])
        if self.starts[-1] != told["documents"]:
            raise ValueError(f"{folder} holds {self.starts[-1]} of {told['documents']} documents: build it again")
        self.graph = open_graph(self.folder / GRAPH, len(self), widths["pooled"]) if GRAPH in told["files"] else None

    def __len__(self) -> int:
        """D."""
        return int(self.starts[-1])

    def search(
        self,
        text: str | Item,
        k: int = 10,
        candidates: int | None = None,
        exact: bool = False,
        max_query_span: int | None = None,
    ) -> list[Hit]:
        """The best documents of one query, best first; :meth:`search_all` says how."""
        return self.search_all([text], k, candidates, exact, max_query_span)[0]

    def search_all(
        self,
        queries: Sequence[str | Item],
        k: int = 10,
        candidates: int | None = None,
        exact: bool = False,
        max_query_span: int | None = None,
    ) -> list[list[Hit]]:
        """The best documents of each query: the nearest by pooled cosine, reordered by late interaction.

        Args:
            queries: texts, or items of any modality that the model reads.
            k: at most D are answered.
            candidates: how many of the nearest are reordered, of which the best k are answered; None: k.
            exact: compares every document although there is a graph.
            max_query_span: the first tokens of a query that are compared, as the model was trained; None: all.

        Raises:
            ValueError: ``k`` is below 1, ``candidates`` below ``k``, or a query is nothing that the model reads.
        """
        candidates = k if candidates is None else candidates
        if not isinstance(k, Integral) or not isinstance(candidates, Integral) or not 1 <= int(k) <= int(candidates):
            raise ValueError(f"k is {k!r} and candidates {candidates!r}: expected whole numbers, 1 <= k <= candidates")
        if max_query_span is not None:
            check_count("max_query_span", max_query_span)
        k, candidates = (min(int(count), len(self)) for count in (k, candidates))
        pooled, tokens = self._encode(as_items(queries), max_query_span)
        numbers, cosines = self._nearest(pooled, candidates, exact)
        rows = zip(numbers.tolist(), cosines, tokens, strict=True)
        return [self._hits(near, cosine, vectors, k) for near, cosine, vectors in rows]

    def _encode(self, queries: Sequence[str | Item], span: int | None) -> tuple[Tensor, Sequence[Tensor | None]]:
        """(Q, d) float32 of length one; and the token vectors of each query, float32, if the model has a token head."""
        if self.model.token_projection is None:
            return unit(self.model.encode(queries)).float().cpu(), [None] * len(queries)
        pooled, tokens, offsets = self.model.encode_both(queries, max_span=span)
        return unit(pooled).float().cpu(), tokens.float().cpu().split(offsets.diff().tolist())

    def _hits(self, near: Sequence[int], cosines: Tensor, query: Tensor | None, k: int) -> list[Hit]:
        """The best k of some documents, of equals the nearer first."""
        scores = cosines if query is None else self._interact(query, near)
        order = scores.sort(descending=True, stable=True).indices[:k].tolist()
        return [self._hit(near[place], float(scores[place]), float(cosines[place])) for place in order]

    def _nearest(self, pooled: Tensor, count: int, exact: bool) -> tuple[Tensor, Tensor]:
        """(Q, min(count, D)) numbers and cosines."""
        numbers = None if self.graph is None or exact else graph_nearest(pooled, self.graph, count)
        if numbers is None:
            return exact_nearest(pooled, (shard.pooled for shard in self.shards), count)
        rows = [shard.pooled[row] for shard, row in map(self._place, numbers.flatten().tolist())]
        near = torch.stack(rows).float().unflatten(0, numbers.shape)
        return numbers, torch.einsum("qd,qkd->qk", pooled, near)

    def _interact(self, query: Tensor, numbers: Sequence[int]) -> Tensor:
        """(k,) float32: late interaction of one query (tokens, W) float32 with some documents."""
        parts = [shard.tokens(row) for shard, row in map(self._place, numbers)]
        offsets = torch.tensor([0, *accumulate(map(len, parts))])
        return maxsim(query, torch.tensor([0, len(query)]), torch.cat(parts).float(), offsets)[0]

    def _place(self, number: int) -> tuple[Shard, int]:
        """The shard of a document, and its row there."""
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.shards[shard], number - int(self.starts[shard])

    def _hit(self, number: int, score: float, cosine: float) -> Hit:
        shard, row = self._place(number)
        return Hit(shard.string("ids", row), score, cosine, shard.string("texts", row))
