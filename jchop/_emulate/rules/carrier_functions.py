"""Functions of the carrier by integer bit operations, if `jax.numpy` is inexact or reads subnormals as zero.

Each has the derivative of the function of `jax.numpy` of that name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS
from jchop._common.gradients import CustomJvp

Array = jax.Array


def _carrier_sign_and_magnitude(x: Array) -> tuple[Array, Array, int, int]:
    """Whether the sign bit of `x` is set, its magnitude bits, and the magnitude bits of 1 and of infinity."""
    carrier = CARRIERS[x.dtype.name]
    sign, magnitude = bit_ops.split_sign(x, carrier)
    return sign != 0, magnitude, carrier.bias << carrier.fraction, carrier.inf


def carrier_floor(x: Array) -> Array:
    """The largest integer <= `x`."""
    negative, magnitude, one, _ = _carrier_sign_and_magnitude(x)
    return jnp.where(negative & (magnitude > 0) & (magnitude < one), -1, jnp.floor(x)).astype(x.dtype)


def carrier_ceil(x: Array) -> Array:
    """The smallest integer >= `x`."""
    negative, magnitude, one, _ = _carrier_sign_and_magnitude(x)
    return jnp.where(~negative & (magnitude > 0) & (magnitude < one), 1, jnp.ceil(x)).astype(x.dtype)


def carrier_sign(x: Array) -> Array:
    """-1, a zero of the sign of `x`, 1, or NaN."""
    negative, magnitude, _, infinity = _carrier_sign_and_magnitude(x)
    unit = jnp.where(negative, -1, 1).astype(x.dtype)
    return jnp.where((magnitude == 0) | (magnitude > infinity), lax.stop_gradient(x), unit)


def carrier_modf(x: Array) -> tuple[Array, Array]:
    """The fraction and the integer part, both of the sign of `x`."""
    _, magnitude, one, infinity = _carrier_sign_and_magnitude(x)
    integer_part = jnp.trunc(x)
    fraction = jnp.where(magnitude == infinity, 0, x - integer_part)
    fraction = jnp.where(magnitude < one, x, jnp.copysign(fraction, x))
    return jnp.where(magnitude > infinity, x, fraction), integer_part


@CustomJvp
def carrier_frexp(x: Array) -> tuple[Array, Array]:
    """The significand in [0.5, 1) and the int32 exponent of `x`; zeros, infinities and NaN have exponent 0."""
    carrier = CARRIERS[x.dtype.name]
    sign, magnitude = bit_ops.split_sign(x, carrier)
    significand = jnp.where(magnitude >> carrier.fraction == 0, magnitude, 1 << carrier.fraction)
    shift = carrier.fraction - bit_ops.floor_log2_integers(jnp.maximum(significand, 1), carrier).astype(magnitude.dtype)
    exponent = jnp.maximum(magnitude >> carrier.fraction, 1) - shift - (carrier.bias - 1)
    fraction = (magnitude << shift) & bit_ops.low_mask(carrier.fraction)
    is_special = (magnitude == 0) | (magnitude >= carrier.inf)
    bits_of_half = (carrier.bias - 1) << carrier.fraction
    bits = jnp.where(is_special, magnitude, bits_of_half | fraction)
    return bit_ops.join_sign(sign, bits, carrier), jnp.where(is_special, 0, exponent).astype(jnp.int32)


@carrier_frexp.defjvp
def _carrier_frexp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple[Array, Array], tuple[Array, Any]]:
    mantissa, exponent = carrier_frexp(*primals)
    slope = jnp.ldexp(jnp.ones_like(mantissa), -exponent)
    return (mantissa, exponent), (tangents[0] * slope, np.zeros(exponent.shape, jax.dtypes.float0))


def sort_keys(x: Array, *, zeros_equal: bool = False) -> Array:
    """Integers in the order of the values of a carrier; -0 is next below +0, or equal."""
    sign, magnitude = bit_ops.split_sign(x, CARRIERS[x.dtype.name])
    return bit_ops.ordered_integers(sign, magnitude) if zeros_equal else jnp.where(sign != 0, ~magnitude, magnitude)


def extremum_by_bits(primitive: str, x: Array, axes: tuple[int, ...]) -> Array:
    """The largest or the smallest element along axes (`reduce_max`, `reduce_min`); NaN if one is."""
    carrier, is_max = CARRIERS[x.dtype.name], primitive == "reduce_max"
    magnitude = bit_ops.split_sign(x, carrier)[1]
    order_keys = jnp.where(magnitude > carrier.inf, magnitude if is_max else ~magnitude, sort_keys(x))
    best = (jnp.max if is_max else jnp.min)(order_keys, axes)
    negative = best < 0
    sign = jnp.where(negative, carrier.sign_bit, 0).astype(best.dtype)
    return bit_ops.join_sign(sign, jnp.where(negative, ~best, best), carrier)


def arg_extremum_by_bits(primitive: str, x: Array, axes: tuple[int, ...], index_dtype: Any) -> Array:
    """The index of the first largest or smallest element along an axis (`argmax`, `argmin`), or of the first NaN."""
    order_keys = sort_keys(x, zeros_equal=True)
    limits, is_max = jnp.iinfo(order_keys.dtype), primitive == "argmax"
    order_keys = jnp.where(jnp.isnan(x), limits.max if is_max else limits.min, order_keys)
    return (lax.argmax if is_max else lax.argmin)(order_keys, *axes, index_dtype)


#: In place of primitives that may read subnormal numbers as zero.
CARRIER_FUNCTIONS = {"floor": carrier_floor, "ceil": carrier_ceil, "sign": carrier_sign}
