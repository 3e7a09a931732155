"""Narrow floating-point elements under scales in exact floating-point arithmetic; for XLA, like `integers`.

Let 2^q be the spacing of the format at a magnitude. Adding 2^(q + F) rounds the magnitude to a multiple of 2^q, and the
difference of the bits counts the multiples. For a power-of-two scale the quotient's magnitude is exact. For another
scale it is guessed; then the side of the middle of its step on which the number lies decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.rounding.codes import extended
from jchop._core.scaled.scales import TENSOR_SCALE, Plan, Scales, scale_magnitude
from jchop._core.scaled_float32 import integers, products
from jchop._core.scaled_float32.integers import Quanta, number_of, word_of
from jchop._core.xla_cpu import materialize_per_group
from jchop.formats import FloatFormat
from jchop.rounding import Overflow, Rounding

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_FRACTION, _BIAS, _INF = _CARRIER.fraction, _CARRIER.bias, _CARRIER.inf
#: The element values are from 2^-30 to 2^20.
_LEAST, _MOST = 30, 20
#: Bits of the upper half of a significand.
_HALF = 12
#: Half of 2^-_SMALLEST times the last bit of a number from 2^-64 on is a normal number.
_SMALLEST = 38


def applies(plan: Plan) -> bool:
    """Whether `encode_floats` and `round_float_quotients` give the results of the exact way."""
    element, fmt = plan.element, plan.element.format
    if not (is_plain(plan) and clamps(plan)) or element.rounding is not Rounding.NEAREST_EVEN:
        return False
    assert isinstance(fmt, FloatFormat)
    if plan.is_power:
        return True
    # The bits of the middle of a step, times a block's scale if the tensor has one too, times half of the other scale.
    tensor_scale = plan.rule.tensor_scale
    other = plan.scale.frac_bits + 1 if tensor_scale else 0
    fits = fmt.frac_bits + 2 + other + _HALF <= _FRACTION + 1
    return fits and (not tensor_scale or _is_near_one(plan))


def _is_near_one(plan: Plan) -> bool:
    """Whether scales, and elements times scales, may be multiplied by any moved scale, and by its last bit."""
    fmt, scale = plan.element.format, plan.scale
    least = Fraction(scale.smallest) * min(Fraction(fmt.smallest or 1), 1)
    most = Fraction(scale.max) * max(Fraction(fmt.max), 1)
    return least >= Fraction(1, 1 << _SMALLEST) and most <= 1 << products.MOST


def multiplies(plan: Plan) -> bool:
    """Whether `multiply_floats_by_scales` gives the numbers of the exact way."""
    if not is_plain(plan):
        return False
    if plan.rule.tensor_scale:
        return _multiplies_twice(plan)
    return plan.carrier is _CARRIER or (_is_exact(plan) and _is_multiple(plan))


def _is_exact(plan: Plan) -> bool:
    """Whether products with scales need rounding only below the normal range."""
    fmt = plan.element.format
    assert isinstance(fmt, FloatFormat)
    return plan.is_power or fmt.frac_bits + plan.scale.frac_bits + 2 <= _FRACTION + 1


def _is_multiple(plan: Plan) -> bool:
    """Whether every product is a multiple of the smallest number."""
    smallest = Fraction(plan.scale.smallest) * Fraction(plan.element.format.smallest or 1)
    return smallest >= Fraction(2) ** _CARRIER.tiny_exponent


def _multiplies_twice(plan: Plan) -> bool:
    fmt, scale = plan.element.format, plan.scale
    assert isinstance(fmt, FloatFormat)
    ends = (scale.smallest * fmt.smallest, scale.max * fmt.max)
    within = all(2.0**-products.LEAST <= end <= 2.0**products.MOST for end in ends)
    return plan.carrier is _CARRIER and _is_exact(plan) and within


def clamps(plan: Plan) -> bool:
    """Whether numbers beyond the ends become the ends, and subnormal elements stay."""
    element = plan.element
    return (element.overflow is Overflow.SATURATE or element.format.saturates) and not element.flush


def is_plain(plan: Plan) -> bool:
    """Whether the elements are those of a narrow float format with subnormal numbers and signed zeros."""
    fmt = plan.element.format
    if plan.compute is not _CARRIER or not isinstance(fmt, FloatFormat) or not fmt.has_negative_zero:
        return False
    # With one bit of precision the parity of the exponent decides a tie.
    plain = fmt.subnormals and fmt.frac_bits > 0 and fmt.bits <= 16
    return plain and Fraction(1, 1 << _LEAST) <= Fraction(fmt.smallest) <= Fraction(fmt.max) <= 1 << _MOST


# -- rounding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A magnitude on the format's grid: 2^(q + F), its sum with the magnitude, and the exponent bits of the binade."""

    shift: Array
    total: Array
    exponent: Array

    def code(self, fmt: FloatFormat) -> Array:
        count = word_of(self.total) - word_of(self.shift)
        return count + ((self.exponent - _least_exponent(fmt)) >> (_FRACTION - fmt.frac_bits))

    @property
    def number(self) -> Array:
        return self.total - self.shift


def _least_exponent(fmt: FloatFormat) -> int:
    """Exponent bits of the smallest normal number."""
    return (fmt.emin + _BIAS) << _FRACTION


def _step(magnitude: Array, fmt: FloatFormat, below_middle: bool) -> _Step:
    """The multiple nearest to a magnitude; if `below_middle`, the multiple below the middle of its step."""
    exponent = jnp.maximum(word_of(magnitude) & _INF, _least_exponent(fmt))
    shift = exponent + ((_FRACTION - fmt.frac_bits) << _FRACTION)
    if below_middle:
        magnitude = magnitude - number_of(shift - ((_FRACTION + 1) << _FRACTION))
    return _Step(number_of(shift), magnitude + number_of(shift), exponent)


def encode(x: Array, scales: Scales, plan: Plan) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    fmt = _format(plan)
    sign, magnitude = _bits.split(x, _CARRIER)
    top = fmt.code_of(fmt.max)
    assert top is not None
    code = _saturated(_nearest(x, magnitude, scales, plan).code(fmt), top, magnitude, plan)
    return signed(code, sign, magnitude, fmt)


def signed(code: Array, sign: Array, magnitude: Array, fmt: FloatFormat) -> Array:
    """Codes of magnitudes with the signs of numbers; NaN has its code, or that of the largest number."""
    nan = fmt.code_of(math.nan)
    negative = lax.shift_right_logical(sign, jnp.full_like(sign, _CARRIER.width - fmt.bits))
    nan = fmt.code_of(fmt.max) if nan is None else nan
    return _bits.where(magnitude > _INF, nan, code | negative).astype(fmt.code_dtype)


def round_quotients(x: Array, scales: Scales, plan: Plan) -> Array:
    """The values of the codes of `encode_floats`, without the scales."""
    fmt = _format(plan)
    sign, magnitude = _bits.split(x, _CARRIER)
    number = _saturated(_nearest(x, magnitude, scales, plan).number, float(fmt.max), magnitude, plan)
    nan = math.nan if fmt.has_nan else float(fmt.max)
    return _bits.where(magnitude > _INF, nan, number_of(word_of(number) | sign))


def _format(plan: Plan) -> FloatFormat:
    fmt = plan.element.format
    assert isinstance(fmt, FloatFormat)
    return fmt


def _saturated(value: Array, top: float, magnitude: Array, plan: Plan) -> Array:
    value = jnp.minimum(value, top)
    return value if plan.in_safe_range else _bits.where(magnitude >= _INF, top, value)


def _nearest(x: Array, magnitude: Array, scales: Scales, plan: Plan) -> _Step:
    """The quotients' magnitudes on the grid; a magnitude too large for the format stays above its largest number."""
    if not plan.is_power:
        return _over_any(x, scales, plan)
    return (_over_safe_power if plan.in_safe_range else _over_power)(magnitude, scales, _format(plan))


def _over_power(magnitude: Array, scales: Scales, fmt: FloatFormat) -> _Step:
    exponent = scales.value
    # Zero, and numbers far larger than the scale, are clamped so that the field of the quotient does not overflow.
    most = (_INF - 1) + (jnp.minimum(exponent, 0) << _FRACTION)
    within = jnp.minimum(jnp.maximum(extended(magnitude, _CARRIER), -(_LEAST << _FRACTION)), most)
    bits = within - (exponent << _FRACTION)
    low, high = (word_of(jnp.float32(end)) for end in (2.0 ** -(_LEAST + 2), 2.0 ** (_MOST + 2)))
    return _step(number_of(_bits.clip(bits, low, high)), fmt, below_middle=False)


def _over_safe_power(magnitude: Array, scales: Scales, fmt: FloatFormat) -> _Step:
    """`_divide_floats_by_power` for safe scales: a product with 1 / s is exact, or far outside the format."""
    quotient = number_of(magnitude) * materialize_per_group(number_of((_BIAS - scales.value) << _FRACTION))
    return _step(_bits.where(quotient < float(fmt.max), quotient, float(fmt.max)), fmt, below_middle=False)


def _over_any(x: Array, scales: Scales, plan: Plan) -> _Step:
    fmt = _format(plan)
    divisor, high, low = _halves(scales, plan)
    divisor, inverse, high, low = integers.held((divisor, 1 / (high + low), high, low))
    numbers = number_of(word_of(integers.move(x, divisor)) & _bits.low_mask(_CARRIER.width - 1))
    guess = numbers * inverse
    guess = _bits.where(guess < float(fmt.max), guess, float(fmt.max))
    step = _step(guess, fmt, below_middle=True)
    middle = step.number + number_of(word_of(step.shift) - ((_FRACTION + 1) << _FRACTION))
    side = word_of((numbers - middle * high) - middle * low)
    up = side + (word_of(step.total) & 1) > 0
    return replace(step, total=number_of(word_of(step.total) + up))


def _halves(scales: Scales, plan: Plan) -> tuple[Quanta, Array, Array]:
    """The move of the numbers, and the moved scales as sums of two numbers of few bits."""
    if scales.tensor is None:
        divisor = integers.quanta_of(scales, plan)
        high = _upper(divisor.value)
        return divisor, high, divisor.value - high
    divisor = integers.move_bits(extended(scales.tensor, _CARRIER))
    own, high = number_of(scale_magnitude(scales, plan)), _upper(divisor.value)
    assert TENSOR_SCALE.frac_bits == _FRACTION
    return divisor, own * high, own * (divisor.value - high)


def _upper(x: Array) -> Array:
    return number_of(word_of(x) & ~_bits.low_mask(_FRACTION + 1 - _HALF))


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers_of(codes: Array, scales: Scales, plan: Plan) -> Array:
    """Codes times scales, if `multiply_floats_by_scales` applies."""
    return multiply_back(_decode(codes.astype(jnp.int32), _format(plan)), scales, plan)


def multiply_back(values: Array, scales: Scales, plan: Plan) -> Array:
    """Values of the format times scales, rounded once; float32.

    In a narrower carrier they are exact; rounding to it remains. If the tensor has a scale, the product with a block's
    scale is exact.
    """
    if scales.tensor is not None:
        own = number_of(materialize_per_group(scale_magnitude(scales, plan)))
        return products.times(values * own, scales.tensor)
    if not (_is_exact(plan) or plan.in_safe_range):
        return products.times(values, scale_magnitude(scales, plan))
    (divisor,) = integers.held((integers.quanta_of(scales, plan, huge_too=False),))
    return integers.times(values, divisor, prevent=not (_is_exact(plan) or plan.in_safe_range))


def _decode(codes: Array, fmt: FloatFormat) -> Array:
    width = fmt.bits - 1
    code = codes & _bits.low_mask(width)
    normal = (code << (_FRACTION - fmt.frac_bits)) + ((_BIAS - fmt.bias) << _FRACTION)
    small = word_of(code.astype(jnp.float32) * 2.0 ** (fmt.emin - fmt.frac_bits))
    bits = _bits.where(code < 1 << fmt.frac_bits, small, normal)
    if fmt.has_inf:
        bits = _bits.where(code == fmt.inf_code, _INF, bits)
    bits = bits | codes >> width << (_CARRIER.width - 1)
    if fmt.has_nan:
        last = fmt.max_code if fmt.inf_code is None else fmt.inf_code
        bits = _bits.where(code > last, _CARRIER.nan, bits)
    return number_of(bits)
