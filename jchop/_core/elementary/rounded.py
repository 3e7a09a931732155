"""Functions whose exact value is rounded once, and the test for functions and formats that allow it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jchop import _bits
from jchop._core.arithmetic.exact import round_exact
from jchop._core.arithmetic.ranges import has_spare_bits
from jchop._core.elementary.functions import FUNCTIONS
from jchop._core.elementary.functions_of_two import FUNCTIONS_OF_TWO
from jchop._core.elementary.parts import F32, Argument, Value, argument, as_exact, as_odd, narrowed, widened
from jchop._core.rounding.elements import round_elements
from jchop._core.rounding.grid import holds
from jchop.formats import CodebookFormat
from jchop.spec import Spec

__all__ = ["FUNCTIONS", "FUNCTIONS_OF_TWO", "elementary", "rounds"]

Array = jax.Array


def rounds(name: str, spec: Spec) -> bool:
    """Whether `elementary_function` has a function of this name, and float32 two bits more than the format."""
    if not (name in FUNCTIONS or name in FUNCTIONS_OF_TWO) or not holds(spec, F32):
        return False
    return isinstance(spec.format, CodebookFormat) or has_spare_bits(spec.format, F32)


def elementary(x: Array, *more: Array, name: str, spec: Spec) -> Array:
    """The function `name`, rounded once under `spec`; `supports_function(name, spec)` must hold.

    Args:
        x: float32, any values; or another dtype, if float32 holds the values.
        more: for a function of `BINARY_FUNCTIONS`, the second operand, of the same dtype and shape; then, for the
            stochastic modes, a random word for each element: uint32; of a uint64 the upper half is used.
        name: the name of the function.
        spec: the rounding of its values.
    """
    count = 2 if name in FUNCTIONS_OF_TWO else 1
    operands, word = (x, *more)[:count], (*more, None)[count - 1]
    if x.dtype.itemsize == 8:
        word = None if word is None else (word >> 32).astype(jnp.uint32)
        return widened(_rounded([narrowed(v) for v in operands], word, name, spec))
    return _rounded([v.astype(F32.name) for v in operands], word, name, spec).astype(x.dtype)


def _rounded(operands: list[Array], word: Array | None, name: str, spec: Spec) -> Array:
    value = _value([argument(x) for x in operands], operands[0], name)
    if spec.rounding.stochastic and not isinstance(spec.format, CodebookFormat):
        return round_exact(as_exact(value), spec, F32, word)
    return round_elements(_bits.join(*as_odd(value), F32), spec, F32, word)


def _value(arguments: list[Argument], x: Array, name: str) -> Value:
    if name in FUNCTIONS_OF_TWO:
        return FUNCTIONS_OF_TWO[name](*arguments)
    value = FUNCTIONS[name](*arguments)
    return replace(value, cases=(*value.cases, (arguments[0].nan, x)))
