"""Panels: what is drawn of a run, as data, and how it is drawn.

Curves differ in darkness and in dashes, so that they can be told apart in grey.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from xpmir_uform.reports.job.formatting import number
from xpmir_uform.reports.job.series import Curve

STYLES = (
    ("#111111", "-"),
    ("#d55e00", "--"),
    ("#0072b2", "-."),
    ("#888888", (0, (1, 1))),
    ("#56b4e9", (0, (6, 1.5))),
    ("#7a5195", (0, (4, 1, 1, 1, 1, 1))),
)
SHADES = ("#173f5f", "#f6d55c", "#7a2048", "#8fc1e3", "#3d7a4a", "#f4f4f4")
"""Of stacked areas; neighbours differ in darkness."""
MOST_CURVES = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Args:
        title: what it shows.
        label: of the vertical axis, with the unit.
        curves: by name.
        stacked: areas on top of each other.
        zero: the vertical axis begins at 0.
        lost: steps whose loss or gradient was not finite.
        events: steps and what happened there, drawn as vertical lines.
        across: the horizontal axis.
        dots: each point is drawn.
    """

    title: str
    label: str
    curves: Mapping[str, Curve]
    stacked: bool = False
    zero: bool = False
    lost: np.ndarray = field(default_factory=lambda: np.empty(0))
    events: Sequence[tuple[int, str]] = ()
    across: str = "optimizer step"
    dots: bool = False

    def shown(self) -> dict[str, Curve]:
        """The curves that are drawn: the first few."""
        return dict(list(self.curves.items())[:MOST_CURVES])

    def caption(self) -> str:
        """The newest values, and what was merged or left out."""
        newest = {name: number(curve.last) for name, curve in self.shown().items() if math.isfinite(curve.last)}
        values = [f"{plain(name)} {value}" for name, value in newest.items()]
        if len(self.curves) == 1:
            values = [f"{value} {self.label}" for value in newest.values()]
        parts = [f"Newest: {'; '.join(values)}."] if values else []
        bucket = max(curve.bucket for curve in self.curves.values())
        if bucket > 1:
            band = "" if self.stacked else ", the band reaches from its least to its greatest value"
            parts.append(f"Downsampled: each point is the mean of up to {bucket:,} steps{band}.")
        if len(self.lost):
            parts.append(f"The loss or the gradient was not finite at {len(self.lost):,} steps (crosses).")
        if len(self.curves) > MOST_CURVES:
            parts.append(f"The first {MOST_CURVES} of {len(self.curves)} are drawn.")
        return " ".join(parts)


def plain(name: str, longest: int = 48) -> str:
    """A name that can be drawn: printable, and short enough for a legend."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return name if len(name) <= longest else name[: longest - 1] + "…"


def wide(curves: Iterable[Curve]) -> bool:
    """Whether a logarithmic axis is wanted: hardly a value that it cannot show, the greatest far above the usual."""
    values = np.concatenate([np.concatenate([curve.low, curve.high]) for curve in curves])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    return len(positive) > 0.9 * len(values) and bool(positive.max() > 50 * np.median(positive))


def draw_curves(axes: Axes, panel: Panel) -> list:
    """Lines with the band of what was merged."""
    handles = []
    for (name, curve), (color, dashes) in zip(panel.shown().items(), cycle(STYLES)):
        alone = panel.dots or np.isfinite(curve.middle).sum() < 2
        handles += axes.plot(
            curve.steps, curve.middle, color=color, ls=dashes, lw=1.4, marker="o" if alone else None, ms=4, label=name
        )
        if curve.bucket > 1:
            axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.22, lw=0)
    return handles


def draw_stack(axes: Axes, panel: Panel) -> list:
    """Areas on top of each other; bars where there is one point alone."""
    shown = panel.shown()
    steps = next(iter(shown.values())).steps
    layers = [np.nan_to_num(curve.middle) for curve in shown.values()]
    if len(steps) > 1:
        return axes.stackplot(steps, layers, colors=SHADES, edgecolor="#333333", lw=0.3)
    bottoms = np.cumsum([np.zeros(1), *layers[:-1]], axis=0)
    return [
        axes.bar(steps, layer, 0.4, bottom, color=shade, edgecolor="black", lw=0.3)
        for layer, bottom, shade in zip(layers, bottoms, cycle(SHADES))
    ]


def apart(events: Sequence[tuple[int, str]], least: float) -> list[tuple[int, str]]:
    """Events that lie closer together than ``least``, whose names would cover each other, as one."""
    merged: list[tuple[int, str]] = []
    for step, text in events:
        if merged and step - merged[-1][0] < least:
            merged[-1] = (merged[-1][0], f"{merged[-1][1]}, {text}")
        else:
            merged.append((step, text))
    return merged


def draw_marks(axes: Axes, panel: Panel) -> None:
    """Crosses along the bottom where the value is not finite, dotted lines where something happened."""
    across = axes.get_xaxis_transform()
    if len(panel.lost):
        # Crosses that would cover each other are drawn once.
        width = max(1, int(np.ptp(panel.lost)) // 400)
        places = np.unique(panel.lost // width * width)
        axes.plot(places, np.full(len(places), 0.03), "x", color="#b00000", ms=5, transform=across, clip_on=False)
    for step, text in apart(panel.events, np.ptp(axes.get_xlim()) / 40)[:MOST_CURVES]:
        axes.axvline(step, color="#555555", ls=":", lw=0.9)
        axes.text(
            step, 0.98, f" {plain(text)}", transform=across, rotation=90, va="top", fontsize=7, parse_math=False,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        )  # fmt: skip


def draw(axes: Axes, panel: Panel) -> None:
    """Draws a panel into axes."""
    handles = (draw_stack if panel.stacked else draw_curves)(axes, panel)
    steps = next(iter(panel.curves.values())).steps
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    draw_marks(axes, panel)
    if not panel.stacked and not panel.zero and wide(panel.shown().values()):
        axes.set_yscale("log")
        # The usual labels of logarithmic axes are mathematics, which names of ours must never be taken for.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif panel.stacked or panel.zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if len(handles) > 1:
        draw_legend(axes, handles, list(panel.shown()))


def draw_legend(axes: Axes, handles: list, names: Sequence[str]) -> None:
    """Names the curves beside the axes; a name is text, whatever signs of mathematics it holds."""
    legend = axes.legend(
        handles, [""] * len(handles), loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=plain(name), parse_math=False)


def svg(panel: Panel) -> bytes:
    """A panel as SVG; equal panels give equal bytes."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "run"}):
        figure = Figure(figsize=(8, 3), layout="constrained")
        draw(figure.add_subplot(), panel)
        target = io.BytesIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()


def png(panels: Sequence[Panel], title: str) -> bytes:
    """All panels in one picture of two columns."""
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(16, 3 * rows + 0.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for place, panel in enumerate(panels, 1):
        draw(figure.add_subplot(rows, 2, place), panel)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()
