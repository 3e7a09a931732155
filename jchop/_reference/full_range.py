"""Sums and products rounded to formats with the carrier's own exponents (bfloat16, tf32, float32 itself), in floats.

Such a format has the carrier's subnormal numbers, which devices read as zero. So where one could come in, operands are
first scaled by 2^K, on their bits, and the result is scaled back. In between come the hardware's sum and its error
(TwoSum; Knuth 1969), or its product where that is exact. As many last bits are dropped from every value of the carrier,
subnormal ones too, so one `cut` of bits rounds.

Bits as a float, K 2^M added, are 2^K |x| for a normal x. A subnormal one, f 2^(1 - bias - M), then has a leading bit
too much, A = c/2 + 2^K |x| / 2 with c = 2^K times the smallest normal number. So 2^K |x| is A + min(A - c, 0), and back
it is max(v, (v + c) / 2), whatever x is, zero included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS, Carrier
from jchop._reference.cut import cut, finer, is_cut, needs_parts, parts
from jchop._reference.ranges import NEAREST, Range
from jchop.formats import FloatFormat
from jchop.rounding import Overflow, Rounding
from jchop.spec import Spec

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_M, _BIAS = _CARRIER.fraction, _CARRIER.bias


def _power_bits(exponent: int) -> int:
    return exponent + _BIAS << _M


#: The smallest normal number.
_NORMAL = 1 << _M
#: A sum is scaled up where both terms lie below 2^-60, and down, by 2^2, from 2^126 on. Of other terms a subnormal one
#: matters by its sign alone: it lies below 2^-32 of what is rounded off.
_SMALL_TERM, _LARGE_TERM, _SUM_UP, _SUM_DOWN = _power_bits(-60), _power_bits(126), 100, 2
#: A product is scaled where one factor lies below 2^-30; where the other one is 2^71 or more that is taken back.
_SMALL_FACTOR, _LARGE_FACTOR, _PRODUCT_UP = _power_bits(-30), _power_bits(71), 48


def _is_of_full_range(spec: Spec | None, carrier: Carrier) -> bool:
    if spec is None or carrier is not _CARRIER:
        return carrier is _CARRIER
    return is_cut(spec, carrier) and spec.format == FloatFormat(8, _precision(spec) - 1)


def adds(spec: Spec | None, carrier: Carrier) -> bool:
    """Whether `add` does, for any operands of the carrier; None is the carrier's own format, to nearest even."""
    return _is_of_full_range(spec, carrier)


def _precision(spec: Spec) -> int:
    assert isinstance(spec.format, FloatFormat)
    return spec.format.precision


def multiplies(spec: Spec | None, carrier: Carrier, xr: Range, yr: Range) -> bool:
    """Whether `multiply` does for operands of these ranges: their product must have no more bits than the carrier."""
    few = xr.bits + yr.bits <= _M + 1
    return few and _is_of_full_range(spec, carrier) and (spec is None or _precision(spec) <= 16)


# -- operations --------------------------------------------------------------------------------------------------------


def add(x: Array, y: Array, spec: Spec | None, word: Array | None, xr: Range, yr: Range) -> Array:
    """`x + y`, its exact value rounded once; a sum that is exactly zero is +0, under `Rounding.DOWN` -0."""
    (xs, xm), (ys, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    largest = jnp.maximum(xm, ym)
    small = largest < _SMALL_TERM
    shift = jnp.where(small, np.int32(_SUM_UP << _M), np.int32(0))
    least = jnp.where(small, _scaled_normal(_SUM_UP), np.float32(0))
    plain = spec is None or _is_innocent(spec, xr, yr)
    if not plain:
        shift = jnp.where((largest >= _LARGE_TERM) & (largest < _CARRIER.inf), np.int32(-_SUM_DOWN << _M), shift)
    a, b = (_signed(s, _scaled(m, shift, least, plain)) for s, m in ((xs, xm), (ys, ym)))
    total = a + b
    sign, magnitude = _bits.split(total, _CARRIER)
    bits = _work(_unscaled(_float(magnitude), least)) - shift
    if spec is None:
        return _bits.join(sign, bits, _CARRIER)
    if plain:
        return cut(sign, magnitude, bits, None, spec, _CARRIER, word)
    if spec.rounding is Rounding.DOWN:
        sign = jnp.where((magnitude == 0) & (xs != ys), _CARRIER.sign_bit, sign)
    back = total - a
    error = (a - (total - back)) + (b - back)
    error = _float(_work(error) ^ sign)  # as seen from zero; NaN beside infinities
    # Scaled back, zero must stay what it is, and a number beyond all bits beyond the format.
    bits = jnp.where(magnitude == 0, 0, jnp.where(bits < 0, _CARRIER.nan, bits))
    error = parts(error, magnitude, spec, _CARRIER) if needs_parts(spec) else error
    return cut(sign, magnitude, bits, error, spec, _CARRIER, word, scaled_down=True)


def multiply(x: Array, y: Array, spec: Spec | None, word: Array | None) -> Array:
    """`x * y`, its exact value rounded once; see `multiplies`."""
    (xs, xm), (ys, ym) = _bits.split(x, _CARRIER), _bits.split(y, _CARRIER)
    less, more = jnp.minimum(xm, ym), jnp.maximum(xm, ym)
    small, large = less < _SMALL_FACTOR, more >= _LARGE_FACTOR
    up = small & ~large
    shift = jnp.where(up, np.int32(_PRODUCT_UP << _M), np.int32(0))
    least = jnp.where(up, _scaled_normal(_PRODUCT_UP), np.float32(0))
    a = jnp.where(small, _scaled(less, np.int32(_PRODUCT_UP << _M), _scaled_normal(_PRODUCT_UP)), _float(less))
    b = _float(more)
    if spec is not None and spec.rounding not in NEAREST:  # of two subnormal factors only that they are not zero counts
        b = _float(jnp.where(more == 0, 0, jnp.maximum(more, _NORMAL)))
    product = a * jnp.where(small & large, b * 2.0**-_PRODUCT_UP, b)
    if spec is not None and spec.rounding not in NEAREST:
        product = jnp.where((product < 2.0 ** (1 - _BIAS)) & (less > 0), np.float32(2.0 ** (1 - _BIAS)), product)
    if spec is not None and spec.rounding is Rounding.NEAREST_EVEN:
        # Below the format's normal numbers, where its spacing is fixed, the sum with a power of two rounds.
        power = least * np.float32(2.0 ** (_M + 1 - _precision(spec)))
        product = jnp.where(product < least, (product + power) - power, product)
    back = _unscaled(product, least)
    sign, bits = xs ^ ys, _work(back) - shift
    if spec is None:
        return _bits.join(sign, bits, _CARRIER)
    error = None
    if spec.rounding is not Rounding.NEAREST_EVEN:
        error = jnp.where(up, product - _lifted(back, least), np.float32(0))
        many = np.float32(2.0 ** (finer(spec, _CARRIER) - _CARRIER.tiny_exponent - _PRODUCT_UP))
        error = error * many if needs_parts(spec) else error
    # A product that is too large is a finite number that lies above all of the format.
    magnitude = jnp.where(more < _CARRIER.inf, jnp.minimum(_work(product), _CARRIER.inf - 1), _work(product))
    return cut(sign, magnitude, bits, error, spec, _CARRIER, word)


def _is_innocent(spec: Spec, xr: Range, yr: Range) -> bool:
    """Whether the hardware's rounding of a sum cannot be seen: to nearest, of terms with few bits (Figueroa 1995)."""
    precision = _precision(spec)
    few = max(xr.bits, yr.bits) <= precision and 2 * precision + 2 <= _M + 1
    return few and spec.rounding in NEAREST and spec.overflow is not Overflow.PROPAGATE


# -- scaling -----------------------------------------------------------------------------------------------------------


def _scaled(magnitude: Array, shift: Array | np.int32, least: Array | np.float32, plain: bool = True) -> Array:
    """2^K |x|, from its bits; unless `plain`, no number but zero is made less than a normal one."""
    bits = magnitude + shift
    if plain:
        return _lifted(_float(bits), least)
    lifted = _lifted(_float(jnp.maximum(bits, _NORMAL)), least)
    return jnp.where(magnitude == 0, np.float32(0), lifted)


def _lifted(value: Array, least: Array | np.float32) -> Array:
    rest = value - least
    return value + jnp.where(rest < 0, rest, np.float32(0))


def _unscaled(value: Array, least: Array) -> Array:
    half = (value + least) * 0.5
    return jnp.where(half > value, half, value)


def _scaled_normal(up: int) -> np.float32:
    """2^K times the smallest normal number."""
    return np.float32(2.0 ** (up + 1 - _BIAS))


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _work(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _signed(sign: Array, value: Array) -> Array:
    return _bits.join(sign, _work(value), _CARRIER)
