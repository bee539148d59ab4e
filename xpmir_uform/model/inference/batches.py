"""Running a model over a collection under a budget of tokens; its outputs are in the order of the items.

Letters: N items, n items or rows of a batch, T token vectors of all items, W width of a token vector, C choices of all
items.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
import torch
from experimaestro import taskglobals
from experimaestro import tqdm as task_tqdm
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.shapes import Shape
from xpmir_uform.data.items import Item
from xpmir_uform.data.validation import remedy
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.model.head_modules import TokenProjection
from xpmir_uform.model.packing import pack

BATCH_TOKENS = 16_384
PATIENCE = 2.0
"""Seconds after which a bar shows how far a call is."""

Ask = Callable[[Segment, int], Segment]
"""What is asked of the segment of an item, by the number of the item."""


def check_count(name: str, value: Any) -> None:
    """Refuses what is no whole number of at least 1.

    Raises:
        ValueError: with the name.
    """
    if not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} is {value!r}: expected a whole number, at least 1")


def check_several(things: Any, kind: str, one: type | None = None) -> None:
    """Refuses what is iterated over by something else than its members, in their order.

    Args:
        kind: what the members are, in messages.
        one: a member, where it could be iterated over too.

    Raises:
        ValueError: it is one thing, a mapping, a table, a set or an open file; says what to pass.
    """
    name = type(things).__name__
    single = (str, bytes, bytearray, memoryview, Item, *([one] if one else ()))
    if isinstance(things, single) or not isinstance(things, Iterable):
        raise ValueError(f"expected a sequence of {kind} and got one {name}: put it in a list")
    if isinstance(things, Mapping) or hasattr(things, "columns"):
        raise ValueError(
            f"expected a sequence of {kind} and got a {name}, of which the keys would be taken: pass its values in a "
            "list, such as list(x.values()), or one of its columns"
        )
    if isinstance(things, set | frozenset):
        raise ValueError(f"expected a sequence of {kind} and got a {name}, which has no order: pass sorted(x)")
    if hasattr(things, "read"):
        raise ValueError(
            f"expected a sequence of {kind} and got an open file ({name}), whose lines end in line breaks: pass "
            "[line.rstrip('\\n') for line in x], or read_collection(path) to build an index"
        )


def as_items(things: Iterable[str | Item | Image.Image]) -> list[Item]:
    """Items, and texts and pictures of Pillow as items.

    Raises:
        ValueError: there is one in place of a sequence of them, what :func:`check_several` refuses, or something else.
    """
    check_several(things, "texts or items")
    return [_as_item(place, thing) for place, thing in enumerate(things)]


def _as_item(place: int, thing: Any) -> Item:
    if isinstance(thing, Item):
        return thing
    if isinstance(thing, str):
        return Item.text(thing)
    if isinstance(thing, Image.Image):
        return Item.image(thing)
    raise ValueError(f"number {place} is a {type(thing).__name__}: {remedy(thing) or 'expected a text or an Item'}")


def offers(items: Sequence[Item], choices: bytes | Sequence[bytes] | None) -> list[bytes]:
    """The choices of each of N items.

    Args:
        choices: the same for all items, or N of them; None: each item's own.

    Raises:
        ValueError: there is another number of them, or one is empty or names a byte twice; names the item.
    """
    if choices is None:
        choices = [item.choices for item in items]
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise ValueError(f"the choices are a {type(choices).__name__}: give one bytes for all items, or one each")
    if not isinstance(choices, bytes):
        check_several(choices, "choices")
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
    check_count("batch_tokens", batch_tokens)
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


def check_readable(items: Sequence[Item], shapes: Mapping[Modality, Shape]) -> None:
    """Refuse items of a modality that has no shape.

    Raises:
        ValueError: naming the first such item.
    """
    for item in items:
        if item.modality != Modality.TEXT and item.modality not in shapes:
            name = item.modality.name.lower()
            raise ValueError(f"{item}: this model has no {name} input; build it with {name}={name.title()}Shape(...)")


def most_tokens(item: Item, shapes: Mapping[Modality, Shape]) -> int:
    """An upper bound of the item's tokens, known before it is decoded."""
    if item.modality == Modality.TEXT:
        return max(1, len(item.content))
    return shapes[item.modality].most_tokens


def batches(sizes: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Indices of N items in batches of like size.

    Args:
        sizes: (N,) int, at least 1 each.
        budget: most that the sizes of a batch sum to; a larger item comes alone.

    Yields:
        (n,) int64, ascending in size, ties in order.
    """
    order = np.argsort(sizes, kind="stable")
    ends = np.cumsum(sizes[order])
    start = 0
    while start < len(order):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + budget, side="right")))
        yield order[start:stop]
        start = stop


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every submodule has the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
