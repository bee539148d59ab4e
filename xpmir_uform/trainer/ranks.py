"""What the ranks of one step tell one another.

The global batch is in rank order: rank r owns the items ``shares[r]``, which follow one another. Every collective call
of a step is made by every rank, once, whatever its own share and its own microbatches.

Letters: N items of the global batch, n items of this rank, d embedding width, R ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import pad


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
