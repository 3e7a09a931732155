"""The fused dot-add in float64, for one CPU: a term is multiplied by a power of two and truncated.

All terms are whole numbers of units of 2^(M - F), and so is their sum, below 2^53 of them. So the only rounding is the
last one. Infinities and NaN need no care: they pass through the products and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32, FLOAT64
from jchop._core.arithmetic import float64
from jchop._core.matmul import aligned_limbs
from jchop._core.matmul.aligned import EXTRA_SUM_BITS, LEAST_PRODUCT_EXPONENT, MOST_WORD_BITS, TensorCoreUnit
from jchop._core.rounding.elements import round_to_spec
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat, binary32
from jchop.formats.rounding import Overflow, Rounding

__all__ = ["DoubleFactors", "double_factors", "fused_add_doubles", "narrow_doubles", "suits_doubles"]

Array = jax.Array

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
    parts = aligned_limbs.limb_factors(x, unit, scales)
    power = _double_power(jnp.maximum(parts.exponent, _LEAST_DOUBLE_EXPONENT))
    return DoubleFactors(parts.significand.astype(jnp.float64) * power, parts.exponent)


def _double_power(exponent: Array) -> Array:
    """2^exponent of exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int64) + FLOAT64.bias) << FLOAT64.fraction, jnp.float64)


def fused_add_doubles(c: Array, x: Sequence[DoubleFactors], y: Sequence[DoubleFactors], unit: TensorCoreUnit) -> Array:
    """As `limbs.fused_add_limbs`, with accumulators in float64."""
    exponents = [a.exponent + b.exponent for a, b in zip(x, y, strict=True)]
    values = [a.value * b.value for a, b in zip(x, y, strict=True)]
    values, exponents = aligned_limbs.merge_terms(values, exponents, unit)
    if unit.overflows:
        values = [jnp.where(jnp.abs(v) >= 2.0 ** (FLOAT32.bias + 1), v * jnp.inf, v) for v in values]
    magnitude = bit_ops.split_sign(c, FLOAT64)[1]
    c_exp = jnp.clip(
        (magnitude >> FLOAT64.fraction).astype(jnp.int32) - FLOAT64.bias,
        1 - FLOAT32.bias,
        FLOAT32.bias + 1,
    )
    c_exp = jnp.where(magnitude == 0, 1 - FLOAT32.bias, jnp.maximum(c_exp, unit.sum_emin))
    total, exponent = (_sum_of_products_first if unit.apart else _sum_of_all_terms)(c, c_exp, values, exponents, unit)
    zero = -0.0 if unit.spec.accumulate is not None and unit.spec.accumulate.rounding is Rounding.DOWN else 0.0
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
    spec = Spec(binary32) if spec is None else spec
    out = round_to_spec(v, spec, FLOAT64)
    if spec.overflow is Overflow.IEEE and isinstance(spec.format, FloatFormat) and spec.format.has_inf:
        sign, magnitude = bit_ops.split_sign(v, FLOAT64)
        beyond = magnitude >> FLOAT64.fraction > FLOAT64.bias + FLOAT32.bias
        infinite = bit_ops.join_sign(sign, jnp.maximum(magnitude, FLOAT64.inf), FLOAT64)  # or NaN
        out = jnp.where(beyond, infinite, out)
    return out


def narrow_doubles(c: Array) -> Array:
    """Accumulators as float32 numbers; every NaN is one pattern."""
    return float64.narrow_float64(jnp.where(jnp.isnan(c), jnp.nan, c))
