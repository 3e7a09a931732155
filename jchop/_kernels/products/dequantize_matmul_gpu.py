"""The product of few rows with a matrix of codes and group scales, for NVIDIA GPUs (Mosaic GPU).

A warpgroup takes 128 bytes of each row of W and a stretch of the sum. Each thread loads words of codes in some rows of
W, all of a step before it decodes them. Two codes of a column, from two rows, become a pair of bfloat16 numbers in a
register. The matrix units multiply these pairs with rows of x; their left operand has a row for each column of W. The
units take rows of W, and likewise numbers of x, in the order of the threads that hold them. The last tile of columns
ends with the matrix; a part that two tiles share is written twice, equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from jchop._core.matmul.dequantize_matmul import is_exact_in
from jchop._core.rounding.codes import decode_elements
from jchop._kernels.pallas import divmod_int32
from jchop._kernels.products.dequantize_matmul import (
    DEQUANTIZE_BYTES,
    MOST_DEQUANTIZE_ROWS,
    DequantizeMatmulGpuTiling,
    DequantizeMatmulProblem,
)
from jchop._kernels.products.matmul import int32_loop
from jchop._kernels.tiles import next_multiple
from jchop._kernels.warpgroups import LaidTile, call_on_warpgroups, plgpu
from jchop.formats import ElementFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e5m2

#: Bytes of a word, words of a tile in a row of W, and threads that share a column.
_WORD, _TILE_WORDS, _DOWN = 4, DEQUANTIZE_BYTES // 4, 4
#: Floats that bfloat16 holds but for a factor: the place of their first bit, the binary exponent of the factor, and the
#: number that brings the first code of an infinity or a NaN to 2^7.
_SHORT_FLOATS: dict[Any, tuple[int, int, int]] = {
    float8_e4m3fn: (4, 120, 1),
    float8_e5m2: (5, 112, 4),
    float4_e2m1fn: (6, 126, 0),
}
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
        words = words.reshape(*steps, tiling.depth // _DOWN, -1)
        (y,) = call_on_warpgroups(
            tile.kernel,
            tile.down * tile.across * tile.stretches,
            [xs, words, scales.reshape(problem.groups, words.shape[4], tile.columns), tile.bias[None]],
            [((tile.stretches, len(rows) // tile.kept, words.shape[4], tile.columns, tile.kept), jnp.float32)],
            name="dequantize_matmul",
            interpret=interpret,
        )
        y = jnp.sum(y, 0).reshape(-1, n, tile.kept)
        y = jnp.moveaxis(y, 2, 1).reshape(-1, n)[: problem.m]
        y = y.reshape(len(terms), m, n)
        return jnp.where(jnp.isfinite(y[0]), jnp.sum(y, 0), y[0]).astype(x.dtype)  # an infinite code times 0 is a NaN


def _bfloat16_terms(x: Array) -> list[Array]:
    """Three arrays of bfloat16 numbers, whose sum is float32 numbers exactly unless it is too small for bfloat16."""
    out = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000)
        term = jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(bits, jnp.float32), x)
        out.append(term.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(x), x - term, 0)
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
        """A word of each thread, in a row of W."""
        return LaidTile((_DOWN, _TILE_WORDS), self.interpret, ((_DOWN, _TILE_WORDS), (_DOWN, 8), (1,)), -4, (-2, -3))

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
        place, parts = (
            pl.ds(jnp.minimum(j * np.int32(_TILE_WORDS), np.int32(last)), _TILE_WORDS),
            self.rows // self.kept,
        )
        zeros = (self.sums.full(0.0),) * parts

        def step(number: Array, total: tuple[Array, ...]) -> tuple[Array, ...]:
            """The sums after some spans."""
            spans, deep = range(tiling.loads), range(tiling.depth // _DOWN)
            if self.interpret:
                both = [words.at[number, span, :, :, place][...] for span in spans]
                loaded: Any = [[rows[:, first::2] for first in (0, 1)] for rows in both]
            else:
                loaded = [[self.words.load(words.at[number, span, :, row, place]) for row in deep] for span in spans]
            for span, span_words in enumerate(loaded):
                xs = []
                for part in range(parts):
                    row = (i * np.int32(parts) + np.int32(part)) * np.int32(self.kept)
                    rows = row if self.kept == 1 else pl.ds(row, self.kept)
                    xs.append(self.numbers.load(x.at[rows, number, span]))
                pairs = [self._pairs(*two, bias) for two in zip(span_words[::2], span_words[1::2], strict=True)]
                sums = self._multiply(zeros, pairs, xs)
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
            array = np.array([utils.vector_slice(v, slice(0, 1)) for v in total.registers.flat], dtype=object)
            own = total.layout.reduce((2,))
            array = array.reshape(own.registers_shape(total.shape[:2]))
            return mgpu.FragmentedArray(_registers=array, _layout=own, _is_signed=None)

        return first(total)

    def _pairs(self, a: Array, b: Array, bias: Array) -> list[list[tuple[Array, Any, Any]]]:
        """For each column of words in two rows the terms of its numbers.

        A term is a pair of bfloat16 numbers in the bits of a word, a factor or None, and another word. The term is the
        pair minus the other pair, or the pair times the factor, with the other bits.
        """
        bits, fmt = self.format.bits, self.format
        halves = [a & np.uint32(0xFFFF) | b << 16, a >> 16 | b & np.uint32(0xFFFF0000)]
        codes = [half >> shift if shift else half for half in halves for shift in range(0, 16, bits)]
        if (
            isinstance(fmt, IntegerFormat) and not fmt.narrow and (fmt.signed or bits < 8)
        ):  # the last bits of 2^7 + code
            if bits == 8:
                return [[(c & _twice(0x7F) | bias, None, c & _twice(0x80) | bias)] for c in codes]
            zero = _twice(0x4300 + (1 << (bits - 1)) * fmt.signed)
            return [[(c & _twice(low_mask(bits)) ^ bias, None, zero)] for c in codes]
        if fmt in _SHORT_FLOATS:  # the last bits of the exponent
            shift, exponent, special = _SHORT_FLOATS[fmt]
            out = []
            for c in codes:
                size = c & _twice(low_mask(bits - 1))
                pair = size << shift | c << (16 - bits) & _twice(0x8000)
                other = (size + _twice(special) & _twice(0x80)) * np.uint32(0xFF) if special else _twice(0)
                out.append([(pair, 2.0**exponent, other)])
            return out
        out = []
        for shift in range(0, 8 * _WORD, bits):
            numbers = [
                decode_elements((word >> shift & np.uint32(low_mask(bits))).astype(jnp.int32), fmt, FLOAT32, short=True)
                for word in (a, b)
            ]
            terms = []
            for _ in range(1 if is_exact_in(fmt, "bfloat16") else 3):
                heads = [lax.bitcast_convert_type(v, jnp.uint32) & np.uint32(0xFFFF0000) for v in numbers]
                terms.append((heads[0] >> 16 | heads[1], None, _twice(0)))
                numbers = [
                    v - lax.bitcast_convert_type(head, jnp.float32) for v, head in zip(numbers, heads, strict=True)
                ]
            out.append(terms)
        return out

    def _multiply(self, sums: tuple[Array, ...], pairs: Sequence[Any], xs: Sequence[Array]) -> tuple[Array, ...]:
        """The sums after a span.

        Args:
            sums: for each part of the rows of x.
            pairs: for each two rows of W of a thread, and each column, the terms.
            xs: the parts of x.
        """
        if self.interpret:
            values = jnp.stack([sum(map(_numbers_of_term, terms), jnp.float32(0)) for terms in pairs[0]])
            numbers = [_numbers(part).reshape(self.kept, _DOWN, -1, 2) for part in xs]
            new = [jnp.einsum("ctrwe,mtre->wcm", values, part, precision="highest") for part in numbers]
            return tuple(c + jnp.broadcast_to(d, c.shape) for c, d in zip(sums, new, strict=True))
        return self.multiply_by_units(sums, pairs, xs, self._multiply_pairs)

    @staticmethod
    def multiply_by_units(sums: Any, pairs: Sequence[Any], xs: Any, multiply: Callable[..., Any]) -> Any:
        """The sums after a span, of a function that multiplies four rows of W of each thread."""
        for place in range(0, len(pairs), 2):
            for term in range(len(pairs[0][0])):
                terms = [each[term] for two in zip(*pairs[place : place + 2], strict=True) for each in two]
                sums = multiply(sums, terms, xs, place)
        return sums

    @staticmethod
    def unit_products(values: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
        """For each product of the units the place of its two registers of sums, and its left registers, in order."""
        for column in range(0, len(values) // 2, 2):
            a, b, d, e = values[2 * column : 2 * column + 4]
            yield column, [a, d, b, e]

    def _multiply_pairs(
        self, sums: tuple[Array, ...], terms: Sequence[Any], xs: Sequence[Array], place: int
    ) -> tuple[Array, ...]:
        """The sums after four rows of W of each thread: for each column two terms, and pairs of x from `place` on."""
        words, part, total = self.words.layout, self.numbers.layout, self.sums.layout
        arrays = [v for term in terms for v in (term[0], term[2]) if isinstance(v, Array)]

        @plgpu.inline_mgpu(
            arg_types=((total,) * len(sums), (words,) * len(arrays), (part,) * len(xs)),
            return_type=tuple(plgpu.ShapeDtypeStruct(c.shape, c.dtype, total) for c in sums),
        )
        def multiply(_: Any, sums: Any, arrays: Any, xs: Any) -> Any:
            kind = ir.BF16Type.get()
            layouts, two = mgpu.MMALayouts(kind), ir.VectorType.get((2,), kind)
            word, given = ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), iter(arrays)

            def operand(registers: list[Any], shape: tuple[int, int], layout: Any) -> Any:
                array = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
                return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=None)

            def constant(number: float) -> Any:
                return arith.constant(two, ir.DenseElementsAttr.get_splat(two, ir.FloatAttr.get(kind, number)))

            def value(pair: Any, factor: float | None, other: Any) -> Any:
                pair = vector.bitcast(two, next(given).registers.item())
                bits = next(given).registers.item() if isinstance(other, Array) else None
                if factor is None:
                    return arith.subf(pair, constant(_number(other)) if bits is None else vector.bitcast(two, bits))
                product = arith.mulf(pair, constant(factor))
                if bits is None:
                    return product
                return vector.bitcast(two, arith.ori(vector.bitcast(word, product), bits))

            values, out = [value(*term) for term in terms], []
            for c, x in zip(sums, xs, strict=True):
                numbers = [v for register in x.registers.flat for v in _elements(register)][place : place + 2]
                right = operand([vector.bitcast(two, v) for v in numbers], (16, _UNIT_ROWS), layouts.rhs)
                registers = list(c.registers.flat)
                for column, left_registers in self.unit_products(values):
                    left = operand(left_registers, (64, 16), layouts.lhs)
                    acc = operand(registers[column : column + 2], (64, _UNIT_ROWS), layouts.acc)
                    registers[column : column + 2] = mgpu.mma(acc, left, right).registers.flat
                array = np.array(registers, dtype=object).reshape(c.registers.shape)
                out.append(mgpu.FragmentedArray(_registers=array, _layout=c.layout, _is_signed=None))
            return tuple(out)

        return tuple(multiply(tuple(sums), tuple(arrays), tuple(xs)))


def _twice(bits: Any) -> np.uint32:
    """Bits of 16 in both halves of a word."""
    return np.uint32(bits * 0x10001)


def _numbers_of_term(term: tuple[Array, Any, Any]) -> Array:
    """The numbers of a term, float32."""
    pair, factor, other = term
    if factor is None:
        return _numbers(pair) - (_numbers(other) if isinstance(other, Array) else _number(other))
    numbers = _numbers(pair)
    bits = lax.bitcast_convert_type(numbers, jnp.uint32)
    small = (bits & np.uint32(0x7FFFFF)).astype(jnp.float32) * jnp.float32(factor * 2.0**-149)  # never flushed to zero
    small = jnp.where(bits >> 31 == 1, -small, small)
    product = jnp.where(bits & np.uint32(0x7F800000) == 0, small, numbers * jnp.float32(factor))
    bits = lax.bitcast_convert_type(product, jnp.uint32)
    others = lax.bitcast_convert_type(_numbers(jnp.broadcast_to(other, pair.shape)), jnp.uint32)
    return lax.bitcast_convert_type(bits | others, jnp.float32)


def _number(pair: Any) -> float:
    """The number of a pair of two equal ones."""
    return float(np.uint32(pair & 0xFFFF0000).view(np.float32))


def _numbers(pairs: Array) -> Array:
    """The numbers of pairs of bfloat16 in words, float32, along a new last axis."""
    both = jnp.stack([pairs << 16, pairs & np.uint32(0xFFFF0000)], -1)
    return lax.bitcast_convert_type(both, jnp.float32)


def _elements(register: Any) -> list[Any]:
    """The words of a vector, each a vector of one."""
    (count,) = ir.VectorType(register.type).shape
    return [utils.vector_slice(register, slice(i, i + 1)) for i in range(count)]
