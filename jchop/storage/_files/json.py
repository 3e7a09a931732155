"""Reads JSON objects of untrusted files entry by entry: with little memory, limited depth and no duplicate keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
#: Reads the value that begins at a position of a text; returns the value and its end.
Reader = Callable[[str, int], tuple[T, int]]

#: The most entries of an object, and the most characters of a dict or list within one.
MOST_ENTRIES = 1 << 18
LONGEST_VALUE = 1 << 16

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")


def read_object(text: str, reader: Callable[[str], Reader[Any]]) -> dict[str, Any]:
    """The JSON object of a text.

    Args:
        text: the object, possibly with white space around it.
        reader: the reader of the value of a key: `small_value`, `json_string` or `string_object`.

    Raises:
        ValueError: if the text is not such an object, has a duplicate key, or has too many entries.
    """
    members, end = _read_members(text, _after_space(text, 0), reader)
    if _after_space(text, end) != len(text):
        raise ValueError(f"text after the object, at character {end}")
    return members


def string_object(text: str, at: int) -> tuple[dict[str, str], int]:
    """An object whose values are strings; None counts as an empty one."""
    if text.startswith("null", at):
        return {}, at + 4
    return _read_members(text, at, lambda _: json_string)


def json_string(text: str, at: int) -> tuple[str, int]:
    """A string."""
    if text[at : at + 1] != '"':
        raise ValueError(f"no string at character {at}")
    return _DECODER.raw_decode(text, at)


def small_value(text: str, at: int) -> tuple[Any, int]:
    """A dict or a list of at most `LONGEST_VALUE` characters."""
    if text[at : at + 1] not in ("{", "["):
        raise ValueError(f"no object and no list at character {at}")
    for window in (1 << 10, LONGEST_VALUE):
        try:
            value, end = _DECODER.raw_decode(text[at : at + window])
            return value, at + end
        except RecursionError:
            raise ValueError(f"lists and objects nested too deep at character {at}") from None
        except ValueError as error:
            reason = str(error)  # the error object would keep this frame, and the text, in memory
    raise ValueError(f"at character {at}: {reason}")


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a whole text, which the caller keeps short: parsed JSON takes up to thirty times its bytes.

    Raises:
        ValueError: if the text is not such an object, has a duplicate key, or is nested too deep.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("lists and objects nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def short_text(value: object) -> str:
    """A value for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _read_members(text: str, at: int, reader: Callable[[str], Reader[T]]) -> tuple[dict[str, T], int]:
    members: dict[str, T] = {}
    at, mark = _after_mark(text, at, "{"), ","
    if text[at : at + 1] == "}":
        return members, at + 1
    while mark == ",":
        key, at = json_string(text, at)
        if key in members:
            raise ValueError(f"the key {short_text(key)} is duplicated")
        if len(members) == MOST_ENTRIES:
            raise ValueError(f"an object has more than {MOST_ENTRIES} entries")
        members[key], at = reader(key)(text, _after_mark(text, _after_space(text, at), ":"))
        at = _after_space(text, at)
        mark = text[at : at + 1]
        at = _after_mark(text, at, ",}")
    return members, at


def _after_mark(text: str, at: int, marks: str) -> int:
    """The position after one of some marks."""
    if at >= len(text) or text[at] not in marks:
        raise ValueError(f"no {' or '.join(marks)} at character {at}")
    return _after_space(text, at + 1) if text[at] != "}" else at + 1


def _after_space(text: str, at: int) -> int:
    """The position after white space."""
    match = _WHITE_SPACE.match(text, at)
    assert match is not None
    return match.end()


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key is duplicated")
    return members


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_members, parse_constant=_no_number)
