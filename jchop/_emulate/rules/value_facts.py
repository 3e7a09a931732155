"""Facts about a value before it is computed: the spec whose format holds its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from jchop._program.step import is_reference
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, FloatFormat, UniformFormat

#: A spec whose format holds the numbers; None: any number of the dtype.
ValueFact = Spec | None

#: The dtypes that are rounded.
CARRIER_DTYPES = ("float16", "bfloat16", "float32", "float64")
_CARRIER_FLOATS = frozenset(map(jnp.dtype, CARRIER_DTYPES))


def is_carrier_float(aval: Any) -> bool:
    """Whether a value has a real dtype that carries other formats, and so is rounded; False for a reference."""
    return hasattr(aval, "dtype") and aval.dtype in _CARRIER_FLOATS and not is_reference(aval)


def is_narrow_float(aval: Any) -> bool:
    """Whether a value has a floating-point dtype of 8 bits or fewer, which only stores numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.name not in CARRIER_DTYPES


def is_complex_value(aval: Any) -> bool:
    """Whether a value is complex."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating)


def is_number(aval: Any) -> bool:
    """Whether a value, or its real and imaginary parts, are rounded."""
    return is_carrier_float(aval) or is_complex_value(aval)


@lru_cache(maxsize=4096)
def is_exact_under(fact: ValueFact, spec: Spec | None) -> bool:
    """Whether rounding under `spec` changes no value of `fact`."""
    if spec is None:
        return True
    if fact is None or (spec.flush and not fact.flush):
        return False
    return fact.format == spec.format or _is_format_subset(fact.format, spec.format)


def _is_format_subset(small: ElementFormat, large: ElementFormat) -> bool:
    """Whether `large` has every value of `small`, including infinities and -0; False in case of doubt."""
    if not isinstance(small, FloatFormat) or not isinstance(large, FloatFormat):
        return False
    if not (large.subnormals and large.zero and large.signed) or (small.has_inf and not large.has_inf):
        return False
    if small.has_negative_zero and not large.has_negative_zero:
        return False
    finer = small.emin - small.frac_bits >= large.emin - large.frac_bits and small.precision <= large.precision
    return finer and small.exact_max <= large.exact_max


def common_fact(facts: Iterable[ValueFact]) -> ValueFact:
    """The fact that holds for every one of several values: the spec that contains all their specs."""
    every: list[ValueFact] = list(facts)
    return next((k for k in every if k is not None and all(is_exact_under(other, k) for other in every)), None)


def holds_constant(spec: Spec | None, value: Any) -> bool:
    """Whether rounding under `spec` does not change a constant; False for a constant of several elements."""
    if spec is None:
        return True
    if np.size(value) != 1:
        return False
    whole = np.asarray(value)
    if np.iscomplexobj(whole):
        return holds_constant(spec, np.real(whole)) and holds_constant(spec, np.imag(whole))
    number = float(whole.astype(np.float64).item())
    return _holds_number(spec, number) if number else _holds_zero(spec.format, number)  # a cache takes -0 for 0


def at_format_limits(value: Any, spec: Spec) -> Any:
    """An array, with limits of the format in place of numbers that stand for limits of the dtype.

    A number of at least half the dtype's largest that lies beyond the format's becomes the same part of the format's.
    The dtype's smallest normal or subnormal number becomes the format's. All others are unchanged.
    """
    fmt, own, x = spec.format, jnp.finfo(value.dtype), np.asarray(value).astype(np.float64)
    size, most = np.abs(x), float(own.max)
    far = np.isfinite(x) & (size >= most / 2)
    normal, least = (size == float(one) for one in (own.smallest_normal, own.smallest_subnormal))
    if not np.any(far | normal | least):
        return value
    end, smallest = np.where(x < 0, *map(abs, finite_range_of(fmt))), float(fmt.smallest or 0)
    first = float(fmt.smallest_normal) if isinstance(fmt, FloatFormat) else smallest
    cases = [far & (size > end), normal & (size < first), least & (size < smallest)]
    return np.copysign(np.select(cases, [size / most * end, first, smallest], size), x).astype(value.dtype)


def finite_range_of(fmt: ElementFormat) -> tuple[float, float]:
    """The lowest and the largest finite value; infinite beyond the range of float64."""
    low, high = (float(end) if abs(end) < 1 << 1024 else math.copysign(math.inf, end) for end in (fmt.min, fmt.max))
    return low, high


def _holds_zero(fmt: ElementFormat, zero: float) -> bool:
    has = not isinstance(fmt, FloatFormat) or fmt.zero
    return has and (math.copysign(1.0, zero) > 0 or fmt.has_negative_zero)


@lru_cache(maxsize=4096)
def _holds_number(spec: Spec, value: float) -> bool:
    fmt = spec.format
    if math.isnan(value):
        return True
    if math.isinf(value):
        return fmt.has_inf and (value > 0 or fmt.signed)
    exact = Fraction(value)
    if isinstance(fmt, UniformFormat):
        count = exact * Fraction(2) ** fmt.frac_bits
        return count.denominator == 1 and fmt.min_code <= count <= fmt.max_code
    return isinstance(fmt, FloatFormat) and _holds_float(spec, fmt, exact)


def _holds_float(spec: Spec, fmt: FloatFormat, value: Fraction) -> bool:
    if (value < 0 and not fmt.signed) or abs(value) > fmt.exact_max:
        return False
    exponent = math.frexp(float(abs(value)))[1] - 1
    if exponent < fmt.emin and (spec.flush or not fmt.subnormals):
        return False
    quantum = max(exponent, fmt.emin) - fmt.frac_bits
    return (value / Fraction(2) ** quantum).denominator == 1
