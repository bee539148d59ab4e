"""Modules of the experiments: each folder holds an ``experiment.py`` and what only it imports."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def module_of(theme: str, name: str = "experiment") -> ModuleType:
    """A module of ``experiments/<theme>/``, imported as experimaestro does: beside its siblings."""
    folder = EXPERIMENTS / theme
    siblings = {path.stem for path in folder.glob("*.py")}
    spec = importlib.util.spec_from_file_location(f"{theme}_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
        for sibling in siblings:
            sys.modules.pop(sibling, None)
    return module
