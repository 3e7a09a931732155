"""The product with a matrix of codes and group scales, for NVIDIA GPUs (Triton).

A program computes one tile of the product, over all of k or a stretch of it, in a loop: it loads a few rows of codes,
decodes them in registers and multiplies. Each part of W has its own sums, which are interleaved in registers at the
end. Loads and stores are masked, those of one row only if a tile reaches beyond the arrays.

For one row of x there is no work for the matrix units: numbers are multiplied one by one. A step takes many groups at
once, so that many loads are in flight together, and each thread keeps its own sums of a few rows of W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jchop._core.matmul.dequantize_matmul import decode_parts, multiply_code_values
from jchop._kernels.pallas import call_on_gpu, divmod_int32, load_tile
from jchop._kernels.products.dequantize_matmul import DequantizeMatmulGpuTiling, DequantizeMatmulProblem
from jchop.formats import ElementFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn

_PartSums = tuple[Array, ...]


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
        codes: (k, ceil(n * bits / 8)) uint8.
        scales: (ceil(k / group), n), float32 or bfloat16.
        format: the format of the codes, of 2, 4 or 8 bits.
        group: rows of W that share a scale.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    problem = DequantizeMatmulProblem.of(x, codes, format, group)
    m, n = problem.m, scales.shape[1]
    if not m * n * problem.k:
        return jnp.zeros((m, n), x.dtype)
    tiling = tiling or DequantizeMatmulGpuTiling.for_shape(problem)
    asm = None if interpret else ptx_of_format(format)
    tile = (_OneRowGpuTile if tiling.block_m == 1 else _DequantizeMatmulGpuTile)(problem, tiling, format, n, asm)
    (y,) = call_on_gpu(
        tile.kernel,
        (pl.cdiv(m, tiling.block_m), pl.cdiv(problem.width, tiling.block_n), tile.stretches),
        [x, codes, scales],
        [((tile.stretches, m, n), x.dtype if tile.stretches == 1 else jnp.float32)],
        name="dequantize_matmul",
        tiling=tiling,
        interpret=interpret,
    )
    return y[0] if tile.stretches == 1 else jnp.sum(y, 0).astype(x.dtype)


@dataclass(frozen=True)
class _DequantizeMatmulGpuTile:
    """The kernel of one tile, and its static data.

    Each group is cut into spans of equal length (one span, unless more are needed to divide the work). The spans of all
    groups are distributed to the stretches, in order.
    """

    problem: DequantizeMatmulProblem
    tiling: DequantizeMatmulGpuTiling
    format: ElementFormat
    n: int
    asm: Sequence[str] | None = None

    @property
    def span(self) -> int:
        """Rows of a span."""
        spans = -(-self.tiling.splits // self.problem.groups)
        pieces = -(-self.problem.group // self.tiling.block_k)
        return min(-(-pieces // spans) * self.tiling.block_k, self.problem.group)

    @property
    def spans_of_group(self) -> int:
        return -(-self.problem.group // self.span)

    @property
    def spans(self) -> int:
        return self.problem.groups * self.spans_of_group

    @property
    def spans_of_stretch(self) -> int:
        return -(-self.spans // self.tiling.splits)

    @property
    def stretches(self) -> int:
        """The number of stretches of k: `splits`, minus the stretches that would be empty."""
        return -(-self.spans // self.spans_of_stretch)

    def kernel(self, x: Any, codes: Any, scales: Any, out: Any) -> None:
        rows = pl.program_id(0) * self.tiling.block_m + lax.iota(jnp.int32, self.tiling.block_m)
        columns = self._columns(1)
        zeros = (jnp.zeros((self.tiling.block_m, self.tiling.block_n), jnp.float32),) * self.problem.parts

        def step(start: Array, stop: Array, sums: _PartSums) -> _PartSums:
            """The sums plus the products of `block_k` rows of W from `start` on; rows from `stop` on are excluded."""
            ks = start + lax.iota(jnp.int32, self.tiling.block_k)
            xs = load_tile(x, rows, ks, self.problem.m, stop)
            values = decode_parts(load_tile(codes, ks, columns, stop, self.problem.width), self.format, xs.dtype)
            return tuple(c + multiply_code_values(xs, part) for c, part in zip(sums, values, strict=True))

        def add_span(i: Array, total: _PartSums) -> _PartSums:
            group, start, stop = self._span(i)
            steps = -(-self.span // self.tiling.block_k)
            if steps == 1:
                sums = step(start, stop, zeros)
            else:
                deep = np.int32(self.tiling.block_k)
                sums = lax.fori_loop(
                    np.int32(0), np.int32(steps), lambda t, sums: step(start + t * deep, stop, sums), zeros
                )
            parts = range(self.problem.parts)
            return tuple(total[p] + sums[p] * self._scale(scales, group, columns, p) for p in parts)

        total = _interleave_parts(lax.fori_loop(*self._stretch(), add_span, zeros))
        columns = self._columns(self.problem.parts)
        mask = (rows < self.problem.m)[:, None] & (columns < self.n)[None, :]
        plt.store(out.at[pl.program_id(2), rows[:, None], columns[None, :]], total.astype(out.dtype), mask=mask)

    def _columns(self, parts: int) -> Array:
        """The columns of the tile, in each of some parts of W or in all together."""
        width = self.tiling.block_n * parts
        return pl.program_id(1) * width + lax.iota(jnp.int32, width)

    def _stretch(self) -> tuple[Array, Array]:
        """The first span of the program's stretch, and the end."""
        first = pl.program_id(2) * self.spans_of_stretch
        return first, jnp.minimum(first + self.spans_of_stretch, self.spans)

    def _span(self, i: Array) -> tuple[Array, Array, Array]:
        """Group, first row and end of span number `i`."""
        group, piece = divmod_int32(i, self.spans_of_group)
        begin = group * np.int32(self.problem.group)
        start = begin + piece * np.int32(self.span)
        stop = jnp.minimum(start + np.int32(self.span), begin + np.int32(self.problem.group))
        return group, start, jnp.minimum(stop, np.int32(self.problem.k))

    def _scale(self, scales: Any, group: Array, columns: Array, part: int) -> Array:
        """The scales of one group for one part of W, (1, block_n)."""
        columns = columns * np.int32(self.problem.parts) + np.int32(part)
        return plt.load(scales.at[group, columns], mask=columns < self.n, other=0).astype(jnp.float32)[None, :]


class _OneRowGpuTile(_DequantizeMatmulGpuTile):
    """The kernel for one row of x: a step has several spans, and each has lanes that take its rows in turn."""

    #: Codes that a thread loads at once, in bytes.
    _WORD = 16

    @property
    def span(self) -> int:
        return min(self.tiling.block_k, self.problem.group)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Spans at once, lanes of a span, and bytes of a row."""
        padded_span = 1 << (self.span - 1).bit_length()
        lanes = max(32 * self._WORD * self.tiling.num_warps // self.tiling.block_n, 1)
        spans = min(max(self.tiling.block_k // padded_span, 1), lanes, 1 << (self.spans_of_stretch - 1).bit_length())
        return spans, min(lanes // spans, padded_span), self.tiling.block_n

    @property
    def is_whole(self) -> bool:
        """Whether no tile has elements beyond an end; then no mask takes registers and instructions."""
        spans_at_once, _, width = self.shape
        spans = self.spans_of_stretch
        whole = self.problem.width % width == 0 and self.spans % spans == 0 and spans % spans_at_once == 0
        return whole and self.span & (self.span - 1) == 0 and self.problem.k == self.spans * self.span

    def kernel(self, x: Any, codes: Any, scales: Any, out: Any) -> None:
        spans_at_once, lanes, _ = self.shape
        row, columns, wide = pl.program_id(0), self._columns(1), self._columns(self.problem.parts)
        first, last = self._stretch()

        def step(number: Any, total: Array) -> Array:
            spans = first + number * np.int32(spans_at_once) + lax.iota(jnp.int32, spans_at_once)
            group, start, stop = self._span(spans)
            stop = jnp.where(spans < last, stop, np.int32(0))
            lane = start[:, None] + lax.iota(jnp.int32, lanes)[None, :]
            ks = [lane + np.int32(offset) for offset in range(0, self.span, lanes)]
            masks = [None if self.is_whole else k < stop[:, None] for k in ks]
            inside = (columns < self.problem.width)[None, None, :]
            packed_codes = [
                _load_with_mask(
                    codes.at[k[:, :, None], columns[None, None, :]], None if m is None else m[:, :, None] & inside
                )
                for k, m in zip(ks, masks, strict=True)
            ]
            xs = [_load_with_mask(x.at[row, k], m) for k, m in zip(ks, masks, strict=True)]
            sums = (jnp.zeros(self.shape, jnp.float32),) * self.problem.parts
            for numbers, code_bytes in zip(xs, packed_codes, strict=True):
                sums = self._multiply_one_by_one(numbers.astype(jnp.float32)[:, :, None], code_bytes, sums)
            mask = (spans < last)[:, None] & (wide < self.n)[None, :]
            scale = plt.load(scales.at[group[:, None], wide[None, :]], mask=mask, other=0).astype(jnp.float32)
            return total + _interleave_parts(tuple(jnp.sum(c, 1) for c in sums)) * scale

        total = jnp.zeros((spans_at_once, self.tiling.block_n * self.problem.parts), jnp.float32)
        steps = -(-self.spans_of_stretch // spans_at_once)
        total = step(np.int32(0), total) if steps == 1 else lax.fori_loop(np.int32(0), np.int32(steps), step, total)
        plt.store(out.at[pl.program_id(2), row, wide], jnp.sum(total, 0).astype(out.dtype), mask=wide < self.n)

    def _multiply_one_by_one(self, xs: Array, packed_codes: Array, sums: _PartSums) -> _PartSums:
        """The sums plus each number of a column times the values of the codes in its row."""
        if self.asm is None:
            values = decode_parts(packed_codes, self.format, xs.dtype)
            return tuple(c + xs * part for c, part in zip(sums, values, strict=True))
        xs = jnp.broadcast_to(xs, packed_codes.shape)
        part = ShapeDtypeStruct(packed_codes.shape, jnp.float32)
        options: Any = {"constraints": PTX_CONSTRAINTS, "pack": 4, "result_shape_dtypes": [part]}
        return tuple(
            plt.elementwise_inline_asm(asm, args=[packed_codes, xs, c], **options)[0]
            for asm, c in zip(self.asm, sums, strict=True)
        )


def _load_with_mask(ref: Any, mask: Array | None) -> Array:
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0)


def _interleave_parts(parts: _PartSums) -> Array:
    """One tile with the columns of the parts in turn; only pairs can be joined in registers."""
    if len(parts) == 1:
        return parts[0]
    even, odd = _interleave_parts(parts[::2]), _interleave_parts(parts[1::2])
    return jnp.stack([even, odd], -1).reshape(even.shape[0], 2 * even.shape[1])


# == PTX of the product of one row, in half of the instructions that Triton makes ======================================
# An instance takes four bytes of codes ($4), four numbers ($5 to $8) and four sums ($9 to $12), and gives four sums.


#: Of LLVM: four float32 results, written before all arguments are read, and the arguments.
PTX_CONSTRAINTS = "=&f,=&f,=&f,=&f,r,f,f,f,f,f,f,f,f"

_PTX_BODY = "{{\n.reg .b32 c, d, s;\n.reg .f32 v, m;\n.reg .pred p;\n{lines}\n}}"
_PTX_FMA = "fma.rn.f32 ${0}, v, ${1}, ${2};"


def ptx_of_format(format: ElementFormat) -> tuple[str, ...] | None:
    """The PTX for each code in a byte; None for a format without one.

    An integer u is the last bits of 2^23 + u, or the bits before them of 2^23 + 2^8 u; one multiply-add gives its
    value. The magnitude of a code of e2m1 or e4m3 is the last bits of the exponent, and the first of the fraction, of
    a number that is smaller by a power of two.
    """
    if isinstance(format, IntegerFormat) and format.bits in (4, 8) and not format.narrow:
        make = _ptx_int4 if format.bits == 4 else _ptx_int8
        return tuple(make(part, format.signed) for part in range(8 // format.bits))
    if format == float8_e4m3fn:
        return (_ptx_e4m3(),)
    return tuple(map(_ptx_e2m1, range(2))) if format == float4_e2m1fn else None


def _ptx_instance(before: str, values: list[str]) -> str:
    """Lines before, and those that give each value in v."""
    lines = [before, *(f"{value} {_PTX_FMA.format(i, 5 + i, 9 + i)}" for i, value in enumerate(values))]
    return _PTX_BODY.format(lines="\n".join(filter(None, lines)))


#: The table of `lop3` for (a & b) | c. As two operations they stay two: an instruction has one constant.
_LOP3_AND_OR = 0xEA


def _ptx_int4(part: int, signed: bool) -> str:
    """Codes are left where they are, up to the bits before 2^20; those beyond are moved by 12 bits, all at once."""
    before = f"xor.b32 c, $4, {0x88888888 if signed else 0:#x}; shr.b32 d, c, 12;"
    values = []
    for i in range(4):
        bit = 8 * i + 4 * part
        word, bit = ("c", bit) if bit <= 16 else ("d", bit - 12)
        less = _ptx_float(-(2.0 ** (23 - bit)) - (8 if signed else 0))
        step = f"fma.rn.f32 v, v, {_ptx_float(2.0**-bit)}, {less};" if bit else f"add.f32 v, v, {less};"
        values.append(f"lop3.b32 s, {word}, {0xF << bit:#x}, 0x4B000000, {_LOP3_AND_OR:#x}; mov.b32 v, s; {step}")
    return _ptx_instance(before, values)


def _ptx_int8(part: int, signed: bool) -> str:
    del part
    before = f"xor.b32 c, $4, {0x80808080 if signed else 0:#x};"
    less = _ptx_float(-(2**23) - (128 if signed else 0))
    values = [f"prmt.b32 s, c, 0x4B000000, {0x7440 + i:#x}; mov.b32 v, s; add.f32 v, v, {less};" for i in range(4)]
    return _ptx_instance(before, values)


def _ptx_e2m1(part: int) -> str:
    values = []
    for i in range(4):
        shift = 28 - 8 * i - 4 * part
        # The sign is repeated over the bits to its right, which a mask then clears.
        values.append(
            f"shl.b32 s, $4, {shift}; shr.s32 s, s, 6; and.b32 s, s, 0x81C00000; mov.b32 v, s; "
            f"mul.f32 v, v, {_ptx_float(2.0**126)};"
        )
    return _ptx_instance("", values)


def _ptx_e4m3() -> str:
    values = [
        f"prmt.b32 s, $4, 0, {(i << 12) | 0x444:#x}; shr.s32 s, s, 4; and.b32 s, s, 0x87F00000; mov.b32 v, s; "
        f"mul.f32 v, v, {_ptx_float(2.0**120)}; abs.f32 m, v; setp.gt.f32 p, m, {_ptx_float(448)}; "
        f"selp.f32 v, {_ptx_float(np.nan)}, v, p;"
        for i in range(4)
    ]
    return _ptx_instance("", values)


def _ptx_float(number: float) -> str:
    """A float32 constant of PTX."""
    return f"0f{np.float32(number).view(np.uint32):08X}"
