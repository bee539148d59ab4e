"""Every configuration class of the package."""

import importlib
import pkgutil

from experimaestro import Config

import xpmir_uform

ABSTRACT = {"BagSource", "BatchLoss", "PairForm", "RetrievalSet"}
"""Classes that only name what others have in common."""


def all_configs() -> list[type[Config]]:
    """Sorted by name, abstract ones among them."""
    for module in pkgutil.walk_packages(xpmir_uform.__path__, "xpmir_uform."):
        importlib.import_module(module.name)
    found, queue = set(), [Config]
    while queue:
        for cls in queue.pop().__subclasses__():
            queue.append(cls)
            if cls.__module__.startswith("xpmir_uform.") and not cls.__name__.endswith("XPMConfig"):
                found.add(cls)
    return sorted(found, key=lambda cls: cls.__qualname__)
