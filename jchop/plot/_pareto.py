"""Bits against a figure of merit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jchop.plot._style import BLUE, INK, RED, draw_at_edge, draw_frame, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    axes.set_yscale("log" if log else "linear")
    axes.set_ylim(bottom, top)
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
    if log:
        return low / 3, high * 3
    edge = 0.08 * (high - low) or 1.0
    return low - edge, high + edge


def _pareto_front(bits: np.ndarray, cost: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The indexes of the points that none with as few bits and as low a cost beats, by bits."""
    order = [i for i in np.lexsort((cost, bits)) if valid[i]]
    front, least = [], math.inf
    for i in order:
        if cost[i] < least:
            front.append(i)
            least = cost[i]
    return np.array(front, np.int64)


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
        axes.annotate(
            name,
            xy=(x[i], y[i]),
            xytext=(1.02, label_heights[i]),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=INK,
            fontweight="bold" if best[i] else "normal",
            annotation_clip=False,
            arrowprops=arrow,
        )
