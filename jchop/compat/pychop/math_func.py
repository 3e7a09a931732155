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

from jchop.compat.pychop._math import PYCHOP_FUNCTIONS, call_method

__all__ = PYCHOP_FUNCTIONS  # pyright: ignore[reportUnsupportedDunderAll]


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
