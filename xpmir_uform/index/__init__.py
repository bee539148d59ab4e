"""An index: the vectors of a collection on disk, and search in them."""

from xpmir_uform.index.builder import build_index
from xpmir_uform.index.collection import Document, read_collection
from xpmir_uform.index.index import Hit, Index

__all__ = ["Document", "Hit", "Index", "build_index", "read_collection"]
