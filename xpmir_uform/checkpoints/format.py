"""A checkpoint: a folder of safetensors and JSON, no pickles.

    model.safetensors       the weights; step and identifier in its metadata (``source``)
    optimizer.safetensors   the tensors of the optimizers' states
    state.json              step, epoch, schedule, the optimizers' numbers, scaler, counters, metrics of the epoch
    manifest.json           what all that is (manifest.py)

The data order and all other draws are functions of (seed, step): the sampler's state is the step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from xpm_torch.metrics import Metrics, ScalarMetric

from xpmir_uform.checkpoints import manifest
from xpmir_uform.checkpoints.compatibility import model_layout
from xpmir_uform.checkpoints.manifest import MODEL, OPTIMIZER, STATE, Damaged
from xpmir_uform.model.weights import save_weights, write_tensors

STATE_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "epoch": int,
    "steps": int,
    "metrics": dict,
    "trainer": dict,
    "scaler": (dict, type(None)),
    "counters": dict,
    "optimizers": list,
    "scheduler_steps": int,
}


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, nothing of it applied yet.

    Args:
        weights: by name.
        optimizer: as ``ScheduledOptimizer.load_state_dict`` wants it.
        state: the rest.
        manifest: of the folder.
        reference: how a later checkpoint names this one.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    manifest: Mapping[str, Any]
    reference: Mapping[str, Any]


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


def write(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Fills ``folder``.

    Args:
        optimizer: a ``ScheduledOptimizer.state_dict()``.
        state: what else training goes on from.
        facts: of the manifest; ``step`` and ``identifier`` among them.
    """
    save_weights(weights, folder / MODEL, f"step {facts['step']} of {facts['identifier']}")
    tensors, rest = split_optimizers(optimizer["optimizers"])
    write_tensors(tensors, folder / OPTIMIZER)
    values = {**state, "optimizers": rest, "scheduler_steps": optimizer["scheduler_steps"]}
    (folder / STATE).write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    manifest.write(folder, facts)


def read(folder: Path) -> Loaded:
    """A whole checkpoint, each file read once and checked before it is parsed.

    Raises:
        Damaged: its content is not what was written.
    """
    found = manifest.read(folder)
    data = {name: manifest.verified(folder, found, name) for name in manifest.FILES}
    try:
        state = json.loads(data[STATE])
        weights, tensors = load(data[MODEL]), load(data[OPTIMIZER])
        check(found, weights, state)
        optimizers = join_optimizers(tensors, state.pop("optimizers"))
    except (SafetensorError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{folder} cannot be read ({type(error).__name__}: {error}), and its hashes hold: something "
            "else wrote it. Nothing was deleted: put one back from a copy, or move it away to go on from the one before"
        ) from error
    optimizer = {"optimizers": optimizers, "scaler": None, "scheduler_steps": state.pop("scheduler_steps")}
    return Loaded(weights, optimizer, state, found, manifest.reference(folder, found))


def check(found: Mapping[str, Any], weights: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Refuses content that is not what the manifest says, though its hash is: it would be applied in part.

    Raises:
        ValueError: naming what is wrong.
    """
    missing = [name for name in STATE_KINDS if name not in state]
    if missing:
        raise ValueError(f"{STATE} lacks {', '.join(missing)}")
    wrong = [name for name, kind in STATE_KINDS.items() if not isinstance(state[name], kind)]
    if wrong or (state["steps"], state["epoch"]) != (found["step"], found["epoch"]):
        raise ValueError(f"{STATE} is of step {state['steps']!r}, and of other kinds than expected: {wrong}")
    metrics_from_json(state["metrics"])
    if model_layout(weights) != found["layout"]["model"]:
        raise ValueError(f"{MODEL} holds other tensors than the manifest says")
    given = [
        sorted(f"{number}/{place}" for group in entry["groups"] for place in group["params"])
        for number, entry in enumerate(state["optimizers"])
    ]
    if sorted(name for names in given for name in names) != sorted(found["layout"]["optimizer"]):
        raise ValueError(f"{STATE} has optimizers of other parameters than the manifest says")
