"""The product of few rows with a matrix of codes and group scales, for NVIDIA GPUs (Mosaic GPU).

A warpgroup takes 128 bytes of each row of W and a stretch of the sum. Each thread loads words of codes in some rows of
W, all of a step before it decodes them. Two codes of a column, from two rows, become a pair of bfloat16 numbers in a
register. The matrix units multiply these pairs with rows of x; their left operand has a row for each column of W. The
units take rows of W, and likewise numbers of x, in the order of the threads that hold them. The last tile of columns
ends with the matrix; a part that two tiles share is written twice, equally.
"""

from __future__ import annotations

import itertools
import math
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
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jchop._common.bit_ops import FLOAT32, low_mask
from jchop._core.rounding.codes import decode_elements
from jchop._kernels.pallas import divmod_int32
from jchop._kernels.primitive import compute_capability
from jchop._kernels.products.dequantize_matmul import (
    DEQUANTIZE_BYTES,
    MOST_DEQUANTIZE_ROWS,
    DequantizeMatmulGpuTiling,
    DequantizeMatmulProblem,
)
from jchop._kernels.products.matmul import int32_loop
from jchop._kernels.tiles import next_multiple
from jchop._kernels.warpgroups import LaidTile, call_on_warpgroups, fragmented_array, plgpu
from jchop.formats import ElementFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e5m2

llvm: Any = getattr(utils, "llvm")  # noqa: B009 - a dialect that JAX does not export
#: Bytes of a word, words of a tile in a row of W, and threads that share a column.
_WORD, _TILE_WORDS, _DOWN = 4, DEQUANTIZE_BYTES // 4, 4
#: Formats that chips convert to float16, from this compute capability on, and their names in PTX.
_FLOAT8_IN_PTX: dict[Any, str] = {float8_e4m3fn: "e4m3x2", float8_e5m2: "e5m2x2"}
_HAS_FLOAT8 = 8.9
#: Columns of the units' right operand: rows of x.
_UNIT_ROWS = 8


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
        x: (m, k), float32 or bfloat16. A row of float32 becomes three of bfloat16, whose sum it is.
        codes: (k, n * bits / 8) uint8.
        scales: (k / group, n), float32 or bfloat16.
        format: the format of the codes, of 2, 4 or 8 bits.
        group: rows of W that share a scale.
        tiling: the tiles. Default: the heuristic's.
        interpret: as for `call_on_warpgroups`.
    """
    (m, k), n = x.shape, scales.shape[1]
    if not m * n * k:
        return jnp.zeros((m, n), x.dtype)
    terms = [x] if x.dtype == jnp.bfloat16 else _bfloat16_terms(x)
    rows = jnp.concatenate(terms)
    problem = DequantizeMatmulProblem.of(rows, codes, format, group)
    tiling = tiling or DequantizeMatmulGpuTiling.for_shape(problem)
    assert tiling is not None
    tile = _FewRowsTile(problem, tiling, format, interpret is True)
    with jax.enable_x64(False):
        rows = jnp.pad(rows, ((0, tile.down * tile.rows - problem.m), (0, 0)))
        steps = k // (tiling.depth * tiling.loads), tiling.loads, _DOWN
        xs = lax.bitcast_convert_type(rows.reshape(len(rows), *steps, tiling.depth // (2 * _DOWN), 2), jnp.uint32)
        words = lax.bitcast_convert_type(codes.reshape(k, -1, _WORD), jnp.uint32)
        words = words.reshape(*steps, tiling.depth // (2 * _DOWN), 2, -1)
        (y,) = call_on_warpgroups(
            tile.kernel,
            tile.down * tile.across * tile.stretches,
            [xs, words, scales.reshape(problem.groups, words.shape[5], tile.columns), tile.bias[None]],
            [((tile.stretches, len(rows) // tile.kept, words.shape[5], tile.columns, tile.kept), jnp.float32)],
            name="dequantize_matmul",
            interpret=interpret,
        )
        y = jnp.sum(y, 0).reshape(-1, n, tile.kept)
        y = jnp.moveaxis(y, 2, 1).reshape(-1, n)[: problem.m]
        y = y.reshape(len(terms), m, n)
        return jnp.where(jnp.isfinite(y[0]), jnp.sum(y, 0), y[0]).astype(x.dtype)  # an infinite code times 0 is a NaN


def _bfloat16_terms(x: Array) -> list[Array]:
    """Three arrays of bfloat16 numbers, whose sum is float32 numbers exactly unless it is too small for bfloat16."""
    heads = _heads(jnp.where(jnp.isfinite(x), x, 0), 3)
    first, *others = (lax.bitcast_convert_type(head, jnp.float32).astype(jnp.bfloat16) for head in heads)
    return [jnp.where(jnp.isfinite(x), first, x.astype(jnp.bfloat16)), *others]


def _heads(x: Array, count: int) -> list[Array]:
    """Words with bits of bfloat16 numbers in the high half, whose sum is finite numbers."""
    out = []
    for _ in range(count):
        out.append(lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000))
        x = x - lax.bitcast_convert_type(out[-1], jnp.float32)
    return out


@dataclass(frozen=True)
class _FewRowsTile:
    """The kernel of one tile, and its static data. A span is a group, or a part of one; stretches have some steps."""

    problem: DequantizeMatmulProblem
    tiling: DequantizeMatmulGpuTiling
    format: ElementFormat
    interpret: bool

    @property
    def rows(self) -> int:
        """Rows of x: one, or what the units take."""
        return 1 if self.problem.m == 1 else min(next_multiple(self.problem.m, _UNIT_ROWS), MOST_DEQUANTIZE_ROWS)

    @property
    def kept(self) -> int:
        """Columns of the units' results that are written."""
        return min(self.rows, _UNIT_ROWS)

    @property
    def columns(self) -> int:
        """Of W in a word."""
        return _WORD * self.problem.parts

    @property
    def down(self) -> int:
        return pl.cdiv(self.problem.m, self.rows)

    @property
    def across(self) -> int:
        return pl.cdiv(self.problem.width, DEQUANTIZE_BYTES)

    @property
    def steps(self) -> int:
        return self.problem.k // (self.tiling.depth * self.tiling.loads)

    @property
    def steps_of_stretch(self) -> int:
        return pl.cdiv(self.steps, self.tiling.splits)

    @property
    def stretches(self) -> int:
        """The number of stretches: `splits`, minus the stretches that would be empty."""
        return pl.cdiv(self.steps, self.steps_of_stretch)

    @property
    def words(self) -> LaidTile:
        """A word of each thread in every second row of W in a span."""
        shape = _DOWN, self.tiling.depth // (2 * _DOWN), _TILE_WORDS
        return LaidTile(shape, self.interpret, ((_DOWN, 1, _TILE_WORDS), (_DOWN, 1, 8), (1,)), -5, (-2, -4))

    @property
    def numbers(self) -> LaidTile:
        """Pairs of numbers of x, for the rows of W that a thread has in a span."""
        pairs = self.tiling.depth // (2 * _DOWN)
        lanes, rows = ((-3, -2), (_UNIT_ROWS,)) if self.kept > 1 else ((_UNIT_ROWS, -2), ())
        tile = *rows, _DOWN, math.gcd(pairs, 4)
        return LaidTile((*rows, _DOWN, pairs), self.interpret, (tile,), None, lanes)

    @property
    def sums(self) -> LaidTile:
        """Of each word, column and row of x, as the units lay them."""
        tiles = (_TILE_WORDS, 1, _UNIT_ROWS), (_UNIT_ROWS, 1, _UNIT_ROWS), (_UNIT_ROWS, 1, 2)
        return LaidTile((_TILE_WORDS, self.columns, _UNIT_ROWS), self.interpret, tiles, -9, (-3, -4))

    @property
    def bias(self) -> Array:
        """Both numbers of a pair that integers of few bits are added to, 2^7 and the value of their sign bit.

        The kernel reads it: a logical operation of the chip has one constant, and this is the second one.
        """
        fmt = self.format
        sign = (1 << (fmt.bits - 1)) if isinstance(fmt, IntegerFormat) and fmt.signed and fmt.bits < 8 else 0
        return jnp.uint32(_twice(0x4300 | sign))

    def kernel(self, program: Array, x: Any, words: Any, scales: Any, bias: Any, out: Any) -> None:
        tiling, bias = self.tiling, bias[0]
        lead, j = divmod_int32(program, self.across)
        stretch, i = divmod_int32(lead, self.down)
        last = self.problem.width // _WORD - _TILE_WORDS
        place = pl.ds(jnp.minimum(j * np.int32(_TILE_WORDS), np.int32(last)), _TILE_WORDS)
        parts = self.rows // self.kept
        zeros = (self.sums.full(0.0),) * parts

        def step(number: Array, total: tuple[Array, ...]) -> tuple[Array, ...]:
            """The sums after some spans."""
            spans = range(tiling.loads)
            loaded = [[self.words.load(words.at[number, span, :, :, row, place]) for row in (0, 1)] for span in spans]
            for span, (a, b) in enumerate(loaded):
                xs = []
                for part in range(parts):
                    row = (i * np.int32(parts) + np.int32(part)) * np.int32(self.kept)
                    rows = row if self.kept == 1 else pl.ds(row, self.kept)
                    xs.append(self.numbers.load(x.at[rows, number, span]))
                sums = self._multiply(zeros, self._pairs(a, b, bias), xs)
                begin = (number * np.int32(tiling.loads) + np.int32(span)) * np.int32(tiling.depth)
                group = lax.div(begin, np.int32(self.problem.group))
                scale = self.sums.load_along(scales.at[group, place, :], 0, 1).astype(jnp.float32)
                total = tuple(t + c * scale for t, c in zip(total, sums, strict=True))
            return total

        first = stretch * np.int32(self.steps_of_stretch)
        end = jnp.minimum(first + np.int32(self.steps_of_stretch), np.int32(self.steps))
        for part, total in enumerate(int32_loop(first, end, step, zeros)):
            target = out.at[stretch, i * np.int32(parts) + np.int32(part), place]
            if self.kept == 1:
                self.sums.store(target.at[:, :, 0], self._first_row(total))
            else:
                self.sums.store(target, total)

    def _first_row(self, total: Array) -> Array:
        """The sums of one row of x, which all columns of the units' results have."""
        if self.interpret:
            return total[:, :, 0]
        layout = self.sums.layout.reduce((2,))

        @plgpu.inline_mgpu(
            arg_types=(self.sums.layout,), return_type=plgpu.ShapeDtypeStruct(total.shape[:2], total.dtype, layout)
        )
        def first(_: Any, total: Any) -> Any:
            registers = [utils.vector_slice(v, slice(0, 1)) for v in total.registers.flat]
            return fragmented_array(registers, total.layout.reduce((2,)), total.shape[:2])

        return first(total)

    def _pairs(self, a: Array, b: Array, bias: Array) -> list[list[Array]]:
        """For each column of words in two rows the terms of its numbers: pairs of bfloat16 numbers."""
        bits, fmt, select = self.format.bits, self.format, self.words.select_bytes
        if bits == 8 and fmt in _FLOAT8_IN_PTX and not self.interpret and (compute_capability() or 0) >= _HAS_FLOAT8:
            return [[self._convert(select(a, b, order), half)] for order in (0x5140, 0x7362) for half in "lh"]
        words = [select(a, b, 0x4400 + 0x1111 * i) for i in range(_WORD)]  # each byte of a row twice
        codes = [(word, shift) for word in words for shift in range(0, 8, bits)]
        if isinstance(fmt, IntegerFormat) and not fmt.narrow and (fmt.signed or bits < 8):
            if bits == 8:
                return [[self._fma(c & _twice(0x7F) | bias, 1, c & _twice(0x80) | bias)] for c in words]
            zero = _twice(0x4300 + (1 << (bits - 1)) * fmt.signed)  # of 2^7 + code, in the last bits
            return [[self._fma(c >> shift & _twice(low_mask(bits)) ^ bias, 1, zero)] for c, shift in codes]
        if fmt == float4_e2m1fn:  # one product moves the sign and the other bits, the last ones of the exponent
            return [
                [self._fma((c & _twice(0xF << shift)) * np.uint32(0x1040 >> shift) & _twice(0x81C0), 2.0**126, 0)]
                for c, shift in codes
            ]
        terms = self.problem.terms
        if bits == 4:
            return self._look_up(a, b, terms)
        out = []
        for shift in range(0, 8 * _WORD, bits):
            two = ((word >> shift & np.uint32(low_mask(bits))).astype(jnp.int32) for word in (a, b))
            heads = (_heads(decode_elements(codes, fmt, FLOAT32, short=True), terms) for codes in two)
            out.append([one >> 16 | other for one, other in zip(*heads, strict=True)])
        return out

    def _look_up(self, a: Array, b: Array, terms: int) -> list[list[Array]]:
        """`_pairs` of 16 values by tables of their bytes: a code selects a byte of eight, in two halves of a table."""
        numbers, tables, select = self.format.decode(np.arange(16)).astype(np.float32), [], self.words.select_bytes
        for _ in range(terms):
            heads = (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            tables.append(heads.view(np.uint8).reshape(16, 4)[:, 2:].T.copy().view("<u4").tolist())
            numbers = numbers - heads
        out: list[list[Array]] = [[] for _ in range(8)]
        for odd, first in itertools.product((0, 1), (0, 4)):  # codes of `a` and of `b` in turn
            codes = (a >> 4 if odd else a) & np.uint32(0x0F0F0F0F) | (b if odd else b << 4) & np.uint32(0xF0F0F0F0)
            codes = codes >> (4 * first)
            low, high = codes & np.uint32(0x77777777), codes >> 1 & np.uint32(0x44444444) | np.uint32(0x32103210)
            for table in tables:
                low_byte, high_byte = (select(select(v, w, low), select(x, y, low), high) for v, w, x, y in table)
                out[first + odd].append(select(low_byte, high_byte, 0x5140))
                out[first + odd + 2].append(select(low_byte, high_byte, 0x7362))
        return out

    def _fma(self, pair: Array, factor: float, other: Any) -> Array:
        """The pair times a power of two, minus another pair, all of bfloat16."""
        if not self.interpret:

            def fma(*words: Any) -> Any:
                pair, factor, other = (utils.bitcast(v, ir.VectorType.get((2,), ir.BF16Type.get())) for v in words)
                return utils.bitcast(arith.subf(arith.mulf(pair, factor), other), words[0].type)

            bits = int(np.float32(factor).view(np.uint32)) >> 16
            return self.words.on_registers(fma, pair, _twice(bits), other)
        numbers = _numbers(pair)
        bits = lax.bitcast_convert_type(numbers, jnp.uint32)
        small = (bits & np.uint32(0x7FFFFF)).astype(jnp.float32) * jnp.float32(factor * 2.0**-149)  # never flushed
        small = jnp.where(bits >> 31 == 1, -small, small)
        numbers = jnp.where(bits & np.uint32(0x7F800000) == 0, small, numbers * jnp.float32(factor))
        numbers = numbers - _numbers(jnp.uint32(other))
        bits = lax.bitcast_convert_type(numbers, jnp.uint32)
        return bits[..., 0] >> 16 | bits[..., 1]

    def _convert(self, codes: Array, half: str) -> Array:
        """Two float8 codes in half of a word as a pair, by way of float16, which chips convert them to."""
        ptx = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.{_FLOAT8_IN_PTX[self.format]} $0, {half};}}"

        def convert(codes: Any) -> Any:
            halves = llvm.inline_asm(codes.type, [codes], ptx, "=r,r")
            floats = [ir.VectorType.get((2,), kind.get()) for kind in (ir.F16Type, ir.F32Type, ir.BF16Type)]
            pair = arith.truncf(floats[2], arith.extf(floats[1], utils.bitcast(halves, floats[0])))
            return utils.bitcast(pair, codes.type)

        return self.words.on_registers(convert, codes)

    def _multiply(self, sums: tuple[Array, ...], pairs: Sequence[Any], xs: Sequence[Array]) -> tuple[Array, ...]:
        """The sums after a span.

        Args:
            sums: for each part of the rows of x.
            pairs: for each column the terms.
            xs: the parts of x.
        """
        if self.interpret:
            values = jnp.stack([sum(map(_numbers, terms), jnp.float32(0)) for terms in pairs])
            numbers = [_numbers(part).reshape(self.kept, _DOWN, -1, 2) for part in xs]
            new = [jnp.einsum("ctrwe,mtre->wcm", values, part, precision="highest") for part in numbers]
            return tuple(c + jnp.broadcast_to(d, c.shape) for c, d in zip(sums, new, strict=True))
        words, part, total = self.words.layout, self.numbers.layout, self.sums.layout
        arrays = tuple(itertools.chain(*pairs))

        @plgpu.inline_mgpu(
            arg_types=((total,) * len(sums), (words,) * len(arrays), (part,) * len(xs)),
            return_type=tuple(plgpu.ShapeDtypeStruct(c.shape, c.dtype, total) for c in sums),
        )
        def multiply(_: Any, sums: Any, arrays: Any, xs: Any) -> Any:
            kind = ir.BF16Type.get()
            layouts, two = mgpu.MMALayouts(kind), ir.VectorType.get((2,), kind)

            def operand(registers: Any, layout: Any, *shape: int) -> Any:
                return fragmented_array([vector.bitcast(two, v) for v in registers], layout, shape)

            def product(sums: list[Any], left: list[Any], right: list[Any]) -> Any:
                rows, columns = operand(left, layouts.lhs, 64, 16), operand(right, layouts.rhs, 16, _UNIT_ROWS)
                return mgpu.mma(fragmented_array(sums, layouts.acc, (64, _UNIT_ROWS)), rows, columns).registers.flat

            given = iter(arrays)
            values, out = [[list(next(given).registers.flat) for _ in terms] for terms in pairs], []
            for c, x in zip(sums, xs, strict=True):
                numbers = [v for register in x.registers.flat for v in _elements(register)]
                registers = multiply_registers(list(c.registers.flat), values, numbers, product)
                out.append(fragmented_array(registers, c.layout, c.shape))
            return tuple(out)

        return tuple(multiply(tuple(sums), arrays, tuple(xs)))


def multiply_registers(
    sums: list[Any], values: Sequence[Any], numbers: Sequence[Any], product: Callable[..., Any]
) -> list[Any]:
    """The sums of a thread after a span.

    Args:
        sums: a register for each column.
        values: for each column, for each term, a register for each two rows of W.
        numbers: registers of x for the same rows.
        product: of the units, from two registers of sums, four of W and two of x.
    """
    for place in range(0, len(numbers), 2):
        for column in range(0, len(values), 2):
            for one, two in zip(*values[column : column + 2], strict=True):
                left = [one[place], two[place], one[place + 1], two[place + 1]]
                sums[column : column + 2] = product(sums[column : column + 2], left, numbers[place : place + 2])
    return sums


def _twice(bits: Any) -> np.uint32:
    """Bits of 16 in both halves of a word."""
    return np.uint32(bits * 0x10001)


def _numbers(pairs: Array) -> Array:
    """The numbers of pairs of bfloat16 in words, float32, along a new last axis."""
    both = jnp.stack([pairs << 16, pairs & np.uint32(0xFFFF0000)], -1)
    return lax.bitcast_convert_type(both, jnp.float32)


def _elements(register: Any) -> list[Any]:
    """The words of a vector, each a vector of one."""
    (count,) = ir.VectorType(register.type).shape
    return [utils.vector_slice(register, slice(i, i + 1)) for i in range(count)]
