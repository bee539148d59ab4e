"""What memory a microbatch takes: a linear model in named terms.

Attention that saves no (L, L) matrix, as torch's fused kernels on CPU and CUDA do, needs no term in squared lengths,
and the fit then finds about zero for it; the plain kernel, which torch falls back to in float64 on CUDA, does.

Letters: B bags, P probes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from xpmir_uform.batching.bag_sizes import Sizes


class Probe(NamedTuple):
    """A measurement: what a microbatch of items of these lengths took, in bytes."""

    lengths: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Bytes of a microbatch: ``tokens * sum(L) + squares * sum(L^2) + items * count(L) + constant``.

    Without coefficients, each token costs one and nothing else does: the model of a microbatch whose memory is not
    bounded.
    """

    tokens: float = 1.0
    squares: float = 0.0
    items: float = 0.0
    constant: float = 0.0

    def predict(self, lengths: Sequence[int]) -> float:
        """Bytes of a microbatch of items of these lengths."""
        return float(np.dot(terms(lengths), astuple(self)))

    def of_bags(self, sizes: Sizes) -> np.ndarray:
        """(B,) bytes that each bag adds to a microbatch; the constant comes on top, once."""
        return self.tokens * sizes.tokens + self.squares * sizes.squares + self.items * sizes.items

    def to_json(self) -> str:
        """The coefficients by name, exactly."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """What :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def terms(lengths: Sequence[int]) -> np.ndarray:
    """(4,) float64: the factors of the coefficients, in the order of the fields of :class:`CostModel`."""
    values = np.asarray(lengths, dtype=np.float64)
    return np.array([values.sum(), values @ values, len(values), 1.0])


def fit(probes: Sequence[Probe]) -> CostModel:
    """The non-negative coefficients of least squared relative error.

    Relative, because small and large microbatches are to be predicted equally well; non-negative, because a term that
    saves memory is an artefact of noise that would grow with the microbatch.

    Raises:
        ValueError: no probe, or one that took no memory.
    """
    if not probes or min(probe.bytes for probe in probes) <= 0:
        raise ValueError(f"the probes are {list(probes)}, expected at least one, each of more than 0 bytes")
    relative = np.stack([terms(probe.lengths) / probe.bytes for probe in probes])
    scale = relative.max(axis=0)
    coefficients, _ = nnls(relative / scale, np.ones(len(probes)))
    return CostModel(*(float(value) for value in coefficients / scale))
