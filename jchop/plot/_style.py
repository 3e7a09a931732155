"""Colours of all pictures, and parts that several have: an empty figure, bars, a legend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._files import require_extra
from jchop.formats import ElementFormat, ScaledFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NORMAL, SUBNORMAL, INK, LOST = "#31688e", "#d95f02", "#333333", "#b2182b"
BARS = (NORMAL, SUBNORMAL, LOST, "#7b3294")


def need_matplotlib() -> None:
    """ModuleNotFoundError that names the extra ``plot``, if Matplotlib is missing."""
    require_extra("jchop.plot", "plot", ("matplotlib",))


def new_figure(width: float, height: float, title: str, size: float = 15) -> Figure:
    """An empty figure with a title; sizes are in inches and points."""
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=size, fontweight="bold", color=INK)
    return figure


def element_of(fmt: ElementFormat | str) -> ElementFormat:
    """The element format that `fmt` is or names; TypeError for a scaled format, which has no values of its own."""
    found = parse_format(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(found, ElementFormat):
        what = f"its element {str(found.element)!r}" if isinstance(found, ScaledFormat) else "a format or its text"
        raise TypeError(f"fmt={str(fmt)!r} has no values of its own to draw; pass {what}")
    return found


def draw_bars(axes: Axes, bars: dict[str, list[Any]], low: float, text: Any) -> None:
    """A bar for each name in each row, with its number; no bar if it is zero or unknown."""
    height = 0.76 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        shift = (index + 0.5) * height - 0.38
        known = [(place + shift, value) for place, value in enumerate(values) if value > 0]
        # Bars of length zero for the others: without any bar, the legend's colour would be Matplotlib's own.
        lengths = [max(value - low, 0.0) if value > 0 else 0.0 for value in values]
        axes.barh(np.arange(len(values)) + shift, lengths, 0.95 * height, low, color=BARS[index], label=name)
        for y, value in known:
            axes.text(value, y, text(value), va="center", fontsize=8, color=INK)


def draw_legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9, frameon=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
