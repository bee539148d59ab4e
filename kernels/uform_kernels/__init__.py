"""Losses of embeddings as tiled kernels: pair losses, late interaction, choices. torch and, where there is one, triton.

Usable on its own. Each operation has a plain definition (`reference`), a tiled form for any device (`chunked`) and
a Triton form (`triton`); importing this package imports no triton, which a call does when it runs there.
"""

from uform_kernels.edges import Edges, check_disjoint, check_edges
from uform_kernels.ops.choice_loss import choice_loss
from uform_kernels.ops.maxsim import maxsim
from uform_kernels.ops.pair_loss import Normalizers, PairLoss, pair_loss, pair_normalizers

__all__ = [
    "Edges",
    "Normalizers",
    "PairLoss",
    "check_disjoint",
    "check_edges",
    "choice_loss",
    "maxsim",
    "pair_loss",
    "pair_normalizers",
]
