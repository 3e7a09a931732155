"""The parts of an argument, and a function's value in a form that can be rounded once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.exact import Exact, significand
from jchop._core.elementary.pairs import Pair

Array = jax.Array

F32 = CARRIERS["float32"]
_ONE = F32.bias << F32.fraction
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
        return self.magnitude == F32.inf

    @property
    def nan(self) -> Array:
        return self.magnitude > F32.inf

    @property
    def negative(self) -> Array:
        return self.sign != 0

    def exceeds(self, limit: float) -> Array:
        """Whether |x| > limit, or NaN."""
        return self.magnitude > _bits_of(limit)

    def equals(self, number: float) -> Array:
        """Whether |x| is a number."""
        return self.magnitude == _bits_of(number)

    def size(self, least: int, most: int) -> tuple[Array, Array]:
        """|x| with its exponent clamped between two; and x's exponent minus `least` if it is negative, else 0."""
        exponent = _bits.clip(self.exponent, least, most)
        return self.significand * power_of_two(exponent), jnp.minimum(self.exponent - least, 0)

    def clamp(self, least: int, most: float) -> Array:
        """The number x with its magnitude clamped between 2^least and `most`."""
        bits = _bits.clip(self.magnitude, (F32.bias + least) << F32.fraction, _bits_of(most))
        return lax.bitcast_convert_type(bits | self.sign, jnp.float32)

    def signed(self, size: Array) -> Array:
        """A number with the given magnitude and the sign of x."""
        return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | self.sign, jnp.float32)


def _bits_of(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def argument(x: Array) -> Argument:
    """The parts of float32 numbers, also of subnormal ones; infinities and NaN have only a sign and a magnitude."""
    sign, magnitude = _bits.split(x, F32)
    exponent, count = double_word.normalised(magnitude, F32)
    bits = count & _bits.low_mask(F32.fraction) | _ONE
    return Argument(sign, magnitude, lax.bitcast_convert_type(bits, jnp.float32), exponent)


def power_of_two(exponent: Any) -> Any:
    """2^exponent, a normal float32 number."""
    return lax.bitcast_convert_type((exponent + F32.bias) << F32.fraction, jnp.float32)


@dataclass(frozen=True)
class Value:
    """The value of a function: pair 2^exponent, or the number of the last case that holds.

    A pair whose `lo` is zero is exact. `hi` is zero only if a case holds. `flip` has sign bits that change the sign.
    """

    pair: Pair
    exponent: Array | int
    cases: tuple[tuple[Array, Array | float], ...]
    flip: Array | int = 0


def as_odd(value: Value) -> tuple[Array, Array]:
    """Sign and magnitude bits of a value rounded to odd: toward zero, with the last bit set if inexact."""
    sign, bits, low = _taken_apart(value.pair)
    bits = (bits - (low < 0).astype(bits.dtype)) | (low != 0).astype(bits.dtype)
    if not (isinstance(value.exponent, int) and value.exponent == 0):
        field = (bits >> F32.fraction) + value.exponent
        down = _bits.clip(1 - field, 0, F32.fraction + 1)
        count = significand(bits, F32)
        head = count >> down
        small = head | (head << down != count).astype(bits.dtype)
        large = _bits.where(field >= F32.inf >> F32.fraction, F32.inf - 1, bits + (value.exponent << F32.fraction))
        bits = _bits.where(field < 1, small, large)
    for where, number in value.cases:
        case_sign, case_bits = _bits_of_number(number)
        sign, bits = _bits.where(where, case_sign, sign), _bits.where(where, case_bits, bits)
    return sign ^ value.flip, bits


def _taken_apart(pair: Pair) -> tuple[Array, Array, Array]:
    """The sign bit and the bits of |hi|; lo, counted away from zero."""
    sign, bits = _bits.split(pair.hi, F32)
    return sign, bits, lax.bitcast_convert_type(lax.bitcast_convert_type(pair.lo, jnp.int32) ^ sign, jnp.float32)


def _bits_of_number(number: Array | float) -> tuple[Array, Array]:
    return _bits.split(jnp.asarray(number, jnp.float32), F32)


def as_exact(value: Value) -> Exact:
    """A value with the digits that stochastic modes need."""
    sign, bits, low = _taken_apart(value.pair)
    inexact = low != 0
    bits = bits - (low < 0).astype(bits.dtype)
    v = Exact(sign, bits, inexact, _rest(bits, low), inexact, jnp.zeros_like(inexact))
    if not (isinstance(value.exponent, int) and value.exponent == 0):
        v = _scaled(v, value.exponent)
    for where, number in value.cases:
        v = _known(v, where, number)
    return replace(v, sign=v.sign ^ value.flip)


def _rest(bits: Array, low: Array) -> Array:
    """The part below the last place of `bits`, in units of 2^-32 of it; `low` plus one place if `low` is negative."""
    unit = jnp.maximum((bits >> F32.fraction) - F32.fraction, 1)  # the field of that place
    share = low * lax.bitcast_convert_type(2 * _ONE - (unit << F32.fraction), jnp.float32) * 65536.0
    top = jnp.floor(share)
    more = jnp.floor((share - top) * 65536.0)
    return (top.astype(jnp.int32) << 16).astype(jnp.uint32) + more.astype(jnp.uint32)


def _scaled(v: Exact, exponent: Array | int) -> Exact:
    """A normal number times 2^exponent."""
    field = (v.magnitude >> F32.fraction) + exponent
    fraction = v.magnitude & _bits.low_mask(F32.fraction)
    beyond = field >= F32.inf >> F32.fraction
    magnitude = _bits.where(beyond, F32.inf - 1, (field << F32.fraction) + fraction)
    down = _bits.clip(1 - field, 0, 31)
    count = significand(v.magnitude, F32)
    tail = count & _bits.low_mask(down)
    magnitude = _bits.where(field < 1, count >> down, magnitude)
    word = down.astype(v.rest.dtype)
    rest = _bits.where(down > 0, tail.astype(word.dtype) << 1 << (31 - word) | v.rest >> word, v.rest)
    rest = _bits.where(beyond, ~jnp.zeros_like(rest), rest)
    return Exact(v.sign, magnitude, v.inexact | (tail != 0) | beyond, rest, v.inexact | beyond, beyond)


def _known(v: Exact, where: Array, number: Array | float) -> Exact:
    """`v`, or an exact number if the condition holds."""
    sign, magnitude = _bits_of_number(number)
    return Exact(
        _bits.where(where, sign, v.sign),
        _bits.where(where, magnitude, v.magnitude),
        v.inexact & ~where,
        _bits.where(where, 0, v.rest),
        v.sticky & ~where,
        v.beyond & ~where,
    )


# -- float64 -----------------------------------------------------------------------------------------------------------

_F64 = CARRIERS["float64"]
_MORE = _F64.fraction - F32.fraction


def narrowed(x: Array) -> Array:
    """Float64 values that float32 holds, as float32, by bits: devices would convert subnormal numbers to zero."""
    sign, magnitude = _bits.split(x, _F64)
    field = (magnitude >> _F64.fraction) - _F64.bias + F32.bias
    count = (magnitude & _bits.low_mask(_F64.fraction)) >> _MORE
    down = _bits.clip(1 - field, 0, F32.fraction + 1)
    bits = _bits.where(field < 1, (count | 1 << F32.fraction) >> down, (field << F32.fraction) + count)
    bits = _bits.where(magnitude == _F64.inf, F32.inf, _bits.where(magnitude > _F64.inf, F32.nan, bits))
    return _bits.join(_narrow_sign(sign), bits.astype(F32.work), F32)


def _narrow_sign(sign: Array) -> Array:
    return _bits.where(sign != 0, np.int32(F32.sign_bit), np.int32(0))


def widened(x: Array) -> Array:
    """Float32 values as float64, the inverse of `narrow_by_bits`."""
    sign, magnitude = _bits.split(x, F32)
    exponent, count = double_word.normalised(magnitude, F32)
    exponent, count = exponent.astype(_F64.work), count.astype(_F64.work)
    bits = ((exponent + _F64.bias - 1) << _F64.fraction) + (count << _MORE)
    bits = _bits.where(magnitude == F32.inf, _F64.inf, _bits.where(magnitude > F32.inf, _F64.nan, bits))
    bits = _bits.where(magnitude == 0, 0, bits)
    return _bits.join(_bits.where(sign != 0, _F64.sign_bit, 0).astype(_F64.work), bits, _F64)
