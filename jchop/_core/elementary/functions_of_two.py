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

from jchop import _bits
from jchop._core.elementary import numbers, pairs
from jchop._core.elementary.functions import angle_of, eighth_power, eighths
from jchop._core.elementary.pairs import Pair, constant, single
from jchop._core.elementary.parts import FIRST_ORDER, SECOND_ORDER, Argument, Value, power_of_two
from jchop._core.rounding.bins import take

Array = jax.Array

_INF = float("inf")
_NAN = float("nan")
_UNIT = constant(1)


def _difference(a: Array, b: Array, limit: int) -> Array:
    """A - b, at least -`limit` and at most `limit`."""
    return _bits.clip(a - b, -limit, limit)


# -- the root of a sum of squares --------------------------------------------------------------------------------------


def _hypot(x: Argument, y: Argument) -> Value:
    """The root of a sum of squares. For operands of 12 bits the sum is exact, and so is the side of the root.

    If the exponents differ by more than 30, the smaller operand only tells that the result is above the larger one.
    """
    swap = x.magnitude < y.magnitude
    exponent, least = _bits.where(swap, y.exponent, x.exponent), _bits.where(swap, x.exponent, y.exponent)
    a, b = _bits.where(swap, y.significand, x.significand), _bits.where(swap, x.significand, y.significand)
    b = b * power_of_two(_difference(least, exponent, -SECOND_ORDER))
    b = _bits.where(x.zero | y.zero, 0.0, b)
    value = pairs.root(pairs.add(pairs.product(a, a), pairs.product(b, b)))
    cases = ((x.zero & y.zero, 0.0), (x.nan | y.nan, _NAN), (x.infinite | y.infinite, _INF))
    return Value(value, exponent, cases)


# -- the angle of a point ----------------------------------------------------------------------------------------------


def _arctan2(y: Argument, x: Argument) -> Value:
    """The angle of (x, y). Infinite coordinates are those of a point of the same angle."""
    both = x.infinite & y.infinite
    flat = y.zero | (x.infinite & ~both)
    steep = (x.zero & ~y.zero) | (y.infinite & ~both)
    negative_x = x.negative
    difference = y.exponent - x.exponent
    gap = _bits.clip(difference, _bits.where(negative_x, FIRST_ORDER, SECOND_ORDER), -FIRST_ORDER)
    shift = _bits.where(negative_x, 0, jnp.minimum(difference - gap, 0))
    above = _bits.where(both, 1.0, y.significand * power_of_two(jnp.maximum(gap, -60)))
    above, shift = _bits.where(flat, 0.0, _bits.where(steep, 1.0, above)), _bits.where(steep | both, 0, shift)
    below = _bits.where(steep, 0.0, _bits.where(both | flat, 1.0, x.significand))
    value = angle_of(single(above), single(below), negative_x, pairs.divide_exactly)
    return Value(value, shift, ((flat & ~negative_x, 0.0), (x.nan | y.nan, _NAN)), y.sign)


# -- exponentials and logarithms ---------------------------------------------------------------------------------------


def _power_of_eighths(r: Pair, n: Array) -> tuple[Pair, Array]:
    """e^r 2^(n / 8) as a pair and an exponent, for |r| <= log(2) / 16, to 2^-45."""
    part = pairs.multiply(r, pairs.polynomial(r, numbers.exponential()[:9], 4))
    return pairs.multiply(pairs.add_ordered(_UNIT, part), eighth_power(n & 7)), n >> 3


def _logaddexp(x: Argument, y: Argument) -> Value:
    """M + log(1 + t) with the larger operand m and t = e^-|x - y|.

    log(1 + t) is 2 artanh(t / (2 + t)), or log(2) + 2 artanh((t - 1) / (t + 3)) for t near 1.
    """
    x_order, y_order = (_bits.where(v.negative, -v.magnitude, v.magnitude) for v in (x, y))
    swap = x_order < y_order
    sign, exponent, significand, zero, infinite = (
        _bits.where(swap, b, a)
        for a, b in (
            (x.sign, y.sign),
            (x.exponent, y.exponent),
            (x.significand, y.significand),
            (x.zero, y.zero),
            (x.infinite, y.infinite),
        )
    )
    a, b = (v.clamp(-100, 2.0**100) for v in (x, y))
    d = pairs.exact_sum(_bits.where(swap, a, b), -_bits.where(swap, b, a))
    far = d.hi < -300
    t, n = _power_of_eighths(*eighths(pairs.select(far, single(jnp.full_like(a, -300)), d)))
    whole = pairs.times_power(t, power_of_two(jnp.maximum(n, -60)))
    near = whole.hi > 0.41
    n = _bits.where(near, 0, n)
    top = pairs.select(near, pairs.add(whole, constant(-1)), t)
    below = pairs.add_ordered(pairs.select(near, constant(3), constant(2)), whole)
    s = pairs.divide(top, below)
    z = pairs.square(pairs.times_power(s, power_of_two(jnp.maximum(n, -60))))
    part = pairs.times_power(pairs.multiply(s, pairs.polynomial(z, numbers.arctangent(1), 4)), np.float32(2))
    log = pairs.select(near, pairs.add_ordered(constant(numbers.log(2)), part), part)
    scale = _bits.where(zero, n, jnp.maximum(exponent, n))
    larger = significand * power_of_two(_difference(exponent, scale, -FIRST_ORDER))
    larger = lax.bitcast_convert_type(lax.bitcast_convert_type(larger, jnp.int32) | sign, jnp.float32)
    log = pairs.times_power(log, power_of_two(_difference(n, scale, -FIRST_ORDER)))
    total = pairs.add(single(_bits.where(zero, 0.0, larger)), log)
    minus = [v.infinite & v.negative for v in (x, y)]
    number = lax.bitcast_convert_type(_bits.where(swap, y.magnitude, x.magnitude) | sign, jnp.float32)
    number = _bits.where(zero, 0.0, number)
    cases = ((minus[0] | minus[1], number), (infinite & (sign == 0), _INF), (x.nan | y.nan, _NAN))
    return Value(total, scale, cases)


def _power(x: Argument, y: Argument) -> Value:
    """2^(y log2 x).

    log2 x is a number n plus the logarithm of one of 1024 numbers, known to 60 bits, plus log2(1 + t); t is zero for
    operands of 11 bits. Products with halves of y are exact.
    """
    n, parts, more = _binary_logarithm(x)
    number = y.clamp(-60, 2.0**40)
    high, low = pairs.halves(number)
    about = number * (n + (parts[0] + parts[1])) + number * more.hi
    beyond = jnp.abs(about) > 300
    eighth = _bits.where(beyond, jnp.copysign(np.float32(2400), about), jnp.round(about * 8))
    first = pairs.exact_sum(high * n, high * parts[0])
    large = pairs.add(pairs.exact_sum(first.hi - eighth / 8, low * n), pairs.exact_sum(low * parts[0], high * parts[1]))
    small = pairs.add(pairs.exact_sum(first.lo, low * parts[1]), single(high * parts[2]))
    small = Pair(small.hi, small.lo + (low * parts[2] + number * parts[3]))
    rest = pairs.add(pairs.add(large, small), pairs.times(more, number))
    rest = pairs.select(beyond, single(jnp.zeros_like(number)), rest)
    least = jnp.abs(about) < 2.0**FIRST_ORDER
    rest = pairs.select(least, single(jnp.copysign(np.float32(2.0**FIRST_ORDER), about)), rest)
    value, exponent = _power_of_eighths(pairs.multiply(rest, constant(numbers.log(2))), eighth.astype(jnp.int32))
    return Value(_exact_if_close(value, number), exponent, *_of_power(x, y, number))


def _binary_logarithm(x: Argument) -> tuple[Array, tuple[Array, ...], Pair]:
    """log2 |x| as an integer, four numbers, and a pair that is zero if x has no more than 11 bits."""
    bits = lax.bitcast_convert_type(x.significand, jnp.int32)
    near = (bits + (1 << 12)) >> 13 << 13
    c = lax.bitcast_convert_type(near, jnp.float32)
    i = near >> 13 & (numbers.LOG_PARTS - 1)
    n = x.exponent + (c == 2).astype(x.exponent.dtype) + (i >= numbers.LOG_HALVED).astype(x.exponent.dtype)
    t = pairs.divide(single(x.significand - c), single(c))
    more = pairs.multiply(t, pairs.polynomial(t, numbers.logarithm(), 2))
    words = tuple(take(jnp.asarray(word), i) for word in numbers.logarithms())
    return n.astype(jnp.float32), words, more


def _exact_if_close(value: Pair, exponent: Array) -> Pair:
    """The first number alone, if the second is so small that the power is that number.

    A power of a dyadic number that is not a power of two is dyadic, and has 24 bits at most, only for exponents
    n / 8 <= 15: 3^16 has 26 bits, and so has the number of which 3 is a root of order 16.
    """
    eighth = jnp.round(exponent * 8)
    able = (eighth == exponent * 8) & (eighth >= 1) & (eighth <= 120)
    close = jnp.abs(value.lo) < np.float32(2.0**-40) * value.hi
    return Pair(value.hi, _bits.where(able & close, 0.0, value.lo))


def _of_power(x: Argument, y: Argument, number: Array) -> tuple[tuple[tuple[Array, float], ...], Array]:
    """The special values, and the sign bits of the results."""
    whole = jnp.round(number) == number
    half = np.float32(0.5) * number
    odd = whole & (jnp.round(half) != half) & ~y.infinite & ~y.exceeds(2.0**24)
    one = x.equals(1.0)
    small = ~x.exceeds(1.0) & ~one
    falls = y.negative ^ small  # x^y is below 1
    flip = _bits.where(odd & x.negative, x.sign, 0)
    ends = y.infinite | x.zero | x.infinite
    nan = x.negative & ~whole & ~x.zero & ~x.infinite & ~y.infinite
    cases = (
        (one, 1.0),
        (nan, _NAN),
        (ends & ~one & falls, 0.0),
        (ends & ~one & ~falls, _INF),
        (x.nan | y.nan, _NAN),
        (y.zero | (one & ~x.negative), 1.0),
    )
    return cases, flip


#: The functions by the names of JAX's primitives, or by their own names if there is no primitive.
FUNCTIONS_OF_TWO: dict[str, Callable[[Argument, Argument], Value]] = {
    "hypot": _hypot,
    "atan2": _arctan2,
    "logaddexp": _logaddexp,
    "pow": _power,
}
