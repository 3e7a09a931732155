"""The values of formats on the number line, and the numbers of an array in a format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common.checks import as_iterable, as_numpy, check, check_int
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop.formats import ElementFormat, FloatFormat, StringFormat
from jchop.plot import _charts
from jchop.plot._charts import BAR_COLOURS, BLUE, INK, ORANGE, RED, draw_frame, format_label, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 1 << 16


def value_grid(formats: ElementFormat | str | Sequence[ElementFormat | str], *, title: str | None = None) -> Figure:
    """Draws the values of a format on a logarithmic axis with their distances, or the positive values of several.

    The upper panel of one format has a line for each value. Subnormal values have another colour, and the ends of the
    ranges are marked. The lower panel shows, between neighbours a < b, the largest relative error of rounding to
    nearest. It is at the point where the result changes from a to b. At the midpoint it is (b - a) / (b + a). For
    posits and takums it is more, because far from 1 the point is not the midpoint.

    A list of formats has a row of lines for each, on one axis.

    Args:
        formats: a format of at most 16 bits or its text, or a list of them.
        title: the title above. Default None: the facts of one format, or "Values of formats".

    Raises:
        TypeError: for a scaled format, whose values depend on the data.
        ValueError: without formats, for a wider format, or for a format whose values binary64 cannot hold. For a single
            format without a value but zero, or a format of a list without a positive value.

    Example:
        >>> from jchop import plot
        >>> figure = plot.value_grid("e4m3fn")
        >>> figure.get_suptitle()
        'float8_e4m3fn: 8 bits, 253 finite values from -448 to 448'
        >>> len(plot.value_grid(["e5m2", "e4m3fn", "e2m3fn", "e2m1fn", "integer4"]).axes[0].collections)
        5
    """
    if isinstance(formats, str | ElementFormat):
        return _detailed_grid(_charts.element_format_of(formats), title)
    return _grid_of_rows([_charts.element_format_of(fmt) for fmt in as_iterable(formats)], title)


def _detailed_grid(fmt: ElementFormat, title: str | None) -> Figure:
    values = _drawable_values("formats=", fmt)
    rows = _magnitude_rows(values)
    check(rows, f"formats={fmt} has no value but zero: nothing to draw on a logarithmic axis")
    low, high = f"{float(fmt.min):.6g}", f"{float(fmt.max):.6g}"
    facts = f"{format_label(fmt)}: {fmt.bits} bits, {values.size} finite values from {low} to {high}"
    how = {"sharex": True, "height_ratios": (1.1, 1.3)}
    figure, (upper, lower) = new_figure(10, 4.8, facts if title is None else title, 2, 1, size=13, **how)
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
    axes.set_ylim(0, len(rows) * 2.0)
    _label_rows(axes, np.arange(len(rows)) + 0.5, list(reversed(rows)))
    _draw_marks(axes, _landmarks(fmt, max(rows.values(), key=len)), len(rows))


def _landmarks(fmt: ElementFormat, row: np.ndarray) -> dict[float, str]:
    """The labels of marked values; a value can have two."""
    names: dict[str, Any] = {"smallest": row[0]}
    if isinstance(fmt, FloatFormat):
        names = {"smallest subnormal": fmt.smallest_subnormal, "smallest normal": fmt.smallest_normal}
    marks: dict[float, str] = {}
    for name, value in (names | {"largest": row[-1]}).items():
        if value is not None and value <= row[-1]:
            marks[float(value)] = f"{marks[float(value)]},\n{name}" if float(value) in marks else name
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
        side, relpos = ("left", 0.0) if has_neighbour else ("center", 0.5)
        arrow = {"arrowstyle": "-", "color": "#888888", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0}
        text = f"{marks[positions[index]]}\n{_value_label(positions[index])}"
        axes.annotate(
            text, (positions[index], top * 0.92), (0, 12 + 36 * level), textcoords="offset points", ha=side,
            va="bottom", fontsize=9, color=INK, arrowprops={**arrow, "relpos": (relpos, 0.0)},
        )  # fmt: skip


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
    low = float(error.min()) if error.size else 0.1
    high = max(1.0, 1.4 * float(error.max(initial=0.0)))
    axes.set(yscale="log", ylim=(0.7 * low, high), ylabel="largest relative error")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if low > 0.01 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:,g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    draw_frame(axes)


def _grid_of_rows(elements: Sequence[ElementFormat], title: str | None) -> Figure:
    check(elements, "formats must name at least one format")
    rows = []
    for fmt in elements:
        values = _drawable_values("formats: ", fmt)
        check((values > 0).any(), f"formats: {fmt} has no positive value to draw")
        rows.append(values[values > 0])
    figure, axes = new_figure(10, 1.5 + 0.55 * len(rows), "Values of formats" if title is None else title, size=13)
    for row, values in enumerate(rows):
        width = float(np.clip(200 / len(values), 0.2, 1.6))
        axes.vlines(values, row - 0.38, row + 0.38, color=BAR_COLOURS[row % len(BAR_COLOURS)], linewidth=width)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="positive values (logarithmic, base 2)")
    _label_rows(axes, range(len(rows)), [f"{format_label(fmt)}\n{fmt.bits} bits" for fmt in elements])
    return figure


def _label_rows(axes: Axes, places: Sequence[float] | np.ndarray, names: Sequence[str]) -> None:
    """Names of rows of values along a logarithmic axis."""
    axes.set_xscale("log", base=2)
    axes.set_yticks(places, names, fontsize=9)
    axes.tick_params(axis="y", length=0)
    draw_frame(axes, "left", grid=False)


def _drawable_values(name: str, fmt: ElementFormat) -> np.ndarray:
    if any(isinstance(end, Fraction) for end in (fmt.max, fmt.min, fmt.smallest)):
        raise ValueError(f"{name}{fmt} has values beyond the range of binary64, which cannot be drawn")
    return fmt.values()


def rounding_error(
    specs: Sequence[SpecLike] | Spec | ElementFormat,
    start: float,
    stop: float,
    *,
    relative: bool = True,
    points: int = 4000,
    title: str = "Rounding error",
) -> Figure:
    """Draws the error of rounding x, for numbers x from `start` to `stop`, a curve for each spec.

    The numbers are binary64, spaced logarithmically if both ends are positive, else linearly. `jchop.round_to_format`
    gives the curves. A curve has a gap at an x whose result is not finite.

    Args:
        specs: deterministic specs of plain formats, formats, or texts, or one of them.
        start: the least x.
        stop: the largest x, above `start`; both finite.
        relative: whether to show (rounded - x) / abs(x), the default, or rounded - x. A zero x has no relative error.
        points: the number of x, 2 to 65,536. Default 4,000.
        title: the title above. Default ``"Rounding error"``.

    Raises:
        TypeError: for a scaled format, whose scales depend on all numbers.
        ValueError: without specs, for a stochastic mode, and for other ends or points.

    Example:
        >>> from jchop import plot
        >>> figure = plot.rounding_error(["e4m3fn", "e5m2", "fixed4.4"], 0.01, 10)
        >>> [line.get_label() for line in figure.axes[0].lines[:3]]
        ['float8_e4m3fn', 'float8_e5m2', 'fixed4.4']
    """
    spec_list = [as_spec(spec) for spec in as_iterable(specs)]
    check(spec_list, "specs must have at least one spec")
    if not (math.isfinite(start) and math.isfinite(stop) and start < stop):
        raise ValueError(f"start={start!r} and stop={stop!r} must be finite, and start the lesser")
    for spec in spec_list:
        check(not spec.rounding.stochastic, f"specs: {spec} is stochastic; its error is no function of x")
    count = check_int("points", points, 2, _MAX_POINTS)
    logarithmic = start > 0
    x = np.geomspace(start, stop, count) if logarithmic else np.linspace(start, stop, count)
    figure, axes = new_figure(10, 4.2, title, size=13)
    for i, spec in enumerate(spec_list):
        colour = BAR_COLOURS[i % len(BAR_COLOURS)]
        axes.plot(x, _error_curve(x, spec, relative), color=colour, linewidth=1.0, label=str(spec))
    axes.axhline(0, color="#888888", linewidth=0.7)
    ylabel = "(rounded - x) / |x|" if relative else "rounded - x"
    axes.set(xscale="log" if logarithmic else "linear", xlabel="x", ylabel=ylabel)
    draw_frame(axes)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9, frameon=False)
    return figure


def _error_curve(x: np.ndarray, spec: Spec, relative: bool) -> np.ndarray:
    """The errors; NaN where there is none to show."""
    error = np.asarray(round_to_format(x, spec)) - x
    error = np.where(np.isfinite(error), error, np.nan)
    return np.divide(error, np.abs(x), out=np.full_like(error, np.nan), where=x != 0) if relative else error


def code_histogram(x: Any, fmt: ElementFormat | str, *, title: str | None = None) -> Figure:
    """Draws how many numbers of an array become each value of a format, rounded to nearest: which codes are in use.

    There is a bar for each finite value, in their order; both zeros count as one. The bars of the largest and the
    lowest value have another colour: they count the numbers beyond, too.

    Args:
        x: numbers of any shape. Infinities and NaN do not count.
        fmt: a format of at most 8 bits, or its text.
        title: the title above. Default: the format, the count of numbers, and the share of values in use.

    Raises:
        TypeError: for a scaled format: divide the numbers by their scales, and pass the element.
        ValueError: for a wider format, or without a finite number.

    Example:
        >>> import numpy as np
        >>> from jchop import plot
        >>> figure = plot.code_histogram(np.random.default_rng(0).normal(size=4000), "e2m1fn")
        >>> figure.get_suptitle()
        'float4_e2m1fn: 4,000 numbers, 12 of 15 values in use'
    """
    element = _charts.element_format_of(fmt, most_bits=8)
    numbers = as_numpy("x", x).astype(np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    check(numbers.size, "x has no finite number")
    values = element.values()
    values = values[np.concatenate([[True], np.diff(values) > 0])]
    results = np.asarray(round_to_format(numbers, Spec(element, overflow="saturate")))
    counts = np.bincount(np.searchsorted(values, results), minlength=values.size)
    values_in_use = np.count_nonzero(counts)
    text = f"{format_label(element)}: {numbers.size:,} numbers, {values_in_use} of {values.size} values in use"
    figure, axes = new_figure(10, 3.8, text if title is None else title, size=13)
    colours = [RED if i in (0, values.size - 1) else BLUE for i in range(values.size)]
    axes.bar(range(values.size), counts, 0.9, color=colours)
    ticks = np.unique(np.linspace(0, values.size - 1, min(values.size, 16)).round().astype(int))
    axes.set_xticks(ticks, [f"{values[i]:.3g}" for i in ticks], fontsize=9)
    axes.set(xlabel="value (one bar each, in their order)", ylabel="numbers")
    draw_frame(axes, grid=False)
    return figure
