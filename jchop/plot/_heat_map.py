"""Heat maps of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop.plot._style import INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        bright = not np.isfinite(value) or _luminance(colours(scale(value))) > 0.45
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


def _luminance(colour: Any) -> float:
    """Relative luminance of an sRGB colour (WCAG 2, without gamma), to choose black or white text."""
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]
