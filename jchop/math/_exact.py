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
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.exact import ExactResult, round_exact
from jchop._core.arithmetic.ranges import carrier_range, range_of
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
    full_range = carrier_range(_carrier_of_operand(operands[0]))
    return round_operation(name, operands, spec, word, ranges=[full_range] * len(operands))


def _carrier_of_operand(x: Array) -> Carrier:
    return CARRIERS[x.dtype.name]


def exact_clip(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """Clamping, which returns one of three values of the format."""
    x, minimum, maximum = operands
    return round_operation("min", (round_operation("max", (x, minimum), spec, word), maximum), spec, word)


def exact_mod(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The remainder x - floor(x / y) y.

    The remainder of the truncated quotient is a multiple of the last place of the smaller operand, and smaller than
    both operands, hence exact. If its sign differs from the sign of y, y is added.
    """
    x, y = operands
    carrier = _carrier_of_operand(x)
    has_no_subnormals = range_of(spec, carrier).quantum >= 1 - carrier.bias  # no subnormals of the carrier
    remainder = lax.rem(x, y) if has_no_subnormals else _exact_remainder(x, y, carrier)
    (rest_sign, rest_magnitude), (y_sign, _) = bit_ops.split_sign(remainder, carrier), bit_ops.split_sign(y, carrier)
    zero = rest_magnitude == 0
    addend = jnp.where((rest_sign != y_sign) & ~zero, y, bit_ops.join_sign(rest_sign, jnp.zeros_like(y_sign), carrier))
    total = round_operation("add", (remainder, addend), spec, word)
    sign = y_sign if spec.format.has_negative_zero else jnp.zeros_like(y_sign)
    return jnp.where(zero, bit_ops.join_sign(sign, jnp.zeros_like(sign), carrier), total)


def _exact_remainder(x: Array, y: Array, carrier: Carrier) -> Array:
    """`lax.rem` of numbers that may be subnormal, which devices read as zero.

    A small divisor is multiplied by 2^64, and so is the first remainder: in both divisions all numbers are then normal,
    or the dividend is the smaller one.
    """
    full_range = carrier_range(carrier)

    def multiply(v: Array, power: Array) -> Array:
        return multiply_and_round(v, power, None, carrier, None, full_range, full_range)

    def take_remainder(a: Array, b: Array) -> Array:
        magnitude, divisor = bit_ops.split_sign(a, carrier)[1], bit_ops.split_sign(b, carrier)[1]
        return jnp.where((magnitude < divisor) & (divisor <= carrier.inf), a, lax.rem(a, b))

    is_small = bit_ops.split_sign(y, carrier)[1] < (carrier.bias - 40) << carrier.fraction
    scale = jnp.where(is_small & (bit_ops.split_sign(y, carrier)[1] > 0), 2.0**64, 1.0).astype(x.dtype)
    divisor = multiply(y, scale)
    return multiply(take_remainder(multiply(take_remainder(x, divisor), scale), divisor), 1 / scale)


def exact_floor_divide(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The floor of the quotient. With infinities NumPy's (x - mod(x, y)) / y, which is NaN or, of other signs, -1."""
    x, y = operands
    carrier = _carrier_of_operand(x)
    (x_sign, x_magnitude), (y_sign, y_magnitude) = bit_ops.split_sign(x, carrier), bit_ops.split_sign(y, carrier)
    is_minus_one = (x_sign != y_sign) & (x_magnitude > 0) & (x_magnitude < carrier.inf) & (y_magnitude == carrier.inf)
    x = jnp.where(is_minus_one, -1, jnp.where((x_magnitude == carrier.inf) & (y_magnitude > 0), jnp.nan, x))
    y = jnp.where(is_minus_one, 1, y)
    return round_exact(
        _floor_of_quotient(double_word.divide_exactly(x, y, carrier, carrier.work_width), carrier), spec, carrier, word
    )


def _floor_of_quotient(v: ExactResult, carrier: Carrier) -> ExactResult:
    """The floor of a quotient.

    If all of `rest` belongs to the integer part, later bits do not matter: a quotient of numbers of p bits has p
    consecutive zeros or ones only at its end.
    """
    width, word_dtype = carrier.work_width, v.rest.dtype
    ulp_exponent = (v.magnitude >> carrier.fraction) - (carrier.bias + carrier.fraction)  # ulp(t) = 2^place
    is_negative = v.sign != 0
    # Last place above the binary point: t is an integer, and so are the first bits of the rest.
    integer_bits = jnp.clip(ulp_exponent, 0, width - 1).astype(word_dtype)
    fraction_mask = _low_ones(width - integer_bits, word_dtype)
    has_fraction = (v.rest & fraction_mask) != 0
    integer_part = v.rest & ~fraction_mask
    unit = (is_negative & (has_fraction | v.sticky)).astype(word_dtype)
    # One unit more in magnitude: the lowest integer bit of the rest, or the last bit of t if there is none.
    next_part = integer_part + jnp.where(integer_bits == 0, 0, unit << ((width - integer_bits) % width))
    carry = jnp.where(integer_bits == 0, unit, (next_part < integer_part).astype(word_dtype)).astype(v.magnitude.dtype)
    rest = jnp.where(integer_bits == 0, 0, next_part)
    large = replace(v, magnitude=v.magnitude + carry, rest=rest, inexact=rest != 0, sticky=jnp.zeros_like(v.sticky))
    # Last place below the binary point.
    t = bit_ops.join_sign(jnp.zeros_like(v.sign), v.magnitude, carrier)
    one = carrier.bias << carrier.fraction
    truncated = jnp.where(v.magnitude < one, 0, jnp.floor(t))
    adds_one = is_negative & (v.inexact | (bit_ops.split_sign(truncated, carrier)[1] != v.magnitude))
    floor_bits = bit_ops.split_sign(truncated + adds_one.astype(truncated.dtype), carrier)[1]
    is_small, is_integer = ulp_exponent < 0, (ulp_exponent >= width) | (v.magnitude >= carrier.inf) | v.beyond
    zero = jnp.zeros_like(v.rest)
    return replace(
        v,
        magnitude=jnp.where(is_integer, v.magnitude, jnp.where(is_small, floor_bits, large.magnitude)),
        rest=jnp.where(is_integer, v.rest, jnp.where(is_small, zero, large.rest)),
        inexact=jnp.where(is_integer, v.inexact, ~is_small & large.inexact),
        sticky=is_integer & v.sticky,
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
    head = jnp.clip(total, 2 - bias, bias)
    return _full_range_operation(
        "mul", (fraction * _normal_power_of_two(head, carrier), _normal_power_of_two(total - head, carrier)), spec, word
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
    are_integers = [(x == jnp.trunc(x)) & (x >= -limit) & (x < limit) for x in operands]
    x, y = (jnp.where(fits, x, 0).astype(carrier.work) for fits, x in zip(are_integers, operands, strict=True))
    bits = {"and": x & y, "or": x | y, "xor": x ^ y}[name]
    high, low = bits >> half, bits & bit_ops.low_mask(half)
    parts = (high.astype(carrier.name) * 2.0**half, low.astype(carrier.name))
    return jnp.where(are_integers[0] & are_integers[1], _full_range_operation("add", parts, spec, word), jnp.nan)
