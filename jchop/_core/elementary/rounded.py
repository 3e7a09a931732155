"""Functions whose exact value is rounded once, and the test for functions and formats that allow it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jchop import _bits
from jchop._core.arithmetic.exact import round_exact
from jchop._core.arithmetic.ranges import has_spare_bits
from jchop._core.elementary.functions import FUNCTIONS
from jchop._core.elementary.parts import F32, argument, as_exact, as_odd, narrowed, widened
from jchop._core.rounding.elements import round_elements
from jchop._core.rounding.grid import holds
from jchop.formats import CodebookFormat
from jchop.spec import Spec

__all__ = ["FUNCTIONS", "elementary", "rounds"]

Array = jax.Array


def rounds(name: str, spec: Spec) -> bool:
    """Whether `elementary` has a function of this name, and float32 has two bits more than the format of `spec`."""
    if name not in FUNCTIONS or not holds(spec, F32):
        return False
    return isinstance(spec.format, CodebookFormat) or has_spare_bits(spec.format, F32)


def elementary(x: Array, word: Array | None = None, *, name: str, spec: Spec) -> Array:
    """The function `name` of `FUNCTIONS` at `x`, rounded once under `spec`; `rounds(name, spec)` must hold.

    Args:
        x: float32, any values; or another dtype, if float32 holds the values.
        word: for the stochastic modes, a random word for each element: uint32; of a uint64 the upper half is used.
        name: the name of the function.
        spec: the rounding of its values.
    """
    if x.dtype.itemsize == 8:
        word = None if word is None else (word >> 32).astype(jnp.uint32)
        return widened(_rounded(narrowed(x), word, name, spec))
    return _rounded(x.astype(F32.name), word, name, spec).astype(x.dtype)


def _rounded(x: Array, word: Array | None, name: str, spec: Spec) -> Array:
    given = argument(x)
    value = FUNCTIONS[name](given)
    value = replace(value, cases=(*value.cases, (given.nan, x)))
    if spec.rounding.stochastic and not isinstance(spec.format, CodebookFormat):
        return round_exact(as_exact(value), spec, F32, word)
    return round_elements(_bits.join(*as_odd(value), F32), spec, F32, word)
