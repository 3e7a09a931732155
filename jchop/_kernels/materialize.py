"""An array as an operation of its own, so that the code that reads it is compiled alike however it is computed."""

from __future__ import annotations

import jax

from jchop._common.gradients import CustomJvp
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._kernels.primitive import make_op

Array = jax.Array


def _barrier_on_one_cpu(x: Array, backend: Backend = PORTABLE) -> Array:
    return x if backend is PORTABLE else jax.lax.optimization_barrier(x)


_materialize_op = make_op("jchop_settled", jax.lax.optimization_barrier, like_first=True, no_inline=True)
_materialize_on_cpu_op = make_op(
    "jchop_settled_on_cpu", _barrier_on_one_cpu, like_first=True, by_backend=True, no_inline=True
)


@CustomJvp
def materialize(x: Array) -> Array:
    """`x`, which XLA's CPU backend writes to memory and does not fuse with the operations that read it.

    Quirk `sums_ordered_by_fusion` of `_core/xla/cpu.py`. On other platforms, and in programs for several CPUs, a
    barrier alone is there. The derivative is the identity.
    """
    return _materialize_op(x)


materialize.defjvp(lambda primals, tangents: (materialize(*primals), tangents[0]))


@CustomJvp
def materialize_on_cpu(x: Array) -> Array:
    """`materialize` in programs for one CPU, `x` in others: a GPU may decode a matrix in the loop of its product."""
    return _materialize_on_cpu_op(x)


materialize_on_cpu.defjvp(lambda primals, tangents: (materialize_on_cpu(*primals), tangents[0]))
