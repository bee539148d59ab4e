"""BM25: what words alone find, to stand beside trained models."""

import json
from pathlib import Path
from typing import Annotated

import torch
from experimaestro import Param, Task, pathgenerator

from xpmir_uform.data.fields import default
from xpmir_uform.data.retrieval import Retrieval, RetrievalSet
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.evaluation.retrieval import DEPTH, results


def bm25_ranking(retrieval: Retrieval, k1: float, b: float, depth: int) -> torch.Tensor:
    """(Q, min(depth, D)) int64: documents by BM25 (Robertson and Zaragoza, 2009), by the library bm25s.

    Words are lower-case runs of at least two letters or digits; none is left out or stemmed.

    Raises:
        ValueError: an item is no text.
    """
    import bm25s

    queries, documents = (
        bm25s.tokenize([_text(item) for item in items], stopwords=None, return_ids=False, show_progress=False)
        for items in (retrieval.queries, retrieval.documents)
    )
    index = bm25s.BM25(k1=k1, b=b)
    index.index(documents, show_progress=False)
    scores = torch.stack([torch.from_numpy(index.get_scores(words)) for words in queries])
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :depth]


def _text(item) -> str:
    if item.modality != Modality.TEXT:
        raise ValueError(f"{item}: BM25 reads texts alone")
    return item.content.decode("utf-8")


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

    def execute(self) -> None:
        """Writes the results."""
        found = {}
        for name, problem in self.retrievals.items():
            retrieval = problem.load()
            found[name] = results(bm25_ranking(retrieval, self.k1, self.b, DEPTH), retrieval, self.depth)
        self.resultspath.write_text(json.dumps(found))
