"""Functions whose exact value is rounded once: for each a formula in pairs of float32 numbers, and its special cases.

f(x) may be x, or a number of the format, plus a term too small for float32. Then the argument's exponent is clamped
to a least one (`FIRST_ORDER`, `SECOND_ORDER`). The term is still too small to matter, and keeps its sign.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import factorial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT32, join_sign, lax_clip, lax_where
from jchop._core.arithmetic import float64
from jchop._core.arithmetic.double_word import full_word_product
from jchop._core.arithmetic.exact import has_spare_bits, round_exact
from jchop._core.elementary import constants, pairs
from jchop._core.elementary.pairs import (
    FIRST_ORDER,
    SECOND_ORDER,
    Argument,
    FloatPair,
    FunctionValue,
    exact_of_value,
    float32_power_of_two,
    pair_of_constant,
    pair_of_number,
    round_value_to_odd,
    select_argument,
    split_argument,
)
from jchop._core.rounding.codebooks import take_in_bounds
from jchop._core.rounding.codes import bits_to_float, float_to_bits
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import carrier_holds
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat

#: The least exponent of powers of two in sums: smaller ones have the same effect, and must not become zero.
_LEAST_TERM_EXPONENT = -60
_INF = float("inf")
_NAN = float("nan")
_ONE = pair_of_constant(1)


def _nearest_integer_of(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _power_of_small_term(exponent: Array) -> Array:
    """2^exponent for exponents of at most 0, raised to `_LEAST_TERM_EXPONENT`."""
    return float32_power_of_two(jnp.maximum(exponent, _LEAST_TERM_EXPONENT))


def _split_constant(value: Fraction, *bits: int) -> list[np.float32]:
    """A positive constant below 1 as a sum of numbers, each with the next `bits` binary places, and the rest."""
    parts, total_bits = [], 0
    for count in bits:
        total_bits += count
        part = Fraction(int(value * 2**total_bits), 2**total_bits)
        parts.append(np.float32(part.numerator / part.denominator))
        value -= part
    return [*parts, pair_of_constant(value).hi]


# -- exponentials ------------------------------------------------------------------------------------------------------

#: For a larger |x|, e^x and 2^x are infinite or zero in every format.
_MOST_EXPONENTIAL = 300.0


def reduce_to_eighths(x: FloatPair) -> tuple[FloatPair, Array]:
    """The r and n of x = (n / 8) log(2) + r, |r| <= log(2) / 16, for |x| <= 300."""
    return _reduce_by_unit(x, constants.log_of_integer(2) / 8, 15, 12)


def _reduce_by_unit(x: FloatPair, unit: Fraction, *bits: int) -> tuple[FloatPair, Array]:
    """The r and n of x = n unit + r, |r| <= unit / 2, by products of n with the first `bits` of the unit."""
    first, second, third = _split_constant(unit, *bits)
    n = _nearest_integer_of(x.hi * pair_of_constant(1 / unit).hi)
    remainder = pairs.two_sum(x.hi - n * first, -n * second)
    return pairs.fast_two_sum(remainder.hi, remainder.lo + (x.lo - n * third)), n.astype(jnp.int32)


def _exp_of_eighths(r: FloatPair, n: Array) -> tuple[FloatPair, Array]:
    """e^r 2^(n / 8) as a pair and an exponent, for |r| <= log(2) / 16, to 2^-38.

    With a multiple h of 2^-11 and r = h + d, e^r is 1 + h + h²/2, which is exact, plus d, plus terms below 2^-15.
    """
    h = _nearest_integer_of(r.hi * np.float32(2.0**11)) * np.float32(2.0**-11)
    d = r.hi - h
    third, fourth, fifth, sixth = (pair_of_constant(Fraction(1, factorial(k))).hi for k in (3, 4, 5, 6))
    cubic = r.hi * r.hi * r.hi * (third + r.hi * (fourth + r.hi * (fifth + r.hi * sixth)))
    total = pairs.fast_two_sum(1 + (h + np.float32(0.5) * (h * h)), d)
    total = pairs.fast_two_sum(total.hi, total.lo + (r.lo + (d * (h + np.float32(0.5) * d) + (r.hi * r.lo + cubic))))
    return total * two_to_eighths(n & 7), n >> 3


def two_to_eighths(n: Array) -> FloatPair:
    """2^(n / 8) for n from 0 to 7, by selection, which is faster than a table."""
    root = constants.root_of_fraction
    powers, eighth_root = [Fraction(1)], root(root(root(Fraction(2))))
    for _ in range(7):
        powers.append(powers[-1] * eighth_root)
    values = [pair_of_constant(p) for p in powers]
    for bit in (4, 2, 1):
        half, where = len(values) // 2, (n & bit) != 0
        values = [pairs.select_pair(where, high, low) for low, high in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _reduce_by_log2(x: FloatPair) -> tuple[FloatPair, Array]:
    """The r and n of x = n log(2) + r, |r| <= log(2) / 2, for |x| <= 350; r = x exactly if n = 0."""
    return _reduce_by_unit(x, constants.log_of_integer(2), 14, 14)


def _exp_of_pair(x: FloatPair) -> tuple[FloatPair, Array]:
    """e^x as a pair and an exponent, for |x| <= 300."""
    return _exp_of_eighths(*reduce_to_eighths(x))


def _clamp_size(x: Argument, least: int, most: float) -> tuple[Array, Array]:
    abs_x, shift = x.size(least, 30)
    return jnp.minimum(abs_x, most), shift


def _exp(x: Argument) -> FunctionValue:
    return FunctionValue(*_exp_of_pair(pair_of_number(x.clamp(FIRST_ORDER, _MOST_EXPONENTIAL))), _exponential_cases(x))


def _exponential_cases(x: Argument) -> tuple[tuple[Array, float], ...]:
    return ((x.zero, 1.0), (x.infinite, _INF), (x.infinite & x.negative, 0.0))


def _exp2(x: Argument) -> FunctionValue:
    number = x.clamp(FIRST_ORDER, _MOST_EXPONENTIAL)
    n = _nearest_integer_of(number * 8)
    r = pair_of_constant(constants.log_of_integer(2)) * (number - n / 8)
    return FunctionValue(*_exp_of_eighths(r, n.astype(jnp.int32)), _exponential_cases(x))


def _expm1(x: Argument) -> FunctionValue:
    """The value e^x - 1 = 2^n (e^r - 1) + 2^n - 1, where x = n log 2 + r."""
    abs_x, shift = _clamp_size(x, FIRST_ORDER, _MOST_EXPONENTIAL)
    number = x.signed(abs_x)
    r, n = _reduce_by_log2(pair_of_number(number))
    scale_exponent = jnp.maximum(n, 0)
    power = _power_of_small_term(n - scale_exponent)
    scaled_expm1 = (r * pairs.polynomial_of_pair(r, constants.series("expm1"), 5)).scaled(power)
    power_difference = pairs.two_sum(power, -_power_of_small_term(-scale_exponent))
    cases = ((x.zero, x.signed(jnp.zeros_like(number))), (x.infinite, _INF), (x.infinite & x.negative, -1.0))
    return FunctionValue(power_difference + scaled_expm1, scale_exponent + shift, cases)


def _logistic(x: Argument) -> FunctionValue:
    """1 / (1 + t) with t = e^-|x|; for negative x, t / (1 + t)."""
    abs_x = jnp.abs(x.clamp(FIRST_ORDER, _MOST_EXPONENTIAL))
    t, n = _exp_of_pair(pair_of_number(-abs_x))
    divisor = pairs.fast_add_pairs(_ONE, t.scaled(_power_of_small_term(n)))
    top = pairs.select_pair(x.negative, t, pair_of_number(jnp.ones_like(abs_x)))
    cases = ((x.infinite, 1.0), (x.infinite & x.negative, 0.0))
    return FunctionValue(top / divisor, lax_where(x.negative, n, 0), ((x.zero, 0.5), *cases))


def _sinh_and_cosh(abs_x: Array) -> tuple[FloatPair, FloatPair, Array]:
    """sinh(x) / 2^n, cosh(x) / 2^n and n, for x >= 0.

    With e^x = 2^n (C + S) and w = 2^-2n they are (S (1 + w) + C (1 - w)) / 2 and (C (1 + w) + S (1 - w)) / 2.
    """
    r, n = _reduce_by_log2(pair_of_number(abs_x))
    z = r * r
    s = r * pairs.polynomial_of_pair(z, constants.series("sinh"), 3)
    c = pairs.fast_add_pairs(_ONE, z * pairs.polynomial_of_pair(z, constants.series("coshm1"), 3))
    w = _power_of_small_term(-2 * n)
    half_plus = pairs.fast_two_sum(np.float32(1), w).scaled(np.float32(0.5))
    half_minus = pairs.fast_two_sum(np.float32(1), -w).scaled(np.float32(0.5))
    sine = s * half_plus + c * half_minus
    cosine = c * half_plus + s * half_minus
    return sine, cosine, n


def _sinh(x: Argument) -> FunctionValue:
    abs_x, shift = _clamp_size(x, SECOND_ORDER, _MOST_EXPONENTIAL)
    sine, _, n = _sinh_and_cosh(abs_x)
    return FunctionValue(sine, n + shift, ((x.zero, 0.0), (x.infinite, _INF)), x.sign)


def _cosh(x: Argument) -> FunctionValue:
    abs_x, _ = _clamp_size(x, SECOND_ORDER, _MOST_EXPONENTIAL)
    _, cosine, n = _sinh_and_cosh(abs_x)
    return FunctionValue(cosine, n, ((x.zero, 1.0), (x.infinite, _INF)))


def _tanh(x: Argument) -> FunctionValue:
    """Taylor's series, or (1 - t) / (1 + t) with t = e^-2|x|."""
    abs_x, shift = _clamp_size(x, SECOND_ORDER, 60.0)
    series = pairs.polynomial_of_pair(pairs.two_product(abs_x, abs_x), constants.series("tanh"), 2) * abs_x
    t, n = _exp_of_pair(pair_of_number(-2 * abs_x))
    t = t.scaled(_power_of_small_term(n))
    quotient = pairs.fast_add_pairs(_ONE, -t) / pairs.fast_add_pairs(_ONE, t)
    value = pairs.select_pair(abs_x < 0.125, series, quotient)
    return FunctionValue(value, shift, ((x.zero, 0.0), (x.infinite, 1.0)), x.sign)


# -- logarithms --------------------------------------------------------------------------------------------------------


def _times_log2(n: Array, base: int) -> FloatPair:
    """The product of n and log(2), for integers |n| < 2^8 as float32."""
    if base == 2:
        return pair_of_number(n)
    unit = constants.log_of_integer(2) / (constants.log_of_integer(base) if base else 1)
    first, second, third = _split_constant(unit, 16, 16)
    total = pairs.two_sum(n * first, n * second)
    return pairs.fast_two_sum(total.hi, total.lo + n * third)


def _normalize_pair(number: FloatPair) -> tuple[FloatPair, Array]:
    """A positive pair as a pair in [√½, √2] and the exponent of a power of two."""
    bits = float_to_bits(number.hi)
    root = int(np.float32(np.sqrt(0.5)).view(np.int32))
    n = (bits - root) >> 23
    return number.scaled(float32_power_of_two(-n)), n


def _artanh_argument(m: FloatPair) -> FloatPair:
    """The s = (m - 1) / (m + 1) for which log(m) = 2 artanh(s)."""
    numerator = pairs.two_sum(m.hi - 1, m.lo)
    denominator = pairs.two_sum(m.hi, np.float32(1))
    return numerator / pairs.fast_two_sum(denominator.hi, denominator.lo + m.lo)


def arctangent_series(s: FloatPair, name: str) -> FloatPair:
    """The "arctan" of s for |s| <= 1/4, or its "artanh" for |s| <= 0.172."""
    return s * pairs.polynomial_of_pair(s * s, constants.series(name), 3)


def _log_of_artanh_argument(s: FloatPair, n: Array, base: int = 0) -> FloatPair:
    """log(m 2^n), from s."""
    artanh = arctangent_series(s, "artanh")
    log_m = artanh * pair_of_constant(2 / constants.log_of_integer(base)) if base else artanh.scaled(np.float32(2))
    return _times_log2(n.astype(jnp.float32), base) + log_m


def _make_logarithm(base: int) -> Callable[[Argument], FunctionValue]:
    def log(x: Argument) -> FunctionValue:
        m, n = _normalize_pair(pair_of_number(x.significand))
        total = _log_of_artanh_argument(_artanh_argument(m), n + x.exponent, base)
        if base == 10:  # powers of ten that float32 holds: no other number has a logarithm so close
            nearest = _nearest_integer_of(total.hi)
            is_power_of_ten = (nearest >= 0) & (nearest <= 10) & (jnp.abs((total.hi - nearest) + total.lo) < 2.0**-28)
            total = pairs.select_pair(is_power_of_ten, pair_of_number(nearest), total)
        cases = ((total.hi == 0, 0.0), (x.infinite, _INF), (x.negative, _NAN), (x.zero, -_INF))
        return FunctionValue(total, 0, cases)

    return log


#: Above 2^_LARGE, √(x² ± 1) is x. Above the square of this bound, 1 + x is x.
_LARGE_ARGUMENT_EXPONENT = 30


def _log1p(x: Argument) -> FunctionValue:
    """The logarithm of 1 + x, from a significand m and an exponent n of 1 + x."""
    abs_x, shift = x.size(FIRST_ORDER, 2 * _LARGE_ARGUMENT_EXPONENT)
    m, n = _normalize_pair(pairs.two_sum(x.signed(abs_x), np.float32(1)))
    is_below_domain = x.negative & x.exceeds(1.0)
    cases = ((x.zero, x.signed(jnp.zeros_like(abs_x))), (x.infinite, _INF), (is_below_domain, _NAN))
    is_minus_one = x.negative & x.equals(1.0)
    m = pairs.select_pair(is_below_domain | is_minus_one, pair_of_number(jnp.ones_like(abs_x)), m)
    n = n + jnp.maximum(x.exponent - 2 * _LARGE_ARGUMENT_EXPONENT, 0)
    return FunctionValue(_log_of_artanh_argument(_artanh_argument(m), n), shift, (*cases, (is_minus_one, -_INF)))


def _arcsinh(x: Argument) -> FunctionValue:
    """artanh(x / √(1 + x²)), or log(x + √(1 + x²))."""
    abs_x, shift = x.size(SECOND_ORDER, _LARGE_ARGUMENT_EXPONENT)
    root = pairs.root_of_pair(pairs.two_product(abs_x, abs_x) + _ONE)
    m, n = _normalize_pair(pairs.fast_add_pairs(root, pair_of_number(abs_x)))
    n = n + jnp.maximum(x.exponent - _LARGE_ARGUMENT_EXPONENT, 0)
    is_small = abs_x < 0.17
    s = pairs.select_pair(is_small, pair_of_number(abs_x) / root, _artanh_argument(m))
    total = _log_of_artanh_argument(s, lax_where(is_small, 0, n)).scaled(np.float32(0.5))
    cases = ((x.zero, 0.0), (x.infinite, _INF))
    return FunctionValue(total, shift + (~is_small).astype(shift.dtype), cases, x.sign)


def _arccosh(x: Argument) -> FunctionValue:
    """log(1 + t) with t = d + √(d (2 + d)), d = x - 1."""
    abs_x, _ = x.size(0, _LARGE_ARGUMENT_EXPONENT)
    abs_x = jnp.maximum(abs_x, np.float32(1 + 2.0**-23))
    x_minus_one, x_plus_one = pairs.two_sum(abs_x, np.float32(-1)), pairs.two_sum(abs_x, np.float32(1))
    root = pairs.root_of_pair(x_minus_one * x_plus_one)
    t = root + x_minus_one
    m, n = _normalize_pair(root + pair_of_number(abs_x))
    is_small = abs_x < 1.05
    s = pairs.select_pair(is_small, t / (t + pair_of_constant(2)), _artanh_argument(m))
    n = lax_where(is_small, 0, n + jnp.maximum(x.exponent - _LARGE_ARGUMENT_EXPONENT, 0))
    is_one = x.equals(1.0) & ~x.negative
    is_outside = x.negative | ~x.exceeds(1.0)
    return FunctionValue(_log_of_artanh_argument(s, n), 0, ((x.infinite, _INF), (is_outside, _NAN), (is_one, 0.0)))


def _arctanh(x: Argument) -> FunctionValue:
    """artanh(x), or log((1 + x) / (1 - x)) / 2."""
    abs_x, shift = x.size(SECOND_ORDER, -1)
    ratio = pairs.two_sum(abs_x, np.float32(1)) / pairs.two_sum(-abs_x, np.float32(1))
    m, n = _normalize_pair(ratio)
    is_small = abs_x < 0.17
    s = pairs.select_pair(is_small, pair_of_number(abs_x), _artanh_argument(m))
    total = _log_of_artanh_argument(s, lax_where(is_small, 0, n)).scaled(np.float32(0.5))
    return FunctionValue(total, shift, ((x.zero, 0.0), (x.exceeds(1.0), _NAN), (x.equals(1.0), _INF)), x.sign)


# -- circular functions ------------------------------------------------------------------------------------------------


def _payne_hanek_reduction(x: Argument) -> tuple[FloatPair, Array]:
    """The r and q of |x| = q π/2 + r modulo 2 π, |r| <= π/4, for |x| >= 1/2.

    As in Payne and Hanek (SIGNUM Newsletter 18 (1983) 19): the fraction of 2^k / (2 π), times the significand as an
    integer, in 96 bits.
    """
    table_index = lax_clip(x.exponent - 23, constants.LEAST_PLACE, constants.MOST_PLACE) - constants.LEAST_PLACE
    first, second, third = (take_in_bounds(jnp.asarray(word), table_index) for word in constants.inverse_of_two_pi())
    significand = (x.significand * 2.0**23).astype(jnp.uint32)
    (high, low), (lower, lowest) = (full_word_product(word, significand) for word in (second, third))
    middle = low + lower
    top = first * significand + high + (middle < low).astype(jnp.uint32)
    quarter = (top + np.uint32(1 << 29)) >> 30
    top = (top << 2 | middle >> 30).astype(jnp.int32)  # a signed fraction of a quarter turn
    middle = middle << 2 | lowest >> 30
    words = (top >> 16, top & 0xFFFF, middle >> 16, middle & 0xFFFF, lowest >> 14 & 0xFFFF)
    a, b, c, d, e = (
        word.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0 ** (-16 * (i + 1))) for i, word in enumerate(words)
    )
    quarter_turns = pairs.fast_two_sum(a, b)
    quarter_turns = quarter_turns + pairs.fast_two_sum(c, d + e)
    return quarter_turns * pair_of_constant(constants.pi() / 2), (quarter & 3).astype(jnp.int32)


def _reduce_angle(x: Argument) -> tuple[FloatPair, Array, Array, Array]:
    """The r and q of an argument, the change of its exponent if it was clamped, and whether it is infinite."""
    abs_x, shift = x.size(SECOND_ORDER, 0)
    r, q = _payne_hanek_reduction(x)
    is_small = ~x.exceeds(0.75)
    return pairs.select_pair(is_small, pair_of_number(abs_x), r), lax_where(is_small, 0, q), shift, x.infinite


def _sine_or_cosine(r: FloatPair, cosine: Array) -> FloatPair:
    """sin(r), or cos(r) if `cosine`."""
    coefficients = zip(constants.series("cos"), constants.series("sin"), strict=True)
    terms = tuple(pairs.select_pair(cosine, a, b) for a, b in coefficients)
    series = pairs.polynomial_of_pair(r * r, terms, 4)
    return pairs.select_pair(cosine, series, r * series)


def _sign_bit_if(condition: Array) -> Array:
    return lax_where(condition, np.int32(-(2**31)), np.int32(0))


def _sin(x: Argument) -> FunctionValue:
    r, q, shift, infinite = _reduce_angle(x)
    value = _sine_or_cosine(r, (q & 1) != 0)
    return FunctionValue(value, shift, ((x.zero, 0.0), (infinite, _NAN)), x.sign ^ _sign_bit_if(q >= 2))


def _cos(x: Argument) -> FunctionValue:
    r, q, _, infinite = _reduce_angle(x)
    value = _sine_or_cosine(r, (q & 1) == 0)
    return FunctionValue(value, 0, ((x.zero, 1.0), (infinite, _NAN)), _sign_bit_if((q == 1) | (q == 2)))


def _tan(x: Argument) -> FunctionValue:
    """The quotient sin r / cos r of the rest r in quadrant q; in odd quadrants -cos r / sin r."""
    r, q, shift, infinite = _reduce_angle(x)
    sine, cosine = (pairs.polynomial_of_pair(r * r, constants.series(name), 4) for name in ("sin", "cos"))
    sine = r * sine
    is_inverse = (q & 1) != 0
    is_negative = sine.hi < 0
    sine = pairs.select_pair(is_negative, -sine, sine)
    value = pairs.select_pair(is_inverse, cosine, sine) / pairs.select_pair(is_inverse, sine, cosine)
    return FunctionValue(
        value, shift, ((x.zero, 0.0), (infinite, _NAN)), x.sign ^ _sign_bit_if(is_negative ^ is_inverse)
    )


def angle_of(
    y: FloatPair, x: FloatPair, negative_x: Array | None = None, divide: Callable[..., FloatPair] = operator.truediv
) -> FloatPair:
    """The angle in [0, π/2] of a point with nonnegative coordinates: arctan(c) + arctan(t).

    t = (y - c x) / (x + c y), or t = -x / y for c = ∞. If `negative_x`, the result is π minus the angle.
    """
    steep, one = y.hi > 4 * x.hi, np.float32(1)
    flat, half, diagonal = (y.hi < limit * x.hi for limit in (0.25, 0.75, 1.4))
    c = lax_where(flat, 0 * one, lax_where(half, one / 2, lax_where(diagonal, one, 2 * one)))
    zero = pair_of_number(jnp.zeros_like(c))
    numerator = pairs.select_pair(steep, zero, y) + x.scaled(-lax_where(steep, one, c))
    denominator = pairs.select_pair(steep, y, x) + y.scaled(lax_where(steep, 0 * one, c))
    half_angle, right = constants.arctangent_of_inverse(2), constants.pi() / 2
    angles = ((diagonal, right / 2), (half, half_angle), (flat, Fraction(0)), (steep, right))
    t = divide(numerator, denominator)
    base_angle = _constant_of_case(right - half_angle, angles)
    if negative_x is not None:
        base_angle = pairs.select_pair(
            negative_x, _constant_of_case(right + half_angle, [(case, 2 * right - v) for case, v in angles]), base_angle
        )
        t = t.scaled(lax_where(negative_x, -one, one))
    return base_angle + arctangent_series(t, "arctan")


def _constant_of_case(default: Fraction, cases: Sequence[tuple[Array, Fraction]]) -> FloatPair:
    """The constant of the last case that holds."""
    value = pair_of_constant(default)
    for where, number in cases:
        value = pairs.select_pair(where, pair_of_constant(number), value)
    return value


def _arctan(x: Argument) -> FunctionValue:
    abs_x, shift = x.size(SECOND_ORDER, 60)
    value = angle_of(pair_of_number(abs_x), pair_of_number(jnp.ones_like(abs_x)))
    return FunctionValue(value, shift, ((x.zero, 0.0),), x.sign)


def _cosine_of_arcsin(abs_x: Array) -> FloatPair:
    """√(1 - x²) for 0 <= x < 1; for other x, an unused number.

    For small x it uses 1 - x², because a product of pairs lacks the product of their second numbers.
    """
    abs_x = jnp.minimum(abs_x, np.float32(1 - 2.0**-24))
    small = pairs.two_product(-abs_x, abs_x) + _ONE
    large = pairs.two_sum(abs_x, np.float32(1)) * pairs.two_sum(-abs_x, np.float32(1))
    return pairs.root_of_pair(pairs.select_pair(abs_x < 0.5, small, large))


def _arcsin(x: Argument) -> FunctionValue:
    abs_x, shift = x.size(SECOND_ORDER, 0)
    is_one = x.equals(1.0)
    cofactor = pairs.select_pair(is_one, pair_of_number(jnp.zeros_like(abs_x)), _cosine_of_arcsin(abs_x))
    value = angle_of(pair_of_number(abs_x), cofactor)
    return FunctionValue(value, shift, ((x.zero, 0.0), (x.exceeds(1.0), _NAN)), x.sign)


def _arccos(x: Argument) -> FunctionValue:
    abs_x, _ = x.size(FIRST_ORDER, 0)
    is_one = x.equals(1.0)
    cofactor = pairs.select_pair(is_one, pair_of_number(jnp.zeros_like(abs_x)), _cosine_of_arcsin(abs_x))
    value = angle_of(cofactor, pair_of_number(abs_x), x.negative)
    return FunctionValue(value, 0, ((is_one & ~x.negative, 0.0), (x.exceeds(1.0), _NAN)))


# -- the error function ------------------------------------------------------------------------------------------------

#: For a larger x, erfc(x) is below half of the least value of every format.
_MOST_ERFC = 11.0


def _erf_and_erfc(abs_x: Array) -> tuple[FloatPair, FloatPair, Array, Array]:
    """erf(x) for 0 <= x < 1; the h and n of erfc(x) = h 2^n for x >= 1; and whether x >= 1."""
    erf = pair_of_number(abs_x) * pairs.polynomial_of_pair(pairs.two_product(abs_x, abs_x), constants.series("erf"), 9)
    clamped_x = jnp.maximum(abs_x, np.float32(1))
    bits = float_to_bits(clamped_x)
    index = (bits >> 21) - (127 << 2)
    middle = bits_to_float(bits & ~((1 << 21) - 1) | 1 << 20)
    table = constants.scaled_erfc_series()

    def take_entry(entries: Any) -> Array:
        return take_in_bounds(jnp.asarray(entries), jnp.minimum(index, len(entries) - 1))

    terms = tuple(FloatPair(take_entry(c.hi), take_entry(c.lo) if n < 8 else None) for n, c in enumerate(table))
    scaled_erfc = pairs.polynomial_of_pair(pair_of_number(clamped_x - middle), terms, 8)
    power, n = _exp_of_pair(-pairs.two_product(clamped_x, clamped_x))
    return erf, scaled_erfc * power, n, abs_x >= 1


def _erf(x: Argument) -> FunctionValue:
    abs_x, shift = _clamp_size(x, SECOND_ORDER, _MOST_ERFC)
    erf, scaled_erfc, n, is_large = _erf_and_erfc(abs_x)
    erfc = scaled_erfc.scaled(-_power_of_small_term(n))
    value = pairs.select_pair(is_large, pairs.fast_add_pairs(_ONE, erfc), erf)
    return FunctionValue(value, shift, ((x.zero, 0.0), (x.infinite, 1.0)), x.sign)


def _erfc(x: Argument) -> FunctionValue:
    abs_x, _ = _clamp_size(x, FIRST_ORDER, _MOST_ERFC)
    erf, scaled_erfc, n, is_large = _erf_and_erfc(abs_x)
    erf = pairs.fast_add_pairs(_ONE, pairs.select_pair(x.negative, erf, -erf))
    reflection = pairs.fast_add_pairs(pair_of_constant(2), scaled_erfc.scaled(-_power_of_small_term(n)))
    value = pairs.select_pair(is_large, pairs.select_pair(x.negative, reflection, scaled_erfc), erf)
    cases = ((x.zero, 1.0), (x.infinite, 0.0), (x.infinite & x.negative, 2.0))
    return FunctionValue(value, lax_where(is_large & ~x.negative, n, 0), cases)


# -- roots and multiples -----------------------------------------------------------------------------------------------


def _cbrt(x: Argument) -> FunctionValue:
    root_exponent = (x.exponent + 300) // 3 - 100
    number = x.significand * float32_power_of_two(x.exponent - 3 * root_exponent)
    guess = pairs.hide_from_contraction(lax.cbrt(number), number)
    guess = pairs.fast_two_sum(guess, _cube_error(guess, number)).hi
    value = FloatPair(guess, _cube_error(guess, number))
    return FunctionValue(value, root_exponent, ((x.zero, 0.0), (x.infinite, _INF)), x.sign)


def _cube_error(guess: Array, number: Array) -> Array:
    cube = pairs.two_product(guess, guess) * guess
    return ((number - cube.hi) - cube.lo) / (3 * (guess * guess))


def _rsqrt(x: Argument) -> FunctionValue:
    """The value x^(-1/2), by the hardware's guess and two steps of Newton."""
    is_odd = x.exponent & 1
    number = x.significand * float32_power_of_two(is_odd)
    guess = pairs.hide_from_contraction(lax.rsqrt(number), number)
    guess = pairs.fast_two_sum(guess, _inverse_root_error(guess, number)).hi
    value = FloatPair(guess, _inverse_root_error(guess, number))
    signed_infinity = x.signed(jnp.full_like(number, _INF))
    cases = ((x.infinite, 0.0), (x.negative, _NAN), (x.zero, signed_infinity))
    return FunctionValue(value, (is_odd - x.exponent) >> 1, cases)


def _inverse_root_error(guess: Array, number: Array) -> Array:
    product = pairs.two_product(guess, guess) * number
    return ((1 - product.hi) - product.lo) * (0.5 * guess)


def _make_multiple(factor: Callable[[], Fraction]) -> Callable[[Argument], FunctionValue]:
    def multiple(x: Argument) -> FunctionValue:
        value = pair_of_constant(factor()) * x.significand
        return FunctionValue(value, x.exponent, ((x.zero, 0.0), (x.infinite, _INF)), x.sign)

    return multiple


#: The functions by the names of JAX's primitives, or by their own names if there is no primitive.
UNARY_FUNCTIONS: dict[str, Callable[[Argument], FunctionValue]] = {
    "exp": _exp,
    "exp2": _exp2,
    "expm1": _expm1,
    "logistic": _logistic,
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": _tanh,
    "log": _make_logarithm(0),
    "log2": _make_logarithm(2),
    "log10": _make_logarithm(10),
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
    "degrees": _make_multiple(lambda: 180 / constants.pi()),
    "radians": _make_multiple(lambda: constants.pi() / 180),
}


# == functions of two arguments ========================================================================================
# To about 44 bits, since the pairs of 16-bit numbers come closer to boundaries. Special values are as in C
# (ISO/IEC 9899, annex F).


def _clamp_difference(a: Array, b: Array, limit: int) -> Array:
    """A - b, at least -`limit` and at most `limit`."""
    return lax_clip(a - b, -limit, limit)


# -- the root of a sum of squares --------------------------------------------------------------------------------------


def _hypot(x: Argument, y: Argument) -> FunctionValue:
    """The root of a sum of squares. For operands of 12 bits the sum is exact, and so is the side of the root.

    If the exponents differ by more than 30, the smaller operand only tells that the result is above the larger one.
    """
    swap = x.magnitude < y.magnitude
    larger, smaller = select_argument(swap, y, x), select_argument(swap, x, y)
    a, gap = larger.significand, _clamp_difference(smaller.exponent, larger.exponent, -SECOND_ORDER)
    b = lax_where(smaller.zero, 0.0, smaller.significand * float32_power_of_two(gap))
    value = pairs.root_of_pair(pairs.two_product(a, a) + pairs.two_product(b, b))
    cases = ((larger.zero, 0.0), (larger.nan, _NAN), (x.infinite | y.infinite, _INF))
    return FunctionValue(value, larger.exponent, cases)


# -- the angle of a point ----------------------------------------------------------------------------------------------


def _arctan2(y: Argument, x: Argument) -> FunctionValue:
    """The angle of (x, y). Infinite coordinates stand for a point of the same angle."""
    both = x.infinite & y.infinite
    is_flat = y.zero | (x.infinite & ~both)
    is_steep = (x.zero & ~y.zero) | (y.infinite & ~both)
    negative_x = x.negative
    difference = y.exponent - x.exponent
    exponent_gap = lax_clip(difference, lax_where(negative_x, FIRST_ORDER, SECOND_ORDER), -FIRST_ORDER)
    shift = lax_where(negative_x, 0, jnp.minimum(difference - exponent_gap, 0))
    numerator = lax_where(both, 1.0, y.significand * float32_power_of_two(jnp.maximum(exponent_gap, -60)))
    numerator, shift = (
        lax_where(is_flat, 0.0, lax_where(is_steep, 1.0, numerator)),
        lax_where(is_steep | both, 0, shift),
    )
    denominator = lax_where(is_steep, 0.0, lax_where(both | is_flat, 1.0, x.significand))
    value = angle_of(pair_of_number(numerator), pair_of_number(denominator), negative_x, pairs.divide_pairs_exactly)
    return FunctionValue(value, shift, ((is_flat & ~negative_x, 0.0), (x.nan | y.nan, _NAN)), y.sign)


# -- exponentials and logarithms ---------------------------------------------------------------------------------------


def _exp_of_eighths_precisely(r: FloatPair, n: Array) -> tuple[FloatPair, Array]:
    """e^r 2^(n / 8) as a pair and an exponent, for |r| <= log(2) / 16, to 2^-45."""
    expm1_r = r * pairs.polynomial_of_pair(r, constants.series("expm1")[:9], 4)
    return pairs.fast_add_pairs(_ONE, expm1_r) * two_to_eighths(n & 7), n >> 3


def _logaddexp(x: Argument, y: Argument) -> FunctionValue:
    """M + log(1 + t) with the larger operand m and t = e^-|x - y|.

    log(1 + t) is 2 artanh(t / (2 + t)), or log(2) + 2 artanh((t - 1) / (t + 3)) for t near 1.
    """
    x_order, y_order = (lax_where(v.negative, -v.magnitude, v.magnitude) for v in (x, y))
    swap = x_order < y_order
    m = select_argument(swap, y, x)
    a, b = (v.clamp(-100, 2.0**100) for v in (x, y))
    d = pairs.two_sum(lax_where(swap, a, b), -lax_where(swap, b, a))
    is_far = d.hi < -300
    t, n = _exp_of_eighths_precisely(
        *reduce_to_eighths(pairs.select_pair(is_far, pair_of_number(jnp.full_like(a, -300)), d))
    )
    t_value = t.scaled(float32_power_of_two(jnp.maximum(n, -60)))
    is_near = t_value.hi > 0.41
    n = lax_where(is_near, 0, n)
    numerator = pairs.select_pair(is_near, t_value + pair_of_constant(-1), t)
    denominator = pairs.fast_add_pairs(pairs.select_pair(is_near, pair_of_constant(3), pair_of_constant(2)), t_value)
    s = numerator / denominator
    z = s.scaled(float32_power_of_two(jnp.maximum(n, -60)))
    term = (s * pairs.polynomial_of_pair(z * z, constants.series("artanh"), 4)).scaled(np.float32(2))
    log = pairs.select_pair(is_near, pairs.fast_add_pairs(pair_of_constant(constants.log_of_integer(2)), term), term)
    scale = lax_where(m.zero, n, jnp.maximum(m.exponent, n))
    larger = m.signed(m.significand * float32_power_of_two(_clamp_difference(m.exponent, scale, -FIRST_ORDER)))
    log = log.scaled(float32_power_of_two(_clamp_difference(n, scale, -FIRST_ORDER)))
    total = pair_of_number(lax_where(m.zero, 0.0, larger)) + log
    lows = [v.infinite & v.negative for v in (x, y)]
    number = lax_where(m.zero, 0.0, bits_to_float(m.magnitude | m.sign))
    cases = ((lows[0] | lows[1], number), (m.infinite & ~m.negative, _INF), (x.nan | y.nan, _NAN))
    return FunctionValue(total, scale, cases)


def _power_function(x: Argument, y: Argument) -> FunctionValue:
    """2^(y log2 x).

    log2 x is a number n plus the logarithm of one of 1024 numbers, known to 60 bits, plus log2(1 + t). For operands
    of 11 bits t is zero. Products with halves of y are exact.
    """
    n, log_parts, log_rest = _binary_logarithm(x)
    number = y.clamp(-60, 2.0**40)
    high, low = pairs.split_significand(number)
    estimate = number * (n + (log_parts[0] + log_parts[1])) + number * log_rest.hi
    is_beyond = jnp.abs(estimate) > 300
    eighths = lax_where(is_beyond, jnp.copysign(np.float32(2400), estimate), jnp.round(estimate * 8))
    first = pairs.two_sum(high * n, high * log_parts[0])
    high_sum = pairs.two_sum(first.hi - eighths / 8, low * n) + pairs.two_sum(low * log_parts[0], high * log_parts[1])
    low_sum = pairs.two_sum(first.lo, low * log_parts[1]) + pair_of_number(high * log_parts[2])
    low_sum = FloatPair(low_sum.hi, low_sum.lo + (low * log_parts[2] + number * log_parts[3]))
    rest = high_sum + low_sum + log_rest * number
    rest = pairs.select_pair(is_beyond, pair_of_number(jnp.zeros_like(number)), rest)
    is_tiny = jnp.abs(estimate) < 2.0**FIRST_ORDER
    rest = pairs.select_pair(is_tiny, pair_of_number(jnp.copysign(np.float32(2.0**FIRST_ORDER), estimate)), rest)
    value, exponent = _exp_of_eighths_precisely(
        rest * pair_of_constant(constants.log_of_integer(2)), eighths.astype(jnp.int32)
    )
    return FunctionValue(_drop_tail_if_exact(value, number), exponent, *_power_cases(x, y, number))


def _binary_logarithm(x: Argument) -> tuple[Array, tuple[Array, ...], FloatPair]:
    """log2 |x| as an integer, four numbers, and a pair that is zero if x has no more than 11 bits."""
    bits = float_to_bits(x.significand)
    nearest_bits = (bits + (1 << 12)) >> 13 << 13
    c = bits_to_float(nearest_bits)
    index = nearest_bits >> 13 & (constants.LOG_PARTS - 1)
    n = x.exponent + (c == 2).astype(x.exponent.dtype) + (index >= constants.FIRST_LOG_OF_HALF).astype(x.exponent.dtype)
    t = pair_of_number(x.significand - c) / pair_of_number(c)
    correction = t * pairs.polynomial_of_pair(t, constants.series("log2"), 2)
    log_parts = tuple(take_in_bounds(jnp.asarray(word), index) for word in constants.logarithm_table())
    return n.astype(jnp.float32), log_parts, correction


def _drop_tail_if_exact(value: FloatPair, exponent: Array) -> FloatPair:
    """The first number alone, if the second is so small that the power is that number.

    A power of a dyadic number other than powers of two is dyadic with 24 bits at most only for exponents
    n / 8 <= 15. For 3^16 has 26 bits, and so has the number of which 3 is a root of order 16.
    """
    eighths = jnp.round(exponent * 8)
    can_be_exact = (eighths == exponent * 8) & (eighths >= 1) & (eighths <= 120)
    is_close = jnp.abs(value.lo) < np.float32(2.0**-40) * value.hi
    return FloatPair(value.hi, lax_where(can_be_exact & is_close, 0.0, value.lo))


def _power_cases(x: Argument, y: Argument, number: Array) -> tuple[tuple[tuple[Array, float], ...], Array]:
    """The special values, and the sign bits of the results."""
    is_integer = jnp.round(number) == number
    half = np.float32(0.5) * number
    is_odd = is_integer & (jnp.round(half) != half) & ~y.infinite & ~y.exceeds(2.0**24)
    is_one = x.equals(1.0)
    is_below_one = ~x.exceeds(1.0) & ~is_one
    falls = y.negative ^ is_below_one  # x^y is below 1
    flip = lax_where(is_odd & x.negative, x.sign, 0)
    is_extreme = y.infinite | x.zero | x.infinite
    is_nan = x.negative & ~is_integer & ~x.zero & ~x.infinite & ~y.infinite
    cases = (
        (is_one, 1.0),
        (is_nan, _NAN),
        (is_extreme & ~is_one & falls, 0.0),
        (is_extreme & ~is_one & ~falls, _INF),
        (x.nan | y.nan, _NAN),
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


# == calls =============================================================================================================


def supports_function(name: str, spec: Spec) -> bool:
    """Whether `elementary_function` has a function of this name, and float32 two bits more than the format."""
    if not (name in UNARY_FUNCTIONS or name in BINARY_FUNCTIONS) or not carrier_holds(spec, FLOAT32):
        return False
    return isinstance(spec.format, CodebookFormat) or has_spare_bits(spec.format, FLOAT32)


def elementary_function(x: Array, *more: Array, name: str, spec: Spec) -> Array:
    """The function `name`, rounded once under `spec`; `supports_function(name, spec)` must hold.

    Args:
        x: float32, any values; or another dtype, if float32 holds the values.
        more: for a function of `BINARY_FUNCTIONS`, the second operand, of the same dtype and shape. Then, for the
            stochastic modes, a random word for each element: uint32; of a uint64 the upper half is used.
        name: the name of the function.
        spec: the rounding of its values.
    """
    count = 2 if name in BINARY_FUNCTIONS else 1
    operands, word = (x, *more)[:count], (*more, None)[count - 1]
    if x.dtype.itemsize == 8:
        word = None if word is None else (word >> 32).astype(jnp.uint32)
        return float64.widen_float32(_round_function([float64.narrow_float64(v) for v in operands], word, name, spec))
    return _round_function([v.astype(FLOAT32.name) for v in operands], word, name, spec).astype(x.dtype)


def _round_function(operands: list[Array], word: Array | None, name: str, spec: Spec) -> Array:
    """A named function of carrier values, rounded once to a spec; `word` is for stochastic rounding."""
    arguments = [split_argument(x) for x in operands]
    if name in BINARY_FUNCTIONS:
        value = BINARY_FUNCTIONS[name](*arguments)
    else:
        value = UNARY_FUNCTIONS[name](*arguments)
        value = replace(value, cases=(*value.cases, (arguments[0].nan, operands[0])))
    if spec.rounding.stochastic and not isinstance(spec.format, CodebookFormat):
        return round_exact(exact_of_value(value), spec, FLOAT32, word)
    return round_to_spec(join_sign(*round_value_to_odd(value), FLOAT32), spec, FLOAT32, word)
