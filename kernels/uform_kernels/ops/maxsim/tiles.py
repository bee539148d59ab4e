"""Block sizes of the Triton kernels of MaxSim, by kernel, element size and architecture.

BQ query tokens, BD document tokens, BW coordinates, BE entries and BT query tokens gathered at once, BS documents.
"""

from typing import Any

from torch import Tensor

from uform_kernels.targets import architecture, row_for

# (kernel, bytes of an element): architecture or its first letters -> block sizes, warps, stages. An H200 is sm_90.
# Chosen by counts and by what compiles without spills; `benchmarks/tune_kernels.py` finds better rows on a device.
TABLE: dict[tuple[str, int], dict[str, dict[str, int]]] = {
    ("forward", 2): {
        "sm_": {"BQ": 128, "BD": 64, "num_warps": 8, "num_stages": 2},
        "gfx": {"BQ": 128, "BD": 64, "num_warps": 8, "num_stages": 1},
    },
    ("forward", 4): {
        "sm_": {"BQ": 64, "BD": 64, "BW": 32, "num_warps": 8, "num_stages": 2},
        "gfx": {"BQ": 64, "BD": 64, "BW": 32, "num_warps": 4, "num_stages": 1},
    },
    ("listed", 2): {
        "sm_": {"BQ": 32, "BD": 64, "num_warps": 4, "num_stages": 2},
        "gfx": {"BQ": 32, "BD": 64, "num_warps": 4, "num_stages": 1},
    },
    ("listed", 4): {
        "sm_": {"BQ": 32, "BD": 32, "BW": 32, "num_warps": 4, "num_stages": 2},
        "gfx": {"BQ": 32, "BD": 64, "BW": 32, "num_warps": 4, "num_stages": 1},
    },
    ("query gradient", 2): {"": {"BE": 16, "num_warps": 4, "num_stages": 2}},
    ("query gradient", 4): {"": {"BE": 16, "num_warps": 4, "num_stages": 2}},
    ("document gradient", 2): {
        "sm_": {"BD": 64, "BT": 64, "num_warps": 4, "num_stages": 2},
        "gfx": {"BD": 64, "BT": 64, "num_warps": 4, "num_stages": 1},
    },
    ("document gradient", 4): {
        "sm_": {"BD": 64, "BT": 32, "num_warps": 8, "num_stages": 1},
        "gfx": {"BD": 64, "BT": 32, "num_warps": 4, "num_stages": 1},
    },
    ("sums", 4): {"": {"BS": 16, "BT": 32, "num_warps": 4, "num_stages": 2}},
}

# Programs that keep every unit of a large GPU busy several times over.
PROGRAMS = 2048


def launch_sizes(kernel: str, size: int, width: int, target: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Block sizes and compile options of a kernel, for elements of `size` bytes and token vectors of `width`."""
    row = row_for(TABLE[kernel, size], target)
    blocks = {name: value for name, value in row.items() if name.startswith("B")}
    options = {name: value for name, value in row.items() if not name.startswith("B")}
    if kernel != "sums":
        blocks |= {"W": width, "BW": min(blocks.get("BW", 128), max(16, 1 << (width - 1).bit_length()))}
    # Fusing a product and a sum into one rounding changes results, and its default differs between releases.
    return blocks, options | {"enable_fp_fusion": True}


def launch(kernel: str, tokens: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch over token vectors (T, W)."""
    size = 4 if kernel == "sums" else tokens.element_size()
    blocks, options = launch_sizes(kernel, size, tokens.shape[1], architecture(tokens.device))
    return blocks | options


def program_documents(blocks: int, documents: int) -> int:
    """How many documents a program of the forward pass takes, so that its query tile is loaded once for them."""
    return max(1, min(16, blocks * documents // PROGRAMS))
