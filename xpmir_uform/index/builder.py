"""Building an index: a collection is encoded in blocks, and written shard by shard."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xpmir_uform.base.atomic_files import commit_folder
from xpmir_uform.index.collection import Document, as_documents
from xpmir_uform.index.fingerprint import fingerprint
from xpmir_uform.index.graph import usearch, write_graph
from xpmir_uform.index.index import Index
from xpmir_uform.index.manifest import GRAPH, NAME, read_manifest, write_manifest
from xpmir_uform.index.nearest import blocks
from xpmir_uform.index.shards import Shard, shard_path, shard_tensors, write_shard
from xpmir_uform.model.inference.batches import BATCH_TOKENS, as_items, bar, check_readable, check_several, most_tokens

logger = logging.getLogger(__name__)

SHARD_TOKENS = 262_144
"""Tokens of the documents of one shard, which bounds the memory that building takes."""


def build_index(
    model: Any,
    documents: Iterable[Document | str],
    folder: str | Path,
    approximate: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> "Index":
    """Encodes a collection and writes its vectors, in float16; the folder is whole or absent.

    Args:
        model: a ``UFormEncoder`` with a pooled head; with a token head too, searches are reranked by it.
        documents: one at a time; a text's id is its number, from 0 on.
        folder: of the index; an older index there is replaced.
        approximate: also writes a graph, by which searches in large collections are faster and not exact.
        batch_tokens: most tokens of one forward pass.

    Raises:
        ValueError: the model has no pooled head, there is no document, an id occurs twice, or the folder is there and
            is no index.
        Occupied: another process builds an index there.
    """
    check_several(documents, "documents", one=Document)
    folder = Path(folder)
    model.initialize()
    if model.pooling is None:
        raise ValueError("this model has no pooled head, which an index needs: build it with pooled=PooledHead(...)")
    _tell_of_older(folder)
    if approximate:
        usearch()

    def write(part: Path) -> None:
        sizes = _write_shards(model, documents, part, batch_tokens)
        if not sizes:
            raise ValueError("the collection is empty: an index needs at least one document")
        if approximate:
            shards = [Shard(shard_path(part, number)) for number in range(len(sizes))]
            write_graph(blocks(shard.pooled for shard in shards), shards[0].pooled.shape[1], part / GRAPH)
        write_manifest(part, fingerprint(model), sum(sizes), len(sizes))

    commit_folder(folder, write)
    return Index(folder, model)


def _tell_of_older(folder: Path) -> None:
    """Says that the index at ``folder`` is going to be replaced; refuses to replace anything else."""
    if not folder.exists():
        return
    if not (folder / NAME).is_file():
        raise ValueError(f"{folder} is there and is no index: choose another place, or remove it")
    try:
        held = f"{read_manifest(folder)['documents']} documents"
    except ValueError:
        held = "an index that is damaged or of another format"
    logger.warning("%s holds %s: it is replaced when the new index is whole", folder, held)


def _write_shards(model: Any, documents: Iterable[Document | str], folder: Path, batch_tokens: int) -> list[int]:
    """Writes the shards and answers the number of documents in each."""
    sizes: list[int] = []
    with bar(None, "Indexing") as done:
        for block in _blocks(as_documents(documents), model):
            write_shard(shard_tensors(model, block, batch_tokens), shard_path(folder, len(sizes)))
            sizes.append(len(block))
            done.update(len(block))
    return sizes


def _blocks(documents: Iterable[Document], model: Any) -> Iterator[list[Document]]:
    block: list[Document] = []
    tokens = 0
    for document in documents:
        (item,) = as_items([document.content])
        check_readable([item], model.shapes)
        size = most_tokens(item, model.shapes)
        if block and tokens + size > SHARD_TOKENS:
            yield block
            block, tokens = [], 0
        block.append(document)
        tokens += size
    if block:
        yield block
