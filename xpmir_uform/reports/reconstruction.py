"""Pictures of reconstructions: what was hidden of held-out items, and what the model tells, as PNG and as HTML.

Letters: T patches, P values of one patch, H rows and W columns of pixels, C channels.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from math import isqrt
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from xpmir_uform.data.decoding.image import MIDDLE
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality, Slot
from xpmir_uform.losses.masked import MaskedLoss
from xpmir_uform.losses.masking import deviation
from xpmir_uform.model import UFormEncoder, pack
from xpmir_uform.model.inference.batches import evaluating
from xpmir_uform.model.uform import Outputs

HIDDEN = "\N{MEDIUM SHADE}"
"""Shown for a masked byte."""

GREY = 200
"""Shown for a masked patch."""

COLUMNS = ("original", "masked", "reconstructed")
Runs = list[tuple[str, bool]]
"""Parts of a text, and whether each was chosen to be told."""


@dataclass(frozen=True, slots=True)
class PictureReconstruction:
    """(H, W, C) uint8 each. What is told of a masked patch is given the mean and deviation that the patch had."""

    original: np.ndarray
    masked: np.ndarray
    reconstructed: np.ndarray


@dataclass(frozen=True, slots=True)
class TextReconstruction:
    """The likeliest byte stands at each place that was chosen, whatever was shown there."""

    original: Runs
    masked: Runs
    reconstructed: Runs


Reconstruction = PictureReconstruction | TextReconstruction


@torch.no_grad()
def reconstruct(model: UFormEncoder, loss: MaskedLoss, item: Item, seed: int = 0) -> Reconstruction:
    """A text or picture, masked as ``loss`` masks it at step 0, and what the model tells.

    Raises:
        ValueError: the item is neither.
    """
    if item.modality not in (Modality.TEXT, Modality.IMAGE):
        raise ValueError(f"{item} cannot be shown, expected a text or a picture")
    whole = decode(item, model.shapes)
    asked = loss.ask(whole, item, seed, 0)
    with evaluating(model):
        outputs = model(pack([asked]).to(model.device))
    if item.modality == Modality.TEXT:
        return of_text(whole, asked, outputs)
    assert model.image is not None
    return of_picture(whole, asked, outputs, model.image.channels)


def of_picture(whole: Segment, asked: Segment, outputs: Outputs, channels: int) -> PictureReconstruction:
    """The reconstruction of one picture of C ``channels``."""
    assert outputs.patches is not None
    places = np.zeros(0, np.int64) if asked.masked is None else asked.masked
    told = outputs.patches[Modality.IMAGE].float().cpu().numpy()
    hidden, filled = whole.values.copy(), whole.values.copy()
    hidden[places] = GREY / MIDDLE - 1
    truth = whole.values[places]
    filled[places] = told * deviation(truth) + truth.mean(axis=1, keepdims=True)
    return PictureReconstruction(*(pixels(values, whole.grid, channels) for values in (whole.values, hidden, filled)))


def pixels(patches: np.ndarray, grid: tuple[int, int, int], channels: int) -> np.ndarray:
    """(H, W, C) uint8 from (T, P) standardised values: what :func:`~xpmir_uform.data.decoding.image.patches` cut."""
    _, rows, columns = grid
    side = isqrt(patches.shape[1] // channels)
    tiles = patches.reshape(rows, columns, side, side, channels).swapaxes(1, 2)
    values = (tiles.reshape(rows * side, columns * side, channels) + 1) * MIDDLE
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def of_text(whole: Segment, asked: Segment, outputs: Outputs) -> TextReconstruction:
    """The reconstruction of one text."""
    assert outputs.bytes is not None
    places = np.zeros(0, np.int64) if asked.masked is None else asked.masked
    told = whole.values.copy()
    told[places] = outputs.bytes.argmax(dim=1).cpu().numpy()
    return TextReconstruction(*(runs(values, places) for values in (whole.values, asked.values, told)))


def runs(values: np.ndarray, places: np.ndarray) -> Runs:
    """A text (T,) in runs of bytes that were chosen and bytes that were not."""
    chosen = np.isin(np.arange(len(values)), places).tolist()
    return [
        (readable([value for value, _ in run]), was)
        for was, run in groupby(zip(values.tolist(), chosen, strict=True), key=lambda pair: pair[1])
    ]


def readable(values: Sequence[int]) -> str:
    """Bytes and masks as characters; what is no UTF-8 as the replacement character."""
    parts = [
        HIDDEN * len(run) if hidden else bytes(value for value in run if value < Slot.EMPTY).decode(errors="replace")
        for hidden, run in ((hidden, list(run)) for hidden, run in groupby(values, key=lambda v: v == Slot.MASK))
    ]
    unknown = "\N{REPLACEMENT CHARACTER}"
    return "".join(character if character.isprintable() else unknown for character in "".join(parts))


def draw(path: Path, reconstructions: Sequence[Reconstruction], title: str) -> None:
    """Draws them as a PNG: pictures in rows of three, then texts in three lines, what was chosen in colour."""
    pictures = [one for one in reconstructions if isinstance(one, PictureReconstruction)]
    texts = [one for one in reconstructions if isinstance(one, TextReconstruction)]
    heights = [part for part in (1.4 * -(-len(pictures) // 2), 0.8 * len(texts)) if part]
    figure = Figure(figsize=(7.5, 0.5 + sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0].tolist()
    if pictures:
        _draw_pictures(parts.pop(0), pictures)
    if texts:
        _draw_texts(parts.pop(0), texts)
    figure.savefig(path, dpi=120)


def _draw_pictures(figure: SubFigure, pictures: Sequence[PictureReconstruction]) -> None:
    """Two pictures a row, each in three columns."""
    grid = figure.subplots(-(-len(pictures) // 2), 2 * len(COLUMNS), squeeze=False)
    axes = grid.reshape(-1, len(COLUMNS))
    for axis in grid.flat:
        axis.set_axis_off()
    for row, one in zip(axes, pictures, strict=False):
        for axis, name in zip(row, COLUMNS, strict=True):
            axis.imshow(getattr(one, name), cmap="grey", vmin=0, vmax=255)
            axis.set_title(name, fontsize=8)


def _draw_texts(figure: SubFigure, texts: Sequence[TextReconstruction]) -> None:
    """Three lines each, every character in a column of its own."""
    axis = figure.add_subplot()
    axis.set_axis_off()
    lines = [(name, getattr(one, name)) for one in texts for name in COLUMNS]
    longest = max((sum(len(part) for part, _ in line) for _, line in lines), default=1)
    axis.set(xlim=(-14, max(50, longest)), ylim=(len(lines) + len(texts), -1))
    for number, (name, line) in enumerate(lines):
        height, column = number + number // 3, 0
        axis.text(-14, height, name, fontsize=8, color="grey", va="center")
        for part, was in line:
            for character in part:
                colour, weight = ("tab:red", "bold") if was else ("black", "normal")
                axis.text(
                    column, height, character, color=colour, weight=weight, family="monospace", fontsize=8, va="center"
                )
                column += 1


def write_page(path: Path, reconstructions: Sequence[Reconstruction], title: str, note: str) -> None:
    """Writes them as one HTML page that needs nothing else."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("reconstruction.html").read_text())
    pictures = [
        {name: _embedded(getattr(one, name)) for name in COLUMNS}
        for one in reconstructions
        if isinstance(one, PictureReconstruction)
    ]
    texts = [one for one in reconstructions if isinstance(one, TextReconstruction)]
    page = template.render(title=title, note=note, columns=COLUMNS, pictures=pictures, texts=texts)
    path.write_text(page, encoding="utf-8")


def _embedded(picture: np.ndarray) -> str:
    """A PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(picture if picture.shape[2] == 3 else picture[:, :, 0]).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
