"""The product of tiles of float8 by the units of Hopper GPUs, in kernels of Pallas-Triton.

Quirk `float8_of_pallas_without_units` of `_core/xla/gpu.py`. Only a rule of JAX's own can tell Triton how exact a
product has to be, and JAX has no public names for rules. This file alone uses the private ones. Without them float8 is
multiplied as by Pallas: right, and slower.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

Array = jax.Array

#: How many products the units may sum before they add in float32: all of a tile.
_MAX_IMPRECISE_PRODUCTS = 1 << 30


def dot_float8(a: Array, b: Array) -> Array:
    """The sums of products of float8 (m, k) and (n, k), of one dtype or two, as the unit sums them, float32 (m, n)."""
    if not _register_float8_rule():
        return _portable_float8_dot(a, b, None)
    return _float8_dot_p.bind(a, b, jnp.zeros((a.shape[0], b.shape[0]), jnp.float32))


def _portable_float8_dot(a: Array, b: Array, zeros: Array | None) -> Array:
    del zeros
    if a.dtype != b.dtype:  # which Pallas refuses
        a, b = a.astype(jnp.float16), b.astype(jnp.float16)
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


_float8_dot_p = Primitive("jchop_float8_dot")
_float8_dot_p.def_impl(_portable_float8_dot)
_float8_dot_p.def_abstract_eval(lambda a, b, zeros: zeros)
mlir.register_lowering(_float8_dot_p, mlir.lower_fun(_portable_float8_dot, multiple_results=False))


@lru_cache(maxsize=1)
def _register_float8_rule() -> bool:
    """Registers the rule with Pallas; False if its names are gone."""
    try:
        lowering = importlib.import_module("jax._src.pallas.triton.lowering")
        dialect = importlib.import_module("jax._src.lib.triton").dialect
        register, dot, transpose = lowering.register_lowering, dialect.dot, dialect.trans
    except (ImportError, AttributeError):
        return False

    def lower(ctx: Any, a: Any, b: Any, zeros: Any) -> Any:
        return dot(a, transpose(b, (1, 0)), zeros, max_num_imprecise_acc=_MAX_IMPRECISE_PRODUCTS)

    register(_float8_dot_p)(lower)
    return True
