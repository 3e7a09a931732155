"""Fixed-point numbers and integers: equally spaced values, two's complement codes."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from fractions import Fraction

from jchop._common.checks import check, check_bool, check_int
from jchop.formats._base import ElementFormat, Number, exact_number


class UniformFormat(ElementFormat):
    """Multiples of a quantum 2^-f from `min_code` to `max_code`: the base class of fixed point and integers."""

    #: Fraction bits f; the quantum is 2^-f.
    frac_bits: int = 0

    @property
    @abc.abstractmethod
    def min_code(self) -> int:
        """Smallest value as a multiple of the quantum."""

    @property
    def max_code(self) -> int:
        """Largest value as a multiple of the quantum."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def quantum(self) -> Fraction:
        """Distance between neighbours, 2^-f."""
        return Fraction(1, 1 << self.frac_bits) if self.frac_bits >= 0 else Fraction(1 << -self.frac_bits)

    @property
    def max(self) -> Number:
        """Largest value."""
        return exact_number(self.max_code * self.quantum)

    @property
    def min(self) -> Number:
        """Smallest (most negative) value."""
        return exact_number(self.min_code * self.quantum)

    @property
    def smallest(self) -> Number:
        """Smallest positive value, the quantum."""
        return exact_number(self.quantum)

    def value_of(self, code: int) -> Number | None:
        """The exact value of one two's complement code; None for an unused code."""
        count = code - (1 << self.bits) if self.signed and code >> (self.bits - 1) else code
        return exact_number(count * self.quantum) if count >= self.min_code else None

    def code_of(self, value: Number) -> int | None:
        """The two's complement code of one exact value; None if it is not in F."""
        if value != value or value in (float("inf"), -float("inf")):
            return None
        count = Fraction(value) / self.quantum
        if count.denominator != 1 or not self.min_code <= count <= self.max_code:
            return None
        return int(count) % (1 << self.bits)


@dataclass(frozen=True, repr=False)
class FixedFormat(UniformFormat):
    """Fixed point Q(i.f): multiples of 2^-f in [-2^(i-1), 2^(i-1) - 2^-f], or [0, 2^i - 2^-f] unsigned.

    QPyTorch's (wl, fl) is ``FixedFormat(wl - fl, fl)``. There is no -0, inf or NaN.

    Args:
        int_bits: integer bits i, including the sign bit.
        frac_bits: fraction bits f. ``int_bits + frac_bits`` must be 1 to 64 (2 to 64 signed).
        signed: whether the range is two's complement; otherwise it begins at 0. Default True.
        symmetric: whether the minimum is excluded, so that the range is symmetric. Default False.

    Raises:
        TypeError, ValueError: for a field out of range.

    Example:
        >>> import jchop as jc
        >>> q = jc.formats.FixedFormat(4, 4)
        >>> q.bits, q.min, q.max
        (8, -8.0, 7.9375)
    """

    int_bits: int
    frac_bits: int
    signed: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "int_bits", check_int("int_bits", self.int_bits, -1000, 1000))
        object.__setattr__(self, "frac_bits", check_int("frac_bits", self.frac_bits, -1000, 1000))
        check_bool("signed", self.signed)
        check_bool("symmetric", self.symmetric)
        check_int("int_bits + frac_bits", self.int_bits + self.frac_bits, 1 + self.signed, 64)
        if self.symmetric and not self.signed:
            raise ValueError("symmetric=True needs signed=True: an unsigned range has no minimum to drop")

    @property
    def bits(self) -> int:
        """Width of a code in bits, i + f."""
        return self.int_bits + self.frac_bits

    @property
    def min_code(self) -> int:
        """Smallest value as a multiple of the quantum."""
        return (int(self.symmetric) - (1 << (self.bits - 1))) if self.signed else 0

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``fixed4.4``, ``ufixed4.4``, ``fixed4.4(symmetric=true)``."""
        stem = f"{'' if self.signed else 'u'}fixed{self.int_bits}.{self.frac_bits}"
        return f"{stem}(symmetric=true)" if self.symmetric else stem


@dataclass(frozen=True, repr=False)
class IntegerFormat(UniformFormat):
    """k-bit integers: [-2^(k-1), 2^(k-1) - 1], or [0, 2^k - 1] unsigned. There is no -0, inf or NaN.

    Args:
        bits: width k, 1 to 64 (2 to 64 signed).
        signed: whether the range is two's complement; otherwise it begins at 0. Default True.
        narrow: whether the minimum is excluded, so that the range is symmetric. Default False.

    Raises:
        TypeError, ValueError: for a field out of range.

    Example:
        >>> import jchop as jc
        >>> jc.formats.IntegerFormat(4).values().tolist()[:3], jc.formats.IntegerFormat(4, narrow=True).min
        ([-8.0, -7.0, -6.0], -7.0)
    """

    bits: int
    signed: bool = True
    narrow: bool = False

    def __post_init__(self) -> None:
        check_bool("signed", self.signed)
        check_bool("narrow", self.narrow)
        object.__setattr__(self, "bits", check_int("bits", self.bits, 1 + self.signed, 64))
        check(not self.narrow or self.signed, "narrow=True needs signed=True: an unsigned range has no minimum to drop")

    @property
    def min_code(self) -> int:
        """Smallest value."""
        return (int(self.narrow) - (1 << (self.bits - 1))) if self.signed else 0

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``integer8``, ``uinteger4``, ``integer8(narrow=true)``."""
        stem = f"{'' if self.signed else 'u'}integer{self.bits}"
        return f"{stem}(narrow=true)" if self.narrow else stem
