"""The product with a matrix of codes and group scales, for TPU (Mosaic).

The grid runs over rows, columns and, innermost, rows of W; the sums of a tile stay in scratch until they are complete.
A step takes several whole groups, each with a separate product, or a part of one group. The parts of W stay separate
(the kernel moves no data across lanes), and XLA interleaves the columns of their products.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._core.matmul.dequantize_matmul import decode_parts, join_columns, multiply_code_values, part_columns
from jchop._kernels.pallas import TpuGrid, call_on_tpu
from jchop._kernels.products.dequantize_matmul import DequantizeMatmulProblem, DequantizeMatmulTpuTiling
from jchop.formats import ElementFormat


def tpu_dequantize_matmul(
    x: Array,
    codes: Array,
    scales: Array,
    *,
    format: ElementFormat,
    group: int,
    tiling: DequantizeMatmulTpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `dequantize_matmul_body`, with the sums in another order.

    Args:
        x: (m, k), float32 or bfloat16.
        codes: (k, ceil(n * bits / 8)) uint8.
        scales: (ceil(k / group), n), float32 or bfloat16.
        format: the format of the codes, of 2, 4 or 8 bits.
        group: rows of W that share a scale.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    problem = DequantizeMatmulProblem.of(x, codes, format, group)
    m, n = problem.m, scales.shape[1]
    if not m * n * problem.k:
        return jnp.zeros((m, n), x.dtype)
    tiling = tiling or DequantizeMatmulTpuTiling.for_shape(problem)
    assert tiling is not None
    block_m, block_n, block_k, group, divides = *astuple(tiling), problem.group, tiling.divides(problem)
    groups, steps = -(-block_k // group), -(-problem.k // block_k)  # of a step, 1 if it takes a part of one; along k

    def kernel(x: Any, codes: Any, scales: Any, out: Any, total: Any) -> None:
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def scales_of(part: int, i: int) -> Array:
            """The scales of the step's group number `i` for one part of W, (1, block_n)."""
            if not divides:
                return scales[part, i : i + 1, :]
            if problem.groups == 1:
                return scales[part]
            return scales[part, pl.ds(lax.div(step, np.int32(group // block_k)), 1), :]

        for i in range(groups):  # adds the scaled product of a group to the sums
            rows = slice(i * group, min((i + 1) * group, block_k))
            xs, cs = x[:, rows], codes[rows, :].astype(jnp.int32)
            remaining_rows = None
            if problem.k % block_k:  # elements beyond the arrays are undefined
                remaining_rows = problem.k - rows.start - step * block_k
                xs = jnp.where(lax.broadcasted_iota(jnp.int32, xs.shape, 1) < remaining_rows, xs, jnp.zeros_like(xs))
                cs = jnp.where(lax.broadcasted_iota(jnp.int32, cs.shape, 0) < remaining_rows, cs, 0)
            for part, values in enumerate(decode_parts(cs, format, xs.dtype)):
                scale = scales_of(part, i).astype(jnp.float32)
                if remaining_rows is not None:
                    scale = jnp.where(remaining_rows > 0, scale, 0)
                total[part] += multiply_code_values(xs, values) * scale

        @pl.when(step == steps - 1)
        def _() -> None:
            out[...] = total[...].astype(out.dtype)

    grid = TpuGrid({"i": pl.cdiv(m, block_m), "j": pl.cdiv(problem.width, block_n), "t": steps}, "t")
    scale_parts = part_columns(scales, problem.parts)
    if divides:  # single rows are addressed, which packed dtypes do not allow
        scale_parts = scale_parts.astype(jnp.float32)
        scale_blocks = grid.blocks("*-j", problem.parts, problem.groups, block_n)
    else:
        scale_blocks = grid.blocks("*tj", problem.parts, groups, block_n)
    (product,) = call_on_tpu(
        kernel,
        grid,
        [
            (x, grid.blocks("it", block_m, block_k)),
            (codes, grid.blocks("tj", block_k, block_n)),
            (scale_parts, scale_blocks),
        ],
        [(((problem.parts, m, problem.width), x.dtype), grid.blocks("*ij", problem.parts, block_m, block_n))],
        name="dequantize_matmul",
        scratch=[((problem.parts, block_m, block_n), jnp.float32)],
        interpret=interpret,
    )
    return join_columns(product, n)
