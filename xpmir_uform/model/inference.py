"""What a trained model answers: embeddings, token vectors, scores and choices.

Letters: N items, T token vectors of all items, W width of an embedding or token vector, Q queries, D documents, P
pairs, C choices of all items.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from experimaestro import taskglobals
from experimaestro import tqdm as task_tqdm
from torch import Tensor
from tqdm import tqdm
from uform_kernels import maxsim

from xpmir_uform.data.decoding import decode
from xpmir_uform.data.items import Item
from xpmir_uform.data.segments import Segment
from xpmir_uform.model.encoding import batches, check_readable, evaluating, most_tokens
from xpmir_uform.model.packing import pack
from xpmir_uform.model.tokens import TokenProjection

BATCH_TOKENS = 16_384
PATIENCE = 2.0
"""Seconds after which a bar shows how far a call is."""

Ask = Callable[[Segment, int], Segment]
"""What is asked of the segment of an item, by the number of the item."""


def as_items(things: Sequence[str | Item]) -> list[Item]:
    """Items, and texts as items.

    Raises:
        ValueError: there is one text in place of a sequence of them, or something that is neither.
    """
    if isinstance(things, str | bytes | Item):
        raise ValueError(f"expected a sequence of texts or items and got one {type(things).__name__}: put it in a list")
    for place, thing in enumerate(things):
        if not isinstance(thing, str | Item):
            raise ValueError(f"number {place} is a {type(thing).__name__}: expected a text or an Item")
    return [Item.text(thing) if isinstance(thing, str) else thing for thing in things]


def offers(items: Sequence[Item], choices: bytes | Sequence[bytes] | None) -> list[bytes]:
    """The choices of each of N items.

    Args:
        choices: the same for all items, or N of them; None: each item's own.

    Raises:
        ValueError: there is another number of them, or one is empty or names a byte twice; names the item.
    """
    if choices is None:
        choices = [item.choices for item in items]
    given = [choices] * len(items) if isinstance(choices, bytes) else list(choices)
    if len(given) != len(items):
        raise ValueError(f"there are {len(given)} choices for {len(items)} items: give one bytes for all, or one each")
    for item, each in zip(items, given, strict=True):
        if not isinstance(each, bytes) or not each or len(set(each)) < len(each):
            raise ValueError(f"{item} is offered {each!r}: expected bytes, at least one and each of them once")
    return given


def legal_softmax(logits: Tensor, choices: Sequence[bytes]) -> Tensor:
    """(C,) probabilities of the legal bytes of each row, row after row, in float32 or wider.

    Args:
        logits: (n, 256).
        choices: n of them, of at least one byte each.
    """
    lengths = np.array(list(map(len, choices)), dtype=np.int64)
    legal = np.arange(lengths.max(initial=0)) < lengths[:, None]
    cells = np.zeros(legal.shape, dtype=np.int64)
    cells[legal] = np.frombuffer(b"".join(choices), np.uint8)
    here = torch.from_numpy(legal).to(logits.device)
    found = logits.gather(1, torch.from_numpy(cells).to(logits.device))
    wide = torch.promote_types(logits.dtype, torch.float32)
    return found.masked_fill(~here, -torch.inf).softmax(dim=1, dtype=wide)[here]


def rows_of(offsets: np.ndarray, numbers: np.ndarray) -> Tensor:
    """(n,) int64: the rows of some runs, run after run.

    Args:
        offsets: (N + 1,) int64, where each run begins.
        numbers: of the runs.
    """
    lengths = np.diff(offsets)[numbers]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(offsets[numbers], lengths) + within)


def bar(total: int | None, name: str) -> tqdm:
    """A bar that shows when a call takes long; within a task, experimaestro is told as well.

    Args:
        total: items; None: not known.
        name: what is done to them.
    """
    make = tqdm if taskglobals.Env.instance().taskpath is None else task_tqdm
    return make(total=total, desc=name, unit=" items", delay=PATIENCE, leave=None)


class TokenRows:
    """Collects the token vectors of N items that come in any order.

    Args:
        count: N.
        head: the module that makes them.
    """

    def __init__(self, count: int, head: TokenProjection) -> None:
        self.lengths = np.zeros(count, np.int64)
        self.weight = head.projection.weight
        self.parts: list[tuple[np.ndarray, Tensor]] = []

    def add(self, numbers: np.ndarray, segments: Sequence[Segment], rows: Tensor) -> None:
        """Takes the kept vectors (n, W) of some items, item after item."""
        self.lengths[numbers] = [segment.kept for segment in segments]
        self.parts.append((numbers, rows))

    def joined(self) -> tuple[Tensor, Tensor]:
        """(T, W) float32 or wider in the order of the items, and (N + 1,) int64, where those of each begin."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        device, wide = self.weight.device, torch.promote_types(self.weight.dtype, torch.float32)
        vectors = torch.empty((int(offsets[-1]), len(self.weight)), dtype=wide, device=device)
        for numbers, rows in self.parts:
            vectors[rows_of(offsets, numbers).to(device)] = rows.to(wide)
        return vectors, torch.from_numpy(offsets).to(device)


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Evaluation mode and no graph within the block; afterwards the model has the modes it had."""
    model.initialize()
    with torch.no_grad(), evaluating(model):
        yield


def answers(
    model: Any, items: Sequence[Item], batch_tokens: int, ask: Ask | None = None, more: int = 0
) -> Iterator[tuple[np.ndarray, list[Segment], Any]]:
    """Runs a model over items, in batches of like length, with a bar if it takes long.

    Args:
        batch_tokens: most tokens of one forward pass; an item with more comes alone.
        ask: what is asked of each segment.
        more: slots that are added to each.

    Yields:
        numbers of items, their segments, and what the model answers.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}: expected at least 1")
    check_readable(items, model.shapes)
    sizes = np.array([most_tokens(item, model.shapes) for item in items], dtype=np.int64) + more
    device = next(model.parameters()).device
    with bar(len(items), "Encoding") as done:
        for numbers in batches(sizes, batch_tokens):
            segments = [decode(items[number], model.shapes) for number in numbers]
            if ask is not None:
                segments = [ask(segment, int(number)) for segment, number in zip(segments, numbers, strict=True)]
            yield numbers, segments, model(pack(segments).to(device))
            done.update(len(numbers))


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
        query_vectors, query_offsets = self.encode_tokens(queries, batch_tokens, max_query_span)
        vectors, offsets = self.encode_tokens(documents, batch_tokens)
        if pairs is not None:
            # An empty list becomes a tensor of floats.
            pairs = torch.as_tensor(pairs, device=vectors.device, dtype=None if len(pairs) else torch.int64)
            pairs = pairs.reshape(-1, 2)
        with torch.no_grad():
            return maxsim(query_vectors, query_offsets, vectors, offsets, pairs=pairs)

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
    if max_span is not None and max_span < 1:
        raise ValueError(f"max_span is {max_span}: expected at least 1, or None for all tokens")
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
