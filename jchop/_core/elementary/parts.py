"""The parts of an argument, and a function's value in a form that can be rounded once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.exact import ExactResult, significand
from jchop._core.elementary.pairs import FloatPair

Array = jax.Array

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
        exponent = bit_ops.lax_clip(self.exponent, least, most)
        return self.significand * float32_power_of_two(exponent), jnp.minimum(self.exponent - least, 0)

    def clamp(self, least: int, most: float) -> Array:
        """The number x with its magnitude clamped between 2^least and `most`."""
        bits = bit_ops.lax_clip(self.magnitude, (FLOAT32.bias + least) << FLOAT32.fraction, _float32_bits(most))
        return lax.bitcast_convert_type(bits | self.sign, jnp.float32)

    def signed(self, size: Array) -> Array:
        """A number with the given magnitude and the sign of x."""
        return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | self.sign, jnp.float32)


def _float32_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def split_argument(x: Array) -> Argument:
    """The parts of float32 numbers, also of subnormal ones; infinities and NaN have only a sign and a magnitude."""
    sign, magnitude = bit_ops.split_sign(x, FLOAT32)
    exponent, count = double_word.normalize_magnitude(magnitude, FLOAT32)
    bits = count & bit_ops.low_mask(FLOAT32.fraction) | _BITS_OF_ONE
    return Argument(sign, magnitude, lax.bitcast_convert_type(bits, jnp.float32), exponent)


def float32_power_of_two(exponent: Any) -> Any:
    """2^exponent, a normal float32 number."""
    return lax.bitcast_convert_type((exponent + FLOAT32.bias) << FLOAT32.fraction, jnp.float32)


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
        shift = bit_ops.lax_clip(1 - exponent_field, 0, FLOAT32.fraction + 1)
        digits = significand(bits, FLOAT32)
        kept_digits = digits >> shift
        subnormal_bits = kept_digits | (kept_digits << shift != digits).astype(bits.dtype)
        normal_bits = bit_ops.lax_where(
            exponent_field >= FLOAT32.inf >> FLOAT32.fraction,
            FLOAT32.inf - 1,
            bits + (value.exponent << FLOAT32.fraction),
        )
        bits = bit_ops.lax_where(exponent_field < 1, subnormal_bits, normal_bits)
    for where, number in value.cases:
        case_sign, case_bits = _sign_and_magnitude(number)
        sign, bits = bit_ops.lax_where(where, case_sign, sign), bit_ops.lax_where(where, case_bits, bits)
    return sign ^ value.flip, bits


def _split_pair(pair: FloatPair) -> tuple[Array, Array, Array]:
    """The sign bit and the bits of |hi|; lo, counted away from zero."""
    sign, bits = bit_ops.split_sign(pair.hi, FLOAT32)
    return sign, bits, lax.bitcast_convert_type(lax.bitcast_convert_type(pair.lo, jnp.int32) ^ sign, jnp.float32)


def _sign_and_magnitude(number: Array | float) -> tuple[Array, Array]:
    return bit_ops.split_sign(jnp.asarray(number, jnp.float32), FLOAT32)


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
    units = low * lax.bitcast_convert_type(2 * _BITS_OF_ONE - (unit << FLOAT32.fraction), jnp.float32) * 65536.0
    high_units = jnp.floor(units)
    low_units = jnp.floor((units - high_units) * 65536.0)
    return (high_units.astype(jnp.int32) << 16).astype(jnp.uint32) + low_units.astype(jnp.uint32)


def _multiply_exact_by_power(v: ExactResult, exponent: Array | int) -> ExactResult:
    """A normal number times 2^exponent."""
    field = (v.magnitude >> FLOAT32.fraction) + exponent
    fraction = v.magnitude & bit_ops.low_mask(FLOAT32.fraction)
    beyond = field >= FLOAT32.inf >> FLOAT32.fraction
    magnitude = bit_ops.lax_where(beyond, FLOAT32.inf - 1, (field << FLOAT32.fraction) + fraction)
    shift = bit_ops.lax_clip(1 - field, 0, 31)
    digits = significand(v.magnitude, FLOAT32)
    tail = digits & bit_ops.low_mask(shift)
    magnitude = bit_ops.lax_where(field < 1, digits >> shift, magnitude)
    word = shift.astype(v.rest.dtype)
    rest = bit_ops.lax_where(shift > 0, tail.astype(word.dtype) << 1 << (31 - word) | v.rest >> word, v.rest)
    rest = bit_ops.lax_where(beyond, ~jnp.zeros_like(rest), rest)
    return ExactResult(v.sign, magnitude, v.inexact | (tail != 0) | beyond, rest, v.inexact | beyond, beyond)


def _exact_or_case(v: ExactResult, where: Array, number: Array | float) -> ExactResult:
    """`v`, or an exact number if the condition holds."""
    sign, magnitude = _sign_and_magnitude(number)
    return ExactResult(
        bit_ops.lax_where(where, sign, v.sign),
        bit_ops.lax_where(where, magnitude, v.magnitude),
        v.inexact & ~where,
        bit_ops.lax_where(where, 0, v.rest),
        v.sticky & ~where,
        v.beyond & ~where,
    )
