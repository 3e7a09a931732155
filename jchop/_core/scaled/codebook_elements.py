"""Codebooks under scales, exactly; for XLA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import Array, enable_x64, lax

from jchop._common.bit_ops import FLOAT32, FLOAT64, lax_clip, lax_where, low_mask, ordered_integers, split_sign
from jchop._core.arithmetic import float64
from jchop._core.arithmetic.double_word import significand_of_extended
from jchop._core.rounding.codebooks import Bins, make_bins, take_in_bounds
from jchop._core.rounding.codes import bits_to_float, extend_exponent, float_to_bits
from jchop._core.rounding.modes import rounding_thresholds
from jchop._core.scaled import grid_elements
from jchop._core.scaled.elements import BlockScales, ScaledPlan, scale_magnitude
from jchop._core.xla.sizes import if_static
from jchop.formats import CodebookFormat, ElementFormat
from jchop.formats._base import floor_log2
from jchop.formats.rounding import Rounding

# == few levels ========================================================================================================
# Every group has its own thresholds, and numbers are compared with them. x / s reaches a threshold t if x reaches t
# s. So the smallest number of the carrier that reaches it is computed for each group and threshold, exactly, in
# integers that have the order of the numbers. The product of level and scale is computed for each group and level.
# Elements then need only comparisons and selections. This is for XLA, not for kernels, whose tiles have too many
# groups.


#: The most bits of codes.
_MOST_THRESHOLD_CODE_BITS = 4
#: Thresholds are integers of 28 bits, four digits, times a power of two; nonzero ones are from 2^-_REACH to 2^_REACH.
_DIGIT_BITS, _DIGIT_COUNT, _LEVEL_REACH = 7, 4, 40


def supports_threshold_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_by_thresholds` gives the codes of the exact way."""
    element, fmt = plan.element, plan.element.format
    if plan.compute is not FLOAT32 or not isinstance(fmt, CodebookFormat) or fmt.bits > _MOST_THRESHOLD_CODE_BITS:
        return False
    return not plan.rule.tensor_scale and _threshold_table(fmt, element.rounding) is not None


def has_level_products(plan: ScaledPlan) -> bool:
    """Whether the numbers of a group are selected from its products."""
    fmt = plan.element.format
    return plan.compute is FLOAT32 and isinstance(fmt, CodebookFormat) and fmt.bits <= _MOST_THRESHOLD_CODE_BITS


@lru_cache(maxsize=64)
def _threshold_table(fmt: CodebookFormat, mode: Rounding) -> tuple[tuple[Fraction, bool], ...] | None:
    """The thresholds, and whether only numbers beyond each one reach it; None if they have too many bits."""
    if mode.stochastic:
        return None
    table = tuple(rounding_thresholds(mode, fmt.levels))
    least, most = Fraction(1, 1 << _LEVEL_REACH), Fraction(1 << _LEVEL_REACH)
    for value, _ in table:
        if value and not (least <= abs(value) <= most and _normalize_threshold(value)[0].denominator == 1):
            return None
    return table


def _normalize_threshold(value: Fraction) -> tuple[Fraction, int]:
    """|value| as N 2^e with 2^27 <= N < 2^28."""
    exponent = floor_log2(abs(value)) + 1 - _DIGIT_BITS * _DIGIT_COUNT
    return abs(value) / Fraction(2) ** exponent, exponent


# -- codes -------------------------------------------------------------------------------------------------------------


def encode_by_thresholds(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The codes of the quotients x / s rounded once to a level."""
    fmt = cast(CodebookFormat, plan.element.format)
    table = _threshold_table(fmt, plan.element.rounding)
    assert table is not None
    starts = plan.backend.per_group(_starts_of_levels(extend_exponent(scale_magnitude(scales, plan), FLOAT32), table))
    sign, magnitude = split_sign(x, FLOAT32)
    value = lax_where(magnitude > FLOAT32.inf, FLOAT32.inf, ordered_integers(sign, magnitude))
    no_start = jnp.full_like(starts[0], np.iinfo(np.int32).max)
    candidates = [starts[i] if i < len(table) else no_start for i in range((1 << fmt.bits) - 1)]
    code = jnp.zeros_like(value)
    while candidates:
        middle = len(candidates) // 2
        reaches = value >= candidates[middle]
        code = 2 * code + reaches
        candidates = [
            lax_where(reaches, *pair) for pair in zip(candidates[middle + 1 :], candidates[:middle], strict=True)
        ]
    return code.astype(fmt.code_dtype)


def _starts_of_levels(scale: Array, table: Sequence[tuple[Fraction, bool]]) -> Array:
    """Ordered integers of the smallest numbers that reach thresholds times scales.

    Args:
        scale: extended magnitude bits.
        table: thresholds, and whether only numbers beyond each one reach it; they become a first axis of the result.
    """

    def column(values: Iterable[int]) -> np.ndarray:
        return np.array(list(values), np.int32).reshape(-1, *[1] * scale.ndim)

    parts = [
        _normalize_threshold(value) if value else (Fraction(1 << (_DIGIT_BITS * _DIGIT_COUNT - 1)), 0)
        for value, _ in table
    ]
    floor, inexact = _truncate_threshold_product(
        scale[None], column(int(count) for count, _ in parts), column(e for _, e in parts)
    )
    strict, sign = column(beyond for _, beyond in table), column((v > 0) - (v < 0) for v, _ in table)
    # Positive infinity reaches all thresholds; negative infinity reaches none.
    up = jnp.minimum(floor + lax_where(strict != 0, 1, inexact), FLOAT32.inf)
    down = jnp.maximum(lax_where(strict != 0, 1 - (floor + inexact), -floor), 1 - FLOAT32.inf)
    return lax_where(sign > 0, up, lax_where(sign < 0, down, jnp.zeros_like(up) + strict))


def _truncate_threshold_product(scale: Array, count: np.ndarray, exponent: np.ndarray) -> tuple[Array, Array]:
    """Magnitude bits of scale times count 2^exponent toward zero (`FLOAT32.inf` or more if too large); 1 if inexact."""
    significand, mask = significand_of_extended(scale, FLOAT32), low_mask(_DIGIT_BITS)
    top, tail = jnp.zeros_like(scale), jnp.zeros_like(scale)
    for i in range(_DIGIT_COUNT):
        tail = tail | top & mask
        top = significand * (count >> i * _DIGIT_BITS & mask) + (top >> _DIGIT_BITS)
    # `top` is the part of the product above the three lower digits: 30 or 31 bits.
    drop = 6 + (top >> 30)
    field = jnp.minimum(
        (scale >> FLOAT32.fraction) + drop + ((_DIGIT_COUNT - 1) * _DIGIT_BITS + exponent), 2 * FLOAT32.bias + 1
    )
    drop = drop + lax_clip(1 - field, 0, FLOAT32.fraction + 1)
    tail = tail | top & low_mask(drop)
    floor = (jnp.maximum(field - 1, 0) << FLOAT32.fraction) + (top >> drop)
    return floor, (tail != 0).astype(floor.dtype)


# -- numbers -----------------------------------------------------------------------------------------------------------


def level_of_each_code(fmt: ElementFormat, like: Array) -> Array:
    """The value of each code, NaN if it is unused, along a first axis, broadcast to the shape of `like`."""
    values = (fmt.value_of(code) for code in range(1 << fmt.bits))
    bits = np.array([float("nan") if v is None else float(v) for v in values], np.float32).view(np.int32)
    return bits_to_float(jnp.zeros_like(like, jnp.int32)[None] | bits.reshape(-1, *[1] * like.ndim))


def pick_product(codes: Array, products: Array) -> Array:
    """``products[code]``, selected by the bits of the codes; each group has a product for each code."""
    choices, bit = [products[i] for i in range(products.shape[0])], 0
    while len(choices) > 1:
        odd = codes >> bit & 1 != 0
        choices, bit = ([lax_where(odd, *pair) for pair in zip(choices[1::2], choices[::2], strict=True)], bit + 1)
    return choices[0]


# == many levels =======================================================================================================
# XLA reads small tables in few operations. A product with 1 / s guesses the quotient x / s to a few units in the last
# place. The guess selects a bin (`Bins`), which has one threshold t. If the guess is not close to t, it decides
# whether x / s reaches t. If it is close, x and t s differ by so little that the last 32 bits of the integers X 2^k
# and T S give their difference. So the rounding of divisions, and contractions of products and sums, do not change a
# bit.


#: Thresholds are integers of 26 bits, or of fewer, times a power of two; nonzero ones are from 2^-_REACH to 2^_TOP.
_THRESHOLD_BITS, _THRESHOLD_REACH, _THRESHOLD_TOP = 26, 40, 20
#: Bits of a threshold's index, and bits of a threshold's integer that do not fit into a number of the carrier.
_INDEX_BITS, _CUT_BITS = 8, _THRESHOLD_BITS - FLOAT32.fraction - 1
#: The margin of bins in units in the last place of a guess, a few more than its error.
_BIN_MARGIN = 16
#: The largest error of a guess in units in its last place; a guess this close to a threshold does not decide. Then t s,
#: below 2^50, and x differ by less than (2 _NEAR + 1) 2^27 < 2^31: the errors of both parts, and the part cut from t.
_GUESS_ERROR = 7
#: Scales below 2^-_LEAST are moved, so that the product of the last places of a scale and a threshold is a normal
#: number.
_LEAST_SCALE_EXPONENT = 32


#: The most numbers that are computed in float64: half the operations to compile. More numbers take a third longer.
_MOST_DECODES_IN_FLOAT64 = 1 << 16


@dataclass(frozen=True, eq=False)
class _BinTable:
    """Bins, and thresholds in two parts.

    Args:
        bins: the bins of the bits of guesses.
        number: for each bin, the bits of its threshold as a number, cut.
        rest: for each bin, the index of its threshold, and above it the bits that were cut.
        has_zero: whether zero is a threshold.
        strict: whether only numbers beyond thresholds reach them: for thresholds above zero, and for the others.
    """

    bins: Bins
    number: np.ndarray
    rest: np.ndarray
    has_zero: bool
    strict: tuple[bool, bool]


@lru_cache(maxsize=64)
def _bin_table(fmt: CodebookFormat, mode: Rounding) -> _BinTable | None:
    """The table; None if thresholds are too close, too many, too far from 1, or have too many bits."""
    if mode.stochastic or fmt.bits > _INDEX_BITS:
        return None
    thresholds = rounding_thresholds(mode, fmt.levels)
    strict = tuple({beyond for value, beyond in thresholds if (value > 0) is above} for above in (True, False))
    values = np.array([float(value) for value, _ in thresholds])
    word, sizes, spare = values.view(np.int64), np.abs(values[values != 0]), FLOAT64.fraction + 1 - _THRESHOLD_BITS
    exact = all(values == [value for value, _ in thresholds]) and not (word & low_mask(spare)).any()
    within = ((sizes >= 2.0**-_THRESHOLD_REACH) & (sizes <= 2.0**_THRESHOLD_TOP)).all()
    if max(map(len, strict)) > 1 or not (exact and within):
        return None
    low = (word >> spare) & low_mask(_CUT_BITS)
    number = (word - (low << spare)).view(np.float64).astype(np.float32)
    bins = make_bins(tuple((FLOAT32.ordered_bits(number) + ((low > 0) & (number > 0))).tolist()), _BIN_MARGIN)
    if bins is None:
        return None
    rest = (np.arange(len(low)) | (low << _INDEX_BITS)).astype(np.uint16)[bins.below]
    return _BinTable(bins, number.view(np.int32)[bins.below], rest, 0 in values, (True in strict[0], True in strict[1]))


def supports_codebook_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_codebook` gives the codes of the exact way."""
    element, fmt = plan.element, plan.element.format
    if plan.compute is not FLOAT32 or not isinstance(fmt, CodebookFormat) or plan.rule.tensor_scale:
        return False
    return _bin_table(fmt, element.rounding) is not None


def encode_codebook(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The codes of the quotients x / s rounded once to a level."""
    fmt = cast(CodebookFormat, plan.element.format)
    table = _bin_table(fmt, plan.element.rounding)
    assert table is not None
    bits = extend_exponent(scale_magnitude(scales, plan), FLOAT32)
    factor, small, inverse, significand, exponent = plan.backend.per_group(_prepare_scales(bits))
    # Not by `split_sign`: the largest of a group is found from its result, and XLA would write it to memory for
    # both uses.
    below, magnitude = float_to_bits(x) < 0, _clear_sign_bit(float_to_bits(x))
    # The numbers are moved like their scales.
    count = lax_where(below, -magnitude, magnitude).astype(jnp.float32)
    moved = lax_where(magnitude < 1 << FLOAT32.fraction, count * small, x * factor)
    guess = float_to_bits(moved * inverse)
    place = table.bins.place(below, _clear_sign_bit(guess))
    number, rest = (
        take_in_bounds(jnp.asarray(table.number), place),
        take_in_bounds(jnp.asarray(table.rest), place).astype(jnp.int32),
    )
    # |X| 2^k - |T| S if it is less than 2^31: |x| - |t| s, in units of which T S is a multiple.
    field = number >> FLOAT32.fraction & low_mask(8)
    shift = exponent + jnp.maximum(magnitude >> FLOAT32.fraction, 1) - field
    threshold = significand_of_extended(number, FLOAT32) << _CUT_BITS | (rest >> _INDEX_BITS)
    # Only fraction bits of x remain: all others, also the leading bit, are shifted out.
    difference = lax.shift_left(magnitude, shift) - threshold * significand
    side = lax_where(below, -difference, difference)
    above, others = (side > 0 if beyond else side >= 0 for beyond in table.strict)
    exact = above if table.strict[0] == table.strict[1] else lax_where(number > 0, above, others)
    near = (guess - number + _GUESS_ERROR).astype(jnp.uint32) <= 2 * _GUESS_ERROR
    reaches = lax_where(near, exact, bits_to_float(guess) >= bits_to_float(number))
    if table.has_zero:
        side = lax_where(below, -magnitude, magnitude)
        reaches = lax_where(number == 0, side > 0 if table.strict[1] else side >= 0, reaches)
    nan = magnitude > FLOAT32.inf
    index = rest & low_mask(_INDEX_BITS)
    return lax_where(nan, len(fmt.levels) - 1, index + reaches).astype(fmt.code_dtype)


def _prepare_scales(bits: Array) -> tuple[Array, ...]:
    """The factors that move numbers, and numbers below the normal range; 1 / s; S, and its part of k."""
    divisor = grid_elements.quanta_of_bits(bits, least=_LEAST_SCALE_EXPONENT)
    assert divisor.tiny is not None and divisor.factor is not None
    factor = lax_where(divisor.tiny, jnp.float32(2.0**grid_elements.TINY_FACTOR_EXPONENT), divisor.factor)
    # With all other scales such numbers have the effect of zero.
    small = lax_where(divisor.tiny, jnp.float32(2.0 ** (FLOAT32.tiny_exponent + grid_elements.TINY_FACTOR_EXPONENT)), 0)
    return (
        factor,
        small,
        1 / divisor.value,
        significand_of_extended(bits, FLOAT32),
        FLOAT32.bias + _THRESHOLD_BITS - 1 - (bits >> FLOAT32.fraction),
    )


def _clear_sign_bit(word: Array) -> Array:
    return word & low_mask(FLOAT32.width - 1)


# -- numbers -----------------------------------------------------------------------------------------------------------


def supports_codebook_decode(plan: ScaledPlan) -> bool:
    """Whether `decode_codebook` gives the numbers of the exact way."""
    fmt = plan.element.format
    if plan.carrier is not FLOAT32 or not isinstance(fmt, CodebookFormat) or plan.rule.tensor_scale:
        return False
    least, most = 2.0**-grid_elements.LEAST_FACTOR_EXPONENT, 2.0**grid_elements.MOST_FACTOR_EXPONENT
    return all(least <= abs(level) <= most for level in fmt.levels if level) and FLOAT32.holds_all(fmt.levels)


def decode_codebook(codes: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Codes times scales, rounded once to nearest even; float32, with NaN for an unused code."""
    fmt = cast(CodebookFormat, plan.element.format)
    table = np.full(1 << fmt.bits, np.nan, np.float32)
    table[: len(fmt.levels)] = fmt.levels
    level = take_in_bounds(jnp.asarray(table), codes.astype(jnp.int32))
    scale = scale_magnitude(scales, plan)
    if plan.float64 and if_static(lambda: codes.size <= _MOST_DECODES_IN_FLOAT64):
        with enable_x64(True):  # products are exact, so that one conversion rounds them
            return float64.narrow_float64(level.astype(jnp.float64) * float64.widen_magnitude(scale))
    return grid_elements.multiply_by_scale_bits(level, scale, plan)
