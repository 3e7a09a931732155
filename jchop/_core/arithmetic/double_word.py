"""Sums, products, quotients and roots in integer arithmetic: exact for every value of a carrier.

A number is a sign, an exponent and a significand of two words of W bits, with W the width of the carrier. No
floating-point operation touches the values. So devices that read subnormals as zero, and compilers that contract
operations, cannot change a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import Carrier, floor_log2_integers, lax_clip, lax_where, low_mask, split_sign
from jchop._core.arithmetic.exact import ExactResult
from jchop._core.rounding.codes import exponent_and_significand, extend_exponent


@dataclass(frozen=True)
class DoubleWord:
    """|v| = (high 2^W + low) 2^(exponent - (2W - 2)): bit 2W - 2 has the value 2^exponent; the bit above is free."""

    sign: Array
    exponent: Array
    high: Array
    low: Array


def multiply_exactly(x: Array, y: Array, carrier: Carrier) -> ExactResult:
    """The exact product of two carrier values."""
    (xs, xm), (ys, ym) = split_sign(x, carrier), split_sign(y, carrier)
    product = _multiply_magnitudes(xs, xm, ys, ym, carrier)
    v = _exact_of_product(product, carrier)
    zero = (xm == 0) | (ym == 0)
    infinite = (xm == carrier.inf) | (ym == carrier.inf)
    return with_special_values(v, infinite, infinite & zero | _any_nan(carrier, xm, ym), product.sign, carrier)


def multiply_by_wide_exactly(x: Array, significand: Array, exponent: Array, carrier: Carrier) -> ExactResult:
    """The exact product with a positive number that the carrier need not hold.

    Args:
        x: values of `carrier`.
        significand: the other factor's significand: words whose second bit from the top is its leading bit.
        exponent: the exponent of that leading bit.
        carrier: the carrier of `x`.
    """
    sign, magnitude = split_sign(x, carrier)
    up = carrier.work_width - 1 - carrier.fraction
    e, count = normalize_magnitude(magnitude, carrier)
    factor = significand.astype(_unsigned_dtype(carrier)) << 1
    v = _exact_of_product(_multiply_significands(sign, e + exponent, count.astype(factor.dtype) << up, factor), carrier)
    return with_special_values(v, magnitude == carrier.inf, magnitude > carrier.inf, sign, carrier)


def add_exactly(x: Array, y: Array, carrier: Carrier, zero_sign: int = 0) -> ExactResult:
    """The exact sum. If it is zero, and the operands are not zeros of one sign, its sign is `zero_sign`."""
    (xs, xm), (ys, ym) = split_sign(x, carrier), split_sign(y, carrier)
    a, b = (
        double_word_of(sign, *exponent_and_significand(magnitude, carrier), carrier)
        for sign, magnitude in ((xs, xm), (ys, ym))
    )
    v, sticky = add_double_words(a, b, zero_sign)
    # The high word is zero only if the sum is zero; a subnormal sum is shifted no further than its exponent allows.
    v = _exact_of_top(
        shift_to_top(v, jnp.minimum(leading_zeros(v.high, carrier), v.exponent + carrier.bias)), sticky, carrier
    )
    x_infinite, y_infinite = xm == carrier.inf, ym == carrier.inf
    nan = x_infinite & y_infinite & (xs != ys) | _any_nan(carrier, xm, ym)
    return with_special_values(v, x_infinite | y_infinite, nan, lax_where(x_infinite, xs, ys), carrier)


def multiply_add_exactly(x: Array, y: Array, z: Array, carrier: Carrier, zero_sign: int = 0) -> ExactResult:
    """The exact x y + z, with the zeros of `add_exactly`."""
    (xs, xm), (ys, ym), (zs, zm) = (split_sign(value, carrier) for value in (x, y, z))
    product = _multiply_magnitudes(xs, xm, ys, ym, carrier)
    v, sticky = add_double_words(product, double_word_of(zs, *normalize_magnitude(zm, carrier), carrier), zero_sign)
    v = fill_high_word(v)
    v = exact_of_double_word(shift_to_top(v, leading_zeros(v.high, carrier)), sticky, carrier)
    infinite, z_infinite = (xm == carrier.inf) | (ym == carrier.inf), zm == carrier.inf
    nan = infinite & ((xm == 0) | (ym == 0) | z_infinite & (product.sign != zs)) | _any_nan(carrier, xm, ym, zm)
    return with_special_values(v, infinite | z_infinite, nan, lax_where(infinite, product.sign, zs), carrier)


def divide_exactly(x: Array, y: Array, carrier: Carrier, bits: int, exponent: int = 0) -> ExactResult:
    """The exact quotient times 2^exponent, with `bits` bits in its `rest`."""
    (xs, xm), (ys, ym) = split_sign(x, carrier), split_sign(y, carrier)
    (xe, dividend), (ye, divisor) = normalize_magnitude(xm, carrier), normalize_magnitude(ym, carrier)
    is_smaller = dividend < divisor
    remainder = lax_where(is_smaller, dividend + dividend, dividend) - divisor  # the leading digit is 1
    top, rest, remainder = _quotient_digits(remainder, divisor, bits, carrier)
    zero = (xm == 0) | (ym == carrier.inf)
    top, rest, remainder = (lax_where(zero, 0, word) for word in (top, rest, remainder))
    shift = carrier.work_width - 2 - carrier.fraction
    high = top.astype(rest.dtype) << shift | rest >> (carrier.work_width - shift)
    if exponent:
        xe = xe + exponent
    quotient = DoubleWord(xs ^ ys, xe - ye - is_smaller.astype(xe.dtype), high, rest << shift)
    v = exact_of_double_word(shift_to_top(quotient, 1), remainder.astype(rest.dtype), carrier)
    infinite = (xm == carrier.inf) | (ym == 0)
    return with_special_values(v, infinite, infinite & zero | _any_nan(carrier, xm, ym), quotient.sign, carrier)


# -- roots -------------------------------------------------------------------------------------------------------------


def square_root(x: Array, carrier: Carrier, all_bits: bool) -> ExactResult:
    """The exact root; its `rest` has all bits, or only the first bit.

    With M fraction bits, v = X 2^(2f) for an integer X of 2M + 1 or 2M + 2 bits, so T = floor(sqrt X) has M + 1. The
    hardware's root of X is close to T, so X - T^2 fits a word and is right modulo 2^W.
    """
    fraction = carrier.fraction
    sign, magnitude = split_sign(x, carrier)
    exponent, significand = normalize_magnitude(magnitude, carrier)
    significand = lax_where(significand == 0, 1 << fraction, significand)
    odd = exponent & 1
    radicand = significand << (fraction + odd)
    root, remainder = _integer_root(radicand, _float_root(significand, odd, carrier), carrier)
    bits = ((((exponent - odd) >> 1) + carrier.bias - 1) << fraction) + root
    if all_bits:
        rest = _further_bits(root, remainder, carrier)
    else:
        rest = (remainder > root).astype(_unsigned_dtype(carrier)) << (carrier.work_width - 1)
    nonzero = magnitude != 0
    v = ExactResult(
        sign,
        lax_where(nonzero, bits, 0),
        (remainder != 0) & nonzero,
        lax_where(nonzero, rest, 0),
        (remainder != 0) & nonzero,
    )
    return with_special_values(
        v, magnitude == carrier.inf, (sign != 0) & nonzero | (magnitude > carrier.inf), sign, carrier
    )


def _float_root(significand: Array, odd: Array, carrier: Carrier) -> Array:
    """About the root of significand 2^(M + odd), as an integer."""
    float_type = np.dtype(carrier.name).type
    scale = lax_where(odd != 0, float_type(2.0 ** (carrier.fraction + 1)), float_type(2.0**carrier.fraction))
    return lax.sqrt(significand.astype(carrier.name) * scale).astype(significand.dtype)


def _integer_root(radicand: Array, guess: Array, carrier: Carrier) -> tuple[Array, Array]:
    """floor(sqrt X) and X - floor(sqrt X)^2, from X modulo 2^W and a guess with an error below 64."""
    error = radicand - guess * guess
    step = jnp.floor(error.astype(carrier.name) / (guess + guess).astype(carrier.name))
    root = guess + step.astype(guess.dtype)
    remainder = radicand - root * root
    for _ in range(2):
        is_too_large = (remainder < 0).astype(root.dtype)
        root = root - is_too_large
        remainder = remainder + is_too_large * (root + root + 1)
        is_too_small = (remainder > root + root).astype(root.dtype)
        remainder = remainder - is_too_small * (root + root + 1)
        root = root + is_too_small
    return root, remainder


def _further_bits(root: Array, remainder: Array, carrier: Carrier) -> Array:
    """A word of the bits that follow an integer root T of T^2 + R: floor(2^W f) for f = (R + f (1 - f)) / (2 T + 1).

    The quotient of R alone is too small by f (1 - f) 2^W / (2 T + 1) < 2^(W - 2 - M) units. Floats give this number, or
    one unit more, and the exact sign of the last remainder tells which.
    """
    width, divisor, unsigned = carrier.work_width, root + root + 1, _unsigned_dtype(carrier)
    inverse = _reciprocal(divisor, carrier)
    high, remainder = next_quotient_digit(remainder, divisor, inverse, width // 2, carrier)
    low, remainder = next_quotient_digit(remainder, divisor, inverse, width // 2, carrier)
    part = high.astype(carrier.name) * 2.0 ** -(width // 2) + low.astype(carrier.name) * 2.0**-width
    units = (remainder.astype(carrier.name) + part * (1 - part) * 2.0**width) * inverse + 2.0**-6
    units = jnp.floor(units).astype(root.dtype)
    bits = (high.astype(unsigned) << (width // 2) | low.astype(unsigned)) + units.astype(unsigned)
    square_high, square_low = full_word_product(bits, bits)
    left = (bits - square_high).astype(root.dtype) + remainder - divisor * units
    return bits - ((left < 0) | (left == 0) & (square_low != 0)).astype(unsigned)


# -- taking apart ------------------------------------------------------------------------------------------------------


def _unsigned_dtype(carrier: Carrier) -> np.dtype:
    return np.dtype(f"uint{carrier.work_width}")


def normalize_magnitude(magnitude: Array, carrier: Carrier) -> tuple[Array, Array]:
    """Exponent and significand in [2^M, 2^(M+1)); for zero an exponent below the exponents of all products, and 0."""
    exponent, count = exponent_and_significand(magnitude, carrier)
    shift = carrier.fraction - floor_log2_integers(jnp.maximum(count, 1), carrier).astype(magnitude.dtype)
    return lax_where(count == 0, -4 * carrier.bias, exponent - shift), count << shift


def double_word_of(sign: Array, exponent: Array, count: Array, carrier: Carrier) -> DoubleWord:
    high = (count << (carrier.work_width - 2 - carrier.fraction)).astype(_unsigned_dtype(carrier))
    return DoubleWord(sign, exponent, high, jnp.zeros_like(high))


def _all_ones(where: Array, like: Array) -> Array:
    """Words of ones if a condition holds, else zero; Triton does not take 64-bit constants beyond 2^63."""
    return jnp.zeros_like(like) - where.astype(like.dtype)


def _any_nan(carrier: Carrier, *magnitudes: Array) -> Array:
    is_nan = magnitudes[0] > carrier.inf
    for magnitude in magnitudes[1:]:
        is_nan = is_nan | (magnitude > carrier.inf)
    return is_nan


# -- two words ---------------------------------------------------------------------------------------------------------


def full_word_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The high and the low word of a product of unsigned words, from products of their halves."""
    half = a.dtype.itemsize * 4
    mask = a.dtype.type((1 << half) - 1)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    cross0, cross1 = a0 * b1, a1 * b0
    middle = (a0 * b0 >> half) + (cross0 & mask) + (cross1 & mask)
    return a1 * b1 + (cross0 >> half) + (cross1 >> half) + (middle >> half), a * b


def shift_words_left(high: Array, low: Array, count: Array | int) -> tuple[Array, Array]:
    """Two words shifted left by `count` in [0, W)."""
    width, count = high.dtype.itemsize * 8, count if isinstance(count, int) else count.astype(high.dtype)
    return high << count | low >> 1 >> (width - 1 - count), low << count


def _shift_words_right(high: Array, low: Array, count: Array) -> tuple[Array, Array, Array]:
    """Two words shifted right by `count` in [0, 2W), and a word that is zero only if no bit that was set is lost."""
    width = high.dtype.itemsize * 8
    crosses_word = count >= width
    shift = (count & width - 1).astype(high.dtype)
    tail = lax_where(crosses_word, low, 0)
    high, low = lax_where(crosses_word, 0, high), lax_where(crosses_word, high, low)
    back_shift = width - 1 - shift
    return high >> shift, low >> shift | high << 1 << back_shift, tail | low << 1 << back_shift


# -- operations --------------------------------------------------------------------------------------------------------


def _multiply_magnitudes(xs: Array, xm: Array, ys: Array, ym: Array, carrier: Carrier) -> DoubleWord:
    (xe, a), (ye, b) = normalize_magnitude(xm, carrier), normalize_magnitude(ym, carrier)
    word_dtype, shift = _unsigned_dtype(carrier), carrier.work_width - 1 - carrier.fraction
    return _multiply_significands(xs ^ ys, xe + ye, a.astype(word_dtype) << shift, b.astype(word_dtype) << shift)


def _multiply_significands(sign: Array, exponent: Array, a: Array, b: Array) -> DoubleWord:
    """The product of words whose top bit is the leading bit; the product of these bits has the value 2^exponent."""
    high, low = full_word_product(a, b)  # the leading bit at 2W - 1 or 2W - 2
    top = high.dtype.itemsize * 8 - 1
    carry = high >> top
    low = lax_where(carry != 0, low >> 1 | high << top, low)
    return DoubleWord(sign, exponent + carry.astype(exponent.dtype), high >> carry, low)


def add_double_words(a: DoubleWord, b: DoubleWord, zero_sign: int) -> tuple[DoubleWord, Array]:
    """The sum, with its leading bit at any place, and a word that is not zero if bits follow `low`.

    If bits follow, the exponents of the operands differ by two or more, and the leading bit falls by two places at
    most.
    """
    width, one = a.high.dtype.itemsize * 8, a.high.dtype.type(1)
    swap = (b.exponent > a.exponent) | (
        (b.exponent == a.exponent) & ((b.high > a.high) | (b.high == a.high) & (b.low > a.low))
    )
    exponent, least = lax_where(swap, b.exponent, a.exponent), lax_where(swap, a.exponent, b.exponent)
    sign = lax_where(swap, b.sign, a.sign)
    high, low = lax_where(swap, b.high, a.high), lax_where(swap, b.low, a.low)
    high2, low2, tail = _shift_words_right(
        lax_where(swap, a.high, b.high), lax_where(swap, a.low, b.low), jnp.minimum(exponent - least, 2 * width - 1)
    )
    # A difference adds the complement and 1. If bits of the subtrahend were lost, the 1 is not added.
    opposite = a.sign != b.sign
    complement = _all_ones(opposite, high)
    total = low + (low2 ^ complement)
    has_carry = total < low
    low = total + lax_where(opposite & (tail == 0), one, 0)
    high = high + (high2 ^ complement) + has_carry.astype(high.dtype) + (low < total).astype(high.dtype)
    sign = lax_where(opposite & ((high | low | tail) == 0), zero_sign, sign)
    return DoubleWord(sign, exponent, high, low), tail


def _quotient_digits(remainder: Array, divisor: Array, bits: int, carrier: Carrier) -> tuple[Array, Array, Array]:
    """The significand, the rest and the last remainder of 1 + remainder / divisor, a number below 2."""
    width, fraction = carrier.work_width, carrier.fraction
    inverse = _reciprocal(divisor, carrier)
    significand = jnp.ones_like(remainder)
    for digit_bits in (fraction // 2, fraction - fraction // 2):
        digit, remainder = next_quotient_digit(remainder, divisor, inverse, digit_bits, carrier)
        significand = significand << digit_bits | digit
    rest, bits_left = jnp.zeros_like(significand, _unsigned_dtype(carrier)), width
    while bits_left > width - bits:
        digit_bits = min(width // 2, bits_left - width + bits)
        digit, remainder = next_quotient_digit(remainder, divisor, inverse, digit_bits, carrier)
        bits_left -= digit_bits
        rest = rest | digit.astype(rest.dtype) << bits_left
    return significand, rest, remainder


def _reciprocal(divisor: Array, carrier: Carrier) -> Array:
    """About 1 / divisor."""
    return 1 / divisor.astype(carrier.name)


def next_quotient_digit(
    remainder: Array, divisor: Array, inverse: Array, bits: int, carrier: Carrier
) -> tuple[Array, Array]:
    """floor(remainder 2^bits / divisor) and the remainder, both modulo 2^W.

    The guess needs `bits` bits, at most 2/3 of the carrier's precision. So even if the division is wrong by many units
    in the last place, the guess is wrong by one at most.
    """
    guess = (remainder.astype(carrier.name) * inverse * 2.0**bits).astype(remainder.dtype)
    remainder = (remainder << bits) - guess * divisor
    is_negative, is_too_large = remainder < 0, remainder >= divisor
    step = is_too_large.astype(guess.dtype) - is_negative.astype(guess.dtype)
    return guess + step, remainder - step * divisor


# -- putting together --------------------------------------------------------------------------------------------------


def shift_to_top(v: DoubleWord, places: Array | int) -> DoubleWord:
    """The form for `exact_of_double_word`: shifted left by `places` in [0, W); bit 2W - 1 has the value 2^exponent."""
    high, low = shift_words_left(v.high, v.low, places)
    return DoubleWord(v.sign, v.exponent + 1 - places, high, low)


def fill_high_word(v: DoubleWord) -> DoubleWord:
    """The same number, shifted left by a whole word if the high word is zero."""
    empty = v.high == 0
    exponent = v.exponent - empty.astype(v.exponent.dtype) * (v.high.dtype.itemsize * 8)
    return DoubleWord(v.sign, exponent, lax_where(empty, v.low, v.high), lax_where(empty, 0, v.low))


def exact_of_double_word(v: DoubleWord, tail: Array, carrier: Carrier) -> ExactResult:
    """A number whose exponent may be below the carrier's; `tail` is not zero if bits follow `low`."""
    least = 1 - carrier.bias
    high, low, more = _shift_words_right(v.high, v.low, lax_clip(least - v.exponent, 0, 2 * carrier.work_width - 1))
    return _exact_of_top(DoubleWord(v.sign, jnp.maximum(v.exponent, least), high, low), tail | more, carrier)


def _exact_of_product(product: DoubleWord, carrier: Carrier) -> ExactResult:
    """A product, which fits two words."""
    return exact_of_double_word(shift_to_top(product, 1), jnp.zeros_like(product.low), carrier)


def leading_zeros(word: Array, carrier: Carrier) -> Array:
    """The number of zeros above the leading bit of unsigned words; W - 1 for zero."""
    halved = (word >> 1).astype(carrier.work)
    halved = halved & ~(halved >> 1)  # otherwise a rounding conversion could carry into the next power of two
    zeros = carrier.work_width - 2 - floor_log2_integers(jnp.maximum(halved, 1), carrier).astype(carrier.work)
    return lax_where(halved == 0, carrier.work_width - 1, zeros)


def _exact_of_top(v: DoubleWord, tail: Array, carrier: Carrier) -> ExactResult:
    """A number in the form of `shift_to_top`, with an exponent of the carrier or above, as t and the rest."""
    kept_bits, dropped_bits = carrier.fraction + 1, carrier.work_width - 1 - carrier.fraction
    top = (v.high >> dropped_bits).astype(carrier.work)
    rest = v.high << kept_bits | v.low >> dropped_bits
    beyond = v.exponent > carrier.bias
    exponent_field = jnp.minimum(v.exponent, carrier.bias) + carrier.bias
    magnitude = lax_where(top == 0, 0, ((exponent_field - 1) << carrier.fraction) + top)
    magnitude = lax_where(beyond, carrier.inf - 1, magnitude)
    rest = rest | _all_ones(beyond, rest)
    tail = tail | v.low << kept_bits
    return ExactResult(v.sign, magnitude, (rest | tail) != 0, rest, tail != 0, beyond)


def with_special_values(v: ExactResult, infinite: Array, nan: Array, sign: Array, carrier: Carrier) -> ExactResult:
    """`v` with infinities of the given sign, and NaN, for the marked elements."""
    finite = (infinite | nan) ^ True  # as kernels of GPUs negate
    return replace(
        v,
        sign=lax_where(infinite, sign, v.sign),
        magnitude=lax_where(nan, carrier.nan, lax_where(infinite, carrier.inf, v.magnitude)),
        inexact=v.inexact & finite,
        rest=lax_where(finite, v.rest, 0),
        sticky=v.sticky & finite,
        beyond=v.beyond & finite,
    )


# == quotients of magnitudes by shared divisors, for the scales of blocks ==============================================
# A quotient's digits come from a floating-point guess, a dozen bits at a time, which exact integer remainders
# correct. So a division that is wrong by many units in the last place, or that a compiler replaces by a
# multiplication with a reciprocal, does not change the result. `divide_exactly` does the same for any two operands.
# Here the divisor is prepared once, and may have a few bits more than a number of the carrier.


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
    return bits & low_mask(carrier.fraction) | 1 << carrier.fraction


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
    return Divisor.of(lax_where(is_short, product << 1, product), exponent_field, carrier)


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
    shift = lax_clip(1 - exponent_field, 0, carrier.fraction + 2)
    bits = (lax_clip(exponent_field - 1, 0, 2 * carrier.bias) << carrier.fraction) + (digits >> shift)
    return jnp.minimum(bits | sticky | (digits & low_mask(shift) != 0), carrier.inf - 1)


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
    second, remainder = _divide_by_count(remainder << low_bits | digits & low_mask(low_bits), count, carrier)
    third, remainder = _divide_by_count(remainder << extra_bits, count, carrier)
    # The quotient times 2^(M + 2 - field), or with one bit more, and whether further bits follow.
    quotient = (first << low_bits | second) << extra_bits | third
    sticky = (remainder != 0).astype(bits.dtype)
    has_extra_bit = quotient >> (fraction + 2)
    exponent_field = (bits >> fraction) - (exponent + count.bit_length()) + has_extra_bit
    drop = 1 + has_extra_bit + lax_clip(1 - exponent_field, 0, fraction + 2)
    kept_bits = quotient >> drop
    if odd:
        rounded_bits = kept_bits | (quotient & low_mask(drop) != 0) | sticky
    else:
        # A tie goes up if the number above is even.
        rounded_bits = (quotient + ((1 << (drop - 1)) - 1) + (kept_bits & 1 | sticky)) >> drop
    rounded_bits = rounded_bits + (lax_clip(exponent_field - 1, 0, 2 * carrier.bias) << fraction)
    return lax_where(magnitude == 0, 0, jnp.minimum(rounded_bits, carrier.inf - odd))


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
        digit, remainder = next_quotient_digit(remainder, divisor.significand, divisor.inverse, digit_bits, carrier)
        bits_left -= digit_bits
        rest = rest | digit.astype(unsigned) << bits_left
    lost_bit = rest & has_extra_bit.astype(unsigned)
    rest = next_bit.astype(unsigned) << (width - 1) | rest >> has_extra_bit.astype(unsigned)
    rest, sticky = lax_where(is_divided, rest, 0), is_divided & ((remainder != 0) | (lost_bit != 0))
    return ExactResult(sign, lax_where(is_divided, bits, magnitude), (rest != 0) | sticky, rest, sticky)


def _divide_to_digits(magnitude: Array, divisor: Divisor, carrier: Carrier) -> tuple[Array, Array, Array, Array, Array]:
    """A quotient's field, its leading M + 1 bits, 1 if another bit follows them, that bit, and the remainder."""
    fraction = carrier.fraction
    bits = extend_exponent(magnitude, carrier)
    remainder = significand_of_extended(bits, carrier) << (divisor_bits(carrier) - fraction - 1)
    count = jnp.zeros_like(bits)
    for digit_bits in ((fraction + 1) // 2, fraction + 1 - (fraction + 1) // 2):
        digit, remainder = next_quotient_digit(remainder, divisor.significand, divisor.inverse, digit_bits, carrier)
        count = (count << digit_bits) + digit
    has_extra_bit = count >> (fraction + 1)  # 1 if the dividend has the larger significand, so that a bit is left over
    exponent_field = (bits >> fraction) - divisor.field + carrier.bias - 1 + has_extra_bit
    return exponent_field, count >> has_extra_bit, has_extra_bit, count & has_extra_bit, remainder
