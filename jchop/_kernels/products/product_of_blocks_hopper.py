"""The product of codes and scales, for Hopper GPUs (Mosaic GPU).

A program computes tiles of the product, one after the other. One warpgroup copies tiles of the operands to shared
memory, several steps ahead, and scales that change along the sum with them. Two others multiply by the matrix units,
each for half of the rows, scale the sums in registers, and write the result alone. Copies beyond the ends of an array
read zeros and write nothing.

The units sum float8 in fewer bits than float32, so the sum of each step is added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._core.xla.backend import TILE
from jchop._kernels.products.product_of_blocks import ProductOfBlocksHopperTiling
from jchop._kernels.warpgroups import LOAD_INDEX, plgpu

#: Warpgroups that multiply, and the registers of a thread of the one that copies.
_COMPUTE_WARPGROUPS, _COPY_REGISTERS = 2, 40
#: Rows and bytes of a row of the parts in which a tile is written, and how many wait in shared memory.
_STORE_ROWS, _ROW_BYTES, _STORE_SLOTS = 64, 128, 2
#: Rows of tiles that follow one another, so that caches hold what they share; and multiprocessors of an H100 or H200.
_SNAKE_WIDTH, _HOPPER_PROGRAMS = 8, 132


def hopper_product_of_blocks(
    x: Array,
    w: Array,
    *parts: Array,
    names: tuple[str, ...],
    block: int,
    dtype: str,
    apart: bool = False,
    tiling: ProductOfBlocksHopperTiling | None = None,
) -> Array:
    """The result of the body in `jchop/_quantized/products/codes.py`: the same bits for int8.

    Args:
        x: (batch, m, k), int8 or float8.
        w: (batch, n, k), of the same dtype.
        parts: the scales of each operand, (batch, rows, blocks), or (batch, rows, 1) if they are one along the sum.
        names: what they are, of "x_scale" and "w_scale".
        block: the length of a block: 128, or at least k.
        dtype: of the result.
        apart: used by the body only.
        tiling: the tiles. Default: the heuristic's.
    """
    del apart
    batch, m, _ = x.shape
    n = w.shape[1]
    tiling = tiling or ProductOfBlocksHopperTiling.for_shape(x.shape, n, block, is_integer=x.dtype == jnp.int8)

    @jax.custom_batching.sequential_vmap
    def of_matrices(x: Array, w: Array, *parts: Array) -> Array:
        return _ProductOfBlocksHopperTile(m, n, block, jnp.dtype(dtype), tiling).call(
            x, w, dict(zip(names, parts, strict=True))
        )

    with jax.enable_x64(False):
        if batch == 1:
            return of_matrices(*(v[0] for v in (x, w, *parts)))[None]
        return lax.map(lambda each: of_matrices(*each), (x, w, *parts))


@dataclass(frozen=True)
class _ProductOfBlocksHopperTile:
    """The kernel of one matrix, and its static data."""

    m: int
    n: int
    block: int
    dtype: Any
    tiling: ProductOfBlocksHopperTiling

    @property
    def shape(self) -> tuple[int, int]:
        """Of the part of a tile that a warpgroup computes."""
        return self.tiling.rows, self.tiling.columns

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.m, _COMPUTE_WARPGROUPS * self.tiling.rows), pl.cdiv(self.n, self.tiling.columns)

    def call(self, x: Array, w: Array, scales: dict[str, Array]) -> Array:
        # (blocks, rows): a copy of the scales of a block is a row; and whole tiles, since ordinary loads have no ends.
        tiled_scales = {name: self._to_tiles(name, v.T) for name, v in scales.items()}
        block_scale_names = [name for name, v in tiled_scales.items() if v.shape[0] > 1]
        out = jax.ShapeDtypeStruct((self.m, self.n), self.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)

        def product_of_blocks(x: Any, w: Any, *refs: Any) -> None:  # a profiler shows this name
            self.kernel(x, w, dict(zip(tiled_scales, refs[:-1], strict=True)), block_scale_names, refs[-1])

        return plgpu.kernel(
            product_of_blocks,
            out_type=out,
            grid=(min(_HOPPER_PROGRAMS, self.tiles[0] * self.tiles[1]),),
            grid_names=("program",),
            num_threads=_COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )(x, w, *tiled_scales.values())

    def _to_tiles(self, name: str, scales: Array) -> Array:
        unit = _COMPUTE_WARPGROUPS * self.tiling.rows if name.startswith("x") else self.tiling.columns
        return jnp.pad(scales.astype(jnp.float32), ((0, 0), (0, -scales.shape[1] % unit)))

    def kernel(self, x: Any, w: Any, scales: dict[str, Any], block_scale_names: Sequence[str], out: Any) -> None:
        operands = x, w, *(scales[name] for name in block_scale_names)
        no_op: Any = lambda *_: None  # noqa: E731
        allocations = self._pipeline(x, block_scale_names, no_op, no_op).get_allocations(*operands)
        per_row = _ROW_BYTES // self.dtype.itemsize

        def program(allocations: Any, staging: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.nd_loop((self.tiles[0] * self.tiles[1],), collective_axes="program")
            def _(loop: Any) -> None:
                i, j = plgpu.planar_snake(loop.index[0], self.tiles, 0, _SNAKE_WIDTH)
                height, width = _COMPUTE_WARPGROUPS * self.tiling.rows, self.tiling.columns
                # Of the two operands what a tile takes, and what a warpgroup takes of that.
                tile_slices = {"x": pl.ds(i * height, height), "w": pl.ds(j * width, width)}
                warpgroup_slices = {"x": pl.ds(warpgroup * self.tiling.rows, self.tiling.rows), "w": slice(None)}

                def step(_: Any, x_tile: Any, w_tile: Any, *scales_and_carry: Any) -> Any:
                    *block_scales, carry = scales_and_carry

                    def multiply(sums: Any) -> Any:
                        plgpu.wgmma(sums, x_tile.at[warpgroup_slices["x"]], w_tile.transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        return None if self._has_one_accumulator(x) else sums[...]

                    if self._has_one_accumulator(x):
                        multiply(carry)
                        return carry
                    partial_sum = pl.run_scoped(multiply, plgpu.ACC(self.shape, self._accumulator_dtype(x))).astype(
                        jnp.float32
                    )
                    scale_refs = [
                        v.at[0, warpgroup_slices[name[0]]]
                        for name, v in zip(block_scale_names, block_scales, strict=True)
                    ]
                    return carry + self._times(partial_sum, block_scale_names, scale_refs, feeds_sum=True)

                def write(total: Array) -> None:
                    constant_scale_names = [
                        name for name in ("x_scale", "w_scale") if name in scales and name not in block_scale_names
                    ]
                    scale_refs = [
                        scales[name].at[0, tile_slices[name[0]]].at[warpgroup_slices[name[0]]]
                        for name in constant_scale_names
                    ]
                    total = self._times(total.astype(jnp.float32), constant_scale_names, scale_refs).astype(self.dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_tile = out.at[tile_slices["x"], tile_slices["w"]].at[warpgroup_slices["x"]]
                    for store_index, (row, column) in enumerate(
                        np.ndindex(self.shape[0] // _STORE_ROWS, self.shape[1] // per_row)
                    ):
                        part = np.s_[
                            row * _STORE_ROWS : (row + 1) * _STORE_ROWS, column * per_row : (column + 1) * per_row
                        ]
                        plgpu.wait_smem_to_gmem(_STORE_SLOTS - 1, wait_read_only=True)
                        staging[warpgroup, store_index % _STORE_SLOTS] = total[part]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(staging.at[warpgroup, store_index % _STORE_SLOTS], out_tile.at[part])

                def compute_context(run_pipeline: Any) -> None:
                    if not self._has_one_accumulator(x):
                        write(run_pipeline(jnp.zeros(self.shape, jnp.float32)))
                        return

                    def run_and_write(sums: Any) -> None:
                        run_pipeline(sums)
                        write(sums[...])

                    pl.run_scoped(run_and_write, plgpu.ACC(self.shape, self._accumulator_dtype(x)))

                block_scale_tiles = [scales[name].at[:, tile_slices[name[0]]] for name in block_scale_names]
                operand_tiles = x.at[tile_slices["x"], :], w.at[tile_slices["w"], :], *block_scale_tiles
                self._pipeline(x, block_scale_names, step, compute_context)(*operand_tiles, allocations=allocations)

        pl.run_scoped(
            program,
            allocations,
            plgpu.SMEM(
                (_COMPUTE_WARPGROUPS, _STORE_SLOTS, _STORE_ROWS, per_row),
                self.dtype,
                transforms=_shared_memory_transforms(per_row, self.dtype),
            ),
            collective_axes="warpgroup",
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _pipeline(self, x: Any, block_scale_names: Sequence[str], step: Any, context: Any) -> Any:
        """The steps along the sum."""
        tiling, transforms = self.tiling, _shared_memory_transforms(_ROW_BYTES, x.dtype)

        def spec(*shape: int, index_map: Any, transforms: Sequence[Any] = ()) -> Any:
            return plgpu.BlockSpec(shape, index_map, memory_space=plgpu.SMEM, transforms=transforms)

        tiles = [_COMPUTE_WARPGROUPS * tiling.rows, tiling.columns]
        specs = [spec(rows, tiling.depth, index_map=lambda i: (0, i), transforms=transforms) for rows in tiles]
        specs += [spec(1, tiles[name[0] == "w"], index_map=lambda i: (i, 0)) for name in block_scale_names]
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(pl.cdiv(x.shape[1], tiling.depth),),
            memory_registers=_COPY_REGISTERS,
            in_specs=specs,
            wg_axis="warpgroup",
            num_compute_wgs=_COMPUTE_WARPGROUPS,
            max_concurrent_steps=tiling.stages,
            compute_context=context,
        )

    def _has_one_accumulator(self, x: Any) -> bool:
        """Whether the unit sums all products: of integers whose scales do not change."""
        return x.dtype == jnp.int8 and self.block >= x.shape[1]

    @staticmethod
    def _accumulator_dtype(x: Any) -> Any:
        return jnp.int32 if x.dtype == jnp.int8 else jnp.float32

    def _times(
        self, numbers: Array, names: Sequence[str], scale_refs: Sequence[Any], *, feeds_sum: bool = False
    ) -> Array:
        """Sums times scales, one after the other, rounded before they are `feeds_sum` to something."""
        scale = None
        for name, place in zip(names, scale_refs, strict=True):
            axis = 0 if name[0] == "x" else 1
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            scale = plgpu.load(place, *LOAD_INDEX, layout=layout, optimized=False)
            scale = lax.broadcast_in_dim(scale, numbers.shape, (axis,))
            numbers = numbers * scale
        return TILE.prevent_fma(numbers, scale) if scale is not None and feeds_sum else numbers


def _shared_memory_transforms(row: int, dtype: Any) -> tuple[Any, ...]:
    """Of tiles in shared memory, as the matrix units and copies take them."""
    size = _ROW_BYTES // jnp.dtype(dtype).itemsize
    assert row % size == 0
    return plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(_ROW_BYTES)
