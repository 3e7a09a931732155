"""The product of codes whose scales change along the sum, for TPU (Mosaic).

The grid runs over rows, columns and, innermost, steps along the sum; the sums of a tile stay in scratch until they are
complete. A step takes several whole blocks. A block of fewer numbers than a register has lanes is multiplied with zeros
in place of its neighbours, which takes the matrix unit no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jchop._core.xla.backend import TILE
from jchop._kernels.products.product_of_blocks_tile import PRODUCT_LANES, ProductOfBlocksTpuTiling, sums_of_blocks

Array = jax.Array


def tpu_product_of_blocks(
    x: Array,
    w: Array,
    *parts: Array,
    names: tuple[str, ...],
    block: int,
    dtype: str,
    apart: bool = False,
    tiling: ProductOfBlocksTpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of the body in `jchop/_quantized/products/codes.py`: the same bits for int8.

    Args:
        x: (batch, m, k), int8 or float8.
        w: (batch, n, k), likewise.
        parts: of each operand the scales and the zero points, (batch, rows, blocks), or (batch, rows, 1) if they are
            one along the sum.
        names: what they are, of "x_scale", "w_scale", "x_zero", "w_zero".
        block: the length of a block, a power of two.
        dtype: of the result.
        apart: used by the body only.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    del apart
    (batch, m, k), n = x.shape, w.shape[1]
    tiling = tiling or ProductOfBlocksTpuTiling.for_shape(m, n, k, block)
    parts_by_name = dict(zip(names, parts, strict=True))
    parts_by_name |= sums_of_blocks(x, w, parts_by_name, block)
    changing = frozenset(name for name, part in parts_by_name.items() if part.shape[2] > 1)
    missing = -k % tiling.block_k
    x, w = (jnp.pad(v, ((0, 0), (0, 0), (0, missing))) if missing else v for v in (x, w))
    tile = _ProductOfBlocksTpuTile(block, tiling, x.shape[2] // tiling.block_k, changing, bool(interpret))
    of_steps = {name: tile.of_steps(name, part) for name, part in parts_by_name.items()}

    def spec(name: str, part: Array) -> pl.BlockSpec:
        changes, zero = name in changing, np.int32(0)
        if name.startswith("x"):
            size = (1, 1, tiling.block_m, part.shape[3])
            return pl.BlockSpec(size, lambda b, i, j, t: (b, t if changes else zero, i, zero))
        size = (1, 1, part.shape[2], tiling.block_n)
        return pl.BlockSpec(size, lambda b, i, j, t: (b, t if changes else zero, zero, j))

    return pl.pallas_call(
        lambda x, w, *refs: tile.kernel(x, w, dict(zip(of_steps, refs[:-2], strict=True)), *refs[-2:]),
        out_shape=jax.ShapeDtypeStruct((batch, m, n), dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        grid=(batch, pl.cdiv(m, tiling.block_m), pl.cdiv(n, tiling.block_n), tile.steps),
        in_specs=[
            pl.BlockSpec((1, tiling.block_m, tiling.block_k), lambda b, i, j, t: (b, i, t)),
            pl.BlockSpec((1, tiling.block_n, tiling.block_k), lambda b, i, j, t: (b, j, t)),
            *(spec(name, part) for name, part in of_steps.items()),
        ],
        out_specs=pl.BlockSpec((1, tiling.block_m, tiling.block_n), lambda b, i, j, t: (b, i, j)),
        scratch_shapes=[pltpu.VMEM((tiling.block_m, tiling.block_n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="product_of_blocks",
    )(x, w, *of_steps.values())


@dataclass(frozen=True)
class _ProductOfBlocksTpuTile:
    """The kernel of one tile, and its static data."""

    block: int
    tiling: ProductOfBlocksTpuTiling
    steps: int
    changing: frozenset[str]
    interpret: bool

    @property
    def blocks(self) -> int:
        """Blocks of a step."""
        return self.tiling.block_k // self.block

    def of_steps(self, name: str, part: Array) -> Array:
        """What each step needs of a part: (batch, steps, m, blocks) of x, (batch, steps, blocks, n) of w.

        One along the sum is that of a single step and block.
        """
        steps = 1
        if name in self.changing:
            steps = self.steps
            part = jnp.pad(part, ((0, 0), (0, 0), (0, steps * self.blocks - part.shape[2])))
        part = part.reshape(*part.shape[:2], steps, -1)
        return part.transpose((0, 2, 1, 3) if name.startswith("x") else (0, 2, 3, 1))

    def kernel(self, x: Any, w: Any, parts: Mapping[str, Any], out: Any, total: Any) -> None:
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def of(name: str, i: int) -> Array:
            """A column, or a row: of block number `i` of the step, or of all."""
            one = slice(i, i + 1) if name in self.changing else slice(0, 1)
            return parts[name][0, 0, :, one] if name.startswith("x") else parts[name][0, 0, one, :]

        scales = [name for name in ("x_scale", "w_scale") if name in parts]
        for i in range(self.blocks):
            term = self._of_block(x, w, i)
            for zero, sums in (("w_zero", "x_sum"), ("x_zero", "w_sum")):
                if zero in parts:
                    term = term - of(zero, i) * of(sums, i)
            term = term.astype(jnp.float32)
            for name in scales:
                if name in self.changing:
                    term = self._times(term, of(name, i))
            total[...] += term

        @pl.when(step == self.steps - 1)
        def _() -> None:
            result = total[...]
            for name in scales:
                if name not in self.changing:
                    result = self._times(result, of(name, 0))
            out[0] = result.astype(out.dtype)

    def _of_block(self, x: Any, w: Any, i: int) -> Array:
        """The sum of the products of elements of block number `i` of the step."""
        start = i * self.block
        begin = start // PRODUCT_LANES * PRODUCT_LANES
        columns = slice(begin, max(begin + PRODUCT_LANES, start + self.block))
        a, b = self._alone(x[0, :, columns], start - begin), w[0, :, columns]
        if a.dtype == jnp.int8:
            return lax.dot_general(a, b, _CONTRACT_LAST_AXES, preferred_element_type=jnp.int32)
        b = self._alone(b, start - begin)  # zero times infinity is NaN
        if a.dtype != b.dtype:
            a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        return lax.dot_general(a, b, _CONTRACT_LAST_AXES, preferred_element_type=jnp.float32)

    def _alone(self, elements: Array, first: int) -> Array:
        """Elements with zeros in place of the neighbours of a block."""
        if self.block >= PRODUCT_LANES:
            return elements
        lane = lax.broadcasted_iota(jnp.int32, elements.shape, 1)
        return jnp.where((lane >= first) & (lane < first + self.block), elements, jnp.zeros_like(elements))

    def _times(self, numbers: Array, scale: Array) -> Array:
        numbers = numbers * scale
        return TILE.prevent_fma(numbers, jnp.broadcast_to(scale, numbers.shape)) if self.interpret else numbers


#: Both operands have the sum along their last axis.
_CONTRACT_LAST_AXES = (((1,), (1,)), ((), ()))
