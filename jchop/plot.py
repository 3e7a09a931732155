"""Pictures: heat maps of tables, values of a format on the number line, errors of programs, weights, formats.

Every function returns a new `matplotlib.figure.Figure` and saves nothing. Matplotlib (extra ``plot``) is imported on
first use. pyplot is not imported, so no window opens and no global state changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._files import require_extra
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    from jchop._emulate import Blame, BlameRow, Report, Row

__all__ = ["Panel", "blame", "calibration", "heat_map", "pareto", "report", "value_grid"]

_NORMAL, _SUBNORMAL, _INK, _LOST = "#31688e", "#d95f02", "#333333", "#b2182b"
_BARS = (_NORMAL, _SUBNORMAL, _LOST, "#7b3294")


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
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    for panel in panels:
        for what, table in (("values", panel.values), ("spread", panel.spread)):
            if table is not None and np.shape(table) != (len(rows), len(columns)):
                raise ValueError(
                    f"panels: {what} of {panel.title!r} has shape {np.shape(table)}; rows and columns require "
                    f"{(len(rows), len(columns))}"
                )
    tall = 0.36 if all(panel.spread is None for panel in panels) else 0.42
    width = 2.0 + len(panels) * (1.2 + 0.78 * len(columns))
    figure = Figure(figsize=(max(width, 6.0), 2.3 + tall * len(rows)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    if note:
        figure.supxlabel(note, fontsize=11, color=_INK)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        _draw_panel(figure, axes, panel, rows, columns)
    return figure


def _draw_panel(figure: Figure, axes: Axes, panel: Panel, rows: Sequence[str], columns: Sequence[str]) -> None:
    from matplotlib import colormaps

    values = np.asarray(panel.values, np.float64)
    spread = np.full(values.shape, np.nan) if panel.spread is None else np.asarray(panel.spread, np.float64)
    colours = colormaps["viridis_r" if panel.low_is_good else "viridis"].with_extremes(bad="#d9d9d9")
    scale = _scale(panel, values)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, norm=scale, aspect="auto")
    axes.set_title(panel.title, fontsize=12, color=_INK)
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
    beyond = "max" if (values[np.isfinite(values)] > panel.ceiling).any() else "neither"
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=34, extend=beyond)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=9)


def _scale(panel: Panel, values: np.ndarray) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    known = values[np.isfinite(values) & ((values > 0) | (not panel.log))]
    low, high = (known.min(), known.max()) if known.size else (1.0, 1.0)
    high = min(high, panel.ceiling)
    if low >= high:
        low, high = (low / 2, low * 2) if panel.log else (low - 1, low + 1)
    return (LogNorm if panel.log else Normalize)(low, high)


def _luminance(colour: Any) -> float:
    """Relative luminance of an sRGB colour (WCAG 2, without gamma), to choose black or white text."""
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def value_grid(fmt: ElementFormat | str) -> Figure:
    """The values of a format on a logarithmic axis, and their distances.

    The upper panel has a line for each value; subnormal values have another colour, and the ends of the ranges are
    marked. The lower panel shows, between neighbours a < b, the largest relative error of rounding to nearest: (b - a)
    / (b + a), at the midpoint.

    Args:
        fmt: a format of at most 16 bits, or its text.

    Raises:
        TypeError: for a scaled format, whose values depend on the data.
        ValueError: for a wider format, a format whose values binary64 cannot hold, or one without a positive value.

    Example:
        >>> from jchop import plot
        >>> plot.value_grid("e4m3fn").get_suptitle()
        'float8_e4m3fn: 8 bits, 253 finite values from -448 to 448'
    """
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    fmt = _element(fmt)
    if any(isinstance(end, Fraction) for end in (fmt.max, fmt.min, fmt.smallest)):
        raise ValueError(f"fmt={fmt} has values beyond the range of binary64, which cannot be drawn")
    values = fmt.values()
    rows = _magnitude_rows(values)
    if not rows:
        raise ValueError(f"fmt={fmt} has no value but zero: nothing to draw on a logarithmic axis")
    figure = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
    low, high = f"{float(fmt.min):.6g}", f"{float(fmt.max):.6g}"
    figure.suptitle(
        f"{fmt}: {fmt.bits} bits, {values.size} finite values from {low} to {high}",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.1, 1.3))
    _draw_rug(upper, fmt, rows)
    _draw_error(lower, fmt, max(rows.values(), key=len))
    lower.set_xlabel("magnitude of the value (logarithmic, base 2)", fontsize=10)
    return figure


def _element(fmt: ElementFormat | str) -> ElementFormat:
    found = parse_format(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(found, ElementFormat):
        what = f"its element {str(found.element)!r}" if isinstance(found, ScaledFormat) else "a format or its text"
        raise TypeError(f"fmt={str(fmt)!r} has no values of its own to draw; pass {what}")
    return found


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
        for part, colour in ((row[row < normal], _SUBNORMAL), (row[row >= normal], _NORMAL)):
            axes.vlines(part, height + 0.1, height + 0.9, color=colour, linewidth=width)
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
        named = {"smallest subnormal": fmt.smallest_subnormal, "smallest normal": fmt.smallest_normal}
        names = {name: float(value) for name, value in named.items() if value is not None and value <= row[-1]}
        names["largest"] = float(row[-1])
    marks: dict[float, str] = {}
    for name, value in names.items():
        marks[value] = f"{marks[value]},\n{name}" if value in marks else name
    if row[0] < 1 < row[-1] and 1.0 in row and 1.0 not in marks:
        marks[1.0] = "one"
    return marks


def _draw_marks(axes: Axes, marks: dict[float, str], top: float) -> None:
    places = sorted(marks)
    steps = np.diff(np.log2(places))
    close = [*(steps < 0.2 * steps.sum()), False]
    level = 0
    for index in reversed(range(len(places))):
        # A label too close to the next one on its right is placed above it.
        level = level + 1 if close[index] else 0
        paired = close[index] or close[index - 1]
        axes.annotate(
            f"{marks[places[index]]}\n{_label(places[index])}",
            xy=(places[index], top * 0.92),
            xytext=(0, 12 + 36 * level),
            textcoords="offset points",
            ha="left" if paired else "center",
            va="bottom",
            fontsize=9,
            color=_INK,
            arrowprops={
                "arrowstyle": "-",
                "color": "#888888",
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0.0 if paired else 0.5, 0.0),
            },
        )


def _label(value: float) -> str:
    """Short numbers in decimal, other powers of two as 2^k."""
    text = f"{value:.6g}"
    exponent = float(np.log2(value))
    return f"$2^{{{exponent:.0f}}}$" if len(text) > 6 and exponent.is_integer() else text


def _draw_error(axes: Axes, fmt: ElementFormat, row: np.ndarray) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    below, above = row[:-1], row[1:]
    error = (above - below) / (above + below)
    normal = float(fmt.smallest_normal) if isinstance(fmt, FloatFormat) else 0.0
    for part, colour, name in ((below < normal, _SUBNORMAL, "subnormal"), (below >= normal, _NORMAL, "normal")):
        if part.any():
            axes.hlines(error[part], below[part], above[part], color=colour, linewidth=1.6, label=name)
    if isinstance(fmt, FloatFormat):
        roundoff = float(fmt.eps) / 2
        name = f"unit roundoff, {_label(roundoff)}"
        axes.axhline(roundoff, color="#888888", linewidth=1.0, linestyle="--", label=name)
        axes.legend(loc="upper right", fontsize=9, frameon=True, framealpha=1.0, edgecolor="none")
    axes.set_yscale("log")
    low = float(error.min()) if error.size else 0.1
    axes.set_ylim(0.7 * low, 1.0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if low > 0.01 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("largest relative error", fontsize=10)
    axes.grid(axis="both", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def report(seen: Report, *, title: str = "Where the digits go") -> Figure:
    """The operations of an emulated program as bars: errors, overflows and underflows.

    There is one group of bars for each row of the report, in program order, with its file and line. The left side
    shows, logarithmically, the largest relative error of one operation and of the program so far; an operation without
    an error has no bar. An operation without finite results has a hatched bar of full length. The right side shows the
    numbers of results that overflowed, became zero, are infinite and are NaN.

    Args:
        seen: a result of ``jchop.emulate.report(..., trace_values=True)``.
        title: the title above the bars. Default ``"Where the digits go"``.

    Raises:
        TypeError: if `seen` is not a report.
        ValueError: for a report without ``trace_values=True``, or without rows.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from jchop import plot
        >>> low = jc.emulate(lambda x: jnp.exp(x) * x, "e4m3")
        >>> figure = plot.report(jc.emulate.report(low, jnp.array([1.0, 8.0]), trace_values=True))
        >>> [label.get_text().split()[:2] for label in figure.axes[0].get_yticklabels()]
        [['exp', 'float8_e4m3'], ['mul', 'float8_e4m3']]
    """
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    rows, traced = getattr(seen, "rows", None), getattr(seen, "traced", False)
    if rows is None:
        raise TypeError(f"seen={seen!r} must be a result of jchop.emulate.report")
    if not traced or not rows:
        raise ValueError("seen must hold what was seen: pass trace_values=True to jchop.emulate.report, for a program "
                         "with at least one operation")  # fmt: skip
    figure = Figure(figsize=(10, 1.9 + 0.68 * len(rows)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_errors(left, rows)
    _draw_losses(right, rows)
    left.set_yticks(range(len(rows)), [_operation(row, _arithmetic(row)) for row in rows], fontsize=9)
    left.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def _operation(row: Row | BlameRow, spec: str) -> str:
    return "\n".join((f"{row.scope} {row.primitive}".strip(), spec, row.place))


def _arithmetic(row: Row) -> str:
    return row.spec + (f", sums {row.sums}" if row.sums else "")


def _draw_errors(axes: Axes, rows: Sequence[Row]) -> None:
    bars = {"of the operation": [row.error for row in rows], "of the program so far": [row.deviation for row in rows]}
    shown = [value for values in bars.values() for value in values if value > 0]
    low, high = min(shown, default=1e-3) / 4, 8 * max(shown, default=1.0)  # room for the numbers
    _draw_bars(axes, bars, low, lambda value: f" {value:.1e}")
    lost = [place for place, row in enumerate(rows) if math.isnan(row.deviation) and row.infinities + row.nans]
    if lost:
        name = "no finite result to compare"
        axes.barh(lost, [high - low] * len(lost), 0.76, low, color="white", edgecolor=_LOST, hatch="///", label=name)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("largest relative error, of finite results", fontsize=10)
    _draw_legend(axes)


def _draw_losses(axes: Axes, rows: Sequence[Row]) -> None:
    names = {"overflows": "overflowed", "underflows": "became zero", "infinities": "infinite", "nans": "NaN"}
    bars = {name: [getattr(row, field) for row in rows] for field, name in names.items()}
    _draw_bars(axes, bars, 0.0, lambda value: f" {value:.0f}")
    axes.set_xlim(0, 1.25 * max(1, *(value for values in bars.values() for value in values)))
    axes.set_xlabel("number of results", fontsize=10)
    _draw_legend(axes)


def _draw_bars(axes: Axes, bars: dict[str, list[Any]], low: float, text: Any) -> None:
    """A bar for each name in each row, with its number; no bar if it is zero or unknown."""
    height = 0.76 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        shift = (index + 0.5) * height - 0.38
        known = [(place + shift, value) for place, value in enumerate(values) if value > 0]
        # Bars of length zero for the others: without any bar, the legend's colour would be Matplotlib's own.
        lengths = [max(value - low, 0.0) if value > 0 else 0.0 for value in values]
        axes.barh(np.arange(len(values)) + shift, lengths, 0.95 * height, low, color=_BARS[index], label=name)
        for y, value in known:
            axes.text(value, y, text(value), va="center", fontsize=8, color=_INK)


def _draw_legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9, frameon=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def blame(seen: Blame, *, title: str = "Where the error comes from", most: int = 16) -> Figure:
    """The parts of an error as bars, with their signs, and a line for each turn of loops.

    There is one bar for each row, the largest first; the rest is one bar. If a row has turns, a second panel shows the
    sum of the contributions up to each turn, for the rows with turns among those drawn.

    Args:
        seen: a result of `jchop.blame`.
        title: the title above the bars. Default ``"Where the error comes from"``.
        most: the most rows that have a bar of their own. Default 16.

    Raises:
        TypeError: if `seen` is no such result.
        ValueError: without rows.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from jchop import plot
        >>> found = jc.blame(jc.emulate(lambda x: jnp.sum(x * x), "e4m3"), jnp.array([1.1, 2.3]))
        >>> len(plot.blame(found).axes[0].patches) == len(found.rows)
        True
    """
    require_extra("jchop.plot", "plot", ("matplotlib",))
    from matplotlib.figure import Figure

    rows = getattr(seen, "rows", None)
    if rows is None or not hasattr(seen, "unexplained"):
        raise TypeError(f"seen={seen!r} must be a result of jchop.blame")
    if not rows:
        raise ValueError("seen must have rows: a program without roundings has none")
    shown, others = rows[:most], rows[most:]
    names = [_operation(row, row.spec) for row in shown] + ([f"{len(others)} more rows"] if others else [])
    values = [row.contribution for row in shown] + ([math.fsum(row.contribution for row in others)] if others else [])
    turns = [row for row in shown if len(row.turns) > 1]
    figure = Figure(figsize=(14 if turns else 9, 1.9 + 0.62 * len(names)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    panels = np.ravel(figure.subplots(1, 2 if turns else 1))
    axes = panels[0]
    axes.barh(range(len(names)), values, 0.7, color=[_LOST if value < 0 else _NORMAL for value in values])
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.2g}", (value, place), (-4 if value < 0 else 4, 0), textcoords="offset points", fontsize=8,
            va="center", ha="right" if value < 0 else "left", color=_INK,
        )  # fmt: skip
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.margins(x=0.18)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"contribution to the error, which is {seen.error:.3g}")
    axes.spines[["top", "right"]].set_visible(False)
    if turns:
        _draw_turns(panels[1], turns)
    return figure


def _draw_turns(axes: Axes, rows: Sequence[BlameRow]) -> None:
    for row in rows:
        axes.plot(np.arange(len(row.turns)), np.cumsum(row.turns), label=f"{row.scope} {row.primitive}".strip())
    axes.axhline(0, color=_INK, linewidth=0.8)
    axes.set_xlabel("turn of the outermost loop")
    axes.set_ylabel("sum of contributions up to the turn")
    axes.legend(fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


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
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    axes = figure.subplots()
    bars = {"each element to nearest": [r.before for r in rows], "as rounded": [r.after for r in rows]}
    finite = [value for values in bars.values() for value in values if math.isfinite(value)]
    low, high = min(0.0, *finite, 0.0), max(1.0, *finite, 1.0)
    drawn = {name: [value if math.isfinite(value) else 0.0 for value in values] for name, values in bars.items()}
    _draw_bars(axes, drawn, 0.0, lambda value: f" {value:.1f}")
    for shift, values in zip((-0.19, 0.19), bars.values(), strict=True):
        for place, value in enumerate(values):
            if not value > 0 or math.isinf(value):
                text = "exact" if value > 0 else f"{value:.1f}"
                axes.text(0, place + shift, f" {text}", va="center", fontsize=8, color=_INK)
    axes.set_xlim(low, 1.15 * high)
    axes.set_xlabel("signal over error on the data (dB)", fontsize=10)
    axes.set_yticks(range(len(rows)), [f"{row.path}\n{row.spec}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _draw_legend(axes)
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
    figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    axes = figure.subplots()
    axes.set_yscale("log" if log else "linear")
    axes.set_ylim(bottom, top)
    left, right = float(x.min()), float(x.max())
    span = (right - left) or 1.0
    axes.set_xlim(left - 0.06 * span, right + 0.1 * span)
    front = _front(x, y if not higher_is_better else -y, inside | exact)
    axes.plot(x[front], y[front], color=_NORMAL, linewidth=1.2, alpha=0.6, zorder=1, label="Pareto front")
    best = np.isin(np.arange(len(x)), front)
    for chosen, colour, marker in ((best, _NORMAL, "o"), (~best & (inside | exact), "#888888", "o"),
                                   (~inside & ~exact, _LOST, "X")):  # fmt: skip
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
            color=_INK,
            fontweight="bold" if best[i] else "normal",
            annotation_clip=False,
            arrowprops=line,
        )
