"""Data sets that come with the package: each module holds one collection and the bags and problems made from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
