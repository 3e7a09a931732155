"""QPyTorch's functions and quantizer module: ``from jchop.compat.qtorch.quant import ...``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jchop._common.on_demand import load_name
from jchop._round.round_to_format import round_to_format
from jchop.compat._arrays import as_numbers, is_torch
from jchop.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint, Number

if TYPE_CHECKING:
    from jchop.compat.qtorch._quantizer import Quantizer, quantizer

__all__ = ["Quantizer", "block_quantize", "fixed_point_quantize", "float_quantize", "quantizer"]


def float_quantize(x: Any, exp: int, man: int, rounding: str = "stochastic", **random: Any) -> Any:
    """`x` rounded to floating point.

    Args:
        x: a torch tensor, or an array of NumPy or JAX.
        exp: bits of the exponent.
        man: bits of the fraction.
        rounding: ``"stochastic"`` (default) or ``"nearest"``.
        random: for tensors ``seed``, an integer, or ``generator`` (default: torch's global one); for arrays ``key``.

    Example:
        >>> from jchop.compat.qtorch.quant import float_quantize
        >>> float_quantize([1.1, 1e9], exp=5, man=2, rounding="nearest").tolist()
        [1.0, 114688.0]
    """
    return round_number(x, FloatingPoint(exp, man), rounding, **random)


def fixed_point_quantize(
    x: Any, wl: int, fl: int, clamp: bool = True, symmetric: bool = False, rounding: str = "stochastic", **random: Any
) -> Any:
    """`x` rounded to fixed point.

    Args:
        x: as in `float_quantize`.
        wl: word length.
        fl: fraction bits.
        clamp: whether numbers saturate.
        symmetric: whether the range excludes its minimum.
        rounding: as in `float_quantize`.
        random: as in `float_quantize`.

    Example:
        >>> from jchop.compat.qtorch.quant import fixed_point_quantize
        >>> fixed_point_quantize([0.3, 5.0], wl=5, fl=4, rounding="nearest").tolist()
        [0.3125, 0.9375]
    """
    return round_number(x, FixedPoint(wl, fl, clamp, symmetric), rounding, **random)


def block_quantize(x: Any, wl: int, dim: int = -1, rounding: str = "stochastic", **random: Any) -> Any:
    """`x` rounded to block floating point.

    Args:
        x: as in `float_quantize`.
        wl: word length.
        dim: -1 (default) for one exponent, or an axis with one exponent for each index.
        rounding: as in `float_quantize`.
        random: as in `float_quantize`.

    Example:
        >>> from jchop.compat.qtorch.quant import block_quantize
        >>> block_quantize([7.3, 0.3], wl=4, rounding="nearest").tolist()
        [7.0, 0.0]
    """
    return round_number(x, BlockFloatingPoint(wl, dim), rounding, **random)


def __getattr__(name: str) -> Any:
    if name in ("Quantizer", "quantizer"):  # these need torch, unlike the functions
        return load_name("jchop.compat.qtorch._quantizer", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def round_number(x: Any, number: Number, rounding: str, **random: Any) -> Any:
    """`x` rounded to a format of QPyTorch; other arguments as for `float_quantize`."""
    x = as_numbers(x)
    spec = number.spec(rounding)
    if is_torch(x):
        from jchop.compat.qtorch._quantizer import random_source
        from jchop.torch import round_to_format as round_tensor

        return round_tensor(x, spec, copy=True, **random_source(spec, random))
    return round_to_format(x, spec, **random)
