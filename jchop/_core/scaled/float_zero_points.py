"""Integers with zero points that are numbers: x = s e + z, the exact (x - z) / s rounded once.

Such a zero point is a number of the scale format. The difference x - z is exact in two words, for all x and z. It is
divided by the scale digit by digit, so that the quotient is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply_add_and_round, range_of
from jchop._core.arithmetic.double_word import DoubleWord
from jchop._core.arithmetic.exact import ExactResult, round_exact
from jchop._core.arithmetic.quotient import Divisor, divisor_bits, divisor_of
from jchop._core.rounding.codes import decode_elements, encode_elements
from jchop._core.scaled import elements, zero_points
from jchop._core.scaled.scales import (
    BlockScales,
    ScaledPlan,
    clamp_scale,
    number_of_magnitude,
    scale_dtype,
    scale_magnitude,
    scale_rounding,
)
from jchop._spec.spec import Spec
from jchop.formats import IntegerFormat
from jchop.formats.rounding import Overflow

Array = jax.Array


def round_offset(x: Array, scales: BlockScales, zero: Array, plan: ScaledPlan, word: Array | None) -> Array:
    """(x - z) / s rounded once to whole numbers; arguments and result as in `zero_points.round_quotient_plus_zero`.

    Args:
        x: numbers of the arithmetic's carrier.
        scales: the scales of the groups.
        zero: zero points, numbers of the same carrier.
        plan: a plan with an integer element.
        word: for a stochastic element, a word for each number.
    """
    compute = plan.compute
    divisor = divisor_of(scale_magnitude(scales, plan), compute)
    v, some = _quotient_of_difference(x, jnp.broadcast_to(zero, x.shape), divisor, compute)
    whole, share, sticky = zero_points.whole_and_share(v, compute)
    total, share = zero_points.floor_and_share(
        v.sign != 0, bit_ops.lax_where(some, whole, 0), bit_ops.lax_where(some, share, 0), sticky & some
    )
    sums = zero_points.round_floor_and_share(total, share, sticky & some, plan, word)
    return zero_points.specials_far_outside(sums, *bit_ops.split_sign(x, compute), compute)


def add_zero_points(values: Array, scales: BlockScales, zero: Array, plan: ScaledPlan) -> Array:
    """The sums s e + z rounded once to nearest, ties to even, as numbers of the plan's carrier."""
    compute, spec = plan.compute, elements.NARROW_SPECS.get(plan.carrier.name)
    scale = jnp.broadcast_to(number_of_magnitude(scale_magnitude(scales, plan), compute), values.shape)
    own = range_of(Spec(plan.scale), compute)
    whole = values.astype(compute.name)
    element = range_of(plan.element, compute)
    zero = jnp.broadcast_to(zero, values.shape)
    result = multiply_add_and_round(whole, scale, zero, spec, compute, None, element, own, own)
    result = result if scales.nan is None else bit_ops.lax_where(scales.nan, jnp.nan, result)
    return elements.narrow_16_bit(result, plan.carrier)


def fit_offset(x: Array, axes: tuple[int, ...], plan: ScaledPlan) -> tuple[BlockScales, Array]:
    """Scales (max - min) / (M - m) and zero points min - m s, each the exact number rounded once to the scale format.

    If all numbers of a group are equal, the scale is 1, and the number is the zero point.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with NaN.
        axes: the axes of a group.
        plan: a plan with an integer element.
    """
    compute, fmt = plan.compute, plan.element.format
    assert isinstance(fmt, IntegerFormat)
    # In stages because of the quirk `long_fusion_compiled_for_minutes` (`_core/xla/cpu.py`).
    low, high = lax.optimization_barrier(_ends_of_groups(x, axes, compute))
    width = jnp.full_like(low, float(fmt.max_code - fmt.min_code))
    divisor = divisor_of(bit_ops.split_sign(width, compute)[1], compute)
    quotient, some = _quotient_of_difference(high, low, divisor, compute, lax.optimization_barrier)
    quotient = bit_ops.split_sign(round_exact(quotient, scale_rounding(plan), compute, None), compute)[1]
    scales = BlockScales(clamp_scale(quotient, ~some, plan)[0])
    step = bit_ops.lax_where(some, number_of_magnitude(scale_magnitude(scales, plan), compute), 0)
    whole, spec = range_of(None, compute), Spec(plan.scale, overflow=Overflow.SATURATE)
    least = jnp.full_like(low, float(-fmt.min_code))
    return scales, multiply_add_and_round(least, step, low, spec, compute, None, whole, whole, whole)


def store_zero_points(zero: Array, plan: ScaledPlan) -> Array:
    """Zero points in their stored form, in `scale_dtype`."""
    dtype = scale_dtype(plan.scale)
    codes = encode_elements(zero, plan.scale, plan.compute)
    return codes if codes.dtype == dtype else lax.bitcast_convert_type(codes, dtype)


def load_zero_points(array: Array, plan: ScaledPlan) -> Array:
    """The inverse of `store_zero_points`."""
    fmt = plan.scale
    codes = array if array.dtype == fmt.code_dtype else lax.bitcast_convert_type(array, fmt.code_dtype)
    return decode_elements(codes, fmt, plan.compute)


def _ends_of_groups(x: Array, axes: tuple[int, ...], carrier: Carrier) -> tuple[Array, Array]:
    """The least and the largest finite number of each group; zeros if there is none."""
    sign, magnitude = bit_ops.split_sign(x, carrier)
    value, finite = bit_ops.ordered_integers(sign, magnitude), magnitude < carrier.inf
    low = jnp.min(bit_ops.lax_where(finite, value, carrier.inf), axis=axes, keepdims=True)
    high = jnp.max(bit_ops.lax_where(finite, value, -carrier.inf), axis=axes, keepdims=True)
    none = low > high

    def number(value: Array) -> Array:
        value = bit_ops.lax_where(none, 0, value)
        return bit_ops.join_sign(
            bit_ops.lax_where(value < 0, carrier.sign_bit, 0).astype(value.dtype), jnp.abs(value), carrier
        )

    return number(low), number(high)


# -- division ----------------------------------------------------------------------------------------------------------


def _quotient_of_difference(
    x: Array, y: Array, divisor: Divisor, carrier: Carrier, stage: Callable[[Any], Any] = lambda values: values
) -> tuple[ExactResult, Array]:
    """(x - y) / d of finite numbers, exactly, and whether x is not y; the values of each stage pass through `stage`."""
    (xs, xm), (ys, ym) = bit_ops.split_sign(x, carrier), bit_ops.split_sign(y, carrier)
    a = double_word.double_word_of(xs, *double_word.normalize_magnitude(xm, carrier), carrier)
    b = double_word.double_word_of(ys ^ carrier.sign_bit, *double_word.normalize_magnitude(ym, carrier), carrier)
    v, tail = double_word.add_double_words(a, b, 0)
    v = double_word.fill_high_word(v)
    v = double_word.shift_to_top(v, double_word.leading_zeros(v.high, carrier))
    (*words, tail) = stage((v.sign, v.exponent, v.high, v.low, tail))
    v = DoubleWord(*words)
    quotient = _divide_double_word(v, tail, divisor, carrier)
    arrays = {name: part for name, part in vars(quotient).items() if isinstance(part, Array)}
    return replace(quotient, **stage(arrays)), (v.high | v.low | tail) != 0


def _divide_double_word(v: DoubleWord, tail: Array, divisor: Divisor, carrier: Carrier) -> ExactResult:
    """A number with its leading bit at the top of its words, divided by a divisor: M + 1 + W bits, and a sticky bit.

    `tail` is not zero if bits follow the words. No tie lies between the words and the exact number, because ties are
    coarser than their last place. A stochastic mode may draw as for a number that differs by 2^-W.
    """
    width, divisor_width = carrier.work_width, divisor_bits(carrier)
    remainder = (v.high >> (width - divisor_width)).astype(carrier.work)
    high, low = double_word.shift_words_left(v.high, v.low, divisor_width)
    first = (remainder >= divisor.significand).astype(carrier.work)
    remainder = remainder - first * divisor.significand
    top, rest = jnp.zeros_like(high), first.astype(low.dtype)
    total = carrier.fraction + 1 + width
    remaining = total
    while remaining:
        step = min(remaining, carrier.fraction // 2 + 1)
        following = (high >> (width - step)).astype(carrier.work)
        high, low = double_word.shift_words_left(high, low, step)
        digit, remainder = double_word.next_quotient_digit(
            remainder, divisor.significand, divisor.inverse, step, carrier
        )
        remainder = remainder + following
        more = (remainder >= divisor.significand).astype(carrier.work)
        remainder = remainder - more * divisor.significand
        top, rest = double_word.shift_words_left(top, rest, step)
        rest = rest | (digit + more).astype(rest.dtype)
        remaining -= step
    top, rest = double_word.shift_words_left(top, rest, 2 * width - 1 - total)
    smaller = (first == 0).astype(carrier.work)
    exponent = v.exponent + carrier.bias - divisor.field - smaller
    after = tail | remainder.astype(tail.dtype)
    return double_word.exact_of_double_word(
        DoubleWord(v.sign, exponent, *double_word.shift_words_left(top, rest, smaller)), after, carrier
    )
