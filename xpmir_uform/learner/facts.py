"""What a manifest says about where it was written: versions, sources, machine. Nothing names the host or its paths."""

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

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
    """The machine as far as rounding may depend on it."""
    cuda = device.type == "cuda"
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": os.environ.get("NVIDIA_TF32_OVERRIDE", torch.get_float32_matmul_precision()),
    }
