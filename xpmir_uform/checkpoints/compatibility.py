"""What a checkpoint must have in common with the task that goes on from it: configuration, data and layouts."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from experimaestro import Config

from xpmir_uform.base.checked_files import hash_of, quoted
from xpmir_uform.data.items import Bag, Item

UNRELATED = ("listeners", "resume_from")
"""Parameters of a learner that its weights do not depend on, or that say where they come from."""

PROBES = 64
"""How many bags a fingerprint looks into."""


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Args:
        identifier: the task's: its type and the hash of its parameters.
        config: the parameters that change the result, by dotted name.
        data: a fingerprint of the training data.
        settings: every field, those that change no result and those at their defaults too, by dotted name.
    """

    identifier: str
    config: Mapping[str, Any]
    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def parameters_of(config: Config, prefix: str = "", every: bool = False) -> Iterator[tuple[str, Any]]:
    """(dotted name, plain value) of everything below an instance that its identifier holds.

    A parameter at a default that the identifier leaves out is left out here too, so that one that a later version adds
    does not make older checkpoints another task's.

    Args:
        every: all fields are wanted; but for paths, which say nothing elsewhere.
    """
    kind: Any = type(config).__xpmtype__
    yield f"{prefix}type", str(kind.identifier)
    for name, argument in sorted(kind.arguments.items()):
        if not every and (argument.ignored or (argument.generator is not None and argument.default is None)):
            continue
        value = getattr(config, name, None)
        left_out = isinstance(value, Path) if every else argument.ignore_default_in_identifier and not argument.constant
        if value is None or (left_out and (every or _is(value, argument.default))):
            continue
        yield from _plain(value, f"{prefix}{name}", every)


def _is(value: Any, default: Any) -> bool:
    return not isinstance(value, Config) and value == default


def _plain(value: Any, name: str, every: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from parameters_of(value, f"{name}.", every)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _plain(value[key], f"{name}.{key}", every)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, part in enumerate(value):
            yield from _plain(part, f"{name}.{number}", every)
    else:
        yield name, value if isinstance(value, (bool, int, float)) else str(value)


def config_of(learner: Config) -> dict[str, Any]:
    """The parameters of a learner that decide its weights."""
    return {name: value for name, value in parameters_of(learner) if name.partition(".")[0] not in UNRELATED}


def settings_of(learner: Config) -> dict[str, Any]:
    """Every setting of a learner, defaults too."""
    return dict(parameters_of(learner, every=True))


def fingerprint(sampler: Any) -> str:
    """A hash of the number of bags of a data set and of ``PROBES`` of them, spread evenly over it.

    Each probe enters with its items (modality, key, content, side, group, choices, targets), links and key, as the
    seed's first epoch sees it. A change elsewhere is not seen; the price is 64 bags at each start.

    Args:
        sampler: a ``BagSampler``; one without a ``source`` has the first bag of its first step hashed; None: nothing.
    """
    digest = hashlib.sha256()
    if sampler is None:
        return digest.hexdigest()
    source = getattr(sampler, "source", None)
    bags = sampler.bags(0, 1) if source is None else _probes(source, sampler.seed)
    digest.update(str(None if source is None else len(source)).encode())
    for bag in bags:
        digest.update(json.dumps([[*map(_item, bag.items)], bag.attract, bag.repel, bag.ignore, bag.key]).encode())
    return digest.hexdigest()


def _probes(source: Any, seed: int) -> Iterator[Bag]:
    count = len(source)
    for index in sorted({number * count // PROBES for number in range(PROBES)}) if count else ():
        yield source.bag(index, seed, 0)


def _item(item: Item) -> list[Any]:
    content = hashlib.sha256(item.content).hexdigest()
    return [item.modality.name, item.key, content, item.side.name, item.group, item.choices.hex(), item.targets]


def layout_of(tensor: torch.Tensor) -> str:
    """Type and shape, as ``float32[128, 64]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def model_layout(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The layout of each weight by name."""
    return {name: layout_of(tensor) for name, tensor in state.items()}


def optimizer_layout(optimizers: Sequence[Any]) -> dict[str, str]:
    """The layout of each optimized parameter, by the number of its optimizer and of its place there."""
    found: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found |= {f"{number}/{place}": f"{kind} {layout_of(p)}" for place, p in enumerate(parameters)}
    return found


def fit_of(subject: Subject, model: Mapping[str, str], optimizer: Mapping[str, str]) -> dict[str, Any]:
    """The part of a manifest that says what the checkpoint fits."""
    layout = {"model": dict(model), "optimizer": dict(optimizer)}
    hashes = {"config": hash_of(subject.config), "data": subject.data}
    return {
        "config": dict(subject.config),
        "layout": layout,
        "hashes": {**hashes, **{f"{name}_layout": hash_of(values) for name, values in layout.items()}},
    }


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What two :func:`fit_of` do not share: by name, the value of each."""
    pairs = {
        "": (found["config"], expected["config"]),
        "data": ({"": found["hashes"]["data"]}, {"": expected["hashes"]["data"]}),
        "model layout ": (found["layout"]["model"], expected["layout"]["model"]),
        "optimizer layout ": (found["layout"]["optimizer"], expected["layout"]["optimizer"]),
    }
    return {
        f"{prefix}{name}": [theirs.get(name), ours.get(name)]
        for prefix, (theirs, ours) in pairs.items()
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    }


def side_by_side(fields: Mapping[str, Sequence[Any]], titles: tuple[str, str, str]) -> str:
    """Differing fields as an aligned text of three columns; long values are cut."""
    rows = [
        titles,
        *(
            (quoted(name), *("(none)" if value is None else quoted(value, 40) for value in values))
            for name, values in fields.items()
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {name:<{widths[0]}}  {theirs:<{widths[1]}}  {ours}" for name, theirs, ours in rows)
