"""Masked reconstruction: bytes and patches that were hidden from the encoder are told from what surrounds them.

Letters: R masked bytes, K masked patches of one modality, P values of one patch.
"""

from math import isfinite

import torch
from experimaestro import Param
from torch import Tensor
from torch.nn.functional import cross_entropy

from xpmir_uform.base.configuration import default
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.targets import Questions
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.losses.base import AdditiveLoss, Answers, LossValue, named_zeros
from xpmir_uform.losses.masking import LONGEST_MEAN, mask_patches, mask_text

NAMES = {modality: modality.name.lower() for modality in Modality}
PATCHES = [name for modality, name in NAMES.items() if modality != Modality.TEXT]


def byte_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """0-d: the cross-entropy of masked bytes, summed over them, in float32 or wider; 0 of none.

    Args:
        logits: (R, 256) float.
        truth: (R,) int64.
    """
    return cross_entropy(widened(logits), truth, reduction="sum")


def patch_loss(told: Tensor, truth: Tensor) -> Tensor:
    """0-d: the mean squared error of masked patches, summed over them, in float32 or wider; 0 of none.

    Args:
        told, truth: (K, P) float.
    """
    return (widened(told) - truth).square().mean(dim=1).sum()


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class MaskedLoss(AdditiveLoss):
    """Teaches the byte and patch decoders what was masked.

    For each modality the mean, over its masked places of the global batch, of the cross-entropy of a byte or of the
    mean squared error of a patch that is standardised by its own mean and deviation; the weighted sum of these means. A
    modality without a masked place adds 0. What is masked is a function of the seed, the step and the item's key.
    """

    __xpmid__ = "uform.masked-loss"

    # Bytes: ByT5 (Xue et al., TACL 2022, section 3.2), and BERT (Devlin et al., NAACL 2019, section 3.1).
    token_mask_probability: Param[float] = default(0.15)
    """Share of a text's bytes that are chosen, in spans (ByT5)"""

    token_mean_span: Param[float] = default(20.0)
    """Mean length of a span, in bytes, geometrically distributed (ByT5)"""

    replace_fraction: Param[float] = default(0.8)
    """Probability that a chosen byte is replaced by the mask slot (BERT)"""

    random_fraction: Param[float] = default(0.1)
    """Probability that it is replaced by a random byte (BERT)"""

    # MAE (He et al., CVPR 2022), VideoMAE (Tong et al., NeurIPS 2022), Audio-MAE (Huang et al., NeurIPS 2022).
    image_mask_ratio: Param[float] = default(0.75)
    """Share of an image's patches that are masked (MAE)"""

    video_mask_ratio: Param[float] = default(0.9)
    """Share of a video's tubes that are masked (VideoMAE)"""

    audio_mask_ratio: Param[float] = default(0.8)
    """Share of a sound's chunks that are masked (Audio-MAE)"""

    text_weight: Param[float] = default(1.0)
    """Factor of the mean over bytes"""

    image_weight: Param[float] = default(1.0)
    """Factor of the mean over an image's patches"""

    video_weight: Param[float] = default(1.0)
    """Factor of the mean over tubes"""

    audio_weight: Param[float] = default(1.0)
    """Factor of the mean over chunks"""

    NAME = "masked"
    HEADS = ("bytes", "patches")
    STATS = (*(f"{name}_loss" for name in NAMES.values()), *(f"{name}_places" for name in NAMES.values()))

    def __validate__(self):
        super().__validate__()
        for name in ("token_mask_probability", *(f"{name}_mask_ratio" for name in PATCHES)):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 (nothing) to 1 (everything)")
        replaced, random = self.replace_fraction, self.random_fraction
        if min(replaced, random) < 0 or not replaced + random <= 1:
            raise ValueError(
                f"replace_fraction is {replaced} and random_fraction {random}, expected at least 0 and at most 1 in all"
            )
        if not 1 <= self.token_mean_span <= LONGEST_MEAN:
            raise ValueError(f"token_mean_span is {self.token_mean_span}, expected 1 to {LONGEST_MEAN} bytes")
        for name in (f"{name}_weight" for name in NAMES.values()):
            if not (getattr(self, name) >= 0 and isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}, expected finite and at least 0")

    def ask(self, segment: Segment, item: Item, seed: int, step: int) -> Segment:
        """The segment with some of its tokens masked."""
        draw = generator(seed, Purpose.MASK, step, item.key)
        if segment.modality == Modality.TEXT:
            fractions = self.replace_fraction, self.random_fraction
            return mask_text(segment, self.token_mask_probability, self.token_mean_span, fractions, draw)
        return mask_patches(segment, getattr(self, f"{NAMES[segment.modality]}_mask_ratio"), draw)

    def counts(self, questions: Questions) -> Tensor:
        """(4,) float64: the masked places of each modality."""
        asked = [
            len(questions.bytes if modality == Modality.TEXT else questions.patches.get(modality, ()))
            for modality in Modality
        ]
        return torch.tensor(asked, dtype=torch.float64)

    def lacking(self, counts: Tensor) -> str:
        """Masked places of any modality."""
        return named_zeros(counts.sum(dim=0, keepdim=True), ("masked places",))

    def compute(self, answers: Answers, questions: Questions, counts: Tensor) -> LossValue:
        """The part of the unweighted loss that a microbatch adds.

        ``text_loss`` and its like are its part of the mean over a modality, before its weight; ``text_places`` the
        masked places.
        """
        means = {
            modality: total / max(1.0, every)
            for modality, every in zip(Modality, counts.tolist(), strict=True)
            if (total := loss_of(modality, answers, questions)) is not None
        }
        value = torch.stack([self._weighted(modality, mean, answers) for modality, mean in means.items()])
        stats = dict.fromkeys(self.STATS, 0.0)
        stats |= {f"{NAMES[modality]}_loss": mean.item() for modality, mean in means.items()}
        asked = zip(NAMES.values(), self.counts(questions).tolist(), strict=True)
        return LossValue(value.sum(), stats | {f"{name}_places": count for name, count in asked})

    def _weighted(self, modality: Modality, mean: Tensor, answers: Answers) -> Tensor:
        """A mean times its weight. What weighs 0 gives 0, and gradients of 0, even if it is not finite."""
        weight, told = getattr(self, f"{NAMES[modality]}_weight"), told_of(modality, answers)
        assert told is not None
        return weight * mean if weight > 0 else torch.where(torch.zeros_like(told, dtype=torch.bool), told, 0.0).sum()


def told_of(modality: Modality, answers: Answers) -> Tensor | None:
    """What the model answers of the masked places of one modality; None: it does not read it."""
    return answers.bytes if modality == Modality.TEXT else (answers.patches or {}).get(modality)


def loss_of(modality: Modality, answers: Answers, questions: Questions) -> Tensor | None:
    """0-d: the sum over the masked places of one modality; None: the model does not read it."""
    told = told_of(modality, answers)
    if modality == Modality.TEXT:
        assert told is not None
        return byte_loss(told, questions.bytes.to(told.device))
    if told is None:
        return None
    truth = questions.patches.get(modality)
    return patch_loss(told, told.new_zeros(told.shape) if truth is None else truth.to(told.device))
