"""Operations whose exact result is rounded once, by the cheapest exact way.

The ranges of the operands, known before anything is computed, decide between four ways:

1. the hardware's operation and then a rounding, if the hardware's result is exact or its error has no effect. For the
   carrier's own format with `flush`: the hardware's operation with subnormal results made zero;
2. the hardware's sum and its error (TwoSum; Knuth 1969), whose sign tells on which side the exact sum is;
3. the same on scaled operands (`hardware`), for float32 and formats with its exponents;
4. integer arithmetic (`double_word`), right for every input.

Ways 1 and 2 are taken only if no operand, term or result can be a subnormal of the carrier. Devices may read one as
zero. In all ways, a product that enters a sum is exact. So a compiler that contracts a b + c to one operation changes
nothing.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import FLOAT64, Carrier, join_sign, lax_where, split_sign
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.exact import (
    ExactResult,
    ValueRange,
    carrier_range,
    has_spare_bits,
    product_range,
    range_of,
    round_exact,
    rounds_on_carrier_grid,
    sum_range,
)
from jchop._core.arithmetic.hardware import (
    add_by_scaling,
    adds_to_round,
    error_of_sum,
    has_constant_drop,
    multiply_by_scaling,
    round_by_adding,
    round_with_error,
    supports_scaling_product,
    supports_scaling_sum,
)
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import CARRIER_SPECS, x64_remedy
from jchop._core.rounding.modes import NEAREST_MODES
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat, StringFormat
from jchop.formats.rounding import Overflow, Rounding


def multiply_and_round(
    x: Array, y: Array, spec: Spec | None, carrier: Carrier, word: Array | None, xr: ValueRange, yr: ValueRange
) -> Array:
    """`x * y`, its exact value rounded once.

    Args:
        x: values of `carrier` within their range, or infinities or NaN.
        y: the same, of the same shape.
        spec: the rounding of the result; None: the carrier's own format, to nearest even.
        carrier: float32 or float64.
        word: for the stochastic modes, a random word for each element: uint32, or uint64 for float64.
        xr: the range of `x`.
        yr: the range of `y`.

    Raises:
        ValueError: if `spec` wraps, and a product may not fit the carrier.
    """
    spec = _none_if_own(spec, carrier)
    if _only_flushes(spec, carrier, xr, yr) and xr.bits + yr.bits <= carrier.fraction:
        # The product of normal numbers, so exact that it is not rounded up to a normal number.
        product = product_range(xr, yr)
        value = x * y
        if product.is_normal(carrier) and product.top <= carrier.bias + 1:
            return value  # else it must not be contracted with a sum
        (xs, _), (ys, _), (_, magnitude) = (split_sign(v, carrier) for v in (x, y, value))
        return _flush_subnormals(xs ^ ys, magnitude, carrier)
    if _product_is_exact(xr, yr, carrier) and _ends_agree(product_range(xr, yr), spec, carrier):
        return round_hardware_result(x * y, product_range(xr, yr), spec, carrier, word)
    if supports_scaling_product(spec, carrier, xr, yr):
        return multiply_by_scaling(x, y, spec, word)
    _refuse_wrapping(spec, product_range(xr, yr), carrier)
    return round_exact(double_word.multiply_exactly(x, y, carrier), spec, carrier, word)


def add_and_round(
    x: Array, y: Array, spec: Spec | None, carrier: Carrier, word: Array | None, xr: ValueRange, yr: ValueRange
) -> Array:
    """`x + y`, its exact value rounded once; arguments as for `multiply_and_round`.

    A sum that is exactly zero is +0, or -0 under `Rounding.DOWN`. The sum of two zeros of one sign has this sign.
    """
    spec = _none_if_own(spec, carrier)
    total = sum_range(xr, yr)
    zero_sign = carrier.sign_bit if spec is not None and spec.rounding is Rounding.DOWN else 0
    if _only_flushes(spec, carrier, xr, yr):
        # The sum of normal numbers; a device that makes a subnormal sum zero may lose its sign.
        sign, magnitude = split_sign(x + y, carrier)
        return _flush_subnormals(jnp.where(x < -y, carrier.sign_bit, sign), magnitude, carrier)
    if total.is_normal(carrier):
        exact = total.bits <= carrier.fraction + 1
        if (spec is None or _ends_agree(total, spec, carrier)) and (
            exact or _rounds_twice_safely(spec, xr, yr, carrier)
        ):
            return round_hardware_result(
                _fix_sign_of_zero_sum(x + y, x, y, zero_sign, carrier), total, spec, carrier, word
            )
        if spec is not None and has_spare_bits(spec.format, carrier) and _has_room_for_two_sum(total, spec, carrier):
            _refuse_wrapping(spec, total, carrier)
            # The exact sum rounded once, from the hardware's sum and its error.
            sign, magnitude, error = _sum_and_error(x, y, zero_sign, carrier)
            if has_constant_drop(spec, carrier) and total.quantum >= range_of(spec, carrier).quantum:
                error, binade = error_of_sum(error, magnitude, spec, carrier)
                return round_with_error(sign, magnitude, magnitude, error, spec, carrier, word, binade)
            return round_exact(
                _exact_of_sum_and_error(sign, magnitude, error, total, spec, carrier), spec, carrier, word
            )
    if supports_scaling_sum(spec, carrier):
        return add_by_scaling(x, y, spec, word, xr, yr)
    _refuse_wrapping(spec, total, carrier)
    return round_exact(double_word.add_exactly(x, y, carrier, zero_sign), spec, carrier, word)


def multiply_add_and_round(
    x: Array, y: Array, z: Array, spec: Spec | None, carrier: Carrier, word: Array | None, *ranges: ValueRange
) -> Array:
    """`x * y + z`, its exact value rounded once; arguments as for `multiply_and_round`.

    Zeros are as in `add_and_round`.
    """
    xr, yr, zr = ranges
    product = product_range(xr, yr)
    if _product_is_exact(xr, yr, carrier) and product.top <= carrier.bias + 1:
        return add_and_round(x * y, z, spec, carrier, word, product, zr)
    _refuse_wrapping(spec, sum_range(product, zr), carrier)
    zero_sign = carrier.sign_bit if spec is not None and spec.rounding is Rounding.DOWN else 0
    return round_exact(double_word.multiply_add_exactly(x, y, z, carrier, zero_sign), spec, carrier, word)


def divide_and_round(
    x: Array, y: Array, spec: Spec | None, carrier: Carrier, word: Array | None, xr: ValueRange, yr: ValueRange
) -> Array:
    """`x / y`, its exact value rounded once; arguments as for `multiply_and_round`.

    Always in integer arithmetic: not every device divides to the last bit.
    """
    if spec is not None and spec.overflow is Overflow.WRAP:
        raise ValueError(f"spec={str(spec)!r}: a quotient has no last bit, so it cannot wrap; saturate instead")
    bits = 2 if spec is None or not spec.rounding.stochastic else carrier.work_width
    return round_exact(double_word.divide_exactly(x, y, carrier, bits), spec, carrier, word)


# -- which way ---------------------------------------------------------------------------------------------------------


def _none_if_own(spec: Spec | None, carrier: Carrier) -> Spec | None:
    """`spec`, or None if it is the rounding of float32 itself."""
    return None if carrier.name == "float32" and spec == CARRIER_SPECS["float32"] else spec


def _only_flushes(spec: Spec | None, carrier: Carrier, xr: ValueRange, yr: ValueRange) -> bool:
    """Whether `spec` is the carrier's own rounding with subnormal results made zero, of operands that are normal."""
    is_carrier_rounding = spec is not None and spec.flush and replace(spec, flush=False) == CARRIER_SPECS[carrier.name]
    return is_carrier_rounding and xr.is_normal(carrier) and yr.is_normal(carrier)


def _product_is_exact(xr: ValueRange, yr: ValueRange, carrier: Carrier) -> bool:
    """Whether the hardware's product is exact, or infinite if it is too large."""
    product = product_range(xr, yr)
    return all(each.is_normal(carrier) for each in (xr, yr, product)) and product.bits <= carrier.fraction + 1


def _ends_agree(result: ValueRange, spec: Spec | None, carrier: Carrier) -> bool:
    """Whether a result that is infinite in the carrier, if there is one, is rounded like its exact value."""
    may_round_up = result.bits > carrier.fraction + 1  # may be rounded up to 2^top
    if result.top + may_round_up <= carrier.bias + 1:
        return True
    if spec is None or isinstance(spec.format, StringFormat):  # an infinity becomes NaR, a large number does not
        return False
    return spec.rounding in NEAREST_MODES and spec.overflow in (Overflow.IEEE, Overflow.SATURATE)


def _rounds_twice_safely(spec: Spec | None, xr: ValueRange, yr: ValueRange, carrier: Carrier) -> bool:
    """Whether a sum rounded by the hardware and then under `spec` is the exact sum rounded under `spec`.

    The first rounding is monotone, so it can only change the result if it gives the middle m of two neighbours. The
    carrier drops bits of one operand only; this operand is then so small that the other one would be m. But m has p + 1
    bits, and operands have at most p (Figueroa 1995). Below the smallest normal value m has fewer bits, so there the
    sum must be exact.
    """
    if spec is None:
        return True
    fmt, carrier_bits = spec.format, carrier.fraction + 1
    if not isinstance(fmt, FloatFormat) or spec.rounding not in NEAREST_MODES:
        return False
    if fmt.emin - min(xr.quantum, yr.quantum) > carrier_bits:
        return False
    if rounds_on_carrier_grid(spec, carrier):
        return spec.rounding is Rounding.NEAREST_EVEN
    return max(xr.bits, yr.bits) <= fmt.precision and 2 * fmt.precision + 2 <= carrier_bits


def _has_room_for_two_sum(total: ValueRange, spec: Spec, carrier: Carrier) -> bool:
    """Whether no step of TwoSum can overflow, and no number in the scaling of stochastic modes can be subnormal."""
    if total.top > carrier.bias:
        return False
    up = carrier.work_width - 1 + carrier.fraction
    return not spec.rounding.stochastic or (
        total.quantum >= carrier.work_width - 2 - carrier.bias and total.quantum - total.top + up >= 1 - carrier.bias
    )


def _refuse_wrapping(spec: Spec | None, result: ValueRange, carrier: Carrier) -> None:
    """Refuses a wrapping spec if the carrier may not hold an exact result: wrapping needs every bit of it."""
    if spec is None or spec.overflow is not Overflow.WRAP or _range_fits(result, carrier):
        return
    able = ["float64"] if _range_fits(result, FLOAT64) else []
    remedy = f"saturate, or cast the operands to float64{x64_remedy(able)}" if able else "or saturate"
    raise ValueError(
        f"spec={str(spec)!r} wraps an exact result, which {carrier.name} must hold; these operands give up to "
        f"{result.bits} bits from 2^{result.quantum} on, more than its {carrier.fraction + 1}: use narrower operands, "
        f"{remedy}"
    )


def _range_fits(result: ValueRange, carrier: Carrier) -> bool:
    """Whether a carrier holds every result of a range."""
    full_range = carrier_range(carrier)
    return result.bits <= full_range.precision and result.quantum >= full_range.quantum and result.top <= full_range.top


# -- ways 1 and 2 ------------------------------------------------------------------------------------------------------


def round_hardware_result(
    value: Array, result_range: ValueRange, spec: Spec | None, carrier: Carrier, word: Array | None
) -> Array:
    """`value`, the hardware's result for an exact result in the range `result_range`, rounded under `spec`."""
    if spec is None:
        return value
    if adds_to_round(spec, result_range, carrier):
        return round_by_adding(value, spec, carrier)
    return round_to_spec(value, spec, carrier, word)


def _flush_subnormals(sign: Array, magnitude: Array, carrier: Carrier) -> Array:
    return join_sign(sign, jnp.where(magnitude < 1 << carrier.fraction, 0, magnitude), carrier)


def _fix_sign_of_zero_sum(total: Array, x: Array, y: Array, zero_sign: int, carrier: Carrier) -> Array:
    """`total`, the hardware's `x + y`. A zero sum of operands with different signs gets `zero_sign`."""
    if not zero_sign:
        return total
    bits, xs, ys = (lax.bitcast_convert_type(value, carrier.work) for value in (total, x, y))
    return join_sign(lax_where((bits == 0) & ((xs ^ ys) < 0), zero_sign, jnp.zeros_like(bits)), bits, carrier)


def _sum_and_error(x: Array, y: Array, zero_sign: int, carrier: Carrier) -> tuple[Array, Array, Array]:
    """Sign and magnitude of the hardware's sum, and its error, counted away from zero; NaN beside infinities.

    The sum and its terms must be normal values of the carrier, zeros, infinities or NaN.
    """
    total = x + y
    y_part = total - x
    error = (x - (total - y_part)) + (y - y_part)
    sign, magnitude = split_sign(_fix_sign_of_zero_sum(total, x, y, zero_sign, carrier), carrier)
    return sign, magnitude, lax.bitcast_convert_type(lax.bitcast_convert_type(error, carrier.work) ^ sign, error.dtype)


def _exact_of_sum_and_error(
    sign: Array, magnitude: Array, error: Array, total: ValueRange, spec: Spec, carrier: Carrier
) -> ExactResult:
    """The exact sum t + error of a rounded sum, given as sign and magnitude bits of t, as leading bits and rest."""
    magnitude = magnitude - (error < 0).astype(magnitude.dtype)
    inexact = (error < 0) | (error > 0)
    unsigned, width = jnp.dtype(f"uint{carrier.work_width}"), carrier.work_width
    if not spec.rounding.stochastic:
        return ExactResult(sign, magnitude, inexact, jnp.zeros_like(magnitude, unsigned), inexact)
    # The error in units of ulp(t) 2^(1-W): at most 2^(W-2) units, and exact because of `_has_room_for_two_sum`.
    power = 2 * carrier.bias + carrier.fraction + width - 1 - (magnitude >> carrier.fraction)
    power = jnp.minimum(power, 2 * carrier.bias)  # has an effect only if the error is zero
    multiple = error * lax.bitcast_convert_type(power << carrier.fraction, error.dtype)
    units = jnp.floor(multiple)
    rest = units.astype(carrier.work).astype(unsigned) << 1
    return ExactResult(sign, magnitude, inexact, rest, multiple != units, quantum=total.quantum)


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

    Let t be the hardware's quotient cut to one bit more than the format. Then t y and x - t y are exact. The sign
    of x - t y tells whether the quotient is t, above it, or below it. If it is not t, the last bit is set: the quotient
    is rounded to odd.
    """
    drop = carrier.fraction + 1 - _deciding_bits(spec, carrier)
    (xs, xm), (ys, ym) = split_sign(x, carrier), split_sign(y, carrier)
    dividend, divisor = (lax.bitcast_convert_type(magnitude, x.dtype) for magnitude in (xm, ym))
    bits = lax.bitcast_convert_type(_hardware_quotient(dividend, divisor), carrier.work)
    bits = (jnp.minimum(bits, carrier.nan) + _QUOTIENT_ERROR) >> drop << drop
    remainder = dividend - lax.bitcast_convert_type(bits, x.dtype) * divisor
    is_below, is_above = remainder < 0, remainder > 0  # neither for NaN, beside infinities
    bits = (bits - (is_below.astype(bits.dtype) << drop)) | (is_below | is_above).astype(bits.dtype)
    low = xr.quantum - yr.top
    odd = ValueRange(low - carrier.fraction, carrier.fraction + 1, xr.top - yr.quantum + 1)
    return round_hardware_result(join_sign(xs ^ ys, bits, carrier), odd, spec, carrier, None)


def _hardware_quotient(dividend: Array, divisor: Array) -> Array:
    """The quotient as the hardware divides."""
    return dividend / divisor
