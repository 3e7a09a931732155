"""Tapered formats: posits, linear takums and HiF8, whose exponents take more bits the farther a number is from 1."""

from __future__ import annotations

import abc
import bisect
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

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

    @property
    def has_nan(self) -> bool:
        """Whether F has a NaN code."""
        return True

    @property
    def saturates(self) -> bool:
        """False: F has a result for overflow, or for an infinity."""
        return False

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
    numbers, in their order; a negative number has the two's complement of the code of its magnitude. There is no -0
    and no infinity.

    A number is rounded on its infinite string, which is cut to n bits. The modes compare the bits that are cut off,
    so far from 1 the point between two neighbours is not their arithmetic mean. No number but 0 becomes 0: magnitudes
    below the smallest value become that value, finite ones beyond the largest become the largest, in every mode.
    """

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

    @property
    def saturates(self) -> bool:
        """False: an infinity becomes NaR, unless the rule is "saturate". Finite numbers saturate under every rule."""
        return False

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

    After the sign a code has the regime, a run of k + 1 ones and a zero, or of -k zeros and a one; two exponent bits e;
    and the fraction f. Bits beyond the end of the string are 0. The value is (1 + f) 2^(4 k + e).

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_int("bits", self.bits, 2, 32))

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

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``posit16``."""
        return f"posit{self.bits}"


@dataclass(frozen=True, repr=False)
class TakumFormat(StringFormat):
    """A linear takum (L. Hunhold, arXiv 2404.18603 and 2412.20273; libtakum).

    After the sign a code has a bit D, three bits R, r bits C with r = R if D is 1 and 7 - R if it is 0, and the
    fraction f. Bits beyond the end of the string are 0. The exponent is c = 2^r - 1 + C if D is 1, and
    C + 1 - 2^(r+1) if it is 0; the value is (1 + f) 2^c. From 12 bits on every width has the range 2^-255 to 2^255, so
    the carrier is float64.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_int("bits", self.bits, 6, 32))

    def magnitude_of(self, code: int) -> Fraction:
        """The value of a positive code, 1 to 2^(n-1) - 1."""
        exponent, fraction = takum_fields(f"{code:0{self.bits - 1}b}")
        return (1 + fraction) * Fraction(2) ** exponent

    def fraction_bits(self, exponent: int) -> int:
        """Fraction bits of the values from 2^exponent to 2^(exponent + 1); 0 if the string ends before them."""
        width = (exponent + 1 if exponent >= 0 else -exponent).bit_length() - 1
        return max(self.bits - 5 - width, 0)

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``takum_linear16``."""
        return f"takum_linear{self.bits}"


@dataclass(frozen=True, repr=False)
class HiFloat8Format(TaperedFormat):
    """HiF8 (Luo et al., arXiv 2409.16626): eight bits with three, two or one fraction bits.

    After the sign a code has a prefix, the dot: 11, 10, 01, 001 or 0001 for an exponent of D = 4, 3, 2, 1 or 0 bits.
    The exponent is a sign and a magnitude, whose leading 1 is not written; the rest is the fraction. So exponents up to
    3 either way have three fraction bits, up to 7 two, and up to 15 one. After the dot 0000, three bits M > 0 are the
    number 2^(M - 23). The code 0x80 is NaN, and the largest magnitude of each sign, 0x6F and 0xEF, is an infinity.
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
        if size == _HIF8_INFINITY:
            magnitude = float("inf")
        elif size < 8:
            magnitude = 2.0 ** (size - 23)
        else:
            width = sum(size >= start for start in _HIF8_STARTS)
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


_HIF8_INFINITY = 0x6F
#: The first codes with an exponent of one, two, three and four bits.
_HIF8_STARTS = (16, 32, 64, 96)


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
