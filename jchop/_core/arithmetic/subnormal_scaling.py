"""Sums and products rounded to formats with the carrier's own exponents (bfloat16, tf32, float32 itself), in floats.

Such a format has the carrier's subnormal numbers, which devices read as zero. So if one is possible, operands are first
scaled by 2^K, on their bits, and the result is scaled back. In between, the hardware computes the sum and its error
(Fast2Sum; Dekker 1971), or an exact product. The same number of last bits is dropped from every value of the carrier,
also from subnormal values, so `round_with_error` rounds them all.

Let A be the float with the bits of |x| plus K 2^M. For a normal x, A = 2^K |x|. A subnormal x = f 2^(1 - bias - M) gets
a leading bit that it does not have: A = c/2 + 2^K |x| / 2, with c = 2^K times the smallest normal number. So 2^K |x| is
min(A, 2 A - c), and the inverse is max(v, (v + c) / 2), for every x, also zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS, Carrier
from jchop._core.arithmetic.ranges import Range
from jchop._core.arithmetic.round_with_error import (
    error_of_sum,
    finer,
    has_constant_drop,
    needs_parts,
    round_with_error,
)
from jchop._core.rounding.modes import NEAREST, SEES_THE_LEAST
from jchop.formats import FloatFormat
from jchop.rounding import Overflow, Rounding
from jchop.spec import Spec

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_M, _BIAS = _CARRIER.fraction, _CARRIER.bias


def _power_bits(exponent: int) -> int:
    return (exponent + _BIAS) << _M


#: The smallest normal number.
_NORMAL = 1 << _M
#: A sum is scaled up if both terms are below 2^-60. Other terms are halved if an error is needed, to prevent overflow.
#: Only the sign of a subnormal term matters then: the term is below 2^-32 of the dropped part.
_SMALL_TERM, _SUM_UP = _power_bits(-60), 100
#: A product is scaled if one factor is below 2^-62. The product of two larger factors is normal; the scaled product of
#: a factor below 2^-62 and a finite one is finite. If a scaled product vanishes, it is below 2^-40 of the smallest
#: subnormal bfloat16 number.
_SMALL_FACTOR, _PRODUCT_UP = _power_bits(-62), 48


def _is_of_full_range(spec: Spec | None, carrier: Carrier) -> bool:
    if spec is None or carrier is not _CARRIER:
        return carrier is _CARRIER
    return has_constant_drop(spec, carrier) and spec.format == FloatFormat(8, _precision(spec) - 1)


def adds(spec: Spec | None, carrier: Carrier) -> bool:
    """Whether `add_by_scaling` is right for all operands of the carrier; None is its own format, to nearest even."""
    return _is_of_full_range(spec, carrier)


def _precision(spec: Spec) -> int:
    assert isinstance(spec.format, FloatFormat)
    return spec.format.precision


def multiplies(spec: Spec | None, carrier: Carrier, xr: Range, yr: Range) -> bool:
    """Whether `multiply_by_scaling` is right for these ranges: the carrier must have the bits of their product."""
    few = xr.bits + yr.bits <= _M + 1
    return few and _is_of_full_range(spec, carrier) and (spec is None or _precision(spec) <= 16)


# -- operations --------------------------------------------------------------------------------------------------------


def add(x: Array, y: Array, spec: Spec | None, word: Array | None, xr: Range, yr: Range) -> Array:
    """`x + y`, its exact value rounded once; a sum that is exactly zero is +0, or -0 under `Rounding.DOWN`."""
    if spec is not None and not _is_innocent(spec, xr, yr):
        return _add_with_error(x, y, spec, word)
    (xs, xm), (ys, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    small = jnp.maximum(xm, ym) < _SMALL_TERM
    scale = _scale(small, _SUM_UP)
    a, b = (_signed(s, _lifted(m + scale.shift, scale)) for s, m in ((xs, xm), (ys, ym)))
    sign, magnitude = _bits.split(a + b, _CARRIER)
    bits = _unscaled(magnitude, scale.least) - scale.shift
    if spec is None:
        return _bits.join(sign, bits, _CARRIER)
    return round_with_error(sign, magnitude, bits, None, spec, _CARRIER, word)


def _add_with_error(x: Array, y: Array, spec: Spec, word: Array | None) -> Array:
    """`x + y` by Fast2Sum of the larger magnitude and the smaller one, which is negative if the signs differ."""
    (_, xm), (_, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    xb, yb = _work(x), _work(y)
    larger, smaller = jnp.maximum(xm, ym), jnp.minimum(xm, ym)
    small = larger < _SMALL_TERM
    scale = _scale(small, _SUM_UP)
    shift = _bits.where(small, scale.shift, _bits.where(larger < _CARRIER.inf, np.int32(-_NORMAL), np.int32(0)))
    a = _lifted(larger + shift, scale)
    b = _lifted(jnp.maximum(smaller + shift, _NORMAL), scale)  # every term but zero stays a normal number
    b = _signed((xb ^ yb) & _CARRIER.sign_bit, _bits.where(smaller == 0, np.float32(0), b))
    total = a + b
    error = b - (total - a)  # NaN beside infinities
    zero = total == 0
    sign = _bits.where(zero, xb | yb if spec.rounding is Rounding.DOWN else xb & yb, _bits.where(xm > ym, xb, yb))
    magnitude = _work(total)
    bits = _bits.where(zero, 0, _unscaled(magnitude, scale.least) - shift)
    error, binade = error_of_sum(error, magnitude, spec, _CARRIER)
    return round_with_error(
        sign & _CARRIER.sign_bit, magnitude, bits, error, spec, _CARRIER, word, binade, may_exceed_infinity=True
    )


def multiply(x: Array, y: Array, spec: Spec | None, word: Array | None) -> Array:
    """`x * y`, its exact value rounded once; see `supports_scaling_product`."""
    (xs, xm), (ys, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    less, more = jnp.minimum(xm, ym), jnp.maximum(xm, ym)
    small = less < _SMALL_FACTOR
    scale = _scale(small, _PRODUCT_UP)
    shift, least = scale.shift, scale.least
    product = _lifted(less + shift, scale) * _float(more)
    if spec is not None and spec.rounding in SEES_THE_LEAST:
        vanishes = (product < 2.0 ** (1 - _BIAS)) & (less > 0)
        product = _bits.where(vanishes, np.float32(2.0 ** (1 - _BIAS)), product)
    sign, magnitude, subnormal = xs ^ ys, _work(product), product < least
    shift = _bits.where(product < np.inf, shift, np.int32(0))  # the bits of a NaN may have the sign bit
    if spec is not None and spec.rounding is Rounding.NEAREST_EVEN:
        # Adding the power of two whose last bit is the format's smallest number rounds the product.
        drop = _M + 1 - _precision(spec)
        exponent = _PRODUCT_UP + 1 - _BIAS + drop
        count = _work(product + np.float32(2.0**exponent)) - _power_bits(exponent)
        bits = _bits.where(subnormal, count << drop, magnitude - shift)
        error = None
    else:
        offset = _bits.where(subnormal, least, np.float32(0))
        total = product + offset
        bits = _work(total) - _bits.where(subnormal, np.int32(_power_bits(_PRODUCT_UP + 1 - _BIAS)), shift)
        error = product - (total - offset)
    if spec is None:
        return _bits.join(sign, bits, _CARRIER)
    if needs_parts(spec):
        assert error is not None
        error = error * np.float32(2.0 ** (finer(spec, _CARRIER) - _CARRIER.tiny_exponent - _PRODUCT_UP))
    # A product that is too large becomes a finite number above all values of the format.
    magnitude = _bits.where(more < _CARRIER.inf, jnp.minimum(magnitude, _CARRIER.inf - 1), magnitude)
    return round_with_error(sign, magnitude, bits, error, spec, _CARRIER, word)


def _is_innocent(spec: Spec, xr: Range, yr: Range) -> bool:
    """Whether the hardware's rounding of a sum has no effect: nearest modes, terms with few bits (Figueroa 1995)."""
    precision = _precision(spec)
    few = max(xr.bits, yr.bits) <= precision and 2 * precision + 2 <= _M + 1
    return few and spec.rounding in NEAREST and spec.overflow is not Overflow.PROPAGATE


# -- scaling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """The scale 2^K if a condition holds, else 1."""

    shift: Array  # K 2^M
    step: Array  # 2^M, which doubles a number
    least: Array  # c = 2^K times the smallest normal number; all three are 0 if nothing is scaled


def _scale(where: Array, up: int) -> _Scale:
    shift, step = (_bits.where(where, np.int32(bits), np.int32(0)) for bits in (up << _M, _NORMAL))
    return _Scale(shift, step, _bits.where(where, _scaled_normal(up), np.float32(0)))


def _lifted(bits: Array, scale: _Scale) -> Array:
    """2^K |x| from the bits of |x| plus the shift: min(A, 2 A - c)."""
    value, double = _float(bits), _float(bits + scale.step) - scale.least
    return _bits.where(double < value, double, value)


def _unscaled(bits: Array, least: Array) -> Array:
    """The bits of |x| plus the shift, from the bits of v = 2^K |x|: the bits of max(v, (v + c) / 2)."""
    return jnp.maximum(bits, _work(_float(bits) + least) - _NORMAL)


def _scaled_normal(up: int) -> np.float32:
    """2^K times the smallest normal number."""
    return np.float32(2.0 ** (up + 1 - _BIAS))


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _work(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _signed(sign: Array, value: Array) -> Array:
    return _bits.join(sign, _work(value), _CARRIER)
