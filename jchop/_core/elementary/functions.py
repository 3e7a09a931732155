"""The functions: for each a formula in pairs of float32 numbers, and its special cases.

If f(x) is x, or a number of the format, plus a term too small for a float32 number, the argument's exponent is clamped
to a least one (`FIRST_ORDER`, `SECOND_ORDER`). The term is still too small to matter, and keeps its sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import factorial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop import _bits
from jchop._core.elementary import numbers, pairs
from jchop._core.elementary.pairs import Pair, constant, single
from jchop._core.elementary.parts import FIRST_ORDER, SECOND_ORDER, Argument, Value, power_of_two
from jchop._core.rounding.bins import take

Array = jax.Array

#: The least exponent of powers of two in sums: smaller ones have the same effect, and must not become zero.
_TINY = -60
_INF = float("inf")
_NAN = float("nan")
_UNIT = constant(1)


def _nearest_integer(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _power(exponent: Array) -> Array:
    """2^exponent for exponents of at most 0, raised to `_LEAST_TERM_EXPONENT`."""
    return power_of_two(jnp.maximum(exponent, _TINY))


def _parts_of(value: Fraction, *bits: int) -> list[np.float32]:
    """A positive constant below 1 as a sum of numbers, each with the next `bits` binary places, and the rest."""
    parts, place = [], 0
    for count in bits:
        place += count
        part = Fraction(int(value * 2**place), 2**place)
        parts.append(np.float32(part.numerator / part.denominator))
        value -= part
    return [*parts, constant(value).hi]


# -- exponentials ------------------------------------------------------------------------------------------------------

#: For a larger |x|, e^x and 2^x are infinite or zero in every format.
_MOST = 300.0


def eighths(x: Pair) -> tuple[Pair, Array]:
    """The r and n of x = (n / 8) log(2) + r, |r| <= log(2) / 16, for |x| <= 300."""
    unit = numbers.log(2) / 8
    first, second, third = _parts_of(unit, 15, 12)
    n = _nearest_integer(x.hi * constant(1 / unit).hi)
    rest = pairs.exact_sum(x.hi - n * first, -n * second)
    return pairs.ordered_sum(rest.hi, rest.lo + (x.lo - n * third)), n.astype(jnp.int32)


def _power_of_eighths(r: Pair, n: Array) -> tuple[Pair, Array]:
    """e^r 2^(n / 8) as a pair and an exponent, for |r| <= log(2) / 16, to 2^-38.

    With a multiple h of 2^-11 and r = h + d, e^r is 1 + h + h²/2, which is exact, plus d, plus terms below 2^-15.
    """
    h = _nearest_integer(r.hi * np.float32(2.0**11)) * np.float32(2.0**-11)
    d = r.hi - h
    third, fourth, fifth, sixth = (constant(Fraction(1, factorial(k))).hi for k in (3, 4, 5, 6))
    cubic = r.hi * r.hi * r.hi * (third + r.hi * (fourth + r.hi * (fifth + r.hi * sixth)))
    total = pairs.ordered_sum(1 + (h + np.float32(0.5) * (h * h)), d)
    total = pairs.ordered_sum(total.hi, total.lo + (r.lo + (d * (h + np.float32(0.5) * d) + (r.hi * r.lo + cubic))))
    return pairs.multiply(total, eighth_power(n & 7)), n >> 3


def eighth_power(n: Array) -> Pair:
    """2^(n / 8) for n from 0 to 7, by selection, which is faster than a table."""
    powers = [Fraction(1)]
    for _ in range(7):
        powers.append(powers[-1] * _eighth_root_of_two())
    values = [constant(p) for p in powers]
    for bit in (4, 2, 1):
        half, where = len(values) // 2, (n & bit) != 0
        values = [pairs.select(where, high, low) for low, high in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _eighth_root_of_two() -> Fraction:
    return numbers.root(numbers.root(numbers.root(Fraction(2))))


def _reduced(x: Pair) -> tuple[Pair, Array]:
    """The r and n of x = n log(2) + r, |r| <= log(2) / 2, for |x| <= 350; r = x exactly if n = 0."""
    first, second, third = _parts_of(numbers.log(2), 14, 14)
    n = _nearest_integer(x.hi * constant(1 / numbers.log(2)).hi)
    rest = pairs.exact_sum(x.hi - n * first, -n * second)
    return pairs.ordered_sum(rest.hi, rest.lo + (x.lo - n * third)), n.astype(jnp.int32)


def _power_less_one(r: Pair) -> Pair:
    """e^r - 1, |r| <= log(2) / 2."""
    return pairs.multiply(r, pairs.polynomial(r, numbers.exponential(), 5))


def _power_of_e(x: Pair) -> tuple[Pair, Array]:
    """e^x as a pair and an exponent, for |x| <= 300."""
    return _power_of_eighths(*eighths(x))


def _size(x: Argument, least: int, most: float) -> tuple[Array, Array]:
    size, shift = x.size(least, 30)
    return jnp.minimum(size, most), shift


def _exp(x: Argument) -> Value:
    return Value(*_power_of_e(single(x.clamp(FIRST_ORDER, _MOST))), _of_exponential(x))


def _of_exponential(x: Argument) -> tuple[tuple[Array, float], ...]:
    return ((x.zero, 1.0), (x.infinite, _INF), (x.infinite & x.negative, 0.0))


def _exp2(x: Argument) -> Value:
    number = x.clamp(FIRST_ORDER, _MOST)
    n = _nearest_integer(number * 8)
    r = pairs.times(constant(numbers.log(2)), number - n / 8)
    return Value(*_power_of_eighths(r, n.astype(jnp.int32)), _of_exponential(x))


def _expm1(x: Argument) -> Value:
    size, shift = _size(x, FIRST_ORDER, _MOST)
    number = x.signed(size)
    r, n = _reduced(single(number))
    up = jnp.maximum(n, 0)
    part = pairs.times_power(_power_less_one(r), _power(n - up))
    whole = pairs.exact_sum(_power(n - up), -_power(-up))
    cases = ((x.zero, x.signed(jnp.zeros_like(number))), (x.infinite, _INF), (x.infinite & x.negative, -1.0))
    return Value(pairs.add(whole, part), up + shift, cases)


def _logistic(x: Argument) -> Value:
    """1 / (1 + t) with t = e^-|x|; for negative x, t / (1 + t)."""
    size = jnp.abs(x.clamp(FIRST_ORDER, _MOST))
    t, n = _power_of_e(single(-size))
    below = pairs.add_ordered(_UNIT, pairs.times_power(t, _power(n)))
    top = pairs.select(x.negative, t, single(jnp.ones_like(size)))
    cases = ((x.infinite, 1.0), (x.infinite & x.negative, 0.0))
    return Value(pairs.divide(top, below), _bits.where(x.negative, n, 0), ((x.zero, 0.5), *cases))


def _hyperbolic(size: Array) -> tuple[Pair, Pair, Array]:
    """sinh(x) / 2^n, cosh(x) / 2^n and n, for x >= 0.

    With e^x = 2^n (C + S) and w = 2^-2n they are (S (1 + w) + C (1 - w)) / 2 and (C (1 + w) + S (1 - w)) / 2.
    """
    r, n = _reduced(single(size))
    z = pairs.square(r)
    s = pairs.multiply(r, pairs.polynomial(z, numbers.hyperbolic_sine(), 3))
    c = pairs.add_ordered(_UNIT, pairs.multiply(z, pairs.polynomial(z, numbers.hyperbolic_cosine(), 3)))
    w = _power(-2 * n)
    more = pairs.times_power(pairs.ordered_sum(np.float32(1), w), np.float32(0.5))
    less = pairs.times_power(pairs.ordered_sum(np.float32(1), -w), np.float32(0.5))
    sine = pairs.add(pairs.multiply(s, more), pairs.multiply(c, less))
    cosine = pairs.add(pairs.multiply(c, more), pairs.multiply(s, less))
    return sine, cosine, n


def _sinh(x: Argument) -> Value:
    size, shift = _size(x, SECOND_ORDER, _MOST)
    sine, _, n = _hyperbolic(size)
    return Value(sine, n + shift, ((x.zero, 0.0), (x.infinite, _INF)), x.sign)


def _cosh(x: Argument) -> Value:
    size, _ = _size(x, SECOND_ORDER, _MOST)
    _, cosine, n = _hyperbolic(size)
    return Value(cosine, n, ((x.zero, 1.0), (x.infinite, _INF)))


def _tanh(x: Argument) -> Value:
    """Taylor's series, or (1 - t) / (1 + t) with t = e^-2|x|."""
    size, shift = _size(x, SECOND_ORDER, 60.0)
    series = pairs.times(pairs.polynomial(pairs.product(size, size), numbers.hyperbolic_tangent(), 2), size)
    t, n = _power_of_e(single(-2 * size))
    t = pairs.times_power(t, _power(n))
    quotient = pairs.divide(pairs.add_ordered(_UNIT, pairs.negative(t)), pairs.add_ordered(_UNIT, t))
    value = pairs.select(size < 0.125, series, quotient)
    return Value(value, shift, ((x.zero, 0.0), (x.infinite, 1.0)), x.sign)


# -- logarithms --------------------------------------------------------------------------------------------------------


def _times_log2(n: Array, base: int) -> Pair:
    """The product of n and log(2), for integers |n| < 2^8 as float32."""
    if base == 2:
        return single(n)
    first, second, third = _parts_of(_log_of_2(base), 16, 16)
    total = pairs.exact_sum(n * first, n * second)
    return pairs.ordered_sum(total.hi, total.lo + n * third)


def _log_of_2(base: int) -> Fraction:
    return numbers.log(2) / numbers.log(base) if base else numbers.log(2)


def _normalised(number: Pair) -> tuple[Pair, Array]:
    """A positive pair as a pair in [√½, √2] and the exponent of a power of two."""
    bits = lax.bitcast_convert_type(number.hi, jnp.int32)
    root = int(np.float32(np.sqrt(0.5)).view(np.int32))
    n = (bits - root) >> 23
    return pairs.times_power(number, power_of_two(-n)), n


def _quotient(m: Pair) -> Pair:
    """The s = (m - 1) / (m + 1) for which log(m) = 2 artanh(s)."""
    near = pairs.exact_sum(m.hi - 1, m.lo)
    above = pairs.exact_sum(m.hi, np.float32(1))
    return pairs.divide(near, pairs.ordered_sum(above.hi, above.lo + m.lo))


def arctangent_series(s: Pair, sign: int) -> Pair:
    """arctan(s) for |s| <= 1/4; for sign 1, artanh(s) for |s| <= 0.172."""
    return pairs.multiply(s, pairs.polynomial(pairs.square(s), numbers.arctangent(sign), 3))


def _sum_of_logs(s: Pair, n: Array, base: int = 0) -> Pair:
    """log(m 2^n), from s."""
    part = arctangent_series(s, 1)
    factor = 2 if not base else 2 / numbers.log(base)
    part = pairs.times_power(part, np.float32(2)) if not base else pairs.multiply(part, constant(factor))
    return pairs.add(_times_log2(n.astype(jnp.float32), base), part)


def _of_logarithm(x: Argument) -> tuple[tuple[Array, float], ...]:
    return ((x.infinite, _INF), (x.negative, _NAN), (x.zero, -_INF))


def _logarithm(base: int) -> Callable[[Argument], Value]:
    def log(x: Argument) -> Value:
        m, n = _normalised(single(x.significand))
        total = _sum_of_logs(_quotient(m), n + x.exponent, base)
        if base == 10:  # powers of ten that float32 holds: no other number has a logarithm so close
            near = _nearest_integer(total.hi)
            is_power_of_ten = (near >= 0) & (near <= 10) & (jnp.abs((total.hi - near) + total.lo) < 2.0**-28)
            total = pairs.select(is_power_of_ten, single(near), total)
        return Value(total, 0, ((total.hi == 0, 0.0), *_of_logarithm(x)))

    return log


#: Above 2^_LARGE, √(x² ± 1) is x. Above the square of this bound, 1 + x is x.
_LARGE = 30


def _log1p(x: Argument) -> Value:
    size, shift = x.size(FIRST_ORDER, 2 * _LARGE)
    m, n = _normalised(pairs.exact_sum(x.signed(size), np.float32(1)))
    beyond = x.negative & x.exceeds(1.0)
    cases = ((x.zero, x.signed(jnp.zeros_like(size))), (x.infinite, _INF), (beyond, _NAN))
    minus_one = x.negative & x.equals(1.0)
    m = pairs.select(beyond | minus_one, single(jnp.ones_like(size)), m)
    n = n + jnp.maximum(x.exponent - 2 * _LARGE, 0)
    return Value(_sum_of_logs(_quotient(m), n), shift, (*cases, (minus_one, -_INF)))


def _arcsinh(x: Argument) -> Value:
    """artanh(x / √(1 + x²)), or log(x + √(1 + x²))."""
    size, shift = x.size(SECOND_ORDER, _LARGE)
    root = pairs.root(pairs.add(pairs.product(size, size), _UNIT))
    m, n = _normalised(pairs.add_ordered(root, single(size)))
    n = n + jnp.maximum(x.exponent - _LARGE, 0)
    small = size < 0.17
    s = pairs.select(small, pairs.divide(single(size), root), _quotient(m))
    total = pairs.times_power(_sum_of_logs(s, _bits.where(small, 0, n)), np.float32(0.5))
    cases = ((x.zero, 0.0), (x.infinite, _INF))
    return Value(total, shift + (~small).astype(shift.dtype), cases, x.sign)


def _arccosh(x: Argument) -> Value:
    """log(1 + t) with t = d + √(d (2 + d)), d = x - 1."""
    size, _ = x.size(0, _LARGE)
    size = jnp.maximum(size, np.float32(1 + 2.0**-23))
    below, above = pairs.exact_sum(size, np.float32(-1)), pairs.exact_sum(size, np.float32(1))
    root = pairs.root(pairs.multiply(below, above))
    t = pairs.add(root, below)
    m, n = _normalised(pairs.add(root, single(size)))
    small = size < 1.05
    s = pairs.select(small, pairs.divide(t, pairs.add(t, constant(2))), _quotient(m))
    n = _bits.where(small, 0, n + jnp.maximum(x.exponent - _LARGE, 0))
    one = x.equals(1.0) & ~x.negative
    outside = x.negative | ~x.exceeds(1.0)
    return Value(_sum_of_logs(s, n), 0, ((x.infinite, _INF), (outside, _NAN), (one, 0.0)))


def _arctanh(x: Argument) -> Value:
    """artanh(x), or log((1 + x) / (1 - x)) / 2."""
    size, shift = x.size(SECOND_ORDER, -1)
    ratio = pairs.divide(pairs.exact_sum(size, np.float32(1)), pairs.exact_sum(-size, np.float32(1)))
    m, n = _normalised(ratio)
    small = size < 0.17
    s = pairs.select(small, single(size), _quotient(m))
    total = pairs.times_power(_sum_of_logs(s, _bits.where(small, 0, n)), np.float32(0.5))
    return Value(total, shift, ((x.zero, 0.0), (x.exceeds(1.0), _NAN), (x.equals(1.0), _INF)), x.sign)


# -- circular functions ------------------------------------------------------------------------------------------------


def _quarters(x: Argument) -> tuple[Pair, Array]:
    """The r and q of |x| = q π/2 + r modulo 2 π, |r| <= π/4, for |x| >= 1/2.

    As in Payne and Hanek (SIGNUM Newsletter 18 (1983) 19): the fraction of 2^k / (2 π), times the significand as an
    integer, in 96 bits.
    """
    place = _bits.clip(x.exponent - 23, numbers.LEAST_PLACE, numbers.MOST_PLACE) - numbers.LEAST_PLACE
    first, second, third = (take(jnp.asarray(word), place) for word in numbers.turns())
    count = (x.significand * 2.0**23).astype(jnp.uint32)
    (high, low), (lower, lowest) = _long_product(second, count), _long_product(third, count)
    middle = low + lower
    top = first * count + high + (middle < low).astype(jnp.uint32)
    quarter = (top + np.uint32(1 << 29)) >> 30
    top = (top << 2 | middle >> 30).astype(jnp.int32)  # a signed fraction of a quarter turn
    middle = middle << 2 | lowest >> 30
    words = (top >> 16, top & 0xFFFF, middle >> 16, middle & 0xFFFF, lowest >> 14 & 0xFFFF)
    a, b, c, d, e = (
        word.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0 ** (-16 * (i + 1))) for i, word in enumerate(words)
    )
    rest = pairs.ordered_sum(a, b)
    rest = pairs.add(rest, pairs.ordered_sum(c, d + e))
    return pairs.multiply(rest, constant(numbers.pi() / 2)), (quarter & 3).astype(jnp.int32)


def _long_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The words of the product of a word and a word of 24 bits."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = (a0 * b0 >> 16) + (a1 * b0 & 0xFFFF) + a0 * b1  # the last one below 2^24
    return a1 * b1 + (a1 * b0 >> 16) + (middle >> 16), a * b


def _turned(x: Argument) -> tuple[Pair, Array, Array, Array]:
    """The r and q of an argument, the change of its exponent if it was clamped, and whether it is infinite."""
    size, shift = x.size(SECOND_ORDER, 0)
    r, q = _quarters(x)
    small = ~x.exceeds(0.75)
    return pairs.select(small, single(size), r), _bits.where(small, 0, q), shift, x.infinite


def _circular(r: Pair, cosine: Array | bool) -> Pair:
    """sin(r), or cos(r) if `cosine`."""
    z = pairs.square(r)
    both = zip(numbers.cosine(), numbers.sine(), strict=True)
    if isinstance(cosine, bool):
        terms = numbers.cosine() if cosine else numbers.sine()
    else:
        terms = tuple(pairs.select(cosine, a, b) for a, b in both)
    series = pairs.polynomial(z, terms, 4)
    if cosine is True:
        return series
    sine = pairs.multiply(r, series)
    return sine if cosine is False else pairs.select(cosine, series, sine)


def _sign_if(condition: Array) -> Array:
    return _bits.where(condition, np.int32(-(2**31)), np.int32(0))


def _sin(x: Argument) -> Value:
    r, q, shift, infinite = _turned(x)
    value = _circular(r, (q & 1) != 0)
    return Value(value, shift, ((x.zero, 0.0), (infinite, _NAN)), x.sign ^ _sign_if(q >= 2))


def _cos(x: Argument) -> Value:
    r, q, _, infinite = _turned(x)
    value = _circular(r, (q & 1) == 0)
    return Value(value, 0, ((x.zero, 1.0), (infinite, _NAN)), _sign_if((q == 1) | (q == 2)))


def _tan(x: Argument) -> Value:
    r, q, shift, infinite = _turned(x)
    sine, cosine = _circular(r, False), _circular(r, True)
    inverse = (q & 1) != 0
    negative = sine.hi < 0
    sine = pairs.select(negative, pairs.negative(sine), sine)
    value = pairs.divide(pairs.select(inverse, cosine, sine), pairs.select(inverse, sine, cosine))
    return Value(value, shift, ((x.zero, 0.0), (infinite, _NAN)), x.sign ^ _sign_if(negative ^ inverse))


def angle_of(
    y: Pair, x: Pair, negative_x: Array | None = None, divide: Callable[[Pair, Pair], Pair] = pairs.divide
) -> Pair:
    """The angle in [0, π/2] of a point with nonnegative coordinates: arctan(c) + arctan(t).

    t = (y - c x) / (x + c y), or t = -x / y for c = ∞. If `negative_x`, the result is π minus the angle.
    """
    steep, unit = y.hi > 4 * x.hi, np.float32(1)
    flat, half, even = (y.hi < limit * x.hi for limit in (0.25, 0.75, 1.4))
    c = _bits.where(flat, 0 * unit, _bits.where(half, unit / 2, _bits.where(even, unit, 2 * unit)))
    none = single(jnp.zeros_like(c))
    above = pairs.add(pairs.select(steep, none, y), pairs.times_power(x, -_bits.where(steep, unit, c)))
    below = pairs.add(pairs.select(steep, y, x), pairs.times_power(y, _bits.where(steep, 0 * unit, c)))
    half_angle, right = numbers.arctangent_of(2), numbers.pi() / 2
    angles = ((even, right / 2), (half, half_angle), (flat, Fraction(0)), (steep, right))
    t = divide(above, below)
    start = _of_cases(right - half_angle, angles)
    if negative_x is not None:
        start = pairs.select(
            negative_x, _of_cases(right + half_angle, [(at, 2 * right - v) for at, v in angles]), start
        )
        t = pairs.times_power(t, _bits.where(negative_x, -unit, unit))
    return pairs.add(start, arctangent_series(t, -1))


def _of_cases(default: Fraction, cases: Sequence[tuple[Array, Fraction]]) -> Pair:
    """The constant of the last case that holds."""
    value = constant(default)
    for where, number in cases:
        value = pairs.select(where, constant(number), value)
    return value


def _arctan(x: Argument) -> Value:
    size, shift = x.size(SECOND_ORDER, 60)
    value = angle_of(single(size), single(jnp.ones_like(size)))
    return Value(value, shift, ((x.zero, 0.0),), x.sign)


def _cofactor(size: Array) -> Pair:
    """√(1 - x²) for 0 <= x < 1; for other x, an unused number.

    For small x it uses 1 - x², because a product of pairs lacks the product of their second numbers.
    """
    size = jnp.minimum(size, np.float32(1 - 2.0**-24))
    small = pairs.add(pairs.product(-size, size), _UNIT)
    large = pairs.multiply(pairs.exact_sum(size, np.float32(1)), pairs.exact_sum(-size, np.float32(1)))
    return pairs.root(pairs.select(size < 0.5, small, large))


def _arcsin(x: Argument) -> Value:
    size, shift = x.size(SECOND_ORDER, 0)
    one = x.equals(1.0)
    cofactor = pairs.select(one, single(jnp.zeros_like(size)), _cofactor(size))
    value = angle_of(single(size), cofactor)
    return Value(value, shift, ((x.zero, 0.0), (x.exceeds(1.0), _NAN)), x.sign)


def _arccos(x: Argument) -> Value:
    size, _ = x.size(FIRST_ORDER, 0)
    one = x.equals(1.0)
    cofactor = pairs.select(one, single(jnp.zeros_like(size)), _cofactor(size))
    value = angle_of(cofactor, single(size), x.negative)
    return Value(value, 0, ((one & ~x.negative, 0.0), (x.exceeds(1.0), _NAN)))


# -- the error function ------------------------------------------------------------------------------------------------

#: For a larger x, erfc(x) is below half of the least value of every format.
_MOST_ERROR = 11.0


def _error(size: Array) -> tuple[Pair, Pair, Array, Array]:
    """erf(x) for 0 <= x < 1; the h and n of erfc(x) = h 2^n for x >= 1; and whether x >= 1."""
    inside = pairs.multiply(single(size), pairs.polynomial(pairs.product(size, size), numbers.error(), 9))
    large = jnp.maximum(size, np.float32(1))
    bits = lax.bitcast_convert_type(large, jnp.int32)
    index = (bits >> 21) - (127 << 2)
    middle = lax.bitcast_convert_type(bits & ~((1 << 21) - 1) | 1 << 20, jnp.float32)
    table = numbers.scaled_error()

    def word(of: Any) -> Array:
        return take(jnp.asarray(of), jnp.minimum(index, len(of) - 1))

    terms = tuple(Pair(word(c.hi), word(c.lo) if n < 8 else None) for n, c in enumerate(table))
    scaled_erfc = pairs.polynomial(single(large - middle), terms, 8)
    power, n = _power_of_e(pairs.negative(pairs.product(large, large)))
    return inside, pairs.multiply(scaled_erfc, power), n, size >= 1


def _erf(x: Argument) -> Value:
    size, shift = _size(x, SECOND_ORDER, _MOST_ERROR)
    inside, outside, n, large = _error(size)
    rest = pairs.times_power(outside, -_power(n))
    value = pairs.select(large, pairs.add_ordered(_UNIT, rest), inside)
    return Value(value, shift, ((x.zero, 0.0), (x.infinite, 1.0)), x.sign)


def _erfc(x: Argument) -> Value:
    size, _ = _size(x, FIRST_ORDER, _MOST_ERROR)
    inside, outside, n, large = _error(size)
    inside = pairs.add_ordered(_UNIT, pairs.select(x.negative, inside, pairs.negative(inside)))
    reflection = pairs.add_ordered(constant(2), pairs.times_power(outside, -_power(n)))
    value = pairs.select(large, pairs.select(x.negative, reflection, outside), inside)
    cases = ((x.zero, 1.0), (x.infinite, 0.0), (x.infinite & x.negative, 2.0))
    return Value(value, _bits.where(large & ~x.negative, n, 0), cases)


# -- roots and multiples -----------------------------------------------------------------------------------------------


def _cbrt(x: Argument) -> Value:
    third = (x.exponent + 300) // 3 - 100
    number = x.significand * power_of_two(x.exponent - 3 * third)
    guess = pairs.settled(lax.cbrt(number), number)
    guess = pairs.ordered_sum(guess, _cube_error(guess, number)).hi
    value = Pair(guess, _cube_error(guess, number))
    return Value(value, third, ((x.zero, 0.0), (x.infinite, _INF)), x.sign)


def _cube_error(guess: Array, number: Array) -> Array:
    cube = pairs.times(pairs.product(guess, guess), guess)
    return ((number - cube.hi) - cube.lo) / (3 * (guess * guess))


def _rsqrt(x: Argument) -> Value:
    odd = x.exponent & 1
    number = x.significand * power_of_two(odd)
    guess = pairs.settled(lax.rsqrt(number), number)
    guess = pairs.ordered_sum(guess, _inverse_root_error(guess, number)).hi
    value = Pair(guess, _inverse_root_error(guess, number))
    signed_infinity = x.signed(jnp.full_like(number, _INF))
    cases = ((x.infinite, 0.0), (x.negative, _NAN), (x.zero, signed_infinity))
    return Value(value, (odd - x.exponent) >> 1, cases)


def _inverse_root_error(guess: Array, number: Array) -> Array:
    near = pairs.times(pairs.product(guess, guess), number)
    return ((1 - near.hi) - near.lo) * (0.5 * guess)


def _multiple(factor: Callable[[], Fraction]) -> Callable[[Argument], Value]:
    def multiple(x: Argument) -> Value:
        value = pairs.times(constant(factor()), x.significand)
        return Value(value, x.exponent, ((x.zero, 0.0), (x.infinite, _INF)), x.sign)

    return multiple


#: The functions by the names of JAX's primitives, or by their own names if there is no primitive.
FUNCTIONS: dict[str, Callable[[Argument], Value]] = {
    "exp": _exp,
    "exp2": _exp2,
    "expm1": _expm1,
    "logistic": _logistic,
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": _tanh,
    "log": _logarithm(0),
    "log2": _logarithm(2),
    "log10": _logarithm(10),
    "log1p": _log1p,
    "asinh": _arcsinh,
    "acosh": _arccosh,
    "atanh": _arctanh,
    "sin": _sin,
    "cos": _cos,
    "tan": _tan,
    "asin": _arcsin,
    "acos": _arccos,
    "atan": _arctan,
    "erf": _erf,
    "erfc": _erfc,
    "cbrt": _cbrt,
    "rsqrt": _rsqrt,
    "degrees": _multiple(lambda: 180 / numbers.pi()),
    "radians": _multiple(lambda: numbers.pi() / 180),
}
