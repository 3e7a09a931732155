"""Rounding of a hardware result with a known error, if the same number of last bits is dropped from every value.

This holds for sums of values of the format itself, which are exact below its normal range. It also holds in the whole
range of a format with the carrier's own exponents, whose spacing grows with the carrier's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.rounding.elements import apply_overflow
from jchop._core.rounding.grid import make_grid
from jchop._core.rounding.modes import NEAREST_MODES, ROUNDING_ADDENDS, GridCut, take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, FloatFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array


def has_constant_drop(spec: Spec, carrier: Carrier) -> bool:
    """Whether `round_with_error` is right for the values in the docstring of this module."""
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding is Rounding.STOCHASTIC_C or spec.flush:
        return False
    has_all_signs = fmt.subnormals and fmt.zero and fmt.signed and fmt.has_negative_zero
    has_spare = 0 < fmt.frac_bits <= carrier.fraction - 2 and fmt.emin >= 1 - carrier.bias
    return has_all_signs and has_spare and spec.overflow is not Overflow.WRAP


def needs_error_digits(spec: Spec) -> bool:
    """Whether `round_with_error` needs the digits of an error, and not only its sign."""
    return ROUNDING_ADDENDS[spec.rounding] is GridCut.random


def word_surplus_bits(spec: Spec, carrier: Carrier) -> int:
    """F: the number of bits of a random word minus the number of dropped bits."""
    return carrier.work_width - _drop_count(spec.format, carrier)


def error_of_sum(error: Array, magnitude: Array, spec: Spec, carrier: Carrier) -> tuple[Array, Array | None]:
    """The arguments `error` and `binade` of `round_with_error`, from the error and the magnitude bits of a sum."""
    if not needs_error_digits(spec):
        return error, None
    below = magnitude - (error < 0).astype(magnitude.dtype)
    if word_surplus_bits(spec, carrier) > carrier.fraction:
        return _error_in_parts(error, magnitude, below, spec, carrier), None
    # A smaller sum has no error, but the numbers that are compared with it must not vanish.
    below = jnp.maximum(below, (_least_binade(spec, carrier) + carrier.bias) << carrier.fraction) & carrier.inf
    return error, lax.bitcast_convert_type(below, error.dtype)


def _least_binade(spec: Spec, carrier: Carrier) -> int:
    """The exponent of the smallest power of two for which 2^-F of the last place is a normal number."""
    return 1 - carrier.bias + carrier.fraction + word_surplus_bits(spec, carrier)


def _error_in_parts(error: Array, magnitude: Array, below: Array, spec: Spec, carrier: Carrier) -> Array:
    """The error of a sum in units of 2^-F of the last place of `below`, the next lower bits if it is negative."""
    surplus = word_surplus_bits(spec, carrier) + carrier.fraction
    # If the error is not zero, the sum is not small, and the unit's factor is finite.
    min_field = carrier.work_width - 2 + carrier.fraction
    below = jnp.maximum(below, min_field << carrier.fraction) & carrier.inf
    bits = ((surplus - min_field + 2 * carrier.bias) << carrier.fraction) - (below - (min_field << carrier.fraction))
    many = error * lax.bitcast_convert_type(bits, error.dtype)
    many = bit_ops.lax_where(error < 0, jnp.minimum(many, error.dtype.type(-0.5)), many)  # also an error that vanished
    return bit_ops.lax_where(magnitude < carrier.inf, many, error.dtype.type(0))


def round_with_error(
    sign: Array,
    magnitude: Array,
    bits: Array,
    error: Array | None,
    spec: Spec,
    carrier: Carrier,
    word: Array | None,
    binade: Array | None = None,
    may_exceed_infinity: bool = False,
) -> Array:
    """A number rounded once under `spec`.

    Args:
        sign: its sign bit, in place.
        magnitude: below the bits of infinity for finite numbers, equal for infinities, above for NaN.
        bits: the magnitude's bits, rounded to nearest.
        error: the exact number minus `bits`, counted away from zero; NaN beside infinities, for no error. For modes
            that need its digits, in units of 2^-F of the last place, unless there is a `binade`. For other modes only
            its sign matters. None: no error that has an effect.
        spec: of a format that `has_constant_drop`.
        carrier: the carrier of the bits.
        word: a random word for each element, for the stochastic modes.
        binade: the power of two of the last places, for an error in its own units.
        may_exceed_infinity: whether `bits` of finite numbers may be above the bits of infinity.
    """
    assert isinstance(spec.format, FloatFormat)
    drop = _drop_count(spec.format, carrier)
    mask = bit_ops.low_mask(drop)
    carries = (spec.rounding in NEAREST_MODES or spec.rounding.stochastic) and spec.overflow is Overflow.IEEE
    carries = carries and spec.format.has_inf and make_grid(spec.format, carrier).top_bits == (carrier.inf - 1) & ~mask
    bits = jnp.minimum(bits, carrier.nan - (not carries))  # a NaN with more bits could overflow by the carry
    random = take_random_bits(word, spec, carrier)
    if needs_error_digits(spec):
        assert error is not None and random is not None
        rounded_bits = _add_error_and_word(bits, error, binade, random.word, spec, carrier) & ~mask
    else:
        if error is not None:  # rounded to odd
            below, above = error < 0, error > 0
            bits = (bits - below.astype(bits.dtype)) | (below | above).astype(bits.dtype)
        last = bits >> drop & 1
        cut = GridCut(bits, drop, drop, mask, last, sign != 0, random)
        rounded_bits = (bits + ROUNDING_ADDENDS[spec.rounding](cut)) & ~mask
    if carries:  # the carry out of the largest value is infinity
        if may_exceed_infinity:
            rounded_bits = bit_ops.lax_where(
                magnitude < carrier.inf, jnp.minimum(rounded_bits, carrier.inf), rounded_bits
            )
        return bit_ops.join_sign(sign, rounded_bits, carrier)
    clipped_bits = apply_overflow(magnitude, rounded_bits, sign != 0, spec, make_grid(spec.format, carrier))
    return bit_ops.join_sign(sign, bit_ops.lax_where(magnitude > carrier.inf, magnitude, clipped_bits), carrier)


def _add_error_and_word(
    bits: Array, error: Array, binade: Array | None, word: Array, spec: Spec, carrier: Carrier
) -> Array:
    """The sum of the bits, the error and the word, whose last F bits are below the bits; the dropped bits remain."""
    surplus, fraction, float_type = word_surplus_bits(spec, carrier), carrier.fraction, np.dtype(carrier.name).type
    bits = bits + (word >> surplus).astype(bits.dtype)
    if surplus > fraction:
        low = _low_word_bits(word, surplus).astype(bits.dtype)
        return bits + ((jnp.floor(error).astype(bits.dtype) + low) >> surplus)
    # The low bits of the word as the low bits of a float, which is too large by 2^first.
    lead = fraction if binade is None else -surplus
    exponent = word.dtype.type((lead + carrier.bias) << fraction)
    low = lax.bitcast_convert_type(_low_word_bits(word, surplus) | exponent, error.dtype)
    over, under = low - float_type(2.0**lead + 2.0 ** (lead - fraction + surplus)), low - float_type(2.0**lead)
    if binade is not None:
        over, under = over * binade, under * binade
    return bits + (error + over >= 0).astype(bits.dtype) - (error + under < 0).astype(bits.dtype)


def _drop_count(fmt: ElementFormat, carrier: Carrier) -> int:
    assert isinstance(fmt, FloatFormat)
    return carrier.fraction - fmt.frac_bits


def _low_word_bits(word: Array, bits: int) -> Array:
    return word & word.dtype.type((1 << bits) - 1)
