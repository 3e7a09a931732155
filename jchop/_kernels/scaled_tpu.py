"""Scaled blocks on TPU (Mosaic): one pass over memory that reduces, scales, rounds, encodes and packs.

The vector unit reduces along sublanes at the cost of an elementwise operation. Along parts of a row of lanes it must
move every element first. So blocks always run along sublanes. If the blocks are along the last axis of the array, a
tile is transposed on chip. This takes a fifth of the code of a reshape that splits lanes. Its scales are written
transposed, too, and XLA transposes them back: they are few.

Codes of fewer than eight bits are packed across lanes by a product with a matrix of zeros and ones on the matrix unit.
A byte is a sum of at most 8 distinct bits, and integers up to 256 are exact in bfloat16, so the product is exact. It
also transposes a transposed tile back, without extra cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._core.scaled.elements import ScaledPlan, widen_16_bit
from jchop._core.scaled.tiles import quantize_tile_by_powers, round_tile_by_powers
from jchop._kernels.pallas import SCALARS, TpuGrid, call_on_tpu
from jchop._kernels.scaled_tile import ScaledBlocksProblem, ScaledTpuTiling, draw_tile_words, tensor_scale_of_words

#: The indexes of a tile's first element in the array: outer, along the blocks' axis, and across.
_TileOrigin = tuple[Array, Array, Array]


def tpu_round_blocks(
    x: Array, words: Array, *, plan: ScaledPlan, tiling: ScaledTpuTiling | None = None, interpret: Any = False
) -> Array:
    """The result of `round_body`.

    Args:
        x: float32 or bfloat16, of at least one dimension.
        words: (1, 9) uint32: the tensor's scale, six seeds, and the index of the first element; zero if unused.
        plan: a plan of a format whose groups are blocks along one axis.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    tile = _ScaledTpuTile.of(x, plan, tiling)
    (result,) = tile.call(tile.round, x, words, [((tile.view, x.dtype), tile.x_spec)], [], interpret)
    return result.reshape(x.shape)


def tpu_quantize_blocks(
    x: Array, words: Array, *, plan: ScaledPlan, tiling: ScaledTpuTiling | None = None, interpret: Any = False
) -> tuple[Array, Array]:
    """The codes and scales of `quantize_body`; arguments as for `tpu_round_blocks`."""
    tile = _ScaledTpuTile.of(x, plan, tiling)
    problem, tiling = tile.problem, tile.tiling
    lead = () if problem.last else (problem.outer,)
    along, across = tile.length, tiling.lanes
    along, across = (tile.packed_length(along), across) if problem.last else (along, tile.packed_length(across))
    scales_view = (*lead, problem.blocks, tile.across)  # on chip: blocks and lanes
    outputs = [
        (((*tile.view[:-1], tile.packed_length(tile.view[-1])), jnp.uint8), tile.spec(along, across)),
        ((scales_view, tiling.scale_dtype(problem)), tile.spec(tiling.blocks, tiling.lanes, transposed=True)),
    ]
    scratch = [((tiling.blocks, tiling.lanes), jnp.int32)]
    codes, scales = tile.call(tile.quantize, x, words, outputs, scratch, interpret)
    scales = _scales_of_integers(_integers_of_scales(scales), problem.scale_dtype)
    if problem.last:
        scales = scales.T
    return codes.reshape(problem.packed_shape), scales.reshape(problem.scales_shape)


@dataclass(frozen=True)
class _ScaledTpuTile:
    """The kernels of one tile, and their static data."""

    problem: ScaledBlocksProblem
    tiling: ScaledTpuTiling

    @classmethod
    def of(cls, x: Array, plan: ScaledPlan, tiling: ScaledTpuTiling | None) -> _ScaledTpuTile:
        problem = ScaledBlocksProblem.of(x, plan)
        return cls(problem, tiling or ScaledTpuTiling.for_shape(problem))

    # -- arrays and their tiles ----------------------------------------------------------------------------------------
    @property
    def length(self) -> int:
        """Elements of a tile along the axis of the blocks."""
        return self.tiling.blocks * self.problem.block

    @property
    def across(self) -> int:
        """Length of the array along a tile's lanes."""
        return self.problem.outer if self.problem.last else self.problem.inner

    @property
    def view(self) -> tuple[int, ...]:
        """The shape of the array in the kernel."""
        problem = self.problem
        return (problem.outer, problem.size) if problem.last else (problem.outer, problem.size, problem.inner)

    def packed_length(self, count: int) -> int:
        """Bytes of some codes."""
        return -(-count * self.problem.bits // 8)

    @cached_property
    def grid(self) -> TpuGrid:
        outer = 1 if self.problem.last else self.problem.outer
        along, across = pl.cdiv(self.problem.size, self.length), pl.cdiv(self.across, self.tiling.lanes)
        return TpuGrid({"outer": outer, "along": along, "across": across})

    def spec(self, along: int, across: int, transposed: bool = False) -> pl.BlockSpec:
        """Tiles of an array with the memory layout of x, or `transposed`: with the blocks' axis before the lanes."""
        if not self.problem.last:
            return self.grid.blocks(("outer", "along", "across"), None, along, across)
        if transposed:
            return self.grid.blocks(("along", "across"), along, across)
        return self.grid.blocks(("across", "along"), across, along)

    @property
    def x_spec(self) -> pl.BlockSpec:
        return self.spec(self.length, self.tiling.lanes)

    def call(self, kernel: Any, x: Array, words: Array, outputs: list, scratch: list, interpret: Any) -> Any:
        inputs = [(words, SCALARS), (x.reshape(self.view), self.x_spec)]
        name = kernel.__name__ + "_blocks"
        return call_on_tpu(kernel, self.grid, inputs, outputs, name=name, scratch=scratch, interpret=interpret)

    # -- kernels -------------------------------------------------------------------------------------------------------
    def round(self, words: Any, x: Any, out: Any) -> None:
        """Rounds a tile strip by strip."""

        def round_strip(i: Array, origin: _TileOrigin) -> None:
            values, word, _ = self._load(words, x, i, origin)
            plan = self.problem.plan
            result = round_tile_by_powers(values, 1, plan, word, tensor_scale_of_words(words, plan))
            result = result.reshape(self.strip, self.tiling.lanes)
            out[self._place(i, self.strip)] = result.T if self.problem.last else result

        self._loop(round_strip)

    def quantize(self, words: Any, x: Any, codes: Any, scales: Any, scale_scratch: Any) -> None:
        """Stores the codes of a tile strip by strip, then its scales."""

        def quantize_strip(i: Array, origin: _TileOrigin) -> None:
            values, word, valid = self._load(words, x, i, origin)
            plan = self.problem.plan
            tensor = tensor_scale_of_words(words, plan)
            strip_codes, strip_scales = quantize_tile_by_powers(values, 1, plan, word, tensor)
            strip_codes = strip_codes.astype(jnp.int32).reshape(self.strip, self.tiling.lanes)
            if valid is not None:
                strip_codes = jnp.where(valid, strip_codes, 0)
            length = self.packed_length(self.strip) if self.problem.last else self.strip
            codes[self._place(i, length)] = self._pack(strip_codes).astype(jnp.uint8)
            strip_scales = _integers_of_scales(strip_scales)
            for k in range(self.step):  # a single row may be stored anywhere
                scale_scratch[pl.ds(i * self.step + k, 1), :] = strip_scales[k]

        self._loop(quantize_strip)
        scales[...] = _scales_of_integers(scale_scratch[...], scales.dtype)

    @cached_property
    def step(self) -> int:
        """Blocks of one iteration."""
        return self.tiling.step(self.problem)

    @property
    def strip(self) -> int:
        """Elements of one iteration along the blocks' axis."""
        return self.step * self.problem.block

    def _loop(self, body: Callable[[Array, _TileOrigin], None]) -> None:
        """Calls body(number, origin of the tile). In interpret mode the body of a loop may not ask for the origin."""
        origin = pl.program_id(0), pl.program_id(1) * self.length, pl.program_id(2) * self.tiling.lanes
        lax.fori_loop(0, self.tiling.blocks // self.step, lambda i, _: body(i, origin), None)

    def _place(self, i: Array, length: int) -> tuple[Any, Any]:
        """The part of a tile for iteration `i`, with a length along the blocks' axis."""
        part, whole = pl.ds(pl.multiple_of(i * length, length), length), slice(None)
        return (whole, part) if self.problem.last else (part, whole)

    def _load(self, words: Any, x: Any, i: Array, origin: _TileOrigin) -> tuple[Array, Array | None, Array | None]:
        """The blocks of an iteration (step, block, lanes), random words, and a mask of packed codes (None: all)."""
        problem, lanes = self.problem, self.tiling.lanes
        values = widen_16_bit(x[self._place(i, self.strip)], problem.plan.carrier)
        values = values.T if problem.last else values
        along = lax.broadcasted_iota(jnp.int32, values.shape, 0) + (origin[1] + i * self.strip)
        across = lax.broadcasted_iota(jnp.int32, values.shape, 1) + origin[2]
        valid = None
        if problem.size % self.length:  # elements beyond the array are undefined
            inside = along < problem.size
            values = jnp.where(inside, values, 0)
            valid = inside if problem.last else None
        if self.across % lanes and not problem.last:
            valid = across < problem.inner
        if problem.last:
            index = across * problem.size + along
        else:
            index = (origin[0] * problem.size + along) * problem.inner + across
        word = draw_tile_words(words, index.astype(jnp.uint32), problem.plan)
        shape = (self.step, problem.block, lanes)
        return values.reshape(shape), None if word is None else word.reshape(shape), valid

    # -- packing -------------------------------------------------------------------------------------------------------
    @cached_property
    def _axis(self) -> int:
        """The axis of a strip along which codes are packed."""
        return 0 if self.problem.last else 1

    def _pack(self, codes: Array) -> Array:
        """The bytes of a strip's codes, in the layout of memory."""
        bits = self.problem.bits
        if bits == 8:
            return codes.T if self.problem.last else codes
        start = (lax.broadcasted_iota(jnp.int32, codes.shape, self._axis) * bits) & 7
        byte_sums = self._gather((codes << start) & 0xFF, 0)
        if 8 % bits:  # a code may run over into the next byte
            byte_sums = byte_sums + self._gather(codes >> (8 - start), 1)
        return byte_sums.astype(jnp.int32)

    def _gather(self, parts: Array, later: int) -> Array:
        """The sum, for each byte, of the parts of codes that begin in it, or in the byte before."""
        count, bits = parts.shape[self._axis], self.problem.bits
        shape = (count, self.packed_length(count))
        begins = (lax.broadcasted_iota(jnp.int32, shape, 0) * bits) >> 3
        matrix = (begins + later == lax.broadcasted_iota(jnp.int32, shape, 1)).astype(jnp.float32)
        numbers = (((self._axis,), (0,)), ((), ()))
        return lax.dot_general(
            parts.astype(jnp.float32).astype(jnp.bfloat16),
            matrix.astype(jnp.bfloat16),
            numbers,
            preferred_element_type=jnp.float32,
        )


def _integers_of_scales(scales: Array) -> Array:
    """Stored scales as their bits in int32."""
    if jnp.issubdtype(scales.dtype, jnp.floating):
        scales = lax.bitcast_convert_type(scales, jnp.dtype(f"uint{8 * scales.dtype.itemsize}"))
    return scales.astype(jnp.int32)


def _scales_of_integers(bits: Array, dtype: jnp.dtype) -> Array:
    """The inverse of `_integers_of_scales`."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return bits.astype(dtype)
    if dtype.itemsize < 4:
        bits = bits.astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, dtype)
