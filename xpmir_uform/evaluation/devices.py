"""Where a model is evaluated."""

import torch


def device_of(name: str) -> torch.device:
    """The device of that name; ``auto``: the GPU if there is one, else the CPU."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)
