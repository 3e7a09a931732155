"""Square roots, exactly, and quotients of narrow operands in a few operations of the hardware.

Both correct the hardware's result, which may be wrong in the last bits, by an exact remainder.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import round_hardware_result
from jchop._core.arithmetic.exact import ExactResult
from jchop._core.arithmetic.ranges import ValueRange, has_spare_bits, range_of
from jchop._spec.spec import Spec
from jchop.formats.rounding import Overflow

Array = jax.Array

# -- roots -------------------------------------------------------------------------------------------------------------


def square_root(x: Array, carrier: Carrier, all_bits: bool) -> ExactResult:
    """The exact root; its `rest` has all bits, or only the first bit.

    With M fraction bits, v = X 2^(2f) for an integer X of 2M + 1 or 2M + 2 bits, so T = floor(sqrt X) has M + 1. The
    hardware's root of X is close to T, so X - T^2 fits a word and is right modulo 2^W.
    """
    fraction = carrier.fraction
    sign, magnitude = bit_ops.split_sign(x, carrier)
    exponent, significand = double_word.normalize_magnitude(magnitude, carrier)
    significand = bit_ops.lax_where(significand == 0, 1 << fraction, significand)
    odd = exponent & 1
    radicand = significand << (fraction + odd)
    root, remainder = _integer_root(radicand, _float_root(significand, odd, carrier), carrier)
    bits = ((((exponent - odd) >> 1) + carrier.bias - 1) << fraction) + root
    unsigned = np.dtype(f"uint{carrier.work_width}")
    if all_bits:
        rest, sticky = _further_bits(root.astype(unsigned), remainder.astype(unsigned))
    else:
        rest = (remainder > root).astype(unsigned) << (carrier.work_width - 1)
        sticky = remainder != 0
    is_zero = magnitude == 0
    v = ExactResult(
        sign,
        bit_ops.lax_where(is_zero, 0, bits),
        (remainder != 0) & ~is_zero,
        bit_ops.lax_where(is_zero, 0, rest),
        sticky & ~is_zero,
    )
    return double_word.with_special_values(
        v, magnitude == carrier.inf, (sign != 0) & ~is_zero | (magnitude > carrier.inf), sign, carrier
    )


def _float_root(significand: Array, odd: Array, carrier: Carrier) -> Array:
    """About the root of significand 2^(M + odd), as an integer."""
    float_type = np.dtype(carrier.name).type
    scale = bit_ops.lax_where(odd != 0, float_type(2.0 ** (carrier.fraction + 1)), float_type(2.0**carrier.fraction))
    return lax.sqrt(significand.astype(carrier.name) * scale).astype(significand.dtype)


def _integer_root(radicand: Array, guess: Array, carrier: Carrier) -> tuple[Array, Array]:
    """floor(sqrt X) and X - floor(sqrt X)^2, from X modulo 2^W and a guess with an error below 64."""
    error = radicand - guess * guess
    step = jnp.floor(error.astype(carrier.name) / (guess + guess).astype(carrier.name))
    root = guess + step.astype(guess.dtype)
    remainder = radicand - root * root
    for _ in range(2):
        is_too_large = (remainder < 0).astype(root.dtype)
        root = root - is_too_large
        remainder = remainder + is_too_large * (root + root + 1)
        is_too_small = (remainder > root + root).astype(root.dtype)
        remainder = remainder - is_too_small * (root + root + 1)
        root = root + is_too_small
    return root, remainder


def _further_bits(root: Array, remainder: Array) -> tuple[Array, Array]:
    """A word of the bits that follow an integer root, one after the other, and whether further bits follow."""
    width, zero = root.dtype.itemsize * 8, jnp.zeros_like(root)

    def iterate(_: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        high, low, rest_high, rest_low = state
        rest_high, rest_low = double_word.shift_words_left(rest_high, rest_low, 2)
        trial_high, trial_low = double_word.shift_words_left(high, low, 2)
        trial_low = trial_low | trial_low.dtype.type(1)
        fits = (rest_high > trial_high) | (rest_high == trial_high) & (rest_low >= trial_low)
        borrow = (rest_low < trial_low).astype(root.dtype)
        rest_high = bit_ops.lax_where(fits, rest_high - trial_high - borrow, rest_high)
        rest_low = bit_ops.lax_where(fits, rest_low - trial_low, rest_low)
        high, low = double_word.shift_words_left(high, low, 1)
        return high, low | fits.astype(root.dtype), rest_high, rest_low

    _, rest, rest_high, rest_low = lax.fori_loop(0, width, iterate, (zero, root, zero, remainder))
    return rest, (rest_high | rest_low) != 0


# -- quotients ---------------------------------------------------------------------------------------------------------

#: The largest error of a hardware quotient, in units in the last place; it is moved up by as many and cut.
_QUOTIENT_ERROR = 8


def _deciding_bits(spec: Spec, carrier: Carrier) -> int:
    """The number of leading bits of a quotient that decide its rounding, together with a sticky bit."""
    return range_of(spec, carrier).precision + 1


def divides_narrow(spec: Spec, carrier: Carrier, xr: ValueRange, yr: ValueRange) -> bool:
    """Whether `divide_narrow` is right for operands of these ranges."""
    deciding_bits, least = _deciding_bits(spec, carrier), 1 - carrier.bias
    low, high = xr.quantum - yr.top, xr.top - yr.quantum
    return (
        not spec.rounding.stochastic
        and spec.overflow is not Overflow.WRAP
        and has_spare_bits(spec.format, carrier)
        and deciding_bits + yr.bits <= carrier.fraction + 1
        and 1 << (carrier.fraction + 1 - deciding_bits) >= 4 * _QUOTIENT_ERROR
        and min(low - carrier.fraction, low - deciding_bits + yr.quantum, xr.quantum, yr.quantum) >= least
        and max(high, xr.top, yr.top) < carrier.bias
    )


def divide_narrow(x: Array, y: Array, spec: Spec, carrier: Carrier, xr: ValueRange, yr: ValueRange) -> Array:
    """`x / y` rounded once under a spec that does not draw.

    Let t be the hardware's quotient cut to one bit more than the format. Then t y and x - t y are exact, and the sign
    of x - t y tells whether the quotient is t, above it, or below it. If it is not t, the last bit is set: the quotient
    is rounded to odd.
    """
    drop = carrier.fraction + 1 - _deciding_bits(spec, carrier)
    (xs, xm), (ys, ym) = bit_ops.split_sign(x, carrier), bit_ops.split_sign(y, carrier)
    dividend, divisor = (lax.bitcast_convert_type(magnitude, x.dtype) for magnitude in (xm, ym))
    bits = lax.bitcast_convert_type(_hardware_quotient(dividend, divisor), carrier.work)
    bits = (jnp.minimum(bits, carrier.nan) + _QUOTIENT_ERROR) >> drop << drop
    remainder = dividend - lax.bitcast_convert_type(bits, x.dtype) * divisor
    is_below, is_above = remainder < 0, remainder > 0  # neither for NaN, beside infinities
    bits = (bits - (is_below.astype(bits.dtype) << drop)) | (is_below | is_above).astype(bits.dtype)
    low = xr.quantum - yr.top
    odd = ValueRange(low - carrier.fraction, carrier.fraction + 1, xr.top - yr.quantum + 1)
    return round_hardware_result(bit_ops.join_sign(xs ^ ys, bits, carrier), odd, spec, carrier, None)


def _hardware_quotient(dividend: Array, divisor: Array) -> Array:
    """The hardware's quotient."""
    return dividend / divisor
