"""Scaled blocks on NVIDIA GPUs (Mosaic GPU): one pass that reduces, scales, rounds, encodes and packs.

A warpgroup takes some whole blocks. The last tile begins where it ends with the array, so no tile has elements outside;
elements of two tiles are written twice, equally. Codes are stored as bytes, because a chip may lack the dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._core.scaled import tiles
from jchop._core.scaled.elements import BlockScales, ScaledPlan, choose_scales, store_scales, widen_16_bit
from jchop._core.scaled.tiles import quantize_tile_by_powers, round_tile_by_powers
from jchop._core.scaled_bodies import decode_groups, plan_to_decode
from jchop._kernels.pallas import divmod_int32
from jchop._kernels.scaled_tile import ScaledBlocksProblem, ScaledGpuTiling, draw_tile_words, tensor_scale_of_words
from jchop._kernels.warpgroups import RegisterTile, call_on_warpgroups


def gpu_round_blocks(
    x: Array, words: Array, *, plan: ScaledPlan, tiling: ScaledGpuTiling | None = None, interpret: Any = False
) -> Array:
    """The result of `round_body`.

    Args:
        x: a carrier of at least one dimension, fewer than 2^31 elements.
        words: (1, 9) uint32: the tensor's scale, six seeds, and the index of the first element; zero if unused.
        plan: a plan of a format whose groups are blocks along one axis.
        tiling: the tiles. Default: the heuristic's.
        interpret: as for `call_on_warpgroups`.
    """
    tile = _ScaledGpuTile.of(x, plan, tiling, False, interpret)
    (result,) = tile.call(tile.round, x, words, [(tile.view, x.dtype)], interpret)
    return result.reshape(x.shape)


def gpu_quantize_blocks(
    x: Array, words: Array, *, plan: ScaledPlan, tiling: ScaledGpuTiling | None = None, interpret: Any = False
) -> tuple[Array, Array]:
    """The codes and scales of `quantize_body`; arguments as for `gpu_round_blocks`."""
    tile = _ScaledGpuTile.of(x, plan, tiling, True, interpret)
    problem, kind = tile.problem, _bits_dtype(tile.problem)
    outputs = [(tile.codes_shape, tile.codes_dtype), (tile.scales_shape, kind)]
    codes, scales = tile.call(tile.quantize, x, words, outputs, interpret)
    scales = lax.bitcast_convert_type(scales, problem.scale_dtype).reshape(problem.scales_shape)
    return lax.bitcast_convert_type(codes, jnp.uint8).reshape(problem.packed_shape), scales


def _bits_dtype(problem: ScaledBlocksProblem) -> Any:
    """The dtype of the bits of stored scales."""
    return jnp.dtype(f"uint{8 * problem.scale_dtype.itemsize}")


@dataclass(frozen=True)
class _ScaledGpuTile:
    """The kernels of one tile, and their static data."""

    problem: ScaledBlocksProblem
    tiling: ScaledGpuTiling
    registers: RegisterTile

    @classmethod
    def of(
        cls, x: Array, plan: ScaledPlan, tiling: ScaledGpuTiling | None, quantizes: bool, interpret: Any
    ) -> _ScaledGpuTile:
        problem = ScaledBlocksProblem.of(x, plan)
        tiling = tiling or ScaledGpuTiling.for_shape(problem, quantizes)
        assert tiling is not None
        registers = RegisterTile((tiling.rows, tiling.words, tiling.numbers), tiling.lanes, interpret is True)
        backend = replace(problem.plan.backend, maximum=registers.maximum)
        return cls(replace(problem, plan=replace(problem.plan, backend=backend)), tiling, registers)

    @property
    def view(self) -> tuple[int, int, int]:
        """The shape in which the kernel sees the array: rows, words and numbers."""
        problem, numbers = self.problem, self.tiling.numbers
        words = self.tiling.words if problem.last else problem.inner // numbers
        return math.prod(problem.shape) // (words * numbers), words, numbers

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a tile along its blocks."""
        if not self.problem.last:
            return (0,)
        return (0, 1, 2) if self.tiling.has_one_block(self.problem) else (1, 2)

    @property
    def across(self) -> int:
        """Tiles of a row."""
        return pl.cdiv(self.view[1], self.tiling.words)

    def call(self, kernel: Any, x: Array, words: Array, outputs: list, interpret: Any) -> Any:
        programs, name = pl.cdiv(self.view[0], self.tiling.rows) * self.across, kernel.__name__ + "_blocks"
        return call_on_warpgroups(
            kernel, programs, [words, x.reshape(self.view)], outputs, name=name, interpret=interpret
        )

    def _corner(self, program: Array) -> tuple[Array, Array]:
        """The first row and the first word of a tile."""
        row, word = divmod_int32(program, self.across)
        row, word = row * np.int32(self.tiling.rows), word * np.int32(self.tiling.words)
        last_row, last_word = self.view[0] - self.tiling.rows, self.view[1] - self.tiling.words
        return jnp.minimum(row, np.int32(last_row)), jnp.minimum(word, np.int32(last_word))

    def _load(self, words: Any, x: Any, corner: tuple[Array, Array]) -> tuple[Array, Array | None]:
        """The numbers of a tile, widened, and a random word for each if the elements draw."""
        plan, registers = self.problem.plan, self.registers
        values = widen_16_bit(registers.load(x.at[*self._place(corner), :]), plan.carrier)
        if not plan.element.rounding.stochastic:
            return values, None
        row, word, number = (registers.iota(axis) for axis in range(3))
        index = ((row + corner[0]) * np.int32(self.view[1]) + (word + corner[1])) * np.int32(self.view[2]) + number
        return values, draw_tile_words(words, index.astype(jnp.uint32), plan)

    def _place(self, corner: tuple[Array, Array]) -> tuple[Any, Any]:
        return pl.ds(corner[0], self.tiling.rows), pl.ds(corner[1], self.tiling.words)

    # -- kernels -------------------------------------------------------------------------------------------------------
    def round(self, program: Array, words: Any, x: Any, out: Any) -> None:
        """Rounds a tile; tiles of plain numbers take a short way."""
        corner, plan = self._corner(program), self.problem.plan
        values, word = self._load(words, x, corner)
        tensor = tensor_scale_of_words(words, plan)
        if not tiles.supports_plain_tiles(plan):
            result = round_tile_by_powers(values, self.axes, plan, word, tensor)
        else:
            result = decode_groups(*self._encode(values, tensor), plan_to_decode(plan, plan.backend))
        self.registers.store(out.at[*self._place(corner), :], result)

    def quantize(self, program: Array, words: Any, x: Any, codes: Any, scales: Any) -> None:
        """Stores the codes and scales of a tile; tiles of plain numbers take a short way."""
        corner, plan = self._corner(program), self.problem.plan
        values, word = self._load(words, x, corner)
        tensor = tensor_scale_of_words(words, plan)
        if not tiles.supports_plain_tiles(plan):
            tile_codes, tile_scales = quantize_tile_by_powers(values, self.axes, plan, word, tensor)
        else:
            tile_codes, block_scales = self._encode(values, tensor)
            tile_scales = store_scales(block_scales, plan)
        self._store_codes(codes, tile_codes, corner)
        self._store_scales(scales, tile_scales, corner)

    def _encode(self, values: Array, tensor: Array | None) -> tuple[Array, BlockScales]:
        """The codes and scales of a tile if `supports_plain_tiles`; a plain tile takes the short way."""
        plan = self.problem.plan
        quick_scales, largest, is_plain = tiles.plain_tile_scales(values, self.axes, plan, tensor)

        def general() -> tuple[Array, Array]:
            scales = choose_scales(values, self.axes, plan, tensor)
            return tiles.encode_tile(values, scales, plan), scales.value

        def short() -> tuple[Array, Array]:
            return tiles.encode_plain_tile(values, quick_scales, largest, plan), quick_scales.value

        codes, bits = lax.cond(is_plain, short, general)
        return codes, replace(quick_scales, value=bits)

    # -- results -------------------------------------------------------------------------------------------------------
    @property
    def word_bits(self) -> int:
        """The bits of the codes of a word, together."""
        return self.problem.bits * self.tiling.numbers

    @property
    def codes_dtype(self) -> Any:
        return jnp.dtype(f"uint{self.word_bits}" if self.word_bits in (8, 16, 32) else "uint8")

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Rows and words, and bytes of a word if there is no dtype for it."""
        parts = self.word_bits // 8 // self.codes_dtype.itemsize
        return (*self.view[:2], parts) if parts > 1 else self.view[:2]

    @property
    def scales_shape(self) -> tuple[int, ...]:
        blocks = self.problem.outer * self.problem.blocks
        return (blocks,) if self.problem.last else (blocks, *self.view[1:])

    def _store_codes(self, out: Any, codes: Array, corner: tuple[Array, Array]) -> None:
        """Stores the codes of a word together."""
        wide = codes.astype(jnp.int32)
        word = jnp.sum(wide << self.registers.iota(2) * np.int32(self.problem.bits), axis=2)
        if len(self.codes_shape) == 2:
            self.registers.store(out.at[*self._place(corner)], word.astype(self.codes_dtype))
            return
        for number in range(self.codes_shape[2]):
            part = (word >> (8 * number)) & 0xFF
            self.registers.store(out.at[*self._place(corner), number], part.astype(jnp.uint8))

    def _store_scales(self, out: Any, scales: Array, corner: tuple[Array, Array]) -> None:
        """Stores the scale of each block, which all its numbers have."""
        kind = _bits_dtype(self.problem)
        bits = lax.bitcast_convert_type(scales, kind).astype(jnp.int32)
        one = self.registers.maximum(bits, self.axes).astype(kind)
        block = lax.div(corner[0], np.int32(self.tiling.rows))
        if not self.problem.last:
            self.registers.store(out.at[block, pl.ds(corner[1], self.tiling.words), :], one)
        elif one.shape:
            self.registers.store(out.at[pl.ds(corner[0], self.tiling.rows)], one)
        else:
            self.registers.store(out.at[pl.ds(block, 1)], jnp.broadcast_to(one, (1,)))
