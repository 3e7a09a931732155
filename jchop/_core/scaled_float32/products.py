"""Numbers times scales, rounded once, in floating-point arithmetic; for XLA, like `integers`.

A product is rounded right except below the normal range, where a device may read and write zeros. Scales that may lead
there are multiplied by 2^149, so that the product counts multiples of the smallest number. The product guesses the
count; then the side of the middle of two counts on which the exact product lies decides, as in `integers`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.rounding.codes import extend_exponent
from jchop._core.scaled.scales import ScaledPlan
from jchop._core.scaled_float32.integers import bits_to_float, float_to_bits

Array = jax.Array

#: Nonzero numbers are from 2^-LEAST to 2^MOST; products with scales below 2^-_TINY may be subnormal.
LEAST_FACTOR_EXPONENT, MOST_FACTOR_EXPONENT, _TINY_SCALE_EXPONENT = 40, 40, 64


def multiply_by_scale_bits(numbers: Array, scales: Array, plan: ScaledPlan) -> Array:
    """Numbers times scales, rounded to nearest, ties to even; float32.

    Args:
        numbers: float32: zero, NaN, infinite, or from 2^-LEAST to 2^MOST.
        scales: magnitude bits, for each group.
        plan: the plan.
    """
    scales = extend_exponent(scales, FLOAT32)
    tiny = scales < (FLOAT32.bias - _TINY_SCALE_EXPONENT) << FLOAT32.fraction
    large_scales = scales - (FLOAT32.tiny_exponent << FLOAT32.fraction)
    scale, tiny = plan.backend.per_group((bits_to_float(bit_ops.lax_where(tiny, large_scales, scales)), tiny))
    product = plan.backend.prevent_fma(numbers * scale, scale)
    return bit_ops.lax_where(tiny, _round_subnormal_product(numbers, scale, product), product)


def _round_subnormal_product(number: Array, scale: Array, product: Array) -> Array:
    """Number times scale times the smallest number, rounded once; `product` is the rounded number times scale."""
    number, magnitude = (
        bits_to_float(float_to_bits(x) & bit_ops.low_mask(FLOAT32.width - 1)) for x in (number, product)
    )
    # The number of multiples is `count` or one more; the middle between the two decides.
    lead = np.float32(2.0**FLOAT32.fraction)
    count = float_to_bits(jnp.maximum(magnitude - 0.5, 0) + lead) - int(lead.view(np.int32))
    middle = count.astype(jnp.float32) + 0.5
    (high, low), (upper, lower) = (_halves_of_12_bits(x) for x in (number, scale))
    rest = (((high * upper - middle) + high * lower) + low * upper) + low * lower
    count = count + (bit_ops.ordered_integers(*bit_ops.split_sign(rest, FLOAT32)) + (count & 1) > 0)
    normal = float_to_bits(magnitude) + (FLOAT32.tiny_exponent << FLOAT32.fraction)
    bits = bit_ops.lax_where(magnitude < lead, count, normal)
    bits = bit_ops.lax_where(float_to_bits(magnitude) >= FLOAT32.inf, float_to_bits(magnitude), bits)
    return bits_to_float(bits | float_to_bits(product) & FLOAT32.sign_bit)


def _halves_of_12_bits(x: Array) -> tuple[Array, Array]:
    """Numbers as sums of two numbers of 12 bits each."""
    high = bits_to_float(float_to_bits(x) & ~bit_ops.low_mask((FLOAT32.fraction + 1) // 2))
    return high, x - high
