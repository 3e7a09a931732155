"""Tables and numbers as text, and checks of output files before any work."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jchop._common.checks import check
from jchop._common.text.tables import table_lines
from jchop.formats import ElementFormat, FloatFormat
from jchop.formats._base import Dyadic
from jchop.study._run import ProgressBar


def print_rows(rows: Sequence[Sequence[str]], align: str, as_json: bool) -> None:
    """Prints a table; or its rows as JSON, by the names in its head."""
    print(json.dumps(rows_as_dicts(rows, align), indent=1) if as_json else text_table(rows, align))


def rows_as_dicts(rows: Sequence[Sequence[str]], align: str) -> list[dict[str, Any]]:
    """The rows of a table as dicts by its head: cells of columns aligned by > are numbers; "-" and "" are None.

    Example:
        >>> rows_as_dicts([("name", "bytes"), ("7", "1,024"), ("b", "-")], "<>")
        [{'name': '7', 'bytes': 1024}, {'name': 'b', 'bytes': None}]
    """
    return [dict(zip(rows[0], map(_json_cell, row, align), strict=True)) for row in rows[1:]]


def _json_cell(text: str, alignment: str) -> Any:
    digits = text.replace(",", "")
    if alignment == ">" and re.fullmatch(r"-?\d+", digits):
        return int(digits)
    if alignment == ">" and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", digits):
        return float(digits)
    return None if text in ("", "-") else text


def bold(text: str, stream: Any) -> str:
    """The text in bold if the stream is a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if stream is not None and stream.isatty() else text


def text_table(rows: Sequence[Sequence[str]], align: str, rule: bool = True) -> str:
    """A table with columns aligned by `align`, one of < and > for each, and a line under the first row.

    Cells may hold names from files, so they are made printable.
    """
    lines = table_lines([[printable(cell) for cell in row] for row in rows], align)
    return "\n".join([bold(lines[0], sys.stdout), "-" * max(map(len, lines)), *lines[1:]] if rule else lines)


def printable(text: str) -> str:
    """The text with unprintable characters escaped, because a terminal would interpret control characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def print_note(line: str) -> None:
    """Prints a line of printable text on standard error, unless that is closed: then it would go to standard output."""
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


class PercentProgress:
    """Shows progress in percent on standard error.

    Args:
        stage: name of the work.
    """

    def __init__(self, stage: str) -> None:
        self._stage, self._percent = stage, 0
        self._bar = ProgressBar(sys.stderr) if sys.stderr is not None else None  # None: the shell has closed it

    def __call__(self, name: str, count: int, total: int) -> None:
        percent_done = 100 * count // total if total else 100
        for percent in range(self._percent + 1, percent_done + 1):
            if self._bar is not None:
                self._bar(self._stage, percent, 100, printable(name))
        self._percent = max(percent_done, self._percent)


def terminal_progress_bar() -> ProgressBar | None:
    """Progress on standard error, if that is a terminal."""
    return ProgressBar(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None


def short_decimal(value: float | Fraction | None) -> str:
    """At most four significant digits if the exact decimal is long."""
    if value is None:
        return "-"
    if isinstance(value, Fraction):
        return str(Dyadic(value))
    exact = shortest_decimal(value)
    return exact if len(exact) <= 8 else f"{value:.4g}"


def shortest_decimal(value: Any) -> str:
    """The shortest decimal that converts to the same number of its type."""
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text.removesuffix(".0")


def integer_digits(value: float | Fraction) -> str:
    """All digits of an integer of at most 64 bits; nothing for another value."""
    return str(int(value)) if abs(value) < 2**64 and value % 1 == 0 else ""


def fact_text(value: float | Fraction | None) -> str:
    if value is None:
        return "none"
    exact = integer_digits(value) or ("" if isinstance(value, Fraction) else shortest_decimal(value))
    if exact and value % 1 == 0 and (abs(value) < 1e6 or value % 2 == 1):
        return exact
    return f"{exact}  = {Dyadic(value)}" if exact else str(Dyadic(value))


def json_value(value: Any) -> Any:
    """A value in the types of strict JSON; a text for NaN, infinities and fractions that are not exact in float64."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else str(Dyadic(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def yes_or_no(fact: bool) -> str:
    return "yes" if fact else "no"


def binary_code(fmt: ElementFormat, code: int) -> str:
    """The bits of a code, with spaces between fields."""
    digits = f"{code:0{fmt.bits}b}"
    if not isinstance(fmt, FloatFormat):
        return digits
    exponent = fmt.signed + fmt.exp_bits
    return " ".join(filter(None, (digits[: fmt.signed], digits[fmt.signed : exponent], digits[exponent:])))


def hexadecimal_code(fmt: ElementFormat, code: int) -> str:
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


def parse_seed(text: str) -> int:
    """The seed of an option: an argument of `jax.random.key`, for every value of jax_enable_x64."""
    text = text.strip()  # a negative number comes with a space
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not -(2**63) <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from -2^63 to 2^63 - 1")
    return int(text)


def key_of_seed_option(seed: int | None, specs: Iterable[Any]) -> Any:
    """The key of ``--seed``, or None without one.

    Raises:
        ValueError: without a seed, for a `Spec` that rounds stochastically.
    """
    if seed is not None:
        import jax

        return jax.random.key(seed)
    for spec in specs:
        if spec.rounding.stochastic:
            raise ValueError(f"{spec} rounds stochastically and needs --seed N; the same seed gives the same result")
    return None


def check_suffix(option: str, path: Path, suffix: str) -> None:
    """Refuses, before any work, a file that cannot be written or has another suffix."""
    check(path.suffix.lower() == suffix, f"{option} {path} must end in {suffix}")
    check(path.absolute().parent.is_dir(), f"{option} {path}: there is no folder {path.parent}")


def check_new_file(option: str, path: Path, force: bool) -> None:
    """Refuses, before any work, to replace a file without ``--force``."""
    check(not path.exists() or force, f"{option} {path} exists; --force replaces it")


def check_folder(option: str, path: Path) -> None:
    """Refuses, before any work, a folder that cannot be created or written to."""
    ancestor = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not (ancestor.is_dir() and os.access(ancestor, os.W_OK)):
        raise ValueError(f"{option} {path}: {ancestor} is not a folder that can be written to")
