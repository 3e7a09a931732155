"""Tables and numbers as text, and files checked before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jchop.formats import ElementFormat, FloatFormat


def table(rows: Sequence[Sequence[str]], align: str, rule: bool = True) -> str:
    """Columns aligned as `align` says, one of < and > for each, with a rule under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]] if rule else lines)


def short(value: float | Fraction | None) -> str:
    """At most four significant digits where the exact decimal is long."""
    if value is None:
        return "-"
    if isinstance(value, Fraction):
        return _power(value)
    exact = shortest(value)
    return exact if len(exact) <= 8 else f"{value:.4g}"


def shortest(value: Any) -> str:
    """The shortest decimal that reads back as the same number of its type."""
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text.removesuffix(".0")


def _power(value: float | Fraction) -> str:
    """The value as c * 2^k with an odd integer c."""
    exact = Fraction(value)
    exponent = _two_exponent(exact.numerator) - _two_exponent(exact.denominator)
    odd = exact / Fraction(2) ** exponent
    sign = "-" if odd < 0 else ""
    return f"{sign}2^{exponent}" if abs(odd) == 1 else f"{odd} * 2^{exponent}"


def _two_exponent(number: int) -> int:
    """How often 2 divides a positive or negative integer."""
    return (number & -number).bit_length() - 1


def fact(value: float | Fraction | None) -> str:
    if value is None:
        return "none"
    if value == 0 or isinstance(value, Fraction):
        return _power(value) if value else "0"
    exact = shortest(value)
    return exact if value % 1 == 0 and abs(value) < 1e6 else f"{exact}  = {_power(value)}"


def yes(fact: bool) -> str:
    return "yes" if fact else "no"


def binary(fmt: ElementFormat, code: int) -> str:
    """A code bit by bit, its fields apart."""
    digits = f"{code:0{fmt.bits}b}"
    if not isinstance(fmt, FloatFormat):
        return digits
    exponent = fmt.signed + fmt.exp_bits
    return " ".join(filter(None, (digits[: fmt.signed], digits[fmt.signed : exponent], digits[exponent:])))


def hexadecimal(fmt: ElementFormat, code: int) -> str:
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


def check_suffix(option: str, path: Path, suffix: str) -> None:
    """Refuses, before any work, a file that could not be written or would not be what its name says."""
    if path.suffix.lower() != suffix:
        raise ValueError(f"{option} {path} must end in {suffix}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def check_folder(option: str, path: Path) -> None:
    """Refuses, before any work, a folder that could not be made or written to."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"{option} {path}: {there} is no folder that can be written to")
