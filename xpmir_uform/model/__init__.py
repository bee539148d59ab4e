"""The encoder and its heads.

Names are imported when they are asked for: the plain modules (packing, attention, encoder, pooling) need neither
experimaestro nor xpm-torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "ByteHead": "xpmir_uform.model.heads",
    "Outputs": "xpmir_uform.model.uform",
    "Packed": "xpmir_uform.model.packing",
    "PatchHead": "xpmir_uform.model.heads",
    "PooledHead": "xpmir_uform.model.heads",
    "Pooling": "xpmir_uform.model.head_modules",
    "TokenHead": "xpmir_uform.model.heads",
    "UFormEncoder": "xpmir_uform.model.uform",
    "decays": "xpmir_uform.model.uform",
    "pack": "xpmir_uform.model.packing",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
