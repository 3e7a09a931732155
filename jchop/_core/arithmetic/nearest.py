"""Rounding to nearest even by one floating-point addition, if the range of a value is known.

`round_to_spec` works on bits, because it must be right for every value. If the range of a result is known (normal
values of the carrier, none too large), it can be rounded in a third of the operations. For 2^e <= |x| < 2^(e+1), let
2^q be the spacing of the format, and M = 2^(q + F), with F the fraction bits of the carrier. The last bit of M has the
value 2^q. So the carrier's own |x| + M rounds |x| to a multiple of 2^q, ties to even, and subtracting M is exact. M is
made from the exponent bits of x, but at least from the exponent of the format's smallest normal number,
because the spacing does not shrink below it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic.ranges import ValueRange
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array


def adds_to_round(spec: Spec, result: ValueRange, carrier: Carrier) -> bool:
    """Whether `round_by_adding` gives the results of `round_to_spec` for values of the range, infinities and NaN."""
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding is not Rounding.NEAREST_EVEN or spec.flush:
        return False
    # With one bit of precision the parity of the exponent decides a tie.
    is_plain = fmt.frac_bits > 0 and fmt.has_negative_zero and fmt.subnormals
    is_plain = is_plain and spec.overflow in (Overflow.IEEE, Overflow.SATURATE)
    drop, min_exponent = carrier.fraction - fmt.frac_bits, 1 - carrier.bias
    in_range = min_exponent <= fmt.emin and min_exponent <= result.quantum and result.top + drop <= carrier.bias
    return is_plain and drop > 0 and in_range and carrier.magnitude_bits(fmt.exact_max) is not None


def round_by_adding(x: Array, spec: Spec, carrier: Carrier) -> Array:
    """`x` rounded under `spec`; see `adds_to_round`."""
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    int_type, fraction = carrier.work.type, carrier.fraction
    sign, magnitude = bit_ops.split_sign(x, carrier)
    # The exponent of infinities and NaN wraps to the exponent of a small number, which changes neither.
    exponent = jnp.maximum(magnitude & int_type(carrier.inf), int_type((fmt.emin + carrier.bias) << fraction))
    power = _bits_to_float_like(exponent + int_type((fraction - fmt.frac_bits) << fraction), x)
    value = (_bits_to_float_like(magnitude, x) + power) - power
    largest = np.dtype(carrier.name).type(fmt.max)
    saturates = spec.overflow is Overflow.SATURATE or fmt.saturates
    overflow_value = largest if saturates else np.inf if fmt.has_inf else np.nan
    value = bit_ops.lax_where(value > largest, x.dtype.type(overflow_value), value)
    return bit_ops.join_sign(sign, lax.bitcast_convert_type(value, carrier.work), carrier)


def _bits_to_float_like(bits: Array, like: Array) -> Array:
    return lax.bitcast_convert_type(bits, like.dtype)
