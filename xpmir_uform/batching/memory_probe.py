"""Measuring the memory of a forward and backward pass, and what there is of it."""

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from xpm_torch.batchers import is_oom_error

from xpmir_uform.batching.cost import Probe

logger = logging.getLogger(__name__)

LONGEST = 256
"""Tokens of the longest item of a probe, unless items are shorter."""

ENLARGED = 8
"""On a GPU probes are also run this many times as large: its temporary buffers do not show in small ones."""

GRAIN = 2**27
"""What is reachable is rounded down to 128 MiB, so that a run that is resumed mostly plans as before."""

Run = Callable[[Sequence[int]], None]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on a GPU of any make or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or is_oom_error(error)


def saved_bytes(run: Callable[[], object]) -> int:
    """Bytes that autograd saves for the backward pass of ``run``, exact and without noise.

    Each storage counts once, however many tensors view it, and only if it is gone when ``run`` is: parameters, which
    are saved too, outlive the graph. The same count is made of fake tensors.
    """
    found: dict[StorageWeakRef, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found.setdefault(StorageWeakRef(storage), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(size for storage, size in found.items() if storage.expired())


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """What ``run`` allocated at most on a CUDA device, beyond what was allocated before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def measure(run: Callable[[], object], device: torch.device) -> int:
    """Bytes of a forward and backward pass: the allocator's peak on CUDA, elsewhere what autograd saves."""
    return peak_bytes(run, device) if device.type == "cuda" else saved_bytes(run)


def gradient_bytes(run: Callable[[], object], device: torch.device) -> int:
    """What the first pass leaves allocated on a CUDA device: gradients, and what libraries keep; elsewhere 0.

    It belongs to every step, but not to the peaks of later probes, which add to gradients that exist.
    """
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.memory_allocated(device) - before


def probe_lengths(longest: int, device: torch.device) -> list[tuple[int, ...]]:
    """Probes that tell the terms of the cost model apart: one item and many; long, short and, as in training, mixed.

    Args:
        longest: most tokens of one item; 0: unknown.
    """
    top = min(longest or LONGEST, 4 * LONGEST)
    short, tiny = max(1, top // 4), max(1, top // 32)
    mixed = tuple(range(max(1, top // 8), top + 1, max(1, top // 8)))
    small = [(tiny,), (top,), (short,) * 16, (tiny,) * 64, mixed, (tiny, short, top) * 2]
    return small + [lengths * ENLARGED for lengths in small] if device.type == "cuda" else small


def probe(run: Run, lengths: Sequence[Sequence[int]], device: torch.device) -> list[Probe]:
    """Measures ``run`` on items of each of ``lengths``; those that do not fit into memory are left out.

    Args:
        run: one forward and backward pass, which adds to gradients and does not clear them.
    """
    kept = gradient_bytes(partial(run, lengths[0]), device)
    probes = []
    for items in lengths:
        try:
            probes.append(Probe(tuple(items), kept + measure(partial(run, items), device)))
            continue
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        logger.warning("a probe of %d items, %d tokens does not fit into memory", len(items), sum(items))
        release(device)
    return probes


def release(device: torch.device) -> None:
    """Gives back what nothing uses, such as the graph of a pass that failed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reachable(device: torch.device) -> int:
    """Bytes that this process could have allocated on a CUDA device, in all; a multiple of ``GRAIN``.

    The driver's free memory leaves out what the caching allocator holds and would reuse.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) // GRAIN * GRAIN


def budget(device: torch.device, fraction: float, reach: int | None = None) -> float:
    """Bytes that a microbatch may take now; without bound where the device does not tell.

    Args:
        fraction: of what is reachable and not allocated.
        reach: an earlier answer of :func:`reachable`, so that other processes do not change plans.
    """
    if device.type != "cuda":
        return float("inf")
    whole = reachable(device) if reach is None else reach
    return max(0.0, fraction * (whole - torch.cuda.memory_allocated(device)))
