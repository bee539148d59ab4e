"""What a manifest says about where it was written: versions, sources, machine. Nothing names the host or its paths."""

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from uform_kernels.backends import choose_backend

PACKAGES = (
    "xpmir-uform", "torch", "triton", "lightning", "xpm-torch", "experimaestro", "numpy", "safetensors", "pillow",
)  # fmt: skip
GIT_SECONDS = 20


@lru_cache
def versions() -> Mapping[str, str]:
    """The versions of what a result may depend on, of those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@lru_cache
def git() -> Mapping[str, Any] | None:
    """Commit and dirty flag of the work tree that this package lies in; None if there is none."""
    here = Path(__file__).parent
    commit, status = _git(here, "rev-parse", "HEAD"), _git(here, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or status is None else {"commit": commit, "dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, and how torch computes on it, as far as rounding may depend on them."""
    cuda = device.type == "cuda"
    matmul, attention = torch.backends.cuda.matmul, torch.backends.cuda
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "tf32_override": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "float16_reduction": bool(matmul.allow_fp16_reduced_precision_reduction),
        "bfloat16_reduction": bool(matmul.allow_bf16_reduced_precision_reduction),
        "flash_attention": attention.flash_sdp_enabled(),
        "memory_efficient_attention": attention.mem_efficient_sdp_enabled(),
    }


def back_ends(losses: Iterable[Any], device: torch.device) -> dict[str, tuple[str, str]]:
    """By loss: the back end that was asked for, and the one that computes it for tensors of torch's default type."""
    somewhere = torch.empty(0, device=device)
    return {
        loss.NAME: (loss.backend, choose_backend(loss.backend, somewhere))
        for loss in losses
        if hasattr(loss, "backend")
    }


def arithmetic(fabric: Any, losses: Iterable[Any]) -> dict[str, Any]:
    """What a resumed run may change and a manifest has to tell: device, precision, environment and back ends.

    Of each back end the one that was asked for and, if it is another, the one that is used.
    """
    device = fabric.device
    used = {f"backend of {name}": ", so ".join(dict.fromkeys(pair)) for name, pair in back_ends(losses, device).items()}
    return {
        "device": device.type,
        "precision": str(fabric.strategy.precision.precision),
        "environment": {**environment(device), **used},
    }


def arithmetic_differences(found: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What two :func:`arithmetic` tell differently: by name, the value of each. Older manifests tell less."""
    pairs = {name: [found.get(name), now[name]] for name in ("device", "precision")}
    theirs, ours = found["environment"], now["environment"]
    pairs |= {name: [theirs.get(name), ours.get(name)] for name in sorted(theirs.keys() | ours.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
