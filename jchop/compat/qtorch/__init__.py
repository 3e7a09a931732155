"""QPyTorch's names (arXiv 1910.04540) for torch; the functions also take NumPy and JAX arrays.

``from jchop.compat.qtorch.quant import float_quantize`` replaces ``from qtorch.quant import float_quantize``; the
submodules are `quant`, `optim` and `auto_low`. Differences from QPyTorch:

* Every result is the exact value rounded once. QPyTorch rounds twice below the smallest normal number, changes the sign
  under ``FloatingPoint(8, 23)``, moves large odd integers in fixed point, and blocks beyond 2^126.
* NaN stays NaN (QPyTorch: the largest value, or 0), and -0 stays -0 in formats that have it.
* Large numbers and infinities saturate also with 8 bits of the exponent (QPyTorch: infinity).
* Ties of ``"nearest"`` go away from zero in floating point, as in QPyTorch. They go to even in fixed point, as on its
  CPU (its CUDA: away from zero). In blocks they go away from zero (QPyTorch: up).
* Random bits of tensors come from torch's global generator, so that ``torch.manual_seed`` determines them, or from
  ``generator=`` or ``seed=``; NumPy and JAX arrays need ``key=``. Numbers far below the smallest one round up with the
  right probability.
* ``FixedPoint`` and ``FloatingPoint`` may have no fraction bits, and half, bfloat16 and double tensors are allowed.
* The functions pass gradients straight through (QPyTorch's have no gradients). ``backward_hooks`` run with and without
  ``clamping_grad_zero``, which also works without ``backward_number``.
* ``OptimLP`` is `jchop.torch.OptimLP`: any optimizer of torch, with ``closure``, and its state in ``state_dict``. Its
  quantizers must be results of ``quantizer``.
* ``sequential_lower`` and ``lower`` round the output of layers in place: names of parameters do not change. GELU and
  SiLU count as activations, MultiheadAttention as a linear layer. A type of layers that the model does not have is an
  error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jchop._common.checks import check, check_bool, check_choice, check_int
from jchop._spec.spec import Gradient, Spec
from jchop.formats import FixedFormat, FloatFormat, bfp

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "Number"]

_QTORCH_ROUNDINGS = ("stochastic", "nearest")
#: Bits of the exponent of float32, whose top code has no finite values in QPyTorch either.
_FULL_EXPONENT_BITS = 8


class Number(ABC):
    """A format of QPyTorch."""

    @abstractmethod
    def spec(self, rounding: str, *, clipped: bool = False) -> Spec:
        """The spec of this format.

        Args:
            rounding: ``"stochastic"`` or ``"nearest"``.
            clipped: whether the gradient of clamped numbers is zero.
        """


def _rounding_name(rounding: str, nearest: str) -> str:
    return nearest if check_choice("rounding", rounding, _QTORCH_ROUNDINGS) == "nearest" else rounding


@dataclass(frozen=True)
class FloatingPoint(Number):
    """Floating point without infinities and NaN: the top exponent has finite values, and larger numbers saturate.

    Args:
        exp: bits of the exponent, 1 to 8.
        man: bits of the fraction, 0 to 23.

    Example:
        >>> from jchop.compat.qtorch import FloatingPoint
        >>> str(FloatingPoint(exp=5, man=2).spec("nearest"))
        'e5m2(infinities=false,nans=none):nearest_away:saturate'
    """

    exp: int
    man: int

    def __post_init__(self) -> None:
        check_int("exp", self.exp, 1, _FULL_EXPONENT_BITS)
        check_int("man", self.man, 0, 23)

    def spec(self, rounding: str, *, clipped: bool = False) -> Spec:
        """The spec; with eight exponent bits the top exponent is float32's, for infinities and NaN.

        Args:
            rounding: ``"stochastic"``, or ``"nearest"``, with ties away from zero.
            clipped: whether the gradient of clamped numbers is zero.
        """
        ieee = self.exp == _FULL_EXPONENT_BITS
        fmt = FloatFormat(self.exp, self.man, infinities=ieee, nans="ieee" if ieee else "none")
        return Spec(fmt, _rounding_name(rounding, "nearest_away"), "saturate", gradient=Gradient(clipped))


@dataclass(frozen=True)
class FixedPoint(Number):
    """Fixed point: multiples of 2^-fl with wl bits, including the sign.

    Args:
        wl: word length.
        fl: fraction bits.
        clamp: whether numbers saturate; otherwise the range is unlimited.
        symmetric: whether the range excludes its minimum.

    Example:
        >>> from jchop.compat.qtorch import FixedPoint
        >>> str(FixedPoint(wl=5, fl=4).spec("nearest"))
        'fixed1.4'
    """

    wl: int
    fl: int
    clamp: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_int("wl", self.wl, 2, 64)
        check_int("fl", self.fl, -1000, 1000)
        check_bool("clamp", self.clamp)
        check_bool("symmetric", self.symmetric)

    def spec(self, rounding: str, *, clipped: bool = False) -> Spec:
        """The spec.

        Args:
            rounding: ``"stochastic"``, or ``"nearest"``, with ties to even.
            clipped: whether the gradient of clamped numbers is zero, with `clamp` only.

        Raises:
            ValueError: for `clipped` without `clamp`.
        """
        check(self.clamp or not clipped, f"clamping_grad_zero=True needs clamp=True, not {self}")
        # The multiples of 2^-fl without a bound and without -0: the smallest normal number has 53 bits down to it.
        fmt = FloatFormat(11, 52, bias=self.fl - 51, nans="negative_zero")
        if self.clamp:
            fmt = FixedFormat(self.wl - self.fl, self.fl, symmetric=self.symmetric)
        return Spec(fmt, _rounding_name(rounding, "nearest_even"), gradient=Gradient(clipped))


@dataclass(frozen=True)
class BlockFloatingPoint(Number):
    """Block floating point: integers of wl bits under a shared power of two.

    Args:
        wl: word length.
        dim: -1 (default) for one exponent of the whole tensor; else an axis with one exponent for each index.

    Example:
        >>> from jchop.compat.qtorch import BlockFloatingPoint
        >>> str(BlockFloatingPoint(wl=8, dim=0).spec("nearest"))
        'bfp8(channel=0):nearest_away'
    """

    wl: int
    dim: int = -1

    def __post_init__(self) -> None:
        check_int("wl", self.wl, 2)
        check_int("dim", self.dim, -1)

    def spec(self, rounding: str, *, clipped: bool = False) -> Spec:
        """The spec.

        Args:
            rounding: ``"stochastic"``, or ``"nearest"``, with ties away from zero.
            clipped: not for blocks, whose range follows the data.
        """
        check(not clipped, "clamping_grad_zero=True is for fixed point")
        fmt = bfp(self.wl) if self.dim < 0 else bfp(self.wl)(channel=self.dim)
        return Spec(fmt, _rounding_name(rounding, "nearest_away"))
