"""The encoder and its heads."""

from xpmir_uform.data.shapes import ImageShape
from xpmir_uform.model.heads import PooledHead, Pooling
from xpmir_uform.model.packing import Packed, pack
from xpmir_uform.model.uform import Outputs, UFormEncoder, decays

__all__ = ["ImageShape", "Outputs", "Packed", "PooledHead", "Pooling", "UFormEncoder", "decays", "pack"]
