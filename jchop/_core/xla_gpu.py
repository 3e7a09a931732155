"""The quirks of XLA's GPU backend, and the functions that work around them, as `xla_cpu` for CPUs.

`tests/_core/test_xla_gpu.py` shows each on a GPU, and fails when a quirk is gone. It is skipped where there is no GPU.
"""

from __future__ import annotations

import jax
from jax import lax

from jchop._core.xla_cpu import Quirk

__all__ = ["QUIRKS", "in_whole_words"]

Array = jax.Array

QUIRKS = (
    Quirk(
        "short_sums_of_integers_doubled",
        "Products of int8 with sums of 6 or 37 numbers: each result is twice the sum. These are no multiples of 4, so "
        "XLA multiplies by a Triton kernel, in steps of 16; the unit's steps are of 32.",
        "`in_whole_words`: zeros fill up the sum to a multiple of 16, so that cuBLAS can be chosen.",
        seen=("0.11",),
    ),
)

#: int8 numbers of a sum that cuBLAS loads at once.
_WORD = 16


def in_whole_words(x: Array, axis: int = -1) -> Array:
    """int8 operands with zeros at the end of an axis, along the sum, up to a multiple of 16.

    Quirk `short_sums_of_integers_doubled`.
    """
    missing = -x.shape[axis] % _WORD
    added = [(0, missing if i == axis % x.ndim else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, x.dtype.type(0), added) if missing else x
