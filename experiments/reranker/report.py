"""What the experiment on late interaction prints.

Each method is measured once for each seed. A margin between two methods counts if it is larger than the seeds' spread:
the larger of the two methods' ranges, highest less lowest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpmir_uform.evaluation.lexical import LexicalEvaluation
from xpmir_uform.evaluation.retrieval import RetrievalEvaluation
from xpmir_uform.reports.tables import table

POOLED, LATE, RERANKED = "pooled", "late interaction", "retrieve then rerank"
LEXICAL, CHANCE = "BM25", "chance"
MEASURES = ("nDCG@10", "MRR@10")
CONTESTS = ((LATE, POOLED), (RERANKED, POOLED), (RERANKED, LATE))
PROBLEM = "held-out"

Measured = Mapping[str, Mapping[int, Mapping[str, float]]]
"""By method, seed and measure."""


@dataclass(frozen=True, slots=True)
class RerankerRun:
    """The tasks of an experiment that has ended.

    Args:
        evaluations: by method and seed.
        lexical: of BM25.
        folder: where the measures go, and where ``model/`` lies.
    """

    evaluations: Mapping[str, Mapping[int, RetrievalEvaluation]]
    lexical: LexicalEvaluation
    folder: Path


def read(task: RetrievalEvaluation | LexicalEvaluation) -> dict:
    """What an evaluation wrote of the problem."""
    return json.loads(Path(task.resultspath).read_text())[PROBLEM]


def column(measured: Measured, method: str, measure: str) -> list[float]:
    """One measure of a method for each seed."""
    return [values[measure] for values in measured[method].values()]


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """The highest less the lowest."""
    return max(values) - min(values)


def scores(measured: Measured, fixed: Mapping[str, Mapping[str, float]]) -> str:
    """A row per method: of each measure the mean over the seeds, the spread, and each seed's value.

    Args:
        fixed: measures of what has no seed, by name.
    """
    rows = []
    for method in measured:
        columns = [column(measured, method, measure) for measure in MEASURES]
        cells = [(f"{mean(c):.3f}", f"{spread(c):.3f}", " ".join(f"{value:.3f}" for value in c)) for c in columns]
        rows.append([method, *(cell for triple in cells for cell in triple)])
    for name, values in fixed.items():
        rows.append([name, *(cell for measure in MEASURES for cell in (f"{values[measure]:.3f}", "", ""))])
    seeds = "seeds " + ", ".join(map(str, next(iter(measured.values()))))
    return table(["held-out pairs", *(cell for measure in MEASURES for cell in (measure, "spread", seeds))], rows)


def contest(measured: Measured, one: str, other: str) -> list[tuple[float, float]]:
    """Of each measure, how far ``one`` is above ``other`` in the mean, and the seeds' spread."""
    both = [[column(measured, method, measure) for method in (one, other)] for measure in MEASURES]
    return [(mean(first) - mean(second), max(spread(first), spread(second))) for first, second in both]


def verdict(measured: Measured, one: str, other: str) -> str:
    """In words: whether ``one`` beats ``other`` in every measure by more than the seeds' spread."""
    found = contest(measured, one, other)
    if len(measured[one]) < 2:
        return f"One seed has no spread: it decides nothing between {one!r} and {other!r}."
    told = "; ".join(
        f"{measure} {margin:+.3f}, spread {width:.3f}" for measure, (margin, width) in zip(MEASURES, found, strict=True)
    )
    if all(margin > width for margin, width in found):
        return f"{one!r} beats {other!r} by more than the seeds' spread ({told})."
    if all(-margin > width for margin, width in found):
        return f"{one!r} does not beat {other!r}: it loses by more than the seeds' spread ({told})."
    return f"{one!r} does not beat {other!r} by more than the seeds' spread ({told})."


def report(run: RerankerRun) -> None:
    """Prints the table and the verdicts, and writes the measures."""
    run.folder.mkdir(parents=True, exist_ok=True)
    results = {method: {seed: read(task) for seed, task in tasks.items()} for method, tasks in run.evaluations.items()}
    measured = {
        method: {seed: result["measures"] for seed, result in by_seed.items()} for method, by_seed in results.items()
    }
    lexical = read(run.lexical)
    fixed = {LEXICAL: lexical["measures"], CHANCE: lexical["chance"]}
    (run.folder / "measures.json").write_text(json.dumps({**measured, **fixed}, indent=1))
    verdicts = "\n".join(verdict(measured, one, other) for one, other in CONTESTS)
    print(
        f"\n{lexical['queries']} queries, {lexical['documents']} documents, one relevant for each query.\n\n"
        f"{scores(measured, fixed)}\n\n{verdicts}\n\nModel that retrieves and reranks: {run.folder / 'model'}"
    )
