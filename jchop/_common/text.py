"""Tables as text and as HTML, of one source; reports of rows, as plain data too; decibels."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from jchop._common import html

#: A line of text, or the rows of a table with its head first.
TableOrLine = str | Sequence[Sequence[str]]


def table_lines(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """The lines of a table: columns as wide as their longest cell, two spaces between them, no space at the end.

    Args:
        rows: the cells; all rows are of one length.
        align: one of < (left) and > (right) for each column. Default: all left.

    Example:
        >>> table_lines([("name", "bits"), ("e5m2", "8")])
        ['name  bits', 'e5m2  8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align or "<" * len(widths)
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


class Tables:
    """A report that is shown as tables and lines of text: ``str`` on a terminal, HTML in a notebook."""

    __slots__ = ()
    #: One of < and > for each column of the first table; empty: all left.
    _align = ""

    def _parts(self) -> Iterable[TableOrLine]:
        """The tables, each with its head as the first row, and lines of text between them."""
        raise NotImplementedError

    def __str__(self) -> str:
        lines: list[str] = []
        align = self._align
        for part in self._parts():
            if isinstance(part, str):
                lines.append(part)
            else:
                lines += table_lines(part, align)
                align = ""
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = (html.paragraph(part) if isinstance(part, str) else html.table_element(part) for part in self._parts())
        return f"<div>{''.join(parts)}</div>"


class RowReport(Tables):
    """A dataclass with a field of rows, each a dataclass: shown as tables, and given as dict, JSON, columns and CSV."""

    __slots__ = ()
    #: The field with the rows, and whether infinities are texts ("inf") in plain data; else they are None.
    _rows_field, _infinities_as_text = "rows", False

    def as_dict(self) -> dict[str, Any]:
        """Everything in the types of strict JSON, with the rows last.

        NaN is None, and so are infinities unless the class says that they are texts. A spec or a rule is its text.
        """
        names = [f.name for f in fields(self) if f.name != self._rows_field]  # type: ignore[arg-type]
        return {name: plain_data(getattr(self, name), self._infinities_as_text) for name in (*names, self._rows_field)}

    def to_json(self, indent: int | None = None) -> str:
        """`as_dict` as strict JSON.

        Args:
            indent: spaces of each level; None for one line.
        """
        return json.dumps(self.as_dict(), indent=indent, allow_nan=False)

    def columns(self) -> dict[str, list[Any]]:
        """The rows by column, as a data frame takes them."""
        rows = getattr(self, self._rows_field)
        return {f.name: [getattr(row, f.name) for row in rows] for f in fields(rows[0])} if rows else {}

    def to_csv(self) -> str:
        """The rows as CSV, with their names first; the entries of a tuple have spaces between them."""
        columns, text = self.columns(), io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow(" ".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in row)
        return text.getvalue()


def plain_data(value: Any, infinities_as_text: bool = False) -> Any:
    """A value in the types of strict JSON: a dataclass without a text of its own becomes a dict, other objects texts.

    Example:
        >>> plain_data((1, math.nan, {"a": -math.inf}), infinities_as_text=True)
        [1, None, {'a': '-inf'}]
    """
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if is_dataclass(value) and type(value).__str__ is object.__str__:
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain_data(entry, infinities_as_text) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain_data(entry, infinities_as_text) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if infinities_as_text and not math.isnan(value) else None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -- signal-to-noise ratio in decibels ---------------------------------------------------------------------------------


def decibels(signal: float, error: float) -> float:
    """10 log10(signal / error) of two sums of squares; infinite without an error.

    It is -infinite for an error without a signal, and for one that is not finite.

    Example:
        >>> decibels(100.0, 1.0), decibels(0.0, 0.0), decibels(0.0, 1.0), decibels(1.0, math.inf)
        (20.0, inf, -inf, -inf)
    """
    if error == 0:
        return math.inf
    ratio = signal / error
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def decibels_of_arrays(x: np.ndarray, error: np.ndarray) -> float:
    """`decibels` of the squares of two arrays, of which no square overflows or is lost.

    Example:
        >>> decibels_of_arrays(np.array([3e200, 4e200]), np.array([0.0, 5e199]))
        20.0
    """
    worst, largest = (float(np.abs(v).max(initial=0.0)) for v in (error, x))
    if worst == 0 or math.isinf(worst) or largest == 0:
        return decibels(largest, worst)
    exponents = [math.frexp(value)[1] for value in (largest, worst)]
    power, noise = (float(np.sum(np.ldexp(v, -exp) ** 2)) for v, exp in zip((x, error), exponents, strict=True))
    return decibels(power, noise) + 20 * (exponents[0] - exponents[1]) * math.log10(2)


def format_decibels(ratio: float) -> str:
    """A result of `decibels` in a table: ``"exact"`` without an error, ``"lost"`` without a signal.

    Example:
        >>> format_decibels(20.04), format_decibels(math.inf), format_decibels(-math.inf)
        ('20.0', 'exact', 'lost')
    """
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "lost"
    return f"{ratio:.1f}"
