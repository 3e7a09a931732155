"""The layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop.plot._style import INK, draw_bars, draw_legend, need_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def calibration(seen: Any, *, title: str = "Signal-to-noise ratio of products") -> Figure:
    """The weights of a calibration as bars: signal-to-noise ratio in dB of their products on the data.

    There are two bars for each weight whose product was looked at, in the order of the report: with each element
    rounded to nearest by itself, and as it was rounded. A product without an error has no bar, and the word "exact".

    Args:
        seen: a `jchop.ptq.PtqReport`.
        title: the title above the bars. Default ``"Signal-to-noise ratio of products"``.

    Raises:
        TypeError: if `seen` is not such a report.
        ValueError: if no product was looked at.

    Example:
        >>> import jax, jchop as jc
        >>> x, w = jax.random.normal(jax.random.key(0), (64, 8)), jax.random.normal(jax.random.key(1), (8, 4))
        >>> _, report = jc.ptq.quantize(lambda p, x: x @ p["w"], jc.Rule(weight="int4(group=all)"), {"w": w}, [x])
        >>> figure = report.plot()
        >>> [label.get_text().split()[0] for label in figure.axes[0].get_yticklabels()]
        ['w']
    """
    need_matplotlib()
    weights = getattr(seen, "weights", None)
    if weights is None:
        raise TypeError(f"seen={seen!r} must be a report of jchop.ptq.quantize")
    rows = [row for row in weights if not math.isnan(row.before)]
    if not rows:
        raise ValueError("seen has no weight whose product was looked at")
    figure = new_figure(9, 1.6 + 0.5 * len(rows), title)
    axes = figure.subplots()
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
    axes.set_xlim(low, 1.15 * high)
    axes.set_xlabel("signal-to-noise ratio on the data (dB)", fontsize=10)
    axes.set_yticks(range(len(rows)), [f"{row.path}\n{row.spec}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    draw_legend(axes)
    return figure


def sensitivity(seen: Any, *, title: str = "Layers rounded one at a time") -> Figure:
    """Signal-to-noise ratio of a model's output for each layer, a line for each format.

    Layers stand in the order of the model, and "all" last. A layer without an error in a format has no point.

    Args:
        seen: a result of `jchop.nn.sensitivity`.
        title: the title above. Default ``"Layers rounded one at a time"``.

    Raises:
        TypeError: if `seen` is no such result.

    Example:
        >>> import jax, jchop as jc
        >>> from flax import nnx
        >>> from jchop import plot
        >>> model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(4)))
        >>> x = jax.random.normal(jax.random.key(1), (32, 16))
        >>> found = jc.nn.sensitivity(model, [x], ["int8", "int4", "e4m3fn"])
        >>> figure = plot.sensitivity(found)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['int8', 'int4', 'float8_e4m3fn']
    """
    need_matplotlib()
    rows, formats = getattr(seen, "rows", None), getattr(seen, "formats", None)
    if rows is None or formats is None:
        raise TypeError(f"seen={seen!r} must be a result of jchop.nn.sensitivity")
    paths = list(dict.fromkeys(row.path for row in rows))
    figure = new_figure(9, 1.9 + 0.34 * len(paths), title)
    axes = figure.subplots()
    for name in formats:
        ratios = {row.path: row.snr for row in rows if row.format == name}
        values = [ratios[path] if math.isfinite(ratios[path]) else math.nan for path in paths]
        axes.plot(values, range(len(paths)), "o-", markersize=5, linewidth=1.2, label=name)
    _label_rows(axes, [path or "(the model)" for path in paths])
    axes.set_xlabel("signal-to-noise ratio of the output (dB): more is better", fontsize=10)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    draw_legend(axes)
    return figure


def _label_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(np.arange(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
