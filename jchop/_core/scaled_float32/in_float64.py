"""Elements under scales in float64 arithmetic, for programs of one CPU; with the bits of `integers` and `floats`.

A product with 1 / s in float64, settled as in `arithmetic.float64`, is the quotient x / s where the nearest element is
decided. One addition then rounds it to the grid of the format. A number minus its neighbour times s is exact, and
decides all other modes. Scales are not moved towards 1, so there are no cases: this is half as many operations as the
exact float32 arithmetic has. But each takes twice as long, so it is for small arrays (`dispatch.MOST_IN_FLOAT64`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32, FLOAT64
from jchop._core.arithmetic.float64 import (
    FLOAT64_LEAD,
    double_to_bits,
    format_spacing,
    narrow_float64,
    widen_float32,
    widen_magnitude,
)
from jchop._core.rounding.modes import AWAY_FROM_ZERO, BetweenNeighbours, RandomBits, take_random_bits
from jchop._core.scaled.scales import TENSOR_SCALE, BlockScales, ScaledPlan, scale_magnitude
from jchop._core.scaled_float32 import floats, integers
from jchop.formats import FloatFormat, UniformFormat
from jchop.formats.rounding import Rounding

Array = jax.Array

#: The most bits of scales. Then a quotient that is not half a multiple of the grid's spacing differs from it by more
#: than 2^-_SETTLED of the spacing.
_MOST_SCALE_BITS, _SNAP_PLACES = 30, 32


def supports_float64_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_in_float64` and `round_in_float64` give the results of the exact way, in float64."""
    element, fmt = plan.element, plan.element.format
    if plan.compute is not FLOAT32 or _bits_of_scales(plan) > _MOST_SCALE_BITS:
        return False
    if element.rounding not in {*integers.NEAREST_INCREMENTS, *integers.DIRECTIONAL_MODES, *integers.STOCHASTIC_MODES}:
        return False
    return (
        integers.has_plain_integers(plan)
        if isinstance(fmt, UniformFormat)
        else floats.has_plain_floats(plan) and floats.clamps_overflow(plan)
    )


def _bits_of_scales(plan: ScaledPlan) -> int:
    own = 1 if plan.is_power else plan.scale.frac_bits + 1
    return own + TENSOR_SCALE.frac_bits + 1 if plan.rule.tensor_scale else own


def materialize_scale_pairs(scales: BlockScales, plan: ScaledPlan) -> BlockScales:
    """Scales with a `pair` of divisors and inverses.

    One division of both gives the pair: a compiler repeats no division for each element, and one loop is compiled.
    """
    with jax.enable_x64(True):
        value = _scales_in_float64(scales, plan)
        shape = (2, *value.shape)
        first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
        both = lax.broadcast_in_dim(value, shape, tuple(range(1, len(shape))))
        pair = bit_ops.lax_where(first, both, 1.0) / bit_ops.lax_where(first, 1.0, both)
        return replace(scales, nan=plan.backend.per_group(scales.nan), pair=(pair[0], pair[1]))


def _scales_in_float64(scales: BlockScales, plan: ScaledPlan) -> Array:
    """Scales, times the quantum of integers and fixed point."""
    fmt, value = plan.element.format, scales.value
    value = value if value.dtype == jnp.float64 else widen_magnitude(scale_magnitude(scales, plan))
    value = value if scales.tensor is None else value * widen_magnitude(scales.tensor)
    places = fmt.frac_bits if isinstance(fmt, UniformFormat) else 0
    return value * 2.0**-places if places else value


def _scales_and_inverses(scales: BlockScales, plan: ScaledPlan) -> tuple[Array, Array]:
    if scales.pair is not None:
        return scales.pair
    value = _scales_in_float64(scales, plan)
    return value, lax.div(np.float64(1), value)


# -- rounding ----------------------------------------------------------------------------------------------------------


def _snap_to_spacing(t: Array, lead: Array) -> Array:
    """Quotients rounded to the last place of sums with 2^-_SNAP_PLACES `FLOAT64_LEAD` times the grid's spacing."""
    return lax.sub(lax.add(t, lead), lead)


def _shift_ties(u: Array, unit: Array | float, mode: Rounding) -> Array:
    """Numbers whose rounding to nearest even is the rounding of `u` in another nearest mode."""
    if mode is Rounding.NEAREST_EVEN:
        return u
    little = unit * (0.5 * 2.0**-_SNAP_PLACES)
    return u + bit_ops.lax_where((u < 0) == (mode is Rounding.NEAREST_AWAY), -little, little)


def _round_integers_in_float64(
    x: Array, scales: BlockScales, zero: Array | None, plan: ScaledPlan, word: Array | None
) -> tuple[Array, Array, Array]:
    """The sums x / s + z rounded once, in quanta of the element and within its ends.

    Returns:
        The sums; the sums without z, as numbers; and the scales.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, UniformFormat)
    nearest = mode in integers.NEAREST_INCREMENTS
    value, inverse = _scales_and_inverses(scales, plan)
    number = widen_float32(x)
    # The signs of the scales are a zero that no compiler knows: quirk constants_of_sums_combined.
    none = lax.convert_element_type(
        bit_ops.with_constant(lax.shift_right_logical, double_to_bits(value), 63), jnp.float64
    )
    shift = 0 if zero is None else zero.astype(jnp.float64)
    top, bottom = (float(end) - shift for end in (fmt.max_code + (not nearest), fmt.min_code - (not nearest)))
    t = lax.mul(number, inverse)
    t = jnp.maximum(bit_ops.lax_where(t < top, t, top), bottom)  # NaN counts as the largest number
    start = bit_ops.with_constant(lax.add, none, FLOAT64_LEAD)
    start = start if zero is None else shift + start
    if nearest:
        t = _snap_to_spacing(t, bit_ops.with_constant(lax.add, none, FLOAT64_LEAD * 2.0**-_SNAP_PLACES))
        t = t if mode is Rounding.NEAREST_EVEN else _shift_ties(t + shift, 1, mode) - shift
        total = lax.add(t, start)
        return lax.convert_element_type(double_to_bits(total), jnp.int32), lax.sub(total, start), value
    total = t + start
    near = total - start
    rest = number - near * value
    v = integers.NearWhole(double_to_bits(total).astype(jnp.int32), rest)
    random = take_random_bits(word, plan.element, FLOAT32)
    if random is None:
        count = integers.DIRECTIONAL_MODES[mode](v)
    else:
        count = integers.round_stochastically(
            v, random, mode, lambda word: _compare_share_in_float64(rest, value, word)
        )
    count = bit_ops.lax_clip(count, fmt.min_code, fmt.max_code)
    return count, (count if zero is None else count - zero).astype(jnp.float64), value


def _compare_share_in_float64(rest: Array, step: Array, word: Array) -> tuple[Array, Array]:
    """Whether |rest| / step is more than word 2^-32, or equal.

    A word times half of a step is exact. If the sign is in doubt, the first difference is exact, too (Sterbenz).
    """
    high, low = _halves_of_step(step)
    share = word.astype(jnp.float64)
    difference = (jnp.abs(rest) * 2.0**32 - share * high) - share * low
    return difference > 0, difference == 0


def _halves_of_step(step: Array) -> tuple[Array, Array]:
    """Steps as sums of two numbers of few bits."""
    high = lax.bitcast_convert_type(
        double_to_bits(step) & ~bit_ops.low_mask(FLOAT64.fraction + 1 - _MOST_SCALE_BITS // 2), jnp.float64
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
    nearest = mode in integers.NEAREST_INCREMENTS
    (value, inverse), number = _scales_and_inverses(scales, plan), jnp.abs(widen_float32(x))
    t = number * inverse
    t = bit_ops.lax_where(t < float(fmt.max), t, float(fmt.max))
    unit = format_spacing(t, fmt)
    lead = unit * FLOAT64_LEAD
    total = (_shift_ties(_snap_to_spacing(t, lead * 2.0**-_SNAP_PLACES), unit, mode) if nearest else t) + lead
    count, near = (double_to_bits(total) - double_to_bits(lead)).astype(jnp.int32), total - lead
    if nearest:
        return count, unit, near, value
    rest, step = number - near * value, unit * value
    under, inexact = rest < 0, rest != 0
    lower = bit_ops.lax_where(under, rest + step, rest)
    tail = _FloatRest(
        lower,
        step,
        inexact,
        integers.float_to_bits(x) < 0,
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
        more, equal = _compare_share_in_float64(self.rest, self.step, jnp.uint32(0) - self.draw.word)
        return (more | equal) & (self.draw.word != 0)


# -- results -----------------------------------------------------------------------------------------------------------


def encode_in_float64(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None, zero: Array | None = None
) -> Array:
    """The codes of x / s, plus integer zero points if there are any, rounded once to the element format."""
    with jax.enable_x64(True):
        fmt = plan.element.format
        if isinstance(fmt, UniformFormat):
            return integers.encode_integers(_round_integers_in_float64(x, scales, zero, plan, word)[0], plan)
        assert isinstance(fmt, FloatFormat)
        count, unit, *_ = _round_floats_in_float64(x, scales, plan, word)
        binade = (double_to_bits(unit) >> FLOAT64.fraction).astype(jnp.int32) - (
            FLOAT64.bias + fmt.emin - fmt.frac_bits
        )
        top = fmt.code_of(fmt.max)
        assert top is not None
        code = jnp.minimum(count + (binade << fmt.frac_bits), top)
        return floats.sign_codes(code, *bit_ops.split_sign(x, FLOAT32), fmt)


def round_in_float64(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None, zero: Array | None = None
) -> Array:
    """The numbers of the codes of `encode_in_float64`, rounded once to float32."""
    with jax.enable_x64(True):
        fmt = plan.element.format
        if isinstance(fmt, UniformFormat):
            _, number, value = _round_integers_in_float64(x, scales, zero, plan, word)
            return narrow_float64(lax.mul(number, value))
        _, _, number, value = _round_floats_in_float64(x, scales, plan, word)
        product = narrow_float64(jnp.minimum(number, float(fmt.max)) * value)
        sign, magnitude = bit_ops.split_sign(x, FLOAT32)
        nan = magnitude > FLOAT32.inf
        bits = integers.float_to_bits(product) | bit_ops.lax_where(nan, 0, sign)
        return integers.bits_to_float(bit_ops.lax_where(nan, FLOAT32.nan, bits) if fmt.has_nan else bits)
