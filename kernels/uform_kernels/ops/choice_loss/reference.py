"""Cross-entropy over legal bytes in plain torch: the definition that the other back ends are held to.

C rows, K entries (all rows' choices in one tape).
"""

import torch
from torch import Tensor


def choice_loss(logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor) -> Tensor:
    """Mean over the rows that offer choices of `-sum_k p_k log softmax(logits over the row's choices)_k`.

    Shapes, errors and what is refused: see `uform_kernels.choice_loss`. autograd gives the gradient.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    spans = list(zip(choice_offsets[:-1].tolist(), choice_offsets[1:].tolist(), strict=True))
    losses = [
        _row_loss(logits[row].to(dtype), choices[start:stop].long(), targets[start:stop].to(dtype))
        for row, (start, stop) in enumerate(spans)
        if stop > start
    ]
    return torch.stack(losses).mean() if losses else logits[:0].sum(dtype=dtype)


def _row_loss(logits: Tensor, legal: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of one row. A choice of probability 0 is left out, so that its logit may be -inf."""
    likely = targets > 0
    log_probabilities = torch.log_softmax(logits[legal], 0)
    return -(targets[likely] * log_probabilities[likely]).sum()
