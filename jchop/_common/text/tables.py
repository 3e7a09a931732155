"""Tables as text and as HTML, of one source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jchop._common.text import html

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
