"""Graphs of usearch in files (HNSW, Malkov and Yashunin, 2018), read over before usearch maps them.

usearch follows the numbers in a file wherever they lead. Of such a file this module knows the form that ``write_graph``
gives it, and refuses any other: nodes in the order of their keys, and neighbours that are there, at the level at which
they are named.

    rows, bytes of a row        2 x uint32
    vectors                     n x d float16
    head of the collection      64 bytes: magic, version, metric, types, counts, d
    head of the graph           5 x uint64: n, neighbours above the lowest level, at it, highest level, entry
    levels                      n x int16
    nodes                       key uint64, level int16, and for each level from 0 on a count and so many places, uint32

Letters: n nodes, d width of the vectors.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXPANSION = 128
"""Candidates that the graph looks at in a search: more find more of the true neighbours and take longer."""

BASE, UPPER = 32, 16
"""Places for neighbours of a node at the lowest level and at each other, usearch's own."""

HEAD = struct.Struct("<7s3H4B3QB22x")
MAGIC, VERSION = b"usearch", 2
KINDS = (ord("i"), 12, 14, 15)
"""Inner product, of float16; keys of 64 and places of 32 bits."""

BEGIN = 8 + 2
BASE_BYTES, UPPER_BYTES = 4 * (1 + BASE), 4 * (1 + UPPER)
BLOCK_NODES = 1 << 16


class Malformed(ValueError):
    """A file is no graph of that many vectors."""


def usearch() -> Any:
    """The module of usearch's graph.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import usearch.index
    except ImportError as error:
        raise ValueError("usearch is not installed: pip install 'xpmir-uform[search]'") from error
    return usearch.index


def write_graph(blocks: Iterable[tuple[int, Tensor]], width: int, path: Path) -> None:
    """Writes a graph over documents (n, d) of length one, given in blocks with the number of the first of each.

    By one thread: several insert in an order of their own, and the same collection would give another graph each time.
    """
    graph = usearch().Index(ndim=width, metric="ip", dtype="f16", connectivity=UPPER)
    for start, block in blocks:
        graph.add(np.arange(start, start + len(block)), block.numpy(), threads=1)
    graph.save(str(path))


def open_graph(path: Path, count: int, width: int, expansion: int = EXPANSION) -> Any:
    """The graph in a file, which is mapped.

    Raises:
        ValueError: usearch is not installed, or the file is no whole graph of ``count`` vectors of ``width``.
    """
    module = usearch()
    try:
        check_graph(np.memmap(path, np.uint8, "r"), count, width)
        graph = module.Index.restore(str(path), view=True, expansion_search=expansion)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is no whole graph of {count} documents ({error}): build the index again") from error
    if graph is None or len(graph) != count:
        raise ValueError(f"{path} is no graph of {count} documents: build the index again")
    return graph


def check_graph(data: np.ndarray, count: int, width: int) -> None:
    """Refuses the bytes of a file that is not as the module says, before anything in it is followed.

    Raises:
        Malformed: tells what is wrong.
    """
    place = 8 + 2 * count * width
    after = place + HEAD.size + 5 * 8
    if len(data) < after + 2 * count:
        raise Malformed("it is cut")
    magic, version, _, _, *rest = HEAD.unpack(data[place : place + HEAD.size].tobytes())
    told = struct.unpack("<2I", data[:8].tobytes()), magic, version, tuple(rest)
    if told != ((count, 2 * width), MAGIC, VERSION, (*KINDS, count, 0, width, 0)):
        raise Malformed("its head is of something else")
    size, upper, base, highest, entry = struct.unpack("<5Q", data[after - 40 : after].tobytes())
    levels = data[after : after + 2 * count].view("<i2").astype(np.int64)
    if (size, upper, base) != (count, UPPER, BASE) or entry >= count or levels.min() < 0:
        raise Malformed("its size or its entry is not that of its vectors")
    if not highest == levels.max() == levels[entry]:
        raise Malformed("its entry is not at the highest level")
    ends = after + 2 * count + np.cumsum(BEGIN + BASE_BYTES + UPPER_BYTES * levels)
    if ends[-1] != len(data):
        raise Malformed("its nodes end elsewhere than the file")
    starts = ends - (BEGIN + BASE_BYTES + UPPER_BYTES * levels)
    for nodes in _blocks(np.arange(count)):
        begins = _gathered(data, starts[nodes], BEGIN)
        keys, found = begins[:, :8].copy().view("<u8")[:, 0], begins[:, 8:].copy().view("<i2")[:, 0]
        if (keys != nodes).any() or (found != levels[nodes]).any():
            raise Malformed("a node is not of its number and level")
    for level in range(int(highest) + 1):
        first = BEGIN + (BASE_BYTES + UPPER_BYTES * (level - 1) if level else 0)
        for nodes in _blocks(np.flatnonzero(levels >= level)):
            lists = _gathered(data, starts[nodes] + first, UPPER_BYTES if level else BASE_BYTES)
            _check_neighbours(lists.view("<u4"), levels, level)


def _blocks(numbers: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(numbers), BLOCK_NODES):
        yield numbers[start : start + BLOCK_NODES]


def _gathered(data: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """(n, size) uint8: so many bytes from each of n places."""
    return np.ascontiguousarray(data[starts[:, None] + np.arange(size)])


def _check_neighbours(lists: np.ndarray, levels: np.ndarray, level: int) -> None:
    """Refuses lists (n, 1 + places) of a count and neighbours that are not there, or not at ``level``."""
    counts, neighbours = lists[:, 0], lists[:, 1:]
    named = np.arange(neighbours.shape[1]) < counts[:, None]
    if (counts > neighbours.shape[1]).any() or (neighbours[named] >= len(levels)).any():
        raise Malformed("a node names neighbours that are not there")
    if (levels[neighbours[named]] < level).any():
        raise Malformed("a node names neighbours at a level that they do not have")


def graph_nearest(queries: Tensor, graph: Any, k: int) -> Tensor | None:
    """(Q, min(k, D)) int64: about the nearest documents of the queries (Q, d) float32, nearest first.

    None: the graph did not reach that many from where it began.
    """
    k = min(k, len(graph))
    found = graph.search(queries.numpy(), k)
    reached = getattr(found, "counts", None)
    if found.keys.size != len(queries) * k or (reached is not None and (reached < k).any()):
        return None
    return torch.from_numpy(found.keys.astype("int64")).reshape(len(queries), k)
