"""Codebooks of many levels under scales, exactly; for XLA, which reads small tables in few operations.

A product with 1 / s guesses the quotient x / s to a few units in the last place. The guess selects a bin (`bins`),
which has one threshold t. If the guess is not close to t, it decides whether x / s reaches t. If it is close, x and t s
differ by so little that the last 32 bits of the integers X 2^k and T S give their difference. So the rounding of
divisions, and contractions of products and sums, do not change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32, FLOAT64
from jchop._core.arithmetic import float64
from jchop._core.rounding.bins import Bins, make_bins, take_in_bounds
from jchop._core.rounding.codes import extend_exponent
from jchop._core.rounding.modes import rounding_thresholds
from jchop._core.scaled.scales import BlockScales, ScaledPlan, scale_magnitude
from jchop._core.scaled_float32 import integers, products
from jchop._core.scaled_float32.integers import bits_to_float, float_to_bits
from jchop._core.xla.sizes import if_static
from jchop.formats import CodebookFormat
from jchop.formats.rounding import Rounding

Array = jax.Array

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
    exact = all(values == [value for value, _ in thresholds]) and not (word & bit_ops.low_mask(spare)).any()
    within = ((sizes >= 2.0**-_THRESHOLD_REACH) & (sizes <= 2.0**_THRESHOLD_TOP)).all()
    if max(map(len, strict)) > 1 or not (exact and within):
        return None
    low = (word >> spare) & bit_ops.low_mask(_CUT_BITS)
    number = (word - (low << spare)).view(np.float64).astype(np.float32)
    bins = make_bins((FLOAT32.ordered_bits(number) + ((low > 0) & (number > 0))).tolist(), _BIN_MARGIN)
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
    # Not by `bit_ops.split_sign`: the largest of a group is found from its result, and XLA would write it to memory for
    # both uses.
    below, magnitude = float_to_bits(x) < 0, _clear_sign_bit(float_to_bits(x))
    guess = float_to_bits(_move_with_scales(x, below, magnitude, factor, small) * inverse)
    place = table.bins.place(below, _clear_sign_bit(guess))
    number, rest = (
        take_in_bounds(jnp.asarray(table.number), place),
        take_in_bounds(jnp.asarray(table.rest), place).astype(jnp.int32),
    )
    difference = _threshold_difference(magnitude, number, rest >> _INDEX_BITS, significand, exponent)
    exact = _reaches_threshold(bit_ops.lax_where(below, -difference, difference), number, table)
    near = (guess - number + _GUESS_ERROR).astype(jnp.uint32) <= 2 * _GUESS_ERROR
    reaches = bit_ops.lax_where(near, exact, bits_to_float(guess) >= bits_to_float(number))
    if table.has_zero:
        side = bit_ops.lax_where(below, -magnitude, magnitude)
        reaches = bit_ops.lax_where(number == 0, side > 0 if table.strict[1] else side >= 0, reaches)
    nan = magnitude > FLOAT32.inf
    index = rest & bit_ops.low_mask(_INDEX_BITS)
    return bit_ops.lax_where(nan, len(fmt.levels) - 1, index + reaches).astype(fmt.code_dtype)


def _prepare_scales(bits: Array) -> tuple[Array, ...]:
    """The factors that move numbers, and numbers below the normal range; 1 / s; S, and its part of k."""
    divisor = integers.quanta_of_bits(bits, least=_LEAST_SCALE_EXPONENT)
    assert divisor.tiny is not None and divisor.factor is not None
    factor = bit_ops.lax_where(divisor.tiny, jnp.float32(2.0**integers.TINY_FACTOR_EXPONENT), divisor.factor)
    # With all other scales such numbers have the effect of zero.
    small = bit_ops.lax_where(
        divisor.tiny, jnp.float32(2.0 ** (FLOAT32.tiny_exponent + integers.TINY_FACTOR_EXPONENT)), 0
    )
    return (
        factor,
        small,
        1 / divisor.value,
        _significand_of_bits(bits),
        FLOAT32.bias + _THRESHOLD_BITS - 1 - (bits >> FLOAT32.fraction),
    )


def _significand_of_bits(bits: Array) -> Array:
    return bits & bit_ops.low_mask(FLOAT32.fraction) | 1 << FLOAT32.fraction


def _clear_sign_bit(word: Array) -> Array:
    return word & bit_ops.low_mask(FLOAT32.width - 1)


def _move_with_scales(x: Array, below: Array, magnitude: Array, factor: Array, small: Array) -> Array:
    """Numbers moved like their scales."""
    count = bit_ops.lax_where(below, -magnitude, magnitude).astype(jnp.float32)
    return bit_ops.lax_where(magnitude < 1 << FLOAT32.fraction, count * small, x * factor)


def _threshold_difference(magnitude: Array, number: Array, low: Array, significand: Array, exponent: Array) -> Array:
    """|X| 2^k - |T| S if it is less than 2^31: |x| - |t| s, in units of which T S is a multiple.

    Otherwise k, the difference of the exponents, may have no meaning, and the result is not used.
    """
    field = number >> FLOAT32.fraction & bit_ops.low_mask(8)
    shift = exponent + jnp.maximum(magnitude >> FLOAT32.fraction, 1) - field
    threshold = _significand_of_bits(number) << _CUT_BITS | low
    # Only fraction bits of x remain: all others, also the leading bit, are shifted out.
    return lax.shift_left(magnitude, shift) - threshold * significand


def _reaches_threshold(side: Array, number: Array, table: _BinTable) -> Array:
    """Whether a difference reaches its threshold; the threshold's sign selects the comparison."""
    above, others = (side > 0 if beyond else side >= 0 for beyond in table.strict)
    return above if table.strict[0] == table.strict[1] else bit_ops.lax_where(number > 0, above, others)


# -- numbers -----------------------------------------------------------------------------------------------------------


def supports_codebook_decode(plan: ScaledPlan) -> bool:
    """Whether `decode_codebook` gives the numbers of the exact way."""
    fmt = plan.element.format
    if plan.carrier is not FLOAT32 or not isinstance(fmt, CodebookFormat) or plan.rule.tensor_scale:
        return False
    least, most = 2.0**-products.LEAST_FACTOR_EXPONENT, 2.0**products.MOST_FACTOR_EXPONENT
    return all(least <= abs(level) <= most for level in fmt.levels if level) and FLOAT32.holds_all(fmt.levels)


def decode_codebook(codes: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Codes times scales, rounded once to nearest even; float32, with NaN for an unused code."""
    fmt = cast(CodebookFormat, plan.element.format)
    table = np.full(1 << fmt.bits, np.nan, np.float32)
    table[: len(fmt.levels)] = fmt.levels
    level = take_in_bounds(jnp.asarray(table), codes.astype(jnp.int32))
    scale = scale_magnitude(scales, plan)
    if plan.float64 and if_static(lambda: codes.size <= _MOST_DECODES_IN_FLOAT64):
        with jax.enable_x64(True):  # products are exact, so that one conversion rounds them
            return float64.narrow_float64(level.astype(jnp.float64) * float64.widen_magnitude(scale))
    return products.multiply_by_scale_bits(level, scale, plan)
