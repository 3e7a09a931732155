"""Pictures of reports: of programs by operation, of the formats of a program, and of the layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common.checks import check
from jchop._common.text import cut_middle
from jchop.plot._charts import BLUE, INK, RED, draw_at_edge, draw_bars, draw_frame, draw_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jchop._insight.reports.blame import Blame, BlameRow
    from jchop._insight.reports.lines import Ranges
    from jchop._insight.reports.report import Report, ReportRow

#: The rows of a blame with a bar of their own.
_MOST_BLAME_BARS = 16


def draw_report(seen: Report, title: str) -> Figure:
    """The operations of an emulated program as bars: errors, overflows and underflows.

    There is one group of bars for each row of the report, in program order, with its file and line. The left side
    shows, logarithmically, the largest relative error of one operation and of the program so far. An operation without
    an error has no bar. An operation without finite results has a hatched bar of full length. The right side shows the
    numbers of results that overflowed, became zero, are infinite and are NaN.
    """
    rows = seen.rows
    if not seen.traced or not rows:
        raise ValueError("a picture needs values: low.report(x, trace_values=True), of a program with operations")
    how = {"sharey": True, "width_ratios": (3, 2)}
    figure, (left, right) = new_figure(10, 1.9 + 0.68 * len(rows), title, 1, 2, **how)
    _draw_errors(left, rows)
    _draw_losses(right, rows)
    names = [_operation_label(row, row.spec + (f", sums {row.sums}" if row.sums else "")) for row in rows]
    left.set_yticks(range(len(rows)), names, fontsize=9)
    left.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def _operation_label(row: ReportRow | BlameRow, spec: str) -> str:
    return "\n".join((f"{row.scope} {row.primitive}".strip(), spec, row.place))


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
    axes.set(xscale="log", xlim=(low, high), xlabel="largest relative error, of finite results")
    axes.xaxis.set_minor_formatter(NullFormatter())
    draw_legend(axes)


def _draw_losses(axes: Axes, rows: Sequence[ReportRow]) -> None:
    names = {"overflows": "overflowed", "underflows": "became zero", "infinities": "infinite", "nans": "NaN"}
    bars = {name: [getattr(row, field) for row in rows] for field, name in names.items()}
    draw_bars(axes, bars, 0.0, lambda value: f" {value:.0f}")
    most = max(1, *(value for values in bars.values() for value in values))
    axes.set(xlim=(0, 1.25 * most), xlabel="number of results")
    draw_legend(axes)


def draw_blame(seen: Blame, title: str) -> Figure:
    """The parts of an error as bars, with their signs, and a line for each turn of loops.

    There is one bar for each row, the largest first; the rest is one bar. If a row has turns, a second panel shows the
    sum of the contributions up to each turn, for the drawn rows with turns.
    """
    rows, most = sorted(seen.rows, key=lambda row: -abs(row.contribution)), _MOST_BLAME_BARS
    check(rows, "a picture needs rows: a program without roundings has none")
    top_rows, tail = rows[:most], rows[most:]
    names = [_operation_label(row, row.spec) for row in top_rows] + ([f"{len(tail)} more rows"] if tail else [])
    values = [row.contribution for row in top_rows] + ([math.fsum(row.contribution for row in tail)] if tail else [])
    turns = [row for row in top_rows if len(row.turns) > 1]
    columns = 2 if turns else 1
    figure, ((axes, *others),) = new_figure(4 + 5 * columns, 1.9 + 0.62 * len(names), title, 1, columns, squeeze=False)
    _draw_named_bars(axes, names, values, [f"{value:.2g}" for value in values])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.margins(x=0.18)
    axes.set_xlabel(f"contribution to the error, which is {seen.error:.3g}")
    for panel in others:
        _draw_iterations(panel, turns)
    return figure


def draw_ranges(seen: Ranges, title: str) -> Figure:
    """The counts of exponents as a map: a row for each line, dark for many results.

    Two marks in a row are the smallest and the largest exponent of the normal numbers of its format.
    """
    rows = [row for row in seen.rows if row.exponents]
    check(rows, "a picture needs rows with numbers other than zero")
    least, most = (pick(row.exponents[end][0] for row in rows) for pick, end in ((min, 0), (max, -1)))
    counts = np.zeros((len(rows), most - least + 1))
    for i, row in enumerate(rows):
        for exponent, count in row.exponents:
            counts[i, exponent - least] = count / row.numbers
    figure, axes = new_figure(10, 1.9 + 0.5 * len(rows), title)
    shown = np.ma.masked_equal(np.sqrt(counts), 0)
    axes.imshow(shown, cmap="Blues", aspect="auto", vmin=-0.2, vmax=1, extent=(least - 0.5, most + 0.5, len(rows), 0))
    for i, row in enumerate(rows):
        for end in row.limits:
            axes.plot([end, end], [i + 0.1, i + 0.9], color=RED, linewidth=2)
    names = [f"{'∂ ' * row.backward}{cut_middle(row.text, 40)}\n{row.spec}, {row.place}" for row in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=9)
    axes.set_xlim(least - 1, most + 1)
    axes.set_xlabel("exponent of the results; red: the ends of the normal numbers of the format")
    return figure


def _draw_named_bars(axes: Axes, names: Sequence[str], values: Sequence[float], texts: Sequence[str]) -> None:
    """A bar in each row, red to the left and blue to the right, with the text at its end."""
    axes.barh(range(len(names)), values, 0.7, color=[RED if value < 0 else BLUE for value in values])
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "va": "center", "color": INK}
    for row_index, (value, text) in enumerate(zip(values, texts, strict=True)):
        shift, side = (-4, "right") if value < 0 else (4, "left")
        axes.annotate(text, (value, row_index), (shift, 0), ha=side, **style)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    draw_frame(axes, grid=False)


def _draw_iterations(axes: Axes, rows: Sequence[BlameRow]) -> None:
    for row in rows:
        axes.plot(np.arange(len(row.turns)), np.cumsum(row.turns), label=f"{row.scope} {row.primitive}".strip())
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="turn of the outermost loop", ylabel="sum of contributions up to the turn")
    axes.legend(fontsize=9, frameon=False)
    draw_frame(axes, grid=False)


def draw_tuning(seen: Any, title: str) -> Figure:
    """The bits of each site as bars, with the name of its format, and the front of cost and error."""
    rows = seen.rows
    figure, (left, right) = new_figure(14, max(4.0, 1.9 + 0.45 * len(rows)), title, 1, 2)
    _draw_named_bars(left, *([getattr(row, name) for row in rows] for name in ("path", "bits", "spec")))
    left.margins(x=0.25)
    left.set_xlabel("bits of a result")
    _draw_front(right, seen)
    return figure


def _draw_front(axes: Axes, tuning: Any) -> None:
    """The front, the tolerance and the chosen assignment; errors of zero are crosses at the lower edge."""
    cost, error = (np.array([getattr(point, name) for point in tuning.front]) for name in ("cost", "error"))
    errors = [*error, tuning.error, tuning.tolerance]
    lowest = min((value for value in errors if value > 0), default=1.0) / 3
    axes.set_yscale("log")
    positive = error > 0
    axes.step(cost[positive], error[positive], where="post", color=BLUE, linewidth=1.2, label="best measured")
    axes.scatter(cost[positive], error[positive], color=BLUE, s=18)
    axes.axhline(max(tuning.tolerance, lowest), color=RED, linewidth=1.0, linestyle="--", label="tolerance")
    style: dict[str, Any] = {"color": RED, "marker": "*", "s": 140, "zorder": 3, "clip_on": False}
    axes.scatter([tuning.cost], [max(tuning.error, lowest)], label="chosen", **style)
    axes.set_ylim(bottom=lowest)
    draw_at_edge(axes, cost[~positive], lowest, "exact", BLUE)
    axes.set(xlabel=f"cost ({tuning.cost_name})", ylabel="largest error of the inputs")
    draw_frame(axes)
    axes.legend(fontsize=9, frameon=False)


def draw_calibration(seen: Any, title: str) -> Figure:
    """The weights of a calibration as bars: signal-to-noise ratio in dB of their products on the data.

    There are two bars for each weight whose product was looked at, in the order of the report. One has each element
    rounded to nearest by itself, one is as it was rounded. A product without an error has no bar, and the word "exact".
    """
    rows = [row for row in seen.weights if not math.isnan(row.before)]
    check(rows, "the report has no weight whose product was looked at")
    figure, axes = new_figure(9, 1.6 + 0.5 * len(rows), title)
    bars = {"each element to nearest": [r.before for r in rows], "as rounded": [r.after for r in rows]}
    finite = [value for values in bars.values() for value in values if math.isfinite(value)]
    low, high = min(0.0, *finite, 0.0), max(1.0, *finite, 1.0)
    lengths = {name: [value if math.isfinite(value) else 0.0 for value in values] for name, values in bars.items()}
    draw_bars(axes, lengths, 0.0, lambda value: f" {value:.1f}")
    for shift, values in zip((-0.19, 0.19), bars.values(), strict=True):
        for row_index, value in enumerate(values):
            if not value > 0 or math.isinf(value):
                text = "exact" if value > 0 else f"{value:.1f}"
                axes.text(0, row_index + shift, f" {text}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [f"{row.path}\n{row.spec}" for row in rows], fontsize=8)
    limits = {"xlim": (low, 1.15 * high), "ylim": (len(rows) - 0.4, -0.6)}
    axes.set(**limits, xlabel="signal-to-noise ratio on the data (dB)")
    draw_legend(axes)
    return figure


def draw_sensitivity(seen: Any, title: str) -> Figure:
    """Signal-to-noise ratio of a model's output for each layer, a line for each format.

    Layers stand in the order of the model, and "all" last. A layer without an error in a format has no point.
    """
    rows, formats = seen.rows, seen.formats
    paths = list(dict.fromkeys(row.path for row in rows))
    figure, axes = new_figure(9, 1.9 + 0.34 * len(paths), title)
    for name in formats:
        ratios = {row.path: row.snr for row in rows if row.format == name}
        values = [ratios[path] if math.isfinite(ratios[path]) else math.nan for path in paths]
        axes.plot(values, range(len(paths)), "o-", markersize=5, linewidth=1.2, label=name)
    axes.set_yticks(np.arange(len(paths)), [path or "(the model)" for path in paths], fontsize=9)
    axes.set(ylim=(len(paths) - 0.5, -0.5), xlabel="signal-to-noise ratio of the output (dB): more is better")
    draw_frame(axes)
    draw_legend(axes)
    return figure
