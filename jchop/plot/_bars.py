"""Bars side by side, and their legend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._files import require_extra
from jchop.plot._style import BARS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    require_extra("jchop.plot", "plot", ("matplotlib",))

__all__ = ["draw_bars", "draw_legend"]


def draw_bars(axes: Axes, bars: dict[str, list[Any]], low: float, text: Any) -> None:
    """A bar for each name in each row, with its number; no bar if it is zero or unknown."""
    height = 0.76 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        shift = (index + 0.5) * height - 0.38
        known = [(place + shift, value) for place, value in enumerate(values) if value > 0]
        # Bars of length zero for the others: without any bar, the legend's colour would be Matplotlib's own.
        lengths = [max(value - low, 0.0) if value > 0 else 0.0 for value in values]
        axes.barh(np.arange(len(values)) + shift, lengths, 0.95 * height, low, color=BARS[index], label=name)
        for y, value in known:
            axes.text(value, y, text(value), va="center", fontsize=8, color=INK)


def draw_legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9, frameon=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
