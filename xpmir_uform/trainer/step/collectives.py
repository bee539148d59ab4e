"""What the ranks of one step tell one another.

The global batch is in rank order: rank r owns the items ``shares[r]``, which follow one another. Every collective call
of a step is made by every rank, whatever its own share and its own microbatches, and also when its memory ran out.

Letters: N items of the global batch, n items of this rank, d embedding width, R ranks.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from xpmir_uform.batching.memory_probe import is_out_of_memory

T = TypeVar("T")


class Ranks:
    """One rank among R.

    Args:
        rank: this one.
        count: R; 1 makes every method answer what it is given.
        device: where what is exchanged must lie: some process groups know no other.
    """

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.count = count
        self.device = torch.device(device)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a vector over the ranks, on the vector's device."""
        if self.count == 1:
            return values
        sent = values.to(self.device, copy=True)
        dist.all_reduce(sent)
        return sent.to(values.device)

    def gather(self, rows: torch.Tensor, shares: Sequence[range]) -> torch.Tensor:
        """(N, d): the rows of every rank, from this rank's (n, d)."""
        if self.count == 1:
            return rows
        most = max(len(share) for share in shares)
        mine = pad(rows, (0, 0, 0, most - len(rows))).contiguous()
        blocks = [torch.empty_like(mine) for _ in shares]
        dist.all_gather(blocks, mine)
        return torch.cat([block[: len(share)] for block, share in zip(blocks, shares, strict=True)])

    def scatter_sum(self, rows: torch.Tensor, shares: Sequence[range]) -> torch.Tensor:
        """(n, d): this rank's rows of the sum over the ranks of (N, d)."""
        if self.count == 1:
            return rows
        most = max(len(share) for share in shares)
        blocks = [pad(rows[share.start : share.stop], (0, 0, 0, most - len(share))).contiguous() for share in shares]
        mine = torch.empty_like(blocks[0])
        dist.reduce_scatter(mine, blocks)
        return mine[: len(shares[self.rank])]

    def broadcast(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        """``values`` of the rank ``owner``, written over those of the others."""
        dist.broadcast(values, src=owner)
        return values

    def sum_at(self, values: torch.Tensor, owner: int) -> None:
        """Makes ``values`` of the rank ``owner`` the sum over the ranks; those of the others are then undefined."""
        dist.reduce(values, dst=owner)

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, RuntimeError | None]:
        """What ``work`` answers, or the error by which memory ran out, which the other ranks must hear of first."""
        try:
            return work(), None
        except RuntimeError as error:
            if self.count == 1 or not is_out_of_memory(error):
                raise
            return None, error
