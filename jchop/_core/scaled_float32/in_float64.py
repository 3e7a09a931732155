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

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.arithmetic.float64 import LEAD, narrow, positive, spacing, wide, word_of
from jchop._core.rounding.modes import AWAY_FROM_ZERO, Between, Draw, draw
from jchop._core.scaled.scales import TENSOR_SCALE, Plan, Scales, scale_magnitude
from jchop._core.scaled_float32 import floats, integers
from jchop._core.xla_cpu import materialize_per_group
from jchop.formats import FloatFormat, UniformFormat
from jchop.rounding import Rounding

Array = jax.Array

_NARROW, _WIDE = CARRIERS["float32"], CARRIERS["float64"]
#: The most bits of scales. Then a quotient that is not half a multiple of the grid's spacing differs from it by more
#: than 2^-_SETTLED of the spacing.
_MOST_SCALE, _SETTLED = 30, 32


def applies(plan: Plan) -> bool:
    """Whether `encode_in_float64` and `round_in_float64` give the results of the exact way."""
    element, fmt = plan.element, plan.element.format
    if not plan.float64 or plan.compute is not _NARROW or _scale_bits(plan) > _MOST_SCALE:
        return False
    if element.rounding not in {*integers.NEAREST, *integers.DIRECTED, *integers.DRAWN}:
        return False
    return integers.is_plain(plan) if isinstance(fmt, UniformFormat) else floats.is_plain(plan) and floats.clamps(plan)


def _scale_bits(plan: Plan) -> int:
    own = 1 if plan.is_power else plan.scale.frac_bits + 1
    return own + TENSOR_SCALE.frac_bits + 1 if plan.rule.tensor_scale else own


def held(scales: Scales, plan: Plan) -> Scales:
    """Scales with a `pair` of divisors and inverses.

    One division of both gives the pair: a compiler repeats no division for each element, and one loop is compiled.
    """
    with jax.enable_x64(True):
        value = _scales(scales, plan)
        shape = (2, *value.shape)
        first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
        both = lax.broadcast_in_dim(value, shape, tuple(range(1, len(shape))))
        pair = _bits.where(first, both, 1.0) / _bits.where(first, 1.0, both)
        return replace(scales, nan=materialize_per_group(scales.nan), pair=(pair[0], pair[1]))


def _scales(scales: Scales, plan: Plan) -> Array:
    """Scales, times the quantum of integers and fixed point."""
    fmt, value = plan.element.format, scales.value
    value = value if value.dtype == jnp.float64 else positive(scale_magnitude(scales, plan))
    value = value if scales.tensor is None else value * positive(scales.tensor)
    places = fmt.frac_bits if isinstance(fmt, UniformFormat) else 0
    return value * 2.0**-places if places else value


def _pair(scales: Scales, plan: Plan) -> tuple[Array, Array]:
    if scales.pair is not None:
        return scales.pair
    value = _scales(scales, plan)
    return value, lax.div(np.float64(1), value)


# -- rounding ----------------------------------------------------------------------------------------------------------


def _settle(t: Array, lead: Array) -> Array:
    """Quotients rounded to the last place of sums with 2^-_SNAP_PLACES `FLOAT64_LEAD` times the grid's spacing."""
    return lax.sub(lax.add(t, lead), lead)


def _tie(u: Array, unit: Array | float, mode: Rounding) -> Array:
    """Numbers whose rounding to nearest even is the rounding of `u` in another nearest mode."""
    if mode is Rounding.NEAREST_EVEN:
        return u
    little = unit * (0.5 * 2.0**-_SETTLED)
    return u + _bits.where((u < 0) == (mode is Rounding.NEAREST_AWAY), -little, little)


def _round_whole(
    x: Array, scales: Scales, zero: Array | None, plan: Plan, word: Array | None
) -> tuple[Array, Array, Array]:
    """The sums x / s + z rounded once, in quanta of the element and within its ends.

    Returns:
        The sums; the sums without z, as numbers; and the scales.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, UniformFormat)
    nearest = mode in integers.NEAREST
    value, inverse = _pair(scales, plan)
    number = wide(x)
    # The signs of the scales are a zero that no compiler knows: quirk constants_of_sums_combined.
    none = lax.convert_element_type(_bits.by(lax.shift_right_logical, word_of(value), 63), jnp.float64)
    shift = 0 if zero is None else zero.astype(jnp.float64)
    top, bottom = (float(end) - shift for end in (fmt.max_code + (not nearest), fmt.min_code - (not nearest)))
    t = lax.mul(number, inverse)
    t = jnp.maximum(_bits.where(t < top, t, top), bottom)  # NaN counts as the largest number
    start = _bits.by(lax.add, none, LEAD)
    start = start if zero is None else shift + start
    if nearest:
        t = _settle(t, _bits.by(lax.add, none, LEAD * 2.0**-_SETTLED))
        t = t if mode is Rounding.NEAREST_EVEN else _tie(t + shift, 1, mode) - shift
        total = lax.add(t, start)
        return lax.convert_element_type(word_of(total), jnp.int32), lax.sub(total, start), value
    total = t + start
    near = total - start
    rest = number - near * value
    v = integers.Near(word_of(total).astype(jnp.int32), rest)
    random = draw(word, plan.element, _NARROW)
    if random is None:
        count = integers.DIRECTED[mode](v)
    else:
        count = integers.drawn(v, random, mode, lambda word: _compare(rest, value, word))
    count = _bits.clip(count, fmt.min_code, fmt.max_code)
    return count, (count if zero is None else count - zero).astype(jnp.float64), value


def _compare(rest: Array, step: Array, word: Array) -> tuple[Array, Array]:
    """Whether |rest| / step is more than word 2^-32, or equal.

    A word times half of a step is exact. If the sign is in doubt, the first difference is exact, too (Sterbenz).
    """
    high, low = _halves(step)
    share = word.astype(jnp.float64)
    difference = (jnp.abs(rest) * 2.0**32 - share * high) - share * low
    return difference > 0, difference == 0


def _halves(step: Array) -> tuple[Array, Array]:
    """Steps as sums of two numbers of few bits."""
    high = lax.bitcast_convert_type(word_of(step) & ~_bits.low_mask(_WIDE.fraction + 1 - _MOST_SCALE // 2), jnp.float64)
    return high, step - high


def _round_float(x: Array, scales: Scales, plan: Plan, word: Array | None) -> tuple[Array, Array, Array, Array]:
    """The magnitudes |x| / s rounded once to a float format whose exponents go on above its largest number.

    Returns:
        The rounded magnitudes as multiples of the spacing; the spacing; the magnitudes; and the scales.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, FloatFormat)
    nearest = mode in integers.NEAREST
    (value, inverse), number = _pair(scales, plan), jnp.abs(wide(x))
    t = number * inverse
    t = _bits.where(t < float(fmt.max), t, float(fmt.max))
    unit = spacing(t, fmt)
    lead = unit * LEAD
    total = (_tie(_settle(t, lead * 2.0**-_SETTLED), unit, mode) if nearest else t) + lead
    count, near = (word_of(total) - word_of(lead)).astype(jnp.int32), total - lead
    if nearest:
        return count, unit, near, value
    rest, step = number - near * value, unit * value
    under, inexact = rest < 0, rest != 0
    lower = _bits.where(under, rest + step, rest)
    tail = _Rest(
        lower, step, inexact, integers.word_of(x) < 0, (count - under) & 1 != 0, draw(word, plan.element, _NARROW)
    )
    away = AWAY_FROM_ZERO[mode](tail)
    move = jnp.asarray(away).astype(jnp.int32) - under
    return count + move, unit, near + move * unit, value


@dataclass(frozen=True)
class _Rest(Between):
    """A magnitude minus its neighbour nearer to zero, and the distance of the neighbours, both times the scale."""

    rest: Array
    step: Array
    inexact: Array
    negative: Array
    odd: Array
    draw: Draw | None

    def stochastic(self) -> Array:
        """Whether the discarded fraction nu is at least 1 - R 2^-32."""
        assert self.draw is not None
        more, equal = _compare(self.rest, self.step, jnp.uint32(0) - self.draw.word)
        return (more | equal) & (self.draw.word != 0)


# -- results -----------------------------------------------------------------------------------------------------------


def codes_of(x: Array, scales: Scales, plan: Plan, word: Array | None, zero: Array | None = None) -> Array:
    """The codes of x / s, plus integer zero points if there are any, rounded once to the element format."""
    with jax.enable_x64(True):
        fmt = plan.element.format
        if isinstance(fmt, UniformFormat):
            return integers.encode_whole(_round_whole(x, scales, zero, plan, word)[0], plan)
        assert isinstance(fmt, FloatFormat)
        count, unit, *_ = _round_float(x, scales, plan, word)
        binade = (word_of(unit) >> _WIDE.fraction).astype(jnp.int32) - (_WIDE.bias + fmt.emin - fmt.frac_bits)
        top = fmt.code_of(fmt.max)
        assert top is not None
        code = jnp.minimum(count + (binade << fmt.frac_bits), top)
        return floats.signed(code, *_bits.split(x, _NARROW), fmt)


def rounded(x: Array, scales: Scales, plan: Plan, word: Array | None, zero: Array | None = None) -> Array:
    """The numbers of the codes of `encode_in_float64`, rounded once to float32."""
    with jax.enable_x64(True):
        fmt = plan.element.format
        if isinstance(fmt, UniformFormat):
            _, number, value = _round_whole(x, scales, zero, plan, word)
            return narrow(lax.mul(number, value))
        _, _, number, value = _round_float(x, scales, plan, word)
        product = narrow(jnp.minimum(number, float(fmt.max)) * value)
        sign, magnitude = _bits.split(x, _NARROW)
        nan = magnitude > _NARROW.inf
        bits = integers.word_of(product) | _bits.where(nan, 0, sign)
        return integers.number_of(_bits.where(nan, _NARROW.nan, bits) if fmt.has_nan else bits)
