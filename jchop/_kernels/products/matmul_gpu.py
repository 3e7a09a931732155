"""The matrix product with an emulated accumulator, for NVIDIA GPUs (Pallas on Triton).

One program computes one output tile: it runs through the whole inner dimension with the accumulator in registers. So
memory traffic is the loads of operands, mostly from caches, and one store of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jchop._common.bit_ops import CARRIERS
from jchop._core.matmul import matmul
from jchop._kernels.pallas import call_on_gpu, divmod_int32
from jchop._kernels.products.matmul import (
    MatmulGpuTiling,
    add_aligned_block,
    aligned_factors,
    aligned_unit,
    dot_length,
    dot_operand,
    finish_pairs,
    int32_loop,
    merge_pairs,
    pair_levels,
)
from jchop._spec.accumulation import MatmulSpec


def gpu_matmul(
    a: Array,
    b: Array,
    seeds: Array | None = None,
    *,
    spec: MatmulSpec,
    tiling: MatmulGpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `jchop._core.matmul.matmul.matmul_body`.

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
    tile = _MatmulGpuTile(plan, tiling or MatmulGpuTiling.for_shape(batch, m, n, plan), m, n)
    operands, result = [a, b], ((batch, m, n), a.dtype)
    if spec.order.kind == "matrix_unit" and tile.operand in ("bfloat16", "float16"):
        operands = [x.astype(tile.operand) for x in operands]
    if spec.order.aligned:
        unit = aligned_unit(spec, k)
        operands = [*aligned_factors(jnp.swapaxes(a, 1, 2), 1, unit), *aligned_factors(b, 1, unit)]
    arrays = [*operands, *[seeds] * plan.draws]
    grid, name = (batch * tile.down * tile.across,), f"matmul_{spec.order.kind}"
    return call_on_gpu(tile.kernel, grid, arrays, [result], name=name, tiling=tile.tiling, interpret=interpret)[0]


@dataclass(frozen=True)
class _MatmulGpuTile:
    """The kernel of one tile, and its static data."""

    plan: matmul.MatmulPlan
    tiling: MatmulGpuTiling
    m: int
    n: int

    @property
    def down(self) -> int:
        return pl.cdiv(self.m, self.tiling.block_m)

    @property
    def across(self) -> int:
        return pl.cdiv(self.n, self.tiling.block_n)

    @cached_property
    def operand(self) -> str:
        """The type of the operands of ``matrix_unit`` tile products."""
        return dot_operand(self.plan)

    def kernel(self, *refs: Any) -> None:
        count = 4 if self.plan.spec.order.aligned else 2
        operands, (*seeds_ref, out) = refs[:count], refs[count:]
        lead, j = divmod_int32(pl.program_id(0), self.across)
        batch, i = divmod_int32(lead, self.down)
        corner = batch, i * np.int32(self.tiling.block_m), j * np.int32(self.tiling.block_n)
        rows = corner[1] + lax.broadcasted_iota(jnp.int32, (self.tiling.block_m, 1), 0)
        columns = corner[2] + lax.broadcasted_iota(jnp.int32, (1, self.tiling.block_n), 1)
        draw = None
        if seeds_ref:
            seeds = [seeds_ref[0][i] for i in range(12)]
            row = (corner[0] * np.int32(self.m) + rows).astype(jnp.uint32) * np.uint32(self.n)
            draw = matmul.make_word_source(seeds, row + columns.astype(jnp.uint32), self.plan.carrier)
        loads = _OperandLoads(operands, corner, rows < self.m, columns < self.n, self.tiling)
        result = _GPU_SUM_OF_ORDER[self.plan.spec.order.kind](self, loads, draw)
        index = (corner[0], pl.ds(corner[1], self.tiling.block_m), pl.ds(corner[2], self.tiling.block_n))
        plt.store(out.at[index], result, mask=(rows < self.m) & (columns < self.n))

    @property
    def zeros(self) -> Array:
        return jnp.zeros((self.tiling.block_m, self.tiling.block_n), self.plan.carrier.name)

    @property
    def block(self) -> int:
        """Products in a block."""
        return min(self.plan.spec.order.block or 1, self.plan.k)

    def sum_in_sequence(self, loads: _OperandLoads, draw: matmul.WordSource | None) -> Array:
        return self._steps(loads, draw, 0, self.plan.k)

    def _steps(self, loads: _OperandLoads, draw: matmul.WordSource | None, begin: Any, end: Any) -> Array:
        """The sequential sum of some products, from zero."""
        step_length = self.tiling.block_k

        def step(k: Array, c: Array) -> Array:
            return matmul.multiply_accumulate(c, *loads.at(k), self.plan, draw, k)

        def some(i: Array, c: Array) -> Array:
            first = begin + i * np.int32(step_length)
            for j, pair in enumerate(loads.consecutive(first, step_length)):
                c = matmul.multiply_accumulate(c, *pair, self.plan, draw, first + np.int32(j))
            return c

        count = lax.div(jnp.int32(end - begin), np.int32(step_length))
        c = int32_loop(0, count, some, self.zeros) if max(self._lengths) >= step_length else self.zeros
        if all(length % step_length == 0 for length in self._lengths):
            return c
        return int32_loop(begin + count * np.int32(step_length), end, step, c)

    @property
    def _lengths(self) -> tuple[int, ...]:
        """The numbers of products that are summed from zero: in a block, and in a smaller last block."""
        length = self.plan.k if self.plan.spec.order.kind == "sequential" else self.block
        return length, self.plan.k % length or length

    def sum_in_blocks(self, loads: _OperandLoads, draw: matmul.WordSource | None) -> Array:
        def step(j: Array, c: Array) -> Array:
            begin = j * np.int32(self.block)
            d = self._steps(loads, draw, begin, jnp.minimum(begin + self.block, self.plan.k))
            return matmul.combine_sums(c, d, self.plan, draw, self.plan.k + j)

        return int32_loop(0, pl.cdiv(self.plan.k, self.block), step, self.zeros)

    def sum_in_pairs(self, loads: _OperandLoads, draw: matmul.WordSource | None) -> Array:
        plan, step_length = self.plan, max(self.tiling.block_k, 2)

        def product(k: Array) -> Array:
            return matmul.round_products(*loads.at(k), plan, draw, k)

        if plan.k == 1:
            return matmul.round_single_product(product(jnp.int32(0)), plan, draw, 0)

        def merge(i: Array, p: Array, q: Array, stack: tuple[Array, ...]) -> tuple[Array, ...]:
            level, total = merge_pairs(
                i, matmul.add_products(p, q, plan, draw, 2 * i + 1), _partial_sum_picker(stack), plan, draw
            )
            return tuple(jnp.where(level == number, total, partial_sum) for number, partial_sum in enumerate(stack))

        def pair(i: Array, stack: tuple[Array, ...]) -> tuple[Array, ...]:
            return merge(i, product(2 * i), product(2 * i + 1), stack)

        def some(i: Array, stack: tuple[Array, ...]) -> tuple[Array, ...]:
            first = i * np.int32(step_length)
            terms = [
                matmul.round_products(*operands, plan, draw, first + np.int32(j))
                for j, operands in enumerate(loads.consecutive(first, step_length))
            ]
            for j, (p, q) in enumerate(zip(terms[::2], terms[1::2], strict=True)):
                stack = merge(i * np.int32(step_length // 2) + np.int32(j), p, q, stack)
            return stack

        stack = (self.zeros,) * pair_levels(plan.k)
        count = plan.k // step_length
        stack = int32_loop(0, count, some, stack) if count else stack
        stack = int32_loop(count * step_length // 2, plan.k // 2, pair, stack) if plan.k % step_length > 1 else stack
        last = product(jnp.int32(plan.k - 1)) if plan.k % 2 else None
        return finish_pairs(last, _partial_sum_picker(stack), plan, draw)

    def sum_of_dots(self, loads: _OperandLoads, draw: matmul.WordSource | None) -> Array:
        part = min(self.tiling.block_k, dot_length(self.block))
        parts = pl.cdiv(self.block, part)
        precision = lax.Precision.DEFAULT if self.operand == "tf32" else lax.Precision.HIGHEST

        def step(j: Array, c: Array) -> Array:
            begin = j * np.int32(self.block)
            end = jnp.minimum(begin + self.block, self.plan.k)

            def add(i: Array, d: Array) -> Array:
                x, y = loads.parts(begin + i * part, end, part)
                return d + jnp.dot(x, y, precision=precision, preferred_element_type=d.dtype)

            d = add(jnp.int32(0), self.zeros) if parts == 1 else int32_loop(0, parts, add, self.zeros)
            return matmul.add_dot(c, d, self.plan, draw, j)

        return int32_loop(0, pl.cdiv(self.plan.k, self.block), step, self.zeros)

    def sum_of_aligned_blocks(self, loads: _OperandLoads, draw: matmul.WordSource | None) -> Array:
        length = aligned_unit(self.plan.spec, self.plan.k).length
        sum_count = 2 if self.plan.spec.order.promote_every else 1

        def step(j: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            factors = [loads.factors(j * np.int32(length) + np.int32(i)) for i in range(length)]
            lhs, rhs = zip(*factors, strict=True)
            return add_aligned_block(sums, lhs, rhs, self.plan, draw, j)

        return int32_loop(0, pl.cdiv(self.plan.k, length), step, (self.zeros,) * sum_count)[-1]


_GPU_SUM_OF_ORDER: dict[str, Callable[[_MatmulGpuTile, _OperandLoads, matmul.WordSource | None], Array]] = {
    "sequential": _MatmulGpuTile.sum_in_sequence,
    "blocked": _MatmulGpuTile.sum_in_blocks,
    "pairwise": _MatmulGpuTile.sum_in_pairs,
    "matrix_unit": _MatmulGpuTile.sum_of_dots,
    **dict.fromkeys(("aligned", "aligned_apart", "aligned_halves"), _MatmulGpuTile.sum_of_aligned_blocks),
}


@dataclass(frozen=True)
class _OperandLoads:
    """Masked loads of the operands for a tile; elements outside are zero."""

    operands: tuple[Any, ...]  # both, or significands and exponents of both, (batch, k, m) and (batch, k, n)
    corner: tuple[Array, Array, Array]
    rows: Array  # whether each row of the tile exists
    columns: Array
    tiling: MatmulGpuTiling

    def factors(self, k: Array) -> tuple[list[Array], list[Array]]:
        """Significands and exponents of the factors of product k."""
        batch, row, column = self.corner

        def parts(refs: tuple[Any, ...], start: Array, length: int, mask: Array, shape: tuple[int, int]) -> list[Array]:
            index = batch, k, pl.ds(start, length)
            return [plt.load(ref.at[index], mask=mask.reshape(length), other=0).reshape(shape) for ref in refs]

        tall, wide = self.tiling.block_m, self.tiling.block_n
        return (
            parts(self.operands[:2], row, tall, self.rows, (tall, 1)),
            parts(self.operands[2:], column, wide, self.columns, (1, wide)),
        )

    def at(self, k: Array) -> tuple[Array, Array]:
        """Column k of one operand and row k of the other."""
        return self._both(k, 1, None)

    def consecutive(self, k: Array, length: int) -> list[tuple[Array, Array]]:
        """The results of `at` for k and the next `length` - 1 products, which must exist, from loads of vectors."""
        both = self._both(k, length, lambda axis: jnp.expand_dims(jnp.ones(length, bool), 1 - axis))
        return list(zip(*(lax.split(x, [1] * length, 1 - i) for i, x in enumerate(both)), strict=True))

    def parts(self, begin: Array, end: Array, length: int) -> tuple[Array, Array]:
        """`length` columns and rows from `begin` on; from `end` on they are zero."""

        def exists(axis: int) -> Array:
            shape = (1, length) if axis else (length, 1)
            return begin + lax.broadcasted_iota(jnp.int32, shape, axis) < end

        return self._both(begin, length, exists)

    def _both(self, k: Array, length: int, exists: Callable[[int], Array] | None) -> tuple[Array, Array]:
        """`length` columns and rows from k on; `exists` gives the mask of products along an axis, None for all."""
        batch, row, column = self.corner
        a, b = self.operands
        ks, rows, columns = pl.ds(k, length), self.rows, self.columns
        if exists is not None:
            rows, columns = rows & exists(1), exists(0) & columns
        return (
            plt.load(a.at[batch, pl.ds(row, self.tiling.block_m), ks], mask=rows, other=0),
            plt.load(b.at[batch, ks, pl.ds(column, self.tiling.block_n)], mask=columns, other=0),
        )


def _partial_sum_picker(stack: tuple[Array, ...]) -> Callable[[Array], Array]:
    """A function that selects the partial sum of a level; selects are needed because registers have no addresses."""

    def pick(level: Array) -> Array:
        choice = stack[0]
        for number, partial_sum in enumerate(stack[1:], 1):
            choice = jnp.where(level == number, partial_sum, choice)
        return choice

    return pick
