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
