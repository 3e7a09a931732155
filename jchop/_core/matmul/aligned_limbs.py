"""The fused dot-add of a tensor core: terms cut to one grid, summed exactly, and rounded once.

A block of products and the accumulator c are aligned to the largest exponent M of all terms. The bits below 2^(M - F)
are dropped, so every term is a whole number of units of 2^(M - F). Their sum is an integer, held in one word of 32 bits
if that is enough, else in two limbs h 2^24 + l. Definition: microsoft/MMA-Sim and arXiv 2511.10909.

All arithmetic is float32 and int32. Products of operands of at most 12 bits are exact floats; multiplied by a power of
two they are cut by the conversion to an integer. Other products are integers of 48 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.arithmetic.exact import ExactResult, round_exact
from jchop._core.matmul.aligned import (
    EXTRA_SUM_BITS,
    LEAST_PRODUCT_EXPONENT,
    MOST_WORD_BITS,
    TensorCoreUnit,
    is_float32_grid,
)
from jchop._core.rounding import modes
from jchop._core.rounding.modes import RandomBits, take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat
from jchop.formats.rounding import Overflow, Rounding

__all__ = ["LimbFactors", "fused_add_limbs", "limb_factors", "merge_terms"]

Array = jax.Array

_LIMB = 24
_LIMB_MASK = (1 << _LIMB) - 1
#: The exponent of a zero factor: its products are never the largest.
_ZERO_EXPONENT = -(1 << 14)


# -- factors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LimbFactors:
    """Numbers s 2^exponent with 1 <= |s| < 2, or less at the least exponent; s may be infinite or NaN."""

    significand: Array
    exponent: Array
    count: Array | None = None  # |s| 2^23, if products are integers


jax.tree_util.register_dataclass(LimbFactors, ["significand", "exponent", "count"], [])


def limb_factors(x: Array, unit: TensorCoreUnit, scales: Array | None = None) -> LimbFactors:
    """The parts of float32 operands, or of elements and the scales of each."""
    s, e = _significands_and_exponents(x, unit.operand_emin)
    if scales is not None:
        scale, power = _significands_and_exponents(scales, unit.scale_emin)
        return LimbFactors(x * scale, power, None) if unit.merge_count > 1 else LimbFactors(s * scale, e + power, None)
    count = None if unit.exact_floats else (jnp.abs(s) * np.float32(2.0**FLOAT32.fraction)).astype(jnp.int32)
    return LimbFactors(s, e, count)


def _significands_and_exponents(x: Array, emin: int) -> tuple[Array, Array]:
    """Significands, with their sign, and exponents that are `emin` or more."""
    sign, magnitude = bit_ops.split_sign(x, FLOAT32)
    field, fraction = magnitude >> FLOAT32.fraction, magnitude & bit_ops.low_mask(FLOAT32.fraction)
    lead = jnp.where(field > 0, FLOAT32.fraction, bit_ops.floor_log2_integers(jnp.maximum(fraction, 1), FLOAT32))
    fraction = (fraction << (FLOAT32.fraction - lead)) & bit_ops.low_mask(FLOAT32.fraction)
    s = lax.bitcast_convert_type(fraction | FLOAT32.bias << FLOAT32.fraction, jnp.float32)
    e = jnp.maximum(field, 1) - FLOAT32.bias - (FLOAT32.fraction - lead)
    s = jnp.where(magnitude == 0, np.float32(0), s * _power_or_zero(jnp.minimum(e - emin, 0)))
    bits = lax.bitcast_convert_type(s, jnp.int32) | sign
    s = jnp.where(field == 2 * FLOAT32.bias + 1, x, lax.bitcast_convert_type(bits, jnp.float32))
    return s, jnp.where(magnitude == 0, _ZERO_EXPONENT, jnp.maximum(e, emin))


def merge_terms(floats: list[Array], exponents: list[Array], unit: TensorCoreUnit) -> tuple[list[Array], list[Array]]:
    """The terms that are aligned: products, or sums of several under one scale."""
    if unit.merge_count == 1:
        return floats, exponents
    starts = range(0, len(floats), unit.merge_count)
    sums = [reduce(jnp.add, floats[i : i + unit.merge_count]) for i in starts]
    return sums, [jnp.where(v == 0, _ZERO_EXPONENT, exponents[i]) for v, i in zip(sums, starts, strict=True)]


def _power_or_zero(exponent: Array) -> Array:
    """2^exponent for exponents up to 127; 0 below -126."""
    return lax.bitcast_convert_type(jnp.maximum(exponent + FLOAT32.bias, 0) << FLOAT32.fraction, jnp.float32)


# -- integers of two limbs ---------------------------------------------------------------------------------------------

_Limbs = tuple[Array, Array]


def _carry_limbs(high: Array, low: Array) -> _Limbs:
    """The same integer with 0 <= low < 2^24."""
    return high + (low >> _LIMB), low & _LIMB_MASK


def _shift_limbs(high: Array, low: Array, count: Array) -> _Limbs:
    """floor(v / 2^count) of an integer with 0 <= low < 2^24, for count >= 0."""
    down, far = jnp.minimum(count, _LIMB - 1), jnp.clip(count - _LIMB, 0, 31)
    inside = count < _LIMB
    first = (low >> down | high << (_LIMB - down)) & _LIMB_MASK
    return jnp.where(inside, high >> down, high >> 31), jnp.where(inside, first, (high >> far) & _LIMB_MASK)


def _limbs_of_word(word: Array) -> _Limbs:
    return word >> _LIMB, word & _LIMB_MASK


def _add_limbs(parts: Sequence[_Limbs]) -> _Limbs:
    """The sum of at most 127 integers."""
    return _carry_limbs(sum(high for high, _ in parts), sum(low for _, low in parts))  # type: ignore[arg-type]


# -- terms -------------------------------------------------------------------------------------------------------------


def _limbs_of_products(
    x: Sequence[LimbFactors],
    y: Sequence[LimbFactors],
    exponents: list[Array],
    largest: Array,
    unit: TensorCoreUnit,
    floats: list[Array],
) -> _Limbs:
    """The sum of the products, cut to multiples of 2^(M - F), in two limbs."""
    if not unit.exact_floats:
        parts = zip(x, y, exponents, floats, strict=True)
        return _add_limbs([_limbs_of_long_product(a, b, e, largest, unit, p) for a, b, e, p in parts])
    multiples = [p * _power_or_zero(e - (largest - unit.bits)) for p, e in zip(floats, exponents, strict=True)]
    if unit.bits > MOST_WORD_BITS:
        high = [(v * np.float32(2.0**-_LIMB)).astype(jnp.int32) for v in multiples]
        pairs = zip(multiples, high, strict=True)
        low = [(v - h.astype(jnp.float32) * np.float32(2.0**_LIMB)).astype(jnp.int32) for v, h in pairs]
        return _add_limbs(list(zip(high, low, strict=True)))
    words = [v.astype(jnp.int32) for v in multiples]
    groups = [words[i : i + unit.group] for i in range(0, len(words), unit.group)]
    return _add_limbs([_limbs_of_word(sum(group)) for group in groups])  # type: ignore[arg-type]


def _limbs_of_long_product(
    x: LimbFactors, y: LimbFactors, e: Array, largest: Array, unit: TensorCoreUnit, product: Array
) -> _Limbs:
    """A product of two counts of 24 bits, cut to a multiple of 2^(M - F)."""
    assert x.count is not None and y.count is not None
    (x1, x0), (y1, y0) = ((v >> 12, v & 0xFFF) for v in (x.count, y.count))
    middle = x1 * y0 + x0 * y1
    high, low = _carry_limbs(x1 * y1 + (middle >> 12), x0 * y0 + ((middle & 0xFFF) << 12))
    shift = largest - e + (2 * FLOAT32.fraction - unit.bits)
    high, low = _shift_limbs(high, low, shift)
    negative = lax.bitcast_convert_type(product, jnp.int32) < 0
    return jnp.where(negative, -high, high), jnp.where(negative, -low, low)


def _accumulator_parts(c: Array) -> tuple[Array, Array, Array]:
    """Whether c is negative, its significand as an integer, and its exponent."""
    sign, magnitude = bit_ops.split_sign(c, FLOAT32)
    field = magnitude >> FLOAT32.fraction
    count = magnitude & bit_ops.low_mask(FLOAT32.fraction) | jnp.where(field > 0, 1 << FLOAT32.fraction, 0)
    return sign != 0, count, jnp.maximum(field, 1) - FLOAT32.bias


def _exponent_of_sum(count: Array, exponent: Array, unit: TensorCoreUnit) -> Array:
    """The exponent with which c enters the largest; of zero that of float32's subnormals."""
    if unit.sum_emin == 1 - FLOAT32.bias:
        return exponent
    return jnp.where(count == 0, 1 - FLOAT32.bias, jnp.maximum(exponent, unit.sum_emin))


def _limbs_of_accumulator(negative: Array, count: Array, down: Array, bits: int, floor: bool) -> _Limbs:
    """C in units of 2^(M - bits), `down` = M minus the exponent of c: toward zero, or downward."""
    up = max(bits - FLOAT32.fraction, 0)
    high, low = (count >> (_LIMB - up), count << up & _LIMB_MASK) if up else (jnp.zeros_like(count), count)
    if floor:
        high, low = _negate_limbs_if(negative, high, low)
        return _shift_limbs(high, low, jnp.minimum(down + max(FLOAT32.fraction - bits, 0), 55))
    high, low = _shift_limbs(high, low, jnp.minimum(down + max(FLOAT32.fraction - bits, 0), 55))
    return jnp.where(negative, -high, high), jnp.where(negative, -low, low)


def _negate_limbs_if(negative: Array, high: Array, low: Array) -> _Limbs:
    return _carry_limbs(jnp.where(negative, -high, high), jnp.where(negative, -low, low))


# -- the step ----------------------------------------------------------------------------------------------------------


def fused_add_limbs(
    c: Array, x: Sequence[LimbFactors], y: Sequence[LimbFactors], unit: TensorCoreUnit, word: Array | None
) -> Array:
    """A(t(c) + the sum of t(x_i y_i)), elementwise.

    Args:
        c: float32 accumulators.
        x: the left factor of each product of a block; its shape and that of `y` broadcast to that of `c`.
        y: the right factors.
        unit: the arithmetic.
        word: random words, if the accumulator draws.
    """
    exponents = [a.exponent + b.exponent for a, b in zip(x, y, strict=True)]
    floats = [a.significand * b.significand for a, b in zip(x, y, strict=True)]
    floats, exponents = merge_terms(floats, exponents, unit)
    if unit.overflows:
        beyond = [jnp.where(jnp.abs(p) >= 2, e + 1, e) > FLOAT32.bias for p, e in zip(floats, exponents, strict=True)]
        floats = [jnp.where(over, p * np.float32(np.inf), p) for p, over in zip(floats, beyond, strict=True)]
    negative, digits, c_exp = _accumulator_parts(c)
    special = reduce(jnp.add, floats, c)  # not finite if a product or c is not; else below the largest finite number
    add = _exact_sum_of_products_first if unit.apart else _exact_sum_of_all_terms
    v = add(x, y, exponents, floats, (negative, digits, c_exp), unit)
    return _round_exact_sum(_exact_or_special(v, special), unit.spec.accumulate, word)


_Accumulator = tuple[Array, Array, Array]


def _exact_sum_of_all_terms(
    x: Sequence[LimbFactors],
    y: Sequence[LimbFactors],
    exponents: list[Array],
    floats: list[Array],
    c: _Accumulator,
    unit: TensorCoreUnit,
) -> ExactResult:
    negative, digits, c_exp = c
    largest = reduce(jnp.maximum, exponents, _exponent_of_sum(digits, c_exp, unit))
    bits, unit_exponent = unit.bits, largest - unit.bits
    if unit.one_word:
        multiples = [
            (p * _power_or_zero(e - unit_exponent)).astype(jnp.int32) for p, e in zip(floats, exponents, strict=True)
        ]
        c_units = (
            digits
            << max(bits - FLOAT32.fraction, 0)
            >> jnp.minimum(largest - c_exp + max(FLOAT32.fraction - bits, 0), 31)
        )
        return _exact_of_word(reduce(jnp.add, multiples, jnp.where(negative, -c_units, c_units)), unit_exponent, unit)
    total = _limbs_of_products(x, y, exponents, largest, unit, floats)
    return _exact_of_limbs(
        *_add_limbs([total, _limbs_of_accumulator(negative, digits, largest - c_exp, bits, False)]), unit_exponent, unit
    )


def _exact_sum_of_products_first(
    x: Sequence[LimbFactors],
    y: Sequence[LimbFactors],
    exponents: list[Array],
    floats: list[Array],
    c: _Accumulator,
    unit: TensorCoreUnit,
) -> ExactResult:
    negative, digits, c_exp = c
    parts = []
    for half in range(unit.halves):
        members = slice(half, None, unit.halves)
        part_top = reduce(jnp.maximum, exponents[members], jnp.full_like(c_exp, LEAST_PRODUCT_EXPONENT))
        parts.append(
            (_limbs_of_products(x[members], y[members], exponents[members], part_top, unit, floats[members]), part_top)
        )
    largest = reduce(jnp.maximum, [most for _, most in parts])
    high, low = parts[0][0]
    if unit.halves > 1:
        high, low = _add_limbs([_shift_limbs(v, w, jnp.minimum(largest - most, 55)) for (v, w), most in parts])
    top = jnp.maximum(largest, _exponent_of_sum(digits, c_exp, unit))
    extra = EXTRA_SUM_BITS
    high, low = high << extra | low >> (_LIMB - extra), low << extra & _LIMB_MASK
    high, low = _shift_limbs(high, low, jnp.minimum(top - largest, 55))
    c_limbs = _limbs_of_accumulator(negative, digits, top - c_exp, unit.bits, True)
    if unit.halves > 1:  # a far smaller c is dropped, also a negative one
        c_limbs = [jnp.where(top - _exponent_of_sum(digits, c_exp, unit) > unit.bits + 1, 0, v) for v in c_limbs]
    c_limbs = c_limbs[0] << extra | c_limbs[1] >> (_LIMB - extra), c_limbs[1] << extra & _LIMB_MASK
    return _exact_of_limbs(*_add_limbs([(high, low), c_limbs]), top - (unit.bits + extra), unit)


# -- the exact sum -----------------------------------------------------------------------------------------------------


def _sign_of_zero_sum(unit: TensorCoreUnit) -> int:
    down = unit.spec.accumulate is not None and unit.spec.accumulate.rounding is Rounding.DOWN
    return FLOAT32.sign_bit if down else 0


def _leading_bit(word: Array) -> Array:
    """floor(log2 word) of positive integers below 2^31; clearing bits below the first prevents a carry."""
    return bit_ops.floor_log2_integers(word & ~(word >> 1), FLOAT32)


def _exact_of_word(total: Array, exponent: Array, unit: TensorCoreUnit) -> ExactResult:
    """Total 2^exponent, |total| < 2^30."""
    magnitude = jnp.abs(total)
    lead = _leading_bit(jnp.maximum(magnitude, 1))
    top = magnitude.astype(jnp.uint32) << (31 - lead).astype(jnp.uint32)
    return _exact_of_64_bits(total < 0, magnitude == 0, top, jnp.zeros_like(top), exponent + lead, unit)


def _exact_of_limbs(high: Array, low: Array, exponent: Array, unit: TensorCoreUnit) -> ExactResult:
    """(high 2^24 + low) 2^exponent, 0 <= low < 2^24."""
    negative = high < 0
    high, low = _negate_limbs_if(negative, high, low)
    lead = jnp.where(high > 0, _LIMB + _leading_bit(jnp.maximum(high, 1)), _leading_bit(jnp.maximum(low, 1)))
    # The 64 bits high 2^24 + low, moved left until the first is set.
    first, second = (high >> 8).astype(jnp.uint32), high.astype(jnp.uint32) << 24 | low.astype(jnp.uint32)
    shift = 63 - lead
    near_shift, far_shift = jnp.minimum(shift, 31).astype(jnp.uint32), jnp.clip(shift - 32, 0, 31).astype(jnp.uint32)
    is_short_shift = shift < 32  # and at least 9
    top = jnp.where(is_short_shift, first << near_shift | second >> (32 - near_shift), second << far_shift)
    rest = jnp.where(is_short_shift, second << near_shift, 0)
    return _exact_of_64_bits(negative, (high | low) == 0, top, rest, exponent + lead, unit)


def _exact_of_64_bits(
    negative: Array, zero: Array, top: Array, low_word: Array, exponent: Array, unit: TensorCoreUnit
) -> ExactResult:
    """The number of the 64 bits top, below, whose first bit is set and counts 2^exponent; zero if `zero`."""
    drop = 31 - FLOAT32.fraction
    field = exponent + FLOAT32.bias
    depth = jnp.clip(1 - field, 0, 31).astype(jnp.uint32)  # of a subnormal number
    head = top >> depth
    rest = jnp.where(depth > 0, top << (32 - depth) % 32, 0) | low_word >> depth
    has_tail = (low_word << (32 - depth) % 32 != 0) & (depth > 0)
    t = (head >> drop).astype(jnp.int32)
    magnitude = jnp.where(field > 0, (field << FLOAT32.fraction) + (t - (1 << FLOAT32.fraction)), t)
    word = head << (32 - drop) | rest >> drop
    sticky = (rest & ((1 << drop) - 1) != 0) | has_tail
    rest_depth = jnp.clip(1 - field - 31, 0, 31).astype(jnp.uint32)
    word, sticky = word >> rest_depth, sticky | (word >> rest_depth << rest_depth != word)
    beyond = (field > 2 * FLOAT32.bias) & ~zero
    magnitude = jnp.where(beyond, FLOAT32.inf - 1, jnp.where(zero, 0, magnitude))
    word = jnp.where(beyond, np.uint32(0xFFFFFFFF), jnp.where(zero, np.uint32(0), word))
    sticky = (sticky | beyond) & ~zero
    sign = jnp.where(zero, _sign_of_zero_sum(unit), jnp.where(negative, FLOAT32.sign_bit, 0))
    return ExactResult(sign.astype(jnp.int32), magnitude, (word != 0) | sticky, word, sticky, beyond)


def _exact_or_special(v: ExactResult, special: Array) -> ExactResult:
    """`special` in place of v unless it is finite; every NaN is one pattern."""
    sign, magnitude = bit_ops.split_sign(special, FLOAT32)
    finite = magnitude < FLOAT32.inf
    is_nan = magnitude > FLOAT32.inf
    magnitude = jnp.where(is_nan, FLOAT32.nan, magnitude)
    return ExactResult(
        jnp.where(finite, v.sign, jnp.where(is_nan, 0, sign)),
        jnp.where(finite, v.magnitude, magnitude),
        v.inexact & finite,
        jnp.where(finite, v.rest, np.uint32(0)),
        v.sticky & finite,
        v.beyond & finite,
    )


# -- one rounding ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BelowFloat32(modes.DiscardedFraction):
    """The bits below the last place of float32."""

    value: ExactResult
    draw: RandomBits | None

    @property
    def negative(self) -> Array:
        return self.value.sign != 0

    @property
    def inexact(self) -> Array:
        return self.value.inexact

    @property
    def odd(self) -> Array:
        return (self.value.magnitude & 1) != 0

    def share(self) -> tuple[Array, Array]:
        return self.value.rest, self.value.sticky


def _round_exact_sum(v: ExactResult, spec: Spec | None, word: Array | None) -> Array:
    """`v` rounded once; beyond float32 it is infinite, unless the spec saturates."""
    if spec is None:
        return round_exact(v, None, FLOAT32, None)
    if is_float32_grid(spec):
        away = jnp.asarray(modes.AWAY_FROM_ZERO[spec.rounding](_BelowFloat32(v, take_random_bits(word, spec, FLOAT32))))
        magnitude = v.magnitude + away.astype(jnp.int32)
        if spec.overflow is not Overflow.IEEE:
            stays = v.magnitude >= FLOAT32.inf if spec.overflow is Overflow.PROPAGATE else v.magnitude > FLOAT32.inf
            magnitude = jnp.where(stays, magnitude, jnp.minimum(magnitude, FLOAT32.inf - 1))
        out = bit_ops.join_sign(v.sign, magnitude, FLOAT32)
    else:
        out = round_exact(v, spec, FLOAT32, word)
    if spec.overflow is Overflow.IEEE and isinstance(spec.format, FloatFormat) and spec.format.has_inf:
        out = jnp.where(v.beyond, bit_ops.join_sign(v.sign, jnp.full_like(v.magnitude, FLOAT32.inf), FLOAT32), out)
    return out
