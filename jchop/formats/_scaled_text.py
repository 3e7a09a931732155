"""The text grammar of scaled formats: an element's text, or a name, with options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jchop._checks import quoted
from jchop.formats._base import ElementFormat
from jchop.formats._text import CALL, built, integer_of, options_of, parse_element, split_options, truth_of, unknown


def _sizes(value: str) -> Any:
    """``128``, ``all``, ``tensor``, or several in parentheses."""
    if value.startswith("(") and value.endswith(")"):
        return tuple(_sizes(item) for item in value[1:-1].split(",") if item)
    return value if value in ("all", "tensor") else integer_of(value)


def _zero_point(value: str) -> Any:
    return None if value == "none" else value  # the format checks the other values


#: The options that make a format scaled, each with the function that reads its value.
_OPTIONS: dict[str, Callable[[str], object]] = {
    "group": _sizes,
    "axis": _sizes,
    "channel": _sizes,
    "scale": str,
    "rule": str,
    "zero_point": _zero_point,
    "nan_block": truth_of,
    "sparse": str,
    "sparse_axis": integer_of,
}


#: Texts of integers: ``int8`` is always scaled, ``integer8`` only by an option.
_SCALED_INTEGER, _INTEGER = re.compile(r"u?int[0-9]+"), re.compile(r"(?<=int)eger(?=[0-9])")


def shown_element(element: ElementFormat) -> str:
    """The text of an element format within the text of a scaled format."""
    return _INTEGER.sub("", str(element))


def shown(value: object, name: str = "") -> str:
    """An option's value in text."""
    if name == "sparse" and isinstance(value, tuple):
        return ":".join(map(str, value))
    if isinstance(value, tuple):
        return f"({','.join(map(shown, value))})"
    return str(value).lower()


def parse_any(
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
    match = CALL.fullmatch(text)
    if match is None:
        raise unknown(text, names)
    if ")(" in text:
        raise ValueError(
            f"format text {quoted(text)}: all that belongs to a format stands in one pair of parentheses, as in "
            f"{quoted(text.replace(')(', ','))}"
        )
    stem, items = match[1], split_options(match[2])
    ours, rest = (
        [item for item in items if (item.partition("=")[0] in _OPTIONS) is belongs] for belongs in (True, False)
    )
    base = lookup(stem)
    if base is None and not ours and not _SCALED_INTEGER.fullmatch(stem):
        return parse_element(text, names, _OPTIONS)
    options = options_of(text, ",".join(ours if base is None else items), _OPTIONS)
    if base is None:
        base = scale(parse_element(f"{stem}({','.join(rest)})" if rest else stem, names, _OPTIONS))
    return built(text, base, **options)
