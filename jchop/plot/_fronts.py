"""Costs against errors: calibrations, and fronts of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._files import require_extra
from jchop.plot._bars import draw_bars, draw_legend
from jchop.plot._style import INK, LOST, NORMAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

__all__ = ["calibration", "pareto"]


def calibration(seen: Any, *, title: str = "Signal over error of products") -> Figure:
    """The weights of a calibration as bars: signal over error in dB of their products on the data.

    There are two bars for each weight whose product was looked at, in the order of the report: with each element
    rounded to nearest by itself, and as it was rounded. A product without an error has no bar, and the word "exact".

    Args:
        seen: a `jchop.ptq.PtqReport`.
        title: the title above the bars. Default ``"Signal over error of products"``.

    Raises:
        TypeError: if `seen` is not such a report.
        ValueError: if no product was looked at.

    Example:
        >>> import jax, jchop as jc
        >>> x, w = jax.random.normal(jax.random.key(0), (64, 8)), jax.random.normal(jax.random.key(1), (8, 4))
        >>> _, report = jc.ptq.quantize(lambda p, x: x @ p["w"], jc.Rule(weight="int4(group=all)"), {"w": w}, [x])
        >>> [label.get_text().split()[0] for label in report.plot().axes[0].get_yticklabels()]
        ['w']
    """
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    weights = getattr(seen, "weights", None)
    if weights is None:
        raise TypeError(f"seen={seen!r} must be a report of jchop.ptq.quantize")
    rows = [row for row in weights if not math.isnan(row.before)]
    if not rows:
        raise ValueError("seen has no weight whose product was looked at")
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(rows)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold", color=INK)
    axes = figure.subplots()
    bars = {"each element to nearest": [r.before for r in rows], "as rounded": [r.after for r in rows]}
    finite = [value for values in bars.values() for value in values if math.isfinite(value)]
    low, high = min(0.0, *finite, 0.0), max(1.0, *finite, 1.0)
    drawn = {name: [value if math.isfinite(value) else 0.0 for value in values] for name, values in bars.items()}
    draw_bars(axes, drawn, 0.0, lambda value: f" {value:.1f}")
    for shift, values in zip((-0.19, 0.19), bars.values(), strict=True):
        for place, value in enumerate(values):
            if not value > 0 or math.isinf(value):
                text = "exact" if value > 0 else f"{value:.1f}"
                axes.text(0, place + shift, f" {text}", va="center", fontsize=8, color=INK)
    axes.set_xlim(low, 1.15 * high)
    axes.set_xlabel("signal over error on the data (dB)", fontsize=10)
    axes.set_yticks(range(len(rows)), [f"{row.path}\n{row.spec}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    draw_legend(axes)
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
    """Formats as points, bits against a figure of merit, with the Pareto front: the best for their bits or fewer.

    Names stand in a column on the right, joined to their points by lines. Points with an infinite value or NaN are
    crosses at the edge: the exact ones at the good end, the others at the bad end.

    Args:
        names: a name for each point.
        bits: bits of each.
        values: the figure of each: an error, or a ratio with `higher_is_better`.
        ylabel: name of the figure, with its unit.
        title: the title above. Default ``"Bits against error"``.
        higher_is_better: whether high values are good; default False.
        log: whether the scale of values is logarithmic; a value of zero is then drawn at the edge. Default False.

    Raises:
        ValueError: for lists of several lengths, or empty ones.

    Example:
        >>> from jchop import plot
        >>> figure = plot.pareto(["e5m2", "e4m3", "half"], [8, 8, 16], [0.1, 0.05, 1e-3], ylabel="error", log=True)
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['e5m2', 'e4m3', 'half']
    """
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    if not names or len({len(names), len(bits), len(values)}) > 1:
        raise ValueError(f"names, bits and values have lengths {len(names)}, {len(bits)}, {len(values)}; they must be "
                         "equal, and at least 1")  # fmt: skip
    x, y = np.asarray(bits, np.float64), np.asarray(values, np.float64)
    inside = np.isfinite(y) & ((y > 0) | (not log))
    exact = ~inside & (y == (math.inf if higher_is_better else 0.0))
    bottom, top = _room(y[inside], log)
    good, bad = (top, bottom) if higher_is_better else (bottom, top)
    y = np.where(inside, y, np.where(exact, good, bad))
    figure = Figure(figsize=(10, max(4.2, 1.6 + 0.24 * len(names))), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold", color=INK)
    axes = figure.subplots()
    axes.set_yscale("log" if log else "linear")
    axes.set_ylim(bottom, top)
    left, right = float(x.min()), float(x.max())
    span = (right - left) or 1.0
    axes.set_xlim(left - 0.06 * span, right + 0.1 * span)
    front = _front(x, y if not higher_is_better else -y, inside | exact)
    axes.plot(x[front], y[front], color=NORMAL, linewidth=1.2, alpha=0.6, zorder=1, label="Pareto front")
    best = np.isin(np.arange(len(x)), front)
    for chosen, colour, marker in ((best, NORMAL, "o"), (~best & (inside | exact), "#888888", "o"),
                                   (~inside & ~exact, LOST, "X")):  # fmt: skip
        axes.scatter(x[chosen], y[chosen], color=colour, marker=marker, s=36, zorder=2, clip_on=False)
    _draw_names(axes, names, x, y, best)
    axes.set_xlabel("bits for each number", fontsize=11)
    axes.set_ylabel(ylabel, fontsize=11)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 1.08), fontsize=9, frameon=False)
    return figure


def _room(values: np.ndarray, log: bool) -> tuple[float, float]:
    """The ends of an axis with room around the values."""
    if not values.size:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 3, high * 3
    edge = 0.08 * (high - low) or 1.0
    return low - edge, high + edge


def _front(bits: np.ndarray, cost: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The indexes of the points that none with as few bits and as low a cost beats, by bits."""
    order = [i for i in np.lexsort((cost, bits)) if known[i]]
    chosen, least = [], math.inf
    for i in order:
        if cost[i] < least:
            chosen.append(i)
            least = cost[i]
    return np.array(chosen, np.int64)


def _draw_names(axes: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray, best: np.ndarray) -> None:
    """Names in a column at the right, in the order of the points' heights, each at a place of its own."""
    low, high = axes.get_ylim()
    height = np.log(y / low) / np.log(high / low) if axes.get_yscale() == "log" else (y - low) / (high - low)
    order = np.lexsort((-x, height))
    step = 1.0 / len(names)
    places = np.empty(len(names))
    lowest = 0.0
    line = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0.0, 0.5)}
    for rank, i in enumerate(order):  # as near the point as the names below and above leave room for
        places[i] = min(max(height[i], lowest), 1.0 - (len(names) - 1 - rank) * step)
        lowest = places[i] + step
    for i, name in enumerate(names):
        axes.annotate(
            name,
            xy=(x[i], y[i]),
            xytext=(1.02, places[i]),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=INK,
            fontweight="bold" if best[i] else "normal",
            annotation_clip=False,
            arrowprops=line,
        )
