"""Whether a document is relevant to a query, as a choice between yes and no that a text of both offers.

Letters: P pairs, M wrong documents of each.
"""

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
from experimaestro import Config, Constant, Meta, Param
from safetensors.numpy import load

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import check_sha256, default
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.problems import ChoiceSet, right
from xpmir_uform.data.sampling import BagSource
from xpmir_uform.datasets.pairs import Pair, PairCollection
from xpmir_uform.datasets.splits import kin

CHOICES = b"yn"


def wrong_documents(pairs: Sequence[Pair], count: int) -> np.ndarray:
    """(P, M) int64: for each pair the numbers of ``count`` pairs that are no kin of it, keyed by its name.

    Kin (:mod:`~xpmir_uform.datasets.splits`) share a query or a document, so that the document of one may be
    another right answer to the query of the other.

    Raises:
        ValueError: all pairs are kin.
    """
    families = kin(pair.contents for pair in pairs)
    if len(set(families)) < 2:
        raise ValueError(
            f"the {len(pairs)} pairs share their queries or documents, expected at least two without a text in common"
        )
    return np.array(
        [_others(families, family, pair, count) for family, pair in zip(families, pairs, strict=True)], dtype=np.int64
    ).reshape(len(pairs), count)


def _others(families: np.ndarray, own: int, pair: Pair, count: int) -> list[int]:
    draw = keyed_random.generator(0, keyed_random.Purpose.SPLIT, 3, keyed_random.key_of("wrong-document", pair.name))
    found: list[int] = []
    while len(found) < count:
        number = int(draw.integers(len(families)))
        if families[number] != own:
            found.append(number)
    return found


def question(query: str, document: str, targets: tuple[float, ...]) -> Item:
    """A text of both, one line each."""
    text = f"{query}\n{document}"
    return Item.text(text, keyed_random.key_of("relevance", text), choices=CHOICES, targets=targets)


def questions(pairs: Sequence[Pair]) -> list[Item]:
    """The query of each pair with its document, and with a wrong one: as many yes as no."""
    wrong = wrong_documents(pairs, 1)[:, 0]
    return [
        question(pair.query, document.document, right(CHOICES, answer))
        for pair, other in zip(pairs, wrong, strict=True)
        for document, answer in ((pair, b"y"), (pairs[other], b"n"))
    ]


class Judgements(Config):
    """What a teacher thinks of the training pairs: a file that a task writes, which is part of the identifier.

    The file holds ``others`` (P, M) int64, the numbers of other pairs; ``probabilities`` (P, 1 + M) float32, that the
    pair's own document and each of theirs is relevant; and ``echoes`` (P, 1 + M) float32, the same of their queries.
    """

    __xpmid__ = "uform.judgements"

    collection: Param[PairCollection]
    """Where the pairs come from"""

    path: Meta[Path]
    """The file, of safetensors"""

    sha256: Param[str] = default("")
    """Of the file; empty: the task that writes it names its content"""

    def __validate__(self):
        if not self.sha256 and cast(Any, self).__xpm__.task is None:
            raise ValueError(
                f"nothing names the content of {self.path}, expected its sha256, or the output of RelevanceScoring"
            )
        if self.sha256:
            check_sha256("sha256", self.sha256)

    def read(self) -> dict[str, np.ndarray]:
        """The arrays of the file.

        Raises:
            ValueError: it is not the one that ``sha256`` names.
        """
        data = Path(self.path).read_bytes()
        found = sha256(data).hexdigest()
        if self.sha256 and found != self.sha256:
            raise ValueError(f"{self.path} has the sha256 {found}, expected {self.sha256}: restore that file")
        return load(data)


class RelevanceBags(BagSource):
    """A bag is a training query with its document, and again with a wrong one; the targets are a teacher's answers.

    In an *echo* queries stand in for the documents, so that the relevant one repeats the query: the plainest example of
    two lines that belong together.
    """

    __xpmid__ = "uform.relevance-bags"

    judgements: Param[Judgements]
    """The teacher's answers"""

    echo: Param[float] = default(0.0)
    """Share of the bags that are echoes"""

    def __validate__(self):
        if not 0 <= self.echo <= 1:
            raise ValueError(f"echo is {self.echo}, expected a share, from 0 to 1")

    @cached_property
    def pairs(self) -> list[Pair]:
        """The training pairs."""
        return self.judgements.collection.train()

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        """What the teacher wrote."""
        return self.judgements.read()

    def __len__(self) -> int:
        return len(self.pairs)

    def bag(self, index: int, seed: int, epoch: int) -> Bag:
        """The bag of one pair; whether it is an echo, and the wrong document, are keyed by (seed, epoch, pair)."""
        pair, others = self.pairs[index], self.table["others"][index]
        draw = keyed_random.generator(
            seed, keyed_random.Purpose.BAG, epoch, keyed_random.key_of("relevance", pair.name)
        )
        echo, place = draw.random() < self.echo, int(draw.integers(len(others)))
        told = self.table["echoes" if echo else "probabilities"][index]
        both = (pair, told[0]), (self.pairs[others[place]], told[1 + place])
        texts = ((other.query if echo else other.document, float(yes)) for other, yes in both)
        return Bag(tuple(question(pair.query, text, (yes, 1 - yes)) for text, yes in texts))


class RelevanceChoices(ChoiceSet):
    """The held-out pairs' :func:`questions`."""

    __xpmid__ = "uform.relevance-choices"

    collection: Param[PairCollection]
    """Where the pairs come from"""

    version: Constant[int] = 2
    """Of the wrong documents: 2 draws none that may be right"""

    def load(self) -> list[Item]:
        """Pair after pair, the right document first."""
        return questions(self.collection.test())
