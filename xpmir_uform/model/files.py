"""Weights in safetensors files."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE_NAME = "model.safetensors"


def save_weights(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a state dict to a ``.safetensors`` file, or to ``model.safetensors`` in a folder.

    Tied and strided tensors are written in full. A file that is there is replaced at once, or not at all.
    """
    target = path if path.suffix == ".safetensors" else path / FILE_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        save_file(whole, str(partial), dict(metadata) if metadata else None)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file, or a folder that holds ``model.safetensors`` or ``model/model.safetensors``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a whole safetensors file.
    """
    candidates = [path, path / FILE_NAME, path / "model" / FILE_NAME]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"no weights at {path}: expected a .safetensors file or a folder with {FILE_NAME}. If a training wrote "
            "them there, they were removed since: put them back, or train again in a fresh folder"
        )
    try:
        return load_file(str(file))
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): save the model again") from error


def check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights of another model.

    Raises:
        ValueError: naming the tensors that are missing, unexpected or of another shape.
    """
    misshapen = [
        f"{name} {tuple(found[name].shape)} for {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    faults = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": misshapen,
    }
    said = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
    if said:
        raise ValueError(
            f"the weights at {path} are not of this model ({said}): load them into the model they came from"
        )
