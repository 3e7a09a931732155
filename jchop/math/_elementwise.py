"""The table of elementwise functions: the name, the carrier's function, its formula, an example and its result.

Rows with ``exact`` and ``elementary`` round the exact result once. For rows with
``carrier_is_exact`` the carrier's result is exact. For the others the carrier's result is rounded once more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from jchop._round.arguments import Array, SpecLike
from jchop.math import _carrier, _exact
from jchop.math._row import MathRow, binary_function, call_row, ternary_function, unary_function, with_row_docstring

__all__ = [
    "abs",
    "add",
    "angle",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "cbrt",
    "ceil",
    "clip",
    "conj",
    "cos",
    "cosh",
    "degrees",
    "digamma",
    "divide",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "fabs",
    "floor",
    "floor_divide",
    "fma",
    "gamma",
    "gammaln",
    "gelu",
    "hypot",
    "imag",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "power",
    "radians",
    "real",
    "reciprocal",
    "round_to_integer",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
]

# -- operations --------------------------------------------------------------------------------------------------------

add = binary_function("add", jnp.add, "x + y", ("1.0, 0.001", "1.0"), exact="add")
subtract = binary_function("subtract", jnp.subtract, "x - y", ("1.0, 0.001", "1.0"), exact="sub")
multiply = binary_function("multiply", jnp.multiply, "x y", ("1.5, 0.3", "0.451171875"), exact="mul")
divide = binary_function("divide", jnp.divide, "x / y", ("1.0, 3.0", "0.333984375"), exact="div")
fma = ternary_function(
    "fma",
    lambda x, y, z: x * y + z,
    "x y + z, without rounding the product",
    ("1.5, 0.3, -0.45", "0.001953125"),
    exact="fma",
)
sqrt = unary_function("sqrt", jnp.sqrt, "The square root of x", ("2.0", "1.4140625"), exact="sqrt")
square = unary_function("square", jnp.square, "x²", ("1.3", "1.6796875"), exact="square")
reciprocal = unary_function(
    "reciprocal", jnp.reciprocal, "1 / x", ("3.0", "0.333984375"), exact=_exact.exact_reciprocal
)
mod = binary_function(
    "mod", jnp.mod, "x - floor(x / y) y, of the sign of y", ("-5.5, 2.0", "0.5"), exact=_exact.exact_mod
)
floor_divide = binary_function(
    "floor_divide",
    jnp.floor_divide,
    "floor(x / y) of the exact quotient; NaN if x is infinite, as in NumPy",
    ("-5.5, 2.0", "-3.0"),
    exact=_exact.exact_floor_divide,
)

# -- elementary functions ----------------------------------------------------------------------------------------------

sin = unary_function("sin", jnp.sin, "The sine of x in radians", ("2.0", "0.91015625"), elementary="sin")
cos = unary_function("cos", jnp.cos, "The cosine of x in radians", ("2.0", "-0.416015625"), elementary="cos")
tan = unary_function("tan", jnp.tan, "The tangent of x in radians", ("2.0", "-2.1875"), elementary="tan")
arcsin = unary_function(
    "arcsin", jnp.arcsin, "The angle in [-π/2, π/2] whose sine is x", ("0.5", "0.5234375"), elementary="asin"
)
arccos = unary_function(
    "arccos", jnp.arccos, "The angle in [0, π] whose cosine is x", ("0.5", "1.046875"), elementary="acos"
)
arctan = unary_function(
    "arctan", jnp.arctan, "The angle in [-π/2, π/2] whose tangent is x", ("0.5", "0.462890625"), elementary="atan"
)
arctan2 = binary_function(
    "arctan2",
    jnp.arctan2,
    "The angle in [-π, π] of a point, x its ordinate, y its abscissa",
    ("1.0, 3.0", "0.322265625"),
    elementary="atan2",
)
sinh = unary_function("sinh", jnp.sinh, "(e^x - e^-x) / 2", ("2.0", "3.625"), elementary="sinh")
cosh = unary_function("cosh", jnp.cosh, "(e^x + e^-x) / 2", ("2.0", "3.765625"), elementary="cosh")
tanh = unary_function("tanh", jnp.tanh, "sinh(x) / cosh(x)", ("0.5", "0.462890625"), elementary="tanh")
arcsinh = unary_function(
    "arcsinh", jnp.arcsinh, "The number whose hyperbolic sine is x", ("2.0", "1.4453125"), elementary="asinh"
)
arccosh = unary_function(
    "arccosh",
    jnp.arccosh,
    "The number from 0 on whose hyperbolic cosine is x",
    ("2.0", "1.3203125"),
    elementary="acosh",
)
arctanh = unary_function(
    "arctanh", jnp.arctanh, "The number whose hyperbolic tangent is x", ("0.5", "0.55078125"), elementary="atanh"
)
exp = unary_function("exp", jnp.exp, "e^x", ("2.0", "7.375"), elementary="exp")
exp2 = unary_function("exp2", jnp.exp2, "2^x", ("0.5", "1.4140625"), elementary="exp2")
expm1 = unary_function("expm1", jnp.expm1, "e^x - 1", ("0.01", "0.01007080078125"), elementary="expm1")
log = unary_function("log", jnp.log, "The natural logarithm of x", ("2.0", "0.69140625"), elementary="log")
log2 = unary_function("log2", jnp.log2, "The logarithm of x to the base 2", ("3.0", "1.5859375"), elementary="log2")
log10 = unary_function(
    "log10", jnp.log10, "The logarithm of x to the base 10", ("2.0", "0.30078125"), elementary="log10"
)
log1p = unary_function("log1p", jnp.log1p, "log(1 + x)", ("0.01", "0.00994873046875"), elementary="log1p")
logaddexp = binary_function(
    "logaddexp", jnp.logaddexp, "log(e^x + e^y)", ("1.0, 2.0", "2.3125"), elementary="logaddexp"
)
cbrt = unary_function("cbrt", jnp.cbrt, "The cube root of x", ("2.0", "1.2578125"), elementary="cbrt")
power = binary_function("power", jnp.power, "x^y", ("2.0, 0.5", "1.4140625"), elementary="pow")
hypot = binary_function("hypot", jnp.hypot, "√(x² + y²)", ("1.0, 2.0", "2.234375"), elementary="hypot")
degrees = unary_function("degrees", jnp.degrees, "180 x / π", ("1.0", "57.25"), elementary="degrees")
radians = unary_function("radians", jnp.radians, "π x / 180", ("60.0", "1.046875"), elementary="radians")
erf = unary_function(
    "erf", special.erf, "The error function 2/√π ∫ e^(-t²) dt from 0 to x", ("0.5", "0.51953125"), elementary="erf"
)
erfc = unary_function("erfc", special.erfc, "1 - erf(x)", ("0.5", "0.48046875"), elementary="erfc")
gammaln = unary_function("gammaln", special.gammaln, "log |Γ(x)| of the gamma function", ("4.5", "2.453125"))
digamma = unary_function("digamma", special.digamma, "Γ'(x) / Γ(x) of the gamma function", ("4.5", "1.390625"))
sigmoid = unary_function("sigmoid", jax.nn.sigmoid, "1 / (1 + e^-x)", ("0.5", "0.62109375"), elementary="logistic")
gelu = unary_function(
    "gelu",
    partial(jax.nn.gelu, approximate=False),
    "x Φ(x), with Φ the distribution function of the normal distribution",
    ("0.5", "0.345703125"),
)
gamma = unary_function("gamma", special.gamma, "The gamma function, (x - 1)! at integers", ("4.5", "11.625"))
angle = unary_function(
    "angle",
    jnp.angle,
    "The angle in [-π, π] of a complex number",
    ("-1.0", "3.140625"),
    complex_too=True,
)

# -- functions that the carrier computes exactly -----------------------------------------------------------------------

floor = unary_function(
    "floor", _carrier.carrier_floor, "The largest integer not above x", ("-0.3", "-1.0"), carrier_is_exact=True
)
ceil = unary_function(
    "ceil", _carrier.carrier_ceil, "The smallest integer not below x", ("0.3", "1.0"), carrier_is_exact=True
)
round_to_integer = unary_function(
    "round", jnp.round, "The integer nearest to x, on a tie the even one", ("2.5", "2.0"), carrier_is_exact=True
)
trunc = unary_function("trunc", jnp.trunc, "x without its fraction", ("-2.7", "-2.0"), carrier_is_exact=True)
sign = unary_function(
    "sign", _carrier.carrier_sign, "-1, 0 or 1 by the sign of x", ("-0.3", "-1.0"), carrier_is_exact=True
)
abs = unary_function(
    "abs",
    jnp.abs,
    "|x|, of a complex number the carrier's",
    ("-0.3", "0.30078125"),
    carrier_is_exact=True,
    complex_too=True,
)
fabs = unary_function("fabs", jnp.fabs, "|x| of real numbers", ("-0.3", "0.30078125"), carrier_is_exact=True)
negative = unary_function("negative", jnp.negative, "-x", ("0.3", "-0.30078125"), exact="neg")
maximum = binary_function(
    "maximum", jnp.maximum, "The larger of x and y, NaN if one is", ("0.3, -2.0", "0.30078125"), exact="max"
)
minimum = binary_function(
    "minimum", jnp.minimum, "The smaller of x and y, NaN if one is", ("0.3, -2.0", "-2.0"), exact="min"
)
real = unary_function(
    "real", jnp.real, "The real part of x", ("0.3", "0.30078125"), carrier_is_exact=True, complex_too=True
)
imag = unary_function(
    "imag", jnp.imag, "The imaginary part of x", ("0.3", "0.0"), carrier_is_exact=True, complex_too=True
)
conj = unary_function(
    "conj", jnp.conj, "The complex conjugate of x", ("0.3", "0.30078125"), carrier_is_exact=True, complex_too=True
)


_CLIP_ROW = MathRow("clip", ("x", "min", "max"), jnp.clip, "min(max(x, min), max)", exact=_exact.exact_clip)


def clip(x: Any, min: Any, max: Any, spec: SpecLike, key: Array | None = None) -> Any:
    return call_row(_CLIP_ROW, (x, min, max), spec, key)


clip = with_row_docstring(clip, _CLIP_ROW, ("7.3, 0.0, 1.0", "1.0"))


# -- integers ----------------------------------------------------------------------------------------------------------

_BITWISE_FORMULA = (
    "The bits of x {} those of y, integers in two's complement of 32 bits (64 in float64) held as floating-point "
    "numbers; other operands give NaN"
)


def _zero_derivative(x: Array, y: Array) -> Array:
    """The derivative of a function of integers is zero."""
    return jnp.zeros(jnp.broadcast_shapes(x.shape, y.shape), x.dtype)


bitwise_and = binary_function(
    "bitwise_and",
    _zero_derivative,
    _BITWISE_FORMULA.format("and"),
    ("12.0, 10.0", "8.0"),
    exact=partial(_exact.exact_bitwise, "and"),
)
bitwise_or = binary_function(
    "bitwise_or",
    _zero_derivative,
    _BITWISE_FORMULA.format("or"),
    ("12.0, 10.0", "14.0"),
    exact=partial(_exact.exact_bitwise, "or"),
)
bitwise_xor = binary_function(
    "bitwise_xor",
    _zero_derivative,
    _BITWISE_FORMULA.format("xor"),
    ("12.0, 10.0", "6.0"),
    exact=partial(_exact.exact_bitwise, "xor"),
)
