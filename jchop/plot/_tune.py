"""The result of `jchop.tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jchop.plot._style import BLUE, INK, RED, draw_at_edge, need_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["tune"]


def tune(seen: Any, *, title: str = "Formats within a tolerance") -> Figure:
    """The bits of each site as bars, with the name of its format, and the front of cost and error.

    Args:
        seen: a result of `jchop.tune`.
        title: the title above. Default ``"Formats within a tolerance"``.

    Raises:
        TypeError: if `seen` is no such result.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from jchop import plot
        >>> found = jc.tune(lambda x: jnp.sin(x) + x * x, [(1.1,)], 0.1, ["e5m2", "bfloat16"], by="equation")
        >>> len(plot.tune(found).axes[0].patches) == len(found.rows)
        True
    """
    need_matplotlib()
    if not hasattr(seen, "front"):
        raise TypeError(f"seen={seen!r} must be a result of jchop.tune")
    rows = seen.rows
    figure = new_figure(14, max(4.0, 1.9 + 0.45 * len(rows)), title)
    left, right = figure.subplots(1, 2)
    left.barh(range(len(rows)), [row.bits for row in rows], 0.7, color=BLUE)
    for row_index, row in enumerate(rows):
        left.annotate(
            row.spec, (row.bits, row_index), (4, 0), textcoords="offset points", fontsize=8, va="center", color=INK
        )
    left.margins(x=0.25)
    left.set_yticks(range(len(rows)), [row.path for row in rows], fontsize=9)
    left.invert_yaxis()
    left.set_xlabel("bits of a result")
    _draw_front(right, seen)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
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
    axes.scatter(
        [tuning.cost],
        [max(tuning.error, lowest)],
        color=RED,
        marker="*",
        s=140,
        zorder=3,
        clip_on=False,
        label="chosen",
    )
    axes.set_ylim(bottom=lowest)
    draw_at_edge(axes, cost[~positive], lowest, "exact", BLUE)
    axes.set_xlabel(f"cost ({tuning.cost_name})")
    axes.set_ylabel("largest error of the inputs")
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(fontsize=9, frameon=False)
