"""The fused dot-add of a tensor core: terms cut to one grid, summed exactly, and rounded once.

A block of products and the accumulator c are aligned to the largest exponent M of all terms. The bits below 2^(M - F)
are dropped, so every term is a whole number of units of 2^(M - F). Their sum is an integer, held in one word of 32 bits
if that is enough, else in two limbs h 2^24 + l. Definition: microsoft/MMA-Sim and arXiv 2511.10909.

All arithmetic is float32 and int32, or float64 for one CPU. Products of operands of at most 12 bits are exact floats.
Multiplied by a power of two they are cut by the conversion to an integer. Other products are integers of 48 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT32, FLOAT64, Carrier, floor_log2_integers, join_sign, low_mask, split_sign
from jchop._core.arithmetic import double_word, exact, float64
from jchop._core.arithmetic.double_word import DoubleWord
from jchop._core.arithmetic.exact import ExactResult, carrier_range, range_of, round_exact
from jchop._core.rounding.codes import bits_to_float, exponent_and_significand, float_to_bits
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import CARRIER_SPECS
from jchop._core.rounding.modes import AWAY_FROM_ZERO, take_random_bits
from jchop._spec.accumulation import MERGED, MatmulSpec
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat
from jchop.formats.rounding import Overflow, Rounding

# == the unit ==========================================================================================================


#: The most fraction bits for which a product is cut to one word.
MOST_WORD_BITS = 28
#: The bits that the sum of products keeps beyond the bits of c in ``aligned_apart``.
EXTRA_SUM_BITS = 7
#: The exponent by which products that are all zero are aligned without c; below the exponent of every other product.
LEAST_PRODUCT_EXPONENT = 4 * (1 - FLOAT32.bias)


@dataclass(frozen=True)
class TensorCoreUnit:
    """The static data of a tensor core that adds `length` products at a time."""

    spec: MatmulSpec
    length: int

    @property
    def bits(self) -> int:
        """F, the fraction bits of the grid."""
        assert self.spec.order.bits is not None
        return self.spec.order.bits

    @property
    def apart(self) -> bool:
        """Whether the products are aligned without c."""
        return self.spec.order.kind in ("aligned_apart", "aligned_halves")

    @property
    def halves(self) -> int:
        """Into how many parts, each aligned by itself, products go in turn."""
        return 2 if self.spec.order.kind == "aligned_halves" else 1

    @property
    def overflows(self) -> bool:
        """Whether a finite product may be 2^128 or more, and is then infinite."""
        return (
            self.spec.order.kind == "aligned_apart" and 2 * range_of(self.spec.operands, FLOAT32).top > FLOAT32.bias + 1
        )

    @property
    def rounds_down(self) -> bool:
        """Whether the accumulator rounds down, so that a sum of zero is -0."""
        return self.spec.accumulate is not None and self.spec.accumulate.rounding is Rounding.DOWN

    @property
    def merge_count(self) -> int:
        """How many products are summed before they are aligned, by their scales alone."""
        return MERGED if self.spec.order.kind == "aligned_sums" else 1

    @cached_property
    def operand_emin(self) -> int:
        """The least exponent of an operand."""
        return 1 - FLOAT32.bias if self.spec.operands is None else _least_format_exponent(self.spec.operands.element)

    @cached_property
    def sum_emin(self) -> int:
        """The least exponent of an accumulator that is not zero."""
        return 1 - FLOAT32.bias if self.spec.accumulate is None else _least_format_exponent(self.spec.accumulate.format)

    @cached_property
    def exact_floats(self) -> bool:
        """Whether the product of two significands is exact in float32."""
        operands = self.spec.operands
        return (operands is not None and operands.scaled is not None) or (
            2 * range_of(operands, FLOAT32).bits <= FLOAT32.fraction + 1
        )

    @property
    def most_units(self) -> int:
        """More than the sum of the magnitudes of all terms, in units of the grid of the sum."""
        largest = 4
        if self.merge_count > 1:
            assert self.spec.operands is not None
            largest = 4 << 2 * range_of(Spec(self.spec.operands.element), FLOAT32).top
        return (largest * self.length + 2) << (self.bits + EXTRA_SUM_BITS * self.apart)

    @property
    def group(self) -> int:
        """The number of terms whose sum is below 2^30."""
        return 1 << max(MOST_WORD_BITS - self.bits, 0)


def _least_format_exponent(fmt: ElementFormat | ScaledFormat) -> int:
    return max(fmt.emin, 1 - FLOAT32.bias) if isinstance(fmt, FloatFormat) else 1 - FLOAT32.bias


def require_aligned_order(spec: MatmulSpec, carrier: Carrier) -> None:
    """Refuses the arithmetic if its operands are not float32 numbers, or its sums cannot be rounded once in float32.

    Raises:
        ValueError: names the field.
    """
    has_scales = spec.operands is not None and spec.operands.scaled is not None
    own, whole = (carrier_range(carrier) if has_scales else range_of(spec.operands, carrier), carrier_range(FLOAT32))
    if own.precision > whole.precision or own.quantum < whole.quantum or own.top > whole.top:
        raise ValueError(
            f"operands={None if spec.operands is None else str(spec.operands)!r} of {carrier.name} may not be numbers "
            f"of float32, in which order={str(spec.order)!r} is computed; cast the operands to float32"
        )
    total = spec.accumulate
    if total is None or (
        total.overflow is not Overflow.WRAP and (is_float32_grid(total) or exact.supports_operation(total, FLOAT32))
    ):
        return
    raise ValueError(
        f"accumulate={str(total)!r}: order={str(spec.order)!r} rounds to binary32, or to formats that have two bits "
        "less than float32 everywhere, and does not wrap"
    )


def is_float32_grid(spec: Spec) -> bool:
    """Whether the format is float32's own grid."""
    fmt = spec.format
    return (
        isinstance(fmt, FloatFormat)
        and (fmt.frac_bits, fmt.emin, fmt.exact_max) == (FLOAT32.fraction, 1 - FLOAT32.bias, FLOAT32.max)
        and fmt.subnormals
        and fmt.zero
        and fmt.has_inf
        and not spec.flush
    )


# == in words ==========================================================================================================


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
        assert unit.spec.operands is not None and unit.spec.operands.scaled is not None
        scale, power = _significands_and_exponents(scales, unit.spec.operands.scaled.scale_format.emin)
        return LimbFactors(x * scale, power, None) if unit.merge_count > 1 else LimbFactors(s * scale, e + power, None)
    count = None if unit.exact_floats else (jnp.abs(s) * np.float32(2.0**FLOAT32.fraction)).astype(jnp.int32)
    return LimbFactors(s, e, count)


def _significands_and_exponents(x: Array, emin: int) -> tuple[Array, Array]:
    """Significands, with their sign, and exponents that are `emin` or more."""
    sign, magnitude = split_sign(x, FLOAT32)
    field, fraction = magnitude >> FLOAT32.fraction, magnitude & low_mask(FLOAT32.fraction)
    lead = jnp.where(field > 0, FLOAT32.fraction, floor_log2_integers(jnp.maximum(fraction, 1), FLOAT32))
    fraction = (fraction << (FLOAT32.fraction - lead)) & low_mask(FLOAT32.fraction)
    s = bits_to_float(fraction | FLOAT32.bias << FLOAT32.fraction)
    e = jnp.maximum(field, 1) - FLOAT32.bias - (FLOAT32.fraction - lead)
    s = s * _power_or_zero(jnp.where(magnitude == 0, -FLOAT32.bias, jnp.minimum(e - emin, 0)))
    s = jnp.where(field == 2 * FLOAT32.bias + 1, x, bits_to_float(float_to_bits(s) | sign))
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
    return bits_to_float(jnp.maximum(exponent + FLOAT32.bias, 0) << FLOAT32.fraction)


# -- integers of two limbs ---------------------------------------------------------------------------------------------

_Limbs = tuple[Array, Array]
_Factors = Sequence[LimbFactors]
#: Whether c is negative, its significand as an integer, and its exponent.
_Accumulator = tuple[Array, Array, Array]


def _carry_limbs(high: Array, low: Array) -> _Limbs:
    """The same integer with 0 <= low < 2^24."""
    return high + (low >> _LIMB), low & _LIMB_MASK


def _shift_limbs(high: Array, low: Array, count: Array) -> _Limbs:
    """floor(v / 2^count) of an integer with 0 <= low < 2^24, for count >= 0."""
    down, far = jnp.minimum(count, _LIMB - 1), jnp.clip(count - _LIMB, 0, 31)
    inside = count < _LIMB
    first = (low >> down | high << (_LIMB - down)) & _LIMB_MASK
    return jnp.where(inside, high >> down, high >> 31), jnp.where(inside, first, (high >> far) & _LIMB_MASK)


def _add_limbs(parts: Sequence[_Limbs]) -> _Limbs:
    """The sum of at most 127 integers."""
    return _carry_limbs(*(reduce(jnp.add, limbs) for limbs in zip(*parts, strict=True)))


# -- terms -------------------------------------------------------------------------------------------------------------


def _limbs_of_products(
    x: _Factors, y: _Factors, exponents: list[Array], largest: Array, unit: TensorCoreUnit, floats: list[Array]
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
    sums = [reduce(jnp.add, group) for group in groups]
    return _add_limbs([(word >> _LIMB, word & _LIMB_MASK) for word in sums])


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
    negative = float_to_bits(product) < 0
    return jnp.where(negative, -high, high), jnp.where(negative, -low, low)


def _exponent_of_sum(count: Array, exponent: Array, unit: TensorCoreUnit) -> Array:
    """The exponent with which c enters the largest; a zero has the exponent of float32's subnormals."""
    if unit.sum_emin == 1 - FLOAT32.bias:
        return exponent
    return jnp.where(count == 0, 1 - FLOAT32.bias, jnp.maximum(exponent, unit.sum_emin))


def _limbs_of_accumulator(negative: Array, count: Array, down: Array, bits: int, floor: bool) -> _Limbs:
    """The accumulator in units of 2^(M - bits), where `down` is M minus its exponent: cut toward zero, or downward."""
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


def fused_add_limbs(c: Array, x: _Factors, y: _Factors, unit: TensorCoreUnit, word: Array | None) -> Array:
    """The sum of c and the products x_i y_i, elementwise: terms cut to one grid, summed exactly, rounded once.

    Args:
        c: float32 accumulators.
        x: the left factor of each product of a block; `x` and `y` broadcast to the shape of `c`.
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
    sign, magnitude = split_sign(c, FLOAT32)
    c_exp, digits = exponent_and_significand(magnitude, FLOAT32)
    special = reduce(jnp.add, floats, c)  # not finite if a product or c is not; else below the largest finite number
    add = _exact_sum_of_products_first if unit.apart else _exact_sum_of_all_terms
    v = add(x, y, exponents, floats, (sign != 0, digits, c_exp), unit)
    return _round_exact_sum(_exact_or_special(v, special), unit.spec.accumulate, word)


def _exact_sum_of_all_terms(
    x: _Factors, y: _Factors, exponents: list[Array], floats: list[Array], c: _Accumulator, unit: TensorCoreUnit
) -> ExactResult:
    """The exact sum of c and the products, aligned to the largest exponent of all of them."""
    negative, digits, c_exp = c
    largest = reduce(jnp.maximum, exponents, _exponent_of_sum(digits, c_exp, unit))
    bits, unit_exponent = unit.bits, largest - unit.bits
    if unit.exact_floats and unit.most_units < 1 << 30:  # one word holds the sum of all terms, and every term
        multiples = [
            (p * _power_or_zero(e - unit_exponent)).astype(jnp.int32) for p, e in zip(floats, exponents, strict=True)
        ]
        c_units = (
            digits
            << max(bits - FLOAT32.fraction, 0)
            >> jnp.minimum(largest - c_exp + max(FLOAT32.fraction - bits, 0), 31)
        )
        total = reduce(jnp.add, multiples, jnp.where(negative, -c_units, c_units))
        word = jnp.abs(total).astype(jnp.uint32)
        return _exact_of_words(total < 0, word, None, unit_exponent - FLOAT32.work_width, unit)
    total = _limbs_of_products(x, y, exponents, largest, unit, floats)
    return _exact_of_limbs(
        *_add_limbs([total, _limbs_of_accumulator(negative, digits, largest - c_exp, bits, False)]), unit_exponent, unit
    )


def _exact_sum_of_products_first(
    x: _Factors, y: _Factors, exponents: list[Array], floats: list[Array], c: _Accumulator, unit: TensorCoreUnit
) -> ExactResult:
    """The exact sum of c and the products, where products are aligned among themselves, then their sum and c."""
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


def _exact_of_limbs(high: Array, low: Array, exponent: Array, unit: TensorCoreUnit) -> ExactResult:
    """(high 2^24 + low) 2^exponent, 0 <= low < 2^24."""
    negative = high < 0
    high, low = _negate_limbs_if(negative, high, low)
    words = (high >> 8).astype(jnp.uint32), high.astype(jnp.uint32) << _LIMB | low.astype(jnp.uint32)
    return _exact_of_words(negative, *words, exponent, unit)


def _exact_of_words(
    negative: Array, high: Array, low: Array | None, exponent: Array, unit: TensorCoreUnit
) -> ExactResult:
    """(high 2^32 + low) 2^exponent; if `low` is None, it is zero."""
    zero = (high if low is None else high | low) == 0
    zero_sign = FLOAT32.sign_bit if unit.rounds_down else 0
    sign = jnp.where(zero, zero_sign, jnp.where(negative, FLOAT32.sign_bit, 0)).astype(jnp.int32)
    exponent = jnp.where(zero, 0, exponent + (2 * FLOAT32.work_width - 2))
    v = DoubleWord(sign, exponent, high, jnp.zeros_like(high) if low is None else low)
    v = v if low is None else double_word.fill_high_word(v)
    v = double_word.shift_to_top(v, double_word.leading_zeros(v.high, FLOAT32))
    return double_word.exact_of_double_word(v, jnp.zeros_like(high), FLOAT32)


def _exact_or_special(v: ExactResult, special: Array) -> ExactResult:
    """`special` in place of v unless it is finite; every NaN is one pattern."""
    sign, magnitude = split_sign(special, FLOAT32)
    is_nan = magnitude > FLOAT32.inf
    v = double_word.with_special_values(v, magnitude == FLOAT32.inf, is_nan, sign, FLOAT32)
    return replace(v, sign=jnp.where(is_nan, 0, v.sign))


# -- one rounding ------------------------------------------------------------------------------------------------------


def _round_exact_sum(v: ExactResult, spec: Spec | None, word: Array | None) -> Array:
    """`v` rounded once; beyond float32 it is infinite, unless the spec saturates."""
    if spec is None:
        return round_exact(v, None, FLOAT32, None)
    if is_float32_grid(spec):
        away = jnp.asarray(
            AWAY_FROM_ZERO[spec.rounding](exact.below_last_place(v, take_random_bits(word, spec, FLOAT32)))
        )
        magnitude = v.magnitude + away.astype(jnp.int32)
        if spec.overflow is not Overflow.IEEE:
            stays = v.magnitude >= FLOAT32.inf if spec.overflow is Overflow.PROPAGATE else v.magnitude > FLOAT32.inf
            magnitude = jnp.where(stays, magnitude, jnp.minimum(magnitude, FLOAT32.inf - 1))
        out = join_sign(v.sign, magnitude, FLOAT32)
    else:
        out = round_exact(v, spec, FLOAT32, word)
    if spec.overflow is Overflow.IEEE and isinstance(spec.format, FloatFormat) and spec.format.has_inf:
        out = jnp.where(v.beyond, join_sign(v.sign, jnp.full_like(v.magnitude, FLOAT32.inf), FLOAT32), out)
    return out


# == in float64 ========================================================================================================
# A term is multiplied by a power of two and truncated. All terms are whole numbers of units of 2^(M - F), and so is
# their sum, below 2^53 of them. So the only rounding is the last one. Infinities and NaN need no care: they pass
# through the products and sums.


#: The least exponent of a factor that is not zero is far above it.
_LEAST_DOUBLE_EXPONENT = -600


@dataclass(frozen=True)
class DoubleFactors:
    """Numbers in float64, with the exponents by which they are aligned."""

    value: Array
    exponent: Array


jax.tree_util.register_dataclass(DoubleFactors, ["value", "exponent"], [])


def suits_doubles(unit: TensorCoreUnit) -> bool:
    """Whether float64 holds every sum, and is faster than words of 32 bits."""
    is_exact = unit.most_units <= 1 << (FLOAT64.fraction + 1)
    total = unit.spec.accumulate
    is_slow_in_words = unit.apart or not unit.exact_floats or unit.bits > MOST_WORD_BITS
    return is_exact and is_slow_in_words and not (total is not None and total.rounding.stochastic)


def double_factors(x: Array, unit: TensorCoreUnit, scales: Array | None = None) -> DoubleFactors:
    """The parts of float32 operands, or of elements and the scales of each."""
    parts = limb_factors(x, unit, scales)
    power = _double_power(jnp.maximum(parts.exponent, _LEAST_DOUBLE_EXPONENT))
    return DoubleFactors(parts.significand.astype(jnp.float64) * power, parts.exponent)


def _double_power(exponent: Array) -> Array:
    """2^exponent of exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int64) + FLOAT64.bias) << FLOAT64.fraction, jnp.float64)


def fused_add_doubles(c: Array, x: Sequence[DoubleFactors], y: Sequence[DoubleFactors], unit: TensorCoreUnit) -> Array:
    """The sum of c and the products x_i y_i, as of `fused_add_limbs`, with accumulators and sums in float64."""
    exponents = [a.exponent + b.exponent for a, b in zip(x, y, strict=True)]
    values = [a.value * b.value for a, b in zip(x, y, strict=True)]
    values, exponents = merge_terms(values, exponents, unit)
    if unit.overflows:
        values = [jnp.where(jnp.abs(v) >= 2.0 ** (FLOAT32.bias + 1), v * jnp.inf, v) for v in values]
    magnitude = split_sign(c, FLOAT64)[1]
    c_exp = jnp.clip(
        (magnitude >> FLOAT64.fraction).astype(jnp.int32) - FLOAT64.bias, 1 - FLOAT32.bias, FLOAT32.bias + 1
    )
    c_exp = jnp.where(magnitude == 0, 1 - FLOAT32.bias, jnp.maximum(c_exp, unit.sum_emin))
    total, exponent = (_sum_of_products_first if unit.apart else _sum_of_all_terms)(c, c_exp, values, exponents, unit)
    zero = -0.0 if unit.rounds_down else 0.0
    return _round_double_sum(jnp.where(total == 0, zero, total * _double_power(exponent)), unit.spec.accumulate)


def _sum_in_units(
    values: list[Array], exponents: list[Array], least: Array, unit: TensorCoreUnit
) -> tuple[Array, Array]:
    """The sum of terms in units of 2^(M - F), and M, which is `least` or more."""
    largest = reduce(jnp.maximum, exponents, least)
    power = _double_power(unit.bits - largest)
    return reduce(jnp.add, [jnp.trunc(v * power) for v in values]), largest


def _sum_of_all_terms(
    c: Array, c_exp: Array, values: list[Array], exponents: list[Array], unit: TensorCoreUnit
) -> tuple[Array, Array]:
    total, largest = _sum_in_units([c, *values], exponents, c_exp, unit)
    return total, largest - unit.bits


def _sum_of_products_first(
    c: Array, c_exp: Array, values: list[Array], exponents: list[Array], unit: TensorCoreUnit
) -> tuple[Array, Array]:
    """The sum of c and the products in float64, as an integer and its exponent; products are aligned first."""
    groups = [slice(half, None, unit.halves) for half in range(unit.halves)]
    part_sums = [
        _sum_in_units(values[i], exponents[i], jnp.full_like(c_exp, LEAST_PRODUCT_EXPONENT), unit) for i in groups
    ]
    largest = reduce(jnp.maximum, [most for _, most in part_sums])
    total = part_sums[0][0]
    if unit.halves > 1:
        total = reduce(jnp.add, [jnp.floor(sums * _double_power(most - largest)) for sums, most in part_sums])
    common_exponent = jnp.maximum(largest, c_exp)
    total = jnp.floor(total * _double_power(largest - common_exponent + EXTRA_SUM_BITS))
    c_units = jnp.floor(c * _double_power(unit.bits - common_exponent)) * 2.0**EXTRA_SUM_BITS
    if unit.halves > 1:  # a far smaller c is dropped, also a negative one
        c_units = jnp.where(common_exponent - c_exp > unit.bits + 1, 0, c_units)
    return total + c_units, common_exponent - (unit.bits + EXTRA_SUM_BITS)


def _round_double_sum(v: Array, spec: Spec | None) -> Array:
    """`v` rounded once; beyond float32 it is infinite, unless the spec saturates."""
    spec = CARRIER_SPECS["float32"] if spec is None else spec
    out = round_to_spec(v, spec, FLOAT64)
    if spec.overflow is Overflow.IEEE and isinstance(spec.format, FloatFormat) and spec.format.has_inf:
        sign, magnitude = split_sign(v, FLOAT64)
        beyond = magnitude >> FLOAT64.fraction > FLOAT64.bias + FLOAT32.bias
        infinite = join_sign(sign, jnp.maximum(magnitude, FLOAT64.inf), FLOAT64)  # or NaN
        out = jnp.where(beyond, infinite, out)
    return out


def narrow_doubles(c: Array) -> Array:
    """Accumulators as float32 numbers; every NaN is one pattern."""
    return float64.narrow_float64(jnp.where(jnp.isnan(c), jnp.nan, c))
