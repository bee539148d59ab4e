"""What a trained model answers: embeddings, token vectors, scores and choices.

Letters: N items, T token vectors of all items, W width of an embedding or token vector, Q queries, D documents, P
pairs, C choices of all items.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.model.inference.batches import (
    BATCH_TOKENS,
    Ask,
    TokenRows,
    answers,
    as_items,
    check_count,
    inference,
    legal_softmax,
    offers,
    rows_of,
)
from xpmir_uform.model.inference.scoring import as_pairs, score_tokens


class Inference:
    """The methods by which a trained model is used.

    They run in evaluation mode and without a graph, on the device of the model, in batches of at most ``batch_tokens``
    tokens, which changes results by rounding alone; results are in the order of what is given. They are to be called on
    the model itself: a data-parallel or mixed-precision wrapper would pass items through its own conversions, which
    they do not survive.
    """

    def encode(self, items: Sequence[str | Item], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Embeddings of items.

        Args:
            items: texts, or items of any modality that the model reads.
            batch_tokens: most tokens of one forward pass; an item with more comes alone.

        Returns:
            (N, W), not normalised, on the device of the model.

        Raises:
            ValueError: an item is of another modality or unreadable, or the model has no pooled head.
        """
        with inference(self):
            weight = _head(self, "pooling", "pooled", "PooledHead").projection.weight
            found = as_items(items)
            embeddings = weight.new_empty((len(found), len(weight)))
            for numbers, _, outputs in answers(self, found, batch_tokens):
                embeddings[torch.from_numpy(numbers).to(weight.device)] = outputs.embeddings.to(weight.dtype)
        return embeddings

    def encode_tokens(
        self, items: Sequence[str | Item], batch_tokens: int = BATCH_TOKENS, max_span: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token vectors of items.

        Args:
            items: texts, or items of any modality that the model reads.
            batch_tokens: most tokens of one forward pass; an item with more comes alone.
            max_span: vectors of the first tokens of an item that are kept; None: of all.

        Returns:
            (T, W) unit vectors, float32 or wider, and (N + 1,) int64, where those of each item begin; both on the
            device of the model.

        Raises:
            ValueError: an item is of another modality or unreadable, or the model has no token head.
        """
        with inference(self):
            found = as_items(items)
            rows = TokenRows(len(found), _head(self, "token_projection", "tokens", "TokenHead"))
            for numbers, segments, outputs in answers(self, found, batch_tokens, _keep(max_span)):
                rows.add(numbers, segments, outputs.tokens)
            return rows.joined()

    def encode_both(
        self, items: Sequence[str | Item], batch_tokens: int = BATCH_TOKENS, max_span: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and token vectors in one pass: what :meth:`encode` and :meth:`encode_tokens` answer."""
        with inference(self):
            found = as_items(items)
            weight = _head(self, "pooling", "pooled", "PooledHead").projection.weight
            rows = TokenRows(len(found), _head(self, "token_projection", "tokens", "TokenHead"))
            embeddings = weight.new_empty((len(found), len(weight)))
            for numbers, segments, outputs in answers(self, found, batch_tokens, _keep(max_span)):
                embeddings[torch.from_numpy(numbers).to(weight.device)] = outputs.embeddings.to(weight.dtype)
                rows.add(numbers, segments, outputs.tokens)
            return embeddings, *rows.joined()

    def score(
        self,
        queries: Sequence[str | Item],
        documents: Sequence[str | Item],
        pairs: Tensor | Sequence[tuple[int, int]] | None = None,
        batch_tokens: int = BATCH_TOKENS,
        max_query_span: int | None = None,
    ) -> Tensor:
        """Scores by late interaction: the mean over a query's tokens of the best cosine with a document's.

        Args:
            queries: Q texts or items.
            documents: D texts or items.
            pairs: (P, 2) int, the (query, document) pairs to score; None: all.
            batch_tokens: most tokens of one forward pass; an item with more comes alone.
            max_query_span: the first tokens of a query that are compared, as the model was trained; None: all.

        Returns:
            (Q, D), or (P,) for listed pairs; on the device of the model.

        Raises:
            ValueError: as :meth:`encode_tokens`, or a pair names no query or document.
        """
        if max_query_span is not None:
            check_count("max_query_span", max_query_span)
        pairs = None if pairs is None else as_pairs(pairs)
        packed = (
            *self.encode_tokens(queries, batch_tokens, max_query_span),
            *self.encode_tokens(documents, batch_tokens),
        )
        return score_tokens(*packed, pairs)

    def choose(
        self,
        texts: Sequence[str | Item],
        choices: bytes | Sequence[bytes] | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> list[Tensor]:
        """Probabilities of legal answers, as ``ChoicesLoss`` trains them; each row may be the targets of an item.

        Args:
            texts: N texts or items.
            choices: the legal bytes, the same for all or those of each; None: each item's own.
            batch_tokens: most tokens of one forward pass; an item with more comes alone.

        Returns:
            N tensors, (k,) float32 or wider each, in the order of the choices; on the device of the model.

        Raises:
            ValueError: an item is unreadable, its choices are none or repeated, or the model has no byte head.
        """
        probabilities, offsets = self.choose_packed(texts, choices, batch_tokens)
        return list(probabilities.split(offsets.diff().tolist()))

    def choose_packed(
        self,
        texts: Sequence[str | Item],
        choices: bytes | Sequence[bytes] | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`choose`, in one tensor: (C,) float32 or wider, and (N + 1,) int64, where each item's begin."""
        with inference(self):
            head = _head(self, "byte_decoder", "bytes", "ByteHead")
            found = as_items(texts)
            given = offers(found, choices)
            offsets = np.cumsum([0, *map(len, given)], dtype=np.int64)
            wide = torch.promote_types(head.weight.dtype, torch.float32)
            probabilities = head.weight.new_empty(int(offsets[-1]), dtype=wide)
            for numbers, _, outputs in answers(self, found, batch_tokens, _answer, more=1):
                rows = legal_softmax(outputs.choices, [given[number] for number in numbers])
                probabilities[rows_of(offsets, numbers).to(rows.device)] = rows.to(wide)
        return probabilities, torch.from_numpy(offsets).to(probabilities.device)


def _keep(max_span: int | None) -> Ask:
    """Keeps the vectors of at most so many of the first tokens; None: of all."""
    if max_span is not None:
        check_count("max_span", max_span)
    return lambda segment, number: replace(segment, kept=min(segment.tokens, max_span or segment.tokens))


def _answer(segment: Segment, number: int) -> Segment:
    return replace(segment, answers=True)


def _head(model: Any, module: str, field: str, config: str) -> Any:
    """The module of a head.

    Raises:
        ValueError: the model has none; says what to write.
    """
    head = getattr(model, module)
    if head is None:
        name = {"pooled": "pooled", "tokens": "token", "bytes": "byte"}[field]
        raise ValueError(f"this model has no {name} head: build it with {field}={config}(...)")
    return head
