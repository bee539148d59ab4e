"""Questions: what a model is asked about the items of a microbatch, beside their embeddings.

Letters: R masked bytes, K masked patches of one modality, P values of one patch, A items that offer choices, C choices
of all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality


@dataclass(frozen=True, slots=True)
class Questions:
    """The right answers, in the order in which the model gives its own.

    Args:
        bytes: (R,) int64, what stood at each masked place of a text.
        patches: (K, P) float32 of each modality that has masked patches.
        choices: (C,) uint8, the legal bytes.
        choice_offsets: (A + 1,) int64, where those of each answer slot begin.
        targets: (C,) float64, their probabilities.
    """

    bytes: Tensor
    patches: Mapping[Modality, Tensor]
    choices: Tensor
    choice_offsets: Tensor
    targets: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], answering: Sequence[Item]) -> "Questions":
        """The questions that some segments put.

        Args:
            answering: the items of the segments that have an answer slot, in their order.
        """
        truths = {
            modality: [s.truth for s in segments if s.modality == modality and s.truth is not None and len(s.truth)]
            for modality in Modality
        }
        return cls(
            bytes=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *truths.pop(Modality.TEXT)])),
            patches={modality: torch.from_numpy(np.concatenate(found)) for modality, found in truths.items() if found},
            choices=torch.from_numpy(np.frombuffer(b"".join(item.choices for item in answering), np.uint8).copy()),
            choice_offsets=torch.from_numpy(np.cumsum([0, *(len(item.choices) for item in answering)])),
            targets=torch.tensor([target for item in answering for target in item.targets], dtype=torch.float64),
        )
