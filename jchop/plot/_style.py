"""Colours of all pictures, and parts that several have: an empty figure, bars, a legend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common.files import require_extra
from jchop.formats import CodebookFormat, ElementFormat, ScaledFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, INK, RED = "#31688e", "#d95f02", "#333333", "#b2182b"
BAR_COLOURS = (BLUE, ORANGE, RED, "#7b3294")
_MAX_PLOT_BITS = 16


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


def element_format_of(fmt: ElementFormat | str) -> ElementFormat:
    """The element format that `fmt` is or names.

    Raises:
        TypeError: for a scaled format, which has no values of its own.
        ValueError: for a format of too many values.
    """
    element = parse_format(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(element, ElementFormat):
        alternative = (
            f"its element {str(element.element)!r}" if isinstance(element, ScaledFormat) else "a format or its text"
        )
        raise TypeError(f"fmt={str(fmt)!r} has no values of its own to draw; pass {alternative}")
    if element.bits > _MAX_PLOT_BITS:
        raise ValueError(
            f"fmt={element} has {element.bits} bits; formats of at most {_MAX_PLOT_BITS} bits can be drawn"
        )
    return element


def format_label(fmt: ElementFormat) -> str:
    """The format's text; for a long codebook the number of its levels."""
    text = str(fmt)
    return f"codebook of {len(fmt.levels)} levels" if isinstance(fmt, CodebookFormat) and len(text) > 40 else text


def draw_at_edge(axes: Axes, x: Any, edge: float, text: str, colour: str) -> None:
    """Crosses for values that have no place on the axis, at the upper or lower edge, with what they are."""
    low, _ = axes.get_ylim()
    axes.scatter(x, np.full(len(x), edge), color=colour, marker="X", s=36, zorder=2, clip_on=False)
    if len(x):
        side, shift = ("bottom", 7) if edge == low else ("top", -7)
        axes.annotate(
            text, (0.005, edge), (0, shift), xycoords=axes.get_yaxis_transform(), textcoords="offset points", va=side,
            fontsize=8.5, color=colour,
        )  # fmt: skip


def draw_bars(axes: Axes, bars: dict[str, list[Any]], low: float, text: Any) -> None:
    """A bar for each name in each row, with its number; no bar if it is zero or unknown."""
    height = 0.76 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        shift = (index + 0.5) * height - 0.38
        labels = [(row_index + shift, value) for row_index, value in enumerate(values) if value > 0]
        # Bars of length zero for the others: without any bar, the legend's colour would be Matplotlib's own.
        lengths = [max(value - low, 0.0) if value > 0 else 0.0 for value in values]
        axes.barh(np.arange(len(values)) + shift, lengths, 0.95 * height, low, color=BAR_COLOURS[index], label=name)
        for y, value in labels:
            axes.text(value, y, text(value), va="center", fontsize=8, color=INK)


def draw_legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9, frameon=False)
    axes.tick_params(axis="y", length=0)
    draw_frame(axes, grid=False)


def draw_frame(axes: Axes, *hidden: str, grid: bool = True) -> None:
    """No lines at the top, the right and other sides; a pale grid below what is drawn."""
    axes.spines[["top", "right", *hidden]].set_visible(False)
    if grid:
        axes.grid(color="#e5e5e5", linewidth=0.7)
        axes.set_axisbelow(True)
