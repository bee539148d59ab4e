"""Cross-entropy over legal bytes in tiles of rows, with the gradient of the legal logits found in the forward pass.

C rows, K entries (all rows' choices in one tape), R rows of a tile.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows of a tile: 4096 x 256 float32 are 4 MiB, about what a core's caches hold.
TILE_ROWS = 4096


def choice_loss(logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor) -> Tensor:
    """As `uform_kernels.choice_loss`, on any device; keeps one number an entry for the backward pass."""
    return _ChoiceLoss.apply(logits, choices, choice_offsets, targets)


class _ChoiceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        cells = legal_cells(choices, choice_offsets)
        slopes = torch.empty(choices.numel(), dtype=dtype, device=logits.device)
        loss = slopes.new_zeros(())
        bounds = choice_offsets[::TILE_ROWS].tolist() + choice_offsets[-1:].tolist()
        for tile, (start, stop) in enumerate(itertools.pairwise(bounds)):
            first = tile * TILE_ROWS
            rows = logits[first : first + TILE_ROWS].to(dtype)
            within = cells[start:stop] - first * 256
            part, slopes[start:stop] = _tile_loss(rows, within, targets[start:stop].to(dtype))
            loss += part
        offered = offering_rows(choice_offsets)
        ctx.save_for_backward(cells, slopes.div_(offered))
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return loss / offered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cells, slopes = ctx.saved_tensors
        full = torch.zeros(ctx.shape, dtype=ctx.dtype, device=slopes.device)
        full.view(-1)[cells] = (slopes * grad).to(ctx.dtype)
        return full, None, None, None


def legal_cells(choices: Tensor, choice_offsets: Tensor) -> Tensor:
    """(K,) int64: where each legal logit lies in the flattened (C, 256) logits."""
    lengths = choice_offsets.diff()
    rows = torch.arange(lengths.numel(), device=choices.device)
    return torch.repeat_interleave(rows, lengths, output_size=choices.numel()) * 256 + choices.long()


def offering_rows(choice_offsets: Tensor) -> Tensor:
    """0-d int64: how many rows offer choices, at least 1 so that a mean over none is 0."""
    return (choice_offsets.diff() > 0).sum().clamp(min=1)


def _tile_loss(logits: Tensor, cells: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of R rows, and its derivative by each legal logit, `(sum p) softmax - p`.

    logits: (R, 256); cells: (K,) into the flattened logits; targets: (K,)
    """
    rows = cells // 256
    legal = logits.new_full(logits.shape, -torch.inf)
    legal.view(-1)[cells] = logits.reshape(-1)[cells]
    shifted = legal.view(-1)[cells] - legal.amax(1)[rows]
    legal.fill_(0).view(-1)[cells] = shifted.exp()
    log_total = legal.sum(1).log()[rows]
    legal.view(-1)[cells] = targets
    mass = legal.sum(1)[rows]
    # log probabilities may be -inf where the target is 0, and 0 * -inf would be NaN.
    losses = torch.where(targets > 0, targets * (log_total - shifted), 0)
    return losses.sum(), mass * (shifted - log_total).exp() - targets
