"""The matrix product whose blocks a tensor core sums, for Hopper GPUs (Mosaic GPU): a step along the sum is a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._common.bit_ops import CARRIERS
from jchop._core.matmul import matmul
from jchop._kernels.products.hopper import HopperProduct, TilePart
from jchop._kernels.products.matmul import HOPPER_OPERANDS, dot_operand, hopper_dot_tiling
from jchop._kernels.products.product_of_blocks import HopperTiling
from jchop._kernels.tiles import SUBLANES
from jchop._kernels.warpgroups import RegisterMatrix
from jchop._spec.accumulation import MatmulSpec

#: Columns that are rounded together, so that the temporaries of a step stay in registers.
_ROUNDED_COLUMNS = 8


def hopper_matmul_of_dots(
    a: Array, b: Array, seeds: Array | None = None, *, spec: MatmulSpec, tiling: HopperTiling | None = None
) -> Array:
    """The result of `jchop._core.matmul.matmul.matmul_body` for ``order="matrix_unit"``.

    Args:
        a: float32 (batch, m, k), rounded to the operands' spec.
        b: the same (batch, k, n), likewise.
        seeds: the twelve seeds, if something draws.
        spec: the arithmetic.
        tiling: the tiles. Default: the heuristic's.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    if not batch * m * n * k:
        return jnp.zeros((batch, m, n), a.dtype)
    plan = matmul.MatmulPlan(spec, CARRIERS[a.dtype.name], k)
    tiling = tiling or hopper_dot_tiling(plan)
    assert tiling is not None
    depth = tiling.depth
    dtype, block = HOPPER_OPERANDS[dot_operand(plan)], min(spec.order.block or 1, k)

    def in_blocks(x: Array) -> Array:
        """(batch, rows, numbers), zeros at the end of each block, which change no sum; and whole words of rows."""
        steps = -(-k // block)
        x = jnp.pad(x.astype(dtype), ((0, 0), (0, -x.shape[1] % SUBLANES), (0, steps * block - k)))
        x = x.reshape(*x.shape[:2], steps, block)
        return jnp.pad(x, ((0, 0),) * 3 + ((0, depth - block),)).reshape(*x.shape[:2], -1)

    with jax.enable_x64(False):

        @jax.custom_batching.sequential_vmap
        def of_matrices(number: Array, x: Array, w: Array, *seeds: Array) -> Array:
            tile = _DotsTile(m, n, jnp.dtype("float32"), tiling, jnp.float32, plan=plan)
            parts = {"seeds": seeds[0], "first row": (number * np.int32(m))[None]} if seeds else {}
            return tile.run(x, w, parts, whole_tiles=True)[:m, :n]

        arrays = lax.iota(jnp.int32, batch), in_blocks(a), in_blocks(jnp.swapaxes(b, 1, 2))
        if batch == 1:
            return of_matrices(*(v[0] for v in arrays), *([] if seeds is None else [seeds]))[None]
        return lax.map(lambda each: of_matrices(*each, *([] if seeds is None else [seeds])), arrays)


@dataclass(frozen=True)
class _DotsTile(HopperProduct):
    NAME: ClassVar = "matmul_matrix_unit"

    plan: Any = None

    @property
    def registers(self) -> RegisterMatrix:
        return RegisterMatrix((self.tiling.rows, _ROUNDED_COLUMNS), False)

    def zero(self) -> tuple[Array, ...]:
        return (self.registers.full(0.0),) * (self.tiling.columns // _ROUNDED_COLUMNS)

    def add(self, total: tuple[Array, ...], sums: Array, step: Array, place: TilePart) -> tuple[Array, ...]:
        """The sums of a tile after one more dot, rounded; a part for each group of columns."""
        parts = []
        for number, c in enumerate(total):
            left = number * _ROUNDED_COLUMNS
            draw = self._word_source(place, left) if self.plan.draws else None
            d = sums[:, left : left + _ROUNDED_COLUMNS]
            parts.append(matmul.add_dot(c, d, self.plan, draw, step))
        return tuple(parts)

    def _word_source(self, place: TilePart, left: int) -> matmul.WordSource:
        seeds, first = place.load("seeds"), place.load("first row")
        rows = self.registers.iota(0) + (first[0] + place.row)
        columns = self.registers.iota(1) + (place.column + np.int32(left))
        index = rows.astype(jnp.uint32) * np.uint32(self.n) + columns.astype(jnp.uint32)
        return matmul.make_word_source([seeds[i] for i in range(12)], index, self.plan.carrier)

    def write(self, total: tuple[Array, ...], place: TilePart, out: Any) -> None:
        """Writes the sums of a warpgroup's part of a tile."""
        for number, part in enumerate(total):
            rows, left = pl.ds(place.row, self.tiling.rows), place.column + np.int32(number * _ROUNDED_COLUMNS)
            self.registers.store(out.at[rows, pl.ds(left, _ROUNDED_COLUMNS)], part)
