"""HTML of objects that show themselves: tables, facts, heat maps and histograms, each a fragment that stands alone.

Styles are inline and images are data, because notebooks and mail programs drop style sheets and links. Every text is
escaped here, and nowhere else.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

_FONT_STYLE = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"
_CELL_STYLE = (
    "padding:2px 10px 2px 0;border-bottom:1px solid #8883;text-align:left;white-space:nowrap;vertical-align:top"
)
#: Blue, white and red, by which heat maps show negative and positive numbers; grey shows infinities and NaN.
_NEGATIVE_COLOUR, _ZERO_COLOUR = (33, 102, 172), (247, 247, 247)
_POSITIVE_COLOUR, _NOT_FINITE_COLOUR = (178, 24, 43), (150, 150, 150)


def _html_tag(name: str, inside: str, style: str = "") -> str:
    return f'<{name} style="{style}">{inside}</{name}>' if style else f"<{name}>{inside}</{name}>"


def table_element(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head.

    Example:
        >>> table_element([("name",), ("a<b",)]).count("a&lt;b")
        1
    """
    head, *body = [[escape(cell) for cell in row] for row in rows]
    first = _html_tag("tr", "".join(_html_tag("th", cell, _CELL_STYLE) for cell in head))
    lines = "".join(_html_tag("tr", "".join(_html_tag("td", cell, _CELL_STYLE) for cell in row)) for row in body)
    inside = _html_tag("thead", first) + _html_tag("tbody", lines)
    return _html_tag("table", inside, f"{_FONT_STYLE};border-collapse:collapse;margin:4px 0")


def paragraph(text: str) -> str:
    """A line of text.

    Example:
        >>> paragraph("1 < 2").count("1 &lt; 2")
        1
    """
    return _html_tag("div", escape(text), _FONT_STYLE)


def box(title: str, facts: Iterable[tuple[str, str]], *pictures: tuple[str, str]) -> str:
    """A title in bold, facts by name below it, and pictures (HTML) side by side, each under its caption.

    Example:
        >>> box("title", [("bits", "8")]).count("title")
        1
    """
    lines = _html_tag("div", escape(title), "font-weight:bold")
    lines += "".join(_html_tag("div", f"{escape(name)}: {escape(value)}") for name, value in facts)
    style = "display:inline-block;margin:4px 16px 0 0;vertical-align:top"
    captions = [(_html_tag("div", escape(caption)), picture) for caption, picture in pictures]
    figures = "".join(_html_tag("div", caption + picture, style) for caption, picture in captions)
    return _html_tag("div", lines + figures, f"{_FONT_STYLE};line-height:1.4")


def image(data: bytes, text: str, style: str = "max-width:100%") -> str:
    """A PNG file as an image; `text` is read out where it cannot be seen.

    Example:
        >>> image(b"", "nothing")
        '<img alt="nothing" style="max-width:100%" src="data:image/png;base64,">'
    """
    payload = base64.b64encode(data).decode("ascii")
    return f'<img alt="{escape(text)}" style="{style}" src="data:image/png;base64,{payload}">'


def heat_map_image(cells: np.ndarray, text: str) -> str:
    """A matrix of numbers as an image: blue for negative ones, white for zero, red for positive ones.

    Args:
        cells: rows by columns, at least one of each; infinities and NaN are grey.
        text: a description.

    Example:
        >>> heat_map_image(np.eye(2), "the unit matrix").startswith('<img alt="the unit matrix"')
        True
    """
    finite = np.isfinite(cells)
    largest = float(np.abs(cells[finite]).max(initial=0.0)) or 1.0
    share = np.where(finite, cells, 0.0)[..., None] / largest
    ends = np.where(share < 0, np.array(_NEGATIVE_COLOUR), np.array(_POSITIVE_COLOUR))
    colours = np.rint(np.array(_ZERO_COLOUR) + (ends - np.array(_ZERO_COLOUR)) * np.abs(share)).astype(np.uint8)
    colours[~finite] = _NOT_FINITE_COLOUR
    rows, columns = cells.shape
    size = max(1, min(12, 256 // max(rows, columns)))
    style = f"width:{columns * size}px;height:{rows * size}px;image-rendering:pixelated;border:1px solid #8886"
    return image(_png(colours), text, style)


def _png(colours: np.ndarray) -> bytes:
    """An 8-bit RGB image as a PNG file (ISO/IEC 15948), each row without a filter."""
    rows, columns, _ = colours.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), colours.reshape(rows, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    data = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def histogram(counts: Sequence[int], low: str, high: str) -> str:
    """Counts as bars, with texts below the first and the last.

    Example:
        >>> histogram([1, 2], "-1", "1").count("<rect")
        2
    """
    width, height = 160, 64
    step, most = width / max(len(counts), 1), max([*counts, 1])
    bars = "".join(
        f'<rect x="{i * step:.2f}" y="{height - height * n / most:.2f}" width="{max(step - 0.5, 0.5):.2f}" '
        f'height="{height * n / most:.2f}" fill="#31688e"></rect>'
        for i, n in enumerate(counts)
    )
    words = (
        f'<text x="0" y="{height + 13}">{escape(low)}</text>'
        f'<text x="{width}" y="{height + 13}" text-anchor="end">{escape(high)}</text>'
    )
    style = "font-size:10px;fill:currentColor"
    return f'<svg width="{width}" height="{height + 18}" style="{style}">{bars}{words}</svg>'


def page(title: str, *parts: str) -> str:
    """A page of its own, of fragments of HTML: no scripts, nothing that is loaded.

    Example:
        >>> page("a study", paragraph("text")).startswith("<!DOCTYPE html>")
        True
    """
    name = escape(title)
    body = "".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"></head>'
        f'<body style="font-family:sans-serif;margin:16px;max-width:1100px"><h1>{name}</h1>'
        f'<div style="overflow-x:auto">{body}</div></body></html>\n'
    )
