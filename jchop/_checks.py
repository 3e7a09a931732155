"""Argument checks: one sentence that names the argument, its value and what is allowed."""

from __future__ import annotations

import operator


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int within [low, high]; booleans are refused."""
    span = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r} must be {span}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be {span}")
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value!r} must be {span}")
    return number


def check_bool(name: str, value: object) -> bool:
    """`value` where it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
    return value


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """`value` where it is one of the `allowed` texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
    return value
