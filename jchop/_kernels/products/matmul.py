"""The matrix product with an emulated accumulator as an operation, with the body for XLA and the kernels."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.matmul.matmul import matmul_body
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.products.matmul_tile import MIN_DOT_SIDE, MatmulGpuTiling, MatmulTpuTiling, aligned_unit
from jchop._spec.accumulation import MatmulSpec

__all__ = ["matmul_op"]

Array = jax.Array


def _run_tpu_matmul(*arrays: Array, spec: MatmulSpec, tiling: Any = None) -> Array:
    from jchop._kernels.products import matmul_tpu

    return matmul_tpu.tpu_matmul(*arrays, spec=spec, tiling=tiling)


def _run_gpu_matmul(*arrays: Array, spec: MatmulSpec, tiling: Any = None) -> Array:
    from jchop._kernels.products import matmul_gpu

    return matmul_gpu.gpu_matmul(*arrays, spec=spec, tiling=tiling)


#: The limit of the inner dimension: steps are counted in int32, blocks after products.
_LONGEST_INNER_DIMENSION = 1 << 30


#: The orders that the kernels know.
_KERNEL_ORDERS = ("sequential", "blocked", "pairwise", "matrix_unit", "aligned", "aligned_apart", "aligned_halves")
#: The longest part of the inner dimension on a TPU that consists of whole blocks.
_LONGEST_TPU_PART = 1024


def _refuse_matmul(a: jax.ShapeDtypeStruct, spec: MatmulSpec, tiling: Any, kind: type) -> str | None:
    if spec.order.kind not in _KERNEL_ORDERS:
        return (
            f"order={str(spec.order)!r} has no kernel: XLA fuses its steps as a kernel would. Kernels: {_KERNEL_ORDERS}"
        )
    if spec.order.aligned and (reason := _refuse_aligned_matmul(a, spec)):
        return reason
    if tiling is not None and not isinstance(tiling, kind):
        return f"tiling={tiling} is not a {kind.__name__}"
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


def _refuse_tpu_matmul(a: jax.ShapeDtypeStruct, *_: Any, spec: MatmulSpec, tiling: Any = None) -> str | None:
    if a.dtype != jnp.float32:
        return f"the operands have dtype {a.dtype.name}, and the TPU kernel takes float32"
    block = aligned_unit(spec, max(a.shape[2], 1)).length if spec.order.aligned else 1
    if math.lcm(block, 128) > _LONGEST_TPU_PART:
        return f"order={str(spec.order)!r}: blocks of {block} products do not fill parts of up to {_LONGEST_TPU_PART}"
    if isinstance(tiling, MatmulTpuTiling) and tiling.block_k % block:
        return f"tiling={tiling}: block_k must be a multiple of the {block} products of a block"
    return _refuse_matmul(a, spec, tiling, MatmulTpuTiling)


def _refuse_gpu_matmul(a: jax.ShapeDtypeStruct, *_: Any, spec: MatmulSpec, tiling: Any = None) -> str | None:
    sides = (tiling.block_m, tiling.block_n, tiling.block_k) if isinstance(tiling, MatmulGpuTiling) else ()
    if spec.order.kind == "matrix_unit" and min(sides, default=MIN_DOT_SIDE) < MIN_DOT_SIDE:
        return f"tiling={tiling} has a side of less than {MIN_DOT_SIDE}, which a tile product needs"
    return _refuse_matmul(a, spec, tiling, MatmulGpuTiling)


matmul_op = make_op(
    "jchop_matmul",
    matmul_body,
    tpu=Kernel(_run_tpu_matmul, _refuse_tpu_matmul),
    gpu=Kernel(_run_gpu_matmul, _refuse_gpu_matmul),
    by_backend=True,
)
