"""Pychop's functions outside of classes, `pychop.math_func`: ``sin(x, chop)``, ``matmul(a, b, chop)``.

The same names are in `jchop.compat.pychop` itself.

Example:
    >>> import jchop.compat.pychop.math_func as mf
    >>> from jchop.compat.pychop import Chop
    >>> float(mf.sin(3.2, Chop(exp_bits=5, sig_bits=2, rmode=3)))  # sin(3), 0.1411, downward
    0.125
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jchop import math
from jchop._common.checks import check

#: The methods of quantizers, by the number of their operands: functions of `jchop.math`.
_UNARY_METHODS = (
    "abs angle arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil conj cos cosh cumprod cumsum degrees diff erf "
    "erfc exp expm1 fabs floor frexp gamma imag log log10 log1p log2 mean modf prod radians real reciprocal round sign "
    "sin sinh sqrt square std sum tan tanh var"
)
_BINARY_METHODS = (
    "add bitwise_and bitwise_or bitwise_xor divide dot floor_divide hypot ldexp logaddexp matmul maximum minimum mod "
    "multiply power subtract"
)
PYCHOP_METHODS = {**dict.fromkeys(_UNARY_METHODS.split(), 1), **dict.fromkeys(_BINARY_METHODS.split(), 2), "clip": 3}
#: Methods without a function of that name outside of classes.
_METHODS_ALONE = (
    "abs angle bitwise_and bitwise_or bitwise_xor cbrt clip conj degrees diff erf erfc fabs frexp gamma hypot imag "
    "ldexp logaddexp maximum minimum modf radians real reciprocal"
)
PYCHOP_FUNCTIONS = sorted(set(PYCHOP_METHODS) - set(_METHODS_ALONE.split()))
#: How many of the last operands are whole numbers, which are not rounded.
_EXPONENT_COUNTS = {"ldexp": 1}
#: The options that may follow the operands, also by position.
_METHOD_OPTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("cumprod", "cumsum", "mean", "prod", "std", "sum", "var"), ("axis",)
)
_METHOD_OPTIONS |= {"diff": ("n",), "round": ("decimals",)}

__all__ = PYCHOP_FUNCTIONS  # pyright: ignore[reportUnsupportedDunderAll]


def call_method(chop: Any, name: str, *args: Any, key: Any = None, **options: Any) -> Any:
    """``chop.name(*args, **options)``."""
    count, names = PYCHOP_METHODS[name], _METHOD_OPTIONS.get(name, ())
    operands, values = args[:count], args[count:]
    if len(operands) < count or len(values) > len(names) or set(options) - set(names[len(values) :]):
        signature = f"{count} operand{'s' * (count > 1)}" + "".join(f" and {option}" for option in names)
        raise TypeError(f"{name} takes {signature}; it was given {len(args)} arguments and {sorted(options)}")
    options |= dict(zip(names, values, strict=False))
    check(options.pop("decimals", 0) == 0, "decimals must be 0: a binary format has no decimal places")
    function = getattr(math, name)
    rounded_count = count - _EXPONENT_COUNTS.get(name, 0)
    rounded, exponents = operands[:rounded_count], operands[rounded_count:]
    return chop.compute(lambda *arrays: function(*arrays, **options), rounded, key, exponents)


def __getattr__(name: str) -> Callable[..., Any]:
    if name in PYCHOP_FUNCTIONS:
        return partial(_call_function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _call_function(name: str, *args: Any, chop: Any = None, **options: Any) -> Any:
    """``name(*operands, chop)``: the quantizer follows the operands, by name or position."""
    if chop is None:
        index = next((i for i, arg in enumerate(args) if hasattr(arg, "compute")), None)
        if index is None:
            raise TypeError(f"{name} needs a quantizer after its operands, or as chop=")
        chop, args = args[index], (*args[:index], *args[index + 1 :])
    return call_method(chop, name, *args, **options)
