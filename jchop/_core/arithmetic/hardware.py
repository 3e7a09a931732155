"""Results of the hardware rounded once: known exactly, with a known error, or computed from scaled operands.

`round_to_spec` works on bits, because it must be right for every value. If more is known of a value, fewer operations
round it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT32, Carrier, join_sign, lax_where, low_mask, split_sign
from jchop._core.arithmetic.exact import ValueRange
from jchop._core.rounding.codes import bits_to_float, float_to_bits
from jchop._core.rounding.elements import apply_overflow
from jchop._core.rounding.grid import make_grid
from jchop._core.rounding.modes import NEAREST_MODES, ROUNDING_ADDENDS, TINY_SENSITIVE_MODES, GridCut, take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, FloatFormat
from jchop.formats.rounding import Overflow, Rounding

# == by one addition ===================================================================================================
# Rounding to nearest even, if the range of a value is known (normal values of the carrier, none too large), in a
# third of the operations. For 2^e <= |x| < 2^(e+1), let 2^q be the spacing of the format, and M = 2^(q + F), with F
# the fraction bits of the carrier. The last bit of M has the value 2^q. So the carrier's own |x| + M rounds |x| to a
# multiple of 2^q, ties to even, and subtracting M is exact. M is made from the exponent bits of x, but at least from
# the exponent of the format's smallest normal number, because the spacing does not shrink below it.


def adds_to_round(spec: Spec, result: ValueRange, carrier: Carrier) -> bool:
    """Whether `round_by_adding` gives the results of `round_to_spec` for values of the range, infinities and NaN."""
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding is not Rounding.NEAREST_EVEN or spec.flush:
        return False
    # With one bit of precision the parity of the exponent decides a tie.
    is_plain = fmt.frac_bits > 0 and fmt.has_negative_zero and fmt.subnormals
    is_plain = is_plain and spec.overflow in (Overflow.IEEE, Overflow.SATURATE)
    drop, min_exponent = carrier.fraction - fmt.frac_bits, 1 - carrier.bias
    in_range = min_exponent <= fmt.emin and min_exponent <= result.quantum and result.top + drop <= carrier.bias
    return is_plain and drop > 0 and in_range and carrier.magnitude_bits(fmt.exact_max) is not None


def round_by_adding(x: Array, spec: Spec, carrier: Carrier) -> Array:
    """`x` rounded under `spec`; see `adds_to_round`."""
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    int_type, fraction = carrier.work.type, carrier.fraction
    sign, magnitude = split_sign(x, carrier)
    # The exponent of infinities and NaN wraps to the exponent of a small number, which changes neither.
    exponent = jnp.maximum(magnitude & int_type(carrier.inf), int_type((fmt.emin + carrier.bias) << fraction))
    power = lax.bitcast_convert_type(exponent + int_type((fraction - fmt.frac_bits) << fraction), x.dtype)
    value = (lax.bitcast_convert_type(magnitude, x.dtype) + power) - power
    largest = np.dtype(carrier.name).type(fmt.max)
    saturates = spec.overflow is Overflow.SATURATE or fmt.saturates
    overflow_value = largest if saturates else np.inf if fmt.has_inf else np.nan
    value = lax_where(value > largest, x.dtype.type(overflow_value), value)
    return join_sign(sign, lax.bitcast_convert_type(value, carrier.work), carrier)


# == with a known error ================================================================================================
# If the same number of last bits is dropped from every value. This holds for sums of values of the format itself,
# which are exact below its normal range. It also holds in the whole range of a format with the carrier's own
# exponents, whose spacing grows with the carrier's.


def has_constant_drop(spec: Spec, carrier: Carrier) -> bool:
    """Whether `round_with_error` is right for the values in the docstring of this module."""
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding is Rounding.STOCHASTIC_C or spec.flush:
        return False
    has_all_signs = fmt.subnormals and fmt.zero and fmt.signed and fmt.has_negative_zero
    has_spare = 0 < fmt.frac_bits <= carrier.fraction - 2 and fmt.emin >= 1 - carrier.bias
    return has_all_signs and has_spare and spec.overflow is not Overflow.WRAP


def needs_error_digits(spec: Spec) -> bool:
    """Whether `round_with_error` needs the digits of an error, and not only its sign."""
    return ROUNDING_ADDENDS[spec.rounding] is GridCut.random


def word_surplus_bits(spec: Spec, carrier: Carrier) -> int:
    """F: the number of bits of a random word minus the number of dropped bits."""
    return carrier.work_width - _drop_count(spec.format, carrier)


def error_of_sum(error: Array, magnitude: Array, spec: Spec, carrier: Carrier) -> tuple[Array, Array | None]:
    """The arguments `error` and `binade` of `round_with_error`, from the error and the magnitude bits of a sum."""
    if not needs_error_digits(spec):
        return error, None
    below = magnitude - (error < 0).astype(magnitude.dtype)
    if word_surplus_bits(spec, carrier) > carrier.fraction:
        return _error_in_parts(error, magnitude, below, spec, carrier), None
    # A smaller sum has no error, but the numbers that are compared with it must not vanish.
    least = carrier.fraction + word_surplus_bits(spec, carrier) + 1  # from which on 2^-F of the last place is normal
    below = jnp.maximum(below, least << carrier.fraction) & carrier.inf
    return error, lax.bitcast_convert_type(below, error.dtype)


def _error_in_parts(error: Array, magnitude: Array, below: Array, spec: Spec, carrier: Carrier) -> Array:
    """The error of a sum in units of 2^-F of the last place of `below`, the next lower bits if it is negative."""
    surplus = word_surplus_bits(spec, carrier) + carrier.fraction
    # If the error is not zero, the sum is not small, and the unit's factor is finite.
    min_field = carrier.work_width - 2 + carrier.fraction
    below = jnp.maximum(below, min_field << carrier.fraction) & carrier.inf
    bits = ((surplus - min_field + 2 * carrier.bias) << carrier.fraction) - (below - (min_field << carrier.fraction))
    many = error * lax.bitcast_convert_type(bits, error.dtype)
    many = lax_where(error < 0, jnp.minimum(many, error.dtype.type(-0.5)), many)  # also an error that vanished
    return lax_where(magnitude < carrier.inf, many, error.dtype.type(0))


def round_with_error(
    sign: Array,
    magnitude: Array,
    bits: Array,
    error: Array | None,
    spec: Spec,
    carrier: Carrier,
    word: Array | None,
    binade: Array | None = None,
    may_exceed_infinity: bool = False,
) -> Array:
    """A number rounded once under `spec`.

    Args:
        sign: its sign bit, in place.
        magnitude: below the bits of infinity for finite numbers, equal for infinities, above for NaN.
        bits: the magnitude's bits, rounded to nearest.
        error: the exact number minus `bits`, counted away from zero; NaN beside infinities, for no error. For modes
            that need its digits, in units of 2^-F of the last place, unless there is a `binade`. For other modes only
            its sign matters. None: no error that has an effect.
        spec: of a format that `has_constant_drop`.
        carrier: the carrier of the bits.
        word: a random word for each element, for the stochastic modes.
        binade: the power of two of the last places, for an error in its own units.
        may_exceed_infinity: whether `bits` of finite numbers may be above the bits of infinity.
    """
    assert isinstance(spec.format, FloatFormat)
    drop = _drop_count(spec.format, carrier)
    mask = low_mask(drop)
    carries = (spec.rounding in NEAREST_MODES or spec.rounding.stochastic) and spec.overflow is Overflow.IEEE
    carries = carries and spec.format.has_inf and make_grid(spec.format, carrier).top_bits == (carrier.inf - 1) & ~mask
    bits = jnp.minimum(bits, carrier.nan - (not carries))  # a NaN with more bits could overflow by the carry
    random = take_random_bits(word, spec, carrier)
    if needs_error_digits(spec):
        assert error is not None and random is not None
        rounded_bits = _add_error_and_word(bits, error, binade, random.word, spec, carrier) & ~mask
    else:
        if error is not None:  # rounded to odd
            below, above = error < 0, error > 0
            bits = (bits - below.astype(bits.dtype)) | (below | above).astype(bits.dtype)
        last = bits >> drop & 1
        cut = GridCut(bits, drop, drop, mask, last, sign != 0, random)
        rounded_bits = (bits + ROUNDING_ADDENDS[spec.rounding](cut)) & ~mask
    if carries:  # the carry out of the largest value is infinity
        if may_exceed_infinity:
            rounded_bits = lax_where(magnitude < carrier.inf, jnp.minimum(rounded_bits, carrier.inf), rounded_bits)
        return join_sign(sign, rounded_bits, carrier)
    clipped_bits = apply_overflow(magnitude, rounded_bits, sign != 0, spec, make_grid(spec.format, carrier))
    return join_sign(sign, lax_where(magnitude > carrier.inf, magnitude, clipped_bits), carrier)


def _add_error_and_word(
    bits: Array, error: Array, binade: Array | None, word: Array, spec: Spec, carrier: Carrier
) -> Array:
    """The sum of the bits, the error and the word, whose last F bits are below the bits; the dropped bits remain."""
    surplus, fraction, float_type = word_surplus_bits(spec, carrier), carrier.fraction, np.dtype(carrier.name).type
    bits = bits + (word >> surplus).astype(bits.dtype)
    if surplus > fraction:
        low = _low_word_bits(word, surplus).astype(bits.dtype)
        return bits + ((jnp.floor(error).astype(bits.dtype) + low) >> surplus)
    # The low bits of the word as the low bits of a float, which is too large by 2^first.
    lead = fraction if binade is None else -surplus
    exponent = word.dtype.type((lead + carrier.bias) << fraction)
    low = lax.bitcast_convert_type(_low_word_bits(word, surplus) | exponent, error.dtype)
    over, under = low - float_type(2.0**lead + 2.0 ** (lead - fraction + surplus)), low - float_type(2.0**lead)
    if binade is not None:
        over, under = over * binade, under * binade
    return bits + (error + over >= 0).astype(bits.dtype) - (error + under < 0).astype(bits.dtype)


def _drop_count(fmt: ElementFormat, carrier: Carrier) -> int:
    assert isinstance(fmt, FloatFormat)
    return carrier.fraction - fmt.frac_bits


def _low_word_bits(word: Array, bits: int) -> Array:
    return word & word.dtype.type((1 << bits) - 1)


# == of scaled operands ================================================================================================
# Sums and products rounded to formats with the carrier's own exponents (bfloat16, tf32, float32 itself), in floats.
# Such a format has the carrier's subnormal numbers, which devices read as zero. So if one is possible, operands are
# first scaled by 2^K, on their bits, and the result is scaled back. In between, the hardware computes the sum and its
# error (Fast2Sum; Dekker 1971), or an exact product. The same number of last bits is dropped from every value of the
# carrier, also from subnormal values, so `round_with_error` rounds them all. Let A be the float with the bits of |x|
# plus K 2^M. For a normal x, A = 2^K |x|. A subnormal x = f 2^(1 - bias - M) gets a leading bit that it does not
# have: A = c/2 + 2^K |x| / 2, with c = 2^K times the smallest normal number. So 2^K |x| is min(A, 2 A - c), and the
# inverse is max(v, (v + c) / 2), for every x, also zero.


def _bits_of_power(exponent: int) -> int:
    return (exponent + FLOAT32.bias) << FLOAT32.fraction


#: The smallest normal number.
_SMALLEST_NORMAL = 1 << FLOAT32.fraction
#: A sum is scaled up if both terms are below 2^-60. Other terms are halved if an error is needed, to prevent overflow.
#: Only the sign of a subnormal term matters then: the term is below 2^-32 of the dropped part.
_SMALL_TERM, _SUM_UP = _bits_of_power(-60), 100
#: A product is scaled if one factor is below 2^-62. The product of two larger factors is normal; the scaled product of
#: a factor below 2^-62 and a finite one is finite. If a scaled product vanishes, it is below 2^-40 of the smallest
#: subnormal bfloat16 number.
_SMALL_FACTOR, _PRODUCT_UP = _bits_of_power(-62), 48


def supports_scaling_sum(spec: Spec | None, carrier: Carrier) -> bool:
    """Whether `add_by_scaling` is right for all operands of the carrier; None is its own format, to nearest even."""
    if spec is None or carrier is not FLOAT32:
        return carrier is FLOAT32
    return has_constant_drop(spec, carrier) and spec.format == FloatFormat(8, _precision_of_spec(spec) - 1)


def _precision_of_spec(spec: Spec) -> int:
    assert isinstance(spec.format, FloatFormat)
    return spec.format.precision


def supports_scaling_product(spec: Spec | None, carrier: Carrier, xr: ValueRange, yr: ValueRange) -> bool:
    """Whether `multiply_by_scaling` is right for these ranges: the carrier must have the bits of their product."""
    fits_float32 = xr.bits + yr.bits <= FLOAT32.fraction + 1
    return fits_float32 and supports_scaling_sum(spec, carrier) and (spec is None or _precision_of_spec(spec) <= 16)


# -- operations --------------------------------------------------------------------------------------------------------


def add_by_scaling(x: Array, y: Array, spec: Spec | None, word: Array | None, xr: ValueRange, yr: ValueRange) -> Array:
    """`x + y`, its exact value rounded once; a sum that is exactly zero is +0, or -0 under `Rounding.DOWN`."""
    if spec is not None and not _hardware_rounds_right(spec, xr, yr):
        return _add_with_error(x, y, spec, word)
    (xs, xm), (ys, ym) = split_sign(x, FLOAT32), split_sign(y, FLOAT32)
    is_small = jnp.maximum(xm, ym) < _SMALL_TERM
    scale = _scale_where(is_small, _SUM_UP)
    a, b = (_join_sign(s, _scale_up(m + scale.shift, scale)) for s, m in ((xs, xm), (ys, ym)))
    sign, magnitude = split_sign(a + b, FLOAT32)
    bits = _scale_down(magnitude, scale.least) - scale.shift
    if spec is None:
        return join_sign(sign, bits, FLOAT32)
    return round_with_error(sign, magnitude, bits, None, spec, FLOAT32, word)


def _add_with_error(x: Array, y: Array, spec: Spec, word: Array | None) -> Array:
    """`x + y` by Fast2Sum of the larger magnitude and the smaller one, which is negative if the signs differ."""
    (_, xm), (_, ym) = split_sign(x, FLOAT32), split_sign(y, FLOAT32)
    xb, yb = float_to_bits(x), float_to_bits(y)
    larger, smaller = jnp.maximum(xm, ym), jnp.minimum(xm, ym)
    is_small = larger < _SMALL_TERM
    scale = _scale_where(is_small, _SUM_UP)
    shift = lax_where(is_small, scale.shift, lax_where(larger < FLOAT32.inf, np.int32(-_SMALLEST_NORMAL), np.int32(0)))
    a = _scale_up(larger + shift, scale)
    b = _scale_up(jnp.maximum(smaller + shift, _SMALLEST_NORMAL), scale)  # every term but zero stays a normal number
    b = _join_sign((xb ^ yb) & FLOAT32.sign_bit, lax_where(smaller == 0, np.float32(0), b))
    total = a + b
    error = b - (total - a)  # NaN beside infinities
    is_zero = total == 0
    sign = lax_where(is_zero, xb | yb if spec.rounding is Rounding.DOWN else xb & yb, lax_where(xm > ym, xb, yb))
    magnitude = float_to_bits(total)
    bits = lax_where(is_zero, 0, _scale_down(magnitude, scale.least) - shift)
    error, binade = error_of_sum(error, magnitude, spec, FLOAT32)
    return round_with_error(
        sign & FLOAT32.sign_bit, magnitude, bits, error, spec, FLOAT32, word, binade, may_exceed_infinity=True
    )


def multiply_by_scaling(x: Array, y: Array, spec: Spec | None, word: Array | None) -> Array:
    """`x * y`, its exact value rounded once; see `supports_scaling_product`."""
    (xs, xm), (ys, ym) = split_sign(x, FLOAT32), split_sign(y, FLOAT32)
    smaller, larger = jnp.minimum(xm, ym), jnp.maximum(xm, ym)
    is_small = smaller < _SMALL_FACTOR
    scale = _scale_where(is_small, _PRODUCT_UP)
    shift, least = scale.shift, scale.least
    product = _scale_up(smaller + shift, scale) * bits_to_float(larger)
    if spec is not None and spec.rounding in TINY_SENSITIVE_MODES:
        vanishes = (product < 2.0 ** (1 - FLOAT32.bias)) & (smaller > 0)
        product = lax_where(vanishes, np.float32(2.0 ** (1 - FLOAT32.bias)), product)
    sign, magnitude, is_subnormal = xs ^ ys, float_to_bits(product), product < least
    shift = lax_where(product < np.inf, shift, np.int32(0))  # the bits of a NaN may have the sign bit
    if spec is not None and spec.rounding is Rounding.NEAREST_EVEN:
        # Adding the power of two whose last bit is the format's smallest number rounds the product.
        drop = FLOAT32.fraction + 1 - _precision_of_spec(spec)
        exponent = _PRODUCT_UP + 1 - FLOAT32.bias + drop
        count = float_to_bits(product + np.float32(2.0**exponent)) - _bits_of_power(exponent)
        bits = lax_where(is_subnormal, count << drop, magnitude - shift)
        error = None
    else:
        offset = lax_where(is_subnormal, least, np.float32(0))
        total = product + offset
        bits = float_to_bits(total) - lax_where(
            is_subnormal, np.int32(_bits_of_power(_PRODUCT_UP + 1 - FLOAT32.bias)), shift
        )
        error = product - (total - offset)
    if spec is None:
        return join_sign(sign, bits, FLOAT32)
    if needs_error_digits(spec):
        assert error is not None
        error = error * np.float32(2.0 ** (word_surplus_bits(spec, FLOAT32) - FLOAT32.tiny_exponent - _PRODUCT_UP))
    # A product that is too large becomes a finite number above all values of the format.
    magnitude = lax_where(larger < FLOAT32.inf, jnp.minimum(magnitude, FLOAT32.inf - 1), magnitude)
    return round_with_error(sign, magnitude, bits, error, spec, FLOAT32, word)


def _hardware_rounds_right(spec: Spec, xr: ValueRange, yr: ValueRange) -> bool:
    """Whether the hardware's rounding of a sum has no effect: nearest modes, terms with few bits (Figueroa 1995)."""
    precision = _precision_of_spec(spec)
    has_few_bits = max(xr.bits, yr.bits) <= precision and 2 * precision + 2 <= FLOAT32.fraction + 1
    return has_few_bits and spec.rounding in NEAREST_MODES and spec.overflow is not Overflow.PROPAGATE


# -- scaling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PowerScale:
    """The scale 2^K if a condition holds, else 1."""

    shift: Array  # K 2^M
    step: Array  # 2^M, which doubles a number
    least: Array  # c = 2^K times the smallest normal number; all three are 0 if nothing is scaled


def _scale_where(where: Array, up: int) -> _PowerScale:
    shift, step = (lax_where(where, np.int32(bits), np.int32(0)) for bits in (up << FLOAT32.fraction, _SMALLEST_NORMAL))
    return _PowerScale(shift, step, lax_where(where, np.float32(2.0 ** (up + 1 - FLOAT32.bias)), np.float32(0)))


def _scale_up(bits: Array, scale: _PowerScale) -> Array:
    """2^K |x| from the bits of |x| plus the shift: min(A, 2 A - c)."""
    value, double = bits_to_float(bits), bits_to_float(bits + scale.step) - scale.least
    return lax_where(double < value, double, value)


def _scale_down(bits: Array, least: Array) -> Array:
    """The bits of |x| plus the shift, from the bits of v = 2^K |x|: the bits of max(v, (v + c) / 2)."""
    return jnp.maximum(bits, float_to_bits(bits_to_float(bits) + least) - _SMALLEST_NORMAL)


def _join_sign(sign: Array, value: Array) -> Array:
    return join_sign(sign, float_to_bits(value), FLOAT32)
