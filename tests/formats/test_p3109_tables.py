"""All 504 formats of IEEE P3109 with 3 to 16 bits: every code against the definition of interim report 4.0.

The working group publishes tables of these values (P3109/Public, 28 June 2026); the formats agree with them. The report
asks that the tables not be used for conformance, so the values come from its definition, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest

import jchop as jc


def defined(bits: int, precision: int, signed: bool, extended: bool) -> Iterator[Fraction | float]:
    """The values of the codes 0, 1, ..., 2^K - 1."""
    half = 1 << bits - 1
    bias = 1 << bits - precision - signed
    nan = half if signed else 2 * half - 1
    infinity = (half - 1 if signed else nan - 1) if extended else None
    for code in range(1 << bits):
        magnitude = code - half if signed and code > half else code
        sign = 1 if magnitude == code else -1
        exponent, trailing = divmod(magnitude, 1 << precision - 1)
        if code == nan:
            yield math.nan
        elif magnitude == infinity:
            yield sign * math.inf
        else:
            significand = trailing + (1 << precision - 1 if exponent else 0)
            power = max(exponent, 1) - bias - (precision - 1)
            yield sign * (Fraction(significand << power) if power >= 0 else Fraction(significand, 1 << -power))


def same(got: Fraction | float, wanted: Fraction | float) -> bool:
    if isinstance(wanted, Fraction):
        return (isinstance(got, Fraction) or math.isfinite(got)) and Fraction(got) == wanted
    return got == wanted or (math.isnan(got) and math.isnan(wanted))


def tables(bits: int) -> Iterator[tuple[int, int, bool, bool]]:
    for signed in (True, False):
        for precision in range(1, bits + (not signed)):
            for extended in (True, False):
                yield bits, precision, signed, extended


def test_there_are_504_tables() -> None:
    assert sum(1 for bits in range(3, 17) for _ in tables(bits)) == 504


@pytest.mark.parametrize("bits", [pytest.param(k, marks=pytest.mark.slow if k > 10 else ()) for k in range(3, 17)])
def test_every_code_has_the_value_of_the_definition(bits: int) -> None:
    for row in tables(bits):
        decoded = jc.p3109(*row).decode(range(1 << bits))
        assert all(map(same, decoded.tolist(), defined(*row))), row


@pytest.mark.parametrize("bits", range(3, 8))
def test_codes_return(bits: int) -> None:
    for row in tables(bits):
        fmt = jc.p3109(*row)
        assert fmt.encode(fmt.decode(range(1 << bits))).tolist() == list(range(1 << bits)), row
