"""The values of a format on the number line."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop.formats import ElementFormat, FloatFormat, StringFormat
from jchop.plot._style import BLUE, INK, ORANGE, element_format_of, format_label, need_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def value_grid(fmt: ElementFormat | str) -> Figure:
    """The values of a format on a logarithmic axis, and their distances.

    The upper panel has a line for each value; subnormal values have another colour, and the ends of the ranges are
    marked. The lower panel shows, between neighbours a < b, the largest relative error of rounding to nearest. It is at
    the point where the result changes from a to b: (b - a) / (b + a) at the midpoint, and more for posits and takums,
    whose point is not the midpoint far from 1.

    Args:
        fmt: a format of at most 16 bits, or its text.

    Raises:
        TypeError: for a scaled format, whose values depend on the data.
        ValueError: for a wider format, a format whose values binary64 cannot hold, or one without a positive value.

    Example:
        >>> from jchop import plot
        >>> figure = plot.value_grid("e4m3fn")
        >>> figure.get_suptitle()
        'float8_e4m3fn: 8 bits, 253 finite values from -448 to 448'
    """
    need_matplotlib()
    fmt = element_format_of(fmt)
    if any(isinstance(end, Fraction) for end in (fmt.max, fmt.min, fmt.smallest)):
        raise ValueError(f"fmt={fmt} has values beyond the range of binary64, which cannot be drawn")
    values = fmt.values()
    rows = _magnitude_rows(values)
    if not rows:
        raise ValueError(f"fmt={fmt} has no value but zero: nothing to draw on a logarithmic axis")
    low, high = f"{float(fmt.min):.6g}", f"{float(fmt.max):.6g}"
    title = f"{format_label(fmt)}: {fmt.bits} bits, {values.size} finite values from {low} to {high}"
    figure = new_figure(10, 4.8, title, size=13)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.1, 1.3))
    _draw_rug(upper, fmt, rows)
    _draw_relative_error(lower, fmt, max(rows.values(), key=len))
    lower.set_xlabel("magnitude of the value (logarithmic, base 2)", fontsize=10)
    return figure


def _magnitude_rows(values: np.ndarray) -> dict[str, np.ndarray]:
    """Magnitudes by sign; one row if both signs have the same."""
    positive, negative = values[values > 0], -values[values < 0][::-1]
    if np.array_equal(positive, negative):
        return {"both\nsigns": positive} if positive.size else {}
    return {sign: row for sign, row in (("positive", positive), ("negative", negative)) if row.size}


def _draw_rug(axes: Axes, fmt: ElementFormat, rows: dict[str, np.ndarray]) -> None:
    normal = float(fmt.smallest_normal) if isinstance(fmt, FloatFormat) else 0.0
    for height, row in enumerate(reversed(rows.values())):
        width = float(np.clip(300 / len(row), 0.2, 1.4))
        for magnitudes, colour in ((row[row < normal], ORANGE), (row[row >= normal], BLUE)):
            axes.vlines(magnitudes, height + 0.1, height + 0.9, color=colour, linewidth=width)
    axes.set_xscale("log", base=2)
    axes.set_yticks([height + 0.5 for height in range(len(rows))], list(reversed(rows)), fontsize=9)
    axes.set_ylim(0, len(rows) * 2.0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    _draw_marks(axes, _landmarks(fmt, max(rows.values(), key=len)), len(rows))


def _landmarks(fmt: ElementFormat, row: np.ndarray) -> dict[float, str]:
    """The labels of marked values; a value can have two."""
    names = {"smallest": float(row[0]), "largest": float(row[-1])}
    if isinstance(fmt, FloatFormat):
        candidates = {"smallest subnormal": fmt.smallest_subnormal, "smallest normal": fmt.smallest_normal}
        names = {name: float(value) for name, value in candidates.items() if value is not None and value <= row[-1]}
        names["largest"] = float(row[-1])
    marks: dict[float, str] = {}
    for name, value in names.items():
        marks[value] = f"{marks[value]},\n{name}" if value in marks else name
    if row[0] < 1 < row[-1] and 1.0 in row and 1.0 not in marks:
        marks[1.0] = "one"
    return marks


def _draw_marks(axes: Axes, marks: dict[float, str], top: float) -> None:
    positions = sorted(marks)
    steps = np.diff(np.log2(positions))
    is_close = [*(steps < 0.2 * steps.sum()), False]
    level = 0
    for index in reversed(range(len(positions))):
        # A label too close to the next one on its right is placed above it.
        level = level + 1 if is_close[index] else 0
        has_neighbour = is_close[index] or is_close[index - 1]
        axes.annotate(
            f"{marks[positions[index]]}\n{_value_label(positions[index])}",
            xy=(positions[index], top * 0.92),
            xytext=(0, 12 + 36 * level),
            textcoords="offset points",
            ha="left" if has_neighbour else "center",
            va="bottom",
            fontsize=9,
            color=INK,
            arrowprops={
                "arrowstyle": "-",
                "color": "#888888",
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0.0 if has_neighbour else 0.5, 0.0),
            },
        )


def _value_label(value: float) -> str:
    """Short numbers in decimal, other powers of two as 2^k."""
    text = f"{value:.6g}"
    exponent = float(np.log2(value))
    return f"$2^{{{exponent:.0f}}}$" if len(text) > 6 and exponent.is_integer() else text


def _rounding_thresholds(fmt: ElementFormat, row: np.ndarray) -> np.ndarray:
    """The points between neighbours where the result of rounding to nearest changes."""
    if not isinstance(fmt, StringFormat):
        return row[:-1] + np.diff(row) / 2
    wider: Any = dataclasses.replace(fmt, bits=fmt.bits + 1)  # type: ignore[type-var]
    return np.array([float(wider.magnitude_of(2 * code + 1)) for code in range(1, fmt.max_code)])


def _draw_relative_error(axes: Axes, fmt: ElementFormat, row: np.ndarray) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    below, above = row[:-1], row[1:]
    thresholds = _rounding_thresholds(fmt, row)
    error = np.maximum(thresholds - below, above - thresholds) / thresholds
    normal = float(fmt.smallest_normal) if isinstance(fmt, FloatFormat) else 0.0
    for mask, colour, name in ((below < normal, ORANGE, "subnormal"), (below >= normal, BLUE, "normal")):
        if mask.any():
            axes.hlines(error[mask], below[mask], above[mask], color=colour, linewidth=1.6, label=name)
    if isinstance(fmt, FloatFormat):
        roundoff = float(fmt.eps) / 2
        name = f"unit roundoff, {_value_label(roundoff)}"
        axes.axhline(roundoff, color="#888888", linewidth=1.0, linestyle="--", label=name)
        axes.legend(loc="upper right", fontsize=9, frameon=True, framealpha=1.0, edgecolor="none")
    axes.set_yscale("log")
    low = float(error.min()) if error.size else 0.1
    axes.set_ylim(0.7 * low, max(1.0, 1.4 * float(error.max(initial=0.0))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if low > 0.01 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:,g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("largest relative error", fontsize=10)
    axes.grid(axis="both", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
