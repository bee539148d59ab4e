"""Cross-entropy of soft targets under the softmax over legal bytes alone."""

import torch
from torch import Tensor

from uform_kernels.backends import choose_backend
from uform_kernels.checks import check_device, check_dtype, check_integers, check_offsets, check_shape, first_true
from uform_kernels.ops.choice_loss import chunked, reference

# How far a row's targets may be from summing to one.
TOLERANCE = 1e-3


def choice_loss(
    logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor, backend: str = "auto"
) -> Tensor:
    """Mean over the rows that offer choices of the cross-entropy of their targets over their legal bytes.

    Row r offers the k_r bytes `choices[choice_offsets[r]:choice_offsets[r + 1]]` with target probabilities p:

        loss_r = -sum_k p_k log softmax(logits[r, choices])_k,  d loss_r / d logit_k = (sum p) softmax_k - p_k

    Every other logit has gradient 0. A row may offer nothing (k_r = 0): it adds nothing and is not counted; without
    any row that does, the loss is 0. A choice of probability 0 may have any logit, -inf included; one of positive
    probability and logit -inf gives inf, and a row whose legal logits are all -inf NaN.

    logits: (C, 256) float64, float32, bfloat16 or float16
    choices: (K,) uint8, distinct within a row
    choice_offsets: (C + 1,) int, from 0 to K, never decreasing
    targets: (K,) float, at least 0, summing to 1 within 1e-3 in each row that offers choices; constants
    backend: "auto", "reference", "chunked" or "triton"

    Returns: 0-d, float64 for float64 logits, else float32.
    Raises: ValueError that names the argument and the row, before anything is computed.
    """
    check_shape("logits", logits, "C", 256)
    backend = choose_backend(backend, logits)
    offsets = _checked_offsets(logits, choices, choice_offsets, targets)
    if backend == "triton":
        from uform_kernels.ops.choice_loss import kernel

        return kernel.choice_loss(logits, choices, offsets, targets)
    return (reference if backend == "reference" else chunked).choice_loss(logits, choices, offsets, targets)


def _checked_offsets(logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor) -> Tensor:
    """Refuses what `choice_loss` does not take; gives the offsets as int64."""
    check_dtype("logits", logits)
    check_shape("choices", choices, "K")
    check_dtype("choices", choices, (torch.uint8,))
    check_shape("targets", targets, choices.numel())
    check_dtype("targets", targets)
    check_shape("choice_offsets", choice_offsets, logits.shape[0] + 1)
    check_integers("choice_offsets", choice_offsets)
    check_device(logits.device, "logits", choices=choices, choice_offsets=choice_offsets, targets=targets)
    offsets = choice_offsets.to(torch.int64)
    check_offsets("choice_offsets", offsets, choices.numel(), ends_at="len(choices)")
    if targets.requires_grad:
        raise ValueError("targets requires a gradient; targets are constants here: pass targets.detach().")
    rows = torch.arange(logits.shape[0], device=choices.device)
    rows = rows.repeat_interleave(offsets.diff(), output_size=choices.numel())
    _check_distinct(rows, choices)
    _check_targets(rows, offsets.diff(), targets)
    return offsets


def _check_distinct(rows: Tensor, choices: Tensor) -> None:
    cells = (rows * 256 + choices.long()).sort().values
    place = first_true(cells[1:] == cells[:-1])
    if place is not None:
        row, byte = divmod(int(cells[place]), 256)
        raise ValueError(f"choices offers byte {byte} twice in row {row}; the choices of a row must be distinct.")


def _check_targets(rows: Tensor, lengths: Tensor, targets: Tensor) -> None:
    place = first_true(~(targets.isfinite() & (targets >= 0)))
    if place is not None:
        value, row = float(targets[place]), int(rows[place])
        raise ValueError(f"targets[{place}] = {value} of row {row}; probabilities must be finite and at least 0.")
    sums = torch.zeros(lengths.numel(), dtype=torch.float64, device=targets.device)
    sums.index_add_(0, rows, targets.double())
    bad = first_true((lengths > 0) & ((sums - 1).abs() > TOLERANCE))
    if bad is not None:
        total = float(sums[bad])
        raise ValueError(f"targets of row {bad} sum to {total:.6g}; they must sum to 1 within {TOLERANCE}.")
