"""Token vectors: what late interaction compares.

Letters: n tokens, H hidden, W width of a token vector.
"""

import torch
from torch import Tensor, nn

WIDTH_MULTIPLE = 8


def unit(rows: Tensor) -> Tensor:
    """Rows (n, W) of length one, formed in float32 or wider; a zero row stays zero and has gradient zero."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    squares = wide.square().sum(dim=1, keepdim=True)
    empty = squares == 0
    return torch.where(empty, 0.0, wide * torch.where(empty, 1.0, squares).rsqrt())


class TokenProjection(nn.Module):
    """Unit vectors of tokens.

    Args:
        hidden: H.
        width: W, a multiple of 8.
    """

    def __init__(self, hidden: int, width: int = 128):
        super().__init__()
        self.projection = nn.Linear(hidden, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """(n, W) unit vectors, float32 or wider, of states (n, H)."""
        return unit(self.projection(states))
