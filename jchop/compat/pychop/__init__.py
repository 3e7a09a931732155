"""Pychop's names (arXiv 2504.07835), of its paper and of version 0.6, for NumPy, JAX and torch.

``from jchop.compat.pychop import Chop`` replaces ``from pychop import Chop``; networks are in
``jchop.compat.pychop.layers``, optimizers in ``.optimizers``, post-training quantization in ``.ptq``, functions in
``.math_func``. Differences from Pychop:

* Every result is the exact value rounded once. Pychop's is wrong past the overflow threshold (70000 becomes 0 in half
  precision), and in ties of negative numbers (rmodes 7 and 8). So are values of the format under rmode 9, numbers just
  below powers of two, subnormal numbers and -0. ``FaultChop`` on JAX gives NaN or infinity for zeros and infinities.
* ``Customs(exp_bits=e)`` is a format of e exponent bits: emax = 2^(e-1) - 1 (Pychop: 2^e - 1).
* ``flip`` flips one bit of the significand, with probability ``p``.
* Random numbers: an object's n-th call draws from the key of the words (random_state, n). There is no global seed, and
  all calls draw different bits. Within a trace of JAX pass ``key=``.
* Functions (``ch.sin``, ``pychop.sin(x, ch)``) are from `jchop.math`: operands are rounded, and sums and products
  are rounded at every step (Pychop adds in full precision). Arguments outside of a domain give NaN or infinity, not an
  error. Functions of tensors have no gradient.
* ``Chopi`` has 2^bits codes also without ``symmetric`` (Pychop: half of them), and chooses a scale for each array;
  ``calibrate`` fixes one. The symmetric scale is amax / (2^(bits - 1) - 1).
* ``Chop`` with a format's name or ``customs`` is the paper's class, `FaultChop`. ``LightChop`` is version 0.6's
  ``Chop``.
* ``ChopSTE`` and similar names are the same classes: gradients pass straight through all of them.
* ``backend`` has no effect, because the type of the array decides. There is no backend for TensorFlow.
* The paper's layers (``FPQuantized*``, ``IntQuantized*``, ``Quantized*`` with ``exp_bits``) have the shapes and the
  initial parameters of torch's; see `ptq` and `layers` for the roundings.
* ``float_params()`` is a dict of tuples, not a data frame; formats beyond binary64 (``"q"``) and of blocks are omitted.
* ``bitwise_and`` and the like take whole numbers, also as floats; other numbers give NaN (Pychop refuses all floats).

These are missing; docs/compat.md has a table. Arrays with a format (``pychop.builtin``): `jchop.emulate` rounds every
operation of a function. Pychop's classes of MX, block and P3109 formats: `jchop` has these formats by name. Layers and
post-training quantization for Flax: `jchop.nn` has both. ``Simulate``: a `jchop.formats.FloatFormat` has its
``values()``. CADNA's generator, integers of more than 8 bits, layers for TensorFlow, ``Bitchop``, ``Options``, and
the older lower-case names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jchop._common.checks import check_choice
from jchop.compat.pychop import math_func, ptq
from jchop.compat.pychop._quantizers import QUANTIZER_WORDS, Chop, Chopf, Chopi, Customs, FaultChop, float_params

#: The prefixes of names of layers.
LAYERS = tuple(QUANTIZER_WORDS)

LightChop = Chop
ChopSTE = LightChopSTE = Chop
ChopfSTE = Chopf
ChopiSTE = Chopi

#: Replacements for missing names of Pychop, by prefix.
INSTEAD = {
    **dict.fromkeys(("P3109", "p3109_"), "formats such as 'binary8p4se' in jchop.round_to_format and jchop.quantize"),
    **dict.fromkeys(("MX", "mx_"), "formats such as 'mxfp8_e4m3' in jchop.round_to_format and jchop.quantize"),
    **dict.fromkeys(("BFP", "bfp_"), "block floating point in jchop.round_to_format (docs/formats.md)"),
    "builtin": "jchop.emulate, which rounds every operation of a function",
    "Simulate": "values() of a jchop.formats.FloatFormat",
    "Bitchop": "encode and decode of a jchop.formats.FloatFormat",
}

__all__ = [
    "Chop", "ChopSTE", "Chopf", "ChopfSTE", "Chopi", "ChopiSTE", "Customs", "FaultChop", "LightChop",
    "LightChopSTE", "backend", "float_params", "get_backend",
]  # fmt: skip


def backend(lib: str = "auto", verbose: int = 0) -> None:
    """Has no effect: the type of an array selects the library.

    Args:
        lib: ``"numpy"``, ``"jax"``, ``"torch"`` or ``"auto"``.
        verbose: has no effect.

    Raises:
        ValueError: for another library.
    """
    check_choice("lib", lib, ("auto", "numpy", "jax", "torch"))


def get_backend() -> str:
    """``"auto"``."""
    return "auto"


def __getattr__(name: str) -> Callable[..., Any]:
    if name in math_func.__all__:
        return getattr(math_func, name)
    if name.startswith(LAYERS):
        from jchop.compat.pychop import layers

        return getattr(layers, name)
    if name in ptq.__all__:
        return getattr(ptq, name)
    instead = next((text for start, text in INSTEAD.items() if name.startswith(start)), None)
    hint = "" if instead is None else f"; jchop has {instead}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
