"""Blocks of elements that share a scale: the arithmetic of one tile, for every backend.

In a tile, one axis runs through a block. The numbers are divided by the scales and rounded, then multiplied back or
encoded, under a `ScaledPlan`. Kernels run this on their tiles. It is integer arithmetic on bits. So subnormal numbers
that a device reads as zero, and divisions that a compiler replaces by multiplications, do not change a result.
"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32, Carrier
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply_and_round, range_of
from jchop._core.arithmetic.exact import exact_overflow_mask, round_exact
from jchop._core.arithmetic.quotient import (
    Divisor,
    divisor_bits,
    divisor_of,
    divisor_of_product,
    exact_quotient,
    odd_quotient,
    significand_of_extended,
)
from jchop._core.matmul.levels import round_to_levels
from jchop._core.rounding.codes import decode_elements, encode_elements, extend_exponent
from jchop._core.rounding.elements import overflow_mask, round_to_spec
from jchop._core.scaled.scales import (
    TENSOR_SCALE,
    BlockScales,
    ScaledPlan,
    choose_scales,
    number_of_magnitude,
    scale_magnitude,
    store_scales,
)
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, bfloat16, binary16

Array = jax.Array

#: The formats of the 16-bit carriers, to which results of float32 are rounded.
NARROW_SPECS = {"float16": Spec(binary16), "bfloat16": Spec(bfloat16)}


# -- dtypes ------------------------------------------------------------------------------------------------------------


def widen_16_bit(x: Array, carrier: Carrier) -> Array:
    """16-bit numbers in float32, by their bits; others unchanged."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return decode_elements(lax.bitcast_convert_type(x, jnp.uint16), binary16, FLOAT32)


def narrow_16_bit(x: Array, carrier: Carrier) -> Array:
    """Numbers that `carrier` holds, in its dtype; the inverse of `widen_16_bit`."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(encode_elements(x, binary16, FLOAT32), jnp.float16)


# -- division ----------------------------------------------------------------------------------------------------------


def round_block_quotients(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """The quotients x / s rounded once to the element format, as numbers of the arithmetic's carrier."""
    compute, element = plan.compute, plan.element
    sign, magnitude = bit_ops.split_sign(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    levels = isinstance(element.format, CodebookFormat)
    if not plan.is_power and levels != element.rounding.stochastic:
        exact = exact_quotient(sign, magnitude, plain, _scale_divisor(scales, plan), compute)
        if isinstance(element.format, CodebookFormat):
            return _canonical_nan(round_to_levels(exact, element.format, element.rounding, compute), plan)
        return _canonical_nan(round_exact(exact, element, compute, word), plan)
    if plan.is_power:
        quotient = _divide_by_power(magnitude, scales.value, compute)
    else:
        quotient = odd_quotient(magnitude, _scale_divisor(scales, plan), compute)
    x = bit_ops.join_sign(sign, bit_ops.lax_where(plain, quotient, magnitude), compute)
    return _canonical_nan(round_to_spec(x, element, compute, word), plan)


def _canonical_nan(elements: Array, plan: ScaledPlan) -> Array:
    """Elements with every NaN replaced by the NaN of its code, or by the largest value if the format has no NaN."""
    compute, fmt = plan.compute, plan.element.format
    sign, magnitude = bit_ops.split_sign(elements, compute)
    nan = magnitude > compute.inf
    instead = compute.nan if fmt.has_nan else compute.toward_zero(Fraction(fmt.max))[0]
    return bit_ops.join_sign(bit_ops.lax_where(nan, 0, sign), bit_ops.lax_where(nan, instead, magnitude), compute)


def quotient_overflow_mask(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """Whether the rounded quotients x / s are beyond the ends of the element format; NaN counts as inside."""
    compute, element = plan.compute, plan.element
    sign, magnitude = bit_ops.split_sign(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    if plan.is_power:
        quotient = bit_ops.lax_where(plain, _divide_by_power(magnitude, scales.value, compute), magnitude)
        return overflow_mask(bit_ops.join_sign(sign, quotient, compute), element, compute, word)
    return exact_overflow_mask(
        exact_quotient(sign, magnitude, plain, _scale_divisor(scales, plan), compute), element, compute, word
    )


def _divide_by_power(magnitude: Array, exponent: Array, carrier: Carrier) -> Array:
    """Bits of magnitudes divided by 2^exponent, clamped to the normal range, which is wider than all formats."""
    bits = extend_exponent(magnitude, carrier)
    exponent = jnp.maximum(exponent, (bits >> carrier.fraction) - 2 * carrier.bias)
    return jnp.maximum(bits - (exponent << carrier.fraction), 1 << carrier.fraction)


def _scale_divisor(scales: BlockScales, plan: ScaledPlan) -> Divisor:
    compute = plan.compute
    if scales.tensor is None:
        return divisor_of(scales.value, compute)
    bits, width = extend_exponent(scales.value, compute), plan.scale.frac_bits + 1
    count = significand_of_extended(bits, compute) >> (compute.fraction + 1 - width)
    exponent = (bits >> compute.fraction) - compute.bias - (width - 1)
    return divisor_of_product(count, width, exponent, scales.tensor, TENSOR_SCALE.frac_bits, compute)


# -- multiplication ----------------------------------------------------------------------------------------------------


def multiply_by_scales(elements: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The products s e rounded once to nearest, ties to even, as numbers of the plan's carrier."""
    compute = plan.compute
    spec = NARROW_SPECS.get(plan.carrier.name)
    if plan.is_power:
        result = multiply_by_power(elements, scales.value, compute)
        result = result if spec is None else round_to_spec(result, spec, compute)
    else:
        result = _multiply_by_any_scales(elements, scales, spec, plan)
    return narrow_16_bit(put_nan(result, scales.nan, compute), plan.carrier)


def put_nan(x: Array, where: Array | None, carrier: Carrier) -> Array:
    """`x`, with NaN at the marked elements."""
    if where is None:
        return x
    sign, magnitude = bit_ops.split_sign(x, carrier)
    return bit_ops.join_sign(
        bit_ops.lax_where(where, 0, sign), bit_ops.lax_where(where, carrier.nan, magnitude), carrier
    )


def _multiply_by_any_scales(elements: Array, scales: BlockScales, spec: Spec | None, plan: ScaledPlan) -> Array:
    compute = plan.compute
    if scales.tensor is not None:
        # The product of the two scales may be beyond either end of the carrier's range.
        whole = _scale_divisor(scales, plan)
        up = compute.work_width - 1 - divisor_bits(compute)
        v = double_word.multiply_by_wide_exactly(elements, whole.significand << up, whole.field - compute.bias, compute)
        return round_exact(v, spec, compute, None)
    scale = jnp.broadcast_to(number_of_magnitude(scale_magnitude(scales, plan), compute), elements.shape)
    ranges = range_of(plan.element, compute), range_of(Spec(plan.scale), compute)
    return multiply_and_round(elements, scale, spec, compute, None, *ranges)


def multiply_by_power(x: Array, exponent: Array, carrier: Carrier) -> Array:
    """x 2^exponent for zero, normal, infinite or NaN x; to nearest even in the subnormal range."""  # noqa: D403
    fraction, top = carrier.fraction, 2 * carrier.bias + 1
    sign, magnitude = bit_ops.split_sign(x, carrier)
    field = (magnitude >> fraction) + exponent
    right = bit_ops.lax_clip(1 - field, 0, fraction + 2)
    significand = significand_of_extended(magnitude, carrier)
    last = significand >> right & 1
    half = lax.shift_left(jnp.ones_like(right), right) >> 1
    small = (significand + jnp.maximum(half - 1 + last, 0)) >> right
    bits = bit_ops.lax_where(
        field > 0, (jnp.minimum(field, top) << fraction) | magnitude & bit_ops.low_mask(fraction), small
    )
    bits = bit_ops.lax_where(field >= top, carrier.inf, bits)
    return bit_ops.join_sign(
        sign, bit_ops.lax_where((magnitude == 0) | (magnitude >= carrier.inf), magnitude, bits), carrier
    )


# -- tiles -------------------------------------------------------------------------------------------------------------


def round_block_tile(
    x: Array, axis: int, plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> Array:
    """A tile after quantization and dequantization.

    Args:
        x: numbers from `widen_16_bit`; a block may be padded with zeros.
        axis: the axis of the blocks.
        plan: the plan.
        word: for a stochastic element, a word for each number.
        tensor: for a rule with a scale of the tensor, its bits, int32.

    Returns:
        Numbers of the plan's carrier.
    """
    scales = choose_scales(x, axis, plan, tensor)
    return multiply_by_scales(round_block_quotients(x, scales, plan, word), scales, plan)


def quantize_block_tile(
    x: Array, axis: int, plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> tuple[Array, Array]:
    """The codes of a tile's elements, not packed, and its stored scales with length 1 along `axis`."""
    scales = choose_scales(x, axis, plan, tensor)
    elements = round_block_quotients(x, scales, plan, word)
    return encode_elements(elements, plan.element.format, plan.compute), store_scales(scales, plan)
