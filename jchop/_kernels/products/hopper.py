"""A product of matrices, step by step along the sum, on the matrix units of Hopper GPUs (Mosaic GPU).

A program computes tiles of the product, one after the other. One warpgroup copies tiles of the operands to shared
memory, several steps ahead, and numbers that change along the sum with them. Two others multiply by the matrix units,
each for half of the rows, and add the sums of each step in registers. Copies beyond the ends of an array read zeros and
write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._kernels.products.product_of_blocks import HOPPER_ROW_BYTES, HopperTiling
from jchop._kernels.tiles import next_multiple
from jchop._kernels.warpgroups import RegisterMatrix, plgpu

#: Warpgroups that multiply, and the registers of a thread of the one that copies.
COMPUTE_WARPGROUPS, _COPY_REGISTERS = 2, 40
#: Rows of tiles that follow one another, so that caches hold common operands; and multiprocessors of an H100 or H200.
_SNAKE_WIDTH, _HOPPER_PROGRAMS = 8, 132


@dataclass(frozen=True)
class TilePart:
    """Where a warpgroup is: its part of a tile of the product, and its loads.

    Args:
        warpgroup: its number.
        row: the first row of the part.
        column: the first column.
        load: the numbers of a name for the rows, if it begins with "x", or the columns, repeated over the part.
        staging: shared memory for results.
    """

    warpgroup: Array
    row: Array
    column: Array
    load: Callable[[str], Array]
    staging: Any = None


@dataclass(frozen=True)
class HopperProduct:
    """The kernel of one product of an (m, k) with an (n, k) matrix, and its static data; `run` is the call.

    Args:
        m: rows of the product.
        n: its columns.
        dtype: of the result.
        tiling: the tiles.
        accumulator: the dtype of the units' sums.
        sums_all: whether the units sum all products, not the products of a step.
    """

    m: int
    n: int
    dtype: Any
    tiling: HopperTiling
    accumulator: Any
    sums_all: bool = False

    #: The name that a profiler shows.
    NAME: ClassVar[str]

    def zero(self) -> Any:
        """The sums before the first step."""
        raise NotImplementedError

    def add(self, total: Any, sums: Array, step: Array, place: TilePart) -> Any:
        """The sums after a step, from the sums of the units for its products."""
        raise NotImplementedError

    def write(self, total: Any, place: TilePart, out: Any) -> None:
        """Writes the result of a part of a tile."""
        raise NotImplementedError

    def staging(self) -> Any:
        """The shared memory for results."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the part of a tile that a warpgroup computes."""
        return self.tiling.rows, self.tiling.columns

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return COMPUTE_WARPGROUPS * self.tiling.rows

    @property
    def tiles(self) -> tuple[int, int]:
        """The counts of tiles along rows and columns."""
        return pl.cdiv(self.m, self.height), pl.cdiv(self.n, self.tiling.columns)

    def run(self, x: Array, w: Array, parts: Mapping[str, Array], whole_tiles: bool = False) -> Array:
        """The product of two matrices, (m, n).

        Args:
            x: (m, k).
            w: (n, k), likewise.
            parts: arrays by name, of the rows of `x` or `w`, (rows, steps) or (rows, 1); or of neither, by other names.
            whole_tiles: whether the result ends with a tile.
        """
        # (steps, rows): a copy for a step is a row; and whole tiles, since ordinary loads have no ends.
        refs = {name: self._to_tiles(name, part) if name[0] in "xw" else part for name, part in parts.items()}
        of_steps = [name for name, part in refs.items() if name[0] in "xw" and part.shape[0] > 1]
        shape = (next_multiple(self.m, self.height), next_multiple(self.n, self.tiling.columns))
        out = jax.ShapeDtypeStruct(
            shape if whole_tiles else (self.m, self.n), self.dtype, manual_axis_type=jax.typeof(x).manual_axis_type
        )

        def program(x: Any, w: Any, *others: Any) -> None:
            self._kernel(x, w, dict(zip(refs, others[:-1], strict=True)), of_steps, others[-1])

        program.__name__ = self.NAME
        return plgpu.kernel(
            program,
            out_type=out,
            grid=(min(_HOPPER_PROGRAMS, self.tiles[0] * self.tiles[1]),),
            grid_names=("program",),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )(x, w, *refs.values())

    def _to_tiles(self, name: str, part: Array) -> Array:
        unit = self.height if name.startswith("x") else self.tiling.columns
        return jnp.pad(part.T, ((0, 0), (0, -part.shape[0] % unit)))

    def _kernel(self, x: Any, w: Any, parts: dict[str, Any], of_steps: Sequence[str], out: Any) -> None:
        """Computes tiles of the result by tensor cores, in a pipeline of steps along the inner axis."""
        no_op: Any = lambda *_: None  # noqa: E731
        operands = x, w, *(parts[name] for name in of_steps)
        allocations = self._pipeline(x, of_steps, no_op, no_op).get_allocations(*operands)

        def program(allocations: Any, *staging: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.nd_loop((self.tiles[0] * self.tiles[1],), collective_axes="program")
            def _(loop: Any) -> None:
                i, j = plgpu.planar_snake(loop.index[0], self.tiles, 0, _SNAKE_WIDTH)
                corner = {"x": i * self.height, "w": j * self.tiling.columns}
                # The rows of both operands for a tile, and of these the rows for a warpgroup.
                of_tile = {"x": pl.ds(corner["x"], self.height), "w": pl.ds(corner["w"], self.tiling.columns)}
                of_warpgroup = {"x": pl.ds(warpgroup * self.tiling.rows, self.tiling.rows), "w": slice(None)}

                def place(step_parts: Mapping[str, Any]) -> TilePart:
                    def load(name: str) -> Any:
                        if name[0] not in "xw":
                            return parts[name]
                        if (ref := step_parts.get(name)) is None:
                            ref = parts[name].at[:, of_tile[name[0]]]
                        registers = RegisterMatrix(self.shape, False)
                        return registers.load_along(ref.at[0, of_warpgroup[name[0]]], "xw".index(name[0]))

                    row = corner["x"] + warpgroup * self.tiling.rows
                    return TilePart(warpgroup, row, corner["w"], load, *staging)

                def step(indexes: Any, x_tile: Any, w_tile: Any, *parts_and_total: Any) -> Any:
                    *refs, total = parts_and_total

                    def multiply(sums: Any) -> Any:
                        plgpu.wgmma(sums, x_tile.at[of_warpgroup["x"]], w_tile.transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        return None if self.sums_all else sums[...]

                    if self.sums_all:
                        multiply(total)
                        return total
                    sums = pl.run_scoped(multiply, plgpu.ACC(self.shape, self.accumulator))
                    return self.add(total, sums, indexes[0], place(dict(zip(of_steps, refs, strict=True))))

                def compute(run_pipeline: Any) -> None:
                    if not self.sums_all:
                        self.write(run_pipeline(self.zero()), place({}), out)
                        return

                    def run_and_write(sums: Any) -> None:
                        run_pipeline(sums)
                        self.write(sums[...], place({}), out)

                    pl.run_scoped(run_and_write, plgpu.ACC(self.shape, self.accumulator))

                tiles_of_steps = [parts[name].at[:, of_tile[name[0]]] for name in of_steps]
                inputs = x.at[of_tile["x"], :], w.at[of_tile["w"], :], *tiles_of_steps
                self._pipeline(x, of_steps, step, compute)(*inputs, allocations=allocations)

        scratch = [] if self.staging() is None else [self.staging()]
        pl.run_scoped(program, allocations, *scratch, collective_axes="warpgroup")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _pipeline(self, x: Any, of_steps: Sequence[str], step: Any, context: Any) -> Any:
        """The steps along the sum."""
        tiling, transforms = self.tiling, shared_memory_transforms(self.tiling.depth, x.dtype)

        def spec(*shape: int, index_map: Any, transforms: Sequence[Any] = ()) -> Any:
            return plgpu.BlockSpec(shape, index_map, memory_space=plgpu.SMEM, transforms=transforms)

        tiles = [self.height, tiling.columns]
        specs = [spec(rows, tiling.depth, index_map=lambda i: (0, i), transforms=transforms) for rows in tiles]
        specs += [spec(1, tiles[name[0] == "w"], index_map=lambda i: (i, 0)) for name in of_steps]
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(pl.cdiv(x.shape[1], tiling.depth),),
            memory_registers=_COPY_REGISTERS,
            in_specs=specs,
            wg_axis="warpgroup",
            num_compute_wgs=COMPUTE_WARPGROUPS,
            max_concurrent_steps=tiling.stages,
            compute_context=context,
        )


def shared_memory_transforms(row: int, dtype: Any) -> tuple[Any, ...]:
    """The transforms of tiles in shared memory for matrix units and copies: rows in parts of 32, 64 or 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    part = min(row * itemsize, HOPPER_ROW_BYTES)
    assert row * itemsize % part == 0
    return plgpu.TilingTransform((8, part // itemsize)), plgpu.SwizzleTransform(part)
