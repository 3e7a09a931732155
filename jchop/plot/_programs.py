"""The errors of programs: operation by operation, and their parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jchop.plot._style import BLUE, INK, RED, draw_bars, draw_legend, need_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jchop._insight.reports.blame import Blame, BlameRow
    from jchop._insight.reports.report import Report, ReportRow


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
    need_matplotlib()
    rows, has_values = getattr(seen, "rows", None), getattr(seen, "traced", False)
    if rows is None:
        raise TypeError(f"seen={seen!r} must be a result of jchop.emulate.report")
    if not has_values or not rows:
        raise ValueError("seen must hold what was seen: pass trace_values=True to jchop.emulate.report, for a program "
                         "with at least one operation")  # fmt: skip
    figure = new_figure(10, 1.9 + 0.68 * len(rows), title)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_errors(left, rows)
    _draw_losses(right, rows)
    left.set_yticks(range(len(rows)), [_operation_label(row, _arithmetic_label(row)) for row in rows], fontsize=9)
    left.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def _operation_label(row: ReportRow | BlameRow, spec: str) -> str:
    return "\n".join((f"{row.scope} {row.primitive}".strip(), spec, row.place))


def _arithmetic_label(row: ReportRow) -> str:
    return row.spec + (f", sums {row.sums}" if row.sums else "")


def _draw_errors(axes: Axes, rows: Sequence[ReportRow]) -> None:
    from matplotlib.ticker import NullFormatter

    bars = {"of the operation": [row.error for row in rows], "of the program so far": [row.deviation for row in rows]}
    positive = [value for values in bars.values() for value in values if value > 0]
    low, high = min(positive, default=1e-3) / 4, 8 * max(positive, default=1.0)  # room for the numbers
    draw_bars(axes, bars, low, lambda value: f" {value:.1e}")
    empty_rows = [index for index, row in enumerate(rows) if math.isnan(row.deviation) and row.infinities + row.nans]
    if empty_rows:
        name = "no finite result to compare"
        axes.barh(empty_rows, high - low, 0.76, low, color="white", edgecolor=RED, hatch="///", label=name)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)
    axes.set_xlabel("largest relative error, of finite results", fontsize=10)
    draw_legend(axes)


def _draw_losses(axes: Axes, rows: Sequence[ReportRow]) -> None:
    names = {"overflows": "overflowed", "underflows": "became zero", "infinities": "infinite", "nans": "NaN"}
    bars = {name: [getattr(row, field) for row in rows] for field, name in names.items()}
    draw_bars(axes, bars, 0.0, lambda value: f" {value:.0f}")
    axes.set_xlim(0, 1.25 * max(1, *(value for values in bars.values() for value in values)))
    axes.set_xlabel("number of results", fontsize=10)
    draw_legend(axes)


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
        >>> figure = plot.blame(found)
        >>> len(figure.axes[0].patches) == len(found.rows)
        True
    """
    need_matplotlib()
    rows = getattr(seen, "rows", None)
    if rows is None or not hasattr(seen, "unexplained"):
        raise TypeError(f"seen={seen!r} must be a result of jchop.blame")
    if not rows:
        raise ValueError("seen must have rows: a program without roundings has none")
    top_rows, tail = rows[:most], rows[most:]
    names = [_operation_label(row, row.spec) for row in top_rows] + ([f"{len(tail)} more rows"] if tail else [])
    values = [row.contribution for row in top_rows] + ([math.fsum(row.contribution for row in tail)] if tail else [])
    turns = [row for row in top_rows if len(row.turns) > 1]
    figure = new_figure(14 if turns else 9, 1.9 + 0.62 * len(names), title)
    panels = np.ravel(figure.subplots(1, 2 if turns else 1))
    axes = panels[0]
    axes.barh(range(len(names)), values, 0.7, color=[RED if value < 0 else BLUE for value in values])
    for row_index, value in enumerate(values):
        axes.annotate(
            f"{value:.2g}", (value, row_index), (-4 if value < 0 else 4, 0), textcoords="offset points", fontsize=8,
            va="center", ha="right" if value < 0 else "left", color=INK,
        )  # fmt: skip
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.margins(x=0.18)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"contribution to the error, which is {seen.error:.3g}")
    axes.spines[["top", "right"]].set_visible(False)
    if turns:
        _draw_iterations(panels[1], turns)
    return figure


def _draw_iterations(axes: Axes, rows: Sequence[BlameRow]) -> None:
    for row in rows:
        axes.plot(np.arange(len(row.turns)), np.cumsum(row.turns), label=f"{row.scope} {row.primitive}".strip())
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("turn of the outermost loop")
    axes.set_ylabel("sum of contributions up to the turn")
    axes.legend(fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
