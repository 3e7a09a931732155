"""Reads JSON objects of untrusted files: with bounded memory, limited depth and no duplicate keys."""

from __future__ import annotations

import json
from typing import Any

from jchop._common.checks import check

#: The most entries of an object. A text may have four lists and objects, and six strings, for each of so many.
MOST_ENTRIES = 1 << 18


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a text.

    A list or an object takes up to thirty times its text when it is parsed. So they are counted before.

    Raises:
        ValueError: if the text is not such an object, has a duplicate key, has too many entries, or is nested too deep.
    """
    for kind, marks, most in (("lists and objects", "[{", 4), ("strings", '"', 12)):
        check(sum(map(text.count, marks)) <= most * MOST_ENTRIES, f"more {kind} than {MOST_ENTRIES} entries have")
    try:
        value = json.loads(text, object_pairs_hook=_unique_members, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("lists and objects nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def string_object(value: Any, name: str) -> dict[str, str]:
    """A parsed object whose values are strings; None counts as an empty one."""
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{name} must be an object of texts")
    return value


def short_text(value: object) -> str:
    """A value for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        last = {key: place for place, (key, _) in enumerate(pairs)}
        twice = next(key for place, (key, _) in enumerate(pairs) if last[key] != place)
        raise ValueError(f"the key {short_text(twice)} is duplicated")
    check(len(members) <= MOST_ENTRIES, f"an object has more than {MOST_ENTRIES} entries")
    return members


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
