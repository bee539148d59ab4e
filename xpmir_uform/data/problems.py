"""What a model is evaluated on: queries, documents and which are relevant; items whose right choice is known.

Letters: Q queries, D documents.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from experimaestro import Config

from xpmir_uform.data.batch.duplicates import hash_things
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One search problem.

    Args:
        queries: Q items.
        documents: D items.
        relevant: for each query, the numbers of its relevant documents, at least one, each once.
    """

    queries: list[Item]
    documents: list[Item]
    relevant: list[list[int]]

    def __post_init__(self):
        if not self.queries or not self.documents:
            raise ValueError(
                f"{len(self.queries)} queries and {len(self.documents)} documents, expected at least one of each"
            )
        if len(self.relevant) != len(self.queries):
            raise ValueError(
                f"relevant has {len(self.relevant)} rows, expected one for each of {len(self.queries)} queries"
            )
        for place, (query, numbers) in enumerate(zip(self.queries, self.relevant, strict=True)):
            name = f"query {place}, {described(query)}"
            if not numbers:
                raise ValueError(f"{name}, has no relevant document: leave it out, or add a document that answers it")
            if len(set(numbers)) != len(numbers):
                raise ValueError(f"{name}, has the relevant documents {numbers}, expected each once")
            if not all(0 <= number < len(self.documents) for number in numbers):
                expected = f"numbers from 0 to {len(self.documents) - 1}"
                raise ValueError(f"{name}, has the relevant documents {numbers}, expected {expected}")

    def distinct(self) -> "Distinct":
        """The same problem, each thing once: relevance is a matter of content, as attraction is in training.

        Items of one modality with equal bytes are one query or one document, and what is relevant to any of equal
        queries is relevant to the one. The order follows from the contents, so that what is computed in it does not
        depend on the order in which a data set lists them. What is merged is logged.
        """
        queries, query_numbers = _things(self.queries)
        documents, document_numbers = _things(self.documents)
        for name, firsts, items in (("queries", queries, self.queries), ("documents", documents, self.documents)):
            if len(firsts) < len(items):
                logger.warning("%d of %d %s repeat another and are merged", len(items) - len(firsts), len(items), name)
        relevant: list[set[int]] = [set() for _ in queries]
        for query, numbers in zip(query_numbers, self.relevant, strict=True):
            relevant[query].update(document_numbers[numbers].tolist())
        problem = Retrieval(
            [self.queries[first] for first in queries],
            [self.documents[first] for first in documents],
            [sorted(numbers) for numbers in relevant],
        )
        return Distinct(problem, query_numbers, documents)


class Distinct(NamedTuple):
    """A search problem of which each thing is listed once.

    Args:
        problem: Q' distinct queries and D' distinct documents.
        queries: (Q,) int64, the number in ``problem`` of each query that was given.
        documents: (D',) int64, the number that each document of ``problem`` was given under: the first of its equals.
    """

    problem: Retrieval
    queries: np.ndarray
    documents: np.ndarray


def described(query: Item, longest: int = 80) -> str:
    """A query in a message: the text, or what a file is."""
    if query.modality is not Modality.TEXT:
        return str(query)
    text = query.content.decode("utf-8", "replace")
    return repr(text if len(text) <= longest else text[:longest] + "...")


def hash_items(items: Sequence[Item]) -> np.ndarray:
    """(N, 2) int64, equal where items are the same; see :func:`~xpmir_uform.data.batch.duplicates.hash_things`."""
    return hash_things((item.modality for item in items), (item.content for item in items))


def _things(items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
    """(U,) int64 the first item of each thing, in the order of their hashes, and (N,) the thing of each item."""
    _, firsts, numbers = np.unique(hash_items(items), axis=0, return_index=True, return_inverse=True)
    return firsts, numbers.reshape(-1)


class RetrievalSet(Config, ABC):
    """Describes a search problem."""

    __xpmid__ = "uform.retrieval-set"

    @abstractmethod
    def load(self) -> Retrieval:
        """The queries, the documents and their relevance, the same at every call."""


def right(choices: bytes, choice: bytes) -> tuple[float, ...]:
    """The targets of ``choices`` of which ``choice``, one byte, is right."""
    return tuple(float(byte == ord(choice)) for byte in choices)


class ChoiceSet(Config, ABC):
    """Describes held-out items whose right answers are known."""

    __xpmid__ = "uform.choice-set"

    @abstractmethod
    def load(self) -> list[Item]:
        """The items, the same at every call. All offer equally many choices; the target of the right one is 1."""
