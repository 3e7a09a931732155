"""Logarithmic takums: powers of the square root of e, as their nearest binary64 numbers."""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import numpy as np

from jchop._common.checks import check_int
from jchop.formats._tapered import StringFormat, takum_fields

#: Decimal digits of powers, and the bits of their fixed-point form: of powers of integers, and from 1 to e^(1/2).
_DECIMAL_DIGITS, POWER_BITS, _FRACTION_POWER_BITS = 120, 512, 256
#: The widest strings whose values are in tables.
LOG_TAKUM_TABLE_BITS = 16
#: Powers are known to this many bits, which decide every comparison with a binary64 number.
_POWER_ACCURACY_BITS = 200


@dataclass(frozen=True, repr=False)
class LogTakumFormat(StringFormat):
    """A logarithmic takum (L. Hunhold, arXiv 2404.18603): plus or minus e^(l/2).

    The string is that of `TakumFormat`, and l = c + f of its exponent c and its fraction f. A number is rounded on the
    infinite string of its l, which is cut to n bits: between two values lies the value of the string of one bit more.
    No binary number but 1 is a value, and none lies on such a point, so that there are no ties. The modes to nearest
    are one.

    The values are irrational, so a code stands for the binary64 number that is nearest to its value, and the carrier is
    float64: a relative error of at most 2^-53, while neighbours of 32 bits differ by 2^-28 next to 1, where they are
    nearest. Numbers are compared with the points between values exactly: by tables up to 16 bits, else by powers of 128
    bits. Results of operations, which would be rounded twice, and stochastic modes, which need the bits of a logarithm,
    are refused.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_int("bits", self.bits, 6, 32))

    def magnitude_of(self, code: int) -> Fraction:
        """The binary64 number of a positive code, 1 to 2^(n-1) - 1."""
        if self.bits > LOG_TAKUM_TABLE_BITS:
            return Fraction(_power_to_float64(*_log_takum_power(self.bits, code)))
        return Fraction(float(log_takum_levels(self.bits)[code - 1]))

    def fraction_bits(self, exponent: int) -> int:
        """52: fraction bits of the binary64 numbers that stand for the values."""
        return 52

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``takum16``."""
        return f"takum{self.bits}"


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
    """floor(e^(l/2) 2^UNIT), or one less."""
    return _fixed_point_power(l, POWER_BITS)


def _log_takum_power(bits: int, code: int) -> tuple[int, int]:
    """e^(l/2) of a positive code as an integer and its unit, 2^-unit."""
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
