"""Pairs: sums of two float32 numbers, with twice the precision, from operations that every device has.

The algorithms are by Dekker (Numer. Math. 18 (1971) 224) and Knuth, without fused operations, which some devices lack.
Two rules make results independent of the compiler (`_core/xla/cpu.py`):

* an inexact product is never split, and never enters a sum whose error is needed, so that a compiler may contract
  products with sums;
* the error of `s = a + b` is `(a - s) + b`, because compilers simplify (a + b) - b to a for a constant b.

An argument of a function has parts; the value of a function is a pair, in a form that can be rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT32, lax_clip, lax_where, low_mask, split_sign
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.exact import ExactResult
from jchop._core.rounding.codes import bits_to_float, float_to_bits, significand

#: The mask of the first 12 bits of a float32 significand, so that products of halves are exact.
_UPPER_HALF = ~0xFFF
_FLOAT32_SIGN = np.int32(-(2**31))


class FloatPair(NamedTuple):
    """The number hi + lo, |lo| <= ulp(hi) or so."""

    hi: Any
    lo: Any

    # Not the operations of tuples: arithmetic with a relative error of 2^-46, and quotients by positive pairs to 2^-44.
    def __add__(self, other: FloatPair) -> FloatPair:  # type: ignore[override]
        """The sum of two pairs, also if they cancel."""
        high, low = two_sum(self.hi, other.hi), two_sum(self.lo, other.lo)
        high = fast_two_sum(high.hi, high.lo + low.hi)
        return fast_two_sum(high.hi, high.lo + low.lo)

    def __neg__(self) -> FloatPair:
        return FloatPair(-self.hi, -self.lo)

    def __mul__(self, other: Any) -> FloatPair:  # type: ignore[override]
        """The product of two pairs, or of a pair and a number."""
        if isinstance(other, FloatPair):
            return fast_two_sum(*_loose_pair_product(self, other))
        return fast_two_sum(*_two_product_plus(self.hi, other, self.lo * other))

    def __truediv__(self, other: FloatPair) -> FloatPair:
        """There is one division: XLA ends a fusion at each, and computes the operands anew in the next."""
        inverse = np.float32(1) / other.hi
        quotient = hide_from_contraction(self.hi * inverse, other.hi)
        product = two_product(quotient, other.hi)
        remainder = ((self.hi - product.hi) - product.lo) + (self.lo - quotient * other.lo)
        return fast_two_sum(quotient, hide_from_contraction(remainder * inverse, other.hi))

    def scaled(self, power: Any) -> FloatPair:
        """A pair times a power of two, or times 0; exact."""
        return FloatPair(self.hi * power, self.lo * power)


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
    return FloatPair(lax_where(where, a.hi, b.hi), lax_where(where, a.lo, b.lo))


def hide_from_contraction(x: Array, positive: Array) -> Array:
    """`x` combined with the sign of a nonnegative number, so that no compiler contracts it with a sum."""
    sign = float_to_bits(positive) & _FLOAT32_SIGN
    return bits_to_float(float_to_bits(x) | sign)


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


def fast_add_pairs(a: FloatPair, b: FloatPair) -> FloatPair:
    """The sum of two pairs that do not cancel, |a| >= |b|."""
    total = fast_two_sum(a.hi, b.hi)
    return fast_two_sum(total.hi, total.lo + (a.lo + b.lo))


# -- products ----------------------------------------------------------------------------------------------------------


def split_significand(x: Any) -> tuple[Any, Any]:
    """Numbers as sums of two numbers of 12 bits each."""
    high = bits_to_float(float_to_bits(x) & _UPPER_HALF)
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


def divide_pairs_exactly(a: FloatPair, b: FloatPair) -> FloatPair:
    """A quotient whose second number is zero if the quotient is a number of few bits, else of the right sign."""
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
    inverse = np.float32(0.5) / guess  # the one division, as in quotients of pairs

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


# == arguments and values ==============================================================================================


_BITS_OF_ONE = FLOAT32.bias << FLOAT32.fraction
#: The least exponents of arguments: for smaller ones, f(x) = a + b x^n + ... is so close to a that only its side
#: matters. FIRST_ORDER is for n = 1; SECOND_ORDER is for n = 2, relative to the first term.
FIRST_ORDER, SECOND_ORDER = -50, -30


@dataclass(frozen=True)
class Argument:
    """A float32 number x = ±significand 2^exponent."""

    sign: Array  # the sign bit in place
    magnitude: Array  # the bits
    significand: Array  # a float32 number in [1, 2)
    exponent: Array

    @property
    def zero(self) -> Array:
        return self.magnitude == 0

    @property
    def infinite(self) -> Array:
        return self.magnitude == FLOAT32.inf

    @property
    def nan(self) -> Array:
        return self.magnitude > FLOAT32.inf

    @property
    def negative(self) -> Array:
        return self.sign != 0

    def exceeds(self, limit: float) -> Array:
        """Whether |x| > limit, or NaN."""
        return self.magnitude > _float32_bits(limit)

    def equals(self, number: float) -> Array:
        """Whether |x| is a number."""
        return self.magnitude == _float32_bits(number)

    def size(self, least: int, most: int) -> tuple[Array, Array]:
        """|x| with its exponent clamped between two; and x's exponent minus `least` if it is negative, else 0."""
        exponent = lax_clip(self.exponent, least, most)
        return self.significand * float32_power_of_two(exponent), jnp.minimum(self.exponent - least, 0)

    def clamp(self, least: int, most: float) -> Array:
        """The number x with its magnitude clamped between 2^least and `most`."""
        bits = lax_clip(self.magnitude, (FLOAT32.bias + least) << FLOAT32.fraction, _float32_bits(most))
        return bits_to_float(bits | self.sign)

    def signed(self, size: Array) -> Array:
        """A number with the given magnitude and the sign of x."""
        return bits_to_float(float_to_bits(size) | self.sign)


def _float32_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def split_argument(x: Array) -> Argument:
    """The parts of float32 numbers, also of subnormal ones; infinities and NaN have only a sign and a magnitude."""
    sign, magnitude = split_sign(x, FLOAT32)
    exponent, count = double_word.normalize_magnitude(magnitude, FLOAT32)
    bits = count & low_mask(FLOAT32.fraction) | _BITS_OF_ONE
    return Argument(sign, magnitude, bits_to_float(bits), exponent)


def select_argument(where: Array, a: Argument, b: Argument) -> Argument:
    return Argument(*map(partial(lax_where, where), vars(a).values(), vars(b).values()))


def float32_power_of_two(exponent: Any) -> Any:
    """2^exponent, a normal float32 number."""
    return bits_to_float((exponent + FLOAT32.bias) << FLOAT32.fraction)


@dataclass(frozen=True)
class FunctionValue:
    """The value of a function: pair 2^exponent, or the number of the last case that holds.

    A pair whose `lo` is zero is exact. `hi` is zero only if a case holds. `flip` has sign bits that change the sign.
    """

    pair: FloatPair
    exponent: Array | int
    cases: tuple[tuple[Array, Array | float], ...]
    flip: Array | int = 0


def round_value_to_odd(value: FunctionValue) -> tuple[Array, Array]:
    """Sign and magnitude bits of a value rounded to odd: toward zero, with the last bit set if inexact."""
    sign, bits, low = _split_pair(value.pair)
    bits = (bits - (low < 0).astype(bits.dtype)) | (low != 0).astype(bits.dtype)
    if not (isinstance(value.exponent, int) and value.exponent == 0):
        exponent_field = (bits >> FLOAT32.fraction) + value.exponent
        shift = lax_clip(1 - exponent_field, 0, FLOAT32.fraction + 1)
        digits = significand(bits, FLOAT32)
        kept_digits = digits >> shift
        subnormal_bits = kept_digits | (kept_digits << shift != digits).astype(bits.dtype)
        normal_bits = lax_where(
            exponent_field >= FLOAT32.inf >> FLOAT32.fraction,
            FLOAT32.inf - 1,
            bits + (value.exponent << FLOAT32.fraction),
        )
        bits = lax_where(exponent_field < 1, subnormal_bits, normal_bits)
    for where, number in value.cases:
        case_sign, case_bits = _sign_and_magnitude(number)
        sign, bits = lax_where(where, case_sign, sign), lax_where(where, case_bits, bits)
    return sign ^ value.flip, bits


def _split_pair(pair: FloatPair) -> tuple[Array, Array, Array]:
    """The sign bit and the bits of |hi|; lo, counted away from zero."""
    sign, bits = split_sign(pair.hi, FLOAT32)
    return sign, bits, bits_to_float(float_to_bits(pair.lo) ^ sign)


def _sign_and_magnitude(number: Array | float) -> tuple[Array, Array]:
    return split_sign(jnp.asarray(number, jnp.float32), FLOAT32)


def exact_of_value(value: FunctionValue) -> ExactResult:
    """A value with the digits that stochastic modes need."""
    sign, bits, low = _split_pair(value.pair)
    inexact = low != 0
    bits = bits - (low < 0).astype(bits.dtype)
    v = ExactResult(sign, bits, inexact, _rest_below_bits(bits, low), inexact, jnp.zeros_like(inexact))
    if not (isinstance(value.exponent, int) and value.exponent == 0):
        v = _multiply_exact_by_power(v, value.exponent)
    for where, number in value.cases:
        v = _exact_or_case(v, where, number)
    return replace(v, sign=v.sign ^ value.flip)


def _rest_below_bits(bits: Array, low: Array) -> Array:
    """The part below the last place of `bits`, in units of 2^-32 of it; `low` plus one place if `low` is negative."""
    unit = jnp.maximum((bits >> FLOAT32.fraction) - FLOAT32.fraction, 1)  # the field of that place
    units = low * bits_to_float(2 * _BITS_OF_ONE - (unit << FLOAT32.fraction)) * 65536.0
    high_units = jnp.floor(units)
    low_units = jnp.floor((units - high_units) * 65536.0)
    return (high_units.astype(jnp.int32) << 16).astype(jnp.uint32) + low_units.astype(jnp.uint32)


def _multiply_exact_by_power(v: ExactResult, exponent: Array | int) -> ExactResult:
    """A normal number times 2^exponent."""
    field = (v.magnitude >> FLOAT32.fraction) + exponent
    fraction = v.magnitude & low_mask(FLOAT32.fraction)
    beyond = field >= FLOAT32.inf >> FLOAT32.fraction
    magnitude = lax_where(beyond, FLOAT32.inf - 1, (field << FLOAT32.fraction) + fraction)
    shift = lax_clip(1 - field, 0, 31)
    digits = significand(v.magnitude, FLOAT32)
    tail = digits & low_mask(shift)
    magnitude = lax_where(field < 1, digits >> shift, magnitude)
    word = shift.astype(v.rest.dtype)
    rest = lax_where(shift > 0, tail.astype(word.dtype) << 1 << (31 - word) | v.rest >> word, v.rest)
    rest = lax_where(beyond, ~jnp.zeros_like(rest), rest)
    return ExactResult(v.sign, magnitude, v.inexact | (tail != 0) | beyond, rest, v.inexact | beyond, beyond)


def _exact_or_case(v: ExactResult, where: Array, number: Array | float) -> ExactResult:
    """`v`, or an exact number if the condition holds."""
    sign, magnitude = _sign_and_magnitude(number)
    return ExactResult(
        lax_where(where, sign, v.sign),
        lax_where(where, magnitude, v.magnitude),
        v.inexact & ~where,
        lax_where(where, 0, v.rest),
        v.sticky & ~where,
        v.beyond & ~where,
    )
