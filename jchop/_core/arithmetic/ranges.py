"""Facts that are known before anything is computed: the ranges of operands, and the possible result formats."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._core.rounding.grid import carrier_holds, x64_remedy
from jchop._core.rounding.modes import NEAREST_MODES
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, ElementFormat, FloatFormat, TaperedFormat, UniformFormat
from jchop.formats.rounding import Overflow

#: The carriers of operations.
OPERATION_CARRIERS = ("float32", "float64")


@dataclass(frozen=True)
class ValueRange:
    """The range of an operand: every finite value v is a multiple of 2^quantum with |v| < 2^top.

    In addition, v has at most `precision` significant bits, from the first to the last bit that is set. Unless v is
    zero, |v| >= 2^least; None: 2^quantum.
    """

    quantum: int
    precision: int
    top: int
    least: int | None = None

    @property
    def bottom(self) -> int:
        """An exponent for which 2^bottom is at most every nonzero |v|."""
        return self.quantum if self.least is None else self.least

    def is_normal(self, carrier: Carrier) -> bool:
        """Whether no nonzero value is subnormal in the carrier."""
        return self.bottom >= 1 - carrier.bias

    @property
    def bits(self) -> int:
        """The largest number of significant bits of a value."""
        return min(self.precision, max(self.top - self.quantum, 0))


def carrier_range(carrier: Carrier) -> ValueRange:
    """The range of all values of `carrier`."""
    return ValueRange(carrier.tiny_exponent, carrier.fraction + 1, carrier.bias + 1)


@lru_cache(maxsize=1024)
def range_of(spec: Spec | None, carrier: Carrier) -> ValueRange:
    """The range of values of `carrier` rounded under `spec`; None: the range of all its values."""
    whole = carrier_range(carrier)
    if spec is None:
        return whole
    own = _range_of_format(spec.format)
    least = spec.format.emin if spec.flush and isinstance(spec.format, FloatFormat) else None
    return ValueRange(
        max(own.quantum, whole.quantum), min(own.precision, whole.precision), min(own.top, whole.top), least
    )


def holds_format(fmt: ElementFormat, carrier: Carrier) -> bool:
    """Whether every finite value of `fmt` is a value of `carrier`."""
    own, whole = _range_of_format(fmt), carrier_range(carrier)
    return own.precision <= whole.precision and own.quantum >= whole.quantum and own.top <= whole.top


def product_range(a: ValueRange, b: ValueRange) -> ValueRange:
    """The range of the exact products of values of two ranges."""
    least = None if a.least is None or b.least is None else a.least + b.least
    return ValueRange(a.quantum + b.quantum, a.bits + b.bits, a.top + b.top, least)


def sum_range(a: ValueRange, b: ValueRange) -> ValueRange:
    """The range of the exact sums of values of two ranges."""
    quantum, top = min(a.quantum, b.quantum), max(a.top, b.top) + 1
    return ValueRange(quantum, max(top - quantum, 1), top)


def _range_of_format(fmt: ElementFormat) -> ValueRange:
    if isinstance(fmt, FloatFormat):
        return ValueRange(fmt.emin - fmt.frac_bits, fmt.precision, fmt.emax + 1)
    if isinstance(fmt, UniformFormat):
        largest = max(fmt.max_code, -fmt.min_code)
        # The minimum -2^k of two's complement has one significant bit.
        return ValueRange(-fmt.frac_bits, fmt.max_code.bit_length(), largest.bit_length() - fmt.frac_bits)
    if isinstance(fmt, TaperedFormat):
        return ValueRange(fmt.last_place, fmt.most_fraction_bits + 1, fmt.emax + 1)
    assert isinstance(fmt, CodebookFormat)
    ends = [_exponents_of_ends(Fraction(level)) for level in fmt.levels if level] or [(0, 1)]
    return ValueRange(min(low for low, _ in ends), max(high - low for low, high in ends), max(high for _, high in ends))


def _exponents_of_ends(value: Fraction) -> tuple[int, int]:
    """The exponent of the last significant bit of a dyadic number, and the exponent of the first bit plus 1."""
    count = abs(value.numerator)
    last_bit = (count & -count).bit_length() - 1
    shift = value.denominator.bit_length() - 1
    return last_bit - shift, count.bit_length() - shift


# -- which result formats an operation can have ------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def require_operation(spec: Spec | None, carrier: Carrier, argument: str) -> None:
    """Refuses a spec to which the exact result of an operation on `carrier` cannot always be rounded once.

    The exact result is first rounded to odd in the carrier's precision. If the carrier has two bits more than the
    format, the second rounding gives the rounded exact result (Boldo and Melquiond 2008). Under the nearest modes, a
    format with the carrier's own grid is rounded to directly.

    Args:
        spec: the rounding of the result; None, the carrier's own format, always passes.
        carrier: the carrier of the operands.
        argument: the name of the argument with the spec, for the message.

    Raises:
        ValueError: if `carrier` is too narrow; the message names a dtype that works.
    """
    if spec is None or supports_operation(spec, carrier):
        return
    if isinstance(spec.format, CodebookFormat):
        raise ValueError(f"{argument}={str(spec)!r}: the result of an operation cannot be rounded to a codebook")
    able = [name for name in OPERATION_CARRIERS if supports_operation(spec, CARRIERS[name])]
    remedy = f"cast the operands to {able[0]}{x64_remedy(able)}" if able else "no carrier up to float64 can"
    if carrier.name not in OPERATION_CARRIERS:
        cause = f"operations must be {' or '.join(OPERATION_CARRIERS)} ones, not {carrier.name}"
    elif not carrier_holds(spec, carrier):
        cause = f"{carrier.name} cannot hold every result"
    else:
        cause = f"to round a result once, {carrier.name} must have two bits more than the format everywhere"
    raise ValueError(f"{argument}={str(spec)!r}: {cause}; {remedy}")


def supports_operation(spec: Spec, carrier: Carrier) -> bool:
    """Whether results of operations on `carrier` can be rounded under `spec`; see `require_operation`."""
    fmt = spec.format
    if carrier.name not in OPERATION_CARRIERS or isinstance(fmt, CodebookFormat) or not carrier_holds(spec, carrier):
        return False
    return has_spare_bits(fmt, carrier) or rounds_on_carrier_grid(spec, carrier)


def has_spare_bits(fmt: ElementFormat, carrier: Carrier) -> bool:
    """Whether the carrier has two bits more than `fmt` in the whole range of `fmt`."""
    if isinstance(fmt, FloatFormat):
        last_place = fmt.emin - fmt.frac_bits
        return fmt.frac_bits + 2 <= carrier.fraction and last_place >= carrier.tiny_exponent + 2
    if isinstance(fmt, TaperedFormat):
        return fmt.most_fraction_bits + 2 <= carrier.fraction and fmt.last_place >= carrier.tiny_exponent + 2
    assert isinstance(fmt, UniformFormat)
    return fmt.max_code.bit_length() + 1 <= carrier.fraction and -fmt.frac_bits >= carrier.tiny_exponent + 2


def rounds_on_carrier_grid(spec: Spec, carrier: Carrier) -> bool:
    """Whether `spec` rounds to nearest on the carrier's own grid: the same precision, and subnormals, if any."""
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding not in NEAREST_MODES or fmt.frac_bits != carrier.fraction:
        return False
    holds_largest = carrier.magnitude_bits(fmt.exact_max) is not None
    has_subnormals = fmt.subnormals and fmt.zero
    return holds_largest and (fmt.emin == 1 - carrier.bias if has_subnormals else fmt.emin >= 1 - carrier.bias)


def wraps_results(spec: Spec | None) -> bool:
    """Whether results beyond the ends wrap, which needs every bit of an exact result."""
    return spec is not None and spec.overflow is Overflow.WRAP
