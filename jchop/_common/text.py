"""Tables as text and as HTML, of one source; reports of rows, as plain data too; decibels."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common import html
from jchop._common.on_demand import load_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A line of text, or the rows of a table with its head first.
TableOrLine = str | Sequence[Sequence[str]]


#: The columns of characters that a report takes.
REPORT_WIDTH = 100
#: A text is not cut below this length while there are columns to leave out.
_SHORTEST_TEXT = 20
#: Nor ever below this one.
_SHORTEST_CUT = 5


def table_lines(
    rows: Sequence[Sequence[str]],
    align: str = "",
    width: int | None = None,
    optional: Sequence[str] = (),
    whole: str = ".table(width=None)",
) -> list[str]:
    """The lines of a table: columns as wide as their longest cell, two spaces between them, no space at the end.

    Args:
        rows: the cells; all rows are of one length.
        align: one of < (left) and > (right) for each column. Default: all left.
        width: the most characters of a line. A wider table first loses columns, named in a last line; then the longest
            of its texts on the left are cut in the middle. Default None: any number.
        optional: the names of the columns that may be left out: first columns without any value, then in this order.
        whole: the call that gives all columns, for the last line.

    Example:
        >>> table_lines([("name", "bits"), ("e5m2", "8")])
        ['name  bits', 'e5m2  8']
        >>> table_lines([("name", "bits"), ("a/long/path/of/a/layer", "8")], width=16)
        ['name        bits', 'a/lon…ayer  8']
    """
    columns = list(zip(align or "<" * len(rows[0]), *rows, strict=True))
    empty = [name for _, name, *cells in columns if set(cells) <= {"", "-"}]
    left_out = []
    for name in sorted(optional, key=lambda name: name not in empty):
        if width is None or sum(map(_least_width, columns)) + 2 * len(columns) - 2 <= width:
            break
        left_out += [name for column in columns if column[1] == name]
        columns = [column for column in columns if column[1] != name]
    widths = [max(map(len, cells)) for _, *cells in columns]
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        longest = max(range(len(widths)), key=lambda i: widths[i] * (columns[i][0] == "<"))
        if columns[longest][0] == ">" or widths[longest] <= _SHORTEST_CUT:
            break
        widths[longest] -= 1
    sides, *rows = zip(*columns, strict=True)
    lines = [
        "  ".join(f"{cut_middle(c, size):{side}{size}}" for c, side, size in zip(row, sides, widths, strict=True))
        for row in rows
    ]
    more = f"more columns: {', '.join(left_out)}; {whole} has all" if left_out else ""
    return [line.rstrip() for line in (*lines, *wrap(more, width or 1, subsequent_indent="  "))]


def _least_width(column: Sequence[str]) -> int:
    side, *cells = column
    longest = max(map(len, cells))
    return longest if side == ">" else min(longest, _SHORTEST_TEXT)


def cut_middle(text: str, length: int) -> str:
    """A text of at most `length` characters, with a mark in its middle for the characters left out.

    Example:
        >>> cut_middle("blocks/12/attention/query", 13), cut_middle("query", 13)
        ('blocks…/query', 'query')
    """
    tail = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


class Tables:
    """A report that is shown as tables and lines of text: ``str`` on a terminal, HTML in a notebook."""

    __slots__ = ()
    #: One of < and > for each column of a table; empty: all left.
    _align = ""
    #: The columns that a table of limited width may leave out, the first one first.
    _optional: tuple[str, ...] = ()

    def _parts(self) -> Iterable[TableOrLine]:
        """The tables, each with its head as the first row, and lines of text between them."""
        raise NotImplementedError

    def table(self, width: int | None = REPORT_WIDTH) -> str:
        """The report as text.

        Args:
            width: the most characters of a line, default 100. Long texts are cut in the middle, and columns left out
                are named in a last line. None: every column, and texts as they are.
        """
        lines: list[str] = []
        for part in self._parts():
            if isinstance(part, str):
                lines += [part] if width is None or len(part) <= width else wrap(part, width, subsequent_indent="  ")
                continue
            whole = table_lines(part, self._align)
            if width is None or max(map(len, whole)) <= width:
                lines += whole
                continue
            notes: list[str] = []
            if part[0][-1] == "note":  # in lines of their own, since a cut note says nothing
                notes = [f"{row[0]}: {row[-1]}".removeprefix(": ") for row in part[1:] if row[-1]]
                part = [row[:-1] for row in part]
            lines += table_lines(part, self._align[: len(part[0])], width, self._optional)
            for note in notes:
                lines += wrap(note, width, subsequent_indent="  ")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

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


class PictureReport(RowReport):
    """A report with a picture."""

    __slots__ = ()
    #: The name of the function in `jchop.plot._reports` that draws it, and its title.
    _picture, _title = "", ""

    def plot(self, *, title: str | None = None) -> Figure:
        """A figure of the report; needs matplotlib.

        Args:
            title: the title above. Default None: one that fits.

        Raises:
            ModuleNotFoundError: if matplotlib is missing.
            ValueError: without anything to draw.
        """
        draw = load_name("jchop.plot._reports", self._picture)
        return draw(self, self._title if title is None else title)


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
