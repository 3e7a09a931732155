"""Tiles of plain numbers, in a fraction of the operations of the general way; for kernels.

In a tile of finite numbers whose scales are moderate, subnormal intermediate numbers have no effect. A kernel checks
each block, and takes the short way or the general one for the whole tile. Both give the same bits.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT32, lax_where, low_mask, split_sign
from jchop._core.elementary.pairs import split_significand
from jchop._core.rounding.codes import bits_to_float, encode_elements, float_to_bits
from jchop._core.scaled import elements, grid_elements
from jchop._core.scaled.elements import (
    SAFE_EXPONENT,
    BlockScales,
    ScaledPlan,
    are_in_safe_range,
    choose_scales,
    divisor_parts,
    exponent_carry,
    exponent_lag,
    narrow_16_bit,
    scale_magnitude,
)
from jchop.formats import FloatFormat, UniformFormat
from jchop.formats._catalogue import binary32
from jchop.formats.rounding import Rounding

# == scales that are powers of two =====================================================================================
# x / s is one exact multiplication, and rounding to nearest even is one addition.


#: The largest magnitudes of plain blocks are zero or from 2^-60 to 2^60; the values of element formats, from 2^-30 to
#: 2^20.
_PLAIN_BLOCK_EXPONENT, _PLAIN_LEAST_EXPONENT, _PLAIN_MOST_EXPONENT = 60, 30, 20


def round_tile_by_powers(
    x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> Array:
    """The result of `elements.round_block_tile`."""

    def general() -> Array:
        return elements.round_block_tile(x, axis, plan, word, tensor)

    # A result may be below the normal numbers of float16.
    if not supports_plain_power_tiles(plan) or plan.carrier.name == "float16":
        return general()
    largest = largest_with_specials(x, axis, plan)
    return lax.cond(all_true(are_plain(largest), plan), lambda: _round_plain_tile(x, largest, plan), general)


def quantize_tile_by_powers(
    x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> tuple[Array, Array]:
    """The result of `elements.quantize_block_tile`."""

    def general() -> tuple[Array, Array]:
        return elements.quantize_block_tile(x, axis, plan, word, tensor)

    if not supports_plain_power_tiles(plan):
        return general()
    largest = largest_with_specials(x, axis, plan)
    return lax.cond(all_true(are_plain(largest), plan), lambda: _quantize_plain_tile(x, largest, plan), general)


def supports_plain_power_tiles(plan: ScaledPlan) -> bool:
    """Whether the plan allows the short way for plain blocks."""
    element = plan.element
    fmt = element.format
    if plan.compute is not FLOAT32 or not plan.stores_exponents or plan.rule.carry is None or element.flush:
        return False
    low, _, high = plan.exponents
    if low > -(_PLAIN_BLOCK_EXPONENT + _PLAIN_MOST_EXPONENT + 2):
        return False
    if high < _PLAIN_BLOCK_EXPONENT + _PLAIN_LEAST_EXPONENT + 2 or element.rounding is not Rounding.NEAREST_EVEN:
        return False
    if isinstance(fmt, UniformFormat):
        return fmt.signed and fmt.bits <= 16 and 15 - _PLAIN_MOST_EXPONENT <= fmt.frac_bits <= _PLAIN_LEAST_EXPONENT
    return grid_elements.has_plain_floats(plan) and grid_elements.clamps_overflow(plan)


# -- whole blocks ------------------------------------------------------------------------------------------------------


def largest_with_specials(x: Array, axis: int | tuple[int, ...], plan: ScaledPlan) -> Array:
    """Bits of the largest magnitude of each block, infinities and NaN included."""
    return plan.backend.maximum(split_sign(x, FLOAT32)[1], axis=axis, keepdims=True)


def are_plain(largest: Array) -> Array:
    """Whether each block's largest magnitude is zero or far from both ends of the carrier."""
    low, high = (
        FLOAT32.magnitude_bits(Fraction(2) ** exponent) for exponent in (-_PLAIN_BLOCK_EXPONENT, _PLAIN_BLOCK_EXPONENT)
    )
    assert low is not None and high is not None
    return (largest == 0) | (largest >= low) & (largest <= high)


def all_true(blocks: Array, plan: ScaledPlan) -> Array:
    """Whether a condition holds for all blocks of a tile."""
    wrong = lax_where(blocks, jnp.zeros(blocks.shape, jnp.int32), 1)
    return plan.backend.maximum(wrong, axis=tuple(range(blocks.ndim)), keepdims=False) == 0


def _plain_scale_exponent(largest: Array, plan: ScaledPlan) -> Array:
    exponent = ((largest + exponent_carry(plan)) >> FLOAT32.fraction) - exponent_lag(plan)
    return lax_where(largest == 0, plan.exponents[1], exponent)


def _plain_scale(exponent: Array) -> Array:
    return bits_to_float((exponent + FLOAT32.bias) << FLOAT32.fraction)


def _quantize_plain_tile(x: Array, largest: Array, plan: ScaledPlan) -> tuple[Array, Array]:
    """Codes of the elements and of the scales of a tile whose scales are powers of two."""
    exponent, scale = _plain_scale_exponent(largest, plan), plan.scale
    quotient, fmt = x * _plain_scale(-exponent), plan.element.format
    assert isinstance(fmt, FloatFormat | UniformFormat)
    if isinstance(fmt, FloatFormat):
        sign, step = _round_plain_quotient(quotient, fmt)
        codes = step.code(fmt) | lax.shift_right_logical(sign, jnp.full_like(sign, 32 - fmt.bits))
    else:
        total = jnp.minimum(jnp.maximum(quotient, float(fmt.min)), float(fmt.max)) + _uniform_shift(fmt)
        codes = float_to_bits(total) & low_mask(fmt.bits)
    return codes.astype(fmt.code_dtype), (exponent + scale.bias).astype(scale.code_dtype)


def _round_plain_tile(x: Array, largest: Array, plan: ScaledPlan) -> Array:
    """The numbers of a tile rounded under scales that are powers of two."""
    exponent, fmt = _plain_scale_exponent(largest, plan), plan.element.format
    assert isinstance(fmt, FloatFormat | UniformFormat)
    scale = _plain_scale(exponent)
    if isinstance(fmt, FloatFormat):
        sign, step = _round_plain_quotient(x * _plain_scale(-exponent), fmt)
        return narrow_16_bit(bits_to_float(float_to_bits(step.number) | sign) * scale, plan.carrier)
    # On the scaled grid itself: XLA would combine the addition and subtraction of a constant.
    shift = scale * _uniform_shift(fmt)
    within = jnp.minimum(jnp.maximum(x, scale * float(fmt.min)), scale * float(fmt.max))
    return narrow_16_bit((within + shift) - shift, plan.carrier)


def _round_plain_quotient(quotient: Array, fmt: FloatFormat) -> tuple[Array, grid_elements.GridStep]:
    """The sign bits and the grid steps of quotients, clamped to the format's largest value."""
    sign, bits = split_sign(quotient, FLOAT32)
    return sign, grid_elements.nearest_grid_step(jnp.minimum(bits_to_float(bits), float(fmt.max)), fmt)


def _uniform_shift(fmt: UniformFormat) -> float:
    """The constant whose sum with a number is a multiple of the quantum, with its code in the low bits."""
    return 1.5 * 2.0 ** (FLOAT32.fraction - fmt.frac_bits)


# == other scales ======================================================================================================
# A product with 1 / s guesses x / s to a quarter of a step, and the guess is rounded to the nearest half step m. If m
# is a value of the format, it is the result. Otherwise it is the middle of two, and the sign of m s - x decides; with
# s in two halves, `grid_elements` tells why this sign is exact.


#: Bits of half a significand.
_HALF_SIGNIFICAND_BITS = 12
#: The bits of 1.5 2^(F - 1). In sums with it a half is the last bit.
_HALF_STEP_BITS = int(np.float32(1.5 * 2.0 ** (FLOAT32.fraction - 1)).view(np.int32))


def supports_plain_tiles(plan: ScaledPlan) -> bool:
    """Whether the plan allows this short way, and not the shorter one of `supports_plain_power_tiles`."""
    nearest = plan.element.rounding is Rounding.NEAREST_EVEN and not supports_plain_power_tiles(plan)
    return nearest and (grid_elements.supports_integer_encode(plan) or grid_elements.supports_float_encode(plan))


def plain_tile_scales(
    x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None
) -> tuple[BlockScales, Array, Array]:
    """The scales of a tile if it is plain, the largest magnitude of each block, and whether the tile is plain.

    Args:
        x: numbers from `widen_16_bit`; a block may be padded with zeros.
        axis: the axis of the blocks.
        plan: a plan for which `supports_plain_tiles` holds.
        tensor: as for `choose_scales`.
    """
    largest = largest_with_specials(x, axis, plan)
    (count, exponent), *more = map(divisor_parts, plan.divisors)
    plain = not (more or plan.is_power or plan.rule.tensor_scale or plan.fmt.nan_block) and plan.scale == binary32
    if plain and count < 1 << _HALF_SIGNIFICAND_BITS and abs(exponent) < SAFE_EXPONENT:
        scales = BlockScales(_divide_by_short_divisor(largest, plan))
    else:
        scales = choose_scales(x, axis, plan, tensor)
    return scales, largest, all_true(are_plain(largest) & are_in_safe_range(scales, plan), plan)


def _divide_by_short_divisor(largest: Array, plan: ScaledPlan) -> Array:
    """Bits of plain magnitudes over a divisor of 12 bits, rounded to nearest even.

    The product with its inverse is wrong by less than two units in the last place, which the exact rest corrects. No
    quotient is so close to the middle of two numbers that the error of the correction has an effect.
    """
    number, divisor = bits_to_float(largest), float(plan.divisors[0])
    guess = number * (1 / divisor)
    high, low = split_significand(guess)
    rest = (number - high * divisor) - low * divisor
    return lax_where(largest == 0, plan.scale_bits[1], float_to_bits(guess + rest * (1 / divisor)))


def encode_tile(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The codes of any numbers under their scales, by the general way."""
    return encode_elements(elements.round_block_quotients(x, scales, plan, None), plan.element.format, plan.compute)


class _SplitScale(NamedTuple):
    """Scales as sums of two numbers of few bits, and about their inverse."""

    inverse: Array
    high: Array
    low: Array


def encode_plain_tile(x: Array, scales: BlockScales, largest: Array, plan: ScaledPlan) -> Array:
    """The result of `encode_tile` for a plain tile and its scales."""
    fmt, block_scale = plan.element.format, bits_to_float(scale_magnitude(scales, plan))
    assert isinstance(fmt, FloatFormat | UniformFormat)
    # Of elements in units of the quantum, or of half the smallest normal number.
    unit = Fraction(2) ** (fmt.emin - 1 if isinstance(fmt, FloatFormat) else -fmt.frac_bits)
    split_scale = block_scale if scales.tensor is None else bits_to_float(scales.tensor)
    scale_high, scale_low = split_significand(split_scale)
    other_factor = float(unit) if scales.tensor is None else block_scale * float(unit)
    scale_high, scale_low = scale_high * other_factor, scale_low * other_factor
    scale = _SplitScale(1 / (scale_high + scale_low), scale_high, scale_low)
    quotient_limits = None if _stays_within_ends(plan) else (float(fmt.min / unit), float(fmt.max / unit))
    if isinstance(fmt, FloatFormat):
        return _encode_float_tile(x, scale, quotient_limits, fmt).astype(fmt.code_dtype)
    return _encode_uniform_tile(x, scale, largest, quotient_limits, fmt).astype(fmt.code_dtype)


def _stays_within_ends(plan: ScaledPlan) -> bool:
    """Whether no quotient by a moderate scale is rounded beyond the ends, because the scale was not rounded far."""
    fmt, scale = plan.element.format, plan.scale
    assert isinstance(fmt, FloatFormat | UniformFormat)
    if len(plan.divisors) > 1 or plan.rule.tensor_scale or scale.emin > -SAFE_EXPONENT or scale.emax < SAFE_EXPONENT:
        return False
    largest = max(plan.divisors) / (1 - Fraction(1, 2 << scale.frac_bits))
    last = Fraction(2) ** ((fmt.emax if isinstance(fmt, FloatFormat) else 0) - fmt.frac_bits)
    return largest < min(Fraction(fmt.max), -Fraction(fmt.min)) + last / 2


def _encode_uniform_tile(
    x: Array, scale: _SplitScale, largest: Array, quotient_limits: tuple | None, fmt: UniformFormat
) -> Array:
    """Codes of a tile's numbers over its scale: a guess by the inverse, then a comparison with the middle."""
    guess = x * scale.inverse
    guess = (
        guess if quotient_limits is None else jnp.minimum(jnp.maximum(guess, quotient_limits[0]), quotient_limits[1])
    )
    # Where XLA interprets a kernel, it would remove the addition and subtraction of a constant. It does not know that
    # the sign bit of a magnitude is 0.
    half_step_shift = bits_to_float(_HALF_STEP_BITS | largest & FLOAT32.sign_bit)
    total = guess + half_step_shift
    round_up = _is_above_middle(total, total - half_step_shift, x, scale)
    return (float_to_bits(total) + round_up) >> 1 & low_mask(fmt.bits)


def _encode_float_tile(
    x: Array, scale: _SplitScale, quotient_limits: tuple[float, float] | None, fmt: FloatFormat
) -> Array:
    """Codes of a tile's numbers over its scale: a guess by the inverse, then a comparison with the middle."""
    sign, magnitude = split_sign(x, FLOAT32)
    magnitude = bits_to_float(magnitude)
    guess = magnitude * scale.inverse
    guess = guess if quotient_limits is None else jnp.minimum(guess, quotient_limits[1])
    exponent = jnp.maximum(float_to_bits(guess) & FLOAT32.inf, (FLOAT32.bias + 1) << FLOAT32.fraction)
    half_step_shift = bits_to_float(exponent) * 2.0 ** (FLOAT32.fraction - fmt.frac_bits - 1)
    total = guess + half_step_shift
    round_up = _is_above_middle(total, total - half_step_shift, magnitude, scale)
    # The bits of `total` count half steps, and the exponent the binades. Bits beyond the code are not stored: bits of
    # the exponent of `shift`, and the bias, which is 128.
    code = (float_to_bits(total) + (exponent >> (FLOAT32.fraction - fmt.frac_bits - 1)) + round_up) >> 1
    return code & low_mask(fmt.bits - 1) | lax.shift_right_logical(sign, jnp.full_like(sign, 32 - fmt.bits))


def _is_above_middle(total: Array, middle: Array, x: Array, scale: _SplitScale) -> Array:
    """1 if a number is above its middle, or in it below an even number, else 0. If `middle` is none, it may be both."""
    side = float_to_bits((middle * scale.high - x) + middle * scale.low) - (float_to_bits(total) & 2)
    return lax.shift_right_logical(side, jnp.full_like(side, FLOAT32.width - 1))
