"""The matrix product with an emulated accumulator as an operation, with the body for XLA and the kernels."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.matmul.matmul import matmul_body
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.products.matmul_tile import aligned_unit
from jchop._kernels.tiles import LANES, kernel_function
from jchop._spec.accumulation import MatmulSpec

__all__ = ["matmul_op"]

Array = jax.Array


#: The limit of the inner dimension: steps are counted in int32, blocks after products.
_LONGEST_INNER_DIMENSION = 1 << 30
#: The orders that the kernels know.
_KERNEL_ORDERS = ("sequential", "blocked", "pairwise", "matrix_unit", "aligned", "aligned_apart", "aligned_halves")
#: The longest part of the inner dimension on a TPU that consists of whole blocks.
_LONGEST_TPU_PART = 1024


def _refuse_matmul(a: jax.ShapeDtypeStruct, *_: Any, spec: MatmulSpec) -> str | None:
    if spec.order.kind not in _KERNEL_ORDERS:
        return (
            f"order={str(spec.order)!r} has no kernel: XLA fuses its steps as a kernel would. Kernels: {_KERNEL_ORDERS}"
        )
    if spec.order.aligned and (reason := _refuse_aligned_matmul(a, spec)):
        return reason
    if a.shape[2] >= _LONGEST_INNER_DIMENSION:
        return f"the inner dimension is {a.shape[2]}, and a kernel takes less than 2^30"
    return None


def _refuse_aligned_matmul(a: jax.ShapeDtypeStruct, spec: MatmulSpec) -> str | None:
    if a.dtype != jnp.float32:
        return f"the operands have dtype {a.dtype.name}, and kernels of order={str(spec.order)!r} take float32"
    if spec.group:
        return f"operands={str(spec.operands)!r} have scales, and kernels of order={str(spec.order)!r} have none"
    if not aligned_unit(spec, a.shape[2]).exact_floats:
        return f"operands={str(spec.operands)!r} have products of more than 24 bits, which kernels do not align"
    return None


def _refuse_tpu_matmul(a: jax.ShapeDtypeStruct, *_: Any, spec: MatmulSpec) -> str | None:
    if a.dtype != jnp.float32:
        return f"the operands have dtype {a.dtype.name}, and the TPU kernel takes float32"
    block = aligned_unit(spec, max(a.shape[2], 1)).length if spec.order.aligned else 1
    if math.lcm(block, LANES) > _LONGEST_TPU_PART:
        return f"order={str(spec.order)!r}: blocks of {block} products do not fill parts of up to {_LONGEST_TPU_PART}"
    return _refuse_matmul(a, spec=spec)


matmul_op = make_op(
    "jchop_matmul",
    matmul_body,
    tpu=Kernel(kernel_function("products.matmul_tpu", "tpu_matmul"), _refuse_tpu_matmul),
    gpu=Kernel(kernel_function("products.matmul_gpu", "gpu_matmul"), _refuse_matmul),
    by_backend=True,
)
