"""Cross-entropy over legal bytes in Triton: one pass reads the legal logits, one writes their gradient.

C rows, K entries (all rows' choices in one tape), R rows of a program, L choices that a row of a program has room for.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from uform_kernels.ops.choice_loss.chunked import offering_rows
from uform_kernels.targets import architecture, row_for

# Architecture or its first letters -> entries and warps of a program. A choice costs a sector of the logits whatever
# their dtype, and all else is float32 or bytes. 8 entries a thread; `benchmarks/tune_kernels.py` finds better rows.
TABLE = {"": {"entries": 1024, "num_warps": 4}}


def choice_loss(logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor) -> Tensor:
    """As `uform_kernels.choice_loss`, for float32, bfloat16 and float16; keeps one float32 an entry."""
    return _ChoiceLoss.apply(logits, choices, choice_offsets, targets)


@triton.jit
def _row_entries(offsets, first, rows, R: tl.constexpr, L: tl.constexpr):
    """Rows of a program, their entries (R, L) in the tape, and which of these there are."""
    row = first + tl.arange(0, R).to(tl.int64)
    start = tl.load(offsets + row, mask=row < rows, other=0)
    stop = tl.load(offsets + row + 1, mask=row < rows, other=0)
    entry = start[:, None] + tl.arange(0, L)[None, :]
    return row, entry, entry < stop[:, None]


@triton.jit
def _forward(
    logits, choices, offsets, targets, losses, slopes, rows, row_stride, byte_stride, R: tl.constexpr, L: tl.constexpr
):
    """losses (C,): each row's cross-entropy; slopes (K,): its derivative by each legal logit."""
    row, entry, live = _row_entries(offsets, tl.program_id(0).to(tl.int64) * R, rows, R, L)
    byte = tl.load(choices + entry, mask=live, other=0).to(tl.int64)
    target = tl.load(targets + entry, mask=live, other=0).to(tl.float32)
    score = tl.load(logits + row[:, None] * row_stride + byte * byte_stride, mask=live, other=float("-inf"))
    score = score.to(tl.float32)
    top = tl.max(score, 1)
    # A row without choices has top -inf, and -inf - -inf is NaN.
    shifted = score - tl.where(top == float("-inf"), 0.0, top)[:, None]
    log_total = tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    mass = tl.sum(target, 1)[:, None]
    loss = tl.where(target > 0, target * (log_total - shifted), 0.0)
    tl.store(losses + row, tl.sum(loss, 1), mask=row < rows)
    tl.store(slopes + entry, mass * tl.exp(shifted - log_total) - target, mask=live)


@triton.jit
def _backward(choices, offsets, slopes, scale, grad, rows, R: tl.constexpr, L: tl.constexpr):
    """Writes `scale * slopes` to the legal cells of grad (C, 256), which is zero elsewhere."""
    row, entry, live = _row_entries(offsets, tl.program_id(0).to(tl.int64) * R, rows, R, L)
    byte = tl.load(choices + entry, mask=live, other=0).to(tl.int64)
    slope = tl.load(slopes + entry, mask=live, other=0) * tl.load(scale)
    tl.store(grad + row[:, None] * 256 + byte, slope.to(grad.dtype.element_ty), mask=live)


class _ChoiceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: Tensor, choice_offsets: Tensor, targets: Tensor) -> Tensor:
        losses = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
        slopes = torch.zeros(choices.numel(), dtype=torch.float32, device=logits.device)
        choices, offsets = choices.contiguous(), choice_offsets.contiguous()
        ctx.room = int(offsets.diff().max()) if len(losses) else 0
        if ctx.room:
            blocks, options = _sizes(ctx.room, architecture(logits.device))
            with torch.cuda.device_of(logits):
                _forward[(triton.cdiv(len(losses), blocks["R"]),)](
                    logits, choices, offsets, targets.contiguous(), losses, slopes, len(losses), *logits.stride(),
                    **blocks, **options,
                )  # fmt: skip
        offered = offering_rows(offsets)
        ctx.save_for_backward(choices, offsets, slopes.div_(offered))
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return losses.sum() / offered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        choices, offsets, slopes = ctx.saved_tensors
        full = torch.zeros(ctx.shape, dtype=ctx.dtype, device=slopes.device)
        if ctx.room:
            blocks, options = _sizes(ctx.room, architecture(full.device))
            scale = grad.to(torch.float32).reshape(1).contiguous()
            with torch.cuda.device_of(full):
                _backward[(triton.cdiv(len(full), blocks["R"]),)](
                    choices, offsets, slopes, scale, full, len(full), **blocks, **options
                )
        return full, None, None, None


def _sizes(room: int, target: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Block sizes and compile options for rows of at most `room` choices."""
    row, length = row_for(TABLE, target), triton.next_power_of_2(room)
    # Fusing a product and a sum into one rounding changes results, and its default differs between releases.
    options = {"num_warps": row["num_warps"], "num_stages": 1, "enable_fp_fusion": True}
    return {"R": max(1, row["entries"] // length), "L": length}, options


def compile_cases(
    target: str = "sm_90",
) -> list[tuple[str, triton.JITFunction, dict[str, str], dict[str, int], dict[str, Any]]]:
    """Name, kernel, signature, block sizes and options of what a call may launch, for a compile check."""
    cases: list[tuple[str, triton.JITFunction, dict[str, str], dict[str, int], dict[str, Any]]] = []
    for dtype in ("fp32", "bf16", "fp16"):
        forward = {"logits": f"*{dtype}", "choices": "*u8", "offsets": "*i64", "targets": "*fp32", "losses": "*fp32"}
        forward |= {"slopes": "*fp32", "rows": "i32", "row_stride": "i32", "byte_stride": "i32"}
        backward = {"choices": "*u8", "offsets": "*i64", "slopes": "*fp32", "scale": "*fp32"}
        backward |= {"grad": f"*{dtype}", "rows": "i32"}
        for room in (4, 256):
            sizes = _sizes(room, target)
            cases.append((f"choice_loss forward {dtype} room {room}", _forward, forward, *sizes))
            cases.append((f"choice_loss backward {dtype} room {room}", _backward, backward, *sizes))
    return cases
