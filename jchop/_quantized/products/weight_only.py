"""Products with packed weights, which are never unpacked whole: of floats, and of int8 with several scales or few bits.

On a CPU panel by panel along the sum, each decoded where it is multiplied: a block, if scales of an operand change
along the sum; else 512 integers or 128 floats, or 1,024 floats for more than 256 rows. Beside floats, blocks of at most
64 numbers share such a panel: each number is multiplied by its scale first, as if dequantized. On other devices floats
are multiplied by the kernel of `dequantize_matmul` if it takes such codes; the rest is as other products of codes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import FLOAT32, varying_like
from jchop._core.matmul.dequantize_matmul import is_exact_in
from jchop._core.rounding.codes import decode_elements
from jchop._core.xla.cpu import loop_slice
from jchop._core.xla.sizes import if_static
from jchop._kernels.primitive import by_platform
from jchop._kernels.products.dequantize_matmul import dequantize_matmul
from jchop._quantized.products.codes import (
    CodedArray,
    exact_block_sum,
    group_scales,
    multiply_codes,
    scale_sums,
    scaled_sum_dtype,
)
from jchop._round.arguments import JCHOP_SCOPE, mark_results
from jchop.formats import CodebookFormat, FloatFormat, UniformFormat
from jchop.storage._axis_groupings import OWN_SCALE, axis_groupings
from jchop.storage._codes import decode_unscaled, load_codes, unpack_entries
from jchop.storage._decode import repeat_over_groups

Array = jax.Array

_FEW_ROWS, _SHORT_PANEL, _LONG_PANEL, _INTEGER_PANEL = 256, 128, 1024, 512
#: The fewest numbers of a sum of bytes in panels.
_TALL_SUM = 4096


def suits_panels(x: CodedArray, w: CodedArray, leading: bool) -> bool:
    """Whether this module multiplies rows (m, k) and weights (n, k): x are floats, or both are int8.

    Of int8, blocks of both have one length. Weights whose bytes are the elements, under one scale, need no panels but
    for quirk `tall_integers_read_in_columns`.
    """
    if x.is_plain:
        return not w.is_plain
    count, integers = x.elements.shape[1], x.elements.dtype == w.elements.dtype == jnp.int8
    blocks = {_scale_block(x), _scale_block(w)}
    if not integers or w.qarray is None or len(blocks - {count}) > 1:
        return False
    block = min(blocks)
    tall = leading and count >= _TALL_SUM and if_static(lambda: x.elements.shape[0] > 1, True)
    read = block == count and w.qarray.spec.element.bits == 8 and not tall
    return block * 2**16 < 2**31 and not read


def _scale_block(v: CodedArray) -> int:
    """How many numbers along the sum have one scale."""
    count = v.elements.shape[1]
    return count if v.block is None or v.scale is None else min(v.block, count)


def multiply_packed_weights(x: CodedArray, w: CodedArray, leading: bool, dtype: Any) -> Array:
    """The product of rows (m, k) and weights with k as their first axis or their last, as (m, n).

    Args:
        x: as `suits_panels` allows.
        w: in the layout (n, k); its `qarray`, if it has one, as (k, n) or (n, k).
        leading: whether k is the first axis of the weights.
        dtype: of the result.
    """

    def on_cpu(x: CodedArray, w: CodedArray) -> Array:
        with jax.named_scope(JCHOP_SCOPE):
            return mark_results(_multiply_by_panels(x, w, leading, dtype))

    def on_device(x: CodedArray, w: CodedArray) -> Array:
        if x.is_plain and leading and _fits_dequantize_kernel(x.elements, w, dtype):
            return _multiply_by_kernel(x.elements, w, dtype)
        left, right = (v.map_arrays(lambda u: u[None]) for v in (x, w))
        return multiply_codes(left, right, dtype)[0]

    return by_platform(on_device, x, w, cpu=on_cpu)


def _multiply_by_panels(x: CodedArray, w: CodedArray, leading: bool, dtype: Any) -> Array:
    """The scaled sums of the panels, added from the first to the last."""
    sum_dtype = scaled_sum_dtype(dtype)
    integers = x.elements.dtype == jnp.int8
    kind = jnp.int8 if integers else sum_dtype
    (rows, count), x_elements = x.elements.shape, x.elements.astype(kind)
    block = min(_scale_block(x), _scale_block(w))
    x_within, w_within = _scale_block(x) < count, _scale_block(w) < count  # whose scales change along the sum
    most = _INTEGER_PANEL if integers else _SHORT_PANEL if if_static(lambda: rows <= _FEW_ROWS) else _LONG_PANEL
    scales_numbers = w_within and not integers and 2 * block <= _SHORT_PANEL  # then a panel has several blocks
    size = most // block * block if scales_numbers else block
    size = min(size if block < count else most, count)
    per_byte, panel = _panel_reader(w, leading, kind)
    columns = per_byte if leading else 1  # of which each has numbers of its own

    def column_numbers(values: Array, start: Any, dtype: Any) -> list[Array]:
        """A number of each column in the block of a place, for each place in a byte."""
        row = lax.dynamic_index_in_dim(values, start // block, 0, keepdims=False).astype(dtype)
        return list(row.reshape(-1, columns).T) * (per_byte // columns)

    def panel_numbers(values: Array, start: Any, size: int) -> list[Array]:
        """A number of each of a panel, for each place in a byte."""
        blocks = lax.dynamic_slice_in_dim(values, start // block, -(-size // block), 0).astype(sum_dtype)
        if leading:
            places = jnp.moveaxis(blocks.reshape(len(blocks), -1, columns), 2, 0)
            return [jnp.repeat(place, min(block, size), 0)[:size] for place in places]
        return [jnp.repeat(blocks.T, min(block, size) // per_byte, 1)[:, : size // per_byte]] * per_byte

    def row_numbers(values: Array, start: Any) -> Array:
        return lax.dynamic_index_in_dim(values, start // block, 1)

    # One number of each block, before the loop, so that it does not carry a number for each element.
    scales, zeros = (None if v is None else v.T[::block] if leading else v[:, ::block].T for v in (w.scale, w.zero))
    x_scales, x_zeros = (None if v is None else v[:, ::block] for v in (x.scale, x.zero))

    def scaled(total: Array, scale: Array) -> Array:
        return scale_sums(total.astype(sum_dtype), scale)

    def product_of_panel(rows: Array, part: Array, zero: Array | None, x_zero: Array | None) -> Array:
        if not integers:
            dims = (((1,), (0 if leading else 1,)), ((), ()))
            highest = lax.Precision.HIGHEST
            return lax.dot_general(rows, part, dims, precision=highest, preferred_element_type=sum_dtype)
        left, right = (None if v is None else v.reshape(1, -1, 1) for v in (x_zero, zero))
        b = part.T if leading else part
        return exact_block_sum(CodedArray(rows[None], None, left), CodedArray(b[None], None, right), rows.shape[1])[0]

    def sums_of_panel(start: Any, size: int) -> list[Array]:
        parts = panel(start, size)
        own = [None] * per_byte if zeros is None or not integers else column_numbers(zeros, start, jnp.int32)
        if zeros is not None and not integers:
            parts = list(map(jnp.subtract, parts, panel_numbers(zeros, start, size)))
        if scales is not None and scales_numbers:
            parts = list(map(jnp.multiply, parts, panel_numbers(scales, start, size)))
        a = lax.dynamic_slice_in_dim(x_elements, start, size, 1)
        apart = [a] * per_byte if leading else list(jnp.moveaxis(a.reshape(-1, size // per_byte, per_byte), 2, 0))
        x_zero = None if x_zeros is None else row_numbers(x_zeros, start)
        sums = [product_of_panel(*operands, x_zero) for operands in zip(apart, parts, own, strict=True)]
        sums = sums if leading else [reduce(operator.add, sums)]
        if x_within and x_scales is not None:
            sums = [scaled(v, row_numbers(x_scales, start)) for v in sums]
        if not w_within or scales is None or scales_numbers:
            return sums
        return list(map(scaled, sums, column_numbers(scales, start, sum_dtype)))

    def add(total: list[Array], start: Any, size: int) -> list[Array]:
        return [a + b for a, b in zip(total, sums_of_panel(start, size), strict=True)]

    whole, rest = divmod(count, size)
    first = jnp.zeros((rows, w.elements.shape[0] // columns), jnp.int32 if integers and block == count else sum_dtype)
    first = varying_like(first, *jax.tree.leaves((x, w)))
    total = lax.fori_loop(0, whole, lambda i, total: add(total, i * size, size), [first] * columns)
    total = add(total, whole * size, rest) if rest else total
    if x_scales is not None and not x_within:
        total = [scaled(v, x_scales[:, :1]) for v in total]
    if not w_within and scales is not None:
        total = list(map(scaled, total, column_numbers(scales, 0, sum_dtype)))
    return jnp.stack(total, -1).reshape(rows, -1).astype(dtype)


def _panel_reader(w: CodedArray, leading: bool, dtype: Any) -> tuple[int, Callable[[Any, int], list[Array]]]:
    """How many elements share a byte, and a function of a place along the sum and a number of elements there.

    The function gives these as floats, (size, n) or (n, size): one array for each place in a byte, since to put them
    side by side takes longer than to multiply them apart.
    """
    axis, qarray, carrier = 0 if leading else 1, w.qarray, FLOAT32
    if qarray is None:
        elements = lax.optimization_barrier(w.elements.T if leading else w.elements)  # as they would lie if stored
        return 1, lambda start, size: [loop_slice(elements, start, size, axis).astype(dtype)]
    fmt, values = qarray.spec.element, qarray.qvalue
    bits = fmt.bits if fmt.bits < 8 else 8  # of an element, in the unit of `values`
    per_byte = 8 // bits if 8 % bits == 0 and qarray.shape[1] % (8 // bits) == 0 else 1

    def read(start: Any, size: int) -> list[Array]:
        along = 8 if leading else bits
        part = loop_slice(values, start * along // 8, -(-size * along // 8), axis)
        if per_byte == 1:
            size = qarray.shape[1] if leading else size
            numbers = [
                decode_elements(unpack_entries(load_codes(part, fmt), fmt, size), fmt, carrier, short=True)
                if fmt.bits <= 8
                else decode_unscaled(part, fmt, size, carrier)
            ]
        else:
            mask = jnp.uint8((1 << bits) - 1)
            numbers = [decode_elements((part >> (bits * i)) & mask, fmt, carrier, short=True) for i in range(per_byte)]
        return [(v + w.shift if w.shift else v).astype(dtype) for v in numbers]

    return per_byte, read


def _fits_dequantize_kernel(x: Array, w: CodedArray, dtype: Any) -> bool:
    """Whether the kernel takes such operands."""
    if w.qarray is None or w.scale is None or w.zero is not None or w.qarray.spec.scaled is None:
        return False
    fmt = w.qarray.spec.element
    has_kernel_format = isinstance(fmt, FloatFormat | UniformFormat | CodebookFormat) and fmt.bits in (2, 4, 8)
    has_kernel_dtype = jnp.promote_types(x.dtype, dtype).name in ("float32", "bfloat16")
    return has_kernel_format and has_kernel_dtype and is_exact_in(fmt, "float32")


def _multiply_by_kernel(x: Array, w: CodedArray, dtype: Any) -> Array:
    assert w.qarray is not None and w.qarray.spec.scaled is not None
    (count, columns), group_scale, own_scale = w.qarray.shape, group_scales(w.qarray), w.qarray.scale
    if not isinstance(own_scale, tuple) and own_scale.dtype == jnp.bfloat16 and own_scale.shape == group_scale.shape:
        group_scale = own_scale  # which a kernel widens after it has read them
    else:
        group_scale = group_scale.astype(jnp.float32)
    group = count if w.block is None else min(w.block, count)
    codes = lax.bitcast_convert_type(w.qarray.qvalue, jnp.uint8)
    # Not of `w.scale`: a TPU would write a scale for each element.
    along = (OWN_SCALE, axis_groupings(w.qarray.spec.scaled, 2)[1])
    scales = repeat_over_groups(group_scale, along, (group_scale.shape[0], columns))
    scales = jnp.broadcast_to(scales, (-(-count // group), columns))
    x = x.astype(jnp.promote_types(x.dtype, dtype))
    return dequantize_matmul(x, codes, scales, format=w.qarray.spec.element, group=group).astype(dtype)


def reads_panels(bits: int, shape: tuple[int, ...], leading: bool, block: int | None) -> bool:
    """Whether panels of a stored matrix of elements of `bits` can be read from its bytes."""
    whole = all(size * bits % 8 == 0 for size in (block or _SHORT_PANEL, shape[-1]))
    return len(shape) == 2 and (leading or bits >= 8 or whole)
