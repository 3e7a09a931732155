"""Zero points: quotients plus integers, or quotients of differences, rounded once; scales and zero points of ranges.

An integer zero point z is added to a quotient: e is x / s + z, rounded once. Another is a number of the scale format:
x = s e + z, so e is (x - z) / s, rounded once. The difference of two numbers is exact in two words, for all of them. It
is divided digit by digit. Either sum v is a whole number, a word of W bits that follow it, and a sticky bit. So the
neighbours are whole numbers, and every mode depends only on v; the parity of v decides ties.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import Carrier, join_sign, lax_clip, lax_where, ordered_integers, split_sign
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply_add_and_round
from jchop._core.arithmetic.double_word import (
    Divisor,
    DoubleWord,
    divisor_bits,
    divisor_of,
    exact_quotient,
    significand_of_extended,
)
from jchop._core.arithmetic.exact import ExactResult, range_of, round_exact
from jchop._core.rounding.codes import decode_elements, encode_elements
from jchop._core.rounding.modes import AWAY_FROM_ZERO, KnownFraction, take_random_bits
from jchop._core.scaled import elements
from jchop._core.scaled.elements import (
    BlockScales,
    ScaledPlan,
    clamp_scale,
    largest_finite_magnitude,
    number_of_magnitude,
    scale_dtype,
    scale_magnitude,
    scale_rounding,
)
from jchop._spec.spec import Spec
from jchop.formats import IntegerFormat
from jchop.formats.rounding import Overflow

#: Whole parts go up to 2^20, beyond all integers with zero points, so the fraction does not matter there.
_MOST_WHOLE_EXPONENT = 20


def _integer_format(plan: ScaledPlan) -> IntegerFormat:
    fmt = plan.element.format
    assert isinstance(fmt, IntegerFormat)
    return fmt


# -- rounding ----------------------------------------------------------------------------------------------------------


def round_with_zero_points(x: Array, scales: BlockScales, zero: Array, plan: ScaledPlan, word: Array | None) -> Array:
    """The sums x / s + z, or (x - z) / s, rounded once to whole numbers, not yet clamped to the ends of the format.

    Args:
        x: numbers of the arithmetic's carrier.
        scales: the scales of the groups.
        zero: zero points of the shape of the scales: int32, or numbers of the same carrier.
        plan: a plan with an integer element.
        word: for a stochastic element, a word for each number.

    Returns:
        Integers of the carrier's work dtype; infinities and NaN become integers far outside.
    """
    compute = plan.compute
    sign, magnitude = split_sign(x, compute)
    if jnp.issubdtype(zero.dtype, jnp.floating):
        divisor = divisor_of(scale_magnitude(scales, plan), compute)
        v, some = _quotient_of_difference(x, jnp.broadcast_to(zero, x.shape), divisor, compute)
        zero = jnp.zeros((), compute.work)
    else:
        v, some = _divide_by_scales(sign, magnitude, scales, plan)
    whole, share, sticky = _whole_and_share(v, some, compute)
    # The floor of a negative v = -(whole + share), and the word that follows it.
    negative, inexact = v.sign != 0, ((share != 0) | sticky).astype(whole.dtype)
    total = lax_where(negative, -whole - inexact, whole)
    share = lax_where(negative, _complement_of_share(share, sticky), share)
    sums = _round_floor_and_share(total + zero.astype(total.dtype), share, sticky, plan, word)
    far = jnp.full_like(sums, 1 << _MOST_WHOLE_EXPONENT)
    beyond = lax_where((sign != 0) & (magnitude == compute.inf), -far, far)
    return lax_where(magnitude >= compute.inf, beyond, sums)


def _round_floor_and_share(total: Array, share: Array, sticky: Array, plan: ScaledPlan, word: Array | None) -> Array:
    """Numbers rounded to whole numbers, given by their floor, the word that follows, and a sticky bit."""
    element = plan.element
    negative, inexact = total < 0, (share != 0) | sticky
    low, share = (
        lax_where(negative, -total - inexact, total),
        lax_where(negative, _complement_of_share(share, sticky), share),
    )
    draw = take_random_bits(word, element, plan.compute)
    v = KnownFraction(negative, (share != 0) | sticky, low & 1 != 0, (share, sticky), draw)
    away = AWAY_FROM_ZERO[element.rounding](v)
    whole = low + jnp.asarray(away).astype(low.dtype)
    return lax_where(negative, -whole, whole)


def clamp_to_ends(wholes: Array, plan: ScaledPlan) -> Array:
    """Whole numbers within the ends of the element format."""
    fmt = _integer_format(plan)
    # Without the barrier LLVM takes ten seconds to derive bounds from these ends for all earlier operations.
    return lax_clip(lax.optimization_barrier(wholes), fmt.min_code, fmt.max_code)


def is_beyond_ends(x: Array, wholes: Array, plan: ScaledPlan) -> Array:
    """Whether results of `round_with_zero_points` are beyond the ends; NaN counts as inside."""
    fmt = _integer_format(plan)
    return ((wholes < fmt.min_code) | (wholes > fmt.max_code)) & (split_sign(x, plan.compute)[1] <= plan.compute.inf)


def add_zero_points(values: Array, scales: BlockScales, zero: Array, plan: ScaledPlan) -> Array:
    """The sums s e + z rounded once to nearest, ties to even, as numbers of the plan's carrier."""
    compute, spec = plan.compute, plan.narrow_spec
    scale = jnp.broadcast_to(number_of_magnitude(scale_magnitude(scales, plan), compute), values.shape)
    own = range_of(Spec(plan.scale), compute)
    whole = values.astype(compute.name)
    element = range_of(plan.element, compute)
    zero = jnp.broadcast_to(zero, values.shape)
    result = multiply_add_and_round(whole, scale, zero, spec, compute, None, element, own, own)
    result = result if scales.nan is None else lax_where(scales.nan, jnp.nan, result)
    return elements.narrow_16_bit(result, plan.carrier)


def _divide_by_scales(
    sign: Array, magnitude: Array, scales: BlockScales, plan: ScaledPlan
) -> tuple[ExactResult, Array]:
    """The quotients x / s, and whether each number is neither zero nor infinite nor NaN."""
    plain = (magnitude != 0) & (magnitude < plan.compute.inf)
    divisor = divisor_of(scale_magnitude(scales, plan), plan.compute)
    return exact_quotient(sign, magnitude, plain, divisor, plan.compute), plain


def _whole_and_share(v: ExactResult, some: Array, carrier: Carrier) -> tuple[Array, Array, Array]:
    """Whole number, word and sticky bit of normal numbers, or of zeros if not `some`; too small from 2^_MOST on."""
    fraction, width = carrier.fraction, carrier.work_width
    unsigned = v.rest.dtype
    exponent = (v.magnitude >> fraction) - carrier.bias
    leading = significand_of_extended(v.magnitude, carrier)
    # Numbers of at least 1: some of the significand's bits are whole.
    below = fraction - lax_clip(exponent, 0, min(_MOST_WHOLE_EXPONENT, fraction - 1))
    whole = leading >> below
    down = below.astype(unsigned)
    share = (leading.astype(unsigned) << (width - down)) | v.rest >> down
    tail = v.rest << (width - down) != 0
    # Numbers below 1: no bit is whole.
    word = leading.astype(unsigned) << (width - 1 - fraction) | v.rest >> (fraction + 1)
    small_tail = v.rest << (width - 1 - fraction) != 0
    right = lax_clip(-1 - exponent, 0, width - 1).astype(unsigned)
    small = lax_where(-1 - exponent < width, word >> right, 0)
    far = (-1 - exponent >= width) | (word >> right << right != word)
    less = exponent < 0
    sticky = v.sticky | lax_where(less, small_tail | far, tail)
    whole, share = lax_where(less, 0, whole), lax_where(less, small, share)
    return lax_where(some, whole, 0), lax_where(some, share, 0), sticky & some


def _complement_of_share(share: Array, sticky: Array) -> Array:
    """The word of 1 - (share + epsilon); 0 for 0."""
    return ~share + (~sticky).astype(share.dtype)


def _quotient_of_difference(
    x: Array, y: Array, divisor: Divisor, carrier: Carrier, barriers: bool = False, rest_bits: int = 0
) -> tuple[ExactResult, Array]:
    """(x - y) / d of finite numbers, exactly, and whether x is not y; with barriers after each stage on request.

    The rest of the quotient has `rest_bits` bits, by default the bits of a word, and a sticky bit.
    """
    stage = lax.optimization_barrier if barriers else lambda values: values
    (xs, xm), (ys, ym) = split_sign(x, carrier), split_sign(y, carrier)
    a = double_word.double_word_of(xs, *double_word.normalize_magnitude(xm, carrier), carrier)
    b = double_word.double_word_of(ys ^ carrier.sign_bit, *double_word.normalize_magnitude(ym, carrier), carrier)
    v, tail = double_word.add_double_words(a, b, 0)
    v = double_word.fill_high_word(v)
    v = double_word.shift_to_top(v, double_word.leading_zeros(v.high, carrier))
    (*words, tail) = stage((v.sign, v.exponent, v.high, v.low, tail))
    v = DoubleWord(*words)
    quotient = _divide_double_word(v, tail, divisor, carrier, rest_bits or carrier.work_width)
    arrays = {name: part for name, part in vars(quotient).items() if isinstance(part, Array)}
    return replace(quotient, **stage(arrays)), (v.high | v.low | tail) != 0


def _divide_double_word(v: DoubleWord, tail: Array, divisor: Divisor, carrier: Carrier, rest_bits: int) -> ExactResult:
    """A number with its leading bit at the top of its words, divided by a divisor: M + 1 bits, a rest, a sticky bit.

    `tail` is not zero if bits follow the words. No tie lies between the words and the exact number, because ties are
    coarser than their last place. A stochastic mode may draw as for a number that differs by 2^-W.
    """
    width, divisor_width = carrier.work_width, divisor_bits(carrier)
    remainder = (v.high >> (width - divisor_width)).astype(carrier.work)
    high, low = double_word.shift_words_left(v.high, v.low, divisor_width)
    first = (remainder >= divisor.significand).astype(carrier.work)
    remainder = remainder - first * divisor.significand
    top, rest = jnp.zeros_like(high), first.astype(low.dtype)
    total = carrier.fraction + 1 + rest_bits
    remaining = total
    while remaining:
        step = min(remaining, carrier.fraction // 2 + 2)
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
    if total < width:
        top, rest = rest << (width - 1 - total), jnp.zeros_like(rest)
    else:
        top, rest = double_word.shift_words_left(top, rest, 2 * width - 1 - total)
    smaller = (first == 0).astype(carrier.work)
    exponent = v.exponent + carrier.bias - divisor.field - smaller
    after = tail | remainder.astype(tail.dtype)
    return double_word.exact_of_double_word(
        DoubleWord(v.sign, exponent, *double_word.shift_words_left(top, rest, smaller)), after, carrier
    )


# -- ranges ------------------------------------------------------------------------------------------------------------


def fit_range(x: Array, axes: tuple[int, ...], plan: ScaledPlan) -> tuple[BlockScales, Array]:
    """Scales (max - min) / (M - m) of ranges stretched to hold 0; and zero points clamp(m - rne(min / s)).

    Args:
        x: numbers of the arithmetic's carrier.
        axes: the axes of a group.
        plan: a plan with an integer element.
    """
    compute, fmt = plan.compute, _integer_format(plan)
    sign, magnitude = split_sign(x, compute)
    top, low = (largest_finite_magnitude(lax_where(side, magnitude, 0), axes, plan) for side in (sign == 0, sign != 0))
    least = join_sign(jnp.full_like(low, compute.sign_bit), low, compute)
    scales, _ = _scales_of_ranges(least, number_of_magnitude(top, compute), plan)
    whole, share, sticky = _whole_and_share(*_divide_by_scales(jnp.zeros_like(low), low, scales, plan), compute)
    odd = whole & 1 != 0
    quotient = KnownFraction(whole < 0, (share != 0) | sticky, odd, (share, sticky))
    nearest = whole + quotient.nearest(odd).astype(whole.dtype)
    return scales, lax_clip(fmt.min_code + nearest, fmt.min_code, fmt.max_code).astype(jnp.int32)


def fit_offset(x: Array, axes: tuple[int, ...], plan: ScaledPlan) -> tuple[BlockScales, Array]:
    """Scales (max - min) / (M - m) and zero points min - m s, each the exact number rounded once to the scale format.

    If all numbers of a group are equal, the scale is 1, and the number is the zero point.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with NaN.
        axes: the axes of a group.
        plan: a plan with an integer element.
    """
    compute = plan.compute
    low, high = lax.optimization_barrier(_ends_of_groups(x, axes, compute))
    scales, some = _scales_of_ranges(low, high, plan)
    step = lax_where(some, number_of_magnitude(scale_magnitude(scales, plan), compute), 0)
    whole, spec = range_of(None, compute), Spec(plan.scale, overflow=Overflow.SATURATE)
    least = jnp.full_like(low, float(-_integer_format(plan).min_code))
    return scales, multiply_add_and_round(least, step, low, spec, compute, None, whole, whole, whole)


def _scales_of_ranges(low: Array, high: Array, plan: ScaledPlan) -> tuple[BlockScales, Array]:
    """The exact (high - low) / (M - m) rounded once to the scale format, and whether the ends differ.

    In stages because of the quirk `long_fusion_compiled_for_minutes` (`_core/xla/cpu.py`).
    """
    compute, fmt = plan.compute, _integer_format(plan)
    width = jnp.full_like(low, float(fmt.max_code - fmt.min_code))
    divisor = divisor_of(split_sign(width, compute)[1], compute)
    v, some = _quotient_of_difference(high, low, divisor, compute, barriers=True, rest_bits=2)
    quotient = split_sign(round_exact(v, scale_rounding(plan), compute, None), compute)[1]
    return BlockScales(clamp_scale(quotient, ~some, plan)[0]), some


def _ends_of_groups(x: Array, axes: tuple[int, ...], carrier: Carrier) -> tuple[Array, Array]:
    """The least and the largest finite number of each group; zeros if there is none."""
    sign, magnitude = split_sign(x, carrier)
    value, finite = ordered_integers(sign, magnitude), magnitude < carrier.inf
    low = jnp.min(lax_where(finite, value, carrier.inf), axis=axes, keepdims=True)
    high = jnp.max(lax_where(finite, value, -carrier.inf), axis=axes, keepdims=True)
    none = low > high

    def number(value: Array) -> Array:
        value = lax_where(none, 0, value)
        return join_sign(lax_where(value < 0, carrier.sign_bit, 0).astype(value.dtype), jnp.abs(value), carrier)

    return number(low), number(high)


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
