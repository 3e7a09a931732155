"""Checks of arguments; each error names the argument, its value and the allowed values. Texts of formats and specs.

A check of an argument is a function of its name and its value, which it returns. Further arguments give the limits:
an integer or a number in a range, a choice, an instance. `check` states any other condition and its error in one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def check(holds: object, message: str) -> None:
    """Refuses a condition that does not hold; the condition and its error are then one line.

    The message is made in any case. So it must be cheap, and must not fail where the condition holds.

    Raises:
        ValueError: with the message.
    """
    if not holds:
        raise ValueError(message)


@contextlib.contextmanager
def place_in_errors(place: str, kinds: Any = ValueError) -> Iterator[None]:
    """Names a place in front of the messages of errors, unless they begin with it; they become a ValueError."""
    try:
        yield
    except kinds as error:
        if str(error).startswith(f"{place}: "):
            raise
        raise ValueError(f"{place}: {str(error) or 'it does not fit in memory'}") from None


def check_int(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int within [low, high]; booleans are refused."""
    bounds = "" if low is None else f" >= {low}" if high is None else f" from {low} to {high}"
    expectation = f"{name}={value!r} must be an integer{bounds}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(expectation) from None
    check((low is None or number >= low) and (high is None or number <= high), expectation)
    return number


def check_float(name: str, value: Any, low: float = -math.inf, high: float = math.inf, ends: str = "[]") -> float:
    """`value` as a finite float in an interval; texts and booleans are refused.

    Args:
        name: of the argument.
        value: anything.
        low: the least number. Default: none.
        high: the largest number. Default: none.
        ends: "[" and "]" for an end that belongs to the interval, "(" and ")" for one that does not. Default: both do.

    Example:
        >>> check_float("momentum", 0.9, 0, 1, "[)")
        0.9
    """
    bounds = [f"{'>=' if ends[0] == '[' else '>'} {low:g}"] if math.isfinite(low) else []
    bounds += [f"{'<=' if ends[1] == ']' else '<'} {high:g}"] if math.isfinite(high) else []
    expectation = f"{name}={short_repr(value)} must be a finite number {' and '.join(bounds)}".rstrip()
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(expectation) from None
    above = number >= low if ends[0] == "[" else number > low
    below = number <= high if ends[1] == "]" else number < high
    check(above and below and math.isfinite(number), expectation)
    return number


def check_instance(name: str, value: T, kinds: Any, words: str) -> T:
    """`value`, which must be of one of some classes; `words` say so, and possibly name the call that works."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name}={short_repr(value)} must be {words}")
    return value


def as_numpy(name: str, value: Any) -> np.ndarray:
    """`value` as a NumPy array in the machine's byte order.

    Raises:
        TypeError: for a masked array, because the result would lose the mask, and for arrays that JAX traces.
        ValueError: for lists of different lengths.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; pass {name}.filled(number), and mask the result again"
        )
    try:
        array = np.asarray(value)
    except TypeError as error:
        if type(error).__name__ != "TracerArrayConversionError":  # JAX is not imported on this floor
            raise
        raise TypeError(f"{name} has arrays that JAX traces (jit, vmap, grad), which NumPy does not take. Within jit "
                        "jchop.quantize and jchop.dequantize convert numbers and codes, and jnp.asarray joins "
                        "lists") from None  # fmt: skip
    except ValueError as error:
        if not isinstance(value, list | tuple):
            raise
        raise ValueError(f"{name} is no array, since its lists have different lengths or depths: {error}") from None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_bool(name: str, value: object) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """`value`, which must be one of the texts of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    return value


def as_iterable(value: Any) -> Iterable[Any]:
    """A value on its own, such as a text, as a list of it; other iterables as they come."""
    return [value] if isinstance(value, str) or not isinstance(value, Iterable) else value


# -- texts of formats and specs ----------------------------------------------------------------------------------------

#: Limits of a text: characters outside of codebooks, characters in all, nested brackets.
MAX_TEXT_LENGTH, MAX_CODEBOOK_LENGTH, MAX_BRACKET_DEPTH = 1 << 12, 1 << 22, 8


def check_text(what: str, text: str) -> str:
    """`text` in lower case, stripped; ValueError for a text that cannot belong to the grammar."""
    if len(text) > MAX_CODEBOOK_LENGTH or _length_outside_codebooks(text) > MAX_TEXT_LENGTH:
        raise ValueError(
            f"{what} {quote(text)} is too long: at most {MAX_TEXT_LENGTH} characters, "
            f"and {MAX_CODEBOOK_LENGTH} with the levels of codebooks"
        )
    check(text.isascii(), f"{what} {quote(text)} is not known: only ASCII characters are allowed")
    depth = 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if depth > MAX_BRACKET_DEPTH:
            raise ValueError(f"{what} {quote(text)} has more than {MAX_BRACKET_DEPTH} brackets within each other")
    return text.strip().lower()


def _length_outside_codebooks(text: str) -> int:
    """Number of characters outside ``codebook(...)``."""
    if len(text) <= MAX_TEXT_LENGTH:
        return len(text)
    first, *tables = text.lower().split("codebook(")
    return len(first) + sum(len(rest) for _, _, rest in (table.partition(")") for table in tables))


def quote(value: object) -> str:
    """The form of a value in errors: only the beginning of a long text."""
    if not isinstance(value, str) or len(value) <= 1 << 10:
        return repr(value)
    return f"{value[:80]!r}... of {len(value)} characters"


class FieldsRepr:
    """A dataclass that prints the fields that differ from their defaults."""

    def __repr__(self) -> str:
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        shown = (f"{field.name}={value!r}" for field, value in values.items() if field.repr and value != field.default)
        return f"{type(self).__name__}({', '.join(shown)})"


def short_repr(value: object) -> str:
    """The form of any value in errors, on one line: of one with a long text, as a model, its class alone."""
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else type(value).__name__


def clip_text(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def split_outside_brackets(text: str, separators: str) -> list[str]:
    """The parts of a text between separators outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in separators and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        else:
            depth += (char in "([") - (char in ")]")
    return [*parts, text[start:]]


def first_names(names: Sequence[str], write: Callable[[str], str] = repr) -> str:
    """The first three of some names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(write, names[:3])) + more


def keyword_hints(hints: Mapping[str, str]) -> Callable[[T], T]:
    """A decorator: for a keyword that users try and the function does not have, the error gives the call that works.

    Args:
        hints: the call that works, for each keyword.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs and (unknown := kwargs.keys() & hints.keys()):
                name = min(unknown)
                raise TypeError(
                    f"{function.__qualname__.removesuffix('.__init__')} has no {name}=; write {hints[name]}"
                )
            return function(*args, **kwargs)

        return call

    return decorate


def call_hint(example: str) -> Callable[[T], T]:
    """A decorator: of a call without an argument that is needed, or with one too many, the error names one that works.

    Args:
        example: the call that works.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # of this line, not inside
                    raise TypeError(f"{error}; write {example}") from None
                raise

        return call

    return decorate


def close_names_hint(text: str, names: Iterable[str]) -> str:
    """The part of an error that suggests up to three of `names` for a misspelt `text`; empty if none is close."""
    text, names = text.strip()[:64], list(dict.fromkeys(names))
    containing = [name for name in names if len(text) > 2 and text in name]
    suggestions = dict.fromkeys([*containing, *difflib.get_close_matches(text, names, n=3)])
    return f"; did you mean {' or '.join(list(suggestions)[:3])}?" if suggestions else ""
