"""The modules of heads: one embedding of each item, and its token vectors, from the encoder's final-norm states.

Letters: N items, T tokens, H hidden, W width of an embedding, G temperature groups.
"""

from math import log

import torch
from torch import Tensor, nn


def mean_of_items(states: Tensor, lengths: Tensor) -> Tensor:
    """(N, H) means of the states (T, H) of each item, summed in float64.

    In float32 the states of a long text of one repeated byte, which are all alike, add up with a relative error that
    grows with their number (1e-4 of 20,000).

    Args:
        states: in item order.
        lengths: (N,) int64, at least 1 each, with the sum T.
    """
    return torch.segment_reduce(states.double(), "mean", lengths=lengths, unsafe=True).to(states.dtype)


def check_head(width: int, groups: int, inverse_temperature: float, max_inverse_temperature: float) -> None:
    """Refuses a head that cannot be built.

    Raises:
        ValueError: naming what is wrong.
    """
    if width < 1 or groups < 1:
        raise ValueError(f"width is {width} and groups is {groups}: expected at least 1 of each")
    if not 0 < inverse_temperature <= max_inverse_temperature:
        raise ValueError(
            f"inverse_temperature is {inverse_temperature}: "
            f"expected above 0 and at most max_inverse_temperature, {max_inverse_temperature}"
        )


class Pooling(nn.Module):
    """One embedding of each item, and the temperature and bias by which embeddings of each group are compared.

    Args:
        hidden: H.
        width: W.
        groups: G.
        inverse_temperature: its initial value, in every group.
        bias: its initial value, in every group.
        max_inverse_temperature: what :meth:`clamp_temperature` keeps it below.

    Raises:
        ValueError: a size below 1, or temperatures out of order.
    """

    UNROUNDED = ("log_inverse_temperature", "bias")
    """Kept as they are where the pass computes in bfloat16, whose step at a bias of -10 is 1/16."""

    def __init__(
        self,
        hidden: int,
        width: int = 256,
        groups: int = 1,
        inverse_temperature: float = 10.0,
        bias: float = -10.0,
        max_inverse_temperature: float = 100.0,
    ):
        super().__init__()
        check_head(width, groups, inverse_temperature, max_inverse_temperature)
        self.max_inverse_temperature = max_inverse_temperature
        self.projection = nn.Linear(hidden, width, bias=False)
        self.log_inverse_temperature = nn.Parameter(torch.full((groups,), log(inverse_temperature)))
        self.bias = nn.Parameter(torch.full((groups,), float(bias)))

    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        """(N, W) embeddings, not normalised, of the items whose states (T, H) follow one another."""
        return self.projection(mean_of_items(states, lengths))

    def inverse_temperature(self) -> Tensor:
        """(G,) exp of the parameter, formed in float32 or wider, without a bound (which would cut the gradient)."""
        parameter = self.log_inverse_temperature
        return parameter.to(torch.promote_types(parameter.dtype, torch.float32)).exp()

    @torch.no_grad()
    def clamp_temperature(self) -> None:
        """Bound the inverse temperature in place; to be called after each optimizer step."""
        self.log_inverse_temperature.clamp_(max=log(self.max_inverse_temperature))


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
