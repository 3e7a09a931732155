"""Tapered formats: posits, takums and HiF8, whose exponents take more bits the farther a number is from 1."""

from __future__ import annotations

import abc
import bisect
import decimal
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from jchop._common.checks import check_int
from jchop.formats._base import ElementFormat, Number, exact_number, floor_log2


class TaperedFormat(ElementFormat):
    """Formats whose values have fewer fraction bits the farther their exponent is from 0."""

    bits: int
    signed: bool = True
    #: The parts of a code, the highest bit first.
    parts: ClassVar[str]

    @abc.abstractmethod
    def fraction_bits(self, exponent: int) -> int:
        """Fraction bits of the values from 2^exponent to 2^(exponent + 1); 0 if there is no value between them."""

    @property
    def min(self) -> Number:
        """Smallest (most negative) finite value."""
        return -self.max

    has_nan, saturates = True, False

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return floor_log2(Fraction(self.max))

    @cached_property
    def most_fraction_bits(self) -> int:
        """Fraction bits of the values next to 1, the most of all."""
        return max(self.fraction_bits(0), self.fraction_bits(-1))

    @cached_property
    def last_place(self) -> int:
        """The exponent of the largest power of two of which every value is a multiple."""
        assert self.smallest is not None
        least = floor_log2(Fraction(self.smallest))
        return min(exponent - self.fraction_bits(exponent) for exponent in range(least, self.emax + 1))


class StringFormat(TaperedFormat):
    """Strings of n bits in the order of their values: the base class of posits and takums.

    The code 0 is zero and 10...0 is NaR, "not a real", which is NaN here. The codes 1 to 2^(n-1) - 1 are the positive
    numbers, in their order. A negative number has the two's complement of its magnitude's code. There is no -0 and no
    infinity: an infinity becomes NaR, unless the rule is "saturate". Finite numbers saturate under every rule.

    A number is rounded on its infinite string, which is cut to n bits. The modes compare the bits that are cut off,
    so far from 1 the point between two neighbours is not their arithmetic mean. No number but 0 becomes 0: magnitudes
    below the smallest value become that value, finite ones beyond the largest become the largest, in every mode.
    """

    #: The beginning of the text, before the width; and the least width.
    stem: ClassVar[str]
    least_bits: ClassVar[int] = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_int("bits", self.bits, self.least_bits, 32))

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``posit16``, ``takum16`` or ``takum_linear16``."""
        return f"{self.stem}{self.bits}"

    @abc.abstractmethod
    def magnitude_of(self, code: int) -> Fraction:
        """The value of a positive code, 1 to 2^(n-1) - 1."""

    @property
    def max_code(self) -> int:
        """Code of the largest value."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def max(self) -> Number:
        """Largest finite value."""
        return exact_number(self.magnitude_of(self.max_code))

    @cached_property
    def smallest(self) -> Number:
        """Smallest positive value."""
        return exact_number(self.magnitude_of(1))

    def value_of(self, code: int) -> Number | None:
        """The exact value of one code; NaN for NaR."""
        if code == 0:
            return 0.0
        if code > self.max_code:
            return (
                float("nan") if code == self.max_code + 1 else exact_number(-self.magnitude_of((1 << self.bits) - code))
            )
        return exact_number(self.magnitude_of(code))

    def code_of(self, value: Number) -> int | None:
        """The code of one exact value; None if it is not in F."""
        if value != value:
            return self.max_code + 1
        if value == 0:
            return 0
        if value in (float("inf"), -float("inf")):
            return None
        codes = range(1, self.max_code + 1)
        code = 1 + bisect.bisect_left(codes, abs(Fraction(value)), key=self.magnitude_of)
        if code > self.max_code or self.magnitude_of(code) != abs(value):
            return None
        return code if value > 0 else (1 << self.bits) - code


@dataclass(frozen=True, repr=False)
class PositFormat(StringFormat):
    """A posit of the Standard for Posit Arithmetic (2022): two exponent bits at every width.

    After the sign a code has the regime: a run of k + 1 ones and a zero, or of -k zeros and a one. Two exponent bits e
    and the fraction f follow. Bits beyond the end of the string are 0. The value is (1 + f) 2^(4 k + e).

    Args:
        bits: width n of a code, 2 to 32.

    Raises:
        TypeError, ValueError: for a width out of range.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.formats.PositFormat(8)
        >>> str(fmt), fmt.max, fmt.smallest, jc.Spec("posit8").format == fmt
        ('posit8', 16777216.0, 5.960464477539063e-08, True)
        >>> jc.round_to_format([1.03, 1e-30, 1e30], "posit8").tolist()
        [1.0, 5.960464477539063e-08, 16777216.0]
    """

    bits: int
    parts: ClassVar[str] = "two's complement: sign, regime, exponent, fraction"
    stem: ClassVar[str] = "posit"
    least_bits: ClassVar[int] = 2

    def magnitude_of(self, code: int) -> Fraction:
        """The value of a positive code, 1 to 2^(n-1) - 1."""
        string = f"{code:0{self.bits - 1}b}"
        run = len(string) - len(string.lstrip(string[0]))
        rest = string[run + 1 :]
        exponent, fraction = rest[:2].ljust(2, "0"), rest[2:]
        regime = run - 1 if string[0] == "1" else -run
        return (1 + _binary_fraction(fraction)) * Fraction(2) ** (4 * regime + int(exponent, 2))

    def fraction_bits(self, exponent: int) -> int:
        """Fraction bits of the values from 2^exponent to 2^(exponent + 1); 0 if the string ends before them."""
        regime = exponent >> 2
        return max(self.bits - 3 - (regime + 2 if regime >= 0 else 1 - regime), 0)


@dataclass(frozen=True, repr=False)
class TakumFormat(StringFormat):
    """A linear takum (L. Hunhold, arXiv 2404.18603 and 2412.20273; libtakum).

    After the sign a code has a bit D, three bits R, r bits C, and the fraction f. Here r is R if D is 1, else
    7 - R. Bits beyond the end are 0. The exponent is c = 2^r - 1 + C if D is 1, and C + 1 - 2^(r+1) if it is
    0; the value is (1 + f) 2^c. From 12 bits on every width has the range 2^-255 to 2^255, so the carrier is float64.

    Args:
        bits: width n of a code, 6 to 32; shorter strings cut R.

    Raises:
        TypeError, ValueError: for a width out of range.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.formats.TakumFormat(16)
        >>> str(fmt), fmt.fraction_bits(0), fmt.max == (2 - 2.0**-4) * 2.0**254
        ('takum_linear16', 11, True)
    """

    bits: int
    parts: ClassVar[str] = "two's complement: sign, direction, regime, characteristic, mantissa"
    stem: ClassVar[str] = "takum_linear"

    def magnitude_of(self, code: int) -> Fraction:
        """The value of a positive code, 1 to 2^(n-1) - 1."""
        exponent, fraction = takum_fields(f"{code:0{self.bits - 1}b}")
        return (1 + fraction) * Fraction(2) ** exponent

    def fraction_bits(self, exponent: int) -> int:
        """Fraction bits of the values from 2^exponent to 2^(exponent + 1); 0 if the string ends before them."""
        width = (exponent + 1 if exponent >= 0 else -exponent).bit_length() - 1
        return max(self.bits - 5 - width, 0)


@dataclass(frozen=True, repr=False)
class HiFloat8Format(TaperedFormat):
    """HiF8 (Luo et al., arXiv 2409.16626): eight bits with three, two or one fraction bits.

    After the sign a code has a prefix, the dot. It is 11, 10, 01, 001 or 0001 for an exponent of D = 4, 3, 2, 1 or 0
    bits. The exponent is a sign and a magnitude, whose leading 1 is not written; the rest is the fraction. So exponents
    up to 3 either way have three fraction bits, up to 7 two, and up to 15 one. After the dot 0000, three bits M > 0 are
    the number 2^(M - 23). The code 0x80 is NaN, and the largest magnitude of each sign, 0x6F and 0xEF, is an infinity.
    There is no -0. The paper rounds to nearest, ties away from zero: ``"hif8:nearest_away"``.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.formats.HiFloat8Format()
        >>> str(fmt), fmt.max, fmt.smallest == 2.0**-22, hex(fmt.encode(-1.125))
        ('hif8', 32768.0, True, '0x89')
        >>> jc.round_to_format([1.0625, 18.0, 40960.0], "hif8:nearest_away").tolist()
        [1.125, 20.0, inf]
    """

    bits: ClassVar[int] = 8  # pyright: ignore[reportIncompatibleVariableOverride]
    parts: ClassVar[str] = "sign, dot, exponent, fraction"
    #: Exponents k and -k from which on values have one fraction bit less than before; next to 1 they have three.
    narrows: ClassVar[tuple[int, ...]] = (4, 8, 16)
    max: ClassVar[Number] = 2.0**15  # pyright: ignore[reportIncompatibleMethodOverride]
    smallest: ClassVar[Number] = 2.0**-22  # pyright: ignore[reportIncompatibleMethodOverride]
    has_inf: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    def fraction_bits(self, exponent: int) -> int:
        """Fraction bits of the values from 2^exponent to 2^(exponent + 1); 0 if there is no value between them."""
        return 3 - sum(abs(exponent) >= k for k in self.narrows)

    def value_of(self, code: int) -> Number | None:
        """The exact value of one code."""
        size = code & 0x7F
        if size == 0:
            return float("nan") if code else 0.0
        if size == HIF8_INFINITY:
            magnitude = float("inf")
        elif size < 8:
            magnitude = 2.0 ** (size - 23)
        else:
            width = sum(size >= start for start in HIF8_STARTS)
            fraction = self.fraction_bits(1 << (width - 1) if width else 0)
            field, rest = size >> fraction & (1 << width) - 1, size & (1 << fraction) - 1
            half = 1 << width >> 1  # the place of the exponent's sign, and of its leading 1
            exponent = -field if field & half else field + half
            magnitude = (1 + rest / (1 << fraction)) * 2.0**exponent
        return -magnitude if code > 0x7F else magnitude

    def code_of(self, value: Number) -> int | None:
        """The code of one exact value; None if it is not in F."""
        return _hif8_codes().get(value) if value == value else 0x80

    @property
    def text(self) -> str:
        """The format in the text grammar, ``hif8``."""
        return "hif8"


#: The code of infinity, and the first codes with an exponent of one, two, three and four bits.
HIF8_INFINITY, HIF8_STARTS = 0x6F, (16, 32, 64, 96)


@lru_cache(maxsize=1)
def _hif8_codes() -> dict[Number | None, int]:
    return {HiFloat8Format().value_of(code): code for code in range(256) if code != 0x80}


def takum_fields(string: str) -> tuple[int, Fraction]:
    """The exponent and the fraction of a positive takum's string, without the sign."""
    above, field, rest = string[0] == "1", int(string[1:4], 2), string[4:]
    width = field if above else 7 - field
    count = int("0" + rest[:width].ljust(width, "0"), 2)
    exponent = (1 << width) - 1 + count if above else count + 1 - (2 << width)
    return exponent, _binary_fraction(rest[width:])


def _binary_fraction(digits: str) -> Fraction:
    return Fraction(int("0" + digits, 2), 1 << len(digits))


# == logarithmic takums ================================================================================================


#: Decimal digits of powers, and the bits of their fixed-point form: of powers of integers, and from 1 to e^(1/2).
_DECIMAL_DIGITS, POWER_BITS, _FRACTION_POWER_BITS = 120, 512, 256
#: The widest strings whose values are in tables.
LOG_TAKUM_TABLE_BITS = 16
#: Powers are known to this many bits, which decide every comparison with a binary64 number.
_POWER_ACCURACY_BITS = 200


@dataclass(frozen=True, repr=False)
class LogTakumFormat(StringFormat):
    """A logarithmic takum (L. Hunhold, arXiv 2404.18603): plus or minus e^(l/2).

    The string is the one of `TakumFormat`, and l = c + f of its exponent c and its fraction f. A number is rounded on
    the infinite string of its l, which is cut to n bits. The boundary between two values is the value of the string
    of one bit more. No binary number but 1 is a value, and none is equal to a boundary, so there are no ties. The modes
    to nearest are one.

    The values are irrational, so a code stands for the nearest binary64 number, and the carrier is float64. The
    relative error is at most 2^-53. Neighbours of 32 bits differ by 2^-28 next to 1, where they are nearest. Numbers
    are compared with the points between values exactly: by tables up to 16 bits, else by powers of 128 bits. Results of
    operations, which would be rounded twice, and stochastic modes, which need the bits of a logarithm, are refused.

    Args:
        bits: width n of a code, 6 to 32; shorter strings cut R.

    Raises:
        TypeError, ValueError: for a width out of range.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.formats.LogTakumFormat(8)
        >>> str(fmt), round(float(fmt.decode(73)), 6), jc.Spec("takum8").format == fmt
        ('takum8', 1.868246, True)
        >>> jc.round_to_format([4.0, -1.0, 0.0], "takum8").tolist()
        [3.955076722920577, -1.0, 0.0]
    """

    bits: int
    parts: ClassVar[str] = "two's complement: sign, direction, regime, characteristic, mantissa of a logarithm"
    stem: ClassVar[str] = "takum"

    def magnitude_of(self, code: int) -> Fraction:
        """The binary64 number of a positive code, 1 to 2^(n-1) - 1."""
        if self.bits > LOG_TAKUM_TABLE_BITS:
            return Fraction(_power_to_float64(*_log_takum_power(self.bits, code)))
        return Fraction(float(log_takum_levels(self.bits)[code - 1]))

    def fraction_bits(self, exponent: int) -> int:
        """52: fraction bits of the binary64 numbers that stand for the values."""
        return 52


@lru_cache(maxsize=16)
def log_takum_levels(bits: int) -> np.ndarray:
    """The binary64 numbers nearest to the values of the codes 1, 2, ... of a width, ascending."""
    levels = np.array([_power_to_float64(*_log_takum_power(bits, code)) for code in range(1, 1 << (bits - 1))])
    levels.setflags(write=False)
    return levels


@lru_cache(maxsize=16)
def log_takum_thresholds(bits: int) -> np.ndarray:
    """The smallest binary64 numbers above the points between the codes 1 and 2, 2 and 3, ... of a width."""
    firsts = np.array(
        [_float64_above(*_log_takum_power(bits + 1, 2 * code + 1)) for code in range(1, (1 << (bits - 1)) - 1)]
    )
    firsts.setflags(write=False)
    return firsts


def sqrt_e_power(l: Fraction) -> int:  # noqa: E741
    """The power e^(l/2) as an integer, in units of 2^-POWER_BITS: rounded down, or one less."""
    return _fixed_point_power(l, POWER_BITS)


def _log_takum_power(bits: int, code: int) -> tuple[int, int]:
    """The value e^(l/2) of a positive code, as an integer `power` and `unit`: power 2^-unit."""
    whole, part = takum_fields(f"{code:0{bits - 1}b}")
    return _fixed_point_power(Fraction(whole), POWER_BITS) * _fixed_point_power(
        part, _FRACTION_POWER_BITS
    ), POWER_BITS + _FRACTION_POWER_BITS


@lru_cache(maxsize=1 << 14)
def _fixed_point_power(l: Fraction, unit: int) -> int:  # noqa: E741
    """floor(e^(l/2) 2^unit), or one less: `decimal` rounds e^x correctly."""
    with decimal.localcontext(decimal.Context(prec=_DECIMAL_DIGITS + unit // 3)):
        exponent = decimal.Decimal(l.numerator) / (2 * l.denominator)
        return int(exponent.exp() * (1 << unit))


def _power_to_float64(power: int, unit: int) -> float:
    ends = {float(power - (power >> _POWER_ACCURACY_BITS)), float(power + (power >> _POWER_ACCURACY_BITS))}
    assert len(ends) == 1, "a power lies too close to the middle of two binary64 numbers"
    return math.ldexp(float(power), -unit)


def _float64_above(power: int, unit: int) -> float:
    nearest = float(power)
    assert abs(int(nearest) - power) > power >> _POWER_ACCURACY_BITS, "a power lies too close to a binary64 number"
    return math.ldexp(nearest if nearest > power else math.nextafter(nearest, math.inf), -unit)
