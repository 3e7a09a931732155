"""Methods of quantizers: the functions of `jchop.math` by Pychop's names and argument order."""

from __future__ import annotations

from typing import Any

from jchop import math

__all__ = ["PYCHOP_FUNCTIONS", "PYCHOP_METHODS", "call_method"]

_UNARY_METHODS = [
    "abs",
    "angle",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctanh",
    "cbrt",
    "ceil",
    "conj",
    "cos",
    "cosh",
    "cumprod",
    "cumsum",
    "degrees",
    "diff",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "fabs",
    "floor",
    "frexp",
    "gamma",
    "imag",
    "log",
    "log10",
    "log1p",
    "log2",
    "mean",
    "modf",
    "prod",
    "radians",
    "real",
    "reciprocal",
    "round",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "std",
    "sum",
    "tan",
    "tanh",
    "var",
]
_BINARY_METHODS = [
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "divide",
    "dot",
    "floor_divide",
    "hypot",
    "ldexp",
    "logaddexp",
    "matmul",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "power",
    "subtract",
]
#: The number of operands of each method.
PYCHOP_METHODS = {**dict.fromkeys(_UNARY_METHODS, 1), **dict.fromkeys(_BINARY_METHODS, 2), "clip": 3}
#: How many of the last operands are whole numbers, which are not rounded.
_EXPONENT_COUNTS = {"ldexp": 1}
#: The options that may follow the operands, also by position.
_METHOD_OPTIONS = {"diff": ("n",), "round": ("decimals",)} | dict.fromkeys(
    ("cumprod", "cumsum", "mean", "prod", "std", "sum", "var"), ("axis",)
)
#: The functions of Pychop outside of classes.
PYCHOP_FUNCTIONS = [
    "sin",
    "cos",
    "tan",
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "arcsinh",
    "arccosh",
    "arctanh",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "sqrt",
    "square",
    "power",
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "mod",
    "dot",
    "matmul",
    "sum",
    "prod",
    "mean",
    "std",
    "var",
    "floor",
    "ceil",
    "round",
    "sign",
    "cumsum",
    "cumprod",
]


def call_method(chop: Any, name: str, *args: Any, key: Any = None, **options: Any) -> Any:
    """``chop.name(*args, **options)``."""
    count, names = PYCHOP_METHODS[name], _METHOD_OPTIONS.get(name, ())
    operands, values = args[:count], args[count:]
    if len(operands) < count or len(values) > len(names) or set(options) - set(names[len(values) :]):
        signature = f"{count} operand{'s' * (count > 1)}" + "".join(f" and {option}" for option in names)
        raise TypeError(f"{name} takes {signature}; it was given {len(args)} arguments and {sorted(options)}")
    options |= dict(zip(names, values, strict=False))
    if options.pop("decimals", 0) != 0:
        raise ValueError("decimals must be 0: a binary format has no decimal places")
    function = getattr(math, name)
    rounded_count = count - _EXPONENT_COUNTS.get(name, 0)
    return chop.compute(
        lambda *arrays: function(*arrays, **options), operands[:rounded_count], key, exponents=operands[rounded_count:]
    )
