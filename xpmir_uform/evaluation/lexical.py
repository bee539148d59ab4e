"""BM25: what words alone find, to stand beside trained models."""

import unicodedata
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
from experimaestro import Constant, Param, Task, pathgenerator

from xpmir_uform.base.configuration import CheckedTask, default
from xpmir_uform.data.items import Item
from xpmir_uform.data.problems import RetrievalSet
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.evaluation.results import write_each
from xpmir_uform.evaluation.retrieval import evaluate
from xpmir_uform.evaluation.search import UNRANKED, Order, Ranking


def words(text: str) -> list[str]:
    """The words of a text, normalised (NFKC) and case-folded: what Unicode's word boundaries (UAX #29) part.

    Only what holds a letter or a digit is a word. Ideographs, and letters of scripts without spaces such as Thai, are
    words of their own.
    """
    regex = _library("regex")
    parts = regex.split(r"(?V1w)\b", unicodedata.normalize("NFKC", text).casefold())
    return [part for part in parts if regex.search(r"[\p{L}\p{N}]", part)]


def bm25_ranking(order: Order, k1: float, b: float, depth: int) -> Ranking:
    """(Q, min(depth, D)) documents by BM25 (Robertson and Zaragoza, 2009), by the library bm25s.

    No word is left out or stemmed; see :func:`words`. A document without a word of the query is not ranked.

    Raises:
        ValueError: an item is no text.
    """
    bm25s = _library("bm25s")
    problem = order.problem
    queries, documents = ([words(_text(item)) for item in items] for items in (problem.queries, problem.documents))
    scores = torch.zeros(len(queries), len(documents))
    if any(documents):
        index = bm25s.BM25(k1=k1, b=b)
        index.index(documents, show_progress=False)
        for row, query in zip(scores, queries, strict=True):
            if query:
                row.copy_(torch.from_numpy(index.get_scores(query)))
    listed = torch.arange(len(documents)).expand_as(scores).masked_fill(scores == 0, UNRANKED)
    return Ranking(torch.cat([order.best_first(rows, scores[rows], depth, listed[rows]) for rows in order.blocks()]))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed: pip install 'xpmir-uform[demo-text]'") from error


def _text(item: Item) -> str:
    if item.modality != Modality.TEXT:
        raise ValueError(f"{item}: BM25 reads texts alone")
    try:
        return item.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{item} is not UTF-8 ({error.reason})") from error


class LexicalEvaluation(CheckedTask, Task):
    """Measures BM25 on search problems, as ``RetrievalEvaluation`` measures a model."""

    __xpmid__ = "uform.lexical-evaluation"

    retrievals: Param[dict[str, RetrievalSet]]
    """The search problems by name"""

    k1: Param[float] = default(0.9)
    """How soon a repeated word counts no more"""

    b: Param[float] = default(0.4)
    """How much long documents are held back"""

    depth: Param[int] = default(10)
    """How many of each query's documents are recorded"""

    resultspath: Annotated[Path, pathgenerator("results.json")]
    """By problem: the measures, those of chance, and each query's first documents"""

    version: Constant[int] = 2
    """Of the rules by which words are found and documents ordered and measured"""

    def __validate__(self):
        if not 0 <= self.k1 < float("inf") or not 0 <= self.b <= 1 or self.depth < 1:
            given = f"k1 is {self.k1}, b {self.b} and depth {self.depth}"
            raise ValueError(f"{given}, expected k1 finite and at least 0, b from 0 to 1, and depth at least 1")

        if self.k1 == 0 and self.b != type(self).__xpmtype__.arguments["b"].default:
            raise ValueError(f"b is {self.b}, which changes nothing where k1 is 0: leave it out")

    def execute(self) -> None:
        """Writes the results."""
        write_each(self.resultspath, self.retrievals, self.evaluate)

    def evaluate(self, name: str) -> dict[str, Any]:
        """The results of one problem."""
        retrieval = self.retrievals[name].load()
        return evaluate(retrieval, lambda order, depth: bm25_ranking(order, self.k1, self.b, depth), self.depth)
