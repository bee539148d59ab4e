"""Retrieval sets: queries, documents and which are relevant.

Letters: Q queries, D documents.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from experimaestro import Config

from xpmir_uform.data.items import Item


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
        for query, numbers in zip(self.queries, self.relevant, strict=True):
            if not numbers or len(set(numbers)) != len(numbers):
                raise ValueError(f"query {query}: relevant is {numbers}, expected at least one document, each once")
            if not all(0 <= number < len(self.documents) for number in numbers):
                raise ValueError(f"query {query}: relevant is {numbers}, expected numbers below {len(self.documents)}")


class RetrievalSet(Config, ABC):
    """Describes a search problem."""

    __xpmid__ = "uform.retrieval-set"

    @abstractmethod
    def load(self) -> Retrieval:
        """The queries, the documents and their relevance, the same at every call."""
