"""Differences between the programs of a body. Bodies know only the quirks of their own backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from jchop._core.xla.cpu import branch_in_functions, compute_once, integer_maximum, materialize_per_group, prevent_fma


@dataclass(frozen=True)
class Backend:
    """A kind of programs, which the dispatch chooses (`make_op`): all give the same bits.

    Args:
        maximum: `jax.numpy.max` of integers, with its `axis` and `keepdims`. Kernels of GPUs repeat the result
            along dimensions that they keep.
        per_group: returns a pytree of arrays, each computed once for each group.
        once: returns scalars of one dtype of integers, computed once for all uses.
        prevent_fma: returns a product with a nonnegative factor, rounded before it enters a sum.
        branch: `jax.lax.cond` of two functions without arguments; None: both sides would be computed.
        float64: whether float64 is about as fast as float32.
        gathers: whether packed codes are read by their places, which XLA fuses with the operations after it.
    """

    maximum: Callable[..., Array]
    per_group: Callable[[Any], Any]
    once: Callable[[Sequence[Array]], tuple[Array, ...]]
    prevent_fma: Callable[[Array, Array], Array]
    branch: Callable[[Array, Callable[[], Array], Callable[[], Array]], Array] | None = None
    float64: bool = False
    gathers: bool = False


def _maximum_in_tile(x: Array, axis: Any, keepdims: bool = False) -> Array:
    """`jax.numpy.max`, by reductions that kernels have."""
    return jnp.max(x, axis=axis, keepdims=True) if keepdims else jnp.max(x.reshape(x.size))


#: A program that XLA compiles for any device, and partitions over any mesh.
PORTABLE = Backend(integer_maximum, materialize_per_group, compute_once, prevent_fma)
#: A program for one CPU.
ONE_CPU = replace(PORTABLE, branch=branch_in_functions, float64=True)
#: A program for one GPU that decodes. Each thread computes the scale of its number again, which moves no bytes.
DECODE_ON_GPU = replace(PORTABLE, per_group=lambda values: values, gathers=True)
#: A tile of a kernel, whose values are in registers.
TILE = replace(PORTABLE, maximum=_maximum_in_tile, per_group=lambda values: values)
