"""Zero points, and scales and zero points of groups: of ranges, and by rules that depend on all numbers of a group.

An integer zero point z is added to a quotient: e is x / s + z, rounded once. Another is a number of the scale format:
x = s e + z, so e is (x - z) / s, rounded once. The difference of two numbers is exact in two words, for all of them. It
is divided digit by digit. Either sum v is a whole number, a word of W bits that follow it, and a sticky bit. So the
neighbours are whole numbers, and every mode depends only on v; the parity of v decides ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import Carrier, join_sign, lax_clip, lax_where, ordered_integers, split_sign
from jchop._core.arithmetic import double_word
from jchop._core.arithmetic.basic import multiply_add_and_round, multiply_and_round
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
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.modes import AWAY_FROM_ZERO, KnownFraction, take_random_bits
from jchop._core.scaled import elements
from jchop._core.scaled.elements import (
    BlockScales,
    ScaledPlan,
    clamp_scale,
    largest_finite_magnitude,
    number_of_magnitude,
    round_scales,
    scale_dtype,
    scale_magnitude,
    scale_rounding,
    tensor_scale_bits,
)
from jchop._core.scaled.groups import Groups
from jchop._spec.spec import Spec
from jchop.formats import IntegerFormat
from jchop.formats.rounding import Overflow, Rounding

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


# == scales that depend on all numbers of a group: percentiles, least squares, power, and groups within groups =========


#: N: the rule "mse" tries the scale of "absmax" times 1, 1 - 1/N ... 1/2.
SQUARES_STEPS = 64
#: The scale of normal numbers with variance 1 under which e2m1 loses least, before it becomes a power of two (Panferov
#: et al., "QuEST", arXiv 2502.05003; the number is from Castro et al., "Quartet", arXiv 2505.14669).
QUEST_SCALE = 2.92247856 / 6


# -- percentiles -------------------------------------------------------------------------------------------------------


def fit_percentile(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The "absmax" scale for the rule's percentile of a group's finite magnitudes instead of the largest one.

    The percentile is the smallest magnitude that this share of the numbers does not exceed. If it is zero, the largest
    magnitude is used. It is found bit by bit, by counting, so the result is exact and does not depend on the order, and
    no element is moved.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with NaN.
        axes: the axes of a group.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    compute = plan.compute
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, axes, plan)
    finite = magnitude < compute.inf

    def count(within: Array) -> Array:
        return jnp.sum(within, axis=axes, keepdims=True, dtype=jnp.int32)

    assert plan.rule.percentile is not None
    share = plan.rule.percentile / 100
    number = count(finite)
    whole, rest = number // share.denominator, number % share.denominator
    rank = whole * share.numerator - (-rest * share.numerator) // share.denominator  # without a product that overflows

    def step(i: Array, least: Array) -> Array:
        bit = lax.shift_left(jnp.ones_like(least), jnp.full_like(least, compute.work_width - 2) - i.astype(least.dtype))
        short = count(finite & (magnitude <= (least | bit - 1))) < rank
        return lax_where(short, least | bit, least)

    least = lax.fori_loop(0, compute.work_width - 1, step, jnp.zeros_like(largest))
    return BlockScales(round_scales((lax_where(least == 0, largest, least),), None, plan)[0])


# -- least squares -----------------------------------------------------------------------------------------------------


def fit_squares(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The first of the scales of `SQUARES_STEPS` with the least sum of squared errors.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with zeros.
        axes: the axes of a group.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    compute = plan.compute
    largest = largest_finite_magnitude(split_sign(x, compute)[1], axes, plan)
    error_of = _make_squared_error(x, axes, largest, plan)
    whole = range_of(None, compute)

    def attempt(i: Array) -> tuple[Array, Array]:
        factor = jnp.broadcast_to((SQUARES_STEPS - i).astype(compute.name) / SQUARES_STEPS, largest.shape)
        end = multiply_and_round(number_of_magnitude(largest, compute), factor, None, compute, None, whole, whole)
        value = round_scales((split_sign(end, compute)[1],), None, plan)[0]
        return error_of(BlockScales(value)), value

    def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        error, value = attempt(i)
        return lax_where(error < best[0], error, best[0]), lax_where(error < best[0], value, best[1])

    first = attempt(jnp.zeros((), jnp.int32))
    return BlockScales(lax.fori_loop(1, SQUARES_STEPS // 2 + 1, step, first)[1])


def fit_either(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The scale of the rule's first divisor, or of its second one, or levels, if the sum of squared errors is smaller.

    Args:
        x: as for `fit_squares`.
        axes: as for `fit_squares`.
        plan: the plan.
        tensor: for a rule with a scale of the tensor, its bits, int32.
    """
    compute = plan.compute
    largest = largest_finite_magnitude(split_sign(x, compute)[1], axes, plan)
    whole = None if tensor is None else tensor_scale_bits(tensor, largest.shape, plan)
    candidates = [
        BlockScales(round_scales((largest,), whole, plan, (divisor,))[0], None, whole) for divisor in plan.divisors
    ]
    error_of = _make_squared_error(x, axes, largest, plan)
    if plan.second is not None:
        error_of_second = _make_squared_error(x, axes, largest, plan.second)
        return replace(candidates[0], second=error_of_second(candidates[0]) < error_of(candidates[0]))
    first, second = map(error_of, candidates)
    return replace(candidates[0], value=lax_where(second < first, candidates[1].value, candidates[0].value))


def fit_power(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """2^floor(log2(r / L)), r the root of the mean square of a group's finite numbers, 1 / L as in `QUEST_SCALE`.

    Args:
        x: as for `fit_root`.
        axes: as for `fit_root`.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    compute = plan.compute
    share, largest, lag = _mean_square(x, axes, plan, QUEST_SCALE**2)
    # floor(log2 of the root) is half the exponent, rounded down.
    half = ((split_sign(share, compute)[1] >> compute.fraction) - compute.bias) >> 1
    low, zero, high = plan.exponents
    exponent = lax_where(largest == 0, zero, lax_clip(half - lag, low, high))
    return BlockScales(exponent.astype(largest.dtype))


def fit_root(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The root of the mean square of a group's finite numbers.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with NaN.
        axes: the axes of a group.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    share, largest, lag = _mean_square(x, axes, plan)
    root = elements.multiply_by_power(jnp.sqrt(share), -lag, plan.compute)
    # Zeros get the least scale and not 1, because the levels of normal numbers have no zero.
    end = lax_where(largest == 0, 1, jnp.maximum(split_sign(root, plan.compute)[1], 1))
    return BlockScales(round_scales((end,), None, plan)[0])


def _mean_square(x: Array, axes: tuple[int, ...], plan: ScaledPlan, factor: float = 1.0) -> tuple[Array, Array, Array]:
    """The mean of the squares of 2^lag x times a factor, the largest magnitude of x, and lag.

    2^lag brings the largest magnitude next to 1. The squares are summed in the arithmetic's carrier.
    """
    compute = plan.compute
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, axes, plan)
    lag = compute.bias - (largest >> compute.fraction)
    finite = magnitude < compute.inf
    near_one = elements.multiply_by_power(_zero_subnormals(x, plan), jnp.broadcast_to(lag, x.shape), compute)
    total = jnp.sum(lax_where(finite, near_one * near_one, 0), axis=axes, keepdims=True)
    share = total * factor / jnp.maximum(jnp.sum(finite, axis=axes, keepdims=True), 1).astype(compute.name)
    return share, largest, lag


def _make_squared_error(x: Array, axes: tuple[int, ...], largest: Array, plan: ScaledPlan) -> Callable[..., Array]:
    """The function that gives the sums of squared errors of a group under its scale.

    The errors are scaled by the largest magnitude's power of two, and summed in the arithmetic's carrier, so that they
    neither overflow nor vanish. Elements are rounded to nearest, ties to even.
    """
    compute = plan.compute
    element = replace(plan.element, rounding=Rounding.NEAREST_EVEN, random_bits=None)
    plan = replace(plan, element=element)
    wide = replace(plan, carrier=compute)
    lag = compute.bias - (largest >> compute.fraction)
    plain = split_sign(x, compute)[1] < compute.inf

    def near_one(values: Array) -> Array:
        return elements.multiply_by_power(values, jnp.broadcast_to(lag, values.shape), compute)

    target = near_one(_zero_subnormals(x, plan))

    def error_of(scales: BlockScales) -> Array:
        values = elements.multiply_by_scales(elements.round_block_quotients(x, scales, plan, None), scales, wide)
        error = lax_where(plain, near_one(_zero_subnormals(values, plan)) - target, 0)
        return jnp.sum(error * error, axis=axes, keepdims=True)

    return error_of


def correct_scales(
    x: Array, rounded: Array, axes: tuple[int, ...], scales: BlockScales, plan: ScaledPlan, word: Array | None
) -> BlockScales:
    """Scales times c = (sum of x^2) / (sum of x y), y the rounded numbers; rounded as the plan's `corrected` says.

    Then the sum of x y is the sum of x^2, on average over the draws (Panferov et al., arXiv 2601.22813). The sums, c
    and its product with a scale are in the arithmetic's carrier.

    Args:
        x: as for `fit_squares`.
        rounded: the elements times the scales and the tensor's scale, in the same carrier.
        axes: as for `fit_squares`.
        scales: the magnitude bits of the scales.
        plan: the plan.
        word: random words like `x`; a group uses its first one. None, as for a fit: stochastic scales are to nearest.
    """
    compute, spec = plan.compute, plan.corrected
    assert spec is not None
    if word is None and spec.rounding.stochastic:
        spec = replace(spec, rounding=Rounding.NEAREST_EVEN, random_bits=None)
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, axes, plan)
    lag = jnp.broadcast_to(compute.bias - (largest >> compute.fraction), x.shape)
    near, y = (elements.multiply_by_power(_zero_subnormals(v, plan), lag, compute) for v in (x, rounded))
    products = (lax_where(magnitude < compute.inf, near * v, 0) for v in (near, y))
    whole, shared = (jnp.sum(v, axis=axes, keepdims=True) for v in products)
    factor = lax_where(shared > 0, whole / shared, 1)
    first = word if word is None else word[tuple(slice(0, 1) if i in axes else slice(None) for i in range(x.ndim))]
    product = number_of_magnitude(scales.value, compute) * factor
    bits = split_sign(round_to_spec(product, spec, compute, first), compute)[1]
    return replace(scales, value=elements.clamp_scale(bits, largest == 0, plan)[0])


def _zero_subnormals(x: Array, plan: ScaledPlan) -> Array:
    """Numbers, with zeros in place of subnormal numbers."""
    sign, magnitude = split_sign(x, plan.compute)
    return join_sign(sign, lax_where(magnitude >> plan.compute.fraction == 0, 0, magnitude), plan.compute)


#: The functions that fit scales to all numbers of a group, by `ScaleRule.fit`.
SCALE_FITS: Mapping[str, Callable[[Array, tuple[int, ...], ScaledPlan, Array | None], BlockScales]] = MappingProxyType(
    {"percentile": fit_percentile, "squares": fit_squares, "either": fit_either, "power": fit_power, "root": fit_root}
)


# == levels ============================================================================================================
# Scales that double at the levels of groups within groups, as in HiF4. A scale s of the largest groups is
# stored in its own format. Each group within doubles its scale, if its largest number asks for it, and so does each
# group within that. The doublings are scales that are quantized again to the levels 1 and 2, so that their codes have
# one bit, and the storage is the same as for any such format.


def fit_levels(largest: Array, plan: ScaledPlan) -> Array:
    """Magnitude bits of the scales of the smallest groups.

    Let a be the largest magnitude of a largest group, M the largest element and n the number of levels. Then s is
    a / (2^n M) in the format of the scales. From the outermost level inward, a scale c becomes 2 c if its group's
    largest number is at least 2^k c. From this level on there are k levels, so 2^k c is beyond all numbers under c.

    Args:
        largest: magnitude bits of the largest numbers of the smallest groups, in the shape of the stored scales.
        plan: a plan whose scales are quantized again, once for each level.
    """
    compute, levels, within = plan.compute, [], plan
    while within.of_scales is not None:
        within = within.of_scales
        groups = Groups(largest.shape, within.fmt.group_shape(largest.shape))
        levels.append((largest, groups))
        view = groups.view(largest)
        largest = groups.squeeze(jnp.max(view, axis=groups.axes, keepdims=True))
    divisor = Fraction(plan.element.format.max) * (1 << len(levels))
    base = replace(within, carrier=compute)
    scale = scale_magnitude(BlockScales(round_scales((largest,), None, base, (divisor,))[0]), base)
    for remaining, (inner, groups) in reversed(list(enumerate(levels, 1))):
        view = groups.view(inner)
        outer = jnp.broadcast_to(groups.expand(scale), view.shape)
        doubles = view >= outer + (remaining << compute.fraction)
        scale = groups.back(outer + (doubles.astype(outer.dtype) << compute.fraction))
    return scale
