"""Numbers times scales, rounded once, in floating-point arithmetic; for XLA, as `quanta` is.

A product is rounded as it should be but below the normal range, which a device may read, and write, as zero. Scales
that may lead there are multiplied by 2^149, so that the product counts the smallest number; how many times is guessed
by the product, and the side of the middle of two counts on which the exact one lies decides, as in `quanta`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.scaled_float32.integers import number_of, word_of
from jchop._core.xla_cpu import materialize_per_group, prevent_fma

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_FRACTION, _BIAS = _CARRIER.fraction, _CARRIER.bias
#: Numbers other than zero lie within 2^-LEAST and 2^MOST; scales below 2^-_TINY may have products that are subnormal.
LEAST, MOST, _TINY = 40, 40, 64


def times(numbers: Array, scales: Array) -> Array:
    """Numbers times scales, rounded to nearest, ties to even; float32.

    Args:
        numbers: float32: zero, NaN, infinite, or within 2^-LEAST and 2^MOST.
        scales: extended magnitude bits, for each group.
    """
    tiny = scales < _BIAS - _TINY << _FRACTION
    lifted = scales - (_CARRIER.tiny_exponent << _FRACTION)
    scale, tiny = materialize_per_group((number_of(jnp.where(tiny, lifted, scales)), tiny))
    product = prevent_fma(numbers * scale, scale)
    return jnp.where(tiny, _lowered(numbers, scale, product), product)


def _lowered(number: Array, scale: Array, product: Array) -> Array:
    """Number times scale times the smallest number, rounded once; `product` is without that, rounded."""
    number, magnitude = (number_of(word_of(x) & _bits.low_mask(_CARRIER.width - 1)) for x in (number, product))
    # How many times the smallest number: `count`, or one more, as the middle between the two decides.
    lead = np.float32(2.0**_FRACTION)
    count = word_of(jnp.maximum(magnitude - 0.5, 0) + lead) - int(lead.view(np.int32))
    middle = count.astype(jnp.float32) + 0.5
    (high, low), (upper, lower) = (_halves(x) for x in (number, scale))
    rest = (((high * upper - middle) + high * lower) + low * upper) + low * lower
    count = count + (_bits.ordered(*_bits.split(rest, _CARRIER)) + (count & 1) > 0)
    normal = word_of(magnitude) + (_CARRIER.tiny_exponent << _FRACTION)
    lowered = jnp.where(magnitude < lead, count, normal)
    lowered = jnp.where(word_of(magnitude) >= _CARRIER.inf, word_of(magnitude), lowered)
    return number_of(lowered | word_of(product) & _CARRIER.sign_bit)


def _halves(x: Array) -> tuple[Array, Array]:
    """Numbers as sums of two of 12 bits each."""
    high = number_of(word_of(x) & ~_bits.low_mask((_FRACTION + 1) // 2))
    return high, x - high
