"""Devices by name, and how many of them a run uses."""

import re
from typing import Any

import torch


def check_device(name: str) -> None:
    """Refuses a name that no device has.

    Raises:
        ValueError: with the name.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"device is {name!r}, expected auto, cpu, mps, cuda or cuda:NUMBER")


def device_of(name: str) -> torch.device:
    """The device of that name; ``auto``: the GPU if there is one, else the CPU."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)


def device_count(fabric: Any) -> int:
    """Devices of each node that a ``FabricConfiguration`` names; ``auto`` is one."""
    if fabric.devices.isdigit():
        return int(fabric.devices)
    return max(1, len([part for part in fabric.devices.split(",") if part.strip().isdigit()]))
