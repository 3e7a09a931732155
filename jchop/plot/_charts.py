"""Parts that all pictures have: colours, an empty figure, bars, a legend; dot plots, bits against a figure of merit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common.checks import check
from jchop._common.files import require_extra
from jchop.formats import CodebookFormat, ElementFormat, ScaledFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE, ORANGE, INK, RED = "#31688e", "#d95f02", "#333333", "#b2182b"
BAR_COLOURS = (BLUE, ORANGE, RED, "#7b3294")


def new_figure(width: float, height: float, title: str, *grid: int, size: float = 15, **how: Any) -> tuple[Figure, Any]:
    """An empty figure with a title, and its axes: one, or a grid of them. Sizes are in inches and points."""
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=size, fontweight="bold", color=INK)
    return figure, figure.subplots(*grid, **how)


def element_format_of(fmt: ElementFormat | str, most_bits: int = 16) -> ElementFormat:
    """The element format that `fmt` is or names.

    Raises:
        TypeError: for a scaled format, which has no values of its own.
        ValueError: for a format of too many values.
    """
    element = parse_format(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(element, ElementFormat):
        scaled = isinstance(element, ScaledFormat)
        alternative = f"its element {str(element.element)!r}" if scaled else "a format or its text"
        raise TypeError(f"fmt={str(fmt)!r} has no values of its own to draw; pass {alternative}")
    if element.bits > most_bits:
        raise ValueError(f"fmt={element} has {element.bits} bits; formats of at most {most_bits} bits can be drawn")
    return element


def format_label(fmt: ElementFormat) -> str:
    """The format's text; for a long codebook the number of its levels."""
    text = str(fmt)
    return f"codebook of {len(fmt.levels)} levels" if isinstance(fmt, CodebookFormat) and len(text) > 40 else text


def draw_at_edge(axes: Axes, x: Any, edge: float, text: str, colour: str) -> None:
    """Crosses for values that have no place on the axis, at the upper or lower edge, with `text` beside them."""
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
        # Bars of length zero for the others: without any bar, the legend's colour would be Matplotlib's own.
        lengths = [max(value - low, 0.0) if value > 0 else 0.0 for value in values]
        axes.barh(np.arange(len(values)) + shift, lengths, 0.95 * height, low, color=BAR_COLOURS[index], label=name)
        for row_index, value in enumerate(values):
            if value > 0:
                axes.text(value, row_index + shift, text(value), va="center", fontsize=8, color=INK)


def draw_legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9, frameon=False)
    axes.tick_params(axis="y", length=0)
    draw_frame(axes, grid=False)


def draw_frame(axes: Axes, *hidden: str, grid: bool = True) -> None:
    """No lines at the top, the right and other sides; a pale grid below the drawing."""
    axes.spines[["top", "right", *hidden]].set_visible(False)
    if grid:
        axes.grid(color="#e5e5e5", linewidth=0.7)
        axes.set_axisbelow(True)


# -- charts -----------------------------------------------------------------------------------------------------------

_DOT_COLOURS = (*BAR_COLOURS, "#1b9e77", "#e7298a", "#666666", "#a6761d", "#66a61e", "#80b1d3", "#e6ab02")


def dot_plot(
    values: Mapping[str, Sequence[float]], rows: Sequence[str], *, xlabel: str, title: str, note: str = ""
) -> Figure:
    """Draws a dot plot: one row for each name, with a dot for each series.

    The axis is linear to 1 and logarithmic beyond, so that small and large values are seen together. A value below 0 is
    drawn at 0. NaN or an infinity is a cross at the right end.

    Args:
        values: the numbers of each series by its name, one for each row.
        rows: names of the rows, top to bottom.
        xlabel: name of the numbers, with their unit.
        title: the title above.
        note: a line below. Default: none.

    Raises:
        ValueError: for a series with another length than `rows`.

    Example:
        >>> from jchop import plot
        >>> drops = {"nearest_even": [0.2, 40.0], "stochastic": [0.1, 12.0]}
        >>> figure = plot.dot_plot(drops, ["e4m3", "e2m1"], xlabel="points lost", title="Digits")
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['e4m3', 'e2m1']
    """
    for name, numbers in values.items():
        check(len(numbers) == len(rows), f"values: {name!r} has {len(numbers)} numbers, and rows has {len(rows)}")
    figure, axes = new_figure(10, 1.8 + 0.32 * len(rows), title)
    places = np.arange(len(rows))
    table = np.asarray(list(values.values()), np.float64)
    finite = np.isfinite(table)
    right = 1.5 * max(1.0, np.max(table, initial=0.0, where=finite))
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-0.1, right)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, rows, fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    shown = np.where(finite, np.maximum(table, 0.0), right)
    axes.hlines(places, shown.min(axis=0), shown.max(axis=0), color="#bbbbbb", linewidth=1, zorder=1)
    for index, name in enumerate(values):
        colour, on_axis = _DOT_COLOURS[index % len(_DOT_COLOURS)], finite[index]
        axes.scatter(shown[index][on_axis], places[on_axis], color=colour, s=26, label=name, zorder=2, clip_on=False)
        axes.scatter(shown[index][~on_axis], places[~on_axis], color=colour, marker="X", s=34, zorder=2, clip_on=False)
    axes.set_xlabel(xlabel if not note else f"{xlabel}\n{note}", fontsize=10)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9, frameon=False)
    draw_frame(axes)
    return figure


def pareto(
    names: Sequence[str],
    bits: Sequence[float],
    values: Sequence[float],
    *,
    ylabel: str,
    title: str = "Bits against error",
    higher_is_better: bool = False,
    log: bool = False,
) -> Figure:
    """Draws formats as points, bits against a figure of merit, with the Pareto front: the best for their bits or fewer.

    Names are in a column on the right, joined to their points by lines. Points without a place on the axis are crosses
    at its edge: exact ones at the good end, others (infinite, NaN) at the bad end. The front joins no cross.

    Args:
        names: a name for each point.
        bits: bits of each.
        values: the figure of each: an error, or a ratio with `higher_is_better`.
        ylabel: name of the figure, with its unit.
        title: the title above. Default ``"Bits against error"``.
        higher_is_better: whether high values are good; default False.
        log: whether the scale of values is logarithmic; an error of zero is then exact. Default False.

    Raises:
        ValueError: for lists of several lengths, or empty ones.

    Example:
        >>> from jchop import plot
        >>> figure = plot.pareto(["e5m2", "e4m3", "half"], [8, 8, 16], [0.1, 0.05, 1e-3], ylabel="error", log=True)
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['e5m2', 'e4m3', 'half']
    """
    if not names or len({len(names), len(bits), len(values)}) > 1:
        raise ValueError(f"names, bits and values have lengths {len(names)}, {len(bits)}, {len(values)}; they must be "
                         "equal, and at least 1")  # fmt: skip
    x, y = np.asarray(bits, np.float64), np.asarray(values, np.float64)
    on_axis = np.isfinite(y) & ((y > 0) | (not log))
    exact = ~on_axis & (y == (math.inf if higher_is_better else 0.0))
    bottom, top = _axis_ends(y[on_axis], log)
    good, bad = (top, bottom) if higher_is_better else (bottom, top)
    y = np.where(on_axis, y, np.where(exact, good, bad))
    figure, axes = new_figure(10, max(4.2, 1.6 + 0.24 * len(names)), title, size=14)
    axes.set(yscale="log" if log else "linear", ylim=(bottom, top))
    left, right = float(x.min()), float(x.max())
    span = (right - left) or 1.0
    axes.set_xlim(left - 0.06 * span, right + 0.1 * span)
    front = _pareto_front(x, y if not higher_is_better else -y, on_axis | exact)
    line = front[on_axis[front]]
    axes.plot(x[line], y[line], color=BLUE, linewidth=1.2, alpha=0.6, zorder=1, label="Pareto front")
    best = np.isin(np.arange(len(x)), front)
    for group, colour in ((best & on_axis, BLUE), (~best & on_axis, "#888888")):
        axes.scatter(x[group], y[group], color=colour, s=36, zorder=2, clip_on=False)
    draw_at_edge(axes, x[exact], good, "exact", BLUE)
    draw_at_edge(axes, x[~on_axis & ~exact], bad, "infinite or NaN", RED)
    if not on_axis.any():  # nothing on the axis has a value
        axes.set_yticks([])
        axes.set_yticks([], minor=True)
    _draw_names(axes, names, x, y, best)
    axes.set_xlabel("bits for each number", fontsize=11)
    axes.set_ylabel(ylabel, fontsize=11)
    draw_frame(axes)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 1.08), fontsize=9, frameon=False)
    return figure


def _axis_ends(values: np.ndarray, log: bool) -> tuple[float, float]:
    """The ends of an axis with room around the values."""
    if not values.size:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    edge = 0.08 * (high - low) or 1.0
    return (low / 3, high * 3) if log else (low - edge, high + edge)


def _pareto_front(bits: np.ndarray, cost: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The indexes of the points that none with as few bits and as low a cost beats, by bits."""
    order = np.lexsort((cost, bits))
    order = order[valid[order]]
    least = np.minimum.accumulate(np.append(np.inf, cost[order]))
    return order[cost[order] < least[:-1]]


def _draw_names(axes: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray, best: np.ndarray) -> None:
    """Names in a column at the right, in the order of the points' heights, each at a place of its own."""
    low, high = axes.get_ylim()
    height = np.log(y / low) / np.log(high / low) if axes.get_yscale() == "log" else (y - low) / (high - low)
    order = np.lexsort((-x, height))
    step = 1.0 / len(names)
    label_heights = np.empty(len(names))
    next_height = 0.0
    arrow = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0.0, 0.5)}
    for rank, i in enumerate(order):  # as near the point as the names below and above leave room for
        label_heights[i] = min(max(height[i], next_height), 1.0 - (len(names) - 1 - rank) * step)
        next_height = label_heights[i] + step
    for i, name in enumerate(names):
        weight, position = "bold" if best[i] else "normal", (1.02, label_heights[i])
        axes.annotate(
            name, (x[i], y[i]), position, textcoords="axes fraction", va="center", fontsize=8.5, color=INK,
            fontweight=weight, annotation_clip=False, arrowprops=arrow,
        )  # fmt: skip
