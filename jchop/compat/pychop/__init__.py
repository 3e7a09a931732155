"""Pychop's names (arXiv 2504.07835), those of its paper and those of its version 0.6, on NumPy, JAX and torch.

``from jchop.compat.pychop import Chop`` in place of ``from pychop import Chop``; networks are in
``jchop.compat.pychop.layers``, optimizers in ``.optimizers``, quantization after training in ``.ptq``, functions in
``.math_func``. What differs from Pychop:

* Every result is the exact value rounded once. Pychop's is wrong past the overflow threshold (70000 becomes 0 in half
  precision), in ties of negative numbers (rmodes 7 and 8), for values of the format under rmode 9, just below powers of
  two, for subnormal numbers and -0; and NaN or infinity for zeros and infinities with ``FaultChop`` on JAX.
* ``Customs(exp_bits=e)`` is a format of e exponent bits: emax = 2^(e-1) - 1, where Pychop takes 2^e - 1.
* ``flip`` heeds ``p``, and flips one bit of the significand.
* Random numbers: an object's n-th call draws from the key of the words (random_state, n). Nothing global is seeded,
  and no two calls draw the same. Within a trace of JAX pass ``key=``.
* Functions (``ch.sin``, ``pychop.sin(x, ch)``) are those of `jchop.math`: operands rounded, and sums and products
  rounded at every step, where Pychop adds in full precision. There are no errors for arguments outside of a domain: NaN
  and infinity tell. Functions of tensors have no gradient.
* ``Chopi`` has 2^bits codes without ``symmetric`` too (Pychop: half of them), and a scale for each array it is called
  with; ``calibrate`` keeps one. The symmetric scale is amax / (2^(bits - 1) - 1).
* ``Chop`` with a format's name or ``customs`` is the paper's: `FaultChop`. ``LightChop`` is the other one.
* ``ChopSTE`` and its kin are the same classes: gradients pass straight through all of them.
* ``backend`` takes a name and does nothing: the array says what it is. There is no backend for TensorFlow.
* The paper's layers (``FPQuantized*``, ``IntQuantized*``, ``Quantized*`` with ``exp_bits``) have the shapes of torch's
  and begin with its parameters; `ptq` and `layers` say what is rounded.
* ``float_params()`` is a dict of tuples, not a data frame; formats without a binary64 value (``"q"``) are left out.

Not here (docs/compat.md has a table): arrays that carry their format (``pychop.builtin``; `jchop.emulate` rounds
every operation of a function), Pychop's classes of MX, block and P3109 formats (`jchop` has these formats by name),
CADNA's generator, integers of more than 8 bits, layers and quantization after training for Flax (`jchop.nn` has both)
and TensorFlow, ``Simulate`` (a `jchop.FloatFormat` has its ``values()``), ``Bitchop``, ``Options``, and the
lower-case names of before the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jchop._checks import check_choice
from jchop.compat.pychop import math_func, ptq
from jchop.compat.pychop._integers import Chopi
from jchop.compat.pychop._params import float_params
from jchop.compat.pychop._quantizers import Chop, Chopf, Customs, FaultChop
from jchop.compat.pychop._words import WORDS

#: How the names of layers begin.
LAYERS = tuple(WORDS)

LightChop = Chop
ChopSTE = LightChopSTE = Chop
ChopfSTE = Chopf
ChopiSTE = Chopi

#: What jchop has in place of names of Pychop that are not here, by how they begin.
INSTEAD = {
    "P3109": "formats such as 'binary8p4se' in jchop.round_to_format and jchop.quantize",
    "p3109_": "formats such as 'binary8p4se' in jchop.round_to_format and jchop.quantize",
    "MX": "formats such as 'mxfp8_e4m3' in jchop.round_to_format and jchop.quantize",
    "mx_": "formats such as 'mxfp8_e4m3' in jchop.round_to_format and jchop.quantize",
    "BFP": "block floating point in jchop.round_to_format (docs/formats.md)",
    "bfp_": "block floating point in jchop.round_to_format (docs/formats.md)",
    "builtin": "jchop.emulate, which rounds every operation of a function",
    "Simulate": "values() of a jchop.FloatFormat",
    "Bitchop": "encode and decode of a jchop.FloatFormat",
}

__all__ = [
    "Chop",
    "ChopSTE",
    "Chopf",
    "ChopfSTE",
    "Chopi",
    "ChopiSTE",
    "Customs",
    "FaultChop",
    "LightChop",
    "LightChopSTE",
    "backend",
    "float_params",
    "get_backend",
]


def backend(lib: str = "auto", verbose: int = 0) -> None:
    """Nothing: whose an array is decides who rounds it.

    Args:
        lib: ``"numpy"``, ``"jax"``, ``"torch"`` or ``"auto"``.
        verbose: says nothing.

    Raises:
        ValueError: for another library.
    """
    del verbose
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
