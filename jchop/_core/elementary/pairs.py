"""Pairs: sums of two float32 numbers, with twice the precision, from operations that every device has.

The algorithms are by Dekker (Numer. Math. 18 (1971) 224) and Knuth, without fused operations, which some devices lack.
Two rules make results independent of the compiler (`_core/xla/cpu.py`):

* an inexact product is never split, and never enters a sum whose error is needed, so that a compiler may contract
  products with sums;
* the error of `s = a + b` is `(a - s) + b`, because compilers simplify (a + b) - b to a for a constant b.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops

Array = jax.Array

#: The mask of the first 12 bits of a float32 significand, so that products of halves are exact.
_UPPER_HALF = ~0xFFF
_FLOAT32_SIGN = np.int32(-(2**31))


class FloatPair(NamedTuple):
    """The number hi + lo, |lo| <= ulp(hi) or so."""

    hi: Any
    lo: Any


@lru_cache(maxsize=1024)
def pair_of_constant(value: Fraction | int) -> FloatPair:
    """A rational number to 48 bits."""
    hi = np.float32(_nearest_float32(Fraction(value)))
    return FloatPair(hi, np.float32(_nearest_float32(Fraction(value) - Fraction(float(hi)))))


def _nearest_float32(value: Fraction) -> float:
    """The nearest float32, from the float64 rounded to odd; a quotient of Python's integers is the nearest float64."""
    nearest = value.numerator / value.denominator
    if Fraction(nearest) != value and not int(np.float64(nearest).view(np.int64)) & 1:
        nearest = float(np.nextafter(nearest, np.inf if Fraction(nearest) < value else -np.inf))
    return float(np.float32(nearest))


def pair_of_number(x: Array) -> FloatPair:
    """A number as a pair."""
    return FloatPair(x, jnp.zeros_like(x))


def select_pair(where: Array, a: FloatPair, b: FloatPair) -> FloatPair:
    return FloatPair(bit_ops.lax_where(where, a.hi, b.hi), bit_ops.lax_where(where, a.lo, b.lo))


def negate_pair(a: FloatPair) -> FloatPair:
    return FloatPair(-a.hi, -a.lo)


def multiply_pair_by_power(a: FloatPair, power: Any) -> FloatPair:
    """A pair times a power of two, or times 0."""
    return FloatPair(a.hi * power, a.lo * power)


def hide_from_contraction(x: Array, positive: Array) -> Array:
    """`x` combined with the sign of a nonnegative number, so that no compiler contracts it with a sum."""
    sign = lax.bitcast_convert_type(positive, jnp.int32) & _FLOAT32_SIGN
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) | sign, jnp.float32)


# -- sums --------------------------------------------------------------------------------------------------------------


def fast_two_sum(a: Any, b: Any) -> FloatPair:
    """The exact sum of two numbers, |a| >= |b| or a = 0."""
    total = a + b
    return FloatPair(total, (a - total) + b)


def two_sum(a: Array, b: Any) -> FloatPair:
    """The exact sum of two numbers; a constant must be the second one."""
    total = a + b
    b_part = total - a
    return FloatPair(total, (a - (total - b_part)) + (b - b_part))


def add_pairs(a: FloatPair, b: FloatPair) -> FloatPair:
    """The sum of two pairs, with a relative error of 2^-46 also if they cancel."""
    high, low = two_sum(a.hi, b.hi), two_sum(a.lo, b.lo)
    high = fast_two_sum(high.hi, high.lo + low.hi)
    return fast_two_sum(high.hi, high.lo + low.lo)


def fast_add_pairs(a: FloatPair, b: FloatPair) -> FloatPair:
    """The sum of two pairs that do not cancel, |a| >= |b|."""
    total = fast_two_sum(a.hi, b.hi)
    return fast_two_sum(total.hi, total.lo + (a.lo + b.lo))


# -- products ----------------------------------------------------------------------------------------------------------


def split_significand(x: Any) -> tuple[Any, Any]:
    """Numbers as sums of two numbers of 12 bits each."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & _UPPER_HALF, jnp.float32)
    return high, x - high


def _two_product_plus(a: Any, b: Any, addend: Any) -> FloatPair:
    """The product of two numbers, plus a number near its last place; not quite normalised."""
    (ah, al), (bh, bl) = split_significand(a), split_significand(b)
    middle = two_sum(ah * bl, al * bh)
    top = fast_two_sum(ah * bh, middle.hi)
    low = al * bl if addend is None else al * bl + addend
    return FloatPair(top.hi, top.lo + (middle.lo + low))


def two_product(a: Any, b: Any) -> FloatPair:
    """The product of two numbers."""
    return _two_product_plus(a, b, None)


def _loose_pair_product(a: FloatPair, b: FloatPair) -> FloatPair:
    return _two_product_plus(a.hi, b.hi, a.hi * b.lo + a.lo * b.hi)


def multiply_pairs(a: FloatPair, b: FloatPair) -> FloatPair:
    """The product of two pairs, with a relative error of 2^-46."""
    return fast_two_sum(*_loose_pair_product(a, b))


def square_pair(a: FloatPair) -> FloatPair:
    return multiply_pairs(a, a)


def multiply_pair_by_number(a: FloatPair, b: Any) -> FloatPair:
    """The product of a pair and a number."""
    return fast_two_sum(*_two_product_plus(a.hi, b, a.lo * b))


def divide_pairs(a: FloatPair, b: FloatPair) -> FloatPair:
    """The quotient of a pair and a positive pair, to 2^-44 of it.

    There is one division: XLA ends a fusion at each, and computes the operands anew in the next.
    """
    inverse = np.float32(1) / b.hi
    quotient = hide_from_contraction(a.hi * inverse, b.hi)
    product = two_product(quotient, b.hi)
    remainder = ((a.hi - product.hi) - product.lo) + (a.lo - quotient * b.lo)
    return fast_two_sum(quotient, hide_from_contraction(remainder * inverse, b.hi))


def divide_pairs_exactly(a: FloatPair, b: FloatPair) -> FloatPair:
    """As `divide_pairs`; the second number is zero if the quotient is a number of few bits, else of the right sign."""
    inverse = np.float32(1) / b.hi

    def error(guess: Array) -> Array:
        product = two_product(guess, b.hi)
        return hide_from_contraction((((a.hi - product.hi) - product.lo) + (a.lo - guess * b.lo)) * inverse, b.hi)

    quotient = hide_from_contraction(a.hi * inverse, b.hi)
    guess = fast_two_sum(quotient, error(quotient)).hi
    return FloatPair(guess, error(guess))


def root_of_pair(a: FloatPair) -> FloatPair:
    """The square root of a positive pair; exact if the root is a float32 number."""
    guess = hide_from_contraction(lax.sqrt(a.hi), a.hi)
    inverse = np.float32(0.5) / guess  # the one division, as in `divide_pairs`

    def error(guess: Array) -> Array:
        square = two_product(guess, guess)
        return hide_from_contraction((((a.hi - square.hi) - square.lo) + a.lo) * inverse, a.hi)

    guess = fast_two_sum(guess, error(guess)).hi
    return FloatPair(guess, error(guess))


# -- polynomials -------------------------------------------------------------------------------------------------------


def polynomial_of_pair(x: FloatPair, coefficients: tuple[FloatPair, ...], pairs: int) -> FloatPair:
    """The value of a polynomial, the constant term first; the terms from `pairs` on need only float32.

    Each coefficient is larger than the sum of the later terms.
    """
    *first, last = coefficients[:pairs]
    float32_terms: Any = coefficients[-1].hi
    for c in reversed(coefficients[pairs:-1]):
        float32_terms = float32_terms * x.hi + c.hi
    total = _add_coefficient(last, _two_product_plus(float32_terms, x.hi, float32_terms * x.lo))
    for c in reversed(first):
        total = _add_coefficient(c, _loose_pair_product(total, x))
    return total


def _add_coefficient(c: FloatPair, step: FloatPair) -> FloatPair:
    total = fast_two_sum(c.hi, step.hi)
    return fast_two_sum(total.hi, total.lo + (step.lo + c.lo))
