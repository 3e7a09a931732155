"""Kernels of one warpgroup on NVIDIA GPUs (Mosaic GPU): its tiles in registers, and the call.

Interpreted kernels run as kernels of TPUs do, on any device and version of JAX: the same functions on whole arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir

from jchop._kernels.pallas import ArrayType, result_types
from jchop._kernels.tiles import WARP_LANES, WARPS

plgpu: Any = mosaic_gpu  # some of its names are not exported to type checkers

#: JAX before 0.12 takes an index beside the reference, and stores without a function for it.
_LOAD_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
_HAS_STORE = hasattr(plgpu, "store")


class _Registers:
    """A tile in the registers of a warpgroup.

    Args:
        shape: of the tile.
        interpret: whether the kernel is interpreted.
        layout: the registers of its numbers.
    """

    shape: Any
    interpret: bool

    @property
    def layout(self) -> Any:
        raise NotImplementedError

    def store(self, ref: Any, values: Array) -> None:
        """Writes a tile, or its reduction, to global memory."""
        if self.interpret or not _HAS_STORE:
            ref[...] = values
        else:
            plgpu.store(ref, values, optimized=False)

    def full(self, value: float) -> Array:
        """A tile of one number everywhere, float32."""
        x = jnp.full(self.shape, value, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, self.layout)

    def load(self, ref: Any) -> Array:
        """The tile at a reference in global memory."""
        return ref[...] if self.interpret else plgpu.load(ref, *_LOAD_INDEX, layout=self.layout, optimized=False)

    def load_along(self, ref: Any, *axes: int) -> Array:
        """Numbers along some axes of the tile, repeated along the others."""
        if self.interpret:
            return lax.broadcast_in_dim(ref[...], self.shape, axes)
        layout = self.layout.reduce(tuple(axis for axis in range(len(self.shape)) if axis not in axes))
        numbers = plgpu.load(ref, *_LOAD_INDEX, layout=layout, optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(numbers, self.shape, axes), self.layout)

    def iota(self, axis: int) -> Array:
        """The index of each number along an axis, int32."""
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, self.shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layout)


@dataclass(frozen=True)
class RegisterTile(_Registers):
    """A tile (rows, words, numbers) in the registers of a warpgroup, a word in the registers of one thread.

    Args:
        shape: of the tile.
        lanes: the threads of a warp along the words; the others, and the warps, are along the rows.
        interpret: whether the kernel is interpreted.
    """

    shape: tuple[int, int, int]
    lanes: int
    interpret: bool

    @property
    def layout(self) -> Any:
        """The layout of a tile in registers: lanes along words, and each lane's numbers together."""
        numbers, lanes = self.shape[2], self.lanes
        if lanes == WARP_LANES:
            return _layout(((WARPS, lanes, numbers),), -3, (-2,))
        down = WARP_LANES // lanes
        tiles = (WARPS * down, lanes, numbers), (down, lanes, numbers)
        return _layout(tiles, -6, (-3, -2) if lanes > 1 else (-3,))

    def maximum(self, x: Array, axis: tuple[int, ...], keepdims: bool = False) -> Array:
        """`jax.numpy.max` of a tile; with `keepdims`, the result repeated along the axes."""
        out = x
        for each in reversed(axis):
            out = jnp.max(out, axis=each)
        if not keepdims:
            return out
        out = lax.broadcast_in_dim(out, x.shape, tuple(each for each in range(x.ndim) if each not in axis))
        return out if self.interpret else plgpu.layout_cast(out, self.layout)


@dataclass(frozen=True)
class RegisterMatrix(_Registers):
    """A tile of a matrix in the registers of a warpgroup, as matrix units lay their results.

    Args:
        shape: of the tile, multiples of 64 and of 8.
        interpret: whether the kernel is interpreted.
    """

    shape: tuple[int, int]
    interpret: bool

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WGMMA


@dataclass(frozen=True)
class LaidTile(_Registers):
    """A tile in registers as its arguments say.

    Args:
        shape: of the tile.
        interpret: whether the kernel is interpreted.
        tiles: the tile, and the tiles that each is cut into.
        warps: the dimension of the cut tile, from the last one on, along which the warps are; or None if all are equal.
        lanes: likewise of the threads of a warp; a positive number is a number of equal threads.
    """

    shape: tuple[int, ...]
    interpret: bool
    tiles: tuple[tuple[int, ...], ...]
    warps: int | None
    lanes: tuple[int, ...]

    @property
    def layout(self) -> Any:
        return _layout(self.tiles, self.warps, self.lanes)

    def on_registers(self, fun: Callable[..., Any], *words: Any) -> Array:
        """The words that a function of words of MLIR gives for each register; an integer is the same word in all."""
        arrays = [x for x in words if isinstance(x, Array)]
        out = plgpu.ShapeDtypeStruct(self.shape, jnp.uint32, self.layout)

        @plgpu.inline_mgpu(arg_types=(self.layout,) * len(arrays), return_type=out)
        def run(_: Any, *arrays: Any) -> Any:
            word, given = ir.IntegerType.get_signless(32), iter(arrays)
            columns = [
                [utils.bitcast(v, word) for v in next(given).registers.flat]
                if isinstance(x, Array)
                else [utils.c(int(np.uint32(x).view(np.int32)), word)] * arrays[0].registers.size
                for x in words
            ]
            kind = arrays[0].registers.flat[0].type
            made = [utils.bitcast(fun(*each), kind) for each in zip(*columns, strict=True)]
            return fragmented_array(made, arrays[0].layout, arrays[0].shape, is_signed=False)

        return run(*arrays)

    def select_bytes(self, a: Array | int, b: Array | int, selector: Array | int) -> Array:
        """Words of four bytes. Four bits of a selector, low ones first, number a byte of `a`, or from 4 on of `b`."""
        if not self.interpret:
            return self.on_registers(utils.prmt, a, b, selector)  # JAX calls the first one high; PTX takes it as low
        out, (a, b, selector) = jnp.uint32(0), map(jnp.uint32, (a, b, selector))
        for i in range(4):
            place = selector >> (4 * i) & 7
            out |= (jnp.where(place < 4, a, b) >> (8 * (place & 3)) & 0xFF) << (8 * i)
        return out


def fragmented_array(registers: Any, layout: Any, shape: Any, is_signed: bool | None = None) -> Any:
    """An array of MLIR that has these registers."""
    array = np.array(list(registers), dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=is_signed)


def _layout(tiles: tuple[tuple[int, ...], ...], warps: int | None, lanes: tuple[int, ...]) -> Any:
    """A layout of tiles in registers: the axes of warps and of lanes, and a vector along the last one."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(plgpu.Replicated(WARPS) if warps is None else warps,),
        lane_dims=tuple(plgpu.Replicated(lane) if lane > 0 else lane for lane in lanes),
        vector_dim=-1,
    )


def call_on_warpgroups(
    kernel: Callable[..., None],
    programs: int,
    arrays: Sequence[Array],
    outputs: Sequence[ArrayType],
    *,
    name: str,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """The results of a kernel that runs as some programs of one warpgroup, which address arrays themselves.

    Args:
        kernel: a function of the number of the program, and of references of the arrays and the outputs.
        programs: the number of programs.
        arrays: the arrays.
        outputs: shapes and dtypes of the results.
        name: of the kernel, which a profiler shows.
        interpret: True runs it on any device; parameters of Pallas run it as on a GPU.
    """
    types = result_types(arrays, outputs)
    with jax.enable_x64(False):  # otherwise some Python numbers would become 64-bit numbers
        if interpret is True:
            return pl.pallas_call(
                lambda *refs: kernel(pl.program_id(0), *refs),
                out_shape=types,
                grid=(programs,),
                interpret=True,
                name=name,
            )(*arrays)

        def program(*refs: Any) -> None:
            kernel(lax.axis_index("program"), *refs)

        program.__name__ = name
        return plgpu.kernel(
            program,
            out_type=types,
            grid=(programs,),
            grid_names=("program",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            interpret=interpret or None,
        )(*arrays)
