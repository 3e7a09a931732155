"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table_lines"]


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: columns as wide as their longest cell, two spaces between them, no space at the end.

    Example:
        >>> table_lines([("name", "bits"), ("e5m2", "8")])
        ['name  bits', 'e5m2  8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
