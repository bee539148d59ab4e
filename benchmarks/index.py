"""Speed of an index on a CPU, and the recall that usearch's graph costs.

    python benchmarks/index.py [--quick]

On one core, about two minutes (--quick: 20 seconds). First the emoji names of six languages (needs the extra `demo`),
encoded by an untrained model of 0.45 million parameters: texts per second to build, milliseconds a query to search.
Then vectors of 128 coordinates that lie around 1,000 centres, as many as the first column says: exact search, and the
graph, whose recall is the share of the exact 10 nearest that it finds. Needs the extra `search`. Exact search is first
checked against a full sort. Exits with 1 when the graph finds less than 0.9.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from xpmir_uform import Document, PooledHead, TokenHead, UFormEncoder, build_index
from xpmir_uform.datasets.emoji import LANGUAGES, read_names
from xpmir_uform.index.nearest import exact_nearest, graph_nearest, open_graph, write_graph
from xpmir_uform.reports.tables import table

THREADS = 1
K = 10
WIDTH = 128
CENTRES = 1000
QUERIES = 200
EXPANSIONS = (32, 128, 512)
"""How many candidates the graph looks at; the index takes the middle one."""
LEAST_RECALL = 0.9


def near(count: int, seed: int) -> Tensor:
    """(count, WIDTH) float32 of length one, around the centres."""
    centres = torch.randn(CENTRES, WIDTH, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    own = centres[torch.randint(CENTRES, (count,), generator=draw)]
    return normalize(own + torch.randn(count, WIDTH, generator=draw), dim=1)


def milliseconds(call: Callable[[Tensor], object], queries: Tensor, repeats: int = 5) -> float:
    """Median milliseconds a query, one query at a time."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        for query in queries.split(1):
            call(query)
        taken.append((time.perf_counter() - start) / len(queries) * 1e3)
    return statistics.median(taken)


def recall(found: Tensor, expected: Tensor) -> float:
    """The share of the expected numbers (Q, K) that were found."""
    return float((found[:, :, None] == expected[:, None]).any(1).float().mean())


def vector_rows(count: int, folder: Path) -> tuple[list[list[str]], float]:
    """The rows of one size, and the best recall of the graph."""
    vectors, queries = near(count, 1).half(), near(QUERIES, 2)
    expected, _ = exact_nearest(queries, [vectors], K)
    if not torch.equal(
        expected, (queries @ vectors.float().T).sort(dim=1, descending=True, stable=True).indices[:, :K]
    ):
        raise SystemExit(f"exact search among {count} vectors is wrong")
    some = queries[:20]
    rows: list[list[str]] = [
        [
            f"{count:,}",
            "exact",
            "",
            f"{milliseconds(lambda query: exact_nearest(query, [vectors], K), some):.3f}",
            "1.000",
        ]
    ]
    start = time.perf_counter()
    write_graph([vectors], WIDTH, folder / str(count))
    seconds = time.perf_counter() - start
    found = 0.0
    for expansion in EXPANSIONS:
        graph = open_graph(folder / str(count), count, expansion)
        numbers = graph_nearest(queries, graph, K)
        share = 0.0 if numbers is None else recall(numbers, expected)
        taken = milliseconds(lambda query, graph=graph: graph_nearest(query, graph, K), queries)
        rows.append([f"{count:,}", f"graph, expansion {expansion}", f"{seconds:.1f}", f"{taken:.3f}", f"{share:.3f}"])
        found = max(found, share)
    return rows, found


def text_rows(limit: int | None, folder: Path) -> list[list[str]]:
    """Building and searching the emoji's names."""
    documents = [
        Document(f"{language} {characters}", name)
        for characters, names in read_names(LANGUAGES).items()
        for language, name in names.items()
    ][:limit]
    heads = {"pooled": PooledHead.C(width=WIDTH), "tokens": TokenHead.C(width=128)}
    model = UFormEncoder.C(depth=2, hidden=128, **heads).instance()
    start = time.perf_counter()
    index = build_index(model, documents, folder / "names")
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in index.folder.iterdir()) / 2**20
    queries = [document.content for document in documents[:: len(documents) // 40]]
    rows: list[list[str]] = []
    for candidates in (K, 100):
        start = time.perf_counter()
        for query in queries:
            index.search(query, K, candidates)
        taken = (time.perf_counter() - start) / len(queries) * 1e3
        built = f"{len(index):,}", f"{len(index) / seconds:.0f}", f"{size:.0f}"
        rows.append([*built, str(candidates), f"{taken:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 names and 10,000 vectors")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    print(f"index, {THREADS} thread, {platform.machine()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as root:
        names = text_rows(2000 if options.quick else None, Path(root))
        print(table(["names", "names/s", "MiB", "candidates", "ms a query"], names), end="\n\n")
        rows, missed = [], False
        for count in (10_000,) if options.quick else (10_000, 100_000):
            more, found = vector_rows(count, Path(root))
            rows += more
            missed |= found < LEAST_RECALL
    print(table(["vectors", "search", "built in s", "ms a query", f"recall@{K}"], rows))
    sys.exit(missed)


if __name__ == "__main__":
    main()
