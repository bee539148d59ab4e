"""Heads: what a model answers from the encoder's final-norm states, as configurations of the model."""

from experimaestro import Config, Param

from xpmir_uform.data.fields import default
from xpmir_uform.model.pooling import Pooling, check_head


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
