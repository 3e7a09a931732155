"""Numbers times scales, rounded once, in floating-point arithmetic; for XLA, like `integers`.

A product is rounded right except below the normal range, where a device may read and write zeros. Scales that may lead
there are multiplied by 2^149, so that the product counts multiples of the smallest number. The product guesses the
count; then the side of the middle of two counts on which the exact product lies decides, as in `integers`. In float64
products are exact, so that one conversion rounds them: a quarter of the operations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.arithmetic import float64
from jchop._core.rounding.codes import extended
from jchop._core.scaled_float32.integers import number_of, word_of
from jchop._core.xla_cpu import materialize_per_group, prevent_fma

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_FRACTION, _BIAS = _CARRIER.fraction, _CARRIER.bias
#: Nonzero numbers are from 2^-LEAST to 2^MOST; products with scales below 2^-_TINY may be subnormal.
LEAST, MOST, _TINY = 40, 40, 64


def times(numbers: Array, scales: Array, in_float64: bool = False) -> Array:
    """Numbers times scales, rounded to nearest, ties to even; float32.

    Args:
        numbers: float32: zero, NaN, infinite, or from 2^-LEAST to 2^MOST.
        scales: magnitude bits, for each group.
        in_float64: whether the device has fast float64, in which products are exact. Default False.
    """
    if in_float64:
        with jax.enable_x64(True):
            return float64.narrow(numbers.astype(jnp.float64) * float64.positive(scales))
    scales = extended(scales, _CARRIER)
    tiny = scales < (_BIAS - _TINY) << _FRACTION
    large_scales = scales - (_CARRIER.tiny_exponent << _FRACTION)
    scale, tiny = materialize_per_group((number_of(_bits.where(tiny, large_scales, scales)), tiny))
    product = prevent_fma(numbers * scale, scale)
    return _bits.where(tiny, _lowered(numbers, scale, product), product)


def _lowered(number: Array, scale: Array, product: Array) -> Array:
    """Number times scale times the smallest number, rounded once; `product` is the rounded number times scale."""
    number, magnitude = (number_of(word_of(x) & _bits.low_mask(_CARRIER.width - 1)) for x in (number, product))
    # The number of multiples is `count` or one more; the middle between the two decides.
    lead = np.float32(2.0**_FRACTION)
    count = word_of(jnp.maximum(magnitude - 0.5, 0) + lead) - int(lead.view(np.int32))
    middle = count.astype(jnp.float32) + 0.5
    (high, low), (upper, lower) = (_halves(x) for x in (number, scale))
    rest = (((high * upper - middle) + high * lower) + low * upper) + low * lower
    count = count + (_bits.ordered(*_bits.split(rest, _CARRIER)) + (count & 1) > 0)
    normal = word_of(magnitude) + (_CARRIER.tiny_exponent << _FRACTION)
    bits = _bits.where(magnitude < lead, count, normal)
    bits = _bits.where(word_of(magnitude) >= _CARRIER.inf, word_of(magnitude), bits)
    return number_of(bits | word_of(product) & _CARRIER.sign_bit)


def _halves(x: Array) -> tuple[Array, Array]:
    """Numbers as sums of two numbers of 12 bits each."""
    high = number_of(word_of(x) & ~_bits.low_mask((_FRACTION + 1) // 2))
    return high, x - high
