"""Posits, linear takums and HiF8: every code against tables made from the definitions, and published values."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import oracle
import pytest
from each_case import each

import jchop as jc
from jchop.formats import StringFormat, parse_format

FORMATS = {"posit": jc.formats.PositFormat, "takum": jc.formats.TakumFormat}
SMALL = [("posit", 2), ("posit", 3), ("posit", 4), ("posit", 5), ("posit", 8), ("takum", 6), ("takum", 8)]
LARGE = [("posit", 11), ("posit", 16), ("takum", 11), ("takum", 12), ("takum", 16)]


def check_codes(kind: str, n: int) -> None:
    """Every code has the value of the formula with a sign, in the order of two's complement, and returns."""
    fmt = FORMATS[kind](n)
    nar = 1 << n - 1
    table = [math.nan if code == nar else oracle.string_value(kind, n, code) for code in range(1 << n)]
    decoded = fmt.decode(range(1 << n))
    assert math.isnan(decoded[nar]) and fmt.value_of(0) == 0.0, fmt
    assert all(Fraction(got) == wanted for got, wanted in zip(decoded, table, strict=True) if wanted == wanted), fmt
    ordered = [*decoded[nar + 1 :], *decoded[:nar]]
    assert all(low < high for low, high in itertools.pairwise(ordered)), fmt
    np.testing.assert_array_equal(fmt.values(), ordered, str(fmt))
    assert fmt.encode(decoded).tolist() == list(range(1 << n)), fmt


@pytest.mark.parametrize("sizes", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["to 8 bits", "wider"])
def test_every_code(sizes: list[tuple[str, int]]) -> None:
    for kind, n in sizes:
        check_codes(kind, n)


@each("n", [2, 8, 16, 32])
def test_the_ends_of_posits(n: int) -> None:
    """Standard for Posit Arithmetic, 2022, 3.2: maxPos is 2^(4n - 8) and minPos its reciprocal."""
    fmt = jc.formats.PositFormat(n)
    assert (fmt.max, fmt.min, fmt.smallest) == (2.0 ** (4 * n - 8), -(2.0 ** (4 * n - 8)), 2.0 ** (8 - 4 * n))


def test_facts() -> None:
    fmt = jc.formats.PositFormat(16)
    assert (fmt.bits, fmt.precision, fmt.eps, fmt.emax, fmt.signed) == (16, None, None, 56, True)
    assert (fmt.has_nan, fmt.has_inf, fmt.has_negative_zero, fmt.saturates) == (True, False, False, False)
    assert (fmt.fraction_bits(0), fmt.fraction_bits(55), fmt.last_place) == (11, 0, -56)
    assert [jc.formats.TakumFormat(16).fraction_bits(e) for e in (0, 1, -1, -2, 254, -255)] == [11, 10, 11, 10, 4, 4]


#: Codes of constants: posit32 of pi as printed by programs for a RISC-V posit unit; takums from libtakum's takum.h.
PUBLISHED = [
    ("posit32", math.pi, 0x4C90FDAA),
    ("posit32", 100.0, 0x6A400000),
    ("posit8", 1.0, 0x40),
    ("takum_linear8", math.pi, 74),
    ("takum_linear16", math.pi, 19016),
    ("takum_linear32", math.pi, 1246265045),
    ("takum_linear8", math.pi / 2, 69),
    ("takum_linear16", math.pi / 2, 17553),
    ("takum_linear32", math.pi / 2, 1150352810),
    ("takum_linear8", math.pi / 3, 64),
    ("takum_linear16", math.pi / 3, 16481),
    ("takum_linear32", math.pi / 3, 1080076572),
    ("takum_linear16", (1 + 5**0.5) / 2, 17650),
]


@pytest.mark.parametrize(("text", "value", "code"), PUBLISHED)
def test_published_codes(text: str, value: float, code: int) -> None:
    fmt = parse_format(text)
    assert isinstance(fmt, StringFormat)
    assert fmt.code_of(float(jc.round_to_format(value, text))) == code
    assert fmt.code_of(float(jc.round_to_format(-value, text))) == (1 << fmt.bits) - code


def test_values_that_are_not_in_the_format() -> None:
    fmt = jc.formats.PositFormat(8)
    assert [fmt.code_of(value) for value in (1.01, 2.0**25, 2.0**-25, math.inf, 0.0, math.nan)] == [
        None, None, None, None, 0, 128,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"values\[1\]=1.01 is not a value of posit8"):
        fmt.encode([1.0, 1.01])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="bits=33 must be an integer from 2 to 32"):
        jc.formats.PositFormat(33)
    with pytest.raises(ValueError, match="element=posit8 has its most bits next to 1"):
        jc.formats.ScaledFormat("posit8", group=16)
    with pytest.raises(ValueError, match="overflow='wrap' is for fixed point"):
        jc.Spec("posit8", overflow="wrap")
    with pytest.raises(ValueError, match="flush=True needs"):
        jc.Spec("posit8", flush=True)
    with pytest.raises(ValueError, match=r"float32, which cannot hold every result .*cast x to float64 first"):
        jc.round_to_format(np.float32(1), "takum_linear8")
    with pytest.raises(ValueError, match="float16, which cannot hold"):
        jc.round_to_format(np.float16(1), "posit8")


def test_every_code_of_hif8() -> None:
    """Against the fields of the code, and the list of magnitudes that the oracle of rounding has."""
    fmt = jc.formats.HiFloat8Format()
    decoded = fmt.decode(range(256))
    for code, value in enumerate(decoded):
        wanted = oracle.hif8_value(code)
        if isinstance(wanted, oracle.Special):
            assert str(value) == wanted.value, code
        else:
            assert Fraction(value) == wanted, code
    assert fmt.encode(decoded).tolist() == list(range(256))
    magnitudes = [oracle.HiFloat8Set().value(i) for i in range(oracle.HiFloat8Set().top(False) + 1)]
    assert [Fraction(v) for v in fmt.values()[126:]] == magnitudes
    assert (fmt.max, fmt.min, fmt.smallest, fmt.emax, fmt.last_place) == (2.0**15, -(2.0**15), 2.0**-22, 15, -22)
    assert [fmt.fraction_bits(e) for e in (0, 3, -3, 4, -7, 8, -15, -16)] == [3, 3, 3, 2, 2, 1, 1, 0]
    assert (fmt.has_inf, fmt.has_nan, fmt.has_negative_zero, fmt.saturates) == (True, True, False, False)
    assert jc.Spec("hifloat8").format == fmt == jc.Spec(str(fmt)).format and jc.finfo("hif8").max == 2.0**15


def test_what_hif8_refuses() -> None:
    with pytest.raises(ValueError, match="element=hif8 has its most bits next to 1"):
        jc.formats.ScaledFormat("hif8", group=16)
    with pytest.raises(ValueError, match="float16, which cannot hold"):
        jc.round_to_format(np.float16(1), "hif8")
