"""Formats as numbers of a compiled program: one rounding for every floating-point format, chosen when it runs.

A format is a row of integers. Rounding works on the bits of float64, which holds all values of the formats of
`is_spec_traceable` and, to more than twice their digits, all sums, products, quotients and roots of these. So the
result of one operation in float64, rounded once more, is the exact result rounded once (S. A. Figueroa, "When is double
rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import FLOAT64
from jchop._kernels.primitive import make_op
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array

#: The most significant bits: 2 p + 2 are at most those of float64.
_MOST_PRECISION = (FLOAT64.fraction + 1 - 2) // 2
#: Products of the smallest values, and of the largest, are normal numbers of float64.
_LEAST_EXPONENT, _MOST_EXPONENT = -500, 500


def is_spec_traceable(spec: Spec | None) -> bool:
    """Whether a rounding is a row of integers: to nearest even, of a signed format with subnormal numbers and -0."""
    if spec is None:
        return True
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding is not Rounding.NEAREST_EVEN or spec.flush:
        return False
    is_signed_ieee = fmt.signed and fmt.zero and fmt.subnormals and fmt.has_negative_zero
    is_in_range = fmt.emin - fmt.frac_bits >= _LEAST_EXPONENT and fmt.emax <= _MOST_EXPONENT
    return is_signed_ieee and is_in_range and fmt.precision <= _MOST_PRECISION


def format_row(spec: Spec) -> np.ndarray:
    """A format as int64[5]: precision, smallest exponent, bits of the largest value, and the bits of results beyond it.

    The last two are the magnitude of a finite value beyond the largest one, and that of an infinity.
    """
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    largest = FLOAT64.ceil_bits(Fraction(fmt.exact_max))
    beyond = largest if fmt.saturates else FLOAT64.inf if fmt.has_inf else FLOAT64.nan
    finite = beyond if spec.overflow is Overflow.IEEE else largest
    infinity = largest if spec.overflow is Overflow.SATURATE else beyond
    return np.array([fmt.precision, fmt.emin, largest, finite, infinity], np.int64)


#: float64 itself, which rounds nothing.
FLOAT64_ROW = np.array([FLOAT64.fraction + 1, 1 - FLOAT64.bias, FLOAT64.inf - 1, FLOAT64.inf, FLOAT64.inf], np.int64)


def _round_bits_to_row(x: Array, row: Array) -> Array:
    precision, emin, largest, finite, infinity = (row[..., i] for i in range(5))
    bits = lax.bitcast_convert_type(x, jnp.int64)
    magnitude = bits & jnp.int64((1 << 63) - 1)
    exponent = (magnitude >> FLOAT64.fraction) - FLOAT64.bias
    fraction = magnitude & jnp.int64((1 << FLOAT64.fraction) - 1)
    excess = (FLOAT64.fraction + 1 - precision) + jnp.maximum(emin - exponent, 0)
    shift = jnp.minimum(excess, FLOAT64.fraction)
    last_bit = ((fraction | jnp.int64(1 << FLOAT64.fraction)) >> shift) & 1
    half = (jnp.int64(1) << shift) >> 1
    new_magnitude = magnitude + jnp.where(shift > 0, half - 1 + last_bit, 0)
    new_magnitude = (new_magnitude >> shift) << shift
    # Below the smallest value: from half of it on, which is a tie, up to it.
    smallest = jnp.where(fraction == 0, jnp.int64(0), (exponent + 1 + FLOAT64.bias) << FLOAT64.fraction)
    new_magnitude = jnp.where(
        excess <= FLOAT64.fraction, new_magnitude, jnp.where(excess == FLOAT64.fraction + 1, smallest, 0)
    )
    new_magnitude = jnp.where(new_magnitude > largest, finite, new_magnitude)
    new_magnitude = jnp.where(magnitude == FLOAT64.inf, infinity, new_magnitude)
    new_magnitude = jnp.where(magnitude > FLOAT64.inf, magnitude, new_magnitude)
    return lax.bitcast_convert_type(new_magnitude | (bits & jnp.int64(-(1 << 63))), jnp.float64)


#: Compiled apart: fused, it would be computed again for each use of its result.
_round_to_row_op = make_op("jchop_round_to_row", _round_bits_to_row, no_inline=True)


def round_to_row(x: Array, row: Array) -> Array:
    """float64 numbers rounded to the format of a row, in an array of any shape."""
    return _round_to_row_op(x, row)


def round_to_44_bits(x: Array) -> Array:
    """Values of functions, which float64 has to some units, with 44 significant bits: exact values become exact."""
    return _round_bits_to_row(x, jnp.asarray(_ROW_OF_44_BITS))


_ROW_OF_44_BITS = np.array([44, *FLOAT64_ROW[1:]], np.int64)
