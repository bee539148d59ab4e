"""Which implementation runs, decided at each call from the tensors at hand."""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from uform_kernels.checks import check_choice

BACKENDS = ("auto", "reference", "chunked", "triton")

# Triton's interpreter and its tensor cores both stop at float32.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported; nothing is imported to find out."""
    return importlib.util.find_spec("triton") is not None


def interprets_triton() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def choose_backend(backend: str, tensor: Tensor) -> str:
    """Turns "auto" into a back end for `tensor`, and refuses "triton" where it cannot run.

    "auto" is "triton" for float32, bfloat16 and float16 tensors on a CUDA or ROCm device where triton is
    installed, else "chunked".

    Returns: "reference", "chunked" or "triton".
    Raises: ValueError for another word, and for "triton" without triton, on a CPU tensor or in float64.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        return "triton" if tensor.is_cuda and has_triton() and tensor.dtype in TRITON_DTYPES else "chunked"
    if backend == "triton":
        _check_triton(tensor)
    return backend


def _check_triton(tensor: Tensor) -> None:
    if not has_triton():
        raise ValueError("backend='triton' needs the package triton: install it, or use backend='chunked'.")
    if not (tensor.is_cuda or interprets_triton()):
        raise ValueError(
            f"backend='triton' needs a CUDA or ROCm tensor, this one is on {tensor.device}: use 'chunked'."
        )
    if tensor.dtype not in TRITON_DTYPES:
        raise ValueError(f"backend='triton' does not take {tensor.dtype}: use 'chunked', which does.")
