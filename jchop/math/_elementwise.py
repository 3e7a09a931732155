"""The table of elementwise functions: the name, the function of JAX, its formula, an example and its result.

Each is the emulated function. Rows with the accuracy ``"exact"`` and ``"elementary"`` round the exact result once. For
rows with ``"held"`` the carrier's result is exact; for the others the carrier's result is rounded once more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, check_bool, check_int
from jchop._core.matmul.operations import operation_carrier
from jchop._emulate.rules.functions import NamedFunction, exact_bitwise, exact_decimals, sort_keys
from jchop._kernels.operation import operation_on_device
from jchop._kernels.primitive import materialize
from jchop._round.arguments import Array, Key, as_array, as_operands, is_integer_or_bool
from jchop._spec.spec import SpecLike
from jchop.math._call import as_math_operands, broadcast_shape, check_axis, run_emulated

__all__ = ["abs", "add", "angle", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh"]
__all__ += ["bitwise_and", "bitwise_or", "bitwise_xor", "cbrt", "ceil", "clip", "conj", "cos", "cosh", "degrees"]
__all__ += ["digamma", "divide", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "floor", "floor_divide", "fma", "gamma"]
__all__ += ["gammaln", "gelu", "hypot", "imag", "log", "log1p", "log2", "log10", "logaddexp", "maximum", "minimum"]
__all__ += ["mod", "multiply", "negative", "power", "radians", "real", "reciprocal", "sigmoid", "sign", "sin", "sinh"]
__all__ += ["sqrt", "square", "subtract", "tan", "tanh", "trunc"]
__all__ += ["axpy", "cross", "diff", "frexp", "interp", "ldexp", "linspace", "modf", "round", "where"]


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


# == functions of a few operations on each element, every one rounded ==================================================


def round(x: Any, spec: SpecLike, key: Key = None, *, decimals: int = 0) -> Any:
    """The multiple of 10^-decimals nearest to x, on a tie the even multiple, as `jax.numpy.round`.

    The operand is rounded to `spec`; then the exact multiple is rounded to it once, in every mode. `jax.numpy`
    multiplies and divides x, with roundings in between. If the multiple of a negative number is zero, it is -0.

    Derivatives are zero, as for the carrier's function. Works under jit (`spec` and `decimals` static), vmap, scan and
    remat.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or a text like ``"e5m2:stochastic"``.
        key: a typed key, required if `spec` is stochastic. Default None.
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
    most = 0 if array.dtype.name not in CARRIERS else 10 if operation_carrier(array.dtype).name == "float32" else 22
    decimals = check_int("decimals", decimals, -most, most)
    spec, arrays = as_math_operands("x", (array,), spec, "exact" if decimals else "held")
    if not decimals:
        return run_emulated(jnp.round, spec, arrays, key)
    own = _round_to(decimals)
    return run_emulated(own.function, spec, arrays, key, own)


@lru_cache(maxsize=64)
def _round_to(decimals: int) -> NamedFunction:
    function = jax.jit(lambda x: jnp.round(x, decimals))
    return NamedFunction("round_to_decimals", function, exact=partial(exact_decimals, decimals))


def frexp(x: Any, spec: SpecLike, key: Key = None) -> Any:
    """The significand m and the exponent e of x = m 2^e, as `jax.numpy.frexp`: ``0.5 <= |m| < 1``.

    `x` and then m are rounded to `spec`; the integer e is not rounded. For zeros, infinities and NaN, e = 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.

    Returns:
        m, of the dtype of `x`, and e, int32.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`.

    Example:
        >>> import jchop as jc
        >>> significand, exponent = jc.math.frexp(12.3, "e5m2")
        >>> float(significand), int(exponent)
        (0.75, 4)
    """
    spec, arrays = as_math_operands("x", (x,), spec, "held")
    return run_emulated(jnp.frexp, spec, arrays, key)


def modf(x: Any, spec: SpecLike, key: Key = None) -> Any:
    """The fraction and the integer part of `x`, both of its sign, as `jax.numpy.modf`.

    `x` and then both parts are rounded to `spec`. An infinity has the fraction 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.

    Returns:
        The fraction and the integer part, of the dtype of `x`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`.

    Example:
        >>> import jchop as jc
        >>> fraction, whole = jc.math.modf(-2.8, "e5m2")
        >>> float(fraction), float(whole)
        (-0.0, -3.0)
    """
    spec, arrays = as_math_operands("x", (x,), spec, "held")
    return run_emulated(jnp.modf, spec, arrays, key)


def ldexp(x: Any, n: Any, spec: SpecLike, key: Key = None) -> Any:
    """The exact x 2^n, rounded once, as `jax.numpy.ldexp`.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        n: integers, which broadcast against `x`; they are not rounded.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.

    Returns:
        An array of the dtype of `x`. The derivative by `x` is 2^n.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or if `n` is not of an integer dtype.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.ldexp(0.3, -5, "e5m2"))
        0.009765625
    """
    spec, arrays = as_math_operands("x", (x,), spec)
    exponent = as_array("n", n)
    if not jnp.issubdtype(exponent.dtype, jnp.integer):
        raise TypeError(f"n has dtype {exponent.dtype}; allowed: integers")
    if isinstance(exponent, np.ndarray):  # 64-bit integers would lose their high words
        exponent = np.clip(exponent, -(1 << 30), 1 << 30).astype(np.int32)
    return run_emulated(jnp.ldexp, spec, (*arrays, exponent), key)


def diff(x: Any, spec: SpecLike, key: Key = None, *, n: int = 1, axis: int = -1) -> Any:
    """Differences of neighbours, x[i+1] - x[i], applied `n` times, each rounded once, as `jax.numpy.diff`.

    Args:
        x: float16, bfloat16, float32 or float64, of at least one axis; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
        n: number of repetitions. Default 1.
        axis: axis of the differences. Default -1.

    Returns:
        An array of the dtype of `x`, shorter by `n` along `axis`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for an axis that `x` does not have.

    Example:
        >>> import jchop as jc
        >>> jc.math.diff([1.0, 1.25, 6.0], "e5m2").tolist()
        [0.25, 5.0]
    """
    spec, arrays = as_math_operands("x", (x,), spec)
    n, axis = check_int("n", n, 0), check_axis(axis, arrays[0].ndim)
    return run_emulated(jnp.diff, spec, arrays, key, n=n, axis=axis)


def axpy(a: Any, x: Any, y: Any, spec: SpecLike, key: Key = None, *, fused: bool = False) -> Any:
    """A x + y, like the BLAS routine, with product and sum rounded; with `fused` only the sum is rounded.

    Args:
        a: float16, bfloat16, float32 or float64, a scalar or an array; all operands are rounded to `spec` first.
        x: of the same dtype, or promoted as in `jax.numpy`.
        y: as `x`; the three broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
        fused: whether the product is exact. Default False.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.axpy(1.25, 1.25, -1.5, "e5m2")), float(jc.math.axpy(1.25, 1.25, -1.5, "e5m2", fused=True))
        (0.0, 0.0625)
    """
    check_bool("fused", fused)
    spec, arrays = as_math_operands("axy", (a, x, y), spec)
    return run_emulated(FMA.function if fused else _axpy, spec, arrays, key, FMA if fused else None)


def _axpy(a: Array, x: Array, y: Array) -> Array:
    return a * x + y


def where(condition: Any, x: Any, y: Any, spec: SpecLike, key: Key = None) -> Any:
    """`x` if `condition` is true, else `y`, as `jax.numpy.where`; both are rounded to `spec` first.

    Args:
        condition: booleans, or integers, of which 0 is false.
        x: float16, bfloat16, float32 or float64.
        y: of the same dtype, or promoted as in `jax.numpy`; the three broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.

    Returns:
        An array of the dtype of `x` and `y`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for a condition of another dtype.

    Example:
        >>> import jchop as jc
        >>> jc.math.where([True, False], [1.1, 1.1], 0.3, "e5m2").tolist()
        [1.0, 0.3125]
    """
    spec, arrays = as_math_operands(("x", "y"), (x, y), spec)
    mask = as_array("condition", condition)
    if not is_integer_or_bool(mask.dtype):
        raise TypeError(f"condition has dtype {mask.dtype}; allowed: booleans and integers, such as condition != 0")
    return run_emulated(_where, spec, (*arrays, mask), key)


def _where(x: Array, y: Array, condition: Array) -> Array:
    return jnp.where(condition != 0, x, y)


def cross(
    a: Any,
    b: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    axisa: int = -1,
    axisb: int = -1,
    axisc: int = -1,
    axis: int | None = None,
) -> Any:
    """The cross product of vectors, as `jax.numpy.cross`: each element is A(P(a_i b_j) - P(a_j b_i)).

    Both products and their difference are rounded to `spec`. A vector of two elements gets a third element, +0. For two
    of these vectors, the result is the third element of the product.

    Args:
        a: float16, bfloat16, float32 or float64, vectors of two or three elements; rounded to `spec` first.
        b: of the same dtype, or promoted as in `jax.numpy`; the other axes broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
        axisa: the axis of `a` with the elements. Default -1.
        axisb: the axis of `b` with the elements. Default -1.
        axisc: the axis of the result with the elements. Default -1.
        axis: replaces all three. Default None.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.

    Example:
        >>> import jchop as jc
        >>> jc.math.cross([1.0, 2.0, 3.0], [1.25, 1.0, -1.0], "e5m2").tolist()
        [-5.0, 5.0, -1.5]
    """
    spec, (x, y) = as_math_operands(("a", "b"), (a, b), spec)
    if axis is not None:
        axisa = axisb = axisc = axis
    vector_axes = check_axis(axisa, x.ndim, "axisa"), check_axis(axisb, y.ndim, "axisb")
    lengths = x.shape[vector_axes[0]], y.shape[vector_axes[1]]
    if not {*lengths} <= {2, 3}:
        raise ValueError(f"a has shape {x.shape} and b has shape {y.shape}: their vectors must have 2 or 3 elements")
    outer_shapes = [tuple(np.delete(v.shape, place)) for v, place in zip((x, y), vector_axes, strict=True)]
    refusal = f"a has shape {x.shape} and b has shape {y.shape}: they do not broadcast"
    outer_shape = broadcast_shape(refusal, *outer_shapes)
    is_planar = lengths == (2, 2)
    result_axis = -1 if is_planar else check_axis(axisc, len(outer_shape) + 1, "axisc")
    options = {"vector_axes": vector_axes, "result_axis": result_axis, "is_planar": is_planar}
    return run_emulated(_cross, spec, (x, y), key, **options)


def _cross(a: Array, b: Array, *, vector_axes: tuple[int, int], result_axis: int, is_planar: bool) -> Array:
    x, y = (jnp.moveaxis(v, axis, -1) for v, axis in zip((a, b), vector_axes, strict=True))
    if is_planar:
        return x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0]
    x, y = (jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 3 - v.shape[-1])]) for v in (x, y))
    i, j = np.array([1, 2, 0]), np.array([2, 0, 1])
    return jnp.moveaxis(x[..., i] * y[..., j] - x[..., j] * y[..., i], -1, result_axis)


def linspace(
    start: Any, stop: Any, spec: SpecLike, key: Key = None, *, num: int = 50, endpoint: bool = True, axis: int = 0
) -> Any:
    """Evenly spaced numbers, as `jax.numpy.linspace`: x_i = A(start + P(i h)) with h = A(A(stop - start) / n).

    n is the number of intervals, `num` - 1, or `num` without the endpoint. Every operation is rounded to `spec`; the
    integers n and i are not rounded. With `endpoint` the last number is `stop`.

    Args:
        start: float16, bfloat16, float32 or float64, the first number, any shape; rounded to `spec` first.
        stop: of the same dtype, or promoted as in `jax.numpy`; both broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
        num: the number of numbers, >= 0. Default 50.
        endpoint: whether `stop` is the last number. Default True.
        axis: the axis of i in the result. Default 0.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for more numbers than the carrier counts exactly.

    Example:
        >>> import jchop as jc
        >>> jc.math.linspace(0.0, 1.0, "e5m2", num=4).tolist()
        [0.0, 0.3125, 0.625, 1.0]
    """
    spec, arrays = as_math_operands(("start", "stop"), (start, stop), spec)
    check_bool("endpoint", endpoint)
    num = check_int("num", num, 0, 2 << operation_carrier(arrays[0].dtype).fraction)
    axis = check_axis(axis, len(np.broadcast_shapes(*(array.shape for array in arrays))) + 1)
    return run_emulated(_linspace, spec, arrays, key, num=num, endpoint=endpoint, axis=axis)


def _linspace(start: Array, stop: Array, *, num: int, endpoint: bool, axis: int) -> Array:
    # Quirk `long_fusion_compiled_for_minutes`: each of these is read by several operations.
    start, stop = jnp.broadcast_arrays(materialize(start), materialize(stop))
    intervals = num - 1 if endpoint else num
    if intervals > 0:
        step = materialize(materialize(stop - start) / jnp.int32(intervals))
        result = start + jnp.arange(num, dtype=jnp.int32).reshape(-1, *(1,) * start.ndim) * step
        result = jnp.concatenate([result[:-1], stop[None]]) if endpoint else result
    else:
        result = jnp.broadcast_to(start, (num, *start.shape))
    return jnp.moveaxis(result, 0, axis)


def interp(x: Any, xp: Any, fp: Any, spec: SpecLike, key: Key = None, *, left: Any = None, right: Any = None) -> Any:
    """Piecewise linear interpolation, as `jax.numpy.interp`: f = A(f_i + P(Q(d / h) e)).

    Here xp_i is the last node not above x, d = A(x - xp_i), h = A(xp_(i+1) - xp_i) and e = A(fp_(i+1) - fp_i). A, Q and
    P are the sum, the quotient and the product, rounded to `spec`. At a node the value is its value in `fp`. If several
    nodes are rounded to one number, the value there is the value of the last one.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; rounded to `spec` first, like all operands.
        xp: of the same dtype, or promoted as in `jax.numpy`, the nodes, shape (n,), ascending, n >= 1.
        fp: values at the nodes, shape (n,).
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
        left: the value below the first node, a scalar. Default None: the first of `fp`.
        right: the value above the last node, a scalar. Default None: the last of `fp`.

    Returns:
        An array of the shape of `x`. NaN for NaN. The derivative is the derivative of the formula in the carrier, at
        rounded values.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.

    Example:
        >>> import jchop as jc
        >>> jc.math.interp([0.5, 1.75, 9.0], [0.0, 1.0, 2.0], [0.0, 3.0, 2.0], "e5m2").tolist()
        [1.5, 2.0, 2.0]
    """
    operands = {"x": x, "xp": xp, "fp": fp, "left": left, "right": right}
    names = [name for name, value in operands.items() if value is not None or name in ("x", "xp", "fp")]
    spec, arrays = as_math_operands(names, [operands[name] for name in names], spec)
    nodes, values = arrays[1].shape, arrays[2].shape
    if len(nodes) != 1 or not nodes[0] or nodes != values:
        raise ValueError(f"xp has shape {nodes} and fp has shape {values}; both must be (n,), n >= 1")
    for name, array in zip(names[3:], arrays[3:], strict=True):
        check(not array.shape, f"{name} has shape {array.shape}; it must be a scalar")
    return run_emulated(_interp, spec, arrays, key, ends=tuple(names[3:]))


def _interp(x: Array, xp: Array, fp: Array, *values: Array, ends: tuple[str, ...]) -> Array:
    by_name = dict(zip(ends, values, strict=True))
    x_keys, node_keys = sort_keys(x, zeros_equal=True), sort_keys(xp, zeros_equal=True)
    # Places among the nodes are found by bits, since a device may read subnormal numbers as zero.
    # Quirk `long_fusion_compiled_for_minutes`: the search is read by every operand of the quotient.
    node_index = materialize(jnp.clip(jnp.searchsorted(node_keys, x_keys, side="right") - 1, 0, xp.shape[0] - 1))
    next_index = jnp.minimum(node_index + 1, xp.shape[0] - 1)
    is_node = (x_keys == node_keys[node_index]) | (next_index == node_index)
    offset, gap = x - xp[node_index], xp[next_index] - xp[node_index]
    slope = jnp.where(is_node, 0, offset) / jnp.where(is_node, 1, gap)
    result = fp[node_index] + slope * (fp[next_index] - fp[node_index])
    result = jnp.where(is_node, fp[node_index], result)
    result = jnp.where(x_keys < node_keys[0], by_name.get("left", fp[0]), result)
    result = jnp.where(x_keys > node_keys[-1], by_name.get("right", fp[-1]), result)
    return jnp.where(jnp.isnan(x), x, result)
