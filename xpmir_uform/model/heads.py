"""Heads: what a model answers from the encoder's final-norm states, as configurations of the model."""

from collections.abc import Mapping

from experimaestro import Config, Param
from torch import nn

from xpmir_uform.base.configuration import default
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.model.head_modules import WIDTH_MULTIPLE, Pooling, TokenProjection, check_head

BYTE_VALUES = 256


class PooledHead(Config):
    """The mean of an item's final-norm states, projected; with a learned temperature and bias of each group."""

    __xpmid__ = "uform.pooled-head"

    width: Param[int] = default(256)
    """Coordinates of an embedding."""

    groups: Param[int] = default(1)
    """Number of temperature groups that items may name."""

    inverse_temperature: Param[float] = default(10.0)
    """Initial factor of the cosine."""

    bias: Param[float] = default(-10.0)
    """Initial value added to the scaled cosine."""

    max_inverse_temperature: Param[float] = default(100.0)
    """Bound of the learned factor."""

    def __validate__(self):
        check_head(self.width, self.groups, self.inverse_temperature, self.max_inverse_temperature)

    def build(self, hidden: int) -> Pooling:
        """The module, for states of width ``hidden``."""
        return Pooling(
            hidden, self.width, self.groups, self.inverse_temperature, self.bias, self.max_inverse_temperature
        )


class TokenHead(Config):
    """A unit vector of each token, for late interaction (ColBERT, Khattab and Zaharia, SIGIR 2020, section 3.2)."""

    __xpmid__ = "uform.token-head"

    width: Param[int] = default(128)
    """Coordinates of a token vector, a multiple of 8."""

    def __validate__(self):
        if self.width < 1 or self.width % WIDTH_MULTIPLE:
            raise ValueError(f"width of the token head is {self.width}: expected a multiple of {WIDTH_MULTIPLE}")

    def build(self, hidden: int) -> TokenProjection:
        """The module, for states of width ``hidden``."""
        return TokenProjection(hidden, self.width)


class ByteHead(Config):
    """Logits of the 256 byte values, of a masked place of a text or of an answer slot."""

    __xpmid__ = "uform.byte-head"

    def build(self, hidden: int) -> nn.Module:
        """The module, from (n, hidden) states to (n, 256) logits."""
        return nn.Linear(hidden, BYTE_VALUES, bias=False)


class PatchHead(Config):
    """The values of a masked patch, tube or chunk, in every modality that the model reads beside text."""

    __xpmid__ = "uform.patch-head"

    def build(self, hidden: int, patch_values: Mapping[Modality, int]) -> nn.ModuleDict:
        """The modules by the modality's name in lower case, from (n, hidden) states to (n, P) values each."""
        return nn.ModuleDict(
            {m.name.lower(): nn.Linear(hidden, count, bias=False) for m, count in sorted(patch_values.items())}
        )
