"""float32 numbers in float64, and back, for programs of one CPU; quotients and roots there.

A quotient or root of numbers of few bits has few bits. Else it differs from each such number by much more than the
error of its computation in float64. So it is first rounded to more bits than the former have, and fewer than float64
has. Then divisions that a compiler replaces by products, and products that it contracts, change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import Array, enable_x64, lax

from jchop._common.bit_ops import FLOAT32, FLOAT64, lax_where, low_mask, with_constant
from jchop._core.arithmetic.exact import ValueRange
from jchop._core.rounding.codes import bits_to_float, float_to_bits
from jchop._core.rounding.modes import take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat
from jchop.formats._catalogue import binary32
from jchop.formats.rounding import Overflow, Rounding

#: A sum with this number has its last place at 1; the half keeps signed sums in one binade.
FLOAT64_LEAD = 1.5 * 2.0**FLOAT64.fraction
#: Bits of a settled quotient, and of the divisor and the middle of two numbers of the format together.
_SNAP_BITS, _DIVISOR_AND_MIDDLE_BITS = 46, 43


def widen_float32(x: Array) -> Array:
    """float32 numbers in float64. Subnormal numbers, which conversions read as zero, are converted from their bits."""
    bits = float_to_bits(x)
    magnitude = with_constant(lax.bitwise_and, bits, low_mask(31))
    return _widen_in_two_ways(x, magnitude, lax.select(with_constant(lax.lt, bits, 0), lax.neg(magnitude), magnitude))


def widen_magnitude(magnitude: Array) -> Array:
    """`widen_float32` of magnitude bits of float32."""
    return _widen_in_two_ways(bits_to_float(magnitude), magnitude, magnitude)


def _widen_in_two_ways(x: Array, magnitude: Array, count: Array) -> Array:
    subnormal = with_constant(lax.mul, _convert_dtype(count, jnp.float64), 2.0**FLOAT32.tiny_exponent)
    return lax.select(
        with_constant(lax.lt, magnitude, 1 << FLOAT32.fraction), subnormal, _convert_dtype(x, jnp.float64)
    )


_convert_dtype = lax.convert_element_type


def narrow_float64(x: Array) -> Array:
    """Numbers rounded to float32, to nearest even, also in the subnormal range."""
    magnitude, bits = lax.abs(x), float_to_bits(_convert_dtype(x, jnp.float32))
    # The last places of this sum count multiples of the smallest number.
    total = with_constant(
        lax.add, with_constant(lax.mul, magnitude, 2.0**-FLOAT32.tiny_exponent), 2.0**FLOAT64.fraction
    )
    subnormal_bits = lax.bitwise_or(
        _convert_dtype(double_to_bits(total), jnp.int32), with_constant(lax.bitwise_and, bits, FLOAT32.sign_bit)
    )
    bits = lax.select(with_constant(lax.lt, magnitude, 2.0 ** (1 - FLOAT32.bias)), subnormal_bits, bits)
    return bits_to_float(bits)


def narrow_to_bits(x: Array) -> Array:
    """The bits of positive numbers, rounded to float32."""
    with enable_x64(True):
        return float_to_bits(narrow_float64(x))


def double_to_bits(x: Array) -> Array:
    """The bits of float64 numbers."""
    return lax.bitcast_convert_type(x, jnp.int64)


def format_spacing(x: Array, fmt: FloatFormat) -> Array:
    """The distance of the values of a format at positive numbers, as if its exponents had no upper end."""
    power = lax.bitcast_convert_type(with_constant(lax.bitwise_and, double_to_bits(x), FLOAT64.inf), jnp.float64)
    return with_constant(lax.mul, with_constant(lax.max, power, 2.0**fmt.emin), 2.0**-fmt.frac_bits)


def can_divide_in_float64(bits: int, fmt: FloatFormat) -> bool:
    """Whether `quotient_bits` is right for divisors of as many bits; exponents of 1-bit formats decide ties."""
    return fmt.frac_bits > 0 and bits + fmt.frac_bits + 2 <= _DIVISOR_AND_MIDDLE_BITS


def quotient_bits(magnitude: Array, divisor: Fraction, fmt: FloatFormat, other: Array | None = None) -> Array:
    """Magnitudes over a divisor, and over other ones, rounded once to nearest even on the grid of a format.

    Args:
        magnitude: magnitude bits of float32.
        divisor: a number of few bits.
        fmt: binary32, or a format of fewer bits, for which `can_divide_in_float64` holds. Its exponents go on above its
            largest number, and its last binade goes on below to zero.
        other: magnitude bits of other divisors. Default None: 1.

    Returns:
        Magnitude bits of float32; infinity for numbers above its range.
    """
    with enable_x64(True):
        is_binary32 = fmt.frac_bits == FLOAT32.fraction  # then `narrow_float64` is the rounding
        x = (
            _near_quotient(magnitude, divisor, other, fmt)
            if is_binary32
            else quotient_in_float64(magnitude, divisor, fmt, other)
        )
        subnormal = fmt.emin - fmt.frac_bits < 1 - FLOAT32.bias
        return float_to_bits(narrow_float64(x) if subnormal else _convert_dtype(x, jnp.float32))


def quotient_in_float64(magnitude: Array, divisor: Fraction, fmt: FloatFormat, other: Array | None = None) -> Array:
    """`quotient_bits` as numbers of float64, finite for finite magnitudes."""
    with enable_x64(True):
        x = _near_quotient(magnitude, divisor, other, fmt)
        lead = with_constant(lax.mul, format_spacing(x, fmt), FLOAT64_LEAD)
        return lax.sub(lax.add(x, lead), lead)


def _near_quotient(magnitude: Array, divisor: Fraction, other: Array | None, fmt: FloatFormat) -> Array:
    """Quotients; settled, if one may be in the middle of two numbers of a format.

    No binary32 number is an odd integer, other than 1, times such a middle, not even a subnormal one.
    """
    x = with_constant(lax.mul, widen_magnitude(magnitude), float(1 / divisor))
    if other is None and fmt == binary32 and divisor.denominator == 1 and divisor.numerator % 2 and divisor > 1:
        return x
    return _snap_quotient(x if other is None else x * (1 / widen_magnitude(other)))


def _snap_quotient(x: Array) -> Array:
    """Positive numbers rounded to fewer bits; infinity and NaN unchanged."""
    unit = 1 << (FLOAT64.fraction + 1 - _SNAP_BITS)
    bits = with_constant(lax.bitwise_and, with_constant(lax.add, double_to_bits(x), unit >> 1), -unit)
    return lax.bitcast_convert_type(bits, jnp.float64)


# -- quotients and roots under a spec ----------------------------------------------------------------------------------

_FLOAT64_MODES = (Rounding.NEAREST_EVEN, Rounding.STOCHASTIC, Rounding.STOCHASTIC_B)


def supports_float64_operation(name: str, spec: Spec, ranges: Sequence[ValueRange]) -> bool:
    """Whether `operation_in_float64` is right for an operation on float32 numbers of these ranges.

    A quotient x / y differs from another number g by |x - g y| / y, and a root by |x - g^2| / (root x + g).
    The numerator is a multiple of the last place of its terms. So the settled number is right beside numbers g with one
    bit more than the format. A random point has the bits of a word more; the sign of the exact numerator decides there.
    """
    fmt = spec.format
    if name not in ("div", "sqrt") or not isinstance(fmt, FloatFormat) or fmt.frac_bits < 1 or spec.flush:
        return False
    if not (fmt.subnormals and fmt.zero and fmt.signed and fmt.has_negative_zero):
        return False
    if spec.rounding not in _FLOAT64_MODES or spec.overflow not in (Overflow.IEEE, Overflow.SATURATE):
        return False
    middle, widest = fmt.frac_bits + 1, max(operand.bits for operand in ranges)
    point = middle + (FLOAT32.work_width if spec.rounding.stochastic else 0)
    if name == "sqrt":
        return max(2 * middle, widest) + 3 <= _DIVISOR_AND_MIDDLE_BITS and point <= FLOAT64.fraction - 2
    return max(middle, widest) + widest + 1 <= _DIVISOR_AND_MIDDLE_BITS and point + widest <= FLOAT64.fraction + 1


def operation_in_float64(name: str, args: Sequence[Array], spec: Spec, word: Array | None) -> Array:
    """A quotient ("div") or a root ("sqrt"), its exact value rounded once.

    Args:
        name: the operation.
        args: float32 numbers of ranges for which `supports_float64_operation` holds, infinities or NaN, all of one
            shape.
        spec: the rounding.
        word: for the stochastic modes, a random word for each element.
    """
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    bits = [float_to_bits(x) for x in args]
    sign = (bits[0] ^ bits[1] if name == "div" else bits[0]) & FLOAT32.sign_bit
    with enable_x64(True):
        x, *divisors = (widen_magnitude(magnitude_bits & low_mask(31)) for magnitude_bits in bits)
        exact = _snap_quotient(x * (1 / divisors[0]) if divisors else lax.sqrt(x))
        spacing = format_spacing(exact, fmt)
        value = (exact + spacing * FLOAT64_LEAD) - spacing * FLOAT64_LEAD
        random_bits = take_random_bits(word, spec, FLOAT32)
        if random_bits is not None:
            value = value - lax.select(value > exact, spacing, jnp.zeros_like(spacing))
            point = value + spacing - spacing * (random_bits.word.astype(jnp.float64) * 2.0**-random_bits.width)
            reaches = x >= point * divisors[0] if divisors else _root_reaches(x, point)
            value = value + lax.select(reaches, spacing, jnp.zeros_like(spacing))
        overflow = fmt.max if spec.overflow is Overflow.SATURATE or fmt.saturates else np.inf if fmt.has_inf else np.nan
        value = lax_where((exact == np.inf) | (value > float(fmt.max)), np.float64(overflow), value)
        if not divisors:  # a root of -0 is -0
            value = lax_where(lax.bitcast_convert_type(bits[0], jnp.uint32) > 1 << 31, np.float64(np.nan), value)
        subnormal = fmt.emin - fmt.frac_bits < 1 - FLOAT32.bias
        number = narrow_float64(value) if subnormal else value.astype(jnp.float32)
    return bits_to_float(float_to_bits(number) | sign)


def _root_reaches(x: Array, point: Array) -> Array:
    """Whether a root is at least `point`, which has 50 bits at most.

    With the point as h + l, of 25 bits each, h^2, 2 h l and l^2 are exact, and x - h^2, which is small. If the
    difference of x - h^2 and 2 h l is not exact, it is much larger than l^2.
    """
    high = lax.bitcast_convert_type(double_to_bits(point) & -(1 << 28), jnp.float64)
    low = point - high
    return (x - high * high) - 2 * high * low >= low * low
