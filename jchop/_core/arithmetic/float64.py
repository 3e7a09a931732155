"""float32 numbers in float64, and back, for programs of one CPU; and quotients there.

A quotient of two numbers of few bits has few bits, or it differs from each such number by much more than the error of
its computation in float64. So it is first rounded to more bits than the former have, and fewer than float64 has. Then
divisions that a compiler replaces by products, and products that it contracts, change no bit.
"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS
from jchop.formats import FloatFormat

Array = jax.Array

_NARROW, _WIDE = CARRIERS["float32"], CARRIERS["float64"]
#: A sum with this number has its last place at 1; the half keeps signed sums in one binade.
LEAD = 1.5 * 2.0**_WIDE.fraction
#: Bits of a settled quotient, and of the divisor and the middle of two numbers of the format together.
_SETTLED, _TOGETHER = 46, 43


def wide(x: Array) -> Array:
    """float32 numbers in float64. Subnormal numbers, which conversions read as zero, are converted from their bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & _bits.low_mask(31)
    return _wide(x, magnitude, lax.select(bits < 0, -magnitude, magnitude))


def positive(magnitude: Array) -> Array:
    """`wide` of magnitude bits of float32."""
    return _wide(lax.bitcast_convert_type(magnitude, jnp.float32), magnitude, magnitude)


def _wide(x: Array, magnitude: Array, count: Array) -> Array:
    small = count.astype(jnp.float64) * 2.0**_NARROW.tiny_exponent
    return lax.select(magnitude < 1 << _NARROW.fraction, small, x.astype(jnp.float64))


def narrow(x: Array) -> Array:
    """Numbers rounded to float32, to nearest even, also in the subnormal range."""
    magnitude, bits = jnp.abs(x), lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    # The last places of this sum count multiples of the smallest number.
    count = word_of(magnitude * 2.0**-_NARROW.tiny_exponent + 2.0**_WIDE.fraction).astype(jnp.int32)
    small = count | bits & _NARROW.sign_bit
    bits = lax.select(magnitude < 2.0 ** (1 - _NARROW.bias), small, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def word_of(x: Array) -> Array:
    """The bits of float64 numbers."""
    return lax.bitcast_convert_type(x, jnp.int64)


def spacing(x: Array, fmt: FloatFormat) -> Array:
    """The distance of the values of a format at positive numbers, as if its exponents had no upper end."""
    power = lax.bitcast_convert_type(word_of(x) & _WIDE.inf, jnp.float64)
    return jnp.maximum(power, 2.0**fmt.emin) * 2.0**-fmt.frac_bits


def can_divide(bits: int, fmt: FloatFormat) -> bool:
    """Whether `quotient` is right for divisors of as many bits; with one bit of precision, exponents decide ties."""
    return fmt.frac_bits > 0 and bits + fmt.frac_bits + 2 <= _TOGETHER


def quotient(magnitude: Array, divisor: Fraction, fmt: FloatFormat, other: Array | None = None) -> Array:
    """Magnitudes over a divisor, and over other ones, rounded once to nearest even on the grid of a format.

    Args:
        magnitude: magnitude bits of float32.
        divisor: a number of few bits.
        fmt: binary32, or a format of fewer bits, for which `can_divide` holds. Its exponents go on above its largest
            number, and its last binade goes on below to zero.
        other: magnitude bits of other divisors. Default None: 1.

    Returns:
        Magnitude bits of float32; infinity for numbers above its range.
    """
    with jax.enable_x64(True):
        x = positive(magnitude) * float(1 / divisor)
        x = x if other is None else x * (1 / positive(other))
        low = 1 << _WIDE.fraction + 1 - _SETTLED
        x = lax.bitcast_convert_type(word_of(x) + (low >> 1) & -low, jnp.float64)
        if fmt.frac_bits < _NARROW.fraction:
            lead = spacing(x, fmt) * LEAD
            x = (x + lead) - lead
        subnormal = fmt.emin - fmt.frac_bits < 1 - _NARROW.bias
        return lax.bitcast_convert_type(narrow(x) if subnormal else x.astype(jnp.float32), jnp.int32)
