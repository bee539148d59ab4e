"""Pairs of texts: a query and the document that it names, for search in which each query has one answer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from experimaestro import Config, Constant, Param

from xpmir_uform.base import keyed_random
from xpmir_uform.base.configuration import default
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.problems import Retrieval, RetrievalSet
from xpmir_uform.data.sampling import BagSource
from xpmir_uform.data.vocabulary import Side
from xpmir_uform.datasets.emoji import EmojiCollection


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and its document.

    Args:
        name: of the pair.
        query, document: the texts.
        key: of what the pair is about, as that of a bag: pairs of one key never repel. None: nothing else is.
    """

    name: str
    query: str
    document: str
    key: int | None = None

    @property
    def contents(self) -> tuple[str, str]:
        """What makes pairs kin, whichever of them asks and whichever answers."""
        return self.query, self.document

    def items(self) -> tuple[Item, Item]:
        """The query and the document as items that know their sides."""
        return (
            Item.text(self.query, keyed_random.key_of("pair-query", self.name), side=Side.QUERY),
            Item.text(self.document, keyed_random.key_of("pair-document", self.name), side=Side.DOCUMENT),
        )

    def bag(self) -> Bag:
        """The two items, which attract each other."""
        return Bag.alike(self.items(), self.key)


class PairCollection(Config, ABC):
    """Pairs, split into training and held-out ones."""

    __xpmid__ = "uform.pair-collection"

    @abstractmethod
    def train(self) -> list[Pair]:
        """The pairs to train on."""

    @abstractmethod
    def test(self) -> list[Pair]:
        """The held-out pairs."""


class EmojiPairs(PairCollection):
    """The English name of an emoji by its name in another language, each emoji once with each language."""

    __xpmid__ = "uform.emoji-pairs"

    collection: Param[EmojiCollection]
    """Where the emoji come from"""

    version: Constant[int] = 2
    """Of the pairs: 2 knows that those of one emoji are about one thing, whose names do not repel each other"""

    def train(self) -> list[Pair]:
        """The pairs of the training emoji."""
        return self._pairs(self.collection.train(), self.collection.languages[1:])

    def test(self) -> list[Pair]:
        """The held-out emoji by the first language after English: documents that differ."""
        return self._pairs(self.collection.test(), self.collection.languages[1:2])

    def _pairs(self, emoji, languages) -> list[Pair]:
        first = self.collection.languages[0]
        return [
            Pair(f"{lang} {e.characters}", e.names[lang], e.names[first], e.key) for e in emoji for lang in languages
        ]


class PairBags(BagSource):
    """A bag is a query and its document, which attract each other."""

    __xpmid__ = "uform.pair-bags"

    collection: Param[PairCollection]
    """Where the pairs come from"""

    @cached_property
    def pairs(self) -> list[Pair]:
        """The training pairs."""
        return self.collection.train()

    def __len__(self) -> int:
        return len(self.pairs)

    def bag(self, index: int, seed: int, epoch: int) -> Bag:
        """The bag of one pair, the same in every epoch."""
        return self.pairs[index].bag()


class PairRetrieval(RetrievalSet):
    """Held-out documents by their queries; each query has one relevant document."""

    __xpmid__ = "uform.pair-retrieval"

    collection: Param[PairCollection]
    """Where the pairs come from"""

    limit: Param[int] = default(0)
    """Take this many held-out pairs; 0: every one"""

    def __validate__(self):
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, expected at least 0; 0 takes every pair")

    def load(self) -> Retrieval:
        """The held-out queries and documents.

        Raises:
            ValueError: none is held out.
        """
        pairs = self.collection.test()
        if not pairs:
            raise ValueError("the collection holds out no pair, which a search problem needs: let it hold out some")
        queries, documents = zip(*(pair.items() for pair in pairs[: self.limit or None]), strict=True)
        return Retrieval(list(queries), list(documents), np.arange(len(queries))[:, None].tolist())
