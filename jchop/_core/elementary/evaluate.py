"""Functions whose exact value is rounded once, and the test for functions and formats that allow it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jchop._common import bit_ops
from jchop._core.arithmetic.exact import round_exact
from jchop._core.arithmetic.ranges import has_spare_bits
from jchop._core.elementary.functions import UNARY_FUNCTIONS
from jchop._core.elementary.functions_of_two import BINARY_FUNCTIONS
from jchop._core.elementary.parts import (
    FLOAT32_CARRIER,
    Argument,
    FunctionValue,
    exact_of_value,
    narrow_by_bits,
    round_value_to_odd,
    split_argument,
    widen_by_bits,
)
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import carrier_holds
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat

__all__ = ["BINARY_FUNCTIONS", "UNARY_FUNCTIONS", "elementary_function", "supports_function"]

Array = jax.Array


def supports_function(name: str, spec: Spec) -> bool:
    """Whether `elementary_function` has a function of this name, and float32 two bits more than the format."""
    if not (name in UNARY_FUNCTIONS or name in BINARY_FUNCTIONS) or not carrier_holds(spec, FLOAT32_CARRIER):
        return False
    return isinstance(spec.format, CodebookFormat) or has_spare_bits(spec.format, FLOAT32_CARRIER)


def elementary_function(x: Array, *more: Array, name: str, spec: Spec) -> Array:
    """The function `name`, rounded once under `spec`; `supports_function(name, spec)` must hold.

    Args:
        x: float32, any values; or another dtype, if float32 holds the values.
        more: for a function of `BINARY_FUNCTIONS`, the second operand, of the same dtype and shape; then, for the
            stochastic modes, a random word for each element: uint32; of a uint64 the upper half is used.
        name: the name of the function.
        spec: the rounding of its values.
    """
    count = 2 if name in BINARY_FUNCTIONS else 1
    operands, word = (x, *more)[:count], (*more, None)[count - 1]
    if x.dtype.itemsize == 8:
        word = None if word is None else (word >> 32).astype(jnp.uint32)
        return widen_by_bits(_round_function([narrow_by_bits(v) for v in operands], word, name, spec))
    return _round_function([v.astype(FLOAT32_CARRIER.name) for v in operands], word, name, spec).astype(x.dtype)


def _round_function(operands: list[Array], word: Array | None, name: str, spec: Spec) -> Array:
    value = _function_value([split_argument(x) for x in operands], operands[0], name)
    if spec.rounding.stochastic and not isinstance(spec.format, CodebookFormat):
        return round_exact(exact_of_value(value), spec, FLOAT32_CARRIER, word)
    return round_to_spec(bit_ops.join_sign(*round_value_to_odd(value), FLOAT32_CARRIER), spec, FLOAT32_CARRIER, word)


def _function_value(arguments: list[Argument], x: Array, name: str) -> FunctionValue:
    if name in BINARY_FUNCTIONS:
        return BINARY_FUNCTIONS[name](*arguments)
    value = UNARY_FUNCTIONS[name](*arguments)
    return replace(value, cases=(*value.cases, (arguments[0].nan, x)))
