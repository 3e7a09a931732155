"""Tiles of plain numbers under scales that are powers of two, in a third of the operations; for kernels.

If every number of a tile is finite, and no block's largest number is extreme, subnormal intermediate numbers have no
effect. Then x / s is one exact multiplication, and rounding to nearest even is one addition. A kernel checks the
largest magnitude of each block, and takes this way or the general one for the whole tile. Both give the same bits.
"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.scaled import elements
from jchop._core.scaled.elements import narrow_16_bit
from jchop._core.scaled.scales import ScaledPlan, exponent_carry, exponent_lag
from jchop.formats import FloatFormat, UniformFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array

#: The largest magnitudes of plain blocks are zero or from 2^-60 to 2^60; the values of element formats, from 2^-30 to
#: 2^20.
_PLAIN_BLOCK_EXPONENT, _PLAIN_LEAST_EXPONENT, _PLAIN_MOST_EXPONENT = 60, 30, 20


def round_tile_by_powers(
    x: Array, axis: int, plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> Array:
    """The result of `elements.round_block_tile`."""

    def general() -> Array:
        return elements.round_block_tile(x, axis, plan, word, tensor)

    # A result may be below the normal numbers of float16.
    if not supports_plain_power_tiles(plan) or plan.carrier.name == "float16":
        return general()
    largest = largest_with_specials(x, axis)
    return lax.cond(all_true(are_plain(largest)), lambda: _round_plain_tile(x, largest, plan), general)


def quantize_tile_by_powers(
    x: Array, axis: int, plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> tuple[Array, Array]:
    """The result of `elements.quantize_block_tile`."""

    def general() -> tuple[Array, Array]:
        return elements.quantize_block_tile(x, axis, plan, word, tensor)

    if not supports_plain_power_tiles(plan):
        return general()
    largest = largest_with_specials(x, axis)
    return lax.cond(all_true(are_plain(largest)), lambda: _quantize_plain_tile(x, largest, plan), general)


def supports_plain_power_tiles(plan: ScaledPlan) -> bool:
    """Whether the plan allows the short way for plain blocks."""
    element = plan.element
    fmt = element.format
    if plan.compute is not FLOAT32 or not plan.stores_exponents or plan.rule.carry is None or element.flush:
        return False
    low, _, high = plan.exponents
    if (
        low > -(_PLAIN_BLOCK_EXPONENT + _PLAIN_MOST_EXPONENT + 2)
        or high < _PLAIN_BLOCK_EXPONENT + _PLAIN_LEAST_EXPONENT + 2
        or element.rounding is not Rounding.NEAREST_EVEN
    ):
        return False
    if (
        not Fraction(1, 1 << _PLAIN_LEAST_EXPONENT)
        <= Fraction(fmt.smallest or 1)
        <= Fraction(fmt.max)
        <= 1 << _PLAIN_MOST_EXPONENT
    ):
        return False
    if isinstance(fmt, UniformFormat):
        return fmt.signed and fmt.bits <= 16
    if not isinstance(fmt, FloatFormat):
        return False
    saturates = element.overflow is not Overflow.IEEE or fmt.saturates
    return saturates and fmt.has_negative_zero and fmt.subnormals and 0 < fmt.frac_bits <= _PLAIN_MOST_EXPONENT


# -- whole blocks ------------------------------------------------------------------------------------------------------


def largest_with_specials(x: Array, axis: int) -> Array:
    """Bits of the largest magnitude of each block, infinities and NaN included."""
    return jnp.max(bit_ops.split_sign(x, FLOAT32)[1], axis=axis, keepdims=True)


def are_plain(largest: Array) -> Array:
    """Whether each block's largest magnitude is zero or far from both ends of the carrier."""
    low, high = (
        FLOAT32.magnitude_bits(Fraction(2) ** exponent) for exponent in (-_PLAIN_BLOCK_EXPONENT, _PLAIN_BLOCK_EXPONENT)
    )
    assert low is not None and high is not None
    return (largest == 0) | (largest >= low) & (largest <= high)


def all_true(blocks: Array) -> Array:
    """Whether a condition holds for all blocks of a tile, by a reduction that kernels have."""
    return jnp.max(bit_ops.lax_where(blocks, jnp.zeros(blocks.shape, jnp.int32), 1).reshape(blocks.size)) == 0


def _plain_scale_exponent(largest: Array, plan: ScaledPlan) -> Array:
    exponent = ((largest + exponent_carry(plan)) >> FLOAT32.fraction) - exponent_lag(plan)
    return bit_ops.lax_where(largest == 0, plan.exponents[1], exponent)


def _plain_scale(exponent: Array) -> Array:
    return lax.bitcast_convert_type((exponent + FLOAT32.bias) << FLOAT32.fraction, jnp.float32)


def _quantize_plain_tile(x: Array, largest: Array, plan: ScaledPlan) -> tuple[Array, Array]:
    exponent, scale = _plain_scale_exponent(largest, plan), plan.scale
    quotient, fmt = x * _plain_scale(-exponent), plan.element.format
    assert isinstance(fmt, FloatFormat | UniformFormat)
    codes = _encode_plain_float(quotient, fmt) if isinstance(fmt, FloatFormat) else _encode_plain_uniform(quotient, fmt)
    return codes.astype(fmt.code_dtype), (exponent + scale.bias).astype(scale.code_dtype)


def _round_plain_tile(x: Array, largest: Array, plan: ScaledPlan) -> Array:
    exponent, fmt = _plain_scale_exponent(largest, plan), plan.element.format
    assert isinstance(fmt, FloatFormat | UniformFormat)
    scale = _plain_scale(exponent)
    if isinstance(fmt, FloatFormat):
        return narrow_16_bit(_round_plain_float(x * _plain_scale(-exponent), fmt) * scale, plan.carrier)
    return narrow_16_bit(_round_plain_uniform(x, scale, fmt), plan.carrier)


# -- floating-point elements -------------------------------------------------------------------------------------------
# Let 2^q be the spacing of the format at a magnitude. Adding 2^(q + F) rounds the magnitude to a multiple of 2^q. The
# difference of the bits counts the multiples: it is the significand of a normal element, and the code of another.


def _add_float_shift(quotient: Array, fmt: FloatFormat) -> tuple[Array, Array, Array, Array]:
    """Sign bit, exponent bits (at least the smallest normal number's), 2^(q + F), and the sum."""
    sign, bits = bit_ops.split_sign(quotient, FLOAT32)
    magnitude = jnp.minimum(lax.bitcast_convert_type(bits, jnp.float32), float(fmt.max))
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    exponent = jnp.maximum(bits & FLOAT32.inf, (fmt.emin + FLOAT32.bias) << FLOAT32.fraction)
    shift = exponent + ((FLOAT32.fraction - fmt.frac_bits) << FLOAT32.fraction)
    shift = lax.bitcast_convert_type(shift, jnp.float32)
    return sign, exponent, shift, magnitude + shift


def _encode_plain_float(quotient: Array, fmt: FloatFormat) -> Array:
    sign, exponent, shift, total = _add_float_shift(quotient, fmt)
    count = lax.bitcast_convert_type(total, jnp.int32) - lax.bitcast_convert_type(shift, jnp.int32)
    binades = (exponent - ((fmt.emin + FLOAT32.bias) << FLOAT32.fraction)) >> (FLOAT32.fraction - fmt.frac_bits)
    return count + binades | lax.shift_right_logical(sign, jnp.full_like(sign, 32 - fmt.bits))


def _round_plain_float(quotient: Array, fmt: FloatFormat) -> Array:
    sign, _, shift, total = _add_float_shift(quotient, fmt)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(total - shift, jnp.int32) | sign, jnp.float32)


# -- integers and fixed point ------------------------------------------------------------------------------------------
# Adding 1.5 times 2^F quanta rounds a number of either sign to a multiple of the quantum. The low bits are then its
# two's complement code.


def _uniform_shift(fmt: UniformFormat) -> float:
    return 1.5 * 2.0 ** (FLOAT32.fraction - fmt.frac_bits)


def _encode_plain_uniform(quotient: Array, fmt: UniformFormat) -> Array:
    total = jnp.minimum(jnp.maximum(quotient, float(fmt.min)), float(fmt.max)) + _uniform_shift(fmt)
    return lax.bitcast_convert_type(total, jnp.int32) & bit_ops.low_mask(fmt.bits)


def _round_plain_uniform(x: Array, scale: Array, fmt: UniformFormat) -> Array:
    """Rounds on the scaled grid itself: XLA would combine the addition and subtraction of a constant."""
    shift = scale * _uniform_shift(fmt)
    within = jnp.minimum(jnp.maximum(x, scale * float(fmt.min)), scale * float(fmt.max))
    return (within + shift) - shift
