"""Integers with zero points: quotients plus integers, rounded once; and the scales and zero points of ranges.

A sum v = x / s + z is a whole number, a word of W bits that follow it, and a sticky bit. So the neighbours are whole
numbers, and every mode depends only on v; the parity of the sum decides ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic.exact import ExactResult, round_exact
from jchop._core.arithmetic.quotient import divisor_of, exact_quotient, significand_of_extended
from jchop._core.rounding import modes
from jchop._core.rounding.codes import extend_exponent
from jchop._core.rounding.modes import RandomBits, take_random_bits
from jchop._core.scaled.scales import (
    BlockScales,
    ScaledPlan,
    clamp_scale,
    largest_finite_magnitude,
    scale_magnitude,
    scale_rounding,
)
from jchop.formats import IntegerFormat

Array = jax.Array

#: Whole parts go up to 2^20, beyond all integers with zero points, so the fraction does not matter there.
_MOST_WHOLE_EXPONENT = 20
#: Bits of the limbs of a long division by an integer of up to 16 bits, and their number, by the width of a word.
_LIMB_SIZES = {32: (12, 6), 64: (44, 3)}


def _integer_format(plan: ScaledPlan) -> IntegerFormat:
    fmt = plan.element.format
    assert isinstance(fmt, IntegerFormat)
    return fmt


# -- rounding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _QuotientPlusZero(modes.DiscardedFraction):
    """|v| = low + (share + epsilon) 2^-W with 0 <= epsilon < 1; epsilon > 0 if `sticky`."""

    low: Array
    word: Array
    sticky: Array
    negative: Array
    draw: RandomBits | None

    @property
    def inexact(self) -> Array:
        return (self.word != 0) | self.sticky

    @property
    def odd(self) -> Array:
        return self.low & 1 != 0

    def share(self) -> tuple[Array, Array]:
        return self.word, self.sticky


def round_quotient_plus_zero(x: Array, scales: BlockScales, zero: Array, plan: ScaledPlan, word: Array | None) -> Array:
    """The sums x / s + z rounded once to whole numbers, not yet clamped to the ends of the element format.

    Args:
        x: numbers of the arithmetic's carrier.
        scales: the scales of the groups.
        zero: zero points, int32, of the shape of the scales.
        plan: a plan with an integer element.
        word: for a stochastic element, a word for each number.

    Returns:
        Integers of the carrier's work dtype; infinities and NaN become integers far outside.
    """
    compute = plan.compute
    sign, magnitude = bit_ops.split_sign(x, compute)
    whole, share, sticky = _divide_by_scales(sign, magnitude, scales, plan)
    total, share = floor_and_share(sign != 0, whole, share, sticky)
    sums = round_floor_and_share(total + zero.astype(total.dtype), share, sticky, plan, word)
    return specials_far_outside(sums, sign, magnitude, compute)


def round_floor_and_share(total: Array, share: Array, sticky: Array, plan: ScaledPlan, word: Array | None) -> Array:
    """Numbers rounded to whole numbers, given by their floor, the word that follows, and a sticky bit."""
    element = plan.element
    negative, inexact = total < 0, (share != 0) | sticky
    low, share = (
        bit_ops.lax_where(negative, -total - inexact, total),
        bit_ops.lax_where(negative, _complement_of_share(share, sticky), share),
    )
    v = _QuotientPlusZero(low, share, sticky, negative, take_random_bits(word, element, plan.compute))
    away = modes.AWAY_FROM_ZERO[element.rounding](v)
    whole = low + jnp.asarray(away).astype(low.dtype)
    return bit_ops.lax_where(negative, -whole, whole)


def specials_far_outside(wholes: Array, sign: Array, magnitude: Array, carrier: Carrier) -> Array:
    """Whole numbers, with numbers far outside for infinities and NaN."""
    far = jnp.full_like(wholes, 1 << _MOST_WHOLE_EXPONENT)
    beyond = bit_ops.lax_where((sign != 0) & (magnitude == carrier.inf), -far, far)
    return bit_ops.lax_where(magnitude >= carrier.inf, beyond, wholes)


def clamp_to_ends(wholes: Array, plan: ScaledPlan) -> Array:
    """Whole numbers within the ends of the element format."""
    fmt = _integer_format(plan)
    # Without the barrier LLVM takes ten seconds to derive bounds from these ends for all earlier operations.
    return bit_ops.lax_clip(lax.optimization_barrier(wholes), fmt.min_code, fmt.max_code)


def is_beyond_ends(x: Array, wholes: Array, plan: ScaledPlan) -> Array:
    """Whether results of `round_quotient_plus_zero` are beyond the ends; NaN counts as inside."""
    fmt = _integer_format(plan)
    return ((wholes < fmt.min_code) | (wholes > fmt.max_code)) & (
        bit_ops.split_sign(x, plan.compute)[1] <= plan.compute.inf
    )


def _divide_by_scales(
    sign: Array, magnitude: Array, scales: BlockScales, plan: ScaledPlan
) -> tuple[Array, Array, Array]:
    """|x| / s as a whole number, the word that follows, and a sticky bit."""
    compute = plan.compute
    plain = (magnitude != 0) & (magnitude < compute.inf)
    divisor = divisor_of(scale_magnitude(scales, plan), compute)
    whole, share, sticky = whole_and_share(exact_quotient(sign, magnitude, plain, divisor, compute), compute)
    return bit_ops.lax_where(plain, whole, 0), bit_ops.lax_where(plain, share, 0), sticky & plain


def whole_and_share(v: ExactResult, carrier: Carrier) -> tuple[Array, Array, Array]:
    """Whole number, word and sticky bit of normal numbers; from 2^_MOST on the whole number is too small."""
    fraction, width = carrier.fraction, carrier.work_width
    unsigned = v.rest.dtype
    exponent = (v.magnitude >> fraction) - carrier.bias
    leading = significand_of_extended(v.magnitude, carrier)
    # Numbers of at least 1: some of the significand's bits are whole.
    below = fraction - bit_ops.lax_clip(exponent, 0, min(_MOST_WHOLE_EXPONENT, fraction - 1))
    whole = leading >> below
    down = below.astype(unsigned)
    share = (leading.astype(unsigned) << (width - down)) | v.rest >> down
    tail = v.rest << (width - down) != 0
    # Numbers below 1: no bit is whole.
    word = leading.astype(unsigned) << (width - 1 - fraction) | v.rest >> (fraction + 1)
    small_tail = v.rest << (width - 1 - fraction) != 0
    right = bit_ops.lax_clip(-1 - exponent, 0, width - 1).astype(unsigned)
    small = bit_ops.lax_where(-1 - exponent < width, word >> right, 0)
    far = (-1 - exponent >= width) | (word >> right << right != word)
    less = exponent < 0
    sticky = v.sticky | bit_ops.lax_where(less, small_tail | far, tail)
    return bit_ops.lax_where(less, 0, whole), bit_ops.lax_where(less, small, share), sticky


def floor_and_share(negative: Array, whole: Array, share: Array, sticky: Array) -> tuple[Array, Array]:
    """floor(v) of v = +-(whole + share), and the word that follows it."""
    inexact = ((share != 0) | sticky).astype(whole.dtype)
    return bit_ops.lax_where(negative, -whole - inexact, whole), bit_ops.lax_where(
        negative, _complement_of_share(share, sticky), share
    )


def _complement_of_share(share: Array, sticky: Array) -> Array:
    """The word of 1 - (share + epsilon); 0 for 0."""
    return ~share + (~sticky).astype(share.dtype)


# -- ranges ------------------------------------------------------------------------------------------------------------


def fit_range(x: Array, axes: tuple[int, ...], plan: ScaledPlan) -> tuple[BlockScales, Array]:
    """Scales (max - min) / (M - m), the exact quotient rounded once, of ranges stretched to hold 0; and zero points.

    Args:
        x: numbers of the arithmetic's carrier.
        axes: the axes of a group.
        plan: a plan with an integer element.
    """
    compute, fmt = plan.compute, _integer_format(plan)
    sign, magnitude = bit_ops.split_sign(x, compute)
    top, low = (
        largest_finite_magnitude(bit_ops.lax_where(side, magnitude, 0), axes, plan) for side in (sign == 0, sign != 0)
    )
    quotient = round_exact(
        _divide_sum(top, low, fmt.max_code - fmt.min_code, compute), scale_rounding(plan), compute, None
    )
    value = clamp_scale(bit_ops.split_sign(quotient, compute)[1], (top | low) == 0, plan)[0]
    scales = BlockScales(value)
    return scales, _fit_zero_points(low, scales, plan)


def _fit_zero_points(low: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """clamp(m - rne(min / s)) for min = -low."""
    fmt = _integer_format(plan)
    whole, share, sticky = _divide_by_scales(jnp.zeros_like(low), low, scales, plan)
    quotient = _QuotientPlusZero(whole, share, sticky, whole < 0, None)
    nearest = whole + quotient.nearest(quotient.odd).astype(whole.dtype)
    return bit_ops.lax_clip(fmt.min_code + nearest, fmt.min_code, fmt.max_code).astype(jnp.int32)


def _divide_sum(a: Array, b: Array, divisor: int, carrier: Carrier) -> ExactResult:
    """(a + b) / divisor of magnitude bits, not both zero, in limbs of a long division."""
    fraction, width = carrier.fraction, carrier.work_width
    size, count = _LIMB_SIZES[width]
    place = size * count - 2 - fraction  # the place of the last bit of the larger one
    large, small = (extend_exponent(bits, carrier) for bits in (jnp.maximum(a, b), jnp.minimum(a, b)))
    field, gap = large >> fraction, (large >> fraction) - (small >> fraction)
    second = bit_ops.lax_where(jnp.minimum(a, b) == 0, 0, significand_of_extended(small, carrier))
    first, offset = significand_of_extended(large, carrier), place - gap
    shift = bit_ops.lax_clip(-offset, 0, fraction + 1)
    sticky = second >> shift << shift != second
    limbs, carry = [], jnp.zeros_like(a)
    for i in range(count):
        at = i * size
        digit = _limb_of_word(first, jnp.full_like(offset, place), at, size, width) + _limb_of_word(
            second, offset, at, size, width
        )
        digit = digit + carry
        carry = digit >> size
        limbs.append(digit & bit_ops.low_mask(size))
    digits, remainder = [], jnp.zeros_like(a)
    for limb in reversed(limbs):
        part = remainder << size | limb
        digit = jax.lax.div(part, jnp.full_like(part, divisor))
        remainder = part - digit * divisor
        digits.insert(0, digit)
    return _exact_of_digits(digits, sticky | (remainder != 0), field - fraction - place, divisor, carrier)


def _limb_of_word(value: Array, offset: Array, at: int, size: int, width: int) -> Array:
    """The bits [at, at + size) of value 2^offset, rounded down."""
    up, down = bit_ops.lax_clip(offset - at, 0, size), bit_ops.lax_clip(at - offset, 0, width - 1)
    return value << up >> down & bit_ops.low_mask(size)


def _exact_of_digits(digits: list[Array], sticky: Array, base: Array, divisor: int, carrier: Carrier) -> ExactResult:
    """The number with these digits, whose last place has the biased exponent `base`, as a number of the carrier."""
    fraction, width = carrier.fraction, carrier.work_width
    size, unsigned = _LIMB_SIZES[width][0], np.dtype(f"uint{width}")
    top = size * len(digits) - divisor.bit_length()  # the leading bit is here, or up to two places lower
    best: tuple[Array, ...] | None = None
    for lead in (top - 2, top - 1, top):
        leading = _digits_to_word(digits, lead - fraction, size, unsigned)
        rest = _digits_to_word(digits, lead - fraction - width, size, unsigned)
        low = lead - fraction - width  # the bits below this are sticky
        more = jnp.zeros_like(sticky)
        for i, digit in enumerate(digits):
            if low > i * size:
                more = more | (digit & bit_ops.low_mask(min(low - i * size, size)) != 0)
        here = (leading & bit_ops.low_mask(fraction + 1), rest, sticky | more, base + lead)
        reaches = leading >> fraction != 0
        old = here if best is None else best
        best = tuple(bit_ops.lax_where(reaches, *pair) for pair in zip(here, old, strict=True))
    assert best is not None
    leading, rest, sticky, field = best
    down = bit_ops.lax_clip(1 - field, 0, width - 1).astype(unsigned)  # into the subnormal range
    tail = rest >> down << down != rest
    magnitude = (leading >> down).astype(carrier.work) + (jnp.maximum(field - 1, 0) << fraction).astype(carrier.work)
    rest = leading << 1 << (width - 1 - down) | rest >> down
    sticky = sticky | tail
    magnitude = jnp.minimum(magnitude, carrier.inf - 1)
    return ExactResult(jnp.zeros_like(magnitude), magnitude, (rest != 0) | sticky, rest, sticky)


def _digits_to_word(digits: list[Array], low: int, size: int, unsigned: np.dtype) -> Array:
    """The number with these digits divided by 2^low, rounded down, modulo 2^W."""
    total, width = jnp.zeros(digits[0].shape, unsigned), unsigned.itemsize * 8
    for i, digit in enumerate(digits):
        up = i * size - low
        if -size < up < width:
            word = digit.astype(unsigned)
            total = total | (word << up if up >= 0 else word >> -up)
    return total
