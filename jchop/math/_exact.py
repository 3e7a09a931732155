"""Rows of the table that are not a single operation, but round the exact result once.

They take rounded operands, float32 or float64, and a random word for each element.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import carrier_range, multiply_and_round, range_of
from jchop._core.arithmetic.exact import ExactResult, round_exact
from jchop._core.matmul.operations import round_operation
from jchop._spec.spec import Spec
from jchop.math import _carrier

Array = jax.Array
_ExactOperands = tuple[Array, ...]


def exact_reciprocal(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """1 / x; 1 need not be a value of the format."""
    (x,) = operands
    return _full_range_operation("div", (jnp.ones_like(x), x), spec, word)


def _full_range_operation(name: str, operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """An operation on arbitrary values of the carrier."""
    whole = carrier_range(_carrier_of_operand(operands[0]))
    return round_operation(name, operands, spec, word, ranges=[whole] * len(operands))


def _carrier_of_operand(x: Array) -> Carrier:
    return CARRIERS[x.dtype.name]


def exact_clip(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """Clamping, which returns one of three values of the format."""
    x, least, most = operands
    return round_operation("min", (round_operation("max", (x, least), spec, word), most), spec, word)


def exact_mod(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The remainder x - floor(x / y) y.

    The remainder of the truncated quotient is a multiple of the last place of the smaller operand, and smaller than
    both operands, hence exact. If its sign differs from the sign of y, y is added.
    """
    x, y = operands
    carrier = _carrier_of_operand(x)
    narrow = range_of(spec, carrier).quantum >= 1 - carrier.bias  # no subnormals of the carrier
    rest = lax.rem(x, y) if narrow else _exact_remainder(x, y, carrier)
    (rest_sign, rest_magnitude), (y_sign, _) = bit_ops.split_sign(rest, carrier), bit_ops.split_sign(y, carrier)
    zero = rest_magnitude == 0
    addend = jnp.where((rest_sign != y_sign) & ~zero, y, bit_ops.join_sign(rest_sign, jnp.zeros_like(y_sign), carrier))
    total = round_operation("add", (rest, addend), spec, word)
    sign = y_sign if spec.format.has_negative_zero else jnp.zeros_like(y_sign)
    return jnp.where(zero, bit_ops.join_sign(sign, jnp.zeros_like(sign), carrier), total)


def _exact_remainder(x: Array, y: Array, carrier: Carrier) -> Array:
    """`lax.rem` of numbers that may be subnormal, which devices read as zero.

    A small divisor is multiplied by 2^64, and so is the first remainder: in both divisions all numbers are then normal,
    or the dividend is the smaller one.
    """
    whole = carrier_range(carrier)

    def times(v: Array, power: Array) -> Array:
        return multiply_and_round(v, power, None, carrier, None, whole, whole)

    def rest(a: Array, b: Array) -> Array:
        magnitude, divisor = bit_ops.split_sign(a, carrier)[1], bit_ops.split_sign(b, carrier)[1]
        return jnp.where((magnitude < divisor) & (divisor <= carrier.inf), a, lax.rem(a, b))

    small = bit_ops.split_sign(y, carrier)[1] < (carrier.bias - 40) << carrier.fraction
    up = jnp.where(small & (bit_ops.split_sign(y, carrier)[1] > 0), 2.0**64, 1.0).astype(x.dtype)
    divisor = times(y, up)
    return times(rest(times(rest(x, divisor), up), divisor), 1 / up)


def exact_floor_divide(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The floor of the quotient. With infinities NumPy's (x - mod(x, y)) / y, which is NaN or, of other signs, -1."""
    x, y = operands
    carrier = _carrier_of_operand(x)
    (x_sign, size), (y_sign, divisor) = bit_ops.split_sign(x, carrier), bit_ops.split_sign(y, carrier)
    below = (x_sign != y_sign) & (size > 0) & (size < carrier.inf) & (divisor == carrier.inf)
    x = jnp.where(below, -1, jnp.where((size == carrier.inf) & (divisor > 0), jnp.nan, x))
    y = jnp.where(below, 1, y)
    return round_exact(
        _floor_of_quotient(double_word.divide_exactly(x, y, carrier, carrier.work_width), carrier), spec, carrier, word
    )


def _floor_of_quotient(v: ExactResult, carrier: Carrier) -> ExactResult:
    """The floor of a quotient.

    If all of `rest` belongs to the integer part, later bits do not matter: a quotient of numbers of p bits has p
    consecutive zeros or ones only at its end.
    """
    width, word = carrier.work_width, v.rest.dtype
    place = (v.magnitude >> carrier.fraction) - (carrier.bias + carrier.fraction)  # ulp(t) = 2^place
    away = v.sign != 0
    # Last place above the binary point: t is an integer, and so are the first bits of the rest.
    whole_bits = jnp.clip(place, 0, width - 1).astype(word)
    low = _low_ones(width - whole_bits, word)
    fraction = (v.rest & low) != 0
    part = v.rest & ~low
    step = (away & (fraction | v.sticky)).astype(word)
    # One unit more in magnitude: the lowest integer bit of the rest, or the last bit of t if there is none.
    next_part = part + jnp.where(whole_bits == 0, 0, step << ((width - whole_bits) % width))
    carry = jnp.where(whole_bits == 0, step, (next_part < part).astype(word)).astype(v.magnitude.dtype)
    rest = jnp.where(whole_bits == 0, 0, next_part)
    high = replace(v, magnitude=v.magnitude + carry, rest=rest, inexact=rest != 0, sticky=jnp.zeros_like(v.sticky))
    # Last place below the binary point.
    t = bit_ops.join_sign(jnp.zeros_like(v.sign), v.magnitude, carrier)
    one = carrier.bias << carrier.fraction
    cut = jnp.where(v.magnitude < one, 0, jnp.floor(t))
    more = away & (v.inexact | (bit_ops.split_sign(cut, carrier)[1] != v.magnitude))
    below = bit_ops.split_sign(cut + more.astype(cut.dtype), carrier)[1]
    is_below, is_far = place < 0, (place >= width) | (v.magnitude >= carrier.inf) | v.beyond
    zero = jnp.zeros_like(v.rest)
    return replace(
        v,
        magnitude=jnp.where(is_far, v.magnitude, jnp.where(is_below, below, high.magnitude)),
        rest=jnp.where(is_far, v.rest, jnp.where(is_below, zero, high.rest)),
        inexact=jnp.where(is_far, v.inexact, ~is_below & high.inexact),
        sticky=is_far & v.sticky,
    )


def _low_ones(count: Array, word: object) -> Array:
    """Words with ones in the low `count` bits, `count` >= 1."""
    width = count.dtype.itemsize * 8
    return ~jnp.zeros_like(count) >> (width - count).astype(count.dtype)


def exact_ldexp(x: Array, n: Array, spec: Spec, word: Array | None) -> Array:
    """The exact x 2^n for integers n, rounded once.

    The product of the significand of x and 2^a, with a normal result in the carrier, is exact. Only the remaining power
    of two can leave the carrier's normal range. Exponents beyond twice the carrier's range do not change the result.
    """
    carrier = _carrier_of_operand(x)
    bias = carrier.bias
    fraction, exponent = _carrier.carrier_frexp(x)
    total = jnp.clip(exponent + jnp.clip(n, -4 * bias, 4 * bias).astype(exponent.dtype), 3 - 2 * bias, 2 * bias)
    near = jnp.clip(total, 2 - bias, bias)
    return _full_range_operation(
        "mul", (fraction * _normal_power_of_two(near, carrier), _normal_power_of_two(total - near, carrier)), spec, word
    )


def _normal_power_of_two(exponent: Array, carrier: Carrier) -> Array:
    """2^exponent, a normal value of the carrier."""
    biased_exponent = (exponent + carrier.bias).astype(carrier.work)
    return bit_ops.join_sign(jnp.zeros_like(biased_exponent), biased_exponent << carrier.fraction, carrier)


def exact_bitwise(name: str, operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """An operation on the bits of integers in two's complement; NaN for operands that are not integers of that width.

    The result, which may have more bits than the carrier's significand, is the exact sum of two halves.
    """
    carrier = _carrier_of_operand(operands[0])
    half = carrier.work_width // 2
    limit = 2.0 ** (carrier.work_width - 1)
    ok = [(x == jnp.trunc(x)) & (x >= -limit) & (x < limit) for x in operands]
    x, y = (jnp.where(fits, x, 0).astype(carrier.work) for fits, x in zip(ok, operands, strict=True))
    bits = {"and": x & y, "or": x | y, "xor": x ^ y}[name]
    high, low = bits >> half, bits & bit_ops.low_mask(half)
    parts = (high.astype(carrier.name) * 2.0**half, low.astype(carrier.name))
    return jnp.where(ok[0] & ok[1], _full_range_operation("add", parts, spec, word), jnp.nan)
