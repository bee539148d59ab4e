"""A model's configuration and weights in one folder, in the layout of xpm-torch's model hub."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experimaestro import copyconfig
from xpm_torch import ModuleLoader
from xpm_torch.huggingface import TorchHFHub

from xpmir_uform.model.uform import UFormEncoder

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a repository of the hub."""


def save_model(loader: ModuleLoader, folder: Path) -> None:
    """Writes ``experimaestro.json`` and ``model.safetensors``.

    Args:
        loader: of trained weights, as a learner's output or a validation offers it; its task has ended.
    """
    # Its settings name it in an experiment, by a listener and the data of that; the model is the same without them.
    TorchHFHub(copyconfig(loader, settings=None)).save_pretrained(folder)


def load_model(folder: str | Path) -> UFormEncoder:
    """The model in a folder that :func:`save_model` wrote (or in a repository of the hub), in evaluation mode.

    Raises:
        ValueError: the folder holds no whole model, or the weights do not fit it.
    """
    if not Path(folder).is_dir() and not HUB_NAME.fullmatch(str(folder)):
        raise ValueError(f"there is no folder {folder}, expected one that save_model wrote")
    if Path(folder).is_dir():
        _check_definition(Path(folder))
    with _quiet():
        return TorchHFHub.from_pretrained(str(folder)).eval()


def _check_definition(folder: Path) -> None:
    path = folder / TorchHFHub.definition_filename
    if not path.is_file():
        raise ValueError(f"{folder} holds no {path.name}, expected a folder that save_model wrote")
    try:
        told = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): save it again") from error
    if not told:
        raise ValueError(f"{path} describes no model: save it again")


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out the hub's warning about a ``config.json``, which models in the layout of experimaestro do without."""
    logger = logging.getLogger("huggingface_hub.hub_mixin")

    def worth(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("config.json not found")

    logger.addFilter(worth)
    try:
        yield
    finally:
        logger.removeFilter(worth)
