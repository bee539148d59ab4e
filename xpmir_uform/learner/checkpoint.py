"""Checkpoints: folders of safetensors and JSON, committed by a rename.

step-00000640/
    model/model.safetensors     the weights
    optimizer.safetensors       the tensors of the optimizers' states
    state.json                  step, schedule, the optimizers' numbers, the metrics of an unfinished epoch
last -> step-00000640           the newest one
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from xpm_torch.metrics import Metrics, ScalarMetric

NAME = re.compile(r"step-(\d{8,})")
MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


def name_of(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a committed checkpoint, ascending."""
    return sorted(int(match[1]) for path in folder.glob("step-*") if (match := NAME.fullmatch(path.name)))


def split_optimizers(states: Sequence[Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Optimizer states as flat tensors by name ``optimizer/parameter/entry`` and the JSON values that remain."""
    tensors: dict[str, torch.Tensor] = {}
    rest = []
    for number, state in enumerate(states):
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{number}/{parameter}/{key}"] = value.detach().clone().contiguous()
                else:
                    numbers.setdefault(str(parameter), {})[key] = value
        rest.append({"groups": state["param_groups"], "numbers": numbers})
    return tensors, rest


def join_optimizers(tensors: Mapping[str, torch.Tensor], rest: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of :func:`split_optimizers`."""
    states: list[dict[str, Any]] = []
    for entry in rest:
        numbers = {int(parameter): dict(values) for parameter, values in entry["numbers"].items()}
        states.append({"state": numbers, "param_groups": entry["groups"]})
    for name, tensor in tensors.items():
        number, parameter, key = name.split("/")
        states[int(number)]["state"].setdefault(int(parameter), {})[key] = tensor
    return states


def metrics_to_json(metrics: Metrics) -> dict[str, list[float]]:
    """Sums and counts by name."""
    return {key: [metric.sum, metric.count] for key, metric in metrics.metrics.items()}


def metrics_from_json(values: Mapping[str, Sequence[float]]) -> Metrics:
    """The inverse of :func:`metrics_to_json`."""
    metrics = Metrics()
    for key, (total, count) in values.items():
        metric = ScalarMetric(key, 0.0, int(count))
        metric.sum = total
        metrics.add(metric)
    return metrics


def write(folder: Path, model, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Fills ``folder``; ``model`` has ``save_model``, ``optimizer`` is a ``ScheduledOptimizer.state_dict()``."""
    model.save_model(folder / MODEL)
    tensors, rest = split_optimizers(optimizer["optimizers"])
    save_file(tensors, folder / OPTIMIZER)
    values = {**state, "optimizers": rest, "scheduler_steps": optimizer["scheduler_steps"]}
    (folder / STATE).write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer state and the other state of a checkpoint, nothing applied yet.

    Raises:
        ValueError: a file is missing or damaged; nothing is deleted.
    """
    try:
        state = json.loads((folder / STATE).read_text())
        missing = [name for name in ("epoch", "steps", "metrics", "trainer", "scaler") if name not in state]
        if missing or not (folder / MODEL / "model.safetensors").is_file():
            raise ValueError(f"{', '.join(missing) or 'model/model.safetensors'} is missing")
        states = join_optimizers(load_file(folder / OPTIMIZER), state.pop("optimizers"))
        return {"optimizers": states, "scaler": None, "scheduler_steps": state.pop("scheduler_steps")}, state
    except Exception as error:
        raise ValueError(
            f"the checkpoint {folder} cannot be read ({type(error).__name__}: {error}). Nothing was deleted: move "
            "that folder away to go on from the one before it, or restore it and run the task again"
        ) from error
