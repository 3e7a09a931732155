"""Elements under scales in float64 arithmetic, for programs of one CPU; with the bits of `integers` and `floats`.

A float32 number has 24 bits, and a scale has at most `_MOST_SCALE`. So x / s is a number of few bits, or it differs
from each such number by much more than the error of a product with 1 / s in float64. To add and subtract a large number
removes that error (`_settle`); then the sum with another one is the quotient on the grid of the format. A number minus
its neighbour times s is exact. So divisions that a compiler replaces, and products that it contracts, change no bit.
Scales need not be moved towards 1. But float32 numbers below the normal range, which are read and written as zero, are
converted by their bits, unless all scales are known to be far above them (`Plan.in_safe_range`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.rounding.codes import extended
from jchop._core.rounding.modes import draw
from jchop._core.scaled.scales import TENSOR_SCALE, Plan, Scales, scale_magnitude
from jchop._core.scaled_float32 import floats, integers
from jchop._core.scaled_float32.integers import Near, number_of, word_of
from jchop._core.xla_cpu import materialize_per_group
from jchop.formats import FloatFormat, UniformFormat
from jchop.rounding import Overflow, Rounding

Array = jax.Array

_NARROW, _WIDE = CARRIERS["float32"], CARRIERS["float64"]
_MORE = _WIDE.fraction - _NARROW.fraction
#: The most bits of scales. Then a quotient that is not half a multiple of the grid's spacing differs from it by more
#: than 2^-_SETTLED of the spacing.
_MOST_SCALE, _SETTLED = 30, 32
#: The last place of a sum with 2^52 times a number is the number; the half keeps signed sums in one binade.
_LEAD = 1.5 * 2.0**_WIDE.fraction
#: No subnormal number has an effect on nearest rounding under such a scale, and no product is subnormal.
_SAFE = -64
#: The fewest numbers for a branch on that; with fewer the second side costs more to compile than the first one saves.
LEAST_TO_BRANCH = 1 << 16


def _in_float64(fun: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fun)
    def run(*args: Any, **keywords: Any) -> Any:
        with jax.enable_x64(True):
            return fun(*args, **keywords)

    return run


def applies(plan: Plan) -> bool:
    """Whether `codes_of` and `rounded` give the results of the exact way."""
    element, fmt = plan.element, plan.element.format
    if not plan.float64 or plan.compute is not _NARROW or _scale_bits(plan) > _MOST_SCALE:
        return False
    known = element.rounding in {*integers.NEAREST, *integers.DIRECTED, *integers.DRAWN}
    if isinstance(fmt, UniformFormat):
        return known and integers.is_plain(plan)
    saturates = element.overflow is Overflow.SATURATE or getattr(fmt, "saturates", False)
    return known and floats.is_plain(plan) and saturates and not element.flush


def _scale_bits(plan: Plan) -> int:
    own = 1 if plan.is_power else plan.scale.frac_bits + 1
    return own + TENSOR_SCALE.frac_bits + 1 if plan.rule.tensor_scale else own


# -- numbers -----------------------------------------------------------------------------------------------------------


def _wide(x: Array, *, exact: bool) -> Array:
    """float32 numbers in float64. Unless `exact`, subnormal numbers are zero."""
    wide = x.astype(jnp.float64)
    if not exact:
        return wide
    bits = word_of(x)
    magnitude = bits & _bits.low_mask(31)
    count = jnp.where(bits < 0, -magnitude, magnitude).astype(jnp.float64)
    return jnp.where(magnitude < 1 << _NARROW.fraction, count * 2.0**_NARROW.tiny_exponent, wide)


def _narrow(x: Array, *, exact: bool) -> Array:
    """Numbers rounded to float32, to nearest even. Unless `exact`, no result but zero may be subnormal."""
    narrow = x.astype(jnp.float32)
    if not exact:
        return narrow
    magnitude, bits = jnp.abs(x), word_of(narrow)
    # The last places of this sum count multiples of the smallest number.
    count = _word(magnitude * 2.0**-_NARROW.tiny_exponent + 2.0**_WIDE.fraction).astype(jnp.int32)
    small = count | bits & _NARROW.sign_bit
    return number_of(jnp.where(magnitude < 2.0 ** (1 - _NARROW.bias), small, bits))


def _word(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int64)


def _number(bits: Array) -> Array:
    """Positive numbers from the extended magnitude bits of float32."""
    word = bits.astype(jnp.int64) + (_WIDE.bias - _NARROW.bias << _NARROW.fraction) << _MORE
    return lax.bitcast_convert_type(word, jnp.float64)


# -- scales ------------------------------------------------------------------------------------------------------------


def _scales(scales: Scales, plan: Plan) -> tuple[Array, Array]:
    """Scales, times the quantum of integers and fixed point, and their inverses; computed once for each group."""
    fmt = plan.element.format
    value = _number(extended(scale_magnitude(scales, plan), _NARROW))
    if scales.tensor is not None:
        value = value * _number(extended(scales.tensor, _NARROW))
    if isinstance(fmt, UniformFormat):
        value = value * 2.0**-fmt.frac_bits
    return materialize_per_group((value, 1 / value))


def is_safe(scales: Scales, plan: Plan) -> Array:
    """Whether all scales are far above the subnormal range."""
    bits = extended(scale_magnitude(scales, plan), _NARROW)
    if scales.tensor is not None:
        bits = bits + (extended(scales.tensor, _NARROW) - (_NARROW.bias << _NARROW.fraction))
    return jnp.all(bits >= _NARROW.bias + _SAFE + _places(plan) << _NARROW.fraction)


def always_safe(plan: Plan) -> bool:
    """Whether no scale of the format can be close to the subnormal range."""
    return not plan.rule.tensor_scale and Fraction(plan.scale.smallest) >= Fraction(2) ** (_SAFE + _places(plan))


def _places(plan: Plan) -> int:
    fmt = plan.element.format
    return fmt.frac_bits if isinstance(fmt, UniformFormat) else 0


def _exact(plan: Plan) -> bool:
    """Whether subnormal numbers and products have an effect."""
    return not (plan.in_safe_range or always_safe(plan))


# -- rounding ----------------------------------------------------------------------------------------------------------


def _settle(t: Array, unit: Array | float) -> Array:
    """Quotients without the error of their computation, if they are multiples of half the unit."""
    lead = unit * (_LEAD * 2.0**-_SETTLED)
    return (t + lead) - lead


def _tie(u: Array, unit: Array | float, mode: Rounding) -> Array:
    """Numbers whose rounding to nearest even is the rounding of `u` in another nearest mode."""
    if mode is Rounding.NEAREST_EVEN:
        return u
    little = unit * (0.5 * 2.0**-_SETTLED)
    return u + jnp.where((u < 0) == (mode is Rounding.NEAREST_AWAY), -little, little)


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
    value, inverse = _scales(scales, plan)
    shift = jnp.float64(0) if zero is None else zero.astype(jnp.float64)
    top, bottom = (end - shift for end in (fmt.max_code + (not nearest), fmt.min_code - (not nearest)))
    # Sums with constants would be combined.
    one, lifted = materialize_per_group((jnp.float64(1), shift + _LEAD))
    wide = _wide(x, exact=_exact(plan) or not nearest)
    t = wide * inverse
    t = jnp.where(t < top, t, top)  # NaN counts as the largest number
    t = jnp.where(t > bottom, t, bottom)
    if nearest:
        t = _settle(t, one)
        t = t if mode is Rounding.NEAREST_EVEN else _tie(t + shift, one, mode) - shift
        total = t + lifted
        return _word(total).astype(jnp.int32), total - lifted, value
    total = t + lifted
    near = total - lifted
    rest = wide - near * value
    v = Near(_word(total).astype(jnp.int32), rest)
    random = draw(word, plan.element, _NARROW)
    if random is None:
        count = integers.DIRECTED[mode](v)
    else:
        count = integers.drawn(v, random, mode, lambda word: _compare(rest, value, word))
    count = jnp.clip(count, fmt.min_code, fmt.max_code)
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
    high = lax.bitcast_convert_type(_word(step) & ~_bits.low_mask(_WIDE.fraction + 1 - _MOST_SCALE // 2), jnp.float64)
    return high, step - high


def _round_float(x: Array, scales: Scales, plan: Plan, word: Array | None) -> tuple[Array, Array, Array, Array]:
    """The magnitudes |x| / s rounded once to a float format whose exponents go on above its largest number.

    Returns:
        The rounded magnitudes as multiples of the spacing; the spacing; the magnitudes; and the scales.
    """
    fmt, mode = plan.element.format, plan.element.rounding
    assert isinstance(fmt, FloatFormat)
    nearest = mode in integers.NEAREST
    value, inverse = _scales(scales, plan)
    wide = _wide(number_of(word_of(x) & _bits.low_mask(31)), exact=_exact(plan) or not nearest)
    t = wide * inverse
    t = jnp.where(t < float(fmt.max), t, float(fmt.max))
    power = lax.bitcast_convert_type(_word(t) & _WIDE.inf, jnp.float64)
    unit = jnp.maximum(power, 2.0**fmt.emin) * 2.0**-fmt.frac_bits
    lead = unit * _LEAD
    total = (_tie(_settle(t, unit), unit, mode) if nearest else t) + lead
    count, near = (_word(total) - _word(lead)).astype(jnp.int32), total - lead
    if nearest:
        return count, unit, near, value
    rest, step = wide - near * value, unit * value
    under, inexact = rest < 0, rest != 0
    random = draw(word, plan.element, _NARROW)
    if random is None:
        away = _AWAY[mode](inexact, word_of(x) < 0, (count - under) & 1 != 0)
    elif mode is Rounding.STOCHASTIC_EQUAL:
        away = inexact & _bits.top_bit(random.word)
    else:  # nu >= 1 - R 2^-32
        more, equal = _compare(jnp.where(under, rest + step, rest), step, jnp.uint32(0) - random.word)
        away = (more | equal) & (random.word != 0)
    move = jnp.asarray(away).astype(jnp.int32) - under
    return count + move, unit, near + move * unit, value


#: Whether directed modes take the neighbour away from zero: by whether a number is inexact, whether it is negative, and
#: whether the last bit of the neighbour nearer to zero is 1.
_AWAY: dict[Rounding, Callable[[Array, Array, Array], Array]] = {
    Rounding.UP: lambda inexact, negative, odd: inexact & ~negative,
    Rounding.DOWN: lambda inexact, negative, odd: inexact & negative,
    Rounding.TOWARD_ZERO: lambda inexact, negative, odd: jnp.zeros_like(inexact),
    Rounding.ODD: lambda inexact, negative, odd: inexact & ~odd,
}


# -- results -----------------------------------------------------------------------------------------------------------


@_in_float64
def codes_of(x: Array, scales: Scales, plan: Plan, word: Array | None, zero: Array | None = None) -> Array:
    """The codes of x / s, plus integer zero points if there are any, rounded once to the element format."""
    fmt = plan.element.format
    if isinstance(fmt, UniformFormat):
        return integers.encode_whole(_round_whole(x, scales, zero, plan, word)[0], plan)
    assert isinstance(fmt, FloatFormat)
    count, unit, *_ = _round_float(x, scales, plan, word)
    binade = (_word(unit) >> _WIDE.fraction).astype(jnp.int32) - (_WIDE.bias + fmt.emin - fmt.frac_bits)
    top, nan = fmt.code_of(fmt.max), fmt.code_of(math.nan)
    assert top is not None
    code = jnp.minimum(count + (binade << fmt.frac_bits), top)
    sign, magnitude = _bits.split(x, _NARROW)
    code = code | lax.shift_right_logical(sign, jnp.full_like(sign, _NARROW.width - fmt.bits))
    return jnp.where(magnitude > _NARROW.inf, top if nan is None else nan, code).astype(fmt.code_dtype)


@_in_float64
def rounded(x: Array, scales: Scales, plan: Plan, word: Array | None, zero: Array | None = None) -> Array:
    """The numbers of the codes of `codes_of`, rounded once to float32."""
    fmt = plan.element.format
    if isinstance(fmt, UniformFormat):
        _, number, value = _round_whole(x, scales, zero, plan, word)
        return _narrow(number * value, exact=_exact(plan))
    _, _, number, value = _round_float(x, scales, plan, word)
    product = _narrow(jnp.minimum(number, float(fmt.max)) * value, exact=_exact(plan))
    sign, magnitude = _bits.split(x, _NARROW)
    nan = magnitude > _NARROW.inf
    bits = word_of(product) | jnp.where(nan, 0, sign)
    return number_of(jnp.where(nan, _NARROW.nan, bits) if fmt.has_nan else bits)
