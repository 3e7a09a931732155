"""Binary formats: fixed-point numbers and integers, equally spaced, and floating-point formats of any size."""

from __future__ import annotations

import abc
import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from jchop._common.checks import check, check_bool, check_choice, check_int
from jchop.formats._base import ElementFormat, Number, exact_number, floor_log2


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


# == floating point ====================================================================================================


NAN_CODES = ("ieee", "top", "negative_zero", "none")


@dataclass(frozen=True, repr=False)
class FloatFormat(ElementFormat):
    """A binary floating-point format: sign, biased exponent, fraction.

    Let E be the exponent field and T the fraction field of a code. Its magnitude is ``2^(E - bias) (1 + T 2^-m)`` for E
    > 0. For E = 0 (subnormals and zero) it is ``2^(1 - bias) T 2^-m``.

    Args:
        exp_bits: width e of the exponent field, 1 to 16.
        frac_bits: width m of the fraction field (the precision is m + 1), 0 to 52.
        bias: exponent bias; default ``2^(e-1) - 1``.
        subnormals: whether F has values between 0 and the smallest normal one. Default True.
        infinities: whether F has infinities. With ``nans="ieee"`` they are required (top exponent, fraction 0).
            Otherwise they have the highest magnitude code that is not a NaN (IEEE P3109 extended).
        nans: which codes are NaN. ``"ieee"``: top exponent, fraction not 0. ``"top"``: the all-ones magnitude (OCP
            "fn"). ``"negative_zero"``: the code of -0, so that F has no -0 ("fnuz", signed P3109). ``"none"``: no code.
        signed: whether there is a sign bit; without it F has no negative values. Default True.
        zero: whether F has a zero; without it the exponent field 0 is an ordinary binade (OCP e8m0). Default True.
        max_exponent: exponent of the largest finite value, if lower than the codes allow, as in MATLAB's chop; the
            codes above infinity are then NaN. Only with ``nans="ieee"``. Default None: the largest that the fields
            allow. `emax` is the resulting value.
        p3109: whether F overflows by the rules of IEEE P3109. Without infinities it overflows to its largest value,
            never to NaN. With them it overflows to infinity under `Rounding.ODD` too. Only for formats with one NaN
            code and no -0, as in `jchop.formats.p3109`.

    Raises:
        TypeError, ValueError: for a field out of range or a combination that leaves no finite value.

    Example:
        >>> import jchop as jc
        >>> jc.formats.FloatFormat(5, 10) == jc.formats.binary16, jc.formats.binary16.max
        (True, 65504.0)
    """

    exp_bits: int
    frac_bits: int
    bias: int = field(default=None, kw_only=True)  # type: ignore[assignment]
    subnormals: bool = field(default=True, kw_only=True)
    infinities: bool = field(default=True, kw_only=True)
    nans: str = field(default="ieee", kw_only=True)
    signed: bool = field(default=True, kw_only=True)
    zero: bool = field(default=True, kw_only=True)
    max_exponent: int | None = field(default=None, kw_only=True)
    p3109: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exp_bits", check_int("exp_bits", self.exp_bits, 1, 16))
        object.__setattr__(self, "frac_bits", check_int("frac_bits", self.frac_bits, 0, 52))
        for name in ("subnormals", "infinities", "signed", "zero", "p3109"):
            check_bool(name, getattr(self, name))
        check_choice("nans", self.nans, NAN_CODES)
        bias = (
            self.default_bias(self.exp_bits) if self.bias is None else check_int("bias", self.bias, -(1 << 16), 1 << 16)
        )
        object.__setattr__(self, "bias", bias)
        if self.nans == "ieee" and not self.infinities:
            raise ValueError(
                "infinities=False contradicts nans='ieee' (its top exponent holds inf); use nans='top' or 'none'"
            )
        if self.nans == "negative_zero" and not self.signed:
            raise ValueError("nans='negative_zero' needs signed=True: an unsigned format has no code of -0")
        if self.nans == "negative_zero" and not self.zero:
            raise ValueError("nans='negative_zero' needs zero=True: a format without zero has no code of -0")
        if not self.zero and not self.subnormals:
            raise ValueError(
                "subnormals=False has no effect with zero=False: the exponent field 0 is an ordinary binade"
            )
        if self.max_exponent is not None:
            self._check_max_exponent(self.max_exponent)
        nans = "negative_zero" if self.signed else "top"
        if self.p3109 and self.nans != nans:
            raise ValueError(f"p3109=True needs nans={nans!r} if signed={self.signed}, not nans={self.nans!r}")
        if self.max_code < self._first_code:
            raise ValueError(
                f"exp_bits={self.exp_bits}, frac_bits={self.frac_bits}, nans={self.nans!r} "
                "leave no positive finite value"
            )

    def _check_max_exponent(self, value: int) -> None:
        check(self.nans == "ieee", f"max_exponent={value!r} needs nans='ieee', whose codes above infinity are all NaN")
        most = dataclasses.replace(self, max_exponent=None).emax
        exponent = check_int("max_exponent", value, self.emin, most)
        object.__setattr__(self, "max_exponent", None if exponent == most else exponent)

    @staticmethod
    def default_bias(exp_bits: int) -> int:
        """The bias of IEEE 754 interchange formats, 2^(e-1) - 1."""
        return (1 << (exp_bits - 1)) - 1

    # -- codes of the magnitude ----------------------------------------------------------------------------------------
    @property
    def _magnitude_bits(self) -> int:
        return self.exp_bits + self.frac_bits

    @cached_property
    def max_code(self) -> int:
        """Magnitude code of the largest finite value."""
        top = (1 << self._magnitude_bits) - 1
        if self.max_exponent is not None:
            return ((self.max_exponent + self.bias + 1) << self.frac_bits) - 1
        if self.nans == "ieee":
            return top - (1 << self.frac_bits)
        return top - (self.nans == "top") - self.infinities

    @cached_property
    def inf_code(self) -> int | None:
        """Magnitude code of infinity, just above the largest finite value; None if F has none."""
        return self.max_code + 1 if self.infinities else None

    @property
    def _nan_code(self) -> int | None:
        if self.nans == "ieee":
            # The quiet bit. A format without fraction bits has no NaN code beside inf.
            return self.inf_code + (1 << self.frac_bits >> 1) if self.frac_bits else None  # type: ignore[operator]
        if self.nans == "top":
            return (1 << self._magnitude_bits) - 1
        return 1 << self._magnitude_bits if self.nans == "negative_zero" else None

    @property
    def _first_code(self) -> int:
        """Magnitude code of the smallest positive value."""
        if not self.zero:
            return 0
        return 1 if self.subnormals else 1 << self.frac_bits

    def _magnitude(self, code: int) -> Fraction:
        """The value of a code without its sign bit."""
        exponent, fraction = code >> self.frac_bits, code & ((1 << self.frac_bits) - 1)
        if exponent or not self.zero:
            fraction += 1 << self.frac_bits
        else:
            exponent = 1
        shift = exponent - self.bias - self.frac_bits
        return Fraction(fraction << shift) if shift >= 0 else Fraction(fraction, 1 << -shift)

    # -- properties ----------------------------------------------------------------------------------------------------
    @property
    def bits(self) -> int:
        """Width of a code in bits: sign, exponent and fraction."""
        return self.signed + self.exp_bits + self.frac_bits

    @property
    def precision(self) -> int:
        """Significand bits p = m + 1, including the leading one."""
        return self.frac_bits + 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return (1 if self.zero else 0) - self.bias

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        field_ = self.max_code >> self.frac_bits
        if field_ or not self.zero:
            return field_ - self.bias
        return 1 - self.bias - self.frac_bits + self.max_code.bit_length() - 1

    @cached_property
    def exact_max(self) -> Fraction:
        """Largest finite value, always as a fraction."""
        return self._magnitude(self.max_code)

    @cached_property
    def exact_smallest(self) -> Fraction:
        """Smallest positive value, always as a fraction."""
        return self._magnitude(self._first_code)

    @property
    def max(self) -> Number:
        """Largest finite value."""
        return exact_number(self.exact_max)

    @property
    def min(self) -> Number:
        """Smallest finite value: -max, or for unsigned F 0, or without a zero the smallest value."""
        if self.signed:
            return exact_number(-self.exact_max)
        return 0.0 if self.zero else exact_number(self.exact_smallest)

    @property
    def smallest(self) -> Number:
        """Smallest positive value, subnormal or not."""
        return exact_number(self.exact_smallest)

    @property
    def smallest_normal(self) -> Number:
        """Smallest positive value of full precision, 2^emin."""
        return exact_number(Fraction(2) ** self.emin)

    @property
    def smallest_subnormal(self) -> Number | None:
        """Smallest positive subnormal value, 2^(emin - m); None if F has none."""
        has = self.subnormals and self.zero and self.frac_bits
        return exact_number(Fraction(2) ** (self.emin - self.frac_bits)) if has else None

    @property
    def eps(self) -> Number:
        """Distance from 1 to the next value with unlimited range, 2^-m."""
        return 2.0**-self.frac_bits

    @property
    def has_inf(self) -> bool:
        """Whether F has infinities."""
        return self.infinities

    @property
    def has_nan(self) -> bool:
        """Whether F has a NaN code."""
        return self._nan_code is not None

    @property
    def saturates(self) -> bool:
        """Whether F has no result for overflow, so that numbers beyond its largest value become that value."""
        return not self.has_inf and (self.p3109 or not self.has_nan)

    @property
    def has_negative_zero(self) -> bool:
        """Whether F distinguishes -0 from +0."""
        return self.signed and self.zero and self.nans != "negative_zero"

    # -- codes ---------------------------------------------------------------------------------------------------------
    def value_of(self, code: int) -> Number | None:
        """The exact value of one code (-0.0, inf and nan as floats); None for an unused code."""
        magnitude, negative = code & ((1 << self._magnitude_bits) - 1), code >> self._magnitude_bits
        if negative and magnitude == 0 and self.nans == "negative_zero":
            return float("nan")
        sign = -1 if negative else 1
        if magnitude > self.max_code:
            return sign * float("inf") if magnitude == self.inf_code else float("nan")
        if magnitude == 0 and self.zero:
            return sign * 0.0
        if magnitude < self._first_code:
            return None
        return exact_number(sign * self._magnitude(magnitude))

    def code_of(self, value: Number) -> int | None:
        """The code of one exact value; None if it is not in F."""
        if value != value:
            return self._nan_code
        negative = value < 0 or (value == 0 and math.copysign(1.0, value) < 0)
        if negative and not (self.signed if value else self.has_negative_zero):
            return None
        code = self._magnitude_code(value)
        return None if code is None else code | negative << self._magnitude_bits

    def _magnitude_code(self, value: Number) -> int | None:
        if value in (float("inf"), -float("inf")):
            return self.inf_code
        exact = abs(Fraction(value))
        if exact == 0:
            return 0 if self.zero else None
        exponent = max(floor_log2(exact), self.emin)
        significand = exact / Fraction(2) ** (exponent - self.frac_bits)
        if significand.denominator != 1:
            return None
        code = int(significand) + ((exponent - self.emin) << self.frac_bits) - (0 if self.zero else 1 << self.frac_bits)
        return code if self._first_code <= code <= self.max_code else None

    # -- text ----------------------------------------------------------------------------------------------------------
    @property
    def text(self) -> str:
        """The format in the text grammar, as ``e4m3(bias=11,infinities=false,nans=negative_zero)``."""
        stem, options = f"e{self.exp_bits}m{self.frac_bits}", []
        for option in FLOAT_OPTIONS:
            value = getattr(self, option.name)
            default = self.default_bias(self.exp_bits) if option.name == "bias" else option.default
            options += [f"{option.name}={str(value).lower()}"] * (value != default)
        return f"{stem}({','.join(options)})" if options else stem


#: The fields that are options in the text grammar.
FLOAT_OPTIONS = tuple(option for option in dataclasses.fields(FloatFormat) if option.kw_only)
