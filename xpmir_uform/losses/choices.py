"""Cross-entropy of an item's targets over the bytes that it offers.

Letters: S answer slots of a microbatch, C choices of all of them.
"""

from dataclasses import replace

import torch
from experimaestro import Meta
from torch import Tensor
from uform_kernels import choice_loss

from xpmir_uform.base.configuration import default
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.targets import Questions
from xpmir_uform.losses.base import BACKENDS, AdditiveLoss, Answers, LossValue, named_zeros


def hits(logits: Tensor, choices: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
    """0-d float64: the slots whose likeliest legal byte is their likeliest target.

    One of t equally likely bytes is picked with probability 1 / t, so that logits that are all alike hit by chance.

    Args:
        logits: (S, 256) float.
        choices: (C,) uint8.
        offsets: (S + 1,) int64; a slot without choices is not counted.
        targets: (C,) float.
    """
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=logits.device), lengths)
    told, wanted = (_largest(values, rows, len(lengths)) for values in (logits[rows, choices.long()], targets))
    picked, right = (
        torch.zeros(len(lengths), dtype=torch.float64, device=rows.device).index_add(0, rows, found.double())
        for found in (told, told & wanted)
    )
    return (right / picked.clamp(min=1)).sum()


def _largest(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """(C,) bool: which of some values (C,) reaches the largest of its row."""
    most = values.new_full((count,), -torch.inf).scatter_reduce(0, rows, values, "amax")
    return values == most[rows]


class ChoicesLoss(AdditiveLoss):
    """Teaches the byte decoder the targets of items that offer choices.

    The mean, over the items of the global batch that offer choices, of the cross-entropy of their targets under the
    softmax over their legal bytes alone, read from an answer slot behind the item's tokens.
    """

    __xpmid__ = "uform.choices-loss"

    backend: Meta[str] = default("auto")
    """Kernel back end: ``auto``, ``reference``, ``chunked`` or ``triton``"""

    NAME = "choices"
    HEADS = ("bytes",)
    LIMITS = ("max_choices_per_item",)
    STATS = ("accuracy", "asked")

    def __validate__(self):
        super().__validate__()
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, expected one of {', '.join(BACKENDS)}")

    def ask(self, segment: Segment, item: Item, seed: int, step: int) -> Segment:
        """The segment with an answer slot, if its item offers choices."""
        return replace(segment, answers=True) if item.choices else segment

    def counts(self, questions: Questions) -> Tensor:
        """(1,) float64: the items that offer choices."""
        return (questions.choice_offsets.diff() > 0).sum().double().reshape(1)

    def lacking(self, counts: Tensor) -> str:
        """Items that offer choices."""
        return named_zeros(counts, ("items that offer choices",))

    def compute(self, answers: Answers, questions: Questions, counts: Tensor) -> LossValue:
        """The part of the unweighted loss that a microbatch adds.

        ``accuracy`` is its part of the share of items whose likeliest choice is the likeliest target, ``asked`` the
        number of items that offer choices.
        """
        logits = answers.choices
        assert logits is not None
        asked, every = float(self.counts(questions)), max(1.0, float(counts))
        choices, offsets, targets = (
            tensor.to(logits.device) for tensor in (questions.choices, questions.choice_offsets, questions.targets)
        )
        mean = choice_loss(logits, choices, offsets, targets, backend=self.backend)
        right = float(hits(logits.detach(), choices, offsets, targets))
        return LossValue(mean * (asked / every), {"accuracy": right / every, "asked": asked})
