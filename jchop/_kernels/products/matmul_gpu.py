"""The matrix product with an emulated accumulator, for NVIDIA GPUs (Mosaic GPU).

A warpgroup computes one tile of the result: it runs through the whole inner dimension with the accumulator in
registers. So memory traffic is the loads of operands, mostly from caches, and one store of the result. The last tile
ends with the matrix; a part that two tiles share is written twice, equally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._common.bit_ops import CARRIERS, lax_where
from jchop._core.matmul import matmul
from jchop._kernels.pallas import divmod_int32
from jchop._kernels.products.matmul import (
    MATMUL_GPU_ROWS,
    MatmulGpuTiling,
    add_aligned_block,
    aligned_factors,
    aligned_unit,
    finish_pairs,
    int32_loop,
    merge_pairs,
    pair_levels,
)
from jchop._kernels.tiles import next_multiple
from jchop._kernels.warpgroups import RegisterMatrix, call_on_warpgroups
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
        a: float32 (batch, m, k), rounded to the operands' spec.
        b: the same (batch, k, n), likewise.
        seeds: the twelve seeds, if something draws.
        spec: the arithmetic.
        tiling: the tiles. Default: the heuristic's.
        interpret: as for `call_on_warpgroups`.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    if not batch * m * n * k:
        return jnp.zeros((batch, m, n), a.dtype)
    plan = matmul.MatmulPlan(spec, CARRIERS[a.dtype.name], k)
    tiling = tiling or MatmulGpuTiling.for_order(spec.order)
    down, across = max(m, MATMUL_GPU_ROWS), max(next_multiple(n, 2), tiling.block_n)  # two columns are loaded together
    tile = _MatmulGpuTile(plan, tiling, (m, n), (down, across), interpret is True)
    operands = [jnp.swapaxes(jnp.pad(a, ((0, 0), (0, down - m), (0, 0))), 1, 2)]
    operands += [jnp.pad(b, ((0, 0), (0, 0), (0, across - n)))]
    if spec.order.aligned:
        unit = aligned_unit(spec, k)
        operands = [part for x in operands for part in aligned_factors(x, 1, unit)]
    arrays = operands if seeds is None else [*operands, seeds]
    programs, name = batch * tile.down * tile.across, f"matmul_{spec.order.kind}"
    result = [((batch, down, across), a.dtype)]
    return call_on_warpgroups(tile.kernel, programs, arrays, result, name=name, interpret=interpret)[0][:, :m, :n]


@dataclass(frozen=True)
class _MatmulGpuTile:
    """The kernel of one tile, and its static data."""

    plan: matmul.MatmulPlan
    tiling: MatmulGpuTiling
    shape: tuple[int, int]  # of the result
    padded: tuple[int, int]  # likewise, at least a tile
    interpret: bool

    @property
    def registers(self) -> RegisterMatrix:
        return RegisterMatrix((MATMUL_GPU_ROWS, self.tiling.block_n), self.interpret)

    @property
    def down(self) -> int:
        """The count of tiles along the rows."""
        return pl.cdiv(self.padded[0], MATMUL_GPU_ROWS)

    @property
    def across(self) -> int:
        """The count of tiles along the columns."""
        return pl.cdiv(self.padded[1], self.tiling.block_n)

    def kernel(self, program: Array, *refs: Any) -> None:
        """Computes one tile of the result, in the order of the plan."""
        count = 4 if self.plan.spec.order.aligned else 2
        operands, (*seeds_ref, out) = refs[:count], refs[count:]
        lead, j = divmod_int32(program, self.across)
        batch, i = divmod_int32(lead, self.down)
        row = jnp.minimum(i * np.int32(MATMUL_GPU_ROWS), np.int32(self.padded[0] - MATMUL_GPU_ROWS))
        column = jnp.minimum(j * np.int32(self.tiling.block_n), np.int32(self.padded[1] - self.tiling.block_n))
        draw = None
        if seeds_ref:
            seeds = [seeds_ref[0][i] for i in range(12)]
            rows, columns = self.registers.iota(0) + row, self.registers.iota(1) + column
            index = (batch * np.int32(self.shape[0]) + rows).astype(jnp.uint32) * np.uint32(self.shape[1])
            draw = matmul.make_word_source(seeds, index + columns.astype(jnp.uint32), self.plan.carrier)
        loads = _OperandLoads(operands, (batch, row, column), self.registers)
        result = _GPU_SUM_OF_ORDER[self.plan.spec.order.kind](self, loads, draw)
        place = out.at[batch, pl.ds(row, MATMUL_GPU_ROWS), pl.ds(column, self.tiling.block_n)]
        self.registers.store(place, result)

    @property
    def zeros(self) -> Array:
        return self.registers.full(0.0)

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
            pairs = [loads.at(first + np.int32(j)) for j in range(step_length)]
            for j, pair in enumerate(pairs):
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
        """The pairwise sum of the products of a tile, with a stack of one partial sum for each level."""
        plan, step_length = self.plan, max(self.tiling.block_k, 2)

        def product(k: Array) -> Array:
            return matmul.round_products(*loads.at(k), plan, draw, k)

        if plan.k == 1:
            return matmul.round_single_product(product(jnp.int32(0)), plan, draw, 0)

        def merge(i: Array, p: Array, q: Array, stack: tuple[Array, ...]) -> tuple[Array, ...]:
            level, total = merge_pairs(
                i, matmul.add_products(p, q, plan, draw, 2 * i + 1), _partial_sum_picker(stack), plan, draw
            )
            return tuple(lax_where(level == number, total, partial_sum) for number, partial_sum in enumerate(stack))

        def pair(i: Array, stack: tuple[Array, ...]) -> tuple[Array, ...]:
            return merge(i, product(2 * i), product(2 * i + 1), stack)

        def some(i: Array, stack: tuple[Array, ...]) -> tuple[Array, ...]:
            first = i * np.int32(step_length)
            terms = [product(first + np.int32(j)) for j in range(step_length)]
            for j, (p, q) in enumerate(zip(terms[::2], terms[1::2], strict=True)):
                stack = merge(i * np.int32(step_length // 2) + np.int32(j), p, q, stack)
            return stack

        stack = (self.zeros,) * pair_levels(plan.k)
        count = plan.k // step_length
        stack = int32_loop(0, count, some, stack) if count else stack
        stack = int32_loop(count * step_length // 2, plan.k // 2, pair, stack) if plan.k % step_length > 1 else stack
        last = product(jnp.int32(plan.k - 1)) if plan.k % 2 else None
        return finish_pairs(last, _partial_sum_picker(stack), plan, draw)

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
    **dict.fromkeys(("aligned", "aligned_apart", "aligned_halves"), _MatmulGpuTile.sum_of_aligned_blocks),
}


@dataclass(frozen=True)
class _OperandLoads:
    """Loads of the operands for a tile, repeated along its other axis."""

    operands: tuple[Any, ...]  # both, or significands and exponents of both, (batch, k, m) and (batch, k, n)
    corner: tuple[Array, Array, Array]
    registers: RegisterMatrix

    def factors(self, k: Array) -> tuple[list[Array], list[Array]]:
        """Significands and exponents of the factors of product k, or these alone."""
        (batch, row, column), count = self.corner, len(self.operands) // 2
        rows, columns = pl.ds(row, MATMUL_GPU_ROWS), pl.ds(column, self.registers.shape[1])
        return (
            [self.registers.load_along(ref.at[batch, k, rows], 0) for ref in self.operands[:count]],
            [self.registers.load_along(ref.at[batch, k, columns], 1) for ref in self.operands[count:]],
        )

    def at(self, k: Array) -> tuple[Array, Array]:
        """Column k of one operand and row k of the other."""
        (x,), (y,) = self.factors(k)
        return x, y


def _partial_sum_picker(stack: tuple[Array, ...]) -> Callable[[Array], Array]:
    """A function that selects the partial sum of a level; selects are needed because registers have no addresses."""

    def pick(level: Array) -> Array:
        choice = stack[0]
        for number, partial_sum in enumerate(stack[1:], 1):
            choice = lax_where(level == number, partial_sum, choice)
        return choice

    return pick
