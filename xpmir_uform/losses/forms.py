"""The three forms that turn a row of scores into a loss."""

from experimaestro import Config


class PairForm(Config):
    """How the scores of an anchor's attract and repel cells become a loss."""

    __xpmid__ = "uform.pair-form"

    NAME: str
    """The name that the kernel knows it by"""


class BalancedForm(PairForm):
    """Weighted mean over all attract cells plus weighted mean over all repel cells, of softplus of the signed score."""

    __xpmid__ = "uform.balanced-form"

    NAME = "balanced"


class SigmoidForm(PairForm):
    """Mean over anchors of their summed signed softplus (SigLIP, Zhai et al., ICCV 2023, section 3.2)."""

    __xpmid__ = "uform.sigmoid-form"

    NAME = "sigmoid"


class RankedForm(PairForm):
    """Mean over anchors of the pairwise logistic loss of attract against repel cells (RankNet, Burges et al., 2005)."""

    __xpmid__ = "uform.ranked-form"

    NAME = "ranked"
