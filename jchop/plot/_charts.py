"""Parts that all pictures have: colours, an empty figure, bars, a legend; heat maps, bits against a figure of merit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    """No lines at the top, the right and other sides; a pale grid below what is drawn."""
    axes.spines[["top", "right", *hidden]].set_visible(False)
    if grid:
        axes.grid(color="#e5e5e5", linewidth=0.7)
        axes.set_axisbelow(True)


# -- charts -----------------------------------------------------------------------------------------------------------

#: Of red, green and blue (WCAG 2, without gamma), to choose black or white text.
_LUMINANCE_WEIGHTS = (0.2126, 0.7152, 0.0722)


@dataclass(frozen=True)
class Panel:
    """One heat map of a figure.

    Args:
        values: numbers, rows by columns; NaN is drawn grey and written "nan".
        title: name of the numbers, with their unit.
        text: `format` specification of the number in a cell; default ``".1f"``.
        log: whether the colour scale is logarithmic (positive values); default False.
        low_is_good: whether bright colours mean low values; default False.
        ceiling: upper end of the colour scale; higher values have the last colour. Default: the largest value.
        spread: numbers below the values, with "±"; in the shape of `values`, NaN for none. Default None.

    Example:
        >>> from jchop import plot
        >>> plot.Panel([[97.8, 11.5]], "accuracy (%)").text
        '.1f'
    """

    values: Any
    title: str
    text: str = ".1f"
    log: bool = False
    low_is_good: bool = False
    ceiling: float = math.inf
    spread: Any = None


def heat_map(
    panels: Sequence[Panel], rows: Sequence[str], columns: Sequence[str], *, title: str, note: str = ""
) -> Figure:
    """Tables side by side as heat maps, with the numbers written in the cells.

    Args:
        panels: the tables, each ``len(rows)`` by ``len(columns)``.
        rows: names of the rows, top to bottom, shared by all panels.
        columns: names of the columns, left to right.
        title: the title above the panels.
        note: a line below them. Default: none.

    Raises:
        ValueError: for a panel whose values or spread have another shape.

    Example:
        >>> from jchop import plot
        >>> panel = plot.Panel([[97.8, 11.5]], "accuracy (%)")
        >>> figure = plot.heat_map([panel], ["e4m3"], ["nearest_even", "down"], title="Digits")
        >>> len(figure.axes)
        2
    """
    for panel in panels:
        for field, table in (("values", panel.values), ("spread", panel.spread)):
            if table is not None and np.shape(table) != (len(rows), len(columns)):
                raise ValueError(
                    f"panels: {field} of {panel.title!r} has shape {np.shape(table)}; rows and columns require "
                    f"{(len(rows), len(columns))}"
                )
    row_height = 0.36 if all(panel.spread is None for panel in panels) else 0.42
    width = 2.0 + len(panels) * (1.2 + 0.78 * len(columns))
    figure = new_figure(max(width, 6.0), 2.3 + row_height * len(rows), title)
    if note:
        figure.supxlabel(note, fontsize=11, color=INK)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        _draw_panel(figure, axes, panel, rows, columns)
    return figure


def _draw_panel(figure: Figure, axes: Axes, panel: Panel, rows: Sequence[str], columns: Sequence[str]) -> None:
    from matplotlib import colormaps

    values = np.asarray(panel.values, np.float64)
    spread = np.full(values.shape, np.nan) if panel.spread is None else np.asarray(panel.spread, np.float64)
    colours = colormaps["viridis_r" if panel.low_is_good else "viridis"].with_extremes(bad="#d9d9d9")
    scale = _colour_scale(panel, values)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, norm=scale, aspect="auto")
    axes.set_title(panel.title, fontsize=12, color=INK)
    axes.set_xticks(range(len(columns)), [name.replace("_", "\n", 1) for name in columns], fontsize=10)
    axes.set_yticks(range(len(rows)), rows, fontsize=10)
    axes.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        luminance = np.dot(_LUMINANCE_WEIGHTS, colours(scale(value))[:3])
        bright = not np.isfinite(value) or luminance > 0.45
        text = format(value, panel.text) if np.isfinite(value) else str(value)
        if np.isfinite(spread[row, column]):
            text += f"\n±{spread[row, column]:{panel.text}}"
        size = 8.5 if "\n" in text else 9.5
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color="black" if bright else "white")
    extension = "max" if (values[np.isfinite(values)] > panel.ceiling).any() else "neither"
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=34, extend=extension)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=9)


def _colour_scale(panel: Panel, values: np.ndarray) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    finite = values[np.isfinite(values) & ((values > 0) | (not panel.log))]
    low, high = (finite.min(), finite.max()) if finite.size else (1.0, 1.0)
    high = min(high, panel.ceiling)
    if low >= high:
        low, high = (low / 2, low * 2) if panel.log else (low - 1, low + 1)
    return (LogNorm if panel.log else Normalize)(low, high)


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
    """Formats as points, bits against a figure of merit, with the Pareto front: the best for their bits or fewer.

    Names stand in a column on the right, joined to their points by lines. Points without a place on the axis are
    crosses at its edge: exact ones at the good end, others (infinite, NaN) at the bad end. The front joins no cross.

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
    figure = new_figure(10, max(4.2, 1.6 + 0.24 * len(names)), title, size=14)
    axes = figure.subplots()
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
