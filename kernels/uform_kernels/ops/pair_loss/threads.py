"""Parts of a walk shared out over threads, so that small operations need not share out theirs.

An operation on a tile takes a fraction of a millisecond; split over threads it waits for the slowest of them, which on
a busy machine is a whole time slice, thousands of times a loss. A thread that takes whole rows of tiles waits once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from uform_kernels.ops.pair_loss.matryoshka import Gradient
from uform_kernels.ops.pair_loss.tile_order import Sums, Walk

# Each worker adds up a gradient of its own: threads beyond these work within operations again.
MOST_WORKERS = 4

Part = TypeVar("Part")


def share_out(walk: Walk, parts: Sequence[Part], work: Callable[[Walk, Sequence[Part]], None]) -> None:
    """Runs `work(walk, parts)`, on a CPU in threads that are dealt the parts, and adds up what they found.

    Which worker takes what, and the order of adding up, depend on the number of threads alone.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MOST_WORKERS, len(parts)) if walk.levels.vectors.device.type == "cpu" else 1
    if workers < 2:
        work(walk, parts)
        return
    walks = [walk, *(_fresh(walk) for _ in range(1, workers))]
    inference = torch.is_inference_mode_enabled()

    def run(number: int) -> None:
        # Both modes are a thread's own.
        with torch.inference_mode(inference), torch.no_grad():
            torch.set_num_threads(threads // workers)
            work(walks[number], dealt(parts, number, workers))

    try:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, range(workers)))
    finally:
        # Setting a worker's threads also sets those that later threads start with.
        torch.set_num_threads(threads)
    for other in walks[1:]:
        walk.sums.absorb(other.sums)
        if walk.gradient is not None and other.gradient is not None:
            walk.gradient.absorb(other.gradient)


def dealt(parts: Sequence[Part], number: int, workers: int) -> list[Part]:
    """The parts of one worker, dealt back and forth: rows of half the tiles get shorter one by one."""
    return [
        part for place, part in enumerate(parts) if number == min(turn := place % (2 * workers), 2 * workers - 1 - turn)
    ]


def _fresh(walk: Walk) -> Walk:
    """The same walk with nothing added up yet."""
    gradient = None if walk.gradient is None else Gradient(walk.levels)
    levels, rows = walk.sums.force.shape
    return replace(walk, sums=Sums(levels, rows, walk.sums.force.device), gradient=gradient)
