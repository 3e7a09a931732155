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

from jchop import _bits
from jchop._bits import Carrier
from jchop._core.arithmetic.exact import Exact, round_exact
from jchop._core.arithmetic.quotient import divisor_of, exact_quotient, significand_of
from jchop._core.rounding import modes
from jchop._core.rounding.codes import extended
from jchop._core.rounding.modes import Draw, draw
from jchop._core.scaled.scales import Plan, Scales, largest_of, scale_magnitude, scale_rounding, settle
from jchop._core.xla_cpu import maximum
from jchop.formats import IntegerFormat

Array = jax.Array

#: Whole parts go up to 2^20, beyond all integers with zero points, so the fraction does not matter there.
_MOST = 20
#: Bits of the limbs of a long division by an integer of up to 16 bits, and their number, by the width of a word.
_LIMBS = {32: (12, 6), 64: (44, 3)}


def _integers(plan: Plan) -> IntegerFormat:
    fmt = plan.element.format
    assert isinstance(fmt, IntegerFormat)
    return fmt


# -- rounding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum(modes.Discarded):
    """|v| = low + (share + epsilon) 2^-W with 0 <= epsilon < 1; epsilon > 0 if `sticky`."""

    low: Array
    word: Array
    sticky: Array
    negative: Array
    draw: Draw | None

    @property
    def inexact(self) -> Array:
        return (self.word != 0) | self.sticky

    @property
    def odd(self) -> Array:
        return self.low & 1 != 0

    def share(self) -> tuple[Array, Array]:
        return self.word, self.sticky


def round_shifted(x: Array, scales: Scales, zero: Array, plan: Plan, word: Array | None) -> Array:
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
    sign, magnitude = _bits.split(x, compute)
    whole, share, sticky = _over(sign, magnitude, scales, plan)
    total, share = floor_of(sign != 0, whole, share, sticky)
    sums = round_sum(total + zero.astype(total.dtype), share, sticky, plan, word)
    return far_outside(sums, sign, magnitude, compute)


def round_sum(total: Array, share: Array, sticky: Array, plan: Plan, word: Array | None) -> Array:
    """Numbers rounded to whole numbers, given by their floor, the word that follows, and a sticky bit."""
    element = plan.element
    negative, inexact = total < 0, (share != 0) | sticky
    low, share = (
        _bits.where(negative, -total - inexact, total),
        _bits.where(negative, _complement(share, sticky), share),
    )
    v = _Sum(low, share, sticky, negative, draw(word, element, plan.compute))
    away = modes.AWAY_FROM_ZERO[element.rounding](v)
    whole = low + jnp.asarray(away).astype(low.dtype)
    return _bits.where(negative, -whole, whole)


def far_outside(wholes: Array, sign: Array, magnitude: Array, carrier: Carrier) -> Array:
    """Whole numbers, with numbers far outside for infinities and NaN."""
    far = jnp.full_like(wholes, 1 << _MOST)
    beyond = _bits.where((sign != 0) & (magnitude == carrier.inf), -far, far)
    return _bits.where(magnitude >= carrier.inf, beyond, wholes)


def clamp(wholes: Array, plan: Plan) -> Array:
    """Whole numbers within the ends of the element format."""
    fmt = _integers(plan)
    # Without the barrier LLVM takes ten seconds to derive bounds from these ends for all earlier operations.
    return _bits.clip(lax.optimization_barrier(wholes), fmt.min_code, fmt.max_code)


def beyond_ends(x: Array, wholes: Array, plan: Plan) -> Array:
    """Whether results of `round_quotient_plus_zero` are beyond the ends; NaN counts as inside."""
    fmt = _integers(plan)
    return ((wholes < fmt.min_code) | (wholes > fmt.max_code)) & (_bits.split(x, plan.compute)[1] <= plan.compute.inf)


def _over(sign: Array, magnitude: Array, scales: Scales, plan: Plan) -> tuple[Array, Array, Array]:
    """|x| / s as a whole number, the word that follows, and a sticky bit."""
    compute = plan.compute
    plain = (magnitude != 0) & (magnitude < compute.inf)
    divisor = divisor_of(scale_magnitude(scales, plan), compute)
    whole, share, sticky = parts_of(exact_quotient(sign, magnitude, plain, divisor, compute), compute)
    return _bits.where(plain, whole, 0), _bits.where(plain, share, 0), sticky & plain


def parts_of(v: Exact, carrier: Carrier) -> tuple[Array, Array, Array]:
    """Whole number, word and sticky bit of normal numbers; from 2^_MOST on the whole number is too small."""
    fraction, width = carrier.fraction, carrier.work_width
    unsigned = v.rest.dtype
    exponent = (v.magnitude >> fraction) - carrier.bias
    leading = significand_of(v.magnitude, carrier)
    # Numbers of at least 1: some of the significand's bits are whole.
    below = fraction - _bits.clip(exponent, 0, min(_MOST, fraction - 1))
    whole = leading >> below
    down = below.astype(unsigned)
    share = (leading.astype(unsigned) << (width - down)) | v.rest >> down
    tail = v.rest << (width - down) != 0
    # Numbers below 1: no bit is whole.
    word = leading.astype(unsigned) << (width - 1 - fraction) | v.rest >> (fraction + 1)
    small_tail = v.rest << (width - 1 - fraction) != 0
    right = _bits.clip(-1 - exponent, 0, width - 1).astype(unsigned)
    small = _bits.where(-1 - exponent < width, word >> right, 0)
    far = (-1 - exponent >= width) | (word >> right << right != word)
    less = exponent < 0
    sticky = v.sticky | _bits.where(less, small_tail | far, tail)
    return _bits.where(less, 0, whole), _bits.where(less, small, share), sticky


def floor_of(negative: Array, whole: Array, share: Array, sticky: Array) -> tuple[Array, Array]:
    """floor(v) of v = +-(whole + share), and the word that follows it."""
    inexact = ((share != 0) | sticky).astype(whole.dtype)
    return _bits.where(negative, -whole - inexact, whole), _bits.where(negative, _complement(share, sticky), share)


def _complement(share: Array, sticky: Array) -> Array:
    """The word of 1 - (share + epsilon); 0 for 0."""
    return ~share + (~sticky).astype(share.dtype)


# -- ranges ------------------------------------------------------------------------------------------------------------


def fit_range(x: Array, axes: tuple[int, ...], plan: Plan) -> tuple[Scales, Array]:
    """Scales (max - min) / (M - m), the exact quotient rounded once, of ranges stretched to hold 0; and zero points.

    Args:
        x: numbers of the arithmetic's carrier.
        axes: the axes of a group.
        plan: a plan with an integer element.
    """
    compute, fmt = plan.compute, _integers(plan)
    sign, magnitude = _bits.split(x, compute)
    top, low = (largest_of(_bits.where(side, magnitude, 0), axes, compute, maximum) for side in (sign == 0, sign != 0))
    quotient = round_exact(
        _sum_over(top, low, fmt.max_code - fmt.min_code, compute), scale_rounding(plan), compute, None
    )
    value = settle(_bits.split(quotient, compute)[1], (top | low) == 0, plan)[0]
    scales = Scales(value)
    return scales, _zero_points(low, scales, plan)


def _zero_points(low: Array, scales: Scales, plan: Plan) -> Array:
    """clamp(m - rne(min / s)) for min = -low."""
    fmt = _integers(plan)
    whole, share, sticky = _over(jnp.zeros_like(low), low, scales, plan)
    quotient = _Sum(whole, share, sticky, whole < 0, None)
    nearest = whole + quotient.nearest(quotient.odd).astype(whole.dtype)
    return _bits.clip(fmt.min_code + nearest, fmt.min_code, fmt.max_code).astype(jnp.int32)


def _sum_over(a: Array, b: Array, divisor: int, carrier: Carrier) -> Exact:
    """(a + b) / divisor of magnitude bits, not both zero, in limbs of a long division."""
    fraction, width = carrier.fraction, carrier.work_width
    size, count = _LIMBS[width]
    place = size * count - 2 - fraction  # the place of the last bit of the larger one
    large, small = (extended(bits, carrier) for bits in (jnp.maximum(a, b), jnp.minimum(a, b)))
    field, gap = large >> fraction, (large >> fraction) - (small >> fraction)
    second = _bits.where(jnp.minimum(a, b) == 0, 0, significand_of(small, carrier))
    first, offset = significand_of(large, carrier), place - gap
    shift = _bits.clip(-offset, 0, fraction + 1)
    sticky = second >> shift << shift != second
    limbs, carry = [], jnp.zeros_like(a)
    for i in range(count):
        at = i * size
        digit = _limb(first, jnp.full_like(offset, place), at, size, width) + _limb(second, offset, at, size, width)
        digit = digit + carry
        carry = digit >> size
        limbs.append(digit & _bits.low_mask(size))
    digits, remainder = [], jnp.zeros_like(a)
    for limb in reversed(limbs):
        part = remainder << size | limb
        digit = jax.lax.div(part, jnp.full_like(part, divisor))
        remainder = part - digit * divisor
        digits.insert(0, digit)
    return _normal(digits, sticky | (remainder != 0), field - fraction - place, divisor, carrier)


def _limb(value: Array, offset: Array, at: int, size: int, width: int) -> Array:
    """The bits [at, at + size) of value 2^offset, rounded down."""
    up, down = _bits.clip(offset - at, 0, size), _bits.clip(at - offset, 0, width - 1)
    return value << up >> down & _bits.low_mask(size)


def _normal(digits: list[Array], sticky: Array, base: Array, divisor: int, carrier: Carrier) -> Exact:
    """The number with these digits, whose last place has the biased exponent `base`, as a number of the carrier."""
    fraction, width = carrier.fraction, carrier.work_width
    size, unsigned = _LIMBS[width][0], np.dtype(f"uint{width}")
    top = size * len(digits) - divisor.bit_length()  # the leading bit is here, or up to two places lower
    best: tuple[Array, ...] | None = None
    for lead in (top - 2, top - 1, top):
        leading = _window(digits, lead - fraction, size, unsigned)
        rest = _window(digits, lead - fraction - width, size, unsigned)
        low = lead - fraction - width  # the bits below this are sticky
        more = jnp.zeros_like(sticky)
        for i, digit in enumerate(digits):
            if low > i * size:
                more = more | (digit & _bits.low_mask(min(low - i * size, size)) != 0)
        here = (leading & _bits.low_mask(fraction + 1), rest, sticky | more, base + lead)
        reaches = leading >> fraction != 0
        old = here if best is None else best
        best = tuple(_bits.where(reaches, *pair) for pair in zip(here, old, strict=True))
    assert best is not None
    leading, rest, sticky, field = best
    down = _bits.clip(1 - field, 0, width - 1).astype(unsigned)  # into the subnormal range
    tail = rest >> down << down != rest
    magnitude = (leading >> down).astype(carrier.work) + (jnp.maximum(field - 1, 0) << fraction).astype(carrier.work)
    rest = leading << 1 << (width - 1 - down) | rest >> down
    sticky = sticky | tail
    magnitude = jnp.minimum(magnitude, carrier.inf - 1)
    return Exact(jnp.zeros_like(magnitude), magnitude, (rest != 0) | sticky, rest, sticky)


def _window(digits: list[Array], low: int, size: int, unsigned: np.dtype) -> Array:
    """The number with these digits divided by 2^low, rounded down, modulo 2^W."""
    total, width = jnp.zeros(digits[0].shape, unsigned), unsigned.itemsize * 8
    for i, digit in enumerate(digits):
        up = i * size - low
        if -size < up < width:
            word = digit.astype(unsigned)
            total = total | (word << up if up >= 0 else word >> -up)
    return total
