"""Rounding to decimals: the exact multiple of a power of ten, rounded once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_int
from jchop._core.arithmetic.ranges import carrier_range
from jchop._core.matmul.operations import operation_carrier, round_operation
from jchop._round.arguments import Array, SpecLike, as_operands
from jchop._spec.spec import Spec
from jchop.formats import binary32, binary64
from jchop.formats.rounding import Rounding
from jchop.math import _elementwise
from jchop.math._row import MathRow, call_row

__all__ = ["round"]

#: The largest power of ten that a carrier holds.
_MOST_DECIMALS = {"float32": 10, "float64": 22}
_DECIMAL_FORMATS = {"float32": binary32, "float64": binary64}


def round(x: Any, spec: SpecLike, key: Array | None = None, *, decimals: int = 0) -> Any:
    """The multiple of 10^-decimals nearest to x, on a tie the even multiple, as `jax.numpy.round`.

    The operand is rounded to `spec`; then the exact multiple is rounded to it once, in every mode. `jax.numpy`
    multiplies and divides x, with roundings in between. If the multiple of a negative number is zero, it is -0.

    Derivatives are zero, as for the carrier's function. Works under jit (`spec` and `decimals` static), vmap, scan and
    remat.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or text such as ``"e5m2:stochastic"``.
        key: a typed key, required if `spec` is stochastic; it is split into 2: the operand and the result. If the
            multiples are closer than values of the carrier, its words meet a distance of the carrier's precision.
            Default None.
        decimals: digits behind the decimal point, from -10 to 10, or from -22 to 22 in float64. Default 0.

    Returns:
        Results of the operand's dtype; NumPy if it is a NumPy array, a number or a list, else JAX.

    Raises:
        TypeError: for a dtype that is not a carrier, or a key that is not a typed key.
        ValueError: for a stochastic spec without a key, a carrier that is too narrow for the spec, or more decimals.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.round(2.5, "bfloat16")), float(jc.math.round(0.15625, "e5m7", decimals=1))
        (2.0, 0.2001953125)
    """
    (array,) = as_operands("x", (x,))
    max_decimals = _MOST_DECIMALS[operation_carrier(array.dtype).name] if array.dtype.name in CARRIERS else 0
    decimals = check_int("decimals", decimals, -max_decimals, max_decimals)
    row = (
        MathRow("round", ("x",), jnp.round, "", exact=_DecimalMultiple(decimals))
        if decimals
        else _elementwise.round_to_integer.row
    )
    return call_row(row, (array,), spec, key)


@dataclass(frozen=True)
class _DecimalMultiple:
    """The nearest multiple of 10^-decimals, rounded once."""

    decimals: int

    def __call__(self, operands: tuple[Array, ...], spec: Spec, word: Array | None) -> Array:
        (x,) = operands
        result = (_round_to_decimals if self.decimals > 0 else _round_to_tens)(x, abs(self.decimals), spec, word)
        is_integer = self.decimals > 0 and jnp.abs(x) >= 2.0 ** CARRIERS[x.dtype.name].fraction
        return jnp.where(~jnp.isfinite(x) | is_integer, x, result)


def _round_to_decimals(x: Array, decimals: int, spec: Spec, word: Array | None) -> Array:
    """The multiple for a positive number of decimals, if x may have a fraction.

    With h + l the exact product of x and the power of ten, the multiple is the integer next to it: a number of the
    carrier, or, if h has no fraction, h and the integer next to l. In that case the multiple and x differ by less than
    two places of the carrier, and the difference, rounded to odd, is added to x.
    """
    carrier, power = CARRIERS[x.dtype.name], jnp.full_like(x, 10.0**decimals)
    carrier_spec = Spec(_DECIMAL_FORMATS[carrier.name])
    high = x * power
    low = _decimal_operation("fma", (x, power, -high), carrier_spec)
    nearest = jnp.round(high)
    rest = high - nearest
    integer = nearest + ((rest == 0.5) & (low > 0)).astype(x.dtype) - ((rest == -0.5) & (low < 0)).astype(x.dtype)
    integer = jnp.where(integer == 0, jnp.copysign(integer, x), integer)
    quotient = _decimal_operation("div", (integer, power), spec, word)
    odd_spec = Spec(carrier_spec.format, rounding=Rounding.ODD)
    difference = _decimal_operation("div", (jnp.round(low) - low, power), odd_spec)
    corrected = _decimal_operation("add", (x, difference), spec, word)
    return jnp.where(jnp.abs(high) < 2.0**carrier.fraction, quotient, corrected)


def _round_to_tens(x: Array, zeros: int, spec: Spec, word: Array | None) -> Array:
    """The multiple for a negative number of decimals: x plus its exact distance to the multiple of 10^zeros."""
    power = jnp.full_like(x, 10.0**zeros)
    remainder = lax.rem(x, power)
    excess = jnp.abs(remainder)
    is_odd = jnp.abs(lax.rem(x, 2 * power)) >= power
    rounds_away = (excess > power / 2) | ((excess == power / 2) & is_odd)
    distance = jnp.where(rounds_away, jnp.copysign(power - excess, x), -remainder)
    result = _decimal_operation("add", (x, distance), spec, word)
    is_zero = ~rounds_away & (jnp.abs(x) < power)
    return jnp.where(is_zero, _decimal_operation("mul", (jnp.zeros_like(x), x), spec, word), result)


def _decimal_operation(name: str, operands: tuple[Array, ...], spec: Spec, word: Array | None = None) -> Array:
    """An operation on arbitrary values of the carrier."""
    full_range = carrier_range(CARRIERS[operands[0].dtype.name])
    return round_operation(name, operands, spec, word, ranges=[full_range] * len(operands))
