"""Exact quotients of magnitudes by shared divisors, for the scales of blocks.

A quotient's digits come from a floating-point guess, a dozen bits at a time, which exact integer remainders correct. So
a division that is wrong by many units in the last place, or that a compiler replaces by a multiplication with a
reciprocal, does not change the result. `double_word.divide_exactly` does the same for any two operands. Here the
divisor is prepared once, and may have a few bits more than a number of the carrier.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.exact import ExactResult
from jchop._core.rounding.codes import extend_exponent

Array = jax.Array

#: Bits of a word above a divisor's significand: for a remainder, its sign and a factor of 2.
_DIVISOR_ROOM = 4


@dataclass(frozen=True)
class Divisor:
    """Positive numbers: integers of W = `divisor_bits` bits times 2^(field - bias - W + 1)."""

    significand: Array
    field: Array  # the biased exponent of the leading bit
    inverse: Array  # of the significand, nearly

    @classmethod
    def of(cls, significand: Array, field: Array, carrier: Carrier) -> Divisor:
        return cls(significand, field, 1 / significand.astype(carrier.name))


def divisor_bits(carrier: Carrier) -> int:
    """Bits of a divisor's significand, a few more than the carrier's."""
    return carrier.work_width - _DIVISOR_ROOM


def significand_of_extended(bits: Array, carrier: Carrier) -> Array:
    """The significand of extended magnitude bits, with its leading bit."""
    return bits & bit_ops.low_mask(carrier.fraction) | 1 << carrier.fraction


def divisor_of(magnitude: Array, carrier: Carrier) -> Divisor:
    """Finite magnitudes other than zero as divisors."""
    bits = extend_exponent(magnitude, carrier)
    up = divisor_bits(carrier) - carrier.fraction - 1
    return Divisor.of(significand_of_extended(bits, carrier) << up, bits >> carrier.fraction, carrier)


def divisor_of_product(
    count: Array, width: int, exponent: Array | int, factor: Array, factor_bits: int, carrier: Carrier
) -> Divisor:
    """The products of count 2^exponent and a number of at most `factor_bits` + 1 significant bits.

    Args:
        count: integers of exactly `width` bits; `width` + `factor_bits` is less than `divisor_bits`.
        width: bits of the integers.
        exponent: integers.
        factor: magnitude bits of a positive number.
        factor_bits: its fraction bits.
        carrier: of the magnitudes.
    """
    bits = extend_exponent(factor, carrier)
    product = count * (
        significand_of_extended(bits, carrier) >> (carrier.fraction - factor_bits)
    )  # of width + own bits, or one more
    top_bit = divisor_bits(carrier) - 1
    product = product << (top_bit - (width + factor_bits))
    is_short = product >> top_bit == 0
    exponent_field = (bits >> carrier.fraction) + exponent + width - is_short.astype(product.dtype)
    return Divisor.of(bit_ops.lax_where(is_short, product << 1, product), exponent_field, carrier)


def odd_quotient(magnitude: Array, divisor: Divisor, carrier: Carrier, ends: bool = False) -> Array:
    """Magnitude bits of finite nonzero magnitudes divided by divisors, rounded to odd.

    With `ends`, quotients have the whole range of the carrier, and larger ones become its largest number. Without it,
    quotients below the normal range become its smallest value, and quotients above it become some number of its largest
    binade. For formats whose range ends far within the carrier's range, this makes no difference.
    """
    exponent_field, digits, _, next_bit, remainder = _divide_to_digits(magnitude, divisor, carrier)
    sticky = next_bit | (remainder != 0).astype(next_bit.dtype)
    if not ends:
        return _clamp_to_normal(exponent_field, digits, carrier) | sticky
    shift = bit_ops.lax_clip(1 - exponent_field, 0, carrier.fraction + 2)
    bits = (bit_ops.lax_clip(exponent_field - 1, 0, 2 * carrier.bias) << carrier.fraction) + (digits >> shift)
    return jnp.minimum(bits | sticky | (digits & bit_ops.low_mask(shift) != 0), carrier.inf - 1)


def is_short_divisor(count: int, carrier: Carrier) -> bool:
    """Whether `quotient_by_constant` accepts a divisor: an odd integer that leaves room in a word."""
    return count > 1 and carrier.fraction + 2 + count.bit_length() <= carrier.work_width


def quotient_by_constant(magnitude: Array, count: int, exponent: int, carrier: Carrier, odd: bool) -> Array:
    """Magnitude bits of finite magnitudes divided by count 2^exponent, rounded to nearest even, or to odd.

    Quotients beyond the carrier's largest number become infinity, or the largest number if rounded to odd.

    Args:
        magnitude: magnitude bits of the carrier, also subnormal numbers and 0.
        count: an odd integer that `is_short_divisor`.
        exponent: an integer.
        carrier: of the magnitudes.
        odd: whether to round to odd.
    """
    fraction, extra_bits = carrier.fraction, count.bit_length() + 1
    bits = extend_exponent(magnitude, carrier)
    digits = significand_of_extended(bits, carrier)
    low_bits = fraction + 1 - (fraction + 1) // 2
    first, remainder = _divide_by_count(digits >> low_bits, count, carrier)
    second, remainder = _divide_by_count(remainder << low_bits | digits & bit_ops.low_mask(low_bits), count, carrier)
    third, remainder = _divide_by_count(remainder << extra_bits, count, carrier)
    # The quotient times 2^(M + 2 - field), or with one bit more, and whether further bits follow.
    quotient = (first << low_bits | second) << extra_bits | third
    sticky = (remainder != 0).astype(bits.dtype)
    has_extra_bit = quotient >> (fraction + 2)
    exponent_field = (bits >> fraction) - (exponent + count.bit_length()) + has_extra_bit
    drop = 1 + has_extra_bit + bit_ops.lax_clip(1 - exponent_field, 0, fraction + 2)
    kept_bits = quotient >> drop
    if odd:
        rounded_bits = kept_bits | (quotient & bit_ops.low_mask(drop) != 0) | sticky
    else:
        # A tie goes up if the number above is even.
        rounded_bits = (quotient + ((1 << (drop - 1)) - 1) + (kept_bits & 1 | sticky)) >> drop
    rounded_bits = rounded_bits + (bit_ops.lax_clip(exponent_field - 1, 0, 2 * carrier.bias) << fraction)
    return bit_ops.lax_where(magnitude == 0, 0, jnp.minimum(rounded_bits, carrier.inf - odd))


def _divide_by_count(dividend: Array, count: int, carrier: Carrier) -> tuple[Array, Array]:
    """Quotient and remainder of integers that leave half of a significand's bits for the quotient.

    The quotient plus 1 / (2 count) is so far from whole numbers that its error has no effect.
    """
    quotient = ((dividend.astype(carrier.name) + 0.5) * (1 / count)).astype(dividend.dtype)
    return quotient, dividend - quotient * count


def _clamp_to_normal(field: Array, count: Array, carrier: Carrier) -> Array:
    """Magnitude bits of a field and a significand, clamped to the normal range."""
    bits = ((jnp.minimum(field, 2 * carrier.bias) - 1) << carrier.fraction) + count
    return jnp.maximum(bits, 1 << carrier.fraction)


def exact_quotient(sign: Array, magnitude: Array, is_divided: Array, divisor: Divisor, carrier: Carrier) -> ExactResult:
    """The exact quotient, as `odd_quotient` without `ends`; the magnitude itself if not `is_divided`."""
    exponent_field, digits, has_extra_bit, next_bit, remainder = _divide_to_digits(magnitude, divisor, carrier)
    bits = _clamp_to_normal(exponent_field, digits, carrier)
    width, unsigned = carrier.work_width, jnp.dtype(f"uint{carrier.work_width}")
    rest, bits_left = jnp.zeros(bits.shape, unsigned), width
    while bits_left:
        digit_bits = min(bits_left, carrier.fraction // 2)
        digit, remainder = double_word.next_quotient_digit(
            remainder, divisor.significand, divisor.inverse, digit_bits, carrier
        )
        bits_left -= digit_bits
        rest = rest | digit.astype(unsigned) << bits_left
    lost_bit = rest & has_extra_bit.astype(unsigned)
    rest = next_bit.astype(unsigned) << (width - 1) | rest >> has_extra_bit.astype(unsigned)
    rest, sticky = bit_ops.lax_where(is_divided, rest, 0), is_divided & ((remainder != 0) | (lost_bit != 0))
    return ExactResult(sign, bit_ops.lax_where(is_divided, bits, magnitude), (rest != 0) | sticky, rest, sticky)


def _divide_to_digits(magnitude: Array, divisor: Divisor, carrier: Carrier) -> tuple[Array, Array, Array, Array, Array]:
    """A quotient's field, its leading M + 1 bits, 1 if another bit follows them, that bit, and the remainder."""
    fraction = carrier.fraction
    bits = extend_exponent(magnitude, carrier)
    remainder = significand_of_extended(bits, carrier) << (divisor_bits(carrier) - fraction - 1)
    count = jnp.zeros_like(bits)
    for digit_bits in ((fraction + 1) // 2, fraction + 1 - (fraction + 1) // 2):
        digit, remainder = double_word.next_quotient_digit(
            remainder, divisor.significand, divisor.inverse, digit_bits, carrier
        )
        count = (count << digit_bits) + digit
    has_extra_bit = count >> (fraction + 1)  # 1 if the dividend has the larger significand, so that a bit is left over
    exponent_field = (bits >> fraction) - divisor.field + carrier.bias - 1 + has_extra_bit
    return exponent_field, count >> has_extra_bit, has_extra_bit, count & has_extra_bit, remainder
