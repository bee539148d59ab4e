"""Curves of what a run logged to TensorBoard."""

import logging
from pathlib import Path

from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_scalars(folder: Path, tag: str) -> tuple[list[int], list[float]]:
    """The steps and values of one tag; of a step that was logged again after a resume, the newest value.

    Raises:
        ValueError: nothing was logged under that tag.
    """
    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if tag not in tags:
        raise ValueError(f"no scalar {tag!r} in {folder}, expected one of {', '.join(tags) or 'none: it is empty'}")
    values = {event.step: event.value for event in events.Scalars(tag)}
    return list(values), list(values.values())


def plot_curve(path: Path, steps: list[int], values: list[float], *, title: str, label: str) -> None:
    """Draws one curve as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="optimizer step", ylabel=label)
    axes.plot(steps, values, marker=".")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
