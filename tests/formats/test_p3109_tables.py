"""All 504 formats of IEEE P3109 with 3 to 16 bits: every code against the definition of interim report 4.0.

The values come from the definition. The working group also publishes tables of them (github.com/P3109/Public, "Value
Tables/Hexadecimal", commit 681130c, 28 June 2026). It asks that they not be used for conformance, and they are not kept
here: `p3109_tables.sha256` holds a digest of the text of each, and agreement with them is a cross-check.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("most", [8, pytest.param(11, marks=pytest.mark.slow)])
def test_every_code_has_the_value_of_the_definition(most: int) -> None:
    """And returns from it; wider formats are compared with the published tables, below."""
    for row in (row for bits in range(9 if most > 8 else 3, most + 1) for row in tables(bits)):
        codes, fmt = range(1 << row[0]), jc.formats.p3109(*row)
        decoded = fmt.decode(codes)
        assert all(map(same, decoded.tolist(), defined(*row))), row
        assert fmt.encode(decoded).tolist() == list(codes), row


# -- the published tables ----------------------------------------------------------------------------------------------

_DIGITS = 6  # hexadecimal digits of a significand; 16 bits and a leading zero digit need five


def hexadecimal(value: Fraction | float, emin: int) -> str:
    """A value as the tables write it.

    A number of exponent emin or more has the leading digit 1. A subnormal number has the leading digit 0, then a digit
    that is not 0, and an exponent that is a multiple of 4.
    """
    if not isinstance(value, Fraction) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "0x0p+0"
    numerator, denominator = abs(value).as_integer_ratio()
    down = denominator.bit_length() - 1
    exponent = numerator.bit_length() - 1 - down
    place = exponent if exponent >= emin else (exponent // 4 + 1) * 4
    shift = 4 * _DIGITS - place - down
    digits = numerator << shift if shift >= 0 else numerator >> -shift
    lead, trailing = divmod(digits, 1 << 4 * _DIGITS)
    fraction = f"{trailing:0{_DIGITS}x}".rstrip("0")
    return f"{'-' * (value < 0)}0x{lead}{'.' * bool(fraction)}{fraction}p{place:+d}"


def table(row: tuple[int, int, bool, bool], values: Iterable[Fraction | float]) -> str:
    """The text of a published table: code, value, and a star for a subnormal number."""
    bits, precision, signed, _ = row
    emin, width = 1 - (1 << bits - precision - signed), 2 if bits <= 8 else 4
    lines = ["codepoint,value,subnormal"]
    for code, value in enumerate(values):
        text = hexadecimal(value, emin)
        lines.append(f"0x{code:0{width}x},{text},{'*' if 'x0.' in text else ' '}")
    return "\n".join(lines) + "\n"


def file_name(row: tuple[int, int, bool, bool]) -> str:
    bits, precision, signed, extended = row
    return f"Binary{bits}p{precision}{'us'[signed]}{'fe'[extended]}.csv"


def digest(row: tuple[int, int, bool, bool], values: Iterable[Fraction | float]) -> str:
    return hashlib.sha256(table(row, values).encode()).hexdigest()


def published() -> dict[str, str]:
    """The digest of each table by the name of its file, as `sha256sum` writes them."""
    lines = Path(__file__).with_name("p3109_tables.sha256").read_text().splitlines()
    return {name: found for found, name in map(str.split, lines)}


def test_a_table_is_written_as_the_working_group_writes_it() -> None:
    """A signed format with subnormal numbers on both sides of an exponent of -4, and both infinities."""
    values = ["0p+0", "0.8p-4", "0.1p+0", "0.18p+0", "1p-3", "1.4p-3", "1.8p-3", "1.cp-3"]
    lines = table((6, 3, True, True), defined(6, 3, True, True)).splitlines()
    assert [line.split(",")[1] for line in lines[1:9]] == ["0x" + value for value in values]
    assert lines[0x1F + 1] == "0x1f,Inf, " and lines[0x20 + 1] == "0x20,NaN, " and lines[0x21 + 1] == "0x21,-0x0.8p-4,*"


def test_every_table_has_a_digest() -> None:
    assert set(published()) == {file_name(row) for bits in range(3, 17) for row in tables(bits)}


@pytest.mark.parametrize("widths", [range(3, 9), *(pytest.param([k], marks=pytest.mark.slow) for k in range(9, 17))])
def test_agrees_with_the_published_value_tables(widths: Iterable[int]) -> None:
    """The values that jchop decodes, written as the working group writes them; above 12 bits a quarter of them."""
    wanted = published()
    for row in (row for bits in widths for row in tables(bits) if bits <= 12 or row[1] % 4 == bits % 4):
        decoded = jc.formats.p3109(*row).decode(range(1 << row[0])).tolist()
        assert digest(row, decoded) == wanted[file_name(row)], row


# -- operations: the rows of the table in docs/formats.md that are rounded once ----------------------------------------

FORMAT, SCALE, BLOCK = "binary8p4se", "binary8p1uf", 8
BLOCKS = f"{FORMAT}(group={BLOCK},scale={SCALE},rule=max_abs)"


def projected(x: Fraction) -> float:
    """The nearest value of the format, ties to the even code, infinite from half a step beyond the largest on."""
    values = [v for v in defined(8, 4, True, True) if isinstance(v, Fraction) and v >= 0]
    step = values[-1] - values[-2]
    beyond = [*values, values[-1] + step]
    code = min(range(len(beyond)), key=lambda k: (abs(beyond[k] - abs(x)), k % 2))
    return math.copysign(math.inf if code == len(values) else float(values[code]), x)


def blocks(rng: np.random.Generator, count: int) -> tuple[jc.QArray, list[list[Fraction]], np.ndarray]:
    """Packed blocks, their numbers s e by the definition of the codes, and what dequantize gives of them."""
    packed = jc.quantize(rng.standard_normal((count, BLOCK)) * 2.0 ** rng.integers(-3, 3, (count, BLOCK)), BLOCKS)
    elements, scales = (list(defined(8, *fields)) for fields in ((4, True, True), (1, False, False)))
    numbers = [
        [Fraction(scales[int(s)]) * Fraction(elements[int(code)]) for code in row]
        for row, (s,) in zip(np.asarray(packed.qvalue), np.asarray(packed.scale), strict=True)
    ]
    return packed, numbers, np.asarray(jc.dequantize(packed))


@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_operations_of_blocks_are_exact_in_float64_and_rounded_once(count: int) -> None:
    rng = np.random.default_rng(0)
    (_, x, x64), (_, y, y64), (_, z, z64) = (blocks(rng, count) for _ in range(3))
    assert x64.dtype == np.float64 and [[Fraction(v) for v in row] for row in x64.tolist()] == x
    sums = [sum(row) for row in x]
    dots = [sum(a * b for a, b in zip(*rows, strict=True)) for rows in zip(x, y, strict=True)]
    for got, wanted in ((x64.sum(-1), sums), ((x64 * y64).sum(-1), dots)):  # BlockReduceAdd, BlockDotProduct
        assert np.asarray(jc.round_to_format(got, FORMAT)).tolist() == [projected(Fraction(v)) for v in wanted]
    scale = np.full((count, 1), 2.0)  # BlockAdd, BlockMultiply, BlockFMA, BlockFAA to given scales
    for got, combine in (
        (x64 + y64, lambda a, b, c: a + b),
        (x64 * y64, lambda a, b, c: a * b),
        (x64 * y64 + z64, lambda a, b, c: a * b + c),
        (x64 + y64 + z64, lambda a, b, c: a + b + c),
    ):
        stored = jc.quantize(got, BLOCKS, scale=np.asarray(jc.Spec(SCALE).format.encode(scale)))
        wanted = [
            [2 * projected(combine(*v) / 2) for v in zip(*rows, strict=True)] for rows in zip(x, y, z, strict=True)
        ]
        assert np.asarray(jc.dequantize(stored)).tolist() == wanted


def test_faa_rounds_once() -> None:
    values = np.array([float(v) for v in defined(8, 4, True, True) if isinstance(v, Fraction)])
    x, y, z = np.random.default_rng(1).choice(values, (3, 200))
    wanted = [projected(Fraction(a) + Fraction(b) + Fraction(c)) for a, b, c in zip(x, y, z, strict=True)]
    assert np.asarray(jc.round_to_format(x + y + z, FORMAT)).tolist() == wanted
