"""Rounding of elements for TPU (Mosaic): each block is read, rounded a few registers at a time, and written.

Bits of the TPU's own generator are cheaper than bits of the counter-based stream, but not reproducible:
`tpu_round_with_hardware_bits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding import elements
from jchop._core.rounding.random_bits import SEEDS, random_words
from jchop._kernels.round_tile import (
    ROUND_LANES,
    KernelStream,
    RoundTpuTiling,
    elementwise_under_vmap,
    register_rows,
    result_like,
    round_array_tile,
)
from jchop._spec.spec import Spec

Array = jax.Array


def tpu_round_elements(
    x: Array,
    seeds: Array | None = None,
    start: Array | None = None,
    *,
    spec: Spec,
    tiling: RoundTpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `jchop._core.rounding.elements.round_to_spec`, with the words of the random stream.

    Args:
        x: float32 or bfloat16, any shape, fewer than 2^32 elements.
        seeds: for the stochastic modes, the six uint32 words of `seed_words`.
        start: uint32 (2,): low and high word of the stream's index for the first element of `x`. Default 0.
        spec: a specification that the dtype of `x` holds, of at most 32 levels if it is a codebook.
        tiling: the tiles, which do not change the result. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """

    def round_chunk(tile: Array, stream_refs: list[Any], first: Array, local: Array) -> Array:
        return round_array_tile(tile, spec, KernelStream.read([ref.at[0] for ref in stream_refs]), first, local)

    run = _ElementwiseKernel(round_chunk, None, "round", tiling, interpret)
    if seeds is None:
        return elementwise_under_vmap(run)(x)
    return run(x, seeds) if start is None else run(x, seeds, start)


def tpu_round_with_hardware_bits(
    x: Array, seeds: Array, *, spec: Spec, tiling: RoundTpuTiling | None = None, interpret: Any = False
) -> Array:
    """`x` rounded with random bits of the TPU's own generator; each block seeds it with words of the stream.

    The bits depend on the tiling and on the chip: they are reproducible only on one kind of chip with one version of
    this package. In interpret mode all bits are 0.

    Args:
        x: float32 or bfloat16, any shape.
        seeds: the six uint32 words of `seed_words`.
        spec: a specification with a stochastic mode, as for `tpu_round_elements`.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`; only the interpreter of `pltpu.InterpretParams` has the generator.
    """
    carrier = CARRIERS[x.dtype.name]

    def seed(stream_refs: list[Any], number: Array) -> None:
        words = [stream_refs[0][0, i] for i in range(SEEDS)]
        pltpu.prng_seed(*(random_words(words, number, lane=lane).astype(jnp.int32) for lane in (0, 1)))

    def round_chunk(tile: Array, stream_refs: list[Any], first: Array, local: Array) -> Array:
        word = lax.bitcast_convert_type(pltpu.prng_random_bits(tile.shape), jnp.uint32)
        return elements.round_to_spec(tile, spec, carrier, word)

    return _ElementwiseKernel(round_chunk, seed, "round_with_hardware_bits", tiling, interpret)(x, seeds)


# -- blocks and chunks -------------------------------------------------------------------------------------------------

_RoundChunk = Callable[[Array, list[Any], Array, Array], Array]
_SeedBlock = Callable[[list[Any], Array], None]


@dataclass(frozen=True)
class _ElementwiseKernel:
    """A function of every element of an array and of its place.

    Args:
        round_chunk: the function of a chunk, the references of the drawn words, and the places of the chunk's elements.
        seed: called once in each block, with the block's number.
        name: the name of the kernel.
        tiling: the tiling of the call.
        interpret: as in `pallas_call`.
    """

    round_chunk: _RoundChunk
    seed: _SeedBlock | None
    name: str
    tiling: RoundTpuTiling | None
    interpret: Any

    def __call__(self, x: Array, *seeds_and_starts: Array) -> Array:
        if not x.size:
            return x
        # Without 64-bit types; otherwise some Python numbers would become 64-bit numbers.
        with jax.enable_x64(False):
            # A row of scalars; vmap then makes rows, which can be addressed one at a time.
            rows = [part[None] for part in seeds_and_starts]
            slabs = as_slabs(x)
            call = self._flat if slabs.ndim == 1 else self._call
            return call(slabs, *rows).reshape(x.shape)

    @property
    def _flat(self) -> Callable[..., Array]:
        """`_call` of arrays of one axis, under vmap of rows, since blocks cannot be cut from one row of a matrix."""
        call = jax.custom_batching.custom_vmap(self._call)

        @call.def_vmap
        def vmap_rule(size: int, batch_flags: list[bool], x: Array, *seed_rows: Array) -> tuple[Array, bool]:
            def call_as_slab(x: Array, *seed_rows: Array) -> Array:
                return self._call(x[None, None], *seed_rows)[0, 0]

            axes = [0 if flag else None for flag in batch_flags]
            return jax.vmap(call_as_slab, axes, axis_size=size)(x, *seed_rows), True

        return call

    def _call(self, slabs: Array, *rows: Array) -> Array:
        itemsize = slabs.dtype.itemsize
        shape = slabs.shape if slabs.ndim == 3 else (1, pl.cdiv(slabs.size, ROUND_LANES), ROUND_LANES)
        tiling = self.tiling or RoundTpuTiling.for_shape(shape, itemsize)
        _check_slab_tiling(tiling, itemsize, slabs.ndim)
        blocks = _SlabBlocks(tiling, shape, slabs.ndim == 1, self.round_chunk, self.seed)
        block = pl.BlockSpec(blocks.shape, blocks.index)
        return pl.pallas_call(
            blocks.kernel,
            out_shape=result_like(slabs, rows),
            grid=blocks.grid,
            in_specs=[*(pl.BlockSpec(row.shape, _first_row, memory_space=pltpu.SMEM) for row in rows), block],
            out_specs=block,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * len(blocks.grid)),
            interpret=self.interpret,
            name=self.name,
        )(*rows, slabs)


def _first_row(*_: Array) -> tuple[int, int]:
    return 0, 0


def as_slabs(x: Array) -> Array:
    """`x` in the form that the kernels cut into blocks, by reshapes that move no data on a TPU.

    On a TPU the last two axes are in tiles of (8, 128), or (16, 128) for 16 bits. So the axes before them become one
    axis, and join the rows if the rows fill whole tiles: (slabs, rows, columns). An array of one axis, or none, becomes
    (n,).
    """
    if x.ndim < 2:
        return x.reshape(x.size)
    *outer, rows, columns = x.shape
    if rows % register_rows(x.dtype.itemsize) == 0:
        return x.reshape(1, math.prod(outer) * rows, columns)
    return x.reshape(math.prod(outer), rows, columns)


def _check_slab_tiling(tiling: RoundTpuTiling, itemsize: int, axes: int) -> None:
    if tiling.chunk % register_rows(itemsize):
        raise ValueError(f"tiling: chunk={tiling.chunk} must be a multiple of {register_rows(itemsize)} for 16-bit x")
    if axes == 1 and (tiling.slabs, tiling.columns) != (1, ROUND_LANES):
        raise ValueError(f"tiling={tiling}: an array of one axis has one slab of {ROUND_LANES} columns")


@dataclass(frozen=True)
class _SlabBlocks:
    """The blocks of an array of shape `whole` = (slabs, rows, columns), and the kernel of one.

    An array of one axis is flat: its blocks have one axis, too, and become rows of 128 only in registers.
    """

    tiling: RoundTpuTiling
    whole: tuple[int, ...]
    flat: bool
    round_chunk: _RoundChunk
    seed: _SeedBlock | None

    @property
    def size(self) -> tuple[int, int, int]:
        return (self.tiling.slabs, self.tiling.rows, self.tiling.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.size),) if self.flat else self.size

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(pl.cdiv(total, part) for total, part in zip(self.whole, self.size, strict=True))

    def index(self, i: Array, j: Array, k: Array) -> tuple[Array, ...]:
        return (j,) if self.flat else (i, j, k)

    def kernel(self, *refs: Any) -> None:
        *stream_refs, x, out = refs
        block_index = [pl.program_id(axis) for axis in range(3)]
        if self.seed is not None:
            _, row_blocks, column_blocks = self.grid
            self.seed(
                stream_refs,
                ((block_index[0] * row_blocks + block_index[1]) * column_blocks + block_index[2]).astype(jnp.uint32),
            )
        chunk, (_, rows, columns) = self.tiling.chunk, self.whole
        tile_indices = _flat_indices_of_tile((chunk, self.tiling.columns), columns)
        block_start = [number * size for number, size in zip(block_index, self.size, strict=True)]
        chunks_per_slab = self.tiling.rows // chunk

        def step(chunk_index: Array, _: None) -> None:
            slab, row = (
                lax.div(chunk_index, np.int32(chunks_per_slab)),
                lax.rem(chunk_index, np.int32(chunks_per_slab)) * chunk,
            )
            first_index = ((block_start[0] + slab) * rows + block_start[1] + row) * columns + block_start[2]
            ref_index = self._place(slab, row)
            tile = x[ref_index]
            rounded_tile = self.round_chunk(
                tile.reshape(tile_indices.shape), stream_refs, first_index.astype(jnp.uint32), tile_indices
            )
            out[ref_index] = rounded_tile.reshape(tile.shape)

        lax.fori_loop(0, self.tiling.slabs * chunks_per_slab, step, None)

    def _place(self, slab: Array, row: Array) -> Any:
        """The indexes of a chunk in the block."""
        chunk = self.tiling.chunk
        if self.flat:
            return pl.ds(pl.multiple_of(row * ROUND_LANES, chunk * ROUND_LANES), chunk * ROUND_LANES)
        return slab, pl.ds(pl.multiple_of(row, chunk), chunk), slice(None)


def _flat_indices_of_tile(shape: tuple[int, int], columns: int) -> Array:
    """The C-order index of each element of a tile, relative to the first, in an array of `columns` columns."""
    row, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    return row * jnp.uint32(columns) + column
