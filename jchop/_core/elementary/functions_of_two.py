"""The functions of two arguments, to about 44 bits, since the pairs of 16-bit numbers come closer to boundaries.

As in `functions`, terms that are too small to matter keep their sign. Special values are those of C (ISO/IEC 9899,
annex F).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._core.elementary import constants, pairs
from jchop._core.elementary.functions import angle_of, reduce_to_eighths, two_to_eighths
from jchop._core.elementary.pairs import FloatPair, pair_of_constant, pair_of_number
from jchop._core.elementary.parts import FIRST_ORDER, SECOND_ORDER, Argument, FunctionValue, float32_power_of_two
from jchop._core.rounding.bins import take_in_bounds

Array = jax.Array

_BINARY_INF = float("inf")
_BINARY_NAN = float("nan")
_BINARY_ONE = pair_of_constant(1)


def _clamp_difference(a: Array, b: Array, limit: int) -> Array:
    """A - b, at least -`limit` and at most `limit`."""
    return bit_ops.lax_clip(a - b, -limit, limit)


# -- the root of a sum of squares --------------------------------------------------------------------------------------


def _hypot(x: Argument, y: Argument) -> FunctionValue:
    """The root of a sum of squares. For operands of 12 bits the sum is exact, and so is the side of the root.

    If the exponents differ by more than 30, the smaller operand only tells that the result is above the larger one.
    """
    swap = x.magnitude < y.magnitude
    exponent, least = bit_ops.lax_where(swap, y.exponent, x.exponent), bit_ops.lax_where(swap, x.exponent, y.exponent)
    a, b = bit_ops.lax_where(swap, y.significand, x.significand), bit_ops.lax_where(swap, x.significand, y.significand)
    b = b * float32_power_of_two(_clamp_difference(least, exponent, -SECOND_ORDER))
    b = bit_ops.lax_where(x.zero | y.zero, 0.0, b)
    value = pairs.root_of_pair(pairs.add_pairs(pairs.two_product(a, a), pairs.two_product(b, b)))
    cases = ((x.zero & y.zero, 0.0), (x.nan | y.nan, _BINARY_NAN), (x.infinite | y.infinite, _BINARY_INF))
    return FunctionValue(value, exponent, cases)


# -- the angle of a point ----------------------------------------------------------------------------------------------


def _arctan2(y: Argument, x: Argument) -> FunctionValue:
    """The angle of (x, y). Infinite coordinates are those of a point of the same angle."""
    both = x.infinite & y.infinite
    is_flat = y.zero | (x.infinite & ~both)
    is_steep = (x.zero & ~y.zero) | (y.infinite & ~both)
    negative_x = x.negative
    difference = y.exponent - x.exponent
    exponent_gap = bit_ops.lax_clip(difference, bit_ops.lax_where(negative_x, FIRST_ORDER, SECOND_ORDER), -FIRST_ORDER)
    shift = bit_ops.lax_where(negative_x, 0, jnp.minimum(difference - exponent_gap, 0))
    numerator = bit_ops.lax_where(both, 1.0, y.significand * float32_power_of_two(jnp.maximum(exponent_gap, -60)))
    numerator, shift = (
        bit_ops.lax_where(is_flat, 0.0, bit_ops.lax_where(is_steep, 1.0, numerator)),
        bit_ops.lax_where(is_steep | both, 0, shift),
    )
    denominator = bit_ops.lax_where(is_steep, 0.0, bit_ops.lax_where(both | is_flat, 1.0, x.significand))
    value = angle_of(pair_of_number(numerator), pair_of_number(denominator), negative_x, pairs.divide_pairs_exactly)
    return FunctionValue(value, shift, ((is_flat & ~negative_x, 0.0), (x.nan | y.nan, _BINARY_NAN)), y.sign)


# -- exponentials and logarithms ---------------------------------------------------------------------------------------


def _exp_of_eighths_precisely(r: FloatPair, n: Array) -> tuple[FloatPair, Array]:
    """e^r 2^(n / 8) as a pair and an exponent, for |r| <= log(2) / 16, to 2^-45."""
    expm1_r = pairs.multiply_pairs(r, pairs.polynomial_of_pair(r, constants.exponential_series()[:9], 4))
    return pairs.multiply_pairs(pairs.fast_add_pairs(_BINARY_ONE, expm1_r), two_to_eighths(n & 7)), n >> 3


def _logaddexp(x: Argument, y: Argument) -> FunctionValue:
    """M + log(1 + t) with the larger operand m and t = e^-|x - y|.

    log(1 + t) is 2 artanh(t / (2 + t)), or log(2) + 2 artanh((t - 1) / (t + 3)) for t near 1.
    """
    x_order, y_order = (bit_ops.lax_where(v.negative, -v.magnitude, v.magnitude) for v in (x, y))
    swap = x_order < y_order
    sign, exponent, significand, zero, infinite = (
        bit_ops.lax_where(swap, b, a)
        for a, b in (
            (x.sign, y.sign),
            (x.exponent, y.exponent),
            (x.significand, y.significand),
            (x.zero, y.zero),
            (x.infinite, y.infinite),
        )
    )
    a, b = (v.clamp(-100, 2.0**100) for v in (x, y))
    d = pairs.two_sum(bit_ops.lax_where(swap, a, b), -bit_ops.lax_where(swap, b, a))
    is_far = d.hi < -300
    t, n = _exp_of_eighths_precisely(
        *reduce_to_eighths(pairs.select_pair(is_far, pair_of_number(jnp.full_like(a, -300)), d))
    )
    t_value = pairs.multiply_pair_by_power(t, float32_power_of_two(jnp.maximum(n, -60)))
    is_near = t_value.hi > 0.41
    n = bit_ops.lax_where(is_near, 0, n)
    numerator = pairs.select_pair(is_near, pairs.add_pairs(t_value, pair_of_constant(-1)), t)
    denominator = pairs.fast_add_pairs(pairs.select_pair(is_near, pair_of_constant(3), pair_of_constant(2)), t_value)
    s = pairs.divide_pairs(numerator, denominator)
    z = pairs.square_pair(pairs.multiply_pair_by_power(s, float32_power_of_two(jnp.maximum(n, -60))))
    term = pairs.multiply_pair_by_power(
        pairs.multiply_pairs(s, pairs.polynomial_of_pair(z, constants.arctangent_coefficients(1), 4)), np.float32(2)
    )
    log = pairs.select_pair(is_near, pairs.fast_add_pairs(pair_of_constant(constants.log_of_integer(2)), term), term)
    scale = bit_ops.lax_where(zero, n, jnp.maximum(exponent, n))
    larger = significand * float32_power_of_two(_clamp_difference(exponent, scale, -FIRST_ORDER))
    larger = lax.bitcast_convert_type(lax.bitcast_convert_type(larger, jnp.int32) | sign, jnp.float32)
    log = pairs.multiply_pair_by_power(log, float32_power_of_two(_clamp_difference(n, scale, -FIRST_ORDER)))
    total = pairs.add_pairs(pair_of_number(bit_ops.lax_where(zero, 0.0, larger)), log)
    lows = [v.infinite & v.negative for v in (x, y)]
    number = lax.bitcast_convert_type(bit_ops.lax_where(swap, y.magnitude, x.magnitude) | sign, jnp.float32)
    number = bit_ops.lax_where(zero, 0.0, number)
    cases = ((lows[0] | lows[1], number), (infinite & (sign == 0), _BINARY_INF), (x.nan | y.nan, _BINARY_NAN))
    return FunctionValue(total, scale, cases)


def _power_function(x: Argument, y: Argument) -> FunctionValue:
    """2^(y log2 x).

    log2 x is a number n plus the logarithm of one of 1024 numbers, known to 60 bits, plus log2(1 + t); t is zero for
    operands of 11 bits. Products with halves of y are exact.
    """
    n, log_parts, log_rest = _binary_logarithm(x)
    number = y.clamp(-60, 2.0**40)
    high, low = pairs.split_significand(number)
    estimate = number * (n + (log_parts[0] + log_parts[1])) + number * log_rest.hi
    is_beyond = jnp.abs(estimate) > 300
    eighths = bit_ops.lax_where(is_beyond, jnp.copysign(np.float32(2400), estimate), jnp.round(estimate * 8))
    first = pairs.two_sum(high * n, high * log_parts[0])
    high_sum = pairs.add_pairs(
        pairs.two_sum(first.hi - eighths / 8, low * n), pairs.two_sum(low * log_parts[0], high * log_parts[1])
    )
    low_sum = pairs.add_pairs(pairs.two_sum(first.lo, low * log_parts[1]), pair_of_number(high * log_parts[2]))
    low_sum = FloatPair(low_sum.hi, low_sum.lo + (low * log_parts[2] + number * log_parts[3]))
    rest = pairs.add_pairs(pairs.add_pairs(high_sum, low_sum), pairs.multiply_pair_by_number(log_rest, number))
    rest = pairs.select_pair(is_beyond, pair_of_number(jnp.zeros_like(number)), rest)
    is_tiny = jnp.abs(estimate) < 2.0**FIRST_ORDER
    rest = pairs.select_pair(is_tiny, pair_of_number(jnp.copysign(np.float32(2.0**FIRST_ORDER), estimate)), rest)
    value, exponent = _exp_of_eighths_precisely(
        pairs.multiply_pairs(rest, pair_of_constant(constants.log_of_integer(2))), eighths.astype(jnp.int32)
    )
    return FunctionValue(_drop_tail_if_exact(value, number), exponent, *_power_cases(x, y, number))


def _binary_logarithm(x: Argument) -> tuple[Array, tuple[Array, ...], FloatPair]:
    """log2 |x| as an integer, four numbers, and a pair that is zero if x has no more than 11 bits."""
    bits = lax.bitcast_convert_type(x.significand, jnp.int32)
    nearest_bits = (bits + (1 << 12)) >> 13 << 13
    c = lax.bitcast_convert_type(nearest_bits, jnp.float32)
    index = nearest_bits >> 13 & (constants.LOG_PARTS - 1)
    n = x.exponent + (c == 2).astype(x.exponent.dtype) + (index >= constants.FIRST_LOG_OF_HALF).astype(x.exponent.dtype)
    t = pairs.divide_pairs(pair_of_number(x.significand - c), pair_of_number(c))
    correction = pairs.multiply_pairs(t, pairs.polynomial_of_pair(t, constants.logarithm_series(), 2))
    log_parts = tuple(take_in_bounds(jnp.asarray(word), index) for word in constants.logarithm_table())
    return n.astype(jnp.float32), log_parts, correction


def _drop_tail_if_exact(value: FloatPair, exponent: Array) -> FloatPair:
    """The first number alone, if the second is so small that the power is that number.

    A power of a dyadic number that is not a power of two is dyadic, and has 24 bits at most, only for exponents
    n / 8 <= 15: 3^16 has 26 bits, and so has the number of which 3 is a root of order 16.
    """
    eighths = jnp.round(exponent * 8)
    can_be_exact = (eighths == exponent * 8) & (eighths >= 1) & (eighths <= 120)
    is_close = jnp.abs(value.lo) < np.float32(2.0**-40) * value.hi
    return FloatPair(value.hi, bit_ops.lax_where(can_be_exact & is_close, 0.0, value.lo))


def _power_cases(x: Argument, y: Argument, number: Array) -> tuple[tuple[tuple[Array, float], ...], Array]:
    """The special values, and the sign bits of the results."""
    is_integer = jnp.round(number) == number
    half = np.float32(0.5) * number
    is_odd = is_integer & (jnp.round(half) != half) & ~y.infinite & ~y.exceeds(2.0**24)
    is_one = x.equals(1.0)
    is_below_one = ~x.exceeds(1.0) & ~is_one
    falls = y.negative ^ is_below_one  # x^y is below 1
    flip = bit_ops.lax_where(is_odd & x.negative, x.sign, 0)
    is_extreme = y.infinite | x.zero | x.infinite
    is_nan = x.negative & ~is_integer & ~x.zero & ~x.infinite & ~y.infinite
    cases = (
        (is_one, 1.0),
        (is_nan, _BINARY_NAN),
        (is_extreme & ~is_one & falls, 0.0),
        (is_extreme & ~is_one & ~falls, _BINARY_INF),
        (x.nan | y.nan, _BINARY_NAN),
        (y.zero | (is_one & ~x.negative), 1.0),
    )
    return cases, flip


#: The functions by the names of JAX's primitives, or by their own names if there is no primitive.
BINARY_FUNCTIONS: dict[str, Callable[[Argument, Argument], FunctionValue]] = {
    "hypot": _hypot,
    "atan2": _arctan2,
    "logaddexp": _logaddexp,
    "pow": _power_function,
}
