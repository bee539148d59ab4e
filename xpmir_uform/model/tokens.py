"""Token vectors: what late interaction compares.

Letters: n tokens, H hidden, W width of a token vector.
"""

import torch
from torch import Tensor, nn

WIDTH_MULTIPLE = 8


def unit(rows: Tensor) -> Tensor:
    """Rows (n, W) of length one, formed in float32 or wider; a zero row stays zero and has gradient zero.

    Rows are divided by a power of two first, which changes no bit but those that would overflow or vanish when squared.
    A row of subnormal numbers alone counts as zero, as in ``uform_kernels``: some devices take them for zeros.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = wide.detach().abs().amax(dim=1, keepdim=True)
    real = ~(largest < torch.finfo(wide.dtype).tiny)  # true of NaN, which is to stay NaN
    exponents = torch.frexp(torch.where(real, largest, 1.0)).exponent - 1
    scaled = torch.where(real, wide, 0.0) / torch.exp2(exponents.to(wide.dtype))
    squares = scaled.square().sum(dim=1, keepdim=True)
    return torch.where(real, scaled * torch.where(real, squares, 1.0).rsqrt(), 0.0)


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
