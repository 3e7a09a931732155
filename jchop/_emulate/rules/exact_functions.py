"""Functions that are not a single operation of `_core`: those that round the exact result once, and exact ones.

The former take rounded operands, float32 or float64, and a random word for each element. The latter work on the bits
where `jax.numpy` is inexact, or a device reads subnormal numbers as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._common.gradients import CustomJvp
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.exact import ExactResult, carrier_range, range_of, round_exact
from jchop._core.matmul.operations import round_operation
from jchop._spec.spec import Spec
from jchop.formats import binary32, binary64
from jchop.formats.rounding import Rounding

Array = jax.Array
_ExactOperands = tuple[Array, ...]


def _full_range_operation(name: str, operands: _ExactOperands, spec: Spec, word: Array | None = None) -> Array:
    """An operation on arbitrary values of the carrier."""
    full_range = carrier_range(_carrier_of_operand(operands[0]))
    return round_operation(name, operands, spec, word, ranges=[full_range] * len(operands))


def _carrier_of_operand(x: Array) -> Carrier:
    return CARRIERS[x.dtype.name]


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


def exact_ldexp(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The exact x 2^n for integers n, rounded once.

    The product of the significand of x and 2^a, with a normal result in the carrier, is exact. Only the remaining power
    of two can leave the carrier's normal range. Exponents beyond twice the carrier's range do not change the result.
    """
    x, n = operands
    carrier = _carrier_of_operand(x)
    bias = carrier.bias
    fraction, exponent = carrier_frexp(x)
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


# -- decimals ----------------------------------------------------------------------------------------------------------


def exact_decimals(decimals: int, operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The nearest multiple of 10^-decimals, rounded once."""
    (x,) = operands
    result = (_round_to_decimals if decimals > 0 else _round_to_tens)(x, abs(decimals), spec, word)
    is_integer = decimals > 0 and jnp.abs(x) >= 2.0 ** CARRIERS[x.dtype.name].fraction
    return jnp.where(~jnp.isfinite(x) | is_integer, x, result)


def _round_to_decimals(x: Array, decimals: int, spec: Spec, word: Array | None) -> Array:
    """The multiple for a positive number of decimals, if x may have a fraction.

    With h + l the exact product of x and the power of ten, the multiple is the integer next to it: a number of the
    carrier, or, if h has no fraction, h and the integer next to l. In that case the multiple and x differ by less than
    two places of the carrier, and the difference, rounded to odd, is added to x.
    """
    carrier, power = CARRIERS[x.dtype.name], jnp.full_like(x, 10.0**decimals)
    carrier_spec = Spec({"float32": binary32, "float64": binary64}[carrier.name])
    high = x * power
    low = _full_range_operation("fma", (x, power, -high), carrier_spec)
    nearest = jnp.round(high)
    rest = high - nearest
    integer = nearest + ((rest == 0.5) & (low > 0)).astype(x.dtype) - ((rest == -0.5) & (low < 0)).astype(x.dtype)
    integer = jnp.where(integer == 0, jnp.copysign(integer, x), integer)
    quotient = _full_range_operation("div", (integer, power), spec, word)
    odd_spec = Spec(carrier_spec.format, rounding=Rounding.ODD)
    difference = _full_range_operation("div", (jnp.round(low) - low, power), odd_spec)
    corrected = _full_range_operation("add", (x, difference), spec, word)
    return jnp.where(jnp.abs(high) < 2.0**carrier.fraction, quotient, corrected)


def _round_to_tens(x: Array, zeros: int, spec: Spec, word: Array | None) -> Array:
    """The multiple for a negative number of decimals: x plus its exact distance to the multiple of 10^zeros."""
    power = jnp.full_like(x, 10.0**zeros)
    remainder = lax.rem(x, power)
    excess = jnp.abs(remainder)
    is_odd = jnp.abs(lax.rem(x, 2 * power)) >= power
    rounds_away = (excess > power / 2) | ((excess == power / 2) & is_odd)
    distance = jnp.where(rounds_away, jnp.copysign(power - excess, x), -remainder)
    result = _full_range_operation("add", (x, distance), spec, word)
    is_zero = ~rounds_away & (jnp.abs(x) < power)
    return jnp.where(is_zero, _full_range_operation("mul", (jnp.zeros_like(x), x), spec, word), result)


# -- on bits -----------------------------------------------------------------------------------------------------------


def _carrier_sign_and_magnitude(x: Array) -> tuple[Array, Array, int, int]:
    """Whether the sign bit of `x` is set, its magnitude bits, and the magnitude bits of 1 and of infinity."""
    carrier = CARRIERS[x.dtype.name]
    sign, magnitude = bit_ops.split_sign(x, carrier)
    return sign != 0, magnitude, carrier.bias << carrier.fraction, carrier.inf


def carrier_floor(x: Array) -> Array:
    """The largest integer <= `x`."""
    negative, magnitude, one, _ = _carrier_sign_and_magnitude(x)
    return jnp.where(negative & (magnitude > 0) & (magnitude < one), -1, jnp.floor(x)).astype(x.dtype)


def carrier_ceil(x: Array) -> Array:
    """The smallest integer >= `x`."""
    negative, magnitude, one, _ = _carrier_sign_and_magnitude(x)
    return jnp.where(~negative & (magnitude > 0) & (magnitude < one), 1, jnp.ceil(x)).astype(x.dtype)


def carrier_sign(x: Array) -> Array:
    """-1, a zero of the sign of `x`, 1, or NaN."""
    negative, magnitude, _, infinity = _carrier_sign_and_magnitude(x)
    unit = jnp.where(negative, -1, 1).astype(x.dtype)
    return jnp.where((magnitude == 0) | (magnitude > infinity), lax.stop_gradient(x), unit)


def carrier_modf(x: Array) -> tuple[Array, Array]:
    """The fraction and the integer part, both of the sign of `x`."""
    _, magnitude, one, infinity = _carrier_sign_and_magnitude(x)
    integer_part = jnp.trunc(x)
    fraction = jnp.where(magnitude == infinity, 0, x - integer_part)
    fraction = jnp.where(magnitude < one, x, jnp.copysign(fraction, x))
    return jnp.where(magnitude > infinity, x, fraction), integer_part


@CustomJvp
def carrier_frexp(x: Array) -> tuple[Array, Array]:
    """The significand in [0.5, 1) and the int32 exponent of `x`; zeros, infinities and NaN have exponent 0."""
    carrier = CARRIERS[x.dtype.name]
    sign, magnitude = bit_ops.split_sign(x, carrier)
    significand = jnp.where(magnitude >> carrier.fraction == 0, magnitude, 1 << carrier.fraction)
    shift = carrier.fraction - bit_ops.floor_log2_integers(jnp.maximum(significand, 1), carrier).astype(magnitude.dtype)
    exponent = jnp.maximum(magnitude >> carrier.fraction, 1) - shift - (carrier.bias - 1)
    fraction = (magnitude << shift) & bit_ops.low_mask(carrier.fraction)
    is_special = (magnitude == 0) | (magnitude >= carrier.inf)
    bits_of_half = (carrier.bias - 1) << carrier.fraction
    bits = jnp.where(is_special, magnitude, bits_of_half | fraction)
    return bit_ops.join_sign(sign, bits, carrier), jnp.where(is_special, 0, exponent).astype(jnp.int32)


@carrier_frexp.defjvp
def _carrier_frexp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple[Array, Array], tuple[Array, Any]]:
    mantissa, exponent = carrier_frexp(*primals)
    slope = jnp.ldexp(jnp.ones_like(mantissa), -exponent)
    return (mantissa, exponent), (tangents[0] * slope, np.zeros(exponent.shape, jax.dtypes.float0))


def sort_keys(x: Array, *, zeros_equal: bool = False) -> Array:
    """Integers in the order of the values of a carrier; -0 is next below +0, or equal."""
    sign, magnitude = bit_ops.split_sign(x, CARRIERS[x.dtype.name])
    order = bit_ops.ordered_integers(sign, magnitude)
    return order if zeros_equal else order - (sign != 0).astype(order.dtype)


def extremum_by_bits(primitive: str, x: Array, axes: tuple[int, ...]) -> Array:
    """The largest or the smallest of one or more elements along axes (`reduce_max`, `reduce_min`); NaN if one is."""
    carrier, is_max = CARRIERS[x.dtype.name], primitive == "reduce_max"
    magnitude = bit_ops.split_sign(x, carrier)[1]
    order_keys = bit_ops.lax_where(magnitude > carrier.inf, magnitude if is_max else ~magnitude, sort_keys(x))
    best = (lax.reduce_max if is_max else lax.reduce_min)(order_keys, axes)
    sign = (best < 0).astype(best.dtype)
    return bit_ops.join_sign(sign * carrier.sign_bit, best ^ -sign, carrier)


def arg_extremum_by_bits(primitive: str, x: Array, axes: tuple[int, ...], index_dtype: Any) -> Array:
    """The index of the first largest or smallest element along an axis (`argmax`, `argmin`), or of the first NaN."""
    order_keys = sort_keys(x, zeros_equal=True)
    limits, is_max = jnp.iinfo(order_keys.dtype), primitive == "argmax"
    order_keys = jnp.where(jnp.isnan(x), limits.max if is_max else limits.min, order_keys)
    return (lax.argmax if is_max else lax.argmin)(order_keys, axes[0], index_dtype)


#: In place of primitives that may read subnormal numbers as zero.
CARRIER_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "floor": carrier_floor,
    "ceil": carrier_ceil,
    "sign": carrier_sign,
}
