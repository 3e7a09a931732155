"""The text grammar of scaled formats: an element's text, or a name, with options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jchop._common.checks import quote
from jchop.formats._base import ElementFormat
from jchop.formats._element_text import (
    FORMAT_CALL,
    build_format,
    parse_element,
    read_bool,
    read_integer,
    read_options,
    split_options,
    unknown_format_error,
)


def _read_sizes(value: str) -> Any:
    """``128``, ``all``, ``tensor``, or several in parentheses."""
    if value.startswith("(") and value.endswith(")"):
        return tuple(_read_sizes(item) for item in value[1:-1].split(",") if item)
    return value if value in ("all", "tensor") else read_integer(value)


def _read_zero_point(value: str) -> Any:
    return None if value == "none" else value  # the format checks the other values


#: The options that make a format scaled, each with the function that reads its value.
_SCALED_OPTIONS: dict[str, Callable[[str], object]] = {
    "group": _read_sizes,
    "axis": _read_sizes,
    "channel": _read_sizes,
    "scale": str,
    "rule": str,
    "zero_point": _read_zero_point,
    "nan_block": read_bool,
    "sparse": str,
    "sparse_axis": read_integer,
}


#: Texts of integers: ``int8`` is always scaled, ``integer8`` only by an option.
_SCALED_INTEGER, _INTEGER_TAIL = re.compile(r"u?int[0-9]+"), re.compile(r"(?<=int)eger(?=[0-9])")


def scaled_element_text(element: ElementFormat) -> str:
    """The text of an element format within the text of a scaled format."""
    return _INTEGER_TAIL.sub("", str(element))


def option_text(value: object, name: str = "") -> str:
    """An option's value in text."""
    if name == "sparse" and isinstance(value, tuple):
        return ":".join(map(str, value))
    if isinstance(value, tuple):
        return f"({','.join(map(option_text, value))})"
    return str(value).lower()


def parse_element_or_scaled(
    text: str,
    names: Iterable[str],
    lookup: Callable[[str], Any],
    scale: Callable[[ElementFormat], Any],
) -> Any:
    """The element format or the scaled format that a lower-case text names.

    Args:
        text: see `jchop.formats.parse_format`.
        names: the names of scaled formats, for the error of a text that names nothing.
        lookup: the scaled format of a name; None for another name.
        scale: makes an element format a scaled one, which is called with the options.

    Raises:
        ValueError: for text that names no format, with the closest names.
    """
    match = FORMAT_CALL.fullmatch(text)
    if match is None:
        raise unknown_format_error(text, names)
    if ")(" in text:
        raise ValueError(
            f"format text {quote(text)}: all that belongs to a format stands in one pair of parentheses, as in "
            f"{quote(text.replace(')(', ','))}"
        )
    stem, items = match[1], split_options(match[2])
    ours, rest = (
        [item for item in items if (item.partition("=")[0] in _SCALED_OPTIONS) is belongs] for belongs in (True, False)
    )
    base = lookup(stem)
    if base is None and not ours and not _SCALED_INTEGER.fullmatch(stem):
        return parse_element(text, names, _SCALED_OPTIONS)
    options = read_options(text, ",".join(ours if base is None else items), _SCALED_OPTIONS)
    if base is None:
        base = scale(parse_element(f"{stem}({','.join(rest)})" if rest else stem, names, _SCALED_OPTIONS))
    return build_format(text, base, **options)
