"""The encoder and its heads.

Names are imported when they are asked for: the plain modules (packing, attention, encoder, pooling) need neither
experimaestro nor xpm-torch.
"""

from importlib import import_module
from typing import Any

__all__ = ["ImageShape", "Outputs", "Packed", "PooledHead", "Pooling", "UFormEncoder", "decays", "pack"]

_HOMES = {
    "ImageShape": "xpmir_uform.data.shapes",
    "Outputs": "xpmir_uform.model.uform",
    "Packed": "xpmir_uform.model.packing",
    "PooledHead": "xpmir_uform.model.heads",
    "Pooling": "xpmir_uform.model.pooling",
    "UFormEncoder": "xpmir_uform.model.uform",
    "decays": "xpmir_uform.model.uform",
    "pack": "xpmir_uform.model.packing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
