"""BM25: what words alone find, to stand beside trained models."""

import json
from pathlib import Path
from typing import Annotated

import torch
from experimaestro import Param, Task, pathgenerator

from xpmir_uform.data.fields import default
from xpmir_uform.data.items import Item
from xpmir_uform.data.retrieval import Retrieval, RetrievalSet
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.evaluation.retrieval import DEPTH, results


def bm25_ranking(retrieval: Retrieval, k1: float, b: float, depth: int) -> torch.Tensor:
    """(Q, min(depth, D)) int64: documents by BM25 (Robertson and Zaragoza, 2009), by the library bm25s.

    Words are lower-case runs of at least two letters or digits; none is left out or stemmed. A query or a document
    without a word scores zero.

    Raises:
        ValueError: an item is no text.
    """
    import bm25s

    queries, documents = (
        bm25s.tokenize([_text(item) for item in items], stopwords=None, return_ids=False, show_progress=False)
        for items in (retrieval.queries, retrieval.documents)
    )
    scores = torch.zeros(len(queries), len(documents))
    if any(documents):
        index = bm25s.BM25(k1=k1, b=b)
        index.index(documents, show_progress=False)
        for row, words in zip(scores, queries, strict=True):
            if words:
                row.copy_(torch.from_numpy(index.get_scores(words)))
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :depth]


def _text(item: Item) -> str:
    if item.modality != Modality.TEXT:
        raise ValueError(f"{item}: BM25 reads texts alone")
    try:
        return item.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{item} is not UTF-8 ({error.reason})") from error


class LexicalEvaluation(Task):
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

    def __validate__(self):
        if not 0 <= self.k1 < float("inf") or not 0 <= self.b <= 1 or self.depth < 1:
            given = f"k1 is {self.k1}, b {self.b} and depth {self.depth}"
            raise ValueError(f"{given}, expected k1 finite and at least 0, b from 0 to 1, and depth at least 1")

    def execute(self) -> None:
        """Writes the results."""
        found = {}
        for name, problem in self.retrievals.items():
            retrieval = problem.load()
            found[name] = results(bm25_ranking(retrieval, self.k1, self.b, DEPTH), retrieval, self.depth)
        self.resultspath.write_text(json.dumps(found))
