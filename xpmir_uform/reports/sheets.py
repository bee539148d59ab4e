"""Contact sheets: queries and the pictures they find."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image


@dataclass(frozen=True, slots=True)
class Found:
    """A query and what it finds.

    Args:
        query: its text.
        pictures: encoded pictures, best first.
        relevant: whether each is relevant.
    """

    query: str
    pictures: Sequence[bytes]
    relevant: Sequence[bool]


def contact_sheet(path: Path, rows: Sequence[Found]) -> None:
    """Draws one row per query as a PNG; relevant pictures have a green frame."""
    columns = max(len(row.pictures) for row in rows)
    figure = Figure(figsize=(2.6 + 1.2 * columns, 1.3 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns + 1, squeeze=False, width_ratios=[2.4] + [1] * columns)
    for row, (name, *axes) in zip(rows, grid, strict=True):
        name.axis("off")
        name.text(1.0, 0.5, row.query, ha="right", va="center", wrap=True, transform=name.transAxes)
        for axis in axes:
            axis.set_axis_off()
        for axis, picture, relevant in zip(axes, row.pictures, row.relevant, strict=False):
            axis.set_axis_on()
            axis.imshow(np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")))
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(color="green" if relevant else "lightgrey", linewidth=4 if relevant else 1)
    figure.savefig(path, dpi=100)
