"""The calls of kernels of TPUs (Mosaic): grids and blocks. Those of NVIDIA GPUs are in `warpgroups.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

#: A shape and a dtype.
ArrayType = tuple[tuple[int, ...], Any]

#: The block of a row of words that a TPU's kernel reads one by one. An axis of vmap would break the tiling of a vector.
SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


@dataclass(frozen=True)
class TpuGrid:
    """The grid of a TPU's kernel.

    Args:
        tiles: the number of tiles along each axis, by the axis; the last axis runs innermost.
        summed: the axis whose tiles add to one result, in order.
    """

    tiles: Mapping[str, int]
    summed: str = ""

    def blocks(self, axes: Sequence[str], *sizes: int | None) -> pl.BlockSpec:
        """The blocks of an array.

        Args:
            axes: the grid's axis along each axis of the array; another text for an axis with one block.
            sizes: the length of a block along each axis; None for one number, in a block without this axis.
        """

        def index(*numbers: Any) -> tuple[Any, ...]:
            by_axis = dict(zip(self.tiles, numbers, strict=True))
            return tuple(by_axis.get(axis, np.int32(0)) for axis in axes)

        return pl.BlockSpec(sizes, index)


def call_on_tpu(
    kernel: Callable[..., None],
    grid: TpuGrid,
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[tuple[ArrayType, pl.BlockSpec]],
    *,
    name: str,
    scratch: Sequence[ArrayType] = (),
    interpret: Any = False,
) -> tuple[Array, ...]:
    """The results of a kernel that runs for each tile of a grid.

    Args:
        kernel: a function of references: of the inputs, the outputs and the scratch.
        grid: the grid.
        inputs: arrays and their blocks.
        outputs: shapes and dtypes of the results, and their blocks.
        name: of the kernel, which a profiler shows.
        scratch: shapes and dtypes of memory on chip.
        interpret: as in `pallas_call`, to run it on any device.
    """
    arrays = [array for array, _ in inputs]
    order: list[Any] = ["arbitrary" if axis == grid.summed else "parallel" for axis in grid.tiles]
    with jax.enable_x64(False):  # otherwise some Python numbers would become 64-bit numbers
        return pl.pallas_call(
            kernel,
            out_shape=result_types(arrays, [result for result, _ in outputs]),
            grid=tuple(grid.tiles.values()),
            in_specs=[spec for _, spec in inputs],
            out_specs=tuple(spec for _, spec in outputs),
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
            compiler_params=pltpu.CompilerParams(dimension_semantics=tuple(order)),
            interpret=interpret,
            name=name,
        )(*arrays)


def result_types(arrays: Sequence[Array], results: Sequence[ArrayType]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of results, which vary over the mesh axes that any array varies over."""
    like = jax.eval_shape(lambda *each: sum(jnp.sum(part).astype(jnp.float32) for part in each), *arrays)
    return tuple(jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=like.manual_axis_type) for shape, dtype in results)


def divmod_int32(index: Array, count: int) -> tuple[Array, Array]:
    """Quotient and remainder of nonnegative numbers, int32 also under 64-bit types."""
    return jax.lax.div(index, np.int32(count)), jax.lax.rem(index, np.int32(count))
