"""Scaled blocks on NVIDIA GPUs (Pallas on Triton): one pass that reduces, scales, rounds, encodes and packs.

A program takes some whole blocks, padded to powers of two, and addresses every element separately: elements beyond a
block, a row or the array are masked. Codes are stored as bytes, because a chip may lack the dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jchop._core.scaled import tiles
from jchop._core.scaled.elements import BlockScales, ScaledPlan, choose_scales, store_scales, widen_16_bit
from jchop._core.scaled.tiles import quantize_tile_by_powers, round_tile_by_powers
from jchop._kernels.pallas import call_on_gpu, divmod_int32
from jchop._kernels.scaled_tile import ScaledBlocksProblem, ScaledGpuTiling, draw_tile_words, tensor_scale_of_words


def gpu_round_blocks(
    x: Array, words: Array, *, plan: ScaledPlan, tiling: ScaledGpuTiling | None = None, interpret: Any = False
) -> Array:
    """The result of `round_body`.

    Args:
        x: a carrier of at least one dimension, fewer than 2^31 elements.
        words: (1, 9) uint32: the tensor's scale, six seeds, and the index of the first element; zero if unused.
        plan: a plan of a format whose groups are blocks along one axis.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    tile = _ScaledGpuTile.of(x, plan, tiling)
    (result,) = tile.call(tile.round, x, words, [(x.shape, x.dtype)], interpret)
    return result


def gpu_quantize_blocks(
    x: Array, words: Array, *, plan: ScaledPlan, tiling: ScaledGpuTiling | None = None, interpret: Any = False
) -> tuple[Array, Array]:
    """The codes and scales of `quantize_body`; arguments as for `gpu_round_blocks`."""
    tile = _ScaledGpuTile.of(x, plan, tiling)
    problem = tile.problem
    outputs = [(tile.codes_shape, tile.codes_dtype), (problem.scales_shape, problem.scale_dtype)]
    codes, scales = tile.call(tile.quantize, x, words, outputs, interpret)
    return lax.bitcast_convert_type(codes, jnp.uint8).reshape(problem.packed_shape), scales


@dataclass(frozen=True)
class _ScaledGpuTile:
    """The kernels of one tile, and their static data.

    If the blocks are along the last axis, a tile has the shape (blocks, block), and may have blocks of several rows.
    Otherwise it has the shape (block, lanes): a block in each of some columns.

    Args:
        problem: the problem.
        tiling: the tiles.
        length: the numbers of each block in a part of a tile. Default None: whole blocks.
    """

    problem: ScaledBlocksProblem
    tiling: ScaledGpuTiling
    length: int | None = None

    @classmethod
    def of(cls, x: Array, plan: ScaledPlan, tiling: ScaledGpuTiling | None) -> _ScaledGpuTile:
        problem = ScaledBlocksProblem.of(x, plan)
        return cls(problem, tiling or ScaledGpuTiling.for_shape(problem))

    @property
    def shape(self) -> tuple[int, ...]:
        length = self.length or self.problem.padded_block
        return (self.tiling.blocks, length) if self.problem.last else (length, self.tiling.lanes)

    @property
    def axis(self) -> int:
        """The axis of a tile along its blocks."""
        return 1 if self.problem.last else 0

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles along the blocks and across."""
        problem, tiling = self.problem, self.tiling
        if problem.last:
            return pl.cdiv(problem.outer * problem.blocks, tiling.blocks), 1
        return problem.blocks, pl.cdiv(problem.inner, tiling.lanes)

    def call(self, kernel: Any, x: Array, words: Array, outputs: list, interpret: Any) -> Any:
        outer = 1 if self.problem.last else self.problem.outer
        flat = call_on_gpu(
            kernel,
            (outer * self.tiles[0] * self.tiles[1],),
            [words, x.reshape(x.size)],
            [((math.prod(shape),), dtype) for shape, dtype in outputs],
            name=kernel.__name__ + "_blocks",
            tiling=self.tiling,
            interpret=interpret,
        )
        return tuple(out.reshape(shape) for out, (shape, _) in zip(flat, outputs, strict=True))

    # -- kernels -------------------------------------------------------------------------------------------------------
    def round(self, words: Any, x: Any, out: Any) -> None:
        place = _ScaledTileIndices.of(self, pl.program_id(0))
        values, word = self._load(words, x, place)
        plan = self.problem.plan
        result = round_tile_by_powers(values, self.axis, plan, word, tensor_scale_of_words(words, plan))
        plt.store(out.at[place.element], result, mask=place.valid)

    def quantize(self, words: Any, x: Any, codes: Any, scales: Any) -> None:
        plan, program = self.problem.plan, pl.program_id(0)  # which a branch cannot ask for if it is interpreted
        place = _ScaledTileIndices.of(self, program)
        values, word = self._load(words, x, place)
        tensor = tensor_scale_of_words(words, plan)
        if not tiles.supports_plain_tiles(plan):
            tile_codes, tile_scales = quantize_tile_by_powers(values, self.axis, plan, word, tensor)
            plt.store(scales.at[place.block], tile_scales, mask=place.block_valid)
            return self._store(codes, tile_codes, place)
        quick_scales, largest, is_plain = tiles.plain_tile_scales(values, self.axis, plan, tensor)

        def short() -> None:
            plt.store(scales.at[place.block], store_scales(quick_scales, plan), mask=place.block_valid)
            self._store(codes, tiles.encode_plain_tile(values, quick_scales, largest, plan), place)

        def general() -> None:
            general_scales = choose_scales(values, self.axis, plan, tensor)
            plt.store(scales.at[place.block], store_scales(general_scales, plan), mask=place.block_valid)
            self._quantize_by_parts(words, x, codes, general_scales, program)

        lax.cond(is_plain, short, general)

    def _quantize_by_parts(self, words: Any, x: Any, codes: Any, scales: BlockScales, program: Array) -> None:
        """The general way, four numbers for each thread at a time: all together would need twice the registers."""
        least = self.codes_per_store if self.problem.last else 1
        length = max(128 * self.tiling.num_warps // self.shape[1 - self.axis], least)
        length = min(length, self.shape[self.axis])
        part = replace(self, length=length)

        def quantize_part(number: Array, carry: None) -> None:
            place = _ScaledTileIndices.of(part, program, number * np.int32(length))
            part._store(codes, tiles.encode_tile(part._load(words, x, place)[0], scales, self.problem.plan), place)
            return carry

        lax.fori_loop(np.int32(0), np.int32(self.shape[self.axis] // length), quantize_part, None)

    def _store(self, out: Any, codes: Array, place: _ScaledTileIndices) -> None:
        if self.codes_per_store == 1:
            plt.store(out.at[place.element], codes, mask=place.valid)
        else:
            self._pack_and_store(out, codes, place)

    def _load(self, words: Any, x: Any, place: _ScaledTileIndices) -> tuple[Array, Array | None]:
        plan = self.problem.plan
        values = widen_16_bit(plt.load(x.at[place.element], mask=place.valid, other=0), plan.carrier)
        return values, draw_tile_words(words, place.element.astype(jnp.uint32), plan)

    # -- packing -------------------------------------------------------------------------------------------------------
    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row."""
        problem = self.problem
        return -(-(problem.size if problem.last else problem.inner) * problem.bits // 8)

    @cached_property
    def stores_words(self) -> bool:
        """Whether codes are stored in words of 32 bits.

        One reason is fewer stores. The other is the layout of a tile, in which a thread stores 16 consecutive bytes:
        with 16 one-byte codes across the blocks, a thread would have one row of 16 blocks to reduce.
        """
        problem, codes_in_word = self.problem, 32 // self.problem.bits
        if 32 % problem.bits or self.row_bytes % 4 or self.shape[-1] % codes_in_word:
            return False
        return problem.bits < 8 and problem.block % codes_in_word == 0 if problem.last else True

    @property
    def codes_per_store(self) -> int:
        """The number of codes that are stored together."""
        return 32 // self.problem.bits if self.stores_words else self.problem.codes_of_whole_bytes

    @property
    def codes_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint32 if self.stores_words else jnp.uint8)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        *lead, row = self.problem.packed_shape
        return (*lead, row) if not self.stores_words else (math.prod((*lead, row)) // 4,)

    def _pack_and_store(self, out: Any, codes: Array, place: _ScaledTileIndices) -> None:
        """Stores several codes together, summed into one word."""
        bits, together = self.problem.bits, self.codes_per_store
        wide = jnp.where(place.valid, codes.astype(jnp.int32), 0)
        groups = wide.reshape(*wide.shape[:-1], wide.shape[-1] // together, together)
        shift = lax.broadcasted_iota(jnp.int32, groups.shape, groups.ndim - 1) * bits
        word = jnp.sum(groups << shift, axis=groups.ndim - 1)
        count = 1 if self.stores_words else bits * together // 8
        offset, remaining = place.units(self, word.shape, count)
        for i in range(count):
            part = word if self.stores_words else (word >> (8 * i)) & 0xFF
            plt.store(out.at[offset + i], part.astype(self.codes_dtype), mask=place.byte_rows & (i < remaining))


@dataclass(frozen=True)
class _ScaledTileIndices:
    """The indexes of the elements and blocks of a tile, or of a part of it, in the arrays, and whether they exist."""

    element: Array  # flat index
    valid: Array
    block: Array  # flat index of its scale, with length 1 along the block
    block_valid: Array
    row: Array  # for packed codes: the flat index of the row of an element or group
    byte_rows: Array  # whether each row exists
    column: Array  # the index in the row of a block's first element, or of the tile's first lane
    begin: Any  # the index in a block of the first element

    @classmethod
    def of(cls, tile: _ScaledGpuTile, program: Array, begin: Any = 0) -> _ScaledTileIndices:
        return (cls._along_last if tile.problem.last else cls._along_middle)(tile, program, begin)

    @classmethod
    def _along_last(cls, tile: _ScaledGpuTile, program: Array, begin: Any) -> _ScaledTileIndices:
        problem, shape = tile.problem, tile.shape
        rows = (shape[0], 1)
        block = program * shape[0] + lax.broadcasted_iota(jnp.int32, rows, 0)
        lane = begin + lax.broadcasted_iota(jnp.int32, shape, 1)
        exists = block < problem.outer * problem.blocks
        if problem.size % problem.block:
            row, within = divmod_int32(block, problem.blocks)
            column = within * problem.block
            valid = exists & (lane < jnp.minimum(problem.block, problem.size - column))
        else:  # rows follow each other without a gap
            row, column = jnp.zeros_like(block), block * problem.block
            valid = exists & (lane < problem.block)
        return cls(row * problem.size + column + lane, valid, block, exists, row, exists, column, begin)

    @classmethod
    def _along_middle(cls, tile: _ScaledGpuTile, program: Array, begin: Any) -> _ScaledTileIndices:
        problem, shape = tile.problem, tile.shape
        along, across = tile.tiles
        lead, tile_across = divmod_int32(program, across)
        outer, block = divmod_int32(lead, along)
        first = tile_across * shape[1]
        lane = first + lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
        inside = begin + lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
        along_block = block * problem.block + inside
        row = outer * problem.size + along_block
        rows = (inside < problem.block) & (along_block < problem.size)
        columns = lane < problem.inner
        scale = (outer * problem.blocks + block) * problem.inner + lane
        return cls(row * problem.inner + lane, rows & columns, scale, columns, row, rows, first, 0)

    def units(self, tile: _ScaledGpuTile, shape: tuple[int, ...], count: int) -> tuple[Array, Array]:
        """The place of the words or bytes of groups of codes: the flat index of the first, and their number.

        Args:
            tile: the tile.
            shape: the shape of the groups.
            count: the number of words or bytes of a group.
        """
        problem, size = tile.problem, tile.codes_dtype.itemsize
        first = lax.div(jnp.int32(self.begin), np.int32(tile.codes_per_store)) * count
        group = first + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) * count
        begin = divmod_int32(self.column, tile.codes_per_store)[0] * count
        row = tile.row_bytes // size
        remaining = row - begin - group
        if problem.last:
            of_block = problem.block * problem.bits // (8 * size) - group
            remaining = of_block if problem.size % problem.block == 0 else jnp.minimum(of_block, remaining)
        return self.row * row + begin + group, remaining
