"""Narrow floating-point elements under scales in exact floating-point arithmetic; for XLA, like `integers`.

Let 2^q be the spacing of the format at a magnitude. Adding 2^(q + F) rounds the magnitude to a multiple of 2^q, and the
difference of the bits counts the multiples. For a power-of-two scale the quotient's magnitude is exact. For another
scale it is guessed; then the side of the middle of its step on which the number lies decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.rounding.codes import extend_exponent
from jchop._core.scaled.scales import TENSOR_SCALE, BlockScales, ScaledPlan, scale_magnitude
from jchop._core.scaled_float32 import integers, products
from jchop._core.scaled_float32.integers import GroupQuanta, bits_to_float, float_to_bits
from jchop.formats import FloatFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array

#: The element values are from 2^-30 to 2^20.
_LEAST_ELEMENT_EXPONENT, _MOST_ELEMENT_EXPONENT = 30, 20
#: Bits of the upper half of a significand.
_UPPER_HALF_BITS = 12
#: Half of 2^-_SMALLEST times the last bit of a number from 2^-64 on is a normal number.
_MOST_SMALLNESS = 38


def supports_float_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_floats` and `round_float_quotients` give the results of the exact way."""
    fmt = cast(FloatFormat, plan.element.format)
    if not (has_plain_floats(plan) and clamps_overflow(plan)) or plan.element.rounding is not Rounding.NEAREST_EVEN:
        return False
    if plan.is_power:
        return True
    # The bits of the middle of a step, times a block's scale if the tensor has one too, times half of the other scale.
    tensor_scale = plan.rule.tensor_scale
    other = plan.scale.frac_bits + 1 if tensor_scale else 0
    fits = fmt.frac_bits + 2 + other + _UPPER_HALF_BITS <= FLOAT32.fraction + 1
    return fits and (not tensor_scale or _is_near_one(plan))


def _is_near_one(plan: ScaledPlan) -> bool:
    """Whether scales, and elements times scales, may be multiplied by any moved scale, and by its last bit."""
    fmt, scale = plan.element.format, plan.scale
    least = Fraction(scale.smallest) * min(Fraction(fmt.smallest or 1), 1)
    most = Fraction(scale.max) * max(Fraction(fmt.max), 1)
    return least >= Fraction(1, 1 << _MOST_SMALLNESS) and most <= 1 << products.MOST_FACTOR_EXPONENT


def supports_float_decode(plan: ScaledPlan) -> bool:
    """Whether `multiply_floats_by_scales` gives the numbers of the exact way."""
    if not has_plain_floats(plan):
        return False
    if plan.rule.tensor_scale:
        return _supports_two_scales(plan)
    return plan.carrier is FLOAT32 or (_float_products_are_exact(plan) and _float_products_are_multiples(plan))


def _float_products_are_exact(plan: ScaledPlan) -> bool:
    """Whether products with scales need rounding only below the normal range."""
    fmt = cast(FloatFormat, plan.element.format)
    return plan.is_power or fmt.frac_bits + plan.scale.frac_bits + 2 <= FLOAT32.fraction + 1


def _float_products_are_multiples(plan: ScaledPlan) -> bool:
    """Whether every product is a multiple of the smallest number."""
    smallest = Fraction(plan.scale.smallest) * Fraction(plan.element.format.smallest or 1)
    return smallest >= Fraction(2) ** FLOAT32.tiny_exponent


def _supports_two_scales(plan: ScaledPlan) -> bool:
    scale, fmt = plan.scale, plan.element.format
    assert fmt.smallest is not None
    ends = (scale.smallest * fmt.smallest, scale.max * fmt.max)
    within = all(2.0**-products.LEAST_FACTOR_EXPONENT <= end <= 2.0**products.MOST_FACTOR_EXPONENT for end in ends)
    return plan.carrier is FLOAT32 and _float_products_are_exact(plan) and within


def clamps_overflow(plan: ScaledPlan) -> bool:
    """Whether numbers beyond the ends become the ends, and subnormal elements stay."""
    element = plan.element
    return (element.overflow is Overflow.SATURATE or element.format.saturates) and not element.flush


def has_plain_floats(plan: ScaledPlan) -> bool:
    """Whether the elements are those of a narrow float format with subnormal numbers and signed zeros."""
    fmt = plan.element.format
    if plan.compute is not FLOAT32 or not isinstance(fmt, FloatFormat) or not fmt.has_negative_zero:
        return False
    # With one bit of precision the parity of the exponent decides a tie.
    plain = fmt.subnormals and fmt.frac_bits > 0 and fmt.bits <= 16
    return (
        plain
        and Fraction(1, 1 << _LEAST_ELEMENT_EXPONENT)
        <= Fraction(fmt.smallest)
        <= Fraction(fmt.max)
        <= 1 << _MOST_ELEMENT_EXPONENT
    )


# -- rounding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GridStep:
    """A magnitude on the format's grid: 2^(q + F), its sum with the magnitude, and the exponent bits of the binade."""

    shift: Array
    total: Array
    exponent: Array

    def code(self, fmt: FloatFormat) -> Array:
        count = float_to_bits(self.total) - float_to_bits(self.shift)
        return count + ((self.exponent - _least_exponent_bits(fmt)) >> (FLOAT32.fraction - fmt.frac_bits))

    @property
    def number(self) -> Array:
        return self.total - self.shift


def _least_exponent_bits(fmt: FloatFormat) -> int:
    """Exponent bits of the smallest normal number."""
    return (fmt.emin + FLOAT32.bias) << FLOAT32.fraction


def _nearest_grid_step(magnitude: Array, fmt: FloatFormat, below_middle: bool) -> _GridStep:
    """The multiple nearest to a magnitude; if `below_middle`, the multiple below the middle of its step."""
    exponent = jnp.maximum(float_to_bits(magnitude) & FLOAT32.inf, _least_exponent_bits(fmt))
    shift = exponent + ((FLOAT32.fraction - fmt.frac_bits) << FLOAT32.fraction)
    if below_middle:
        magnitude = magnitude - bits_to_float(shift - ((FLOAT32.fraction + 1) << FLOAT32.fraction))
    return _GridStep(bits_to_float(shift), magnitude + bits_to_float(shift), exponent)


def encode_floats(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    fmt = cast(FloatFormat, plan.element.format)
    sign, magnitude = bit_ops.split_sign(x, FLOAT32)
    top = fmt.code_of(fmt.max)
    assert top is not None
    code = _saturate_at_top(_nearest_quotient(x, magnitude, scales, plan).code(fmt), top, magnitude, plan)
    return sign_codes(code, sign, magnitude, fmt)


def sign_codes(code: Array, sign: Array, magnitude: Array, fmt: FloatFormat) -> Array:
    """Codes of magnitudes with the signs of numbers; NaN has its code, or that of the largest number."""
    nan = fmt.code_of(math.nan)
    negative = lax.shift_right_logical(sign, jnp.full_like(sign, FLOAT32.width - fmt.bits))
    nan = fmt.code_of(fmt.max) if nan is None else nan
    return bit_ops.lax_where(magnitude > FLOAT32.inf, nan, code | negative).astype(fmt.code_dtype)


def round_float_quotients(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The values of the codes of `encode_floats`, without the scales."""
    fmt = cast(FloatFormat, plan.element.format)
    sign, magnitude = bit_ops.split_sign(x, FLOAT32)
    number = _saturate_at_top(_nearest_quotient(x, magnitude, scales, plan).number, float(fmt.max), magnitude, plan)
    nan = math.nan if fmt.has_nan else float(fmt.max)
    return bit_ops.lax_where(magnitude > FLOAT32.inf, nan, bits_to_float(float_to_bits(number) | sign))


def _saturate_at_top(value: Array, top: float, magnitude: Array, plan: ScaledPlan) -> Array:
    value = jnp.minimum(value, top)
    return value if plan.in_safe_range else bit_ops.lax_where(magnitude >= FLOAT32.inf, top, value)


def _nearest_quotient(x: Array, magnitude: Array, scales: BlockScales, plan: ScaledPlan) -> _GridStep:
    """The quotients' magnitudes on the grid; a magnitude too large for the format stays above its largest number."""
    if not plan.is_power:
        return _divide_floats(x, scales, plan)
    return (_divide_floats_by_safe_power if plan.in_safe_range else _divide_floats_by_power)(magnitude, scales, plan)


def _divide_floats_by_power(magnitude: Array, scales: BlockScales, plan: ScaledPlan) -> _GridStep:
    exponent = scales.value
    # Zero, and numbers far larger than the scale, are clamped so that the field of the quotient does not overflow.
    most = (FLOAT32.inf - 1) + (jnp.minimum(exponent, 0) << FLOAT32.fraction)
    within = jnp.minimum(
        jnp.maximum(extend_exponent(magnitude, FLOAT32), -(_LEAST_ELEMENT_EXPONENT << FLOAT32.fraction)), most
    )
    bits = within - (exponent << FLOAT32.fraction)
    low, high = (
        float_to_bits(jnp.float32(end))
        for end in (2.0 ** -(_LEAST_ELEMENT_EXPONENT + 2), 2.0 ** (_MOST_ELEMENT_EXPONENT + 2))
    )
    fmt = cast(FloatFormat, plan.element.format)
    return _nearest_grid_step(bits_to_float(bit_ops.lax_clip(bits, low, high)), fmt, below_middle=False)


def _divide_floats_by_safe_power(magnitude: Array, scales: BlockScales, plan: ScaledPlan) -> _GridStep:
    """`_divide_floats_by_power` for safe scales: a product with 1 / s is exact, or far outside the format."""
    fmt = cast(FloatFormat, plan.element.format)
    quotient = bits_to_float(magnitude) * plan.backend.per_group(
        bits_to_float((FLOAT32.bias - scales.value) << FLOAT32.fraction)
    )
    return _nearest_grid_step(
        bit_ops.lax_where(quotient < float(fmt.max), quotient, float(fmt.max)), fmt, below_middle=False
    )


def _divide_floats(x: Array, scales: BlockScales, plan: ScaledPlan) -> _GridStep:
    fmt = cast(FloatFormat, plan.element.format)
    divisor, high, low = _halves_of_scales(scales, plan)
    divisor, inverse, high, low = plan.backend.per_group((divisor, 1 / (high + low), high, low))
    numbers = bits_to_float(float_to_bits(integers.move_with_quanta(x, divisor)) & bit_ops.low_mask(FLOAT32.width - 1))
    guess = numbers * inverse
    guess = bit_ops.lax_where(guess < float(fmt.max), guess, float(fmt.max))
    step = _nearest_grid_step(guess, fmt, below_middle=True)
    middle = step.number + bits_to_float(float_to_bits(step.shift) - ((FLOAT32.fraction + 1) << FLOAT32.fraction))
    side = float_to_bits((numbers - middle * high) - middle * low)
    up = side + (float_to_bits(step.total) & 1) > 0
    return replace(step, total=bits_to_float(float_to_bits(step.total) + up))


def _halves_of_scales(scales: BlockScales, plan: ScaledPlan) -> tuple[GroupQuanta, Array, Array]:
    """The move of the numbers, and the moved scales as sums of two numbers of few bits."""
    if scales.tensor is None:
        divisor = integers.quanta_of(scales, plan)
        high = _upper_half_of_float(divisor.value)
        return divisor, high, divisor.value - high
    divisor = integers.quanta_of_bits(extend_exponent(scales.tensor, FLOAT32))
    own, high = bits_to_float(scale_magnitude(scales, plan)), _upper_half_of_float(divisor.value)
    assert TENSOR_SCALE.frac_bits == FLOAT32.fraction
    return divisor, own * high, own * (divisor.value - high)


def _upper_half_of_float(x: Array) -> Array:
    return bits_to_float(float_to_bits(x) & ~bit_ops.low_mask(FLOAT32.fraction + 1 - _UPPER_HALF_BITS))


# -- numbers -----------------------------------------------------------------------------------------------------------


def decode_floats(codes: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Codes times scales, if `multiply_floats_by_scales` applies."""
    fmt = cast(FloatFormat, plan.element.format)
    return multiply_floats_by_scales(_decode_float_codes(codes.astype(jnp.int32), fmt), scales, plan)


def multiply_floats_by_scales(values: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Values of the format times scales, rounded once; float32.

    In a narrower carrier they are exact; rounding to it remains. If the tensor has a scale, the product with a block's
    scale is exact.
    """
    if scales.tensor is not None:
        own = bits_to_float(plan.backend.per_group(scale_magnitude(scales, plan)))
        return products.multiply_by_scale_bits(values * own, scales.tensor, plan)
    if not (_float_products_are_exact(plan) or plan.in_safe_range):
        return products.multiply_by_scale_bits(values, scale_magnitude(scales, plan), plan)
    quanta = plan.backend.per_group(integers.quanta_of(scales, plan, huge_too=False))
    return integers.move_back_products(values * quanta.value, quanta)


def _decode_float_codes(codes: Array, fmt: FloatFormat) -> Array:
    width = fmt.bits - 1
    code = codes & bit_ops.low_mask(width)
    normal = (code << (FLOAT32.fraction - fmt.frac_bits)) + ((FLOAT32.bias - fmt.bias) << FLOAT32.fraction)
    small = float_to_bits(code.astype(jnp.float32) * 2.0 ** (fmt.emin - fmt.frac_bits))
    bits = bit_ops.lax_where(code < 1 << fmt.frac_bits, small, normal)
    if fmt.has_inf:
        bits = bit_ops.lax_where(code == fmt.inf_code, FLOAT32.inf, bits)
    bits = bits | codes >> width << (FLOAT32.width - 1)
    if fmt.has_nan:
        last = fmt.max_code if fmt.inf_code is None else fmt.inf_code
        bits = bit_ops.lax_where(code > last, FLOAT32.nan, bits)
    return bits_to_float(bits)
