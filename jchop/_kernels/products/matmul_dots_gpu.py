"""The matrix product whose blocks a tensor core sums, for NVIDIA GPUs (Pallas on Triton).

One program computes one output tile: it runs through the whole inner dimension with the accumulator in registers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jchop._common.bit_ops import CARRIERS
from jchop._core.matmul import matmul
from jchop._kernels.pallas import call_on_gpu, divmod_int32, load_tile
from jchop._kernels.products.matmul import MatmulDotsTiling, dot_length, dot_operand, int32_loop
from jchop._spec.accumulation import MatmulSpec


def gpu_matmul_of_dots(
    a: Array,
    b: Array,
    seeds: Array | None = None,
    *,
    spec: MatmulSpec,
    tiling: MatmulDotsTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `jchop._core.matmul.matmul.matmul_body` for ``order="matrix_unit"``.

    Args:
        a: float32 or float64 (batch, m, k), rounded to the operands' spec.
        b: the same (batch, k, n), likewise.
        seeds: the twelve seeds, if something draws.
        spec: the arithmetic.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    if not batch * m * n * k:
        return jnp.zeros((batch, m, n), a.dtype)
    plan = matmul.MatmulPlan(spec, CARRIERS[a.dtype.name], k)
    tiling = tiling or MatmulDotsTiling.for_shape(batch, m, n, plan)
    down, across, operand = pl.cdiv(m, tiling.block_m), pl.cdiv(n, tiling.block_n), dot_operand(plan)
    block = min(spec.order.block or 1, k)
    part = min(tiling.block_k, dot_length(block))
    precision = lax.Precision.DEFAULT if operand == "tf32" else lax.Precision.HIGHEST

    def kernel(a: Any, b: Any, *refs: Any) -> None:
        *seeds_ref, out = refs
        lead, j = divmod_int32(pl.program_id(0), across)
        batch_index, i = divmod_int32(lead, down)
        rows = i * np.int32(tiling.block_m) + lax.iota(jnp.int32, tiling.block_m)
        columns = j * np.int32(tiling.block_n) + lax.iota(jnp.int32, tiling.block_n)
        draw = None
        if seeds_ref:
            row = (batch_index * np.int32(m) + rows).astype(jnp.uint32) * np.uint32(n)
            index = row[:, None] + columns.astype(jnp.uint32)[None, :]
            draw = matmul.make_word_source([seeds_ref[0][i] for i in range(12)], index, plan.carrier)
        zeros = jnp.zeros((tiling.block_m, tiling.block_n), plan.carrier.name)

        def step(number: Array, c: Array) -> Array:
            begin = number * np.int32(block)
            end = jnp.minimum(begin + block, k)

            def add(i: Array, d: Array) -> Array:
                ks = begin + i * part + lax.iota(jnp.int32, part)
                x = load_tile(a, rows, ks, m, end, (batch_index,))
                y = load_tile(b, ks, columns, end, n, (batch_index,))
                return d + jnp.dot(x, y, precision=precision, preferred_element_type=d.dtype)

            return matmul.add_dot(c, int32_loop(0, pl.cdiv(block, part), add, zeros), plan, draw, number)

        result = int32_loop(0, pl.cdiv(k, block), step, zeros)
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        plt.store(out.at[batch_index, rows[:, None], columns[None, :]], result, mask=mask)

    operands = [x.astype(operand) for x in (a, b)] if operand in ("bfloat16", "float16") else [a, b]
    return call_on_gpu(
        kernel,
        (batch * down * across,),
        operands if seeds is None else [*operands, seeds],
        [((batch, m, n), a.dtype)],
        name="matmul_matrix_unit",
        tiling=tiling,
        interpret=interpret,
    )[0]
