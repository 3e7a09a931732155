"""Sums and products of narrow formats with the carrier's own exponents (bfloat16, tf32), to nearest even.

Such a format has the carrier's subnormal numbers, which devices read as zero. Where operands are so small that one of
those may come in, they are first scaled by 2^K, by their bits, and the result is scaled back. With p <= 11 bits the
carrier's product is exact and its sum innocent (Figueroa 1995), so one rounding of bits follows. The bounds below keep
every value that is not scaled a normal one, and above 2^K times the smallest normal one wherever it is rounded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS, Carrier
from jchop._reference.ranges import Range, range_of
from jchop.formats import FloatFormat
from jchop.rounding import Overflow, Rounding
from jchop.spec import Spec

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_M, _BIAS = _CARRIER.fraction, _CARRIER.bias
_LARGEST_PRECISION = 11
#: K: of a subnormal number, 2^K times it is normal.
_UP = 48
#: A sum is scaled where both terms lie below 2^-60: others do not cancel to less than 2^-78.
_SMALL_TERM = -60
#: A product is scaled where one factor lies below 2^-30 and the other below 2^71, above which it exceeds 2^-78.
_SMALL_FACTOR, _LARGE_FACTOR = -30, 71


def has_full_range(spec: Spec, carrier: Carrier, known: tuple[Range, ...]) -> bool:
    """Whether `add` and `multiply` do for these operands."""
    fmt = spec.format
    return (
        carrier is _CARRIER
        and isinstance(fmt, FloatFormat)
        and (spec.rounding, spec.overflow, spec.flush) == (Rounding.NEAREST_EVEN, Overflow.IEEE, False)
        and fmt == FloatFormat(8, fmt.sig_bits)
        and 0 < fmt.sig_bits < _LARGEST_PRECISION
        and all(_within(r, range_of(spec, carrier)) for r in known)
    )


def _within(r: Range, own: Range) -> bool:
    return r.quantum >= own.quantum and r.precision <= own.precision and r.top <= own.top


def add(x: Array, y: Array, spec: Spec) -> Array:
    """`x + y` of values of the spec's format, rounded once."""
    (xs, xm), (ys, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    small = jnp.maximum(xm, ym) < _power_bits(_SMALL_TERM)
    a = jnp.where(small, _bits.join(xs, _work(_scaled(xm)), _CARRIER), x)
    b = jnp.where(small, _bits.join(ys, _work(_scaled(ym)), _CARRIER), y)
    sign, magnitude = _bits.split(a + b, _CARRIER)
    rounded = _nearest(magnitude, spec)  # below the format's normal range a sum is exact
    return _bits.join(sign, jnp.where(small, _scaled_back(rounded), rounded), _CARRIER)


def multiply(x: Array, y: Array, spec: Spec) -> Array:
    """`x * y` of values of the spec's format, rounded once."""
    (xs, xm), (ys, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    less, more = jnp.minimum(xm, ym), jnp.maximum(xm, ym)
    small, large = less < _power_bits(_SMALL_FACTOR), more >= _power_bits(_LARGE_FACTOR)
    a, b = jnp.where(small, _scaled(less), _float(less)), _float(more)
    b = jnp.where(small & large, b * 2.0**-_UP, b)
    _, magnitude = _bits.split(a * b, _CARRIER)
    rounded = _rounded(magnitude, spec)
    return _bits.join(xs ^ ys, jnp.where(small & ~large, _scaled_back(rounded), rounded), _CARRIER)


def _power_bits(exponent: int) -> int:
    return exponent + _BIAS << _M


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _work(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _scaled(magnitude: Array) -> Array:
    """2^K times a number below 2^(127 - K): a subnormal one gets a leading bit, which is then taken away."""
    subnormal = magnitude < 1 << _M
    lifted = magnitude + (_UP + subnormal.astype(magnitude.dtype) << _M)
    return _float(lifted) - jnp.where(subnormal, jnp.float32(2.0 ** (_UP + 1 - _BIAS)), jnp.float32(0))


def _scaled_back(magnitude: Array) -> Array:
    """Magnitude bits of 2^-K times a number that is one of the format then."""
    count = (_float(magnitude) * 2.0 ** (_BIAS - 1 + _M - _UP)).astype(magnitude.dtype)
    return jnp.where(magnitude < _UP + 1 << _M, count, magnitude - (_UP << _M))


def _nearest(magnitude: Array, spec: Spec) -> Array:
    """Magnitude bits to nearest even, of any exponent; a carry out of the largest value gives infinity."""
    drop = _M - _format(spec).sig_bits
    held = jnp.minimum(magnitude, _CARRIER.nan)  # a NaN with other bits would be carried away
    return held + ((1 << drop - 1) - 1) + (held >> drop & 1) >> drop << drop


def _rounded(magnitude: Array, spec: Spec) -> Array:
    """The same, but below 2^K times the format's normal values with the spacing of 2^K times its subnormal ones."""
    fmt = _format(spec)
    drop, least = _M - fmt.sig_bits, _power_bits(fmt.emin + _UP)
    # Where it counts the power is a constant; XLA must not know it, or it would add and subtract nothing.
    exponent = jnp.maximum(magnitude, least) & _CARRIER.inf
    power = _float(exponent + (drop << _M))
    fixed = _work((_float(magnitude) + power) - power)
    return jnp.where(magnitude < least, fixed, _nearest(magnitude, spec))


def _format(spec: Spec) -> FloatFormat:
    assert isinstance(spec.format, FloatFormat)
    return spec.format
