"""Integers and fixed point under scales in exact floating-point arithmetic; for XLA.

Two facts make it exact. First, a product with 1 / s guesses the quotient x / s with an error far below a half. So the
quotient is next to a number m of few bits, the end or the middle of a step. Second, the sign of x - m s tells on which
side of m the quotient is. With s in two halves of 12 bits, m s is two exact products. If the sign is in doubt, x is
close to the first product, so that difference is exact (Sterbenz). The second difference is rounded, which keeps its
sign. Divisions that a compiler replaces, and products and sums that it contracts, do not change a bit.

Scales far from 1 are moved towards 1, and the numbers with them, so that subnormal intermediate numbers have no effect.
A plan may state that there are no such scales (`ScaledPlan.in_safe_range`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.rounding.codes import extend_exponent
from jchop._core.rounding.modes import RandomBits, take_random_bits
from jchop._core.scaled.scales import SAFE_EXPONENT, BlockScales, ScaledPlan, scale_magnitude
from jchop.formats import UniformFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array

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
    bits = bit_ops.lax_where(tiny, bits + (TINY_FACTOR_EXPONENT << FLOAT32.fraction), bits)
    if not huge_too:
        return GroupQuanta(bits_to_float(bits), tiny, None)
    bits = bit_ops.lax_where(huge, bits - (_HUGE_FROM << FLOAT32.fraction), bits)
    return GroupQuanta(bits_to_float(bits), tiny, bit_ops.lax_where(huge, jnp.float32(2.0**-_HUGE_FROM), 1))


def move_with_quanta(x: Array, quanta: GroupQuanta) -> Array:
    """Numbers moved like the quanta. With tiny quanta, a huge number may become another huge number."""
    if quanta.tiny is None or quanta.factor is None:
        return x
    bits = float_to_bits(x)
    magnitude = bits & bit_ops.low_mask(31)
    number = bits_to_float(
        jnp.minimum(magnitude, (2 * FLOAT32.bias - TINY_FACTOR_EXPONENT) << FLOAT32.fraction)
        + (TINY_FACTOR_EXPONENT << FLOAT32.fraction)
    )
    # The bits of a subnormal number are read with a leading one that it does not have.
    number = bit_ops.lax_where(
        magnitude < 1 << FLOAT32.fraction, (number - 2.0 ** (TINY_FACTOR_EXPONENT - FLOAT32.bias)) * 2, number
    )
    large = bits_to_float(float_to_bits(number) | bits ^ magnitude)
    return bit_ops.lax_where(quanta.tiny & (magnitude <= FLOAT32.inf), large, x * quanta.factor)


def float_to_bits(x: Array) -> Array:
    """The bits of a float32 number."""
    return lax.bitcast_convert_type(x, jnp.int32)


def bits_to_float(bits: Array) -> Array:
    """The inverse of `float_to_bits`."""
    return lax.bitcast_convert_type(bits, jnp.float32)


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
    nearest = mode in NEAREST_INCREMENTS
    quanta = quanta_of(scales, plan)
    shift = jnp.float32(0) if zero is None else zero.astype(jnp.float32)
    # For directed modes the ends are one step further out, and the result is clamped afterwards.
    top, bottom = ((end - shift) * quanta.value for end in (fmt.max_code + (not nearest), fmt.min_code - (not nearest)))
    high = bits_to_float(float_to_bits(quanta.value) & ~bit_ops.low_mask(FLOAT32.fraction // 2 + 1))
    # All are materialized, also the last one, so that sums with constants are not rearranged.
    quanta, top, bottom, inverse, high, low, start = plan.backend.per_group(
        (quanta, top, bottom, 1 / quanta.value, high, quanta.value - high, shift + _WHOLE_SHIFT)
    )
    numbers = move_with_quanta(x, quanta)
    numbers = bit_ops.lax_where(numbers < top, numbers, top)
    numbers = bit_ops.lax_where(numbers > bottom, numbers, bottom)
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
        return result if zero is None or plan.in_safe_range else bit_ops.lax_clip(result, fmt.min_code, fmt.max_code)
    side = bit_ops.lax_where(near == 0, bit_ops.ordered_integers(*bit_ops.split_sign(x, FLOAT32)), float_to_bits(rest))
    v = NearWhole(total, side)
    random = take_random_bits(word, plan.element, FLOAT32)
    compare = (
        partial(_compare_share_by_halves, rest, high, low)
        if plan.in_safe_range
        else partial(_compare_share_by_words, rest, quanta.value)
    )
    result = DIRECTIONAL_MODES[mode](v) if random is None else round_stochastically(v, random, mode, compare)
    return bit_ops.lax_clip(result, fmt.min_code, fmt.max_code)


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
    word = bit_ops.lax_where(towards, jnp.uint32(0) - random.word, random.word)
    more, equal = compare(word)
    more = more | (word == 0) & v.inexact
    away = bit_ops.lax_where(towards, (more | equal) & (word != 0), ~more)
    return v.floor + (away == outside)


def _compare_share_by_words(rest: Array, quantum: Array, word: Array) -> tuple[Array, Array]:
    """Whether |rest| / quantum is more than word 2^-32, or equal, by integers of two words."""
    bits = float_to_bits(quantum)
    # A whole number and its fraction, in units in the last place of the quantum.
    scale = bits_to_float((2 * FLOAT32.bias + FLOAT32.fraction - (bits >> FLOAT32.fraction)) << FLOAT32.fraction)
    whole, fraction = _whole_and_fraction(jnp.abs(rest) * scale)
    upper, fraction = _whole_and_fraction(fraction * 2.0**16)
    lower, fraction = _whole_and_fraction(fraction * 2.0**16)
    significand = (bits & bit_ops.low_mask(FLOAT32.fraction) | 1 << FLOAT32.fraction).astype(jnp.uint32)
    high, low = _multiply_24_by_32_bits(significand, word)
    of_rest = (upper << 16 | lower).astype(jnp.uint32)
    whole = whole.astype(jnp.uint32)
    same = (whole == high) & (of_rest == low)
    more = (whole > high) | (whole == high) & (of_rest > low) | same & (fraction > 0)
    return more, same & (fraction == 0)


def _compare_share_by_halves(rest: Array, high: Array, low: Array, word: Array) -> tuple[Array, Array]:
    """`_compare_share_by_words` for a moderate quantum in two halves, in float64, for processors that have it.

    A word times a half is exact. If the sign is in doubt, the first difference is exact, too, because it has few bits.
    """
    with jax.enable_x64(True):
        rest, high, low, share = (value.astype(jnp.float64) for value in (jnp.abs(rest), high, low, word))
        difference = (rest * 2.0**32 - share * high) - share * low
        return difference > 0, difference == 0


def _whole_and_fraction(x: Array) -> tuple[Array, Array]:
    """A whole number below 2^25, and the fraction."""
    whole = x.astype(jnp.int32)
    return whole, x - whole.astype(jnp.float32)


def _multiply_24_by_32_bits(a: Array, b: Array) -> tuple[Array, Array]:
    """The product of 24 and 32 bits as two words."""
    a_low, a_high = a & 0xFFF, a >> 12

    def part(half: Array) -> tuple[Array, Array]:  # a times 16 bits: in units of 2^12, and the rest
        product = a_low * half
        return a_high * half + (product >> 12), product & 0xFFF

    (upper, upper_rest), (lower, lower_rest) = part(b >> 16), part(b & 0xFFFF)
    first, second = ((upper & 15) << 12 | upper_rest) << 16, lower << 12 | lower_rest
    low = first + second
    return (upper >> 4) + (lower >> 20) + (low < first).astype(jnp.uint32), low


# -- codes -------------------------------------------------------------------------------------------------------------


def encode_integers(whole: Array, plan: ScaledPlan) -> Array:
    """Quanta as codes."""
    fmt = plan.element.format
    return (whole & bit_ops.low_mask(fmt.bits)).astype(fmt.code_dtype)


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
    quanta = plan.backend.per_group(quanta_of(scales, plan, huge_too=False))
    product = whole.astype(jnp.float32) * quanta.value
    # Not if a branch returns the products, which writes them to memory.
    if not (_integer_products_are_exact(plan) or plan.in_safe_range):
        product = plan.backend.prevent_fma(product, quanta.value)
    return move_back_products(product, quanta)


def move_back_products(product: Array, quanta: GroupQuanta) -> Array:
    """Products of elements from 2^-30 on and quanta, rounded once to nearest even, without the move of the quanta.

    A subnormal product must be a multiple of the smallest number, or exact before the last rounding.
    """
    if quanta.tiny is None:
        return product
    # If 2^-TINY times the product is subnormal, it becomes a whole multiple of the smallest number.
    bits = float_to_bits(product)
    magnitude = bits_to_float(bits & bit_ops.low_mask(31))
    lead = 2.0**FLOAT32.fraction
    small = float_to_bits(magnitude * 2.0 ** (-FLOAT32.tiny_exponent - TINY_FACTOR_EXPONENT) + lead) - float_to_bits(
        jnp.float32(lead)
    )
    subnormal = bits_to_float(small | bits & FLOAT32.sign_bit)
    tiny_product = bit_ops.lax_where(
        magnitude < 2.0 ** (1 - FLOAT32.bias + TINY_FACTOR_EXPONENT), subnormal, product * 2.0**-TINY_FACTOR_EXPONENT
    )
    return bit_ops.lax_where(quanta.tiny, tiny_product, product)
