"""The report of a calibration: a row for every weight, and for every turn of a loop over a stack of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jchop._common.text import RowReport, TableOrLine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PtqReport", "WeightRow"]


@dataclass(frozen=True)
class WeightRow:
    """What happened to a weight.

    Args:
        path: its path, joined by slashes, and the indexes of a layer of a stack in brackets.
        shape: its shape, that of one layer for a stack.
        spec: what it is rounded to; empty if it is not rounded.
        bits: bits of codes and scales for each element; NaN if it is not rounded.
        method: the steps that were taken; ``"nearest"`` if there was none; empty if it is not rounded.
        before: signal-to-noise ratio of its product on the data in dB, each element of the weight as it was given
            rounded to nearest by itself; NaN if its product was not looked at.
        after: that of the rounded weight, and of its corrected bias.
        damping: the damping of the factorization, the largest of several matrices; 0 if there was none.
        tries: how many factorizations there were, the most of several matrices.
        dead: how many columns had no input but zero.
        rows: how many rows (tokens) of input there were.
        sparsity: the share of its numbers that are zero after the rounding; NaN if its product was not looked at.
        bias: the path of the bias that took its mean error; empty if none did.
        note: why a step was not taken, and other things worth knowing; empty if there is nothing.
    """

    path: str
    shape: tuple[int, ...]
    spec: str
    bits: float = math.nan
    method: str = "nearest"
    before: float = math.nan
    after: float = math.nan
    damping: float = 0.0
    tries: int = 0
    dead: int = 0
    rows: float = 0.0
    sparsity: float = math.nan
    bias: str = ""
    note: str = ""


@dataclass(frozen=True)
class PtqReport(RowReport):
    """The rows of a calibration; ``str`` of it is a table.

    Args:
        weights: a `WeightRow` for each weight that reaches a product, and each rounded parameter, in the order in which
            they were rounded; those that were not looked at come last.
        passes: how often the data were run.
    """

    weights: tuple[WeightRow, ...]
    passes: int = 1

    _rows_field = "weights"

    def plot(self, *, title: str = "Signal-to-noise ratio of products") -> Figure:
        """`jchop.plot.calibration` of the report; needs matplotlib."""
        from jchop.plot import calibration

        return calibration(self, title=title)

    def _parts(self) -> list[TableOrLine]:
        head = ("weight", "shape", "bits", "method", "nearest dB", "SNR dB", "damping", "dead", "zeros", "bias", "note")
        rows = [
            (
                row.path,
                "×".join(map(str, row.shape)),
                _format_number(row.bits, ".3g"),
                row.method,
                _format_number(row.before, ".2f"),
                _format_number(row.after, ".2f"),
                f"{row.damping:g}" if row.tries else "",
                str(row.dead) if row.rows else "",
                _format_number(row.sparsity, ".0%"),
                row.bias,
                row.note,
            )
            for row in self.weights
        ]
        return [[head, *rows]]


def _format_number(value: float, format_spec: str) -> str:
    return "" if math.isnan(value) else format(value, format_spec)
