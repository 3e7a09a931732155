"""Functions that are one operation, although JAX composes them of several, whose roundings would add up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal
from jax.scipy import special

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._common.gradients import CustomJvp
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.exact import ExactResult, carrier_range, range_of, round_exact
from jchop._core.matmul.operations import round_operation
from jchop._program.jaxprs import same_constant, same_param
from jchop._program.step import programs_of
from jchop._spec.spec import Spec
from jchop.formats._catalogue import binary32, binary64
from jchop.formats.rounding import Rounding

# -- exact functions ---------------------------------------------------------------------------------------------------
#
# Functions that are not a single operation of `_core`: those that round the exact result once, and exact ones.
#
# The former take rounded operands, float32 or float64, and a random word for each element. The latter work on the bits
# where `jax.numpy` is inexact, or a device reads subnormal numbers as zero.


_ExactOperands = tuple[Array, ...]


def _full_range_operation(name: str, operands: _ExactOperands, spec: Spec, word: Array | None = None) -> Array:
    """An operation on arbitrary values of the carrier."""
    full_range = carrier_range(CARRIERS[operands[0].dtype.name])
    return round_operation(name, operands, spec, word, ranges=[full_range] * len(operands))


def exact_mod(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The remainder x - floor(x / y) y.

    The remainder of the truncated quotient is a multiple of the last place of the smaller operand, and smaller than
    both operands, hence exact. If its sign differs from the sign of y, y is added.
    """
    x, y = operands
    carrier = CARRIERS[x.dtype.name]
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

    A small divisor is multiplied by 2^64, and so is the first remainder. In both divisions all numbers are then normal,
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
    carrier = CARRIERS[x.dtype.name]
    (x_sign, x_magnitude), (y_sign, y_magnitude) = bit_ops.split_sign(x, carrier), bit_ops.split_sign(y, carrier)
    is_minus_one = (x_sign != y_sign) & (x_magnitude > 0) & (x_magnitude < carrier.inf) & (y_magnitude == carrier.inf)
    x = jnp.where(is_minus_one, -1, jnp.where((x_magnitude == carrier.inf) & (y_magnitude > 0), jnp.nan, x))
    y = jnp.where(is_minus_one, 1, y)
    return round_exact(
        _floor_of_quotient(double_word.divide_exactly(x, y, carrier, carrier.work_width), carrier), spec, carrier, word
    )


def _floor_of_quotient(v: ExactResult, carrier: Carrier) -> ExactResult:
    """The floor of a quotient.

    If all of `rest` belongs to the integer part, later bits do not matter. A quotient of numbers of p bits has p
    consecutive zeros or ones only at its end.
    """
    width, word_dtype = carrier.work_width, v.rest.dtype
    ulp_exponent = (v.magnitude >> carrier.fraction) - (carrier.bias + carrier.fraction)  # ulp(t) = 2^place
    is_negative = v.sign != 0
    # Last place above the binary point: t is an integer, and so are the first bits of the rest.
    integer_bits = jnp.clip(ulp_exponent, 0, width - 1).astype(word_dtype)
    fraction_mask = ~jnp.zeros_like(integer_bits) >> integer_bits  # at least one low bit
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


def exact_ldexp(operands: _ExactOperands, spec: Spec, word: Array | None) -> Array:
    """The exact x 2^n for integers n, rounded once.

    The product of the significand of x and 2^a, with a normal result in the carrier, is exact. Only the remaining power
    of two can leave the carrier's normal range. Exponents beyond twice the carrier's range do not change the result.
    """
    x, n = operands
    carrier = CARRIERS[x.dtype.name]
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
    carrier = CARRIERS[operands[0].dtype.name]
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

    Let h + l be the exact product of x and the power of ten. The multiple is the integer next to it, a number of the
    carrier; or if h has no fraction, h and the integer next to l. Then the multiple and x differ by less than two
    places of the carrier. The difference, rounded to odd, is added to x.
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
    "ceil": lambda x: -carrier_floor(-x),
    "sign": carrier_sign,
}


@dataclass(frozen=True)
class NamedFunction:
    """A function in place of the primitive of an equation.

    Args:
        name: its name; if `_core.elementary` has it, its exact value is rounded once.
        function: the function whose equations are found in a program.
        operands: the dtypes of operands with which it is traced for that.
        exact: the exact result of operands, rounded once under a spec, with a random word for each element. None: by
            the name, else the carrier's results are rounded.
        carrier: the function in the carrier, if it is another one; it also defines the derivative.
        carrier_is_exact: whether the carrier's results are exact.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[str, ...] = ("float32",)
    exact: Callable[[tuple[Array, ...], Spec, Array | None], Array] | None = None
    carrier: Callable[..., Any] | None = None
    carrier_is_exact: bool = False
    multiple_results: bool = False

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters of a call, as of a primitive: the same ones."""
        return params

    def bind(self, *args: Any) -> Any:
        """The carrier's results, as of a primitive."""
        return (self.carrier or self.function)(*args)


_TWO = ("float32", "float32")
#: Functions of `jax.numpy`, `jax.scipy.special` and `jax.nn`.
FUNCTIONS = (
    NamedFunction("degrees", jnp.degrees),
    NamedFunction("radians", jnp.radians),
    NamedFunction("log2", jnp.log2),
    NamedFunction("log10", jnp.log10),
    NamedFunction("logaddexp", jnp.logaddexp, _TWO),
    NamedFunction("hypot", jnp.hypot, _TWO),
    NamedFunction("gamma", special.gamma),
    NamedFunction("gelu", partial(jax.nn.gelu, approximate=False)),
    NamedFunction("floor_divide", jnp.floor_divide, _TWO, exact_floor_divide),
    NamedFunction("remainder", jnp.remainder, _TWO, exact_mod),
    NamedFunction("ldexp", jnp.ldexp, ("float32", "int32"), exact_ldexp),
    NamedFunction("trunc", jnp.trunc, carrier_is_exact=True),
    NamedFunction("frexp", jnp.frexp, carrier=carrier_frexp, carrier_is_exact=True, multiple_results=True),
    NamedFunction("modf", jnp.modf, carrier=carrier_modf, carrier_is_exact=True, multiple_results=True),
)


def with_functions(jaxpr: Any, functions: Sequence[NamedFunction]) -> Any:
    """A jaxpr with one equation for each call of these functions."""
    by_start: dict[Any, list[NamedFunction]] = {}
    for function in functions:
        avals = tuple(((), dtype, False) for dtype in function.operands)
        if (known := _equations_of(function, avals)) is not None:
            by_start.setdefault(_start_of(known[0]), []).append(function)
    eqns, place = [], 0
    while place < len(jaxpr.eqns):
        candidates = by_start.get(_start_of(jaxpr.eqns[place]), ())
        calls = (_call_at(jaxpr, place, function) for function in candidates)
        own, count = next((call for call in calls if call is not None), ([jaxpr.eqns[place]], 1))
        eqns += own
        place += count
    return jaxpr if all(map(lambda new, old: new is old, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


@lru_cache(maxsize=1024)
def _equations_of(function: NamedFunction, avals: tuple[Any, ...]) -> list[Any] | None:
    """The equations of a function for operands of these shapes and dtypes, weak or not; None if it takes no such."""
    try:
        return jax.make_jaxpr(function.function)(*(jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals)).eqns
    except (TypeError, ValueError):
        return None


def _start_of(eqn: Any) -> tuple[str, Any]:
    return eqn.primitive.name, eqn.params.get("name")


def _call_at(jaxpr: Any, place: int, function: NamedFunction) -> tuple[list[Any], int] | None:
    """The equation of a call whose equations begin at a place, perhaps after broadcasts, and their number."""
    operands = [v for v in jaxpr.eqns[place].invars if len(function.operands) > 1 or not isinstance(v, Literal)]
    if len(operands) != len(function.operands) or not _have_dtypes(operands, function.operands):
        return None
    first, originals, broadcasts, shapes = jaxpr.eqns[place], operands, [], [v.aval.shape for v in operands]
    program = next(iter(programs_of(first)), None)
    if program is not None:
        aligned = _with_batch_axes(first, program, operands)
        if aligned is None:
            return None
        operands, broadcasts = aligned
        if first.primitive.name == "custom_jvp_call":  # called with operands of one shape
            shapes = [first.outvars[0].aval.shape] * len(shapes)
    avals = (v.aval for v in operands)
    kinds = ((shape, aval.dtype, getattr(aval, "weak_type", False)) for shape, aval in zip(shapes, avals, strict=True))
    known = _equations_of(function, tuple(kinds))
    if known is None:
        return None
    end = place + len(known)
    eqns, rest = jaxpr.eqns[place:end], jaxpr.eqns[end:]
    if len(eqns) != len(known) or not all(map(_are_alike, eqns, known)):
        return None
    inner = {v for eqn in eqns[:-1] for v in eqn.outvars}
    read = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)} - inner - set(_variables(originals))
    if read or any(v in inner for reader in (jaxpr.outvars, *(eqn.invars for eqn in rest)) for v in _variables(reader)):
        return None
    if not _have_equal_programs(eqns, known) and not _are_made_by(eqns, function):
        return None
    dtype = operands[0].aval.dtype
    for i, (v, name) in enumerate(zip(operands, function.operands, strict=True)):
        if name == "float32" and isinstance(v, Literal):
            operands[i] = Literal(np.asarray(v.val, dtype), v.aval.update(dtype=dtype))
    return [*broadcasts, eqns[-1].replace(primitive=function, params={}, invars=operands, effects=set())], len(known)


def _have_dtypes(operands: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether operands are of one dtype of floating-point numbers, or of integers, as in the example.

    An integer that is a constant may stand for a floating-point number.
    """
    first = getattr(operands[0].aval, "dtype", None)
    if first is None or not jnp.issubdtype(first, jnp.floating):
        return False
    for v, name in zip(operands, names, strict=True):
        dtype = getattr(v.aval, "dtype", np.dtype(bool))
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        if not (is_integer if name != "float32" else dtype == first or (is_integer and isinstance(v, Literal))):
            return False
    return True


def _with_batch_axes(eqn: Any, program: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """The operands of a call with the axes of its result, and the equations that broadcast them.

    Under `jax.vmap`, the program of the call adds axes to operands that have fewer. None if it does not show which.
    """
    shape, results, broadcasts = eqn.outvars[0].aval.shape, list(operands), []
    for i, v in enumerate(operands):
        if len(v.aval.shape) in (0, len(shape)):
            continue
        use = _broadcast_of(program.invars[i], program)
        if use is None:
            return None
        results[i] = type(use.outvars[0])(v.aval.update(shape=use.outvars[0].aval.shape))
        place = {"source_info": eqn.source_info, "ctx": eqn.ctx}
        broadcasts.append(use.replace(invars=[v], outvars=[results[i]], **place))
    try:
        return (results, broadcasts) if np.broadcast_shapes(*(v.aval.shape for v in results)) == shape else None
    except (TypeError, ValueError):  # sizes that are known at run time, or that differ
        return None


def _broadcast_of(v: Any, program: Any) -> Any:
    """The equation that adds axes to a variable, or to results of its shape made of it alone; None if there is none."""
    own = {v}
    for eqn in program.eqns:
        operands = _variables(eqn.invars)
        if own.isdisjoint(operands):
            continue
        if eqn.primitive.name == "broadcast_in_dim":
            return eqn
        for inner in programs_of(eqn):
            pairs = zip(eqn.invars, inner.invars, strict=False)
            found = (_broadcast_of(w, inner) for x, w in pairs if not isinstance(x, Literal) and x in own)
            if (use := next((one for one in found if one is not None), None)) is not None:
                return use
        own |= {out for out in eqn.outvars if out.aval.shape == v.aval.shape and own.issuperset(operands)}
    return None


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _programs_of(eqn: Any) -> dict[str, Any]:
    return {name: x for name, x in eqn.params.items() if hasattr(x, "eqns") or hasattr(x, "jaxpr")}


def _are_alike(eqn: Any, known: Any) -> bool:
    """Whether two equations compute the same of corresponding operands, the programs that they call aside."""
    names = [] if _programs_of(known) else list(known.params)
    constants = [(v, k) for v, k in zip(eqn.invars, known.invars, strict=False) if isinstance(k, Literal)]
    return (
        _start_of(eqn) == _start_of(known)
        and len(eqn.invars) == len(known.invars)
        and all(same_param(eqn.params.get(name), known.params[name], rules=False) for name in names)
        and all(isinstance(v, Literal) and same_constant(v.val, k.val) for v, k in constants)
    )


def _have_equal_programs(eqns: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether equations call equal programs, one at least."""
    pairs = [
        (eqn.params.get(name), program)
        for eqn, other in zip(eqns, known, strict=True)
        for name, program in _programs_of(other).items()
    ]
    return bool(pairs) and all(same_param(one, other, rules=False) for one, other in pairs)


def _are_made_by(eqns: Sequence[Any], function: NamedFunction) -> bool:
    """Whether the function made these equations, as their tracebacks tell; a user may write the same operations.

    It is in the traceback of the last one, or within the program that this calls, which `jax.vmap` changes. The
    equations of a function that JAX compiles in place have the traceback of the call.
    """
    code, frames = _code_of(function), list(map(_frames_of, [*eqns, *_last_inner_equations(eqns[-1])]))
    is_inlined = len(eqns) > 1 and all(each == frames[0] for each in frames[: len(eqns)])
    return None not in frames and (any(code in codes for codes, _ in frames[len(eqns) - 1 :]) or is_inlined)


@lru_cache(maxsize=64)
def _code_of(function: NamedFunction) -> Any:
    """The Python code of a function; a `jax.numpy.ufunc` has none, so it is the code that makes its equations."""
    python = function.function.func if isinstance(function.function, partial) else function.function
    if (code := getattr(inspect.unwrap(python), "__code__", None)) is not None:
        return code
    known = _equations_of(function, tuple(((), dtype, False) for dtype in function.operands)) or ()
    frames = [_frames_of(eqn) for outer in known for eqn in _last_inner_equations(outer)]
    codes = (code for each in frames if each is not None for code in each[0])
    return next((code for code in codes if code.co_name == function.name), None)


def _last_inner_equations(eqn: Any) -> list[Any]:
    return [inner for program in programs_of(eqn) for inner in program.eqns[-1:]]


def _frames_of(eqn: Any) -> Any:
    traceback = eqn.source_info.traceback
    return None if traceback is None else traceback.raw_frames()
