"""The product of few rows with a matrix of codes and group scales, for NVIDIA GPUs (Mosaic GPU).

A warpgroup takes some columns and a stretch of the sum. Each thread loads words of codes in some rows of W, many at a
time, decodes them in registers, and multiplies them one by one with each row of x. The last tile of columns ends with
the matrix; a part that two tiles share is written twice, equally.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._core.matmul.dequantize_matmul import decode_parts, join_columns
from jchop._kernels.pallas import divmod_int32
from jchop._kernels.products.dequantize_matmul import FLOAT8_FORMATS, DequantizeMatmulGpuTiling, DequantizeMatmulProblem
from jchop._kernels.products.matmul import int32_loop
from jchop._kernels.tiles import WARPS
from jchop._kernels.warpgroups import RegisterTile, call_on_warpgroups
from jchop.formats import ElementFormat
from jchop.formats._catalogue import float4_e2m1fn


def gpu_dequantize_matmul(
    x: Array,
    codes: Array,
    scales: Array,
    *,
    format: ElementFormat,
    group: int,
    tiling: DequantizeMatmulGpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `dequantize_matmul_body`, with the sums in another order.

    Args:
        x: (m, k), float32 or bfloat16.
        codes: (k, n * bits / 8) uint8.
        scales: (k / group, n), float32 or bfloat16.
        format: the format of the codes, of 2, 4 or 8 bits.
        group: rows of W that share a scale.
        tiling: the tiles. Default: the heuristic's.
        interpret: as for `call_on_warpgroups`.
    """
    problem = DequantizeMatmulProblem.of(x, codes, format, group)
    m, n = problem.m, scales.shape[1]
    if not m * n * problem.k:
        return jnp.zeros((m, n), x.dtype)
    tiling = tiling or DequantizeMatmulGpuTiling.for_shape(problem)
    assert tiling is not None
    tile = _FewRowsTile(problem, tiling, format, interpret is True)
    words, parts = problem.width // tiling.word, problem.parts
    (y,) = call_on_warpgroups(
        tile.kernel,
        tile.down * tile.across * tile.stretches,
        [x, codes.reshape(problem.k, words, tiling.word), scales.reshape(problem.groups, words, tiling.word * parts)],
        [((tile.stretches, parts, m, words, tiling.word), x.dtype if tile.stretches == 1 else jnp.float32)],
        name="dequantize_matmul",
        interpret=interpret,
    )
    y = y.reshape(tile.stretches, parts, m, problem.width)
    return join_columns(y[0] if tile.stretches == 1 else jnp.sum(y, 0), n).astype(x.dtype)


@dataclass(frozen=True)
class _FewRowsTile:
    """The kernel of one tile, and its static data. A span is a group, or a part of one; stretches have some spans."""

    problem: DequantizeMatmulProblem
    tiling: DequantizeMatmulGpuTiling
    format: ElementFormat
    interpret: bool

    @property
    def registers(self) -> RegisterTile:
        """Rows of W, words and bytes: one word for each thread."""
        tiling = self.tiling
        shape = tiling.deep, tiling.lanes, tiling.word
        return RegisterTile(shape, tiling.lanes // WARPS, self.interpret, across=True)

    @property
    def down(self) -> int:
        """The count of tiles along the rows."""
        return pl.cdiv(self.problem.m, self.tiling.rows)

    @property
    def across(self) -> int:
        """The count of tiles along the columns."""
        return pl.cdiv(self.problem.width, self.tiling.lanes * self.tiling.word)

    @property
    def spans(self) -> int:
        """The count of spans of the inner axis, each with one scale for a column."""
        return self.problem.k // self.tiling.span

    @property
    def spans_of_stretch(self) -> int:
        return pl.cdiv(self.spans, self.tiling.splits)

    @property
    def stretches(self) -> int:
        """The number of stretches: `splits`, minus the stretches that would be empty."""
        return pl.cdiv(self.spans, self.spans_of_stretch)

    def kernel(self, program: Array, x: Any, codes: Any, scales: Any, out: Any) -> None:
        """Sums a stretch of the inner axis for a few rows: codes are decoded, multiplied, and scaled group by group."""
        tiling, registers = self.tiling, self.registers
        lead, j = divmod_int32(program, self.across)
        stretch, i = divmod_int32(lead, self.down)
        row = jnp.minimum(i * np.int32(tiling.rows), np.int32(self.problem.m - tiling.rows))
        last = self.problem.width // tiling.word - tiling.lanes
        words = pl.ds(jnp.minimum(j * np.int32(tiling.lanes), np.int32(last)), tiling.lanes)
        zeros = ((registers.full(0.0),) * self.problem.parts,) * tiling.rows

        def step(k: Array, sums: Any) -> Any:
            """The sums after some loads of rows of W, from row `k` on."""
            places = [pl.ds(k + np.int32(load * tiling.deep), tiling.deep) for load in range(tiling.loads)]
            loaded = [registers.load(codes.at[place, words, :]) for place in places]
            for place, code_bytes in zip(places, loaded, strict=True):
                values = self._decode(code_bytes)
                new = []
                for r in range(tiling.rows):
                    xs = registers.load_along(x.at[row + np.int32(r), place], 0).astype(jnp.float32)
                    new.append(tuple(c + xs * value for c, value in zip(sums[r], values, strict=True)))
                sums = tuple(new)
            return sums

        def add_span(number: Array, total: Any) -> Any:
            begin, deep = number * np.int32(tiling.span), np.int32(tiling.loads * tiling.deep)
            steps = tiling.span // (tiling.loads * tiling.deep)
            sums = (
                int32_loop(0, steps, lambda t, sums: step(begin + t * deep, sums), zeros)
                if steps > 1
                else step(begin, zeros)
            )
            group = lax.div(begin, np.int32(self.problem.group))
            scale = registers.load_interleaved(scales.at[group, words, :], self.problem.parts)
            return tuple(
                tuple(c + d * s for c, d, s in zip(*each, scale, strict=True)) for each in zip(total, sums, strict=True)
            )

        first = stretch * np.int32(self.spans_of_stretch)
        end = jnp.minimum(first + np.int32(self.spans_of_stretch), np.int32(self.spans))
        total = int32_loop(first, end, add_span, zeros)
        for r, parts in enumerate(total):
            for part, sums in enumerate(parts):
                place = out.at[stretch, part, row + np.int32(r), words, :]
                registers.store(place, jnp.sum(sums, 0).astype(out.dtype))

    def _decode(self, code_bytes: Array) -> tuple[Array, ...]:
        """The values of bytes of codes, for each part of W, float32. Chips convert float8 to float16, and that."""
        if self.format in FLOAT8_FORMATS:
            numbers = lax.bitcast_convert_type(code_bytes, str(self.format.name))
            return (numbers.astype(jnp.float16).astype(jnp.float32),)
        if self.format == float4_e2m1fn:  # with the bits of float16 numbers, which are 2^14 times smaller
            words = code_bytes.astype(jnp.int32)
            bits = [(words << (12 - 4 * part)) & 0x8000 | (words << (9 - 4 * part)) & 0x0E00 for part in range(2)]
            halves = [lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16) for half in bits]
            return tuple(half.astype(jnp.float32) * 2.0**14 for half in halves)
        return decode_parts(code_bytes, self.format, np.dtype("float32"))
