"""Settings of experiments on pairs of a query and a document."""

import sys
from pathlib import Path

from experimaestro.experiments import configuration

from xpmir_uform.datasets.emoji import EmojiCollection
from xpmir_uform.datasets.packages import CannotFetch, PackagePairs
from xpmir_uform.datasets.pairs import EmojiPairs, PairCollection
from xpmir_uform.losses.contrastive import Negatives
from xpmir_uform.losses.late_interaction import LateInteractionLoss
from xpmir_uform.model import TokenHead
from xpmir_uform.recipes.settings import form_of

SOURCES = ("packages", "emoji")


@configuration
class PairSettings:
    """Where the pairs come from."""

    source: str = "packages"
    """``packages``: descriptions of Debian's programs, or emoji where those cannot be had; ``emoji``: names of emoji"""

    document_bytes: int = 128
    """Longest description"""

    held_out: int = 500
    """Pairs, or emoji, that are kept from training"""

    limit: int = 0
    """Pairs, or emoji, in all; 0: every one"""

    def collection(self, folder: Path) -> PairCollection:
        """The pairs; descriptions are kept in ``folder`` below a workspace, and fetched if they are not there.

        Raises:
            ValueError: ``source`` is none of those.
        """
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}, expected one of {', '.join(SOURCES)}")
        if self.source == "packages":
            try:
                return PackagePairs.fetched(
                    folder / "packages", document_bytes=self.document_bytes, held_out=self.held_out, limit=self.limit
                )
            except (CannotFetch, ModuleNotFoundError) as error:
                print(f"Names of emoji stand in for the descriptions of programs: {error}", file=sys.stderr)
        return EmojiPairs.C(collection=EmojiCollection.installed(held_out=self.held_out, limit=self.limit))


@configuration
class InteractionSettings:
    """Late interaction of a query with every document of the batch."""

    width: int = 32
    """Width of a token vector, a multiple of 8"""

    form: str = "ranked"
    """How a row of scores becomes a loss"""

    inverse_temperature: float = 10.0
    """Factor of the scores"""

    def head(self) -> TokenHead:
        """What the model needs."""
        return TokenHead.C(width=self.width)

    def loss(self) -> LateInteractionLoss:
        """The loss; a pair names no other document, so that the batch's others are its negatives."""
        # The ranked form does not know a bias; in others a score is zero half way.
        bias = {} if self.form == "ranked" else {"bias": -self.inverse_temperature / 2}
        return LateInteractionLoss.C(
            form=form_of(self.form),
            negatives=Negatives.AMBIENT,
            inverse_temperature=self.inverse_temperature,
            **bias,
        )
