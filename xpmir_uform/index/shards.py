"""Shards: the vectors of consecutive documents in one safetensors file, which is mapped and not read.

Letters: n documents of a shard, t token vectors of them, d embedding width, W token width.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xpmir_uform.base.checked_files import quoted
from xpmir_uform.evaluation.search import unit
from xpmir_uform.index.collection import Document
from xpmir_uform.index.manifest import shard_name
from xpmir_uform.model.weights import check_header, write_tensors


def shard_tensors(model: Any, documents: Sequence[Document], batch_tokens: int) -> dict[str, Tensor]:
    """What is kept of some documents.

    Returns:
        ``pooled`` (n, d) float16 of length one (a zero embedding stays zero); ``tokens`` (t, W) float16 and
        ``token_offsets`` (n + 1,) int64, if the model has a token head; ``ids`` and ``texts`` uint8 (UTF-8) with their
        offsets.

    Raises:
        ValueError: an embedding or a token vector is not finite; names the document.
    """
    contents = [document.content for document in documents]
    found: dict[str, Tensor] = {}
    if model.token_projection is None:
        embeddings = model.encode(contents, batch_tokens)
    else:
        embeddings, tokens, offsets = model.encode_both(contents, batch_tokens)
        found |= {"tokens": tokens.half().cpu(), "token_offsets": offsets.cpu()}
    wrong = torch.nonzero(~embeddings.isfinite().all(dim=1))
    if len(wrong):
        raise ValueError(f"the embedding of document {documents[int(wrong[0])].id!r} is not finite: check the model")
    if "tokens" in found and not found["tokens"].isfinite().all():
        token = int(torch.nonzero(~found["tokens"].isfinite().all(dim=1))[0])
        owner = int(torch.searchsorted(found["token_offsets"], token, right=True)) - 1
        raise ValueError(f"a token vector of document {documents[owner].id!r} is not finite: check the model")
    found["pooled"] = unit(embeddings).half().cpu()
    for name, strings in (("ids", [d.id for d in documents]), ("texts", [d.text for d in documents])):
        found |= _strings(name, strings)
    return found


def _strings(name: str, strings: Sequence[str]) -> dict[str, Tensor]:
    encoded = [string.encode("utf-8") for string in strings]
    return {
        name: torch.from_numpy(np.frombuffer(b"".join(encoded), np.uint8).copy()),
        f"{name}_offsets": torch.tensor([0, *accumulate(map(len, encoded))]),
    }


def shard_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` is."""
    return folder / shard_name(number)


def write_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes one shard."""
    write_tensors(tensors, path)


KINDS = {
    **dict.fromkeys(("pooled", "tokens"), (torch.float16, 2)),
    **dict.fromkeys(("ids", "texts"), (torch.uint8, 1)),
    **dict.fromkeys(("ids_offsets", "texts_offsets", "token_offsets"), (torch.int64, 1)),
}
"""Type and number of dimensions of each tensor of a shard."""

RUNS = {"ids_offsets": "ids", "texts_offsets": "texts", "token_offsets": "tokens"}
"""What the offsets of a shard divide."""


class Shard:
    """A shard on disk; only what is touched comes into memory.

    Args:
        path: of the file.
        widths: of the vectors that are expected, ``pooled`` and perhaps ``tokens``; None: not looked at, nor tokens.

    Raises:
        ValueError: the file is not a whole shard.
    """

    def __init__(self, path: Path, widths: Mapping[str, int] | None = None) -> None:
        widths = widths or {}
        self.path = path
        try:
            check_header(path)
            file = safe_open(str(path), "pt")
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.pooled = self.tensors["pooled"]
            for name, value in self.tensors.items():
                known = (value.dtype, value.ndim) == KINDS.get(name)
                if not known or (name in widths and value.shape[1] != widths[name]):
                    raise SafetensorError(f"{quoted(name)} is of another type or width")
            for name, data in list(RUNS.items())[: 3 if "tokens" in widths else 2]:
                offsets = self.tensors[name]
                if len(offsets) != len(self) + 1 or int(offsets[-1]) != len(self.tensors[data]):
                    raise SafetensorError(f"{name} and {data} do not fit")
        except (SafetensorError, OSError, KeyError) as error:
            raise ValueError(f"{path} is no whole part of an index ({error}): build the index again") from error

    def __len__(self) -> int:
        """n."""
        return len(self.pooled)

    def string(self, name: str, row: int) -> str:
        """Entry ``row`` of ``ids`` or ``texts``."""
        return self._run(f"{name}_offsets", row).numpy().tobytes().decode("utf-8", "replace")

    def tokens(self, row: int) -> Tensor:
        """(tokens, W) float16, of one document."""
        return self._run("token_offsets", row)

    def _run(self, name: str, row: int) -> Tensor:
        """What two neighbouring offsets enclose; they are looked at here alone, so that opening reads none."""
        start, stop = self.tensors[name][row : row + 2].tolist()
        data = self.tensors[RUNS[name]]
        if not 0 <= start <= stop <= len(data):
            raise ValueError(f"{self.path} is no whole part of an index ({name} descend): build the index again")
        return data[start:stop]
