"""Pairs: sums of two float32 numbers, with twice the precision, from operations that every device has.

The algorithms are by Dekker (Numer. Math. 18 (1971) 224) and Knuth, without fused operations, which some devices lack.
Two rules make results independent of the compiler (`_core/xla_cpu.py`):

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

from jchop import _bits

Array = jax.Array

#: The mask of the first 12 bits of a float32 significand, so that products of halves are exact.
_UPPER_HALF = ~0xFFF
_SIGN = np.int32(-(2**31))


class Pair(NamedTuple):
    """The number hi + lo, |lo| <= ulp(hi) or so."""

    hi: Any
    lo: Any


@lru_cache(maxsize=1024)
def constant(value: Fraction | int) -> Pair:
    """A rational number to 48 bits."""
    hi = np.float32(_nearest(Fraction(value)))
    return Pair(hi, np.float32(_nearest(Fraction(value) - Fraction(float(hi)))))


def _nearest(value: Fraction) -> float:
    """The nearest float32, from the float64 rounded to odd; a quotient of Python's integers is the nearest float64."""
    near = value.numerator / value.denominator
    if Fraction(near) != value and not int(np.float64(near).view(np.int64)) & 1:
        near = float(np.nextafter(near, np.inf if Fraction(near) < value else -np.inf))
    return float(np.float32(near))


def single(x: Array) -> Pair:
    """A number as a pair."""
    return Pair(x, jnp.zeros_like(x))


def select(where: Array, a: Pair, b: Pair) -> Pair:
    return Pair(_bits.where(where, a.hi, b.hi), _bits.where(where, a.lo, b.lo))


def negative(a: Pair) -> Pair:
    return Pair(-a.hi, -a.lo)


def times_power(a: Pair, power: Any) -> Pair:
    """A pair times a power of two, or times 0."""
    return Pair(a.hi * power, a.lo * power)


def settled(x: Array, positive: Array) -> Array:
    """`x` combined with the sign of a nonnegative number, so that no compiler contracts it with a sum."""
    sign = lax.bitcast_convert_type(positive, jnp.int32) & _SIGN
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) | sign, jnp.float32)


# -- sums --------------------------------------------------------------------------------------------------------------


def ordered_sum(a: Any, b: Any) -> Pair:
    """The exact sum of two numbers, |a| >= |b| or a = 0."""
    total = a + b
    return Pair(total, (a - total) + b)


def exact_sum(a: Array, b: Any) -> Pair:
    """The exact sum of two numbers; a constant must be the second one."""
    total = a + b
    rest = total - a
    return Pair(total, (a - (total - rest)) + (b - rest))


def add(a: Pair, b: Pair) -> Pair:
    """The sum of two pairs, with a relative error of 2^-46 also if they cancel."""
    high, low = exact_sum(a.hi, b.hi), exact_sum(a.lo, b.lo)
    high = ordered_sum(high.hi, high.lo + low.hi)
    return ordered_sum(high.hi, high.lo + low.lo)


def add_ordered(a: Pair, b: Pair) -> Pair:
    """The sum of two pairs that do not cancel, |a| >= |b|."""
    total = ordered_sum(a.hi, b.hi)
    return ordered_sum(total.hi, total.lo + (a.lo + b.lo))


# -- products ----------------------------------------------------------------------------------------------------------


def halves(x: Any) -> tuple[Any, Any]:
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & _UPPER_HALF, jnp.float32)
    return high, x - high


def _product(a: Any, b: Any, more: Any) -> Pair:
    """The product of two numbers, plus a number near its last place; not quite normalised."""
    (ah, al), (bh, bl) = halves(a), halves(b)
    middle = exact_sum(ah * bl, al * bh)
    top = ordered_sum(ah * bh, middle.hi)
    rest = al * bl if more is None else al * bl + more
    return Pair(top.hi, top.lo + (middle.lo + rest))


def product(a: Any, b: Any) -> Pair:
    """The product of two numbers."""
    return _product(a, b, None)


def _loose(a: Pair, b: Pair) -> Pair:
    return _product(a.hi, b.hi, a.hi * b.lo + a.lo * b.hi)


def multiply(a: Pair, b: Pair) -> Pair:
    """The product of two pairs, with a relative error of 2^-46."""
    return ordered_sum(*_loose(a, b))


def square(a: Pair) -> Pair:
    return multiply(a, a)


def times(a: Pair, b: Any) -> Pair:
    """The product of a pair and a number."""
    return ordered_sum(*_product(a.hi, b, a.lo * b))


def divide(a: Pair, b: Pair) -> Pair:
    """The quotient of a pair and a positive pair, to 2^-44 of it.

    There is one division: XLA ends a fusion at each, and computes the operands anew in the next.
    """
    inverse = np.float32(1) / b.hi
    first = settled(a.hi * inverse, b.hi)
    near = product(first, b.hi)
    rest = ((a.hi - near.hi) - near.lo) + (a.lo - first * b.lo)
    return ordered_sum(first, settled(rest * inverse, b.hi))


def divide_exactly(a: Pair, b: Pair) -> Pair:
    """As `divide_pairs`; the second number is zero if the quotient is a number of few bits, else of the right sign."""
    inverse = np.float32(1) / b.hi

    def error(guess: Array) -> Array:
        near = product(guess, b.hi)
        return settled((((a.hi - near.hi) - near.lo) + (a.lo - guess * b.lo)) * inverse, b.hi)

    first = settled(a.hi * inverse, b.hi)
    guess = ordered_sum(first, error(first)).hi
    return Pair(guess, error(guess))


def root(a: Pair) -> Pair:
    """The square root of a positive pair; exact if the root is a float32 number."""
    guess = settled(lax.sqrt(a.hi), a.hi)
    inverse = np.float32(0.5) / guess  # the one division, as in `divide_pairs`

    def error(guess: Array) -> Array:
        near = product(guess, guess)
        return settled((((a.hi - near.hi) - near.lo) + a.lo) * inverse, a.hi)

    guess = ordered_sum(guess, error(guess)).hi
    return Pair(guess, error(guess))


# -- polynomials -------------------------------------------------------------------------------------------------------


def polynomial(x: Pair, coefficients: tuple[Pair, ...], pairs: int) -> Pair:
    """The value of a polynomial, the constant term first; the terms from `pairs` on need only float32.

    Each coefficient is larger than the sum of the later terms.
    """
    *first, last = coefficients[:pairs]
    rest: Any = coefficients[-1].hi
    for c in reversed(coefficients[pairs:-1]):
        rest = rest * x.hi + c.hi
    total = _after(last, _product(rest, x.hi, rest * x.lo))
    for c in reversed(first):
        total = _after(c, _loose(total, x))
    return total


def _after(c: Pair, step: Pair) -> Pair:
    total = ordered_sum(c.hi, step.hi)
    return ordered_sum(total.hi, total.lo + (step.lo + c.lo))
