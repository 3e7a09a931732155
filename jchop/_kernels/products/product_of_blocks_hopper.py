"""The product of codes and scales, for Hopper GPUs (Mosaic GPU): a step along the sum is a block.

The units sum float8 in fewer bits than float32, so the sum of each step is added in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._kernels.products.hopper import COMPUTE_WARPGROUPS, HopperProduct, TilePart, shared_memory_transforms
from jchop._kernels.products.product_of_blocks import (
    HOPPER_ROW_BYTES,
    HopperTiling,
    multiply_scales,
    named_parts,
    subtract_zero_points,
)
from jchop._kernels.warpgroups import plgpu

#: Rows of the parts in which a tile is written, and how many wait in shared memory.
_STORE_ROWS, _STORE_SLOTS = 64, 2


def hopper_product_of_blocks(
    x: Array,
    w: Array,
    *parts: Array,
    names: tuple[str, ...],
    block: int,
    dtype: str,
    apart: bool = False,
    tiling: HopperTiling | None = None,
) -> Array:
    """The result of the body in `jchop/_quantized/products/codes.py`: the same bits for int8.

    Args:
        x: (batch, m, k), int8 or float8.
        w: (batch, n, k), of the same dtype.
        parts: of each operand the scales and the zero points, (batch, rows, blocks), or (batch, rows, 1) if they are
            one along the sum.
        names: their names, of "x_scale", "w_scale", "x_zero", "w_zero".
        block: the length of a block: 32, 64, 128 or 256, or at least k.
        dtype: of the result.
        apart: used by the body only.
        tiling: the tiles. Default: the heuristic's.
    """
    del apart
    (batch, m, k), n = x.shape, w.shape[1]
    is_integer = x.dtype == jnp.int8
    tiling = tiling or HopperTiling.for_shape(x.shape, n, block, is_integer=is_integer)
    accumulator = jnp.int32 if is_integer else jnp.float32
    with jax.enable_x64(False):
        by_name = named_parts(x, w, names, parts, block)
        once = {name for name, v in by_name.items() if v.shape[2] == 1}
        # Zero points go before the scales of blocks, which are one along the sum or not.
        of_blocks = () if block >= k else tuple(name for name in by_name if name not in once or "scale" not in name)
        last = tuple(name for name in by_name if name not in of_blocks)
        tile = _BlocksTile(
            m, n, jnp.dtype(dtype), tiling, accumulator, is_integer and block >= k, once=last, of_blocks=of_blocks
        )

        @jax.custom_batching.sequential_vmap
        def of_matrices(x: Array, w: Array, *parts: Array) -> Array:
            return tile.run(x, w, dict(zip(by_name, parts, strict=True)))

        arrays = x, w, *(v.astype(jnp.float32) if name.endswith("scale") else v for name, v in by_name.items())
        if batch == 1:
            return of_matrices(*(v[0] for v in arrays))[None]
        return lax.map(lambda each: of_matrices(*each), arrays)


@dataclass(frozen=True)
class _BlocksTile(HopperProduct):
    NAME: ClassVar = "product_of_blocks"

    #: Names of the parts that are one along the sum, and of the parts of blocks.
    once: tuple[str, ...] = ()
    of_blocks: tuple[str, ...] = ()

    def zero(self) -> Array:
        return jnp.zeros(self.shape, jnp.float32)

    def add(self, total: Array, sums: Array, step: Array, place: TilePart) -> Array:
        """The total with the sums of a block, under their scales."""
        del step
        return total + self._scaled(sums, self.of_blocks, place, feeds_sum=True)

    def _scaled(self, sums: Array, names: tuple[str, ...], place: TilePart, *, feeds_sum: bool = False) -> Array:
        """Sums of the units without the parts of zero points, times scales; rounded before they are `feeds_sum`."""
        parts = {name: place.load(name) for name in names}
        return multiply_scales(subtract_zero_points(sums, parts), parts, names, feeds_sum)

    def staging(self) -> Any:
        """The shared memory for results: parts of 128 bytes of each row."""
        shape = COMPUTE_WARPGROUPS, _STORE_SLOTS, _STORE_ROWS, HOPPER_ROW_BYTES // self.dtype.itemsize
        return plgpu.SMEM(shape, self.dtype, transforms=shared_memory_transforms(shape[-1], self.dtype))

    def write(self, total: Array, place: TilePart, out: Any) -> None:
        """Writes a warpgroup's part of a tile through shared memory, slot by slot."""
        total = self._scaled(total, self.once, place).astype(self.dtype)
        width = HOPPER_ROW_BYTES // self.dtype.itemsize
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, (row, column) in enumerate(np.ndindex(self.shape[0] // _STORE_ROWS, self.shape[1] // width)):
            top, left = row * _STORE_ROWS, column * width
            plgpu.wait_smem_to_gmem(_STORE_SLOTS - 1, wait_read_only=True)
            slot = place.staging.at[place.warpgroup, number % _STORE_SLOTS]
            slot[...] = total[top : top + _STORE_ROWS, left : left + width]
            plgpu.commit_smem()
            rows, columns = pl.ds(place.row + top, _STORE_ROWS), pl.ds(place.column + left, width)
            plgpu.copy_smem_to_gmem(slot, out.at[rows, columns])
