"""The matrix product with an emulated accumulator, for TPU (Mosaic).

The grid runs over batch, rows, columns and, innermost, the inner dimension. So the accumulator of a tile stays on chip
(in the output block; other sums in scratch) until it is complete. Elementwise orders process a tile in chunks of a few
registers, which hold the accumulator for all steps on chip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jchop._common.bit_ops import CARRIERS
from jchop._core.matmul import matmul
from jchop._kernels.pallas import SCALARS, TpuGrid, call_on_tpu
from jchop._kernels.products.matmul import (
    MatmulTpuTiling,
    add_aligned_block,
    aligned_factors,
    aligned_unit,
    dot_operand,
    finish_pairs,
    merge_pairs,
    pair_levels,
)
from jchop._spec.accumulation import MatmulSpec


def tpu_matmul(
    a: Array,
    b: Array,
    seeds: Array | None = None,
    *,
    spec: MatmulSpec,
    tiling: MatmulTpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `jchop._core.matmul.matmul.matmul_body`.

    Args:
        a: float32 (batch, m, k), rounded to the operands' spec.
        b: float32 (batch, k, n), likewise.
        seeds: the twelve seeds, if something draws.
        spec: the arithmetic.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    if not batch * m * n * k:
        return jnp.zeros((batch, m, n), a.dtype)
    tiling = tiling or MatmulTpuTiling.for_shape(m, n, k, spec)
    block_m, block_n, block_k = tiling.block_m, tiling.block_n, tiling.block_k
    plan = matmul.MatmulPlan(spec, CARRIERS[a.dtype.name], k)
    lhs, rhs = [a], [b]
    if spec.order.aligned:
        lhs, rhs = (aligned_factors(x, axis, aligned_unit(spec, k)) for x, axis in ((a, 2), (b, 1)))
    count = len(lhs)

    def kernel(*refs: Any) -> None:
        words, refs = (refs[0], refs[1:]) if plan.draws else (None, refs)
        words = None if words is None else [words[0, i] for i in range(12)]
        numbers, (out, *partial) = (refs[:count], refs[count : 2 * count]), refs[2 * count :]
        run = _MatmulTpuRun(plan, tiling, (m, n), *numbers, out, words, tuple(pl.program_id(axis) for axis in range(4)))

        @pl.when(run.part == 0)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        _TPU_SUM_OF_ORDER[spec.order.kind](run, *partial)

    grid = TpuGrid({"g": batch, "i": pl.cdiv(m, block_m), "j": pl.cdiv(n, block_n), "t": pl.cdiv(k, block_k)}, "t")
    (result,) = call_on_tpu(
        kernel,
        grid,
        [
            *([] if seeds is None else [(seeds[None], SCALARS)]),
            *((x, grid.blocks("git", None, block_m, block_k)) for x in lhs),
            *((x, grid.blocks("gtj", None, block_k, block_n)) for x in rhs),
        ],
        [(((batch, m, n), a.dtype), grid.blocks("gij", None, block_m, block_n))],
        name=f"matmul_{spec.order.kind}",
        scratch=[(shape, a.dtype) for shape in matmul_scratch(plan, tiling)],
        interpret=interpret,
    )
    return result


def matmul_scratch(plan: matmul.MatmulPlan, tiling: MatmulTpuTiling) -> list[tuple[int, ...]]:
    """Shapes of the scratch beside the accumulator: the sum of a block, or the partial sums of every level."""
    area, kind = (tiling.block_m, tiling.block_n), plan.spec.order.kind
    if kind == "pairwise":
        return [(pair_levels(plan.k), *area)] if plan.k > 1 else []
    return [area] if kind in ("blocked", "matrix_unit") or plan.spec.order.promote_every else []


@dataclass(frozen=True)
class _MatmulTpuRun:
    """One run of the kernel: the data on chip, and its place in the grid."""

    plan: matmul.MatmulPlan
    tiling: MatmulTpuTiling
    shape: tuple[int, int]  # of the product
    lhs: tuple[Any, ...]  # the parts of the operands: the numbers, or their significands and exponents
    rhs: tuple[Any, ...]
    out: Any
    seeds: list[Array] | None
    grid_index: tuple[Array, ...]

    @property
    def part(self) -> Array:
        """The index of the part of the inner dimension."""
        return self.grid_index[3]

    @property
    def first(self) -> Array:
        """The index of its first product."""
        return self.part * self.tiling.block_k

    @property
    def stop(self) -> Array:
        """The number of its products."""
        return jnp.minimum(self.plan.k - self.first, self.tiling.block_k)

    def at(self, rows: Any, t: Array) -> tuple[Array, Array]:
        """The factors of product `t` for some rows."""
        (lhs,), (rhs,) = self.parts(rows, t)
        return lhs, rhs

    def parts(self, rows: Any, t: Array) -> tuple[list[Array], list[Array]]:
        """All parts of these factors: a row is addressed, a column is rotated to the first lane."""
        block_k = self.tiling.block_k
        columns = [pltpu.roll(ref[rows, :], lax.rem(block_k - t, block_k), 1) for ref in self.lhs]
        return [v[:, :1] for v in columns], [ref[pl.ds(t, 1), :] for ref in self.rhs]

    def stretches(self, body: Callable[[_BlockStretch], None]) -> None:
        """Runs `body` on the part of each block in this part of the inner dimension."""
        block = min(self.plan.spec.order.block or 1, self.plan.k)

        def next_stretch(begin: Array) -> Array:
            number = lax.div(self.first + begin, block)
            end = jnp.minimum(self.stop, (number + 1) * block - self.first)
            starts = self.first + begin == number * block
            ends = (self.first + end == (number + 1) * block) | (self.first + end == self.plan.k)
            body(_BlockStretch(begin, end, number, starts, ends))
            return end

        lax.while_loop(lambda begin: begin < self.stop, next_stretch, jnp.int32(0))

    def chunks(self, body: Callable[[Any, matmul.WordSource | None], None]) -> None:
        """Runs `body` on the rows of every chunk of the tile, with its random words."""
        rows = self.tiling.rows

        def chunk(i: Array, _: None) -> None:
            start = pl.multiple_of(i * rows, rows)
            body(pl.ds(start, rows), self._draw(start))

        lax.fori_loop(0, self.tiling.block_m // rows, chunk, None)

    def _draw(self, start: Array) -> matmul.WordSource | None:
        """The source of random words for the rows of a tile from `start` on; None if nothing draws."""
        if self.seeds is None:
            return None
        tiling, (m, n) = self.tiling, self.shape
        batch, i, j = self.grid_index[:3]
        corner = batch * m + i * tiling.block_m + start, j * tiling.block_n
        shape = (tiling.rows, tiling.block_n)
        row, column = (first.astype(jnp.uint32) + lax.broadcasted_iota(jnp.uint32, shape, axis)
                       for axis, first in enumerate(corner))  # fmt: skip
        return matmul.make_word_source(self.seeds, row * np.uint32(n) + column, self.plan.carrier)


@dataclass(frozen=True)
class _BlockStretch:
    """The part of one block of products on chip."""

    begin: Array
    end: Array
    number: Array
    starts: Array  # whether the block starts here
    ends: Array


# -- the orders --------------------------------------------------------------------------------------------------------


def _tpu_sum_in_sequence(run: _MatmulTpuRun) -> None:
    def chunk(rows: Any, draw: matmul.WordSource | None) -> None:
        def step(t: Array, c: Array) -> Array:
            return matmul.multiply_accumulate(c, *run.at(rows, t), run.plan, draw, run.first + t)

        run.out[rows, :] = lax.fori_loop(0, run.stop, step, run.out[rows, :])

    run.chunks(chunk)


def _tpu_sum_in_blocks(run: _MatmulTpuRun, partial: Any) -> None:
    """`partial` keeps the sum of a block from one part of the inner dimension to the next."""
    plan = run.plan

    def chunk(rows: Any, draw: matmul.WordSource | None) -> None:
        def step(t: Array, d: Array) -> Array:
            return matmul.multiply_accumulate(d, *run.at(rows, t), plan, draw, run.first + t)

        def add(stretch: _BlockStretch) -> None:
            so_far = jnp.where(stretch.starts, 0, partial[rows, :])
            d = lax.fori_loop(stretch.begin, stretch.end, step, so_far)
            partial[rows, :] = d

            @pl.when(stretch.ends)
            def _() -> None:
                run.out[rows, :] = matmul.combine_sums(run.out[rows, :], d, plan, draw, plan.k + stretch.number)

        run.stretches(add)

    run.chunks(chunk)


def _tpu_sum_in_pairs(run: _MatmulTpuRun, *stack: Any) -> None:
    """The stack keeps the partial sums of every level."""
    plan = run.plan

    def chunk(rows: Any, draw: matmul.WordSource | None) -> None:
        def partial_sum(level: Array) -> Array:
            return stack[0][level, rows, :]

        def product(t: Array) -> Array:
            return matmul.round_products(*run.at(rows, t), plan, draw, run.first + t)

        def pair(i: Array, _: None) -> None:
            p, q = product(2 * i), product(2 * i + 1)
            begin = run.first + 2 * i
            total = matmul.add_products(p, q, plan, draw, begin + 1)
            level, total = merge_pairs(begin >> 1, total, partial_sum, plan, draw)
            stack[0][level, rows, :] = total

        if plan.k == 1:
            run.out[rows, :] = matmul.round_single_product(product(run.stop - 1), plan, draw, 0)
            return
        lax.fori_loop(0, run.stop >> 1, pair, None)

        @pl.when(run.first + run.stop == plan.k)
        def _() -> None:
            last = product(run.stop - 1) if plan.k % 2 else None
            run.out[rows, :] = finish_pairs(last, partial_sum, plan, draw)

    run.chunks(chunk)


def _tpu_sum_of_dots(run: _MatmulTpuRun, partial: Any) -> None:
    """`partial` holds the dot of a block, which is then added chunk by chunk.

    If a block is smaller than this part of the inner dimension, the other factors are replaced by zeros. Their products
    add nothing: a matrix unit computes 128 or more products in the time of a few.
    """
    is_narrow = dot_operand(run.plan, ("bfloat16",)) == "bfloat16"
    precision = None if is_narrow else lax.Precision.HIGHEST

    def add(stretch: _BlockStretch) -> None:
        operands = []
        for x, axis in ((run.lhs[0][...], 1), (run.rhs[0][...], 0)):
            index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
            x = jnp.where((index >= stretch.begin) & (index < stretch.end), x, 0)
            operands.append(x.astype(jnp.bfloat16) if is_narrow else x)
        dot = jnp.dot(*operands, precision=precision, preferred_element_type=jnp.float32)
        partial[...] = jnp.where(stretch.starts, 0, partial[...]) + dot

        @pl.when(stretch.ends)
        def _() -> None:
            def chunk(rows: Any, draw: matmul.WordSource | None) -> None:
                run.out[rows, :] = matmul.add_dot(run.out[rows, :], partial[rows, :], run.plan, draw, stretch.number)

            run.chunks(chunk)

    run.stretches(add)


def _tpu_sum_of_aligned_blocks(run: _MatmulTpuRun, *partial: Any) -> None:
    """Whole blocks lie in each part of the inner dimension. `partial` keeps c if the output holds the total."""
    unit, block_k = aligned_unit(run.plan.spec, run.plan.k), run.tiling.block_k
    first = run.part * (block_k // unit.length)
    count = jnp.minimum(pl.cdiv(run.plan.k, unit.length) - first, block_k // unit.length)
    sum_refs = (*partial, run.out)

    @pl.when(run.part == 0)
    def _() -> None:
        for ref in partial:
            ref[...] = jnp.zeros_like(ref)

    def chunk(rows: Any, draw: matmul.WordSource | None) -> None:
        def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            lhs, rhs = zip(*(run.parts(rows, i * unit.length + j) for j in range(unit.length)), strict=True)
            return add_aligned_block(sums, lhs, rhs, run.plan, draw, first + i)

        sums = lax.fori_loop(0, count, step, tuple(ref[rows, :] for ref in sum_refs))
        for ref, value in zip(sum_refs, sums, strict=True):
            ref[rows, :] = value

    run.chunks(chunk)


_TPU_SUM_OF_ORDER: dict[str, Callable[..., None]] = {
    "sequential": _tpu_sum_in_sequence,
    "blocked": _tpu_sum_in_blocks,
    "pairwise": _tpu_sum_in_pairs,
    "matrix_unit": _tpu_sum_of_dots,
    **dict.fromkeys(("aligned", "aligned_apart", "aligned_halves"), _tpu_sum_of_aligned_blocks),
}
