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

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.arithmetic import float64
from jchop._core.arithmetic.aligned import limbs
from jchop._core.arithmetic.aligned.unit import LEAST_PRODUCT, MORE, WORD, Unit
from jchop._core.rounding.elements import round_elements
from jchop.formats import FloatFormat, binary32
from jchop.rounding import Overflow, Rounding
from jchop.spec import Spec

__all__ = ["Factors", "factors", "fused_add", "narrow", "suits"]

Array = jax.Array

_CARRIER, _FLOAT = CARRIERS["float64"], CARRIERS["float32"]
_FRACTION, _BIAS = _CARRIER.fraction, _CARRIER.bias
#: The least exponent of a factor that is not zero is far above it.
_LEAST = -600


@dataclass(frozen=True)
class Factors:
    """Numbers in float64, with the exponents by which they are aligned."""

    value: Array
    exponent: Array


jax.tree_util.register_dataclass(Factors, ["value", "exponent"], [])


def suits(unit: Unit) -> bool:
    """Whether float64 holds every sum, and is faster than words of 32 bits."""
    exact = unit.most_units <= 1 << (_FRACTION + 1)
    total = unit.spec.accumulate
    slow = unit.apart or not unit.exact_floats or unit.bits > WORD
    return exact and slow and not (total is not None and total.rounding.stochastic)


def factors(x: Array, unit: Unit, scales: Array | None = None) -> Factors:
    """The parts of float32 operands, or of elements and the scales of each."""
    parts = limbs.factors(x, unit, scales)
    power = _power(jnp.maximum(parts.exponent, _LEAST))
    return Factors(parts.significand.astype(jnp.float64) * power, parts.exponent)


def _power(exponent: Array) -> Array:
    """2^exponent of exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int64) + _BIAS) << _FRACTION, jnp.float64)


def fused_add(c: Array, x: Sequence[Factors], y: Sequence[Factors], unit: Unit) -> Array:
    """As `limbs.fused_add_limbs`, with accumulators in float64."""
    exponents = [a.exponent + b.exponent for a, b in zip(x, y, strict=True)]
    values = [a.value * b.value for a, b in zip(x, y, strict=True)]
    values, exponents = limbs.merged(values, exponents, unit)
    if unit.overflows:
        values = [jnp.where(jnp.abs(v) >= 2.0 ** (_FLOAT.bias + 1), v * jnp.inf, v) for v in values]
    magnitude = _bits.split(c, _CARRIER)[1]
    own = jnp.clip((magnitude >> _FRACTION).astype(jnp.int32) - _BIAS, 1 - _FLOAT.bias, _FLOAT.bias + 1)
    own = jnp.where(magnitude == 0, 1 - _FLOAT.bias, jnp.maximum(own, unit.sum_emin))
    total, exponent = (_apart if unit.apart else _together)(c, own, values, exponents, unit)
    zero = -0.0 if unit.spec.accumulate is not None and unit.spec.accumulate.rounding is Rounding.DOWN else 0.0
    return _rounded(jnp.where(total == 0, zero, total * _power(exponent)), unit.spec.accumulate)


def _cut(values: list[Array], exponents: list[Array], least: Array, unit: Unit) -> tuple[Array, Array]:
    """The sum of terms in units of 2^(M - F), and M, which is `least` or more."""
    largest = reduce(jnp.maximum, exponents, least)
    power = _power(unit.bits - largest)
    return reduce(jnp.add, [jnp.trunc(v * power) for v in values]), largest


def _together(c: Array, own: Array, values: list[Array], exponents: list[Array], unit: Unit) -> tuple[Array, Array]:
    total, largest = _cut([c, *values], exponents, own, unit)
    return total, largest - unit.bits


def _apart(c: Array, own: Array, values: list[Array], exponents: list[Array], unit: Unit) -> tuple[Array, Array]:
    members = [slice(half, None, unit.halves) for half in range(unit.halves)]
    parts = [_cut(values[i], exponents[i], jnp.full_like(own, LEAST_PRODUCT), unit) for i in members]
    largest = reduce(jnp.maximum, [most for _, most in parts])
    total = parts[0][0]
    if unit.halves > 1:
        total = reduce(jnp.add, [jnp.floor(sums * _power(most - largest)) for sums, most in parts])
    both = jnp.maximum(largest, own)
    total = jnp.floor(total * _power(largest - both + MORE))
    more = jnp.floor(c * _power(unit.bits - both)) * 2.0**MORE
    if unit.halves > 1:  # a far smaller c is dropped, also a negative one
        more = jnp.where(both - own > unit.bits + 1, 0, more)
    return total + more, both - (unit.bits + MORE)


def _rounded(v: Array, spec: Spec | None) -> Array:
    """`v` rounded once; beyond float32 it is infinite, unless the spec saturates."""
    spec = Spec(binary32) if spec is None else spec
    out = round_elements(v, spec, _CARRIER)
    if spec.overflow is Overflow.IEEE and isinstance(spec.format, FloatFormat) and spec.format.has_inf:
        sign, magnitude = _bits.split(v, _CARRIER)
        beyond = magnitude >> _FRACTION > _BIAS + _FLOAT.bias
        infinite = _bits.join(sign, jnp.maximum(magnitude, _CARRIER.inf), _CARRIER)  # or NaN
        out = jnp.where(beyond, infinite, out)
    return out


def narrow(c: Array) -> Array:
    """Accumulators as float32 numbers; every NaN is one pattern."""
    return float64.narrow(jnp.where(jnp.isnan(c), jnp.nan, c))
