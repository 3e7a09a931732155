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

from jchop import _bits
from jchop._bits import CARRIERS, Carrier
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply, range_of
from jchop._core.arithmetic.exact import overflowed_exact, round_exact
from jchop._core.arithmetic.levels import round_to_levels
from jchop._core.arithmetic.quotient import (
    Divisor,
    divisor_bits,
    divisor_of,
    divisor_of_product,
    exact_quotient,
    odd_quotient,
    significand_of,
)
from jchop._core.rounding.codes import decode_elements, encode_elements, extended
from jchop._core.rounding.elements import overflowed, round_elements
from jchop._core.scaled.scales import (
    TENSOR_SCALE,
    Plan,
    Scales,
    choose_scales,
    positive,
    scale_magnitude,
    store_scales,
)
from jchop.formats import CodebookFormat, bfloat16, binary16
from jchop.spec import Spec

Array = jax.Array

#: The formats of the 16-bit carriers, to which results of float32 are rounded.
NARROW = {"float16": Spec(binary16), "bfloat16": Spec(bfloat16)}


# -- dtypes ------------------------------------------------------------------------------------------------------------


def widen(x: Array, carrier: Carrier) -> Array:
    """16-bit numbers in float32, by their bits; others unchanged."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return decode_elements(lax.bitcast_convert_type(x, jnp.uint16), binary16, CARRIERS["float32"])


def narrow(x: Array, carrier: Carrier) -> Array:
    """Numbers that `carrier` holds, in its dtype; the inverse of `widen_16_bit`."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(encode_elements(x, binary16, CARRIERS["float32"]), jnp.float16)


# -- division ----------------------------------------------------------------------------------------------------------


def round_quotients(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The quotients x / s rounded once to the element format, as numbers of the arithmetic's carrier."""
    compute, element = plan.compute, plan.element
    sign, magnitude = _bits.split(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    levels = isinstance(element.format, CodebookFormat)
    if not plan.is_power and levels != element.rounding.stochastic:
        exact = exact_quotient(sign, magnitude, plain, _divisor(scales, plan), compute)
        if isinstance(element.format, CodebookFormat):
            return _one_nan(round_to_levels(exact, element.format, element.rounding, compute), plan)
        return _one_nan(round_exact(exact, element, compute, word), plan)
    if plan.is_power:
        quotient = _over_power(magnitude, scales.value, compute)
    else:
        quotient = odd_quotient(magnitude, _divisor(scales, plan), compute)
    x = _bits.join(sign, _bits.where(plain, quotient, magnitude), compute)
    return _one_nan(round_elements(x, element, compute, word), plan)


def _one_nan(elements: Array, plan: Plan) -> Array:
    """Elements with every NaN replaced by the NaN of its code, or by the largest value if the format has no NaN."""
    compute, fmt = plan.compute, plan.element.format
    sign, magnitude = _bits.split(elements, compute)
    nan = magnitude > compute.inf
    instead = compute.nan if fmt.has_nan else compute.toward_zero(Fraction(fmt.max))[0]
    return _bits.join(_bits.where(nan, 0, sign), _bits.where(nan, instead, magnitude), compute)


def overflowed_quotients(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """Whether the rounded quotients x / s are beyond the ends of the element format; NaN counts as inside."""
    compute, element = plan.compute, plan.element
    sign, magnitude = _bits.split(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    if plan.is_power:
        quotient = _bits.where(plain, _over_power(magnitude, scales.value, compute), magnitude)
        return overflowed(_bits.join(sign, quotient, compute), element, compute, word)
    return overflowed_exact(
        exact_quotient(sign, magnitude, plain, _divisor(scales, plan), compute), element, compute, word
    )


def _over_power(magnitude: Array, exponent: Array, carrier: Carrier) -> Array:
    """Bits of magnitudes divided by 2^exponent, clamped to the normal range, which is wider than all formats."""
    bits = extended(magnitude, carrier)
    exponent = jnp.maximum(exponent, (bits >> carrier.fraction) - 2 * carrier.bias)
    return jnp.maximum(bits - (exponent << carrier.fraction), 1 << carrier.fraction)


def _divisor(scales: Scales, plan: Plan) -> Divisor:
    compute = plan.compute
    if scales.tensor is None:
        return divisor_of(scales.value, compute)
    bits, width = extended(scales.value, compute), plan.scale.frac_bits + 1
    count = significand_of(bits, compute) >> (compute.fraction + 1 - width)
    exponent = (bits >> compute.fraction) - compute.bias - (width - 1)
    return divisor_of_product(count, width, exponent, scales.tensor, TENSOR_SCALE.frac_bits, compute)


# -- multiplication ----------------------------------------------------------------------------------------------------


def multiply_back(elements: Array, scales: Scales, plan: Plan) -> Array:
    """The products s e rounded once to nearest, ties to even, as numbers of the plan's carrier."""
    compute = plan.compute
    spec = NARROW.get(plan.carrier.name)
    if plan.is_power:
        result = times_power(elements, scales.value, compute)
        result = result if spec is None else round_elements(result, spec, compute)
    else:
        result = _times(elements, scales, spec, plan)
    return narrow(with_nan(result, scales.nan, compute), plan.carrier)


def with_nan(x: Array, where: Array | None, carrier: Carrier) -> Array:
    """`x`, with NaN at the marked elements."""
    if where is None:
        return x
    sign, magnitude = _bits.split(x, carrier)
    return _bits.join(_bits.where(where, 0, sign), _bits.where(where, carrier.nan, magnitude), carrier)


def _times(elements: Array, scales: Scales, spec: Spec | None, plan: Plan) -> Array:
    compute = plan.compute
    if scales.tensor is not None:
        # The product of the two scales may be beyond either end of the carrier's range.
        whole = _divisor(scales, plan)
        up = compute.work_width - 1 - divisor_bits(compute)
        v = double_word.multiply_by(elements, whole.significand << up, whole.field - compute.bias, compute)
        return round_exact(v, spec, compute, None)
    scale = jnp.broadcast_to(positive(scale_magnitude(scales, plan), compute), elements.shape)
    ranges = range_of(plan.element, compute), range_of(Spec(plan.scale), compute)
    return multiply(elements, scale, spec, compute, None, *ranges)


def times_power(x: Array, exponent: Array, carrier: Carrier) -> Array:
    """x 2^exponent for zero, normal, infinite or NaN x; to nearest even in the subnormal range."""  # noqa: D403
    fraction, top = carrier.fraction, 2 * carrier.bias + 1
    sign, magnitude = _bits.split(x, carrier)
    field = (magnitude >> fraction) + exponent
    right = _bits.clip(1 - field, 0, fraction + 2)
    significand = significand_of(magnitude, carrier)
    last = significand >> right & 1
    half = lax.shift_left(jnp.ones_like(right), right) >> 1
    small = (significand + jnp.maximum(half - 1 + last, 0)) >> right
    bits = _bits.where(field > 0, (jnp.minimum(field, top) << fraction) | magnitude & _bits.low_mask(fraction), small)
    bits = _bits.where(field >= top, carrier.inf, bits)
    return _bits.join(sign, _bits.where((magnitude == 0) | (magnitude >= carrier.inf), magnitude, bits), carrier)


# -- tiles -------------------------------------------------------------------------------------------------------------


def round_tile(x: Array, axis: int, plan: Plan, word: Array | None = None, tensor: Array | None = None) -> Array:
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
    return multiply_back(round_quotients(x, scales, plan, word), scales, plan)


def quantize_tile(
    x: Array, axis: int, plan: Plan, word: Array | None = None, tensor: Array | None = None
) -> tuple[Array, Array]:
    """The codes of a tile's elements, not packed, and its stored scales with length 1 along `axis`."""
    scales = choose_scales(x, axis, plan, tensor)
    elements = round_quotients(x, scales, plan, word)
    return encode_elements(elements, plan.element.format, plan.compute), store_scales(scales, plan)
