"""The quirks of XLA's GPU backend, and the functions that work around them, as `cpu.py` for CPUs.

A test shows each, and fails when a quirk is gone. `tests/_core/xla/test_gpu.py` has wrong bits, on a GPU alone.
`tests/_kernels/test_compile.py` has programs that are not compiled, for a GPU that is not there. The quirks:

* `short_sums_of_integers_doubled`: Products of int8 with sums of 6 or 37 numbers: each result is twice the sum. These
  are no multiples of 4, so XLA multiplies by a Triton kernel, in steps of 16; the unit's steps are of 32.
  Workaround: `pad_to_whole_words`: zeros fill up the sum to a multiple of 16, so that cuBLAS can be chosen.
* `float8_without_tiles_at_highest_precision`: Triton compiles no product of float8 with `Precision.HIGHEST` in
  tiles of 64 rows or more, as the units for float8 have them.
  Workaround: `dot_precision`: HIGH, with which cuBLAS does not sum in fewer bits either.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

#: int8 numbers of a sum that cuBLAS loads at once.
_CUBLAS_WORD = 16


def pad_to_whole_words(x: Array, axis: int = -1) -> Array:
    """int8 operands with zeros at the end of an axis, along the sum, up to a multiple of 16.

    Quirk `short_sums_of_integers_doubled`.
    """
    missing = -x.shape[axis] % _CUBLAS_WORD
    padding = [(0, missing if i == axis % x.ndim else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, x.dtype.type(0), padding) if missing else x


def dot_precision(dtype: Any) -> lax.Precision:
    """The precision at which numbers of a dtype are multiplied as they are, and summed in float32.

    Quirk `float8_without_tiles_at_highest_precision`. Other platforms make the same of both precisions for float8.
    """
    is_float8 = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    return lax.Precision.HIGH if is_float8 else lax.Precision.HIGHEST
