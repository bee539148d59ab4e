"""A model's configuration and weights in one folder, in the layout of xpm-torch's model hub."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from experimaestro import Config
from safetensors import SafetensorError
from xpm_torch import Module, ModuleLoader
from xpm_torch.module import SimpleModuleLoader

from xpmir_uform.base.atomic_files import check_replaceable, commit_folder
from xpmir_uform.base.checked_files import NotAFile, copy_file, describe, difference, permitted
from xpmir_uform.checkpoints import manifest, store
from xpmir_uform.export import definition, model_card
from xpmir_uform.model.uform import UFormEncoder
from xpmir_uform.model.weights import (
    DEFINITION,
    FILE_NAME,
    check_fit,
    check_header,
    check_unchanged,
    read_tensors,
    recorded,
    weights_file,
)

HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
"""A repository of the Hugging Face hub, as its own file system writes it."""

SAVED = (DEFINITION, FILE_NAME, model_card.NAME)
"""What a saved model consists of."""

BLOCK_TENSORS = 6
"""Weights of one block of the encoder."""


def save_model(loader: ModuleLoader, folder: str | Path) -> None:
    """Writes a model: ``experimaestro.json``, ``model.safetensors`` and ``README.md``.

    The folder is complete or absent, shares nothing with the checkpoint, and replaces an older one.

    Args:
        loader: of trained weights, as a learner's output or a validation offers it; its task has ended.

    Raises:
        ValueError: the weights are damaged, or the folder holds what ``save_model`` did not write.
    """
    given: Any = getattr(loader, "__config__", loader)
    if not isinstance(given, SimpleModuleLoader):
        raise ValueError(f"save_model was given a {type(given).__name__}, expected a loader of one file of weights")
    file = weights_file(Path(given.path)).resolve()
    facts = manifest.read(file.parent) if (file.parent / manifest.NAME).exists() else None
    _write(definition.as_config(given.model), file, Path(folder), facts, {})


def export_checkpoint(
    path: str | Path, folder: str | Path, step: int | None = None, best: bool = False, trust: Iterable[str | type] = ()
) -> Path:
    """Writes the model of a checkpoint, as :func:`save_model` does.

    Args:
        path: a checkpoint, or the folder of a job that trained.
        step: of the job's checkpoint; None: the newest.
        best: the one that the job's validation kept.
        trust: as :func:`load_model`.

    Returns:
        The checkpoint that was exported.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or it is of a model that is not known.
    """
    checkpoint = chosen(Path(path), step, best).resolve()
    facts = manifest.verify(checkpoint)
    _write(
        _model_of(checkpoint, facts, trust),
        checkpoint / FILE_NAME,
        Path(folder),
        facts,
        model_card.measures(checkpoint),
    )
    return checkpoint


def chosen(path: Path, step: int | None, best: bool) -> Path:
    """The checkpoint of a job that is asked for.

    Raises:
        ValueError: there is none, or several validations kept one.
    """
    if best:
        kept = [found.parent for found in sorted(path.glob(f"out/listeners/*/best/{manifest.NAME}"))]
        if step is not None or len(kept) != 1:
            names = ", ".join(map(str, kept)) or "none"
            raise ValueError(f"{path} has these best checkpoints: {names}; give the path of one, without step or best")
        return kept[0]
    if step is None:
        return store.resolve(path)
    folder = store.shelf_of(path)
    if step not in store.steps_in(folder):
        steps = ", ".join(map(str, store.steps_in(folder))) or "no step"
        raise ValueError(f"{path} has no checkpoint of step {step}: it has those of {steps}")
    return folder / store.name_of(step)


def _write(
    model: Config, weights: Path, folder: Path, facts: Mapping[str, Any] | None, measures: model_card.Measures
) -> None:
    folder = folder.resolve()
    check_replaceable(folder, SAVED, "a saved model")

    def write(part: Path) -> None:
        copy_file(weights, part / FILE_NAME)
        record = describe(part / FILE_NAME)
        expected = recorded(weights)
        said = difference(record, expected) if expected else ""
        if said:
            raise ValueError(f"{weights} {said}: it is damaged, and nothing was written. Train again, or take another")
        (part / DEFINITION).write_text(definition.define(model, record))
        (part / model_card.NAME).write_text(model_card.text(model, check_header(part / FILE_NAME), facts, measures))

    commit_folder(folder, write)


def load_model(source: str | Path, trust: Iterable[str | type] = ()) -> UFormEncoder:
    """The model in a folder that :func:`save_model` wrote, or of a checkpoint, in evaluation mode.

    The folder may be anybody's: nothing in it is run, and nothing outside it is read.

    Args:
        source: such a folder; a checkpoint, or the folder of a job that trained (then its newest one); or
            ``hf://USER/NAME`` (``hf://USER/NAME@REVISION``), a repository of the Hugging Face hub.
        trust: configuration classes of your own that the model is made of, as classes or as ``"module.Class"``.

    Raises:
        ValueError: there is no such folder, it holds no complete model, or something that it may not.
        PermissionError: it may not be read; names the owner.
    """
    hub = HUB.fullmatch(str(source))
    folder = _downloaded(**hub.groupdict()) if hub else Path(source)
    with permitted(folder):
        there = folder.is_dir()
        defined = there and (folder / DEFINITION).exists()
    if not there:
        raise ValueError(
            f"there is no folder {source}, expected one that save_model wrote (a repository of the Hugging Face hub is "
            "written hf://USER/NAME)"
        )
    if defined:
        config, name = definition.read(folder, trust, follow=bool(hub))
        return _loaded(config, folder / name, follow=bool(hub))
    with suppress(FileNotFoundError):
        checkpoint = store.resolve(folder).resolve()
        return _loaded(_model_of(checkpoint, manifest.read(checkpoint), trust), checkpoint / FILE_NAME)
    raise ValueError(f"{folder} holds no {DEFINITION}, expected a folder that save_model wrote, or a checkpoint")


def _model_of(checkpoint: Path, facts: Mapping[str, Any], trust: Iterable[str | type]) -> Config:
    try:
        return definition.from_checkpoint(facts["config"], trust)
    except definition.Refused as error:
        raise ValueError(f"the model of {checkpoint} cannot be made: {error}") from error


def _loaded(config: Any, weights: Path, follow: bool = False) -> UFormEncoder:
    """The model with its weights. What costs memory or time comes after what may refuse it: sizes, then the sha256."""
    with _explained(weights):
        header = check_header(weights, follow)
    model: Any = config.instance()
    if not isinstance(model, Module):
        raise ValueError(f"{weights.parent} describes a {type(model).__name__}, expected a model")
    if isinstance(model, UFormEncoder):
        _check_size(config, header, weights)
    with _explained(weights):
        check_unchanged(weights, follow)
    model.initialize()
    found = read_tensors(weights)
    check_fit(found, model.state_dict(), weights)
    model.load_state_dict(found)
    return model.eval()


@contextmanager
def _explained(weights: Path) -> Iterator[None]:
    """Says what it means that weights, or what lies beside them, cannot be read.

    Raises:
        ValueError: in place of the error.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{weights.parent} holds no {weights.name}: the model is incomplete, save it again") from error
    except NotAFile as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from error
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a whole safetensors file ({error}): save the model again") from error


def _check_size(config: Any, header: Mapping[str, Any], weights: Path) -> None:
    """Refuses a configuration of other sizes than the weights before memory is taken for it.

    Raises:
        ValueError: it is.
    """
    model: Any = config.instance()
    if model.depth * BLOCK_TENSORS > len(header):
        raise ValueError(f"{weights} holds {len(header)} tensors, too few for the model's depth of {model.depth}")
    try:
        with torch.device("meta"):
            model.build()
            expected, nothing = model.state_dict(), torch.empty(0)
            found = {
                name: torch.empty(entry["shape"]) if name in expected else nothing for name, entry in header.items()
            }
    except (RuntimeError, ValueError, TypeError, KeyError, OverflowError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(f"the sizes of the model at {weights.parent} cannot be ({said})") from error
    check_fit(found, expected, weights)


def _downloaded(name: str, revision: str | None) -> Path:
    """The folder that the hub's client puts a repository's model into."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=[DEFINITION, "*.safetensors"]))
