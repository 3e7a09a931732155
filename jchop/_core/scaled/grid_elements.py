"""Elements on a grid under scales, in exact floating-point arithmetic; for XLA.

Two facts make it exact. First, a product with 1 / s guesses the quotient x / s with an error far below a half. So the
quotient is next to a number m of few bits, the end or the middle of a step. Second, the sign of x - m s tells on which
side of m the quotient is. With s in two halves of 12 bits, m s is two exact products. If the sign is in doubt, x is
close to the first product, so that difference is exact (Sterbenz). The second difference is rounded, which keeps its
sign. Divisions that a compiler replaces, and products and sums that it contracts, do not change a bit.

Scales far from 1 are moved towards 1, and the numbers with them, so that subnormal intermediate numbers have no effect.
A plan may state that there are no such scales (`ScaledPlan.in_safe_range`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, enable_x64, lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32, FLOAT64, lax_clip, lax_where, low_mask, split_sign, with_constant
from jchop._core.arithmetic import float64
from jchop._core.arithmetic.double_word import full_word_product
from jchop._core.elementary.pairs import split_significand
from jchop._core.rounding.codes import bits_to_float, extend_exponent, float_to_bits
from jchop._core.rounding.modes import AWAY_FROM_ZERO, BetweenNeighbours, RandomBits, take_random_bits
from jchop._core.scaled.elements import SAFE_EXPONENT, TENSOR_SCALE, BlockScales, ScaledPlan, scale_magnitude
from jchop.formats import FloatFormat, UniformFormat
from jchop.formats.rounding import Overflow, Rounding

# == integers and fixed point ==========================================================================================


#: The most bits of elements: a significand holds two bits more, plus the 12 bits of half a scale.
_MOST_ELEMENT_BITS = 10
_MOST_FRACTION_BITS = 16
#: The largest magnitude of zero points.
MOST_ZERO_POINT = 1 << 10
#: Scales below 2^-_LEAST are multiplied by 2^TINY; scales from 2^_HUGE on are divided by 2^_HUGE.
_TINY_BELOW, TINY_FACTOR_EXPONENT, _HUGE_FROM = 64, 100, 64
assert SAFE_EXPONENT + _MOST_FRACTION_BITS <= _TINY_BELOW and SAFE_EXPONENT <= _HUGE_FROM
#: Adding this number rounds to a whole number, which is then in the low bits, in two's complement.
_WHOLE_SHIFT = 1.5 * 2.0**FLOAT32.fraction
_WHOLE_SHIFT_BITS = int(np.float32(_WHOLE_SHIFT).view(np.int32))


def supports_integer_encode(plan: ScaledPlan) -> bool:
    """Whether `round_to_integers` gives the results of the exact way."""
    has_mode = plan.element.rounding in {*NEAREST_INCREMENTS, *DIRECTIONAL_MODES, *STOCHASTIC_MODES}
    return plan.compute is FLOAT32 and not plan.rule.tensor_scale and has_mode and has_plain_integers(plan)


def has_plain_integers(plan: ScaledPlan) -> bool:
    """Whether the elements are few enough, and their overflow is a clamp."""
    element, fmt = plan.element, plan.element.format
    if not isinstance(fmt, UniformFormat) or element.overflow is Overflow.WRAP or element.flush:
        return False
    return fmt.bits <= _MOST_ELEMENT_BITS and 0 <= fmt.frac_bits <= _MOST_FRACTION_BITS


def supports_integer_decode(plan: ScaledPlan) -> bool:
    """Whether `multiply_integers_by_scales` gives the results of the exact way."""
    fmt, scale = plan.element.format, plan.scale
    if plan.compute is not FLOAT32 or plan.rule.tensor_scale or not isinstance(fmt, UniformFormat):
        return False
    if not (fmt.bits <= _MOST_ELEMENT_BITS and 0 <= fmt.frac_bits <= _MOST_FRACTION_BITS):
        return False
    # Rounded once: a product is exact except in the subnormal range, or a multiple of the smallest number.
    exact = _integer_products_are_exact(plan)
    multiple = Fraction(scale.smallest) / (1 << fmt.frac_bits) >= Fraction(2) ** FLOAT32.tiny_exponent
    return (exact and multiple) or (plan.carrier is FLOAT32 and (exact or multiple))


def _integer_products_are_exact(plan: ScaledPlan) -> bool:
    """Whether products of elements and scales have no more bits than a number of the normal range."""
    return plan.is_power or plan.element.format.bits + plan.scale.frac_bits + 1 < FLOAT32.fraction


# -- scales ------------------------------------------------------------------------------------------------------------


class GroupQuanta(NamedTuple):
    """The quanta of groups, scale times the element's quantum, moved so that no result is subnormal."""

    value: Array
    tiny: Array | None  # whether they and the numbers were multiplied by 2^TINY; None: nothing was moved
    factor: Array | None  # 1, or 2^-_HUGE if they and the numbers are huge; None: no numbers are moved


def quanta_of(scales: BlockScales, plan: ScaledPlan, *, huge_too: bool = True) -> GroupQuanta:
    """The quanta of integers and fixed point; for other elements the scales."""
    fmt, scale = plan.element.format, plan.scale
    places = fmt.frac_bits if isinstance(fmt, UniformFormat) else 0
    bits = extend_exponent(scale_magnitude(scales, plan), FLOAT32) - (places << FLOAT32.fraction)
    least = Fraction(scale.smallest) / (1 << places)
    if plan.in_safe_range or (Fraction(2) ** -_TINY_BELOW <= least and scale.max < 2**_HUGE_FROM):
        return GroupQuanta(bits_to_float(bits), None, None)
    return quanta_of_bits(bits, huge_too=huge_too)


def quanta_of_bits(bits: Array, *, huge_too: bool = True, least: int = _TINY_BELOW) -> GroupQuanta:
    """Quanta from their extended bits; quanta below 2^-least count as tiny."""
    tiny, huge = (
        bits < (FLOAT32.bias - least) << FLOAT32.fraction,
        bits >= (FLOAT32.bias + _HUGE_FROM) << FLOAT32.fraction,
    )
    bits = lax_where(tiny, bits + (TINY_FACTOR_EXPONENT << FLOAT32.fraction), bits)
    if not huge_too:
        return GroupQuanta(bits_to_float(bits), tiny, None)
    bits = lax_where(huge, bits - (_HUGE_FROM << FLOAT32.fraction), bits)
    return GroupQuanta(bits_to_float(bits), tiny, lax_where(huge, jnp.float32(2.0**-_HUGE_FROM), 1))


def move_with_quanta(x: Array, quanta: GroupQuanta) -> Array:
    """Numbers moved like the quanta. With tiny quanta, a huge number may become another huge number."""
    if quanta.tiny is None or quanta.factor is None:
        return x
    bits = float_to_bits(x)
    magnitude = bits & low_mask(31)
    number = bits_to_float(
        jnp.minimum(magnitude, (2 * FLOAT32.bias - TINY_FACTOR_EXPONENT) << FLOAT32.fraction)
        + (TINY_FACTOR_EXPONENT << FLOAT32.fraction)
    )
    # The bits of a subnormal number are read with a leading one that it does not have.
    number = lax_where(
        magnitude < 1 << FLOAT32.fraction, (number - 2.0 ** (TINY_FACTOR_EXPONENT - FLOAT32.bias)) * 2, number
    )
    large = bits_to_float(float_to_bits(number) | bits ^ magnitude)
    return lax_where(quanta.tiny & (magnitude <= FLOAT32.inf), large, x * quanta.factor)


# -- rounding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NearWhole:
    """A sum x / s + z near `total`, or near `total` plus a half; `side` is an integer with the difference's sign."""

    total: Array
    side: Array

    @property
    def floor(self) -> Array:
        return self.total - (self.side < 0)

    @property
    def inexact(self) -> Array:
        return self.side != 0


# The tables of `modes` do not fit: here the lower neighbour is known, not the one nearer to zero, and addends are
# cheaper than conditions. Modes that are in neither table take the exact way.
#: 1 if the middle of two whole numbers is rounded up, else 0; a function of the lower one.
NEAREST_INCREMENTS: dict[Rounding, Callable[[Array], Array]] = {
    Rounding.NEAREST_EVEN: lambda floor: floor & 1,
    Rounding.NEAREST_AWAY: lambda floor: 1 + (floor >> 31),
    Rounding.NEAREST_ZERO: lambda floor: -(floor >> 31),
}
#: Functions of `total` and `side`.
DIRECTIONAL_MODES: dict[Rounding, Callable[[NearWhole], Array]] = {
    Rounding.UP: lambda v: v.total + (v.side > 0),
    Rounding.DOWN: lambda v: v.floor,
    Rounding.TOWARD_ZERO: lambda v: v.floor + (v.inexact & (v.floor < 0)),
    Rounding.ODD: lambda v: v.floor + (v.inexact & (v.floor & 1 == 0)),
}
STOCHASTIC_MODES = (Rounding.STOCHASTIC, Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_EQUAL)


def rounds_to_nearest(plan: ScaledPlan) -> bool:
    """Whether elements are rounded to nearest."""
    return plan.element.rounding in NEAREST_INCREMENTS


def round_to_integers(x: Array, scales: BlockScales, zero: Array | None, plan: ScaledPlan, word: Array | None) -> Array:
    """The sums x / s + z rounded once, in quanta of the element format and within its ends: whole numbers, int32.

    Args:
        x: float32; NaN counts as the largest number.
        scales: the scales of the groups.
        zero: integer zero points of the shape of the scales, or None. Results are exact for zero points within
            MOST_ZERO_POINT of zero, far beyond the ends of elements. Larger ones, which no rule fits, may give the
            neighbour.
        plan: a plan for which `supports_integer_encode` holds.
        word: for a stochastic element, a word for each number.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, UniformFormat)
    nearest = rounds_to_nearest(plan)
    quanta = quanta_of(scales, plan)
    shift = jnp.float32(0) if zero is None else zero.astype(jnp.float32)
    # For directed modes the ends are one step further out, and the result is clamped afterwards.
    top, bottom = ((end - shift) * quanta.value for end in (fmt.max_code + (not nearest), fmt.min_code - (not nearest)))
    high, low = split_significand(quanta.value)
    # All are materialized, also the last one, so that sums with constants are not rearranged.
    quanta, top, bottom, inverse, high, low, start = plan.backend.per_group(
        (quanta, top, bottom, 1 / quanta.value, high, low, shift + _WHOLE_SHIFT)
    )
    numbers = move_with_quanta(x, quanta)
    numbers = lax_where(numbers < top, numbers, top)
    numbers = lax_where(numbers > bottom, numbers, bottom)
    guess = numbers * inverse
    # Near a whole number, or near the middle of two.
    guess_sum = (guess - 0.5 if nearest else guess) + start
    total = float_to_bits(guess_sum) - _WHOLE_SHIFT_BITS
    near = guess_sum - start + 0.5 if nearest else guess_sum - start
    rest = (numbers - near * high) - near * low
    if nearest:
        # The bits of a negative number are a negative integer; there is no -0.
        result = total + 1 + ((float_to_bits(rest) + NEAREST_INCREMENTS[mode](total) - 1) >> 31)
        # Numbers within the ends of elements stay within them.
        return result if zero is None or plan.in_safe_range else lax_clip(result, fmt.min_code, fmt.max_code)
    side = lax_where(near == 0, bit_ops.ordered_integers(*split_sign(x, FLOAT32)), float_to_bits(rest))
    compare = (
        partial(_compare_share_by_halves, rest, high, low)
        if plan.in_safe_range
        else partial(_compare_share_by_words, rest, quanta.value)
    )
    return _round_by_side(NearWhole(total, side), plan, word, compare)


def _round_by_side(
    v: NearWhole, plan: ScaledPlan, word: Array | None, compare: Callable[[Array], tuple[Array, Array]]
) -> Array:
    """A mode that does not round to nearest; within the ends of the format."""
    fmt, mode = cast(UniformFormat, plan.element.format), plan.element.rounding
    random = take_random_bits(word, plan.element, FLOAT32)
    result = DIRECTIONAL_MODES[mode](v) if random is None else round_stochastically(v, random, mode, compare)
    return lax_clip(result, fmt.min_code, fmt.max_code)


def round_stochastically(
    v: NearWhole, random: RandomBits, mode: Rounding, compare: Callable[[Array], tuple[Array, Array]]
) -> Array:
    """A stochastic mode: the neighbour away from zero if nu >= 1 - R 2^-N, else the other one.

    The difference from `v`, which is exact and at most about half a quantum, is ±nu or ±(1 - nu) times the quantum.
    `compare` tells whether its magnitude, in quanta, is more than a word times 2^-32, or equal.
    """
    outside = v.floor >= 0
    if mode is Rounding.STOCHASTIC_EQUAL:
        return v.floor + (v.inexact & (bit_ops.top_bit(random.word) == outside))
    towards = outside == (v.side >= 0)
    word = lax_where(towards, jnp.uint32(0) - random.word, random.word)
    more, equal = compare(word)
    more = more | (word == 0) & v.inexact
    away = lax_where(towards, (more | equal) & (word != 0), more ^ True)
    return v.floor + (away == outside)


def _compare_share_by_words(rest: Array, quantum: Array, word: Array) -> tuple[Array, Array]:
    """Whether |rest| / quantum is more than word 2^-32, or equal, by integers of two words."""
    bits = float_to_bits(quantum)
    # A whole number and its fraction, in units in the last place of the quantum.
    scale = bits_to_float((2 * FLOAT32.bias + FLOAT32.fraction - (bits >> FLOAT32.fraction)) << FLOAT32.fraction)
    whole, fraction = _whole_and_fraction(jnp.abs(rest) * scale)
    upper, fraction = _whole_and_fraction(fraction * 2.0**16)
    lower, fraction = _whole_and_fraction(fraction * 2.0**16)
    significand = (bits & low_mask(FLOAT32.fraction) | 1 << FLOAT32.fraction).astype(jnp.uint32)
    high, low = full_word_product(significand, word)
    of_rest = (upper << 16 | lower).astype(jnp.uint32)
    whole = whole.astype(jnp.uint32)
    same = (whole == high) & (of_rest == low)
    more = (whole > high) | (whole == high) & (of_rest > low) | same & (fraction > 0)
    return more, same & (fraction == 0)


def _compare_share_by_halves(rest: Array, high: Array, low: Array, word: Array) -> tuple[Array, Array]:
    """`_compare_share_by_words` for a moderate quantum in two parts, in float64, for processors that have it.

    A word times a part is exact. If the sign is in doubt, the first difference is exact, too, because it has few bits.
    """
    with enable_x64(True):
        rest, high, low, share = (value.astype(jnp.float64) for value in (jnp.abs(rest), high, low, word))
        difference = (rest * 2.0**32 - share * high) - share * low
        return difference > 0, difference == 0


def _whole_and_fraction(x: Array) -> tuple[Array, Array]:
    """A whole number below 2^25, and the fraction."""
    whole = x.astype(jnp.int32)
    return whole, x - whole.astype(jnp.float32)


# -- codes -------------------------------------------------------------------------------------------------------------


def encode_integers(whole: Array, plan: ScaledPlan) -> Array:
    """The codes of elements that are given as integers, in units of the smallest step of the format."""
    fmt = plan.element.format
    return (whole & low_mask(fmt.bits)).astype(fmt.code_dtype)


def decode_integers(codes: Array, plan: ScaledPlan) -> tuple[Array, Array | None]:
    """Codes as quanta; and whether each code is unused, which means NaN."""
    fmt = cast(UniformFormat, plan.element.format)
    codes, spare = codes.astype(jnp.int32), 32 - fmt.bits
    whole = (codes << spare) >> spare if fmt.signed else codes
    return whole, whole < fmt.min_code if fmt.signed and fmt.min_code > -(1 << (fmt.bits - 1)) else None


# -- multiplication ----------------------------------------------------------------------------------------------------


def multiply_integers_by_scales(whole: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Quanta, with one bit more than the element's, times scales, rounded once to nearest even; float32.

    In a narrower carrier the products are exact; rounding to it remains.
    """
    quanta = scales.quanta or plan.backend.per_group(product_quanta(scales, plan))
    product = whole.astype(jnp.float32) * quanta.value
    # Not if a branch returns the products, which writes them to memory.
    if not (_integer_products_are_exact(plan) or plan.in_safe_range):
        product = plan.backend.prevent_fma(product, quanta.value)
    return move_back_products(product, quanta)


def product_quanta(scales: BlockScales, plan: ScaledPlan) -> GroupQuanta:
    """The moved quanta or scales that elements are multiplied by, without a tensor's scale."""
    if plan.decoding == "floats" and not _has_exact_floats(plan):
        return _move_tiny_scales(scale_magnitude(scales, plan))
    return quanta_of(scales, plan, huge_too=False)


def move_back_products(product: Array, quanta: GroupQuanta) -> Array:
    """Products of elements from 2^-30 on and quanta, rounded once to nearest even, without the move of the quanta.

    A subnormal product must be a multiple of the smallest number, or exact before the last rounding.
    """
    if quanta.tiny is None:
        return product
    # If 2^-TINY times the product is subnormal, it becomes a whole multiple of the smallest number.
    bits = float_to_bits(product)
    magnitude = bits_to_float(bits & low_mask(31))
    lead = np.float32(2.0**FLOAT32.fraction)
    count = magnitude * 2.0 ** (-FLOAT32.tiny_exponent - TINY_FACTOR_EXPONENT) + lead
    small = float_to_bits(count) - int(lead.view(np.int32))
    subnormal = bits_to_float(small | bits & FLOAT32.sign_bit)
    tiny_product = lax_where(
        magnitude < 2.0 ** (1 - FLOAT32.bias + TINY_FACTOR_EXPONENT), subnormal, product * 2.0**-TINY_FACTOR_EXPONENT
    )
    return lax_where(quanta.tiny, tiny_product, product)


# == products of numbers and scales ====================================================================================
# A product is rounded right except below the normal range, where a device may read and write zeros. Scales that may
# lead there are multiplied by 2^149, so that the product counts multiples of the smallest number. The product guesses
# the count; then the side of the middle of two counts on which the exact product lies decides.


#: Nonzero numbers are from 2^-LEAST to 2^MOST; products with scales below 2^-_TINY may be subnormal.
LEAST_FACTOR_EXPONENT, MOST_FACTOR_EXPONENT, _TINY_SCALE_EXPONENT = 40, 40, 64


def multiply_by_scale_bits(numbers: Array, scales: Array, plan: ScaledPlan) -> Array:
    """Numbers times scales, rounded to nearest, ties to even; float32.

    Args:
        numbers: float32: zero, NaN, infinite, or from 2^-LEAST to 2^MOST.
        scales: magnitude bits, for each group.
        plan: the plan.
    """
    return _multiply_by_moved_scales(numbers, plan.backend.per_group(_move_tiny_scales(scales)), plan)


def _move_tiny_scales(scales: Array) -> GroupQuanta:
    """Scales from their magnitude bits; tiny ones times 2^149."""
    scales = extend_exponent(scales, FLOAT32)
    tiny = scales < (FLOAT32.bias - _TINY_SCALE_EXPONENT) << FLOAT32.fraction
    large_scales = scales - (FLOAT32.tiny_exponent << FLOAT32.fraction)
    return GroupQuanta(bits_to_float(lax_where(tiny, large_scales, scales)), tiny, None)


def _multiply_by_moved_scales(numbers: Array, scales: GroupQuanta, plan: ScaledPlan) -> Array:
    product = plan.backend.prevent_fma(numbers * scales.value, scales.value)
    assert scales.tiny is not None
    return lax_where(scales.tiny, _round_subnormal_product(numbers, scales.value, product), product)


def _round_subnormal_product(number: Array, scale: Array, product: Array) -> Array:
    """Number times scale times the smallest number, rounded once; `product` is the rounded number times scale."""
    number, magnitude = (bits_to_float(float_to_bits(x) & low_mask(FLOAT32.width - 1)) for x in (number, product))
    # The number of multiples is `count` or one more; the middle between the two decides.
    lead = np.float32(2.0**FLOAT32.fraction)
    count = float_to_bits(jnp.maximum(magnitude - 0.5, 0) + lead) - int(lead.view(np.int32))
    middle = count.astype(jnp.float32) + 0.5
    (high, low), (upper, lower) = (split_significand(x) for x in (number, scale))
    rest = (((high * upper - middle) + high * lower) + low * upper) + low * lower
    count = count + (bit_ops.ordered_integers(*split_sign(rest, FLOAT32)) + (count & 1) > 0)
    normal = float_to_bits(magnitude) + (FLOAT32.tiny_exponent << FLOAT32.fraction)
    bits = lax_where(magnitude < lead, count, normal)
    bits = lax_where(float_to_bits(magnitude) >= FLOAT32.inf, float_to_bits(magnitude), bits)
    return bits_to_float(bits | float_to_bits(product) & FLOAT32.sign_bit)


# == narrow floating-point elements ====================================================================================
# Let 2^q be the spacing of the format at a magnitude. Adding 2^(q + F) rounds the magnitude to a multiple of 2^q, and
# the difference of the bits counts the multiples. For a power-of-two scale the quotient's magnitude is exact. For
# another scale it is guessed; then the side of the middle of its step on which the number lies decides.


#: The element values are from 2^-30 to 2^20.
_LEAST_ELEMENT_EXPONENT, _MOST_ELEMENT_EXPONENT = 30, 20
#: Bits of the upper half of a significand.
_UPPER_HALF_BITS = 12
#: Half of 2^-_SMALLEST times the last bit of a number from 2^-64 on is a normal number.
_MOST_SMALLNESS = 38


def supports_float_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_floats` and `round_float_quotients` give the results of the exact way."""
    fmt = cast(FloatFormat, plan.element.format)
    if not (has_plain_floats(plan) and clamps_overflow(plan)) or plan.element.rounding is not Rounding.NEAREST_EVEN:
        return False
    if plan.is_power:
        return True
    # The bits of the middle of a step, times a block's scale if the tensor has one too, times half of the other scale.
    tensor_scale = plan.rule.tensor_scale
    other = plan.scale.frac_bits + 1 if tensor_scale else 0
    fits = fmt.frac_bits + 2 + other + _UPPER_HALF_BITS <= FLOAT32.fraction + 1
    return fits and (not tensor_scale or _is_near_one(plan))


def _is_near_one(plan: ScaledPlan) -> bool:
    """Whether scales, and elements times scales, may be multiplied by any moved scale, and by its last bit."""
    fmt, scale = plan.element.format, plan.scale
    least = Fraction(scale.smallest) * min(Fraction(fmt.smallest or 1), 1)
    most = Fraction(scale.max) * max(Fraction(fmt.max), 1)
    return least >= Fraction(1, 1 << _MOST_SMALLNESS) and most <= 1 << MOST_FACTOR_EXPONENT


def supports_float_decode(plan: ScaledPlan) -> bool:
    """Whether `multiply_floats_by_scales` gives the numbers of the exact way."""
    if not has_plain_floats(plan):
        return False
    scale, fmt, exact = plan.scale, plan.element.format, _float_products_are_exact(plan)
    if plan.rule.tensor_scale:
        assert fmt.smallest is not None
        ends = (scale.smallest * fmt.smallest, scale.max * fmt.max)
        within = all(2.0**-LEAST_FACTOR_EXPONENT <= end <= 2.0**MOST_FACTOR_EXPONENT for end in ends)
        return plan.carrier is FLOAT32 and exact and within
    # Or every product is a multiple of the smallest number.
    smallest = Fraction(scale.smallest) * Fraction(fmt.smallest or 1)
    return plan.carrier is FLOAT32 or (exact and smallest >= Fraction(2) ** FLOAT32.tiny_exponent)


def _float_products_are_exact(plan: ScaledPlan) -> bool:
    """Whether products with scales need rounding only below the normal range."""
    fmt = cast(FloatFormat, plan.element.format)
    return plan.is_power or fmt.frac_bits + plan.scale.frac_bits + 2 <= FLOAT32.fraction + 1


def _has_exact_floats(plan: ScaledPlan) -> bool:
    """Whether products with the scales of a program need no rounding in the normal range."""
    return _float_products_are_exact(plan) or plan.in_safe_range


def clamps_overflow(plan: ScaledPlan) -> bool:
    """Whether numbers beyond the ends become the ends, and subnormal elements stay."""
    element = plan.element
    return (element.overflow is Overflow.SATURATE or element.format.saturates) and not element.flush


def has_plain_floats(plan: ScaledPlan) -> bool:
    """Whether the element format is a narrow float format with subnormal numbers and signed zeros."""
    fmt = plan.element.format
    if plan.compute is not FLOAT32 or not isinstance(fmt, FloatFormat) or not fmt.has_negative_zero:
        return False
    # With one bit of precision the parity of the exponent decides a tie.
    plain = fmt.subnormals and fmt.frac_bits > 0 and fmt.bits <= 16
    return (
        plain
        and Fraction(1, 1 << _LEAST_ELEMENT_EXPONENT)
        <= Fraction(fmt.smallest)
        <= Fraction(fmt.max)
        <= 1 << _MOST_ELEMENT_EXPONENT
    )


# -- rounding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridStep:
    """A magnitude on the format's grid: 2^(q + F), its sum with the magnitude, and the exponent bits of the binade."""

    shift: Array
    total: Array
    exponent: Array

    def code(self, fmt: FloatFormat) -> Array:
        count = float_to_bits(self.total) - float_to_bits(self.shift)
        return count + ((self.exponent - _least_exponent_bits(fmt)) >> (FLOAT32.fraction - fmt.frac_bits))

    @property
    def number(self) -> Array:
        return self.total - self.shift


def _least_exponent_bits(fmt: FloatFormat) -> int:
    """Exponent bits of the smallest normal number."""
    return (fmt.emin + FLOAT32.bias) << FLOAT32.fraction


def nearest_grid_step(magnitude: Array, fmt: FloatFormat, below_middle: bool = False) -> GridStep:
    """The multiple nearest to a magnitude; if `below_middle`, the multiple below the middle of its step."""
    exponent = jnp.maximum(float_to_bits(magnitude) & FLOAT32.inf, _least_exponent_bits(fmt))
    shift = exponent + ((FLOAT32.fraction - fmt.frac_bits) << FLOAT32.fraction)
    if below_middle:
        magnitude = magnitude - bits_to_float(shift - ((FLOAT32.fraction + 1) << FLOAT32.fraction))
    return GridStep(bits_to_float(shift), magnitude + bits_to_float(shift), exponent)


def encode_floats(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    fmt = cast(FloatFormat, plan.element.format)
    sign, magnitude = split_sign(x, FLOAT32)
    top = fmt.code_of(fmt.max)
    assert top is not None
    code = _saturate_at_top(_nearest_quotient(x, magnitude, scales, plan).code(fmt), top, magnitude, plan)
    return sign_codes(code, sign, magnitude, fmt)


def sign_codes(code: Array, sign: Array, magnitude: Array, fmt: FloatFormat) -> Array:
    """Codes of magnitudes with the signs of numbers. NaN has its own code, or the code of the largest number."""
    nan = fmt.code_of(math.nan)
    negative = lax.shift_right_logical(sign, jnp.full_like(sign, FLOAT32.width - fmt.bits))
    nan = fmt.code_of(fmt.max) if nan is None else nan
    return lax_where(magnitude > FLOAT32.inf, nan, code | negative).astype(fmt.code_dtype)


def round_float_quotients(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The values of the codes of `encode_floats`, without the scales."""
    fmt = cast(FloatFormat, plan.element.format)
    sign, magnitude = split_sign(x, FLOAT32)
    number = _saturate_at_top(_nearest_quotient(x, magnitude, scales, plan).number, float(fmt.max), magnitude, plan)
    nan = math.nan if fmt.has_nan else float(fmt.max)
    return lax_where(magnitude > FLOAT32.inf, nan, bits_to_float(float_to_bits(number) | sign))


def _saturate_at_top(value: Array, top: float, magnitude: Array, plan: ScaledPlan) -> Array:
    value = jnp.minimum(value, top)
    return value if plan.in_safe_range else lax_where(magnitude >= FLOAT32.inf, top, value)


def _nearest_quotient(x: Array, magnitude: Array, scales: BlockScales, plan: ScaledPlan) -> GridStep:
    """The quotients' magnitudes on the grid; a magnitude too large for the format stays above its largest number."""
    if not plan.is_power:
        return _divide_floats(x, scales, plan)
    return (_divide_floats_by_safe_power if plan.in_safe_range else _divide_floats_by_power)(magnitude, scales, plan)


def _divide_floats_by_power(magnitude: Array, scales: BlockScales, plan: ScaledPlan) -> GridStep:
    """Magnitude bits over scales 2^e, rounded to the element format, as steps of its grid."""
    exponent = scales.value
    # Zero, and numbers far larger than the scale, are clamped so that the field of the quotient does not overflow.
    most = (FLOAT32.inf - 1) + (jnp.minimum(exponent, 0) << FLOAT32.fraction)
    within = jnp.minimum(
        jnp.maximum(extend_exponent(magnitude, FLOAT32), -(_LEAST_ELEMENT_EXPONENT << FLOAT32.fraction)), most
    )
    bits = within - (exponent << FLOAT32.fraction)
    low, high = (
        float_to_bits(jnp.float32(end))
        for end in (2.0 ** -(_LEAST_ELEMENT_EXPONENT + 2), 2.0 ** (_MOST_ELEMENT_EXPONENT + 2))
    )
    fmt = cast(FloatFormat, plan.element.format)
    return nearest_grid_step(bits_to_float(lax_clip(bits, low, high)), fmt)


def _divide_floats_by_safe_power(magnitude: Array, scales: BlockScales, plan: ScaledPlan) -> GridStep:
    """`_divide_floats_by_power` for safe scales: a product with 1 / s is exact, or far outside the format."""
    fmt = cast(FloatFormat, plan.element.format)
    quotient = bits_to_float(magnitude) * plan.backend.per_group(
        bits_to_float((FLOAT32.bias - scales.value) << FLOAT32.fraction)
    )
    return nearest_grid_step(lax_where(quotient < float(fmt.max), quotient, float(fmt.max)), fmt, below_middle=False)


def _divide_floats(x: Array, scales: BlockScales, plan: ScaledPlan) -> GridStep:
    """Magnitudes over scales, rounded to nearest: a guess by the inverse, then a comparison with the middle."""
    fmt = cast(FloatFormat, plan.element.format)
    divisor, high, low = _halves_of_scales(scales, plan)
    divisor, inverse, high, low = plan.backend.per_group((divisor, 1 / (high + low), high, low))
    numbers = bits_to_float(float_to_bits(move_with_quanta(x, divisor)) & low_mask(FLOAT32.width - 1))
    guess = numbers * inverse
    guess = lax_where(guess < float(fmt.max), guess, float(fmt.max))
    step = nearest_grid_step(guess, fmt, below_middle=True)
    middle = step.number + bits_to_float(float_to_bits(step.shift) - ((FLOAT32.fraction + 1) << FLOAT32.fraction))
    side = float_to_bits((numbers - middle * high) - middle * low)
    up = side + (float_to_bits(step.total) & 1) > 0
    return replace(step, total=bits_to_float(float_to_bits(step.total) + up))


def _halves_of_scales(scales: BlockScales, plan: ScaledPlan) -> tuple[GroupQuanta, Array, Array]:
    """The move of the numbers, and the moved scales as sums of two numbers of few bits."""
    if scales.tensor is None:
        divisor = quanta_of(scales, plan)
        return divisor, *split_significand(divisor.value)
    divisor = quanta_of_bits(extend_exponent(scales.tensor, FLOAT32))
    own, (high, low) = bits_to_float(scale_magnitude(scales, plan)), split_significand(divisor.value)
    assert TENSOR_SCALE.frac_bits == FLOAT32.fraction
    return divisor, own * high, own * low


# -- numbers -----------------------------------------------------------------------------------------------------------


def multiply_floats_by_scales(values: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Values of the format times scales, rounded once; float32.

    In a narrower carrier they are exact; rounding to it remains. If the tensor has a scale, the product with a block's
    scale is exact.
    """
    if scales.tensor is not None:
        own = bits_to_float(plan.backend.per_group(scale_magnitude(scales, plan)))
        return multiply_by_scale_bits(values * own, scales.tensor, plan)
    quanta = scales.quanta or plan.backend.per_group(product_quanta(scales, plan))
    if not _has_exact_floats(plan):
        return _multiply_by_moved_scales(values, quanta, plan)
    return move_back_products(values * quanta.value, quanta)


# == in float64, for programs of one CPU ===============================================================================
# A product with 1 / s in float64, settled as in `arithmetic.float64`, is the quotient x / s where the nearest element
# is decided. One addition then rounds it to the grid of the format. A number minus its neighbour times s is exact,
# and decides all other modes. Scales are not moved towards 1, so there are no cases: this is half as many operations
# as the exact float32 arithmetic has. But each takes twice as long, so it is for small arrays (`MOST_IN_FLOAT64`).


#: The most bits of scales. Then a quotient that is not half a multiple of the grid's spacing differs from it by more
#: than 2^-_SETTLED of the spacing.
_MOST_SCALE_BITS, _SNAP_PLACES = 30, 32


def supports_float64_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_in_float64` and `round_in_float64` give the results of the exact way, in float64."""
    element, fmt = plan.element, plan.element.format
    scale_bits = 1 if plan.is_power else plan.scale.frac_bits + 1
    scale_bits += TENSOR_SCALE.frac_bits + 1 if plan.rule.tensor_scale else 0
    if plan.compute is not FLOAT32 or scale_bits > _MOST_SCALE_BITS:
        return False
    if element.rounding not in {*NEAREST_INCREMENTS, *DIRECTIONAL_MODES, *STOCHASTIC_MODES}:
        return False
    return (
        has_plain_integers(plan) if isinstance(fmt, UniformFormat) else has_plain_floats(plan) and clamps_overflow(plan)
    )


def materialize_scale_pairs(scales: BlockScales, plan: ScaledPlan) -> BlockScales:
    """Scales with a `pair` of divisors and inverses.

    One division of both gives the pair: a compiler repeats no division for each element, and one loop is compiled.
    """
    with enable_x64(True):
        value = _scales_in_float64(scales, plan)
        shape = (2, *value.shape)
        first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
        both = lax.broadcast_in_dim(value, shape, tuple(range(1, len(shape))))
        pair = lax_where(first, both, 1.0) / lax_where(first, 1.0, both)
        return replace(scales, nan=plan.backend.per_group(scales.nan), pair=pair)


def _scales_in_float64(scales: BlockScales, plan: ScaledPlan) -> Array:
    """Scales, times the quantum of integers and fixed point."""
    fmt, value = plan.element.format, scales.value
    value = value if value.dtype == jnp.float64 else float64.widen_magnitude(scale_magnitude(scales, plan))
    value = value if scales.tensor is None else value * float64.widen_magnitude(scales.tensor)
    places = fmt.frac_bits if isinstance(fmt, UniformFormat) else 0
    return value * 2.0**-places if places else value


def _scales_and_inverses(scales: BlockScales, plan: ScaledPlan) -> tuple[Array, Array]:
    if scales.pair is not None:
        return scales.pair[0], scales.pair[1]
    value = _scales_in_float64(scales, plan)
    return value, lax.div(np.float64(1), value)


def _widen(x: Array, plan: ScaledPlan) -> Array:
    """float32 numbers in float64. Subnormal ones may be zero: moderate scales, to nearest, round them to zero."""
    return lax.convert_element_type(x, jnp.float64) if plan.in_safe_range else float64.widen_float32(x)


def _narrow(x: Array, plan: ScaledPlan) -> Array:
    """Products in float32. Moderate scales give no subnormal ones."""
    return lax.convert_element_type(x, jnp.float32) if plan.in_safe_range else float64.narrow_float64(x)


# -- rounding ----------------------------------------------------------------------------------------------------------


def _snap_to_spacing(t: Array, lead: Array) -> Array:
    """Quotients rounded to the last place of sums with 2^-_SNAP_PLACES `FLOAT64_LEAD` times the grid's spacing."""
    return lax.sub(lax.add(t, lead), lead)


def _shift_ties(u: Array, unit: Array | float, mode: Rounding) -> Array:
    """Numbers whose rounding to nearest even is the rounding of `u` in another nearest mode."""
    if mode is Rounding.NEAREST_EVEN:
        return u
    little = unit * (0.5 * 2.0**-_SNAP_PLACES)
    return u + lax_where((u < 0) == (mode is Rounding.NEAREST_AWAY), -little, little)


def _round_integers_in_float64(
    x: Array, scales: BlockScales, zero: Array | None, plan: ScaledPlan, word: Array | None
) -> tuple[Array, Array, Array]:
    """The sums x / s + z rounded once, in quanta of the element and within its ends.

    Returns:
        The sums; the sums without z, as numbers; and the scales.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, UniformFormat)
    nearest = rounds_to_nearest(plan)
    value, inverse = _scales_and_inverses(scales, plan)
    number = _widen(x, plan)
    # The signs of the scales are a zero that no compiler knows: quirk constants_of_sums_combined.
    none = lax.convert_element_type(
        with_constant(lax.shift_right_logical, float64.double_to_bits(value), 63), jnp.float64
    )
    shift = 0 if zero is None else zero.astype(jnp.float64)
    top, bottom = (float(end) - shift for end in (fmt.max_code + (not nearest), fmt.min_code - (not nearest)))
    t = lax.mul(number, inverse)
    t = jnp.maximum(lax_where(t < top, t, top), bottom)  # NaN counts as the largest number
    start = with_constant(lax.add, none, float64.FLOAT64_LEAD)
    start = start if zero is None else shift + start
    if nearest:
        t = _snap_to_spacing(t, with_constant(lax.add, none, float64.FLOAT64_LEAD * 2.0**-_SNAP_PLACES))
        t = t if mode is Rounding.NEAREST_EVEN else _shift_ties(t + shift, 1, mode) - shift
        total = lax.add(t, start)
        return lax.convert_element_type(float64.double_to_bits(total), jnp.int32), lax.sub(total, start), value
    total = t + start
    near = total - start
    rest = number - near * value
    v = NearWhole(float64.double_to_bits(total).astype(jnp.int32), rest)
    count = _round_by_side(v, plan, word, lambda word: _compare_share_by_halves(rest, *_halves_of_step(value), word))
    return count, (count if zero is None else count - zero).astype(jnp.float64), value


def _halves_of_step(step: Array) -> tuple[Array, Array]:
    """Steps as sums of two numbers of few bits."""
    high = lax.bitcast_convert_type(
        float64.double_to_bits(step) & ~low_mask(FLOAT64.fraction + 1 - _MOST_SCALE_BITS // 2), jnp.float64
    )
    return high, step - high


def _round_floats_in_float64(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None
) -> tuple[Array, Array, Array, Array]:
    """The magnitudes |x| / s rounded once to a float format whose exponents go on above its largest number.

    Returns:
        The rounded magnitudes as multiples of the spacing; the spacing; the magnitudes; and the scales.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, FloatFormat)
    nearest = rounds_to_nearest(plan)
    (value, inverse), number = _scales_and_inverses(scales, plan), jnp.abs(_widen(x, plan))
    t = number * inverse
    t = lax_where(t < float(fmt.max), t, float(fmt.max))
    unit = float64.format_spacing(t, fmt)
    lead = unit * float64.FLOAT64_LEAD
    total = (_shift_ties(_snap_to_spacing(t, lead * 2.0**-_SNAP_PLACES), unit, mode) if nearest else t) + lead
    count, near = (float64.double_to_bits(total) - float64.double_to_bits(lead)).astype(jnp.int32), total - lead
    if nearest:
        return count, unit, near, value
    rest, step = number - near * value, unit * value
    under, inexact = rest < 0, rest != 0
    lower = lax_where(under, rest + step, rest)
    tail = _FloatRest(
        lower,
        step,
        inexact,
        float_to_bits(x) < 0,
        (count - under) & 1 != 0,
        take_random_bits(word, plan.element, FLOAT32),
    )
    away = AWAY_FROM_ZERO[mode](tail)
    move = jnp.asarray(away).astype(jnp.int32) - under
    return count + move, unit, near + move * unit, value


@dataclass(frozen=True)
class _FloatRest(BetweenNeighbours):
    """A magnitude minus its neighbour nearer to zero, and the distance of the neighbours, both times the scale."""

    rest: Array
    step: Array
    inexact: Array
    negative: Array
    odd: Array
    draw: RandomBits | None

    def stochastic(self) -> Array:
        """Whether the discarded fraction nu is at least 1 - R 2^-32."""
        assert self.draw is not None
        more, equal = _compare_share_by_halves(self.rest, *_halves_of_step(self.step), jnp.uint32(0) - self.draw.word)
        return (more | equal) & (self.draw.word != 0)


# -- results -----------------------------------------------------------------------------------------------------------


def encode_in_float64(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None, zero: Array | None = None
) -> Array:
    """The codes of x / s, plus integer zero points if there are any, rounded once to the element format."""
    with enable_x64(True):
        fmt = plan.element.format
        if isinstance(fmt, UniformFormat):
            return encode_integers(_round_integers_in_float64(x, scales, zero, plan, word)[0], plan)
        assert isinstance(fmt, FloatFormat)
        count, unit, *_ = _round_floats_in_float64(x, scales, plan, word)
        binade = (float64.double_to_bits(unit) >> FLOAT64.fraction).astype(jnp.int32) - (
            FLOAT64.bias + fmt.emin - fmt.frac_bits
        )
        top = fmt.code_of(fmt.max)
        assert top is not None
        code = jnp.minimum(count + (binade << fmt.frac_bits), top)
        return sign_codes(code, *split_sign(x, FLOAT32), fmt)


def round_in_float64(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None, zero: Array | None = None
) -> Array:
    """The numbers of the codes of `encode_in_float64`, rounded once to float32."""
    with enable_x64(True):
        fmt = plan.element.format
        if isinstance(fmt, UniformFormat):
            _, number, value = _round_integers_in_float64(x, scales, zero, plan, word)
            return _narrow(lax.mul(number, value), plan)
        _, _, number, value = _round_floats_in_float64(x, scales, plan, word)
        product = _narrow(jnp.minimum(number, float(fmt.max)) * value, plan)
        sign, magnitude = split_sign(x, FLOAT32)
        nan = magnitude > FLOAT32.inf
        bits = float_to_bits(product) | lax_where(nan, 0, sign)
        return bits_to_float(lax_where(nan, FLOAT32.nan, bits) if fmt.has_nan else bits)
