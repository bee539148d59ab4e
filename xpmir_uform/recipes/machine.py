"""Where a task is to run: refused before it is submitted where that is known to fail."""

import os
import re
from typing import Any, get_args

import torch
from experimaestro.connectors.local import LocalConnector
from experimaestro.launchers.direct import DirectLauncher
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.fabric.connector import _PRECISION_INPUT_STR, _PRECISION_INPUT_STR_ALIAS

PRECISIONS = get_args(_PRECISION_INPUT_STR) + get_args(_PRECISION_INPUT_STR_ALIAS)
DEVICES = re.compile(r"auto|-1|[1-9]\d*|\d+,(\d+,?)*|\[\d+(, *\d+)*\]")
"""A number of devices, a list of their numbers, or all of them"""


def runs_here(launcher: Any) -> bool:
    """Whether a launcher starts processes on this machine."""
    return isinstance(launcher, DirectLauncher) and isinstance(launcher.connector, LocalConnector)


def check_devices(config: Any, here: bool) -> None:
    """Refuses an accelerator, a precision or devices that do not exist.

    Args:
        config: a ``FabricConfiguration``.
        here: the task runs on this machine, so that its devices can be counted.

    Raises:
        ValueError: one of them does not exist.
    """
    accelerators = ["auto", "gpu", *ACCELERATOR_REGISTRY.available_accelerators()]
    if config.accelerator not in accelerators:
        raise ValueError(f"accelerator is {config.accelerator!r}, expected one of {', '.join(accelerators)}")
    if config.precision not in PRECISIONS:
        raise ValueError(f"precision is {config.precision!r}, expected one of {', '.join(PRECISIONS)}")
    if not DEVICES.fullmatch(str(config.devices)):
        raise ValueError(
            f"devices is {config.devices!r}, expected a number such as '2', a list of numbers such as '0,1', '-1' or "
            "'auto' (all of them)"
        )
    if here:
        _check_counts(config.accelerator, str(config.devices))


def _check_counts(accelerator: str, devices: str) -> None:
    """Refuses GPUs that this machine lacks, and more ranks than it has processors."""
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count["gpu"] = count["cuda"] or count["mps"]
    if accelerator == "auto":
        accelerator = "gpu" if count["gpu"] else "cpu"
    count["cpu"] = os.cpu_count() or 1
    there = count.get(accelerator)
    if there == 0:
        raise ValueError(
            f"accelerator is {accelerator!r}, but this machine has none: set it to auto or cpu, or submit with a "
            "launcher that runs the task elsewhere"
        )
    numbers = [int(number) for number in re.findall(r"\d+", devices)] if devices != "-1" else []
    needed = numbers[0] if devices.isdigit() else 1 + max(numbers, default=-1)
    if there is not None and needed > there:
        raise ValueError(f"devices is {devices!r}, but this machine has {there} of the accelerator {accelerator!r}")
