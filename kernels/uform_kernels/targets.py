"""What a Triton kernel is compiled for, and the row of a table of block sizes that holds there."""

from collections.abc import Mapping

import torch

# The key of a row is an architecture or its first letters: "sm_90", "sm_", "gfx", or "" for any.
Rows = Mapping[str, Mapping[str, int]]


def architecture(device: torch.device) -> str:
    """Such as "sm_90" or "gfx942"; on a CPU, where Triton interprets, "sm_90"."""
    if device.type != "cuda":
        return "sm_90"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def row_for(rows: Rows, target: str) -> dict[str, int]:
    """A copy of the row with the longest key that `target` starts with."""
    return dict(rows[max((key for key in rows if target.startswith(key)), key=len)])
