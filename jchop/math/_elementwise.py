"""The table of elementwise functions: the name, the function of JAX, its formula, an example and its result.

Each is the emulated function. Rows with the accuracy ``"exact"`` and ``"elementary"`` round the exact result once. For
rows with ``"held"`` the carrier's result is exact; for the others the carrier's result is rounded once more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.scipy import special

from jchop._emulate.rules.functions import NamedFunction, exact_bitwise
from jchop._kernels.operation import operation_on_device
from jchop._round.arguments import Array, Key
from jchop._spec.spec import SpecLike
from jchop.math._call import as_math_operands, run_emulated

__all__ = ["abs", "add", "angle", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh"]
__all__ += ["bitwise_and", "bitwise_or", "bitwise_xor", "cbrt", "ceil", "clip", "conj", "cos", "cosh", "degrees"]
__all__ += ["digamma", "divide", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "floor", "floor_divide", "fma", "gamma"]
__all__ += ["gammaln", "gelu", "hypot", "imag", "log", "log1p", "log2", "log10", "logaddexp", "maximum", "minimum"]
__all__ += ["mod", "multiply", "negative", "power", "radians", "real", "reciprocal", "sigmoid", "sign", "sin", "sinh"]
__all__ += ["sqrt", "square", "subtract", "tan", "tanh", "trunc"]


# -- construction ------------------------------------------------------------------------------------------------------


class UnaryFunction(Protocol):
    """A function of one array."""

    def __call__(self, x: Any, spec: SpecLike, key: Key = None) -> Any: ...


class BinaryFunction(Protocol):
    """A function of two arrays, which broadcast."""

    def __call__(self, x: Any, y: Any, spec: SpecLike, key: Key = None) -> Any: ...


Example = tuple[str, str]


def unary(name: str, function: Callable[..., Any], formula: str, example: Example, **more: Any) -> UnaryFunction:
    """A function of one array; `example` has arguments and result in bfloat16, as text; `more`: see `_evaluate`."""

    def call(x: Any, spec: SpecLike, key: Key = None) -> Any:
        return _evaluate(function, {"x": x}, spec, key, **more)

    call.__name__ = call.__qualname__ = name
    return _documented(formula, example, **more)(call)


def binary(name: str, function: Callable[..., Any], formula: str, example: Example, **more: Any) -> BinaryFunction:
    """A function of two arrays, otherwise as `unary`."""

    def call(x: Any, y: Any, spec: SpecLike, key: Key = None) -> Any:
        return _evaluate(function, {"x": x, "y": y}, spec, key, **more)

    call.__name__ = call.__qualname__ = name
    return _documented(formula, example, **more)(call)


def _evaluate(
    function: Any,
    operands: dict[str, Any],
    spec: SpecLike,
    key: Any,
    accuracy: str = "elementary",
    own: NamedFunction | None = None,
    complex_too: bool = False,
) -> Any:
    """The emulated function.

    Args:
        function: the function of JAX.
        operands: its operands by name.
        spec: the argument `spec`.
        key: the argument `key`.
        accuracy: ``"exact"``, ``"elementary"``, ``"held"`` or ``"carrier"``, as in the docstring of this file.
        own: the function as one operation, if `emulate` does not know it.
        complex_too: whether operands may be complex.
    """
    spec, arrays = as_math_operands(tuple(operands), tuple(operands.values()), spec, accuracy, complex_too)
    return run_emulated(function, spec, arrays, key, own)


def _documented(
    formula: str, example: Example, accuracy: str = "elementary", complex_too: bool = False, own: Any = None
) -> Callable[[Any], Any]:
    """Gives a function its docstring."""
    del own

    def document(function: Any) -> Any:
        names = list(inspect.signature(function).parameters)[:-2]
        broadcasts = "; the operands broadcast and are promoted as in `jax.numpy`" if len(names) > 1 else ""
        dtypes = f"float16, bfloat16, float32 or float64{', complex64 or complex128 (by parts)' if complex_too else ''}"
        function.__module__ = "jchop.math"
        function.__doc__ = inspect.cleandoc(_FUNCTION_DOCSTRING).format(
            formula=formula,
            how=_ACCURACY_TEXTS["elementary of several" if accuracy == "elementary" and len(names) > 1 else accuracy],
            operands="\n".join(f"    {operand}: {dtypes}, any shape{broadcasts}." for operand in names),
            call=f"float(jc.math.{function.__name__}({example[0]}, 'bfloat16'))",
            result=example[1],
        )
        return function

    return document


_ACCURACY_TEXTS = {
    **dict.fromkeys(
        ("exact", "held"),
        """\
The operands are rounded to `spec`; then the exact result is rounded to it once, in every mode, without an intermediate
rounding to the carrier.""",
    ),
    "elementary": """\
The operands are rounded to `spec`; then the function's value, known to 36 bits or more, is rounded to it once: every
result is right, in every mode, under formats of up to 16 bits that float32 holds (docs/math.md). Under binary32 and
wider formats it is the carrier's result (float32, or float64 for float64 data), rounded once more.""",
    "elementary of several": """\
The operands are rounded to `spec`; then the function's value, known to about 44 bits, is rounded to it once, in every
mode, under formats of up to 16 bits that float32 holds (docs/math.md). Under binary32 and wider formats it is the
carrier's result (float32, or float64 for float64 data), rounded once more.""",
    "carrier": """\
The operands are rounded to `spec`; then the carrier's result (float32, or float64 for float64 data) is rounded to it
once more. The result can be wrong if the carrier's result is an ulp off, or if the device reads subnormal numbers of
the carrier as zero.""",
}
_FUNCTION_DOCSTRING = """\
{formula}, with `jax.numpy`'s name and meaning, as `jchop.emulate` computes it.

{how}

Derivatives are the derivatives of the carrier's function at the rounded operands, straight-through as in
`jchop.round_to_format`. Works under jit (`spec` static), vmap, scan and remat.

Args:
{operands}
    spec: a `jchop.Spec`, a format, or text such as ``"e5m2:stochastic"``.
    key: a typed key, required if `spec` is stochastic; each operand and the result
        draw from a part of it. Default None.

Returns:
    Results of the operands' dtype, float32 or float64 for integers; NumPy if they are NumPy arrays, numbers or lists,
    else JAX. Outside the domain NaN.

Raises:
    TypeError: for a dtype that is neither a carrier nor of integers or booleans, or a key that is not a typed key.
    ValueError: for a stochastic spec without a key, or a carrier that is too narrow for the spec.

Example:
    >>> import jchop as jc
    >>> {call}
    {result}
"""


# -- functions that `emulate` does not know as one operation -----------------------------------------------------------


@jax.jit
def _multiply_and_add(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


#: The fused multiply-add.
FMA = NamedFunction("fma", _multiply_and_add, ("float32",) * 3, partial(operation_on_device, "fma"))


def _bitwise_function(name: str) -> NamedFunction:
    """An operation on the bits of integers, whose derivative is zero."""

    def zero(x: Array, y: Array) -> Array:
        return jnp.zeros(jnp.broadcast_shapes(x.shape, y.shape), x.dtype)

    zero.__name__ = f"bitwise_{name}"
    return NamedFunction(zero.__name__, jax.jit(zero), ("float32",) * 2, partial(exact_bitwise, name))


_AND, _OR, _XOR = map(_bitwise_function, ("and", "or", "xor"))
_gelu = partial(jax.nn.gelu, approximate=False)

# -- operations --------------------------------------------------------------------------------------------------------

add = binary("add", jnp.add, "x + y", ("1.0, 0.001", "1.0"), accuracy="exact")
subtract = binary("subtract", jnp.subtract, "x - y", ("1.0, 0.001", "1.0"), accuracy="exact")
multiply = binary("multiply", jnp.multiply, "x y", ("1.5, 0.3", "0.451171875"), accuracy="exact")
divide = binary("divide", jnp.divide, "x / y", ("1.0, 3.0", "0.333984375"), accuracy="exact")
sqrt = unary("sqrt", jnp.sqrt, "The square root of x", ("2.0", "1.4140625"), accuracy="exact")
square = unary("square", jnp.square, "x²", ("1.3", "1.6796875"), accuracy="exact")
reciprocal = unary("reciprocal", jnp.reciprocal, "1 / x", ("3.0", "0.333984375"), accuracy="exact")
mod = binary("mod", jnp.mod, "x - floor(x / y) y, of the sign of y", ("-5.5, 2.0", "0.5"), accuracy="exact")
floor_divide = binary(
    "floor_divide",
    jnp.floor_divide,
    "floor(x / y) of the exact quotient; NaN if x is infinite, as in NumPy",
    ("-5.5, 2.0", "-3.0"),
    accuracy="exact",
)

# -- elementary functions ----------------------------------------------------------------------------------------------

sin = unary("sin", jnp.sin, "The sine of x in radians", ("2.0", "0.91015625"))
cos = unary("cos", jnp.cos, "The cosine of x in radians", ("2.0", "-0.416015625"))
tan = unary("tan", jnp.tan, "The tangent of x in radians", ("2.0", "-2.1875"))
arcsin = unary("arcsin", jnp.arcsin, "The angle in [-π/2, π/2] whose sine is x", ("0.5", "0.5234375"))
arccos = unary("arccos", jnp.arccos, "The angle in [0, π] whose cosine is x", ("0.5", "1.046875"))
arctan = unary("arctan", jnp.arctan, "The angle in [-π/2, π/2] whose tangent is x", ("0.5", "0.462890625"))
arctan2 = binary(
    "arctan2",
    jnp.arctan2,
    "The angle in [-π, π] of a point, x its ordinate, y its abscissa",
    ("1.0, 3.0", "0.322265625"),
)
sinh = unary("sinh", jnp.sinh, "(e^x - e^-x) / 2", ("2.0", "3.625"))
cosh = unary("cosh", jnp.cosh, "(e^x + e^-x) / 2", ("2.0", "3.765625"))
tanh = unary("tanh", jnp.tanh, "sinh(x) / cosh(x)", ("0.5", "0.462890625"))
arcsinh = unary("arcsinh", jnp.arcsinh, "The number whose hyperbolic sine is x", ("2.0", "1.4453125"))
arccosh = unary("arccosh", jnp.arccosh, "The number from 0 on whose hyperbolic cosine is x", ("2.0", "1.3203125"))
arctanh = unary("arctanh", jnp.arctanh, "The number whose hyperbolic tangent is x", ("0.5", "0.55078125"))
exp = unary("exp", jnp.exp, "e^x", ("2.0", "7.375"))
exp2 = unary("exp2", jnp.exp2, "2^x", ("0.5", "1.4140625"))
expm1 = unary("expm1", jnp.expm1, "e^x - 1", ("0.01", "0.01007080078125"))
log = unary("log", jnp.log, "The natural logarithm of x", ("2.0", "0.69140625"))
log2 = unary("log2", jnp.log2, "The logarithm of x to the base 2", ("3.0", "1.5859375"))
log10 = unary("log10", jnp.log10, "The logarithm of x to the base 10", ("2.0", "0.30078125"))
log1p = unary("log1p", jnp.log1p, "log(1 + x)", ("0.01", "0.00994873046875"))
logaddexp = binary("logaddexp", jnp.logaddexp, "log(e^x + e^y)", ("1.0, 2.0", "2.3125"))
cbrt = unary("cbrt", jnp.cbrt, "The cube root of x", ("2.0", "1.2578125"))
power = binary("power", jnp.power, "x^y", ("2.0, 0.5", "1.4140625"))
hypot = binary("hypot", jnp.hypot, "√(x² + y²)", ("1.0, 2.0", "2.234375"))
degrees = unary("degrees", jnp.degrees, "180 x / π", ("1.0", "57.25"))
radians = unary("radians", jnp.radians, "π x / 180", ("60.0", "1.046875"))
erf = unary("erf", special.erf, "The error function 2/√π ∫ e^(-t²) dt from 0 to x", ("0.5", "0.51953125"))
erfc = unary("erfc", special.erfc, "1 - erf(x)", ("0.5", "0.48046875"))
gammaln = unary("gammaln", special.gammaln, "log |Γ(x)| of the gamma function", ("4.5", "2.453125"), accuracy="carrier")
digamma = unary(
    "digamma", special.digamma, "Γ'(x) / Γ(x) of the gamma function", ("4.5", "1.390625"), accuracy="carrier"
)
sigmoid = unary("sigmoid", jax.nn.sigmoid, "1 / (1 + e^-x)", ("0.5", "0.62109375"))
gelu = unary(
    "gelu",
    _gelu,
    "x Φ(x), with Φ the distribution function of the normal distribution",
    ("0.5", "0.345703125"),
    accuracy="carrier",
)
gamma = unary("gamma", special.gamma, "The gamma function, (x - 1)! at integers", ("4.5", "11.625"), accuracy="carrier")
angle = unary("angle", jnp.angle, "The angle in [-π, π] of a complex number", ("-1.0", "3.140625"), complex_too=True)

# -- functions that the carrier computes exactly -----------------------------------------------------------------------

floor = unary("floor", jnp.floor, "The largest integer not above x", ("-0.3", "-1.0"), accuracy="held")
ceil = unary("ceil", jnp.ceil, "The smallest integer not below x", ("0.3", "1.0"), accuracy="held")
trunc = unary("trunc", jnp.trunc, "x without its fraction", ("-2.7", "-2.0"), accuracy="held")
sign = unary("sign", jnp.sign, "-1, 0 or 1 by the sign of x", ("-0.3", "-1.0"), accuracy="held")
abs = unary(
    "abs", jnp.abs, "|x|, of a complex number the carrier's", ("-0.3", "0.30078125"), accuracy="held", complex_too=True
)
fabs = unary("fabs", jnp.fabs, "|x| of real numbers", ("-0.3", "0.30078125"), accuracy="held")
negative = unary("negative", jnp.negative, "-x", ("0.3", "-0.30078125"), accuracy="exact")
maximum = binary(
    "maximum", jnp.maximum, "The larger of x and y, NaN if one is", ("0.3, -2.0", "0.30078125"), accuracy="exact"
)
minimum = binary(
    "minimum", jnp.minimum, "The smaller of x and y, NaN if one is", ("0.3, -2.0", "-2.0"), accuracy="exact"
)
real = unary("real", jnp.real, "The real part of x", ("0.3", "0.30078125"), accuracy="held", complex_too=True)
imag = unary("imag", jnp.imag, "The imaginary part of x", ("0.3", "0.0"), accuracy="held", complex_too=True)
conj = unary("conj", jnp.conj, "The complex conjugate of x", ("0.3", "0.30078125"), accuracy="held", complex_too=True)


@_documented("min(max(x, min), max)", ("7.3, 0.0, 1.0", "1.0"), "exact")
def clip(x: Any, min: Any, max: Any, spec: SpecLike, key: Key = None) -> Any:
    return _evaluate(jnp.clip, {"x": x, "min": min, "max": max}, spec, key, "exact")


@_documented("x y + z, without rounding the product", ("1.5, 0.3, -0.45", "0.001953125"), "exact")
def fma(x: Any, y: Any, z: Any, spec: SpecLike, key: Key = None) -> Any:
    return _evaluate(FMA.function, {"x": x, "y": y, "z": z}, spec, key, "exact", FMA)


# -- integers ----------------------------------------------------------------------------------------------------------

_BITWISE_FORMULA = (
    "The bits of x {} those of y, integers in two's complement of 32 bits (64 in float64) held as floating-point "
    "numbers; other operands give NaN"
)


def _bitwise(word: str, own: NamedFunction, result: str) -> BinaryFunction:
    example = ("12.0, 10.0", result)
    return binary(own.name, own.function, _BITWISE_FORMULA.format(word), example, accuracy="exact", own=own)


bitwise_and = _bitwise("and", _AND, "8.0")
bitwise_or = _bitwise("or", _OR, "14.0")
bitwise_xor = _bitwise("xor", _XOR, "6.0")
