"""Products of codes beside products of matrices: convolutions, rows by experts, and packed weights."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT32, varying_like
from jchop._core.matmul.dequantize_matmul import is_exact_in
from jchop._core.rounding.codes import decode_elements
from jchop._core.xla.cpu import dot_with_one_float_row, loop_slice
from jchop._core.xla.gpu import dot_precision
from jchop._core.xla.sizes import if_static
from jchop._kernels.primitive import by_platform
from jchop._kernels.products.dequantize_matmul import dequantize_matmul
from jchop._quantized.products.codes import (
    LARGEST_SUM_WIDTH,
    CodedArray,
    MatrixSums,
    exact_block_sum,
    group_scales,
    multiply_codes,
    scale_sums,
    scaled_sum_dtype,
)
from jchop._round.arguments import JCHOP_SCOPE, mark_results
from jchop._storage._axis_groupings import OWN_SCALE, axis_groupings
from jchop._storage._codes import decode_unscaled, load_codes, repeat_over_groups, unpack_entries
from jchop.formats import CodebookFormat, FloatFormat, UniformFormat

# -- convolutions ------------------------------------------------------------------------------------------------------
#
# Convolutions of codes, forward and backward.
#
# An image is (n, *space, channels), a kernel (*places, groups, rows, channels of a group). A sum runs over the places
# of the kernel in their order, then over the channels of a group. If scales change along it, the windows of the image
# are rows of a matrix, and the product is one of matrices. So it is for GPUs, whose units have no convolution of
# int8 with int32 sums, and for kernels of more than 1,024 places. Else it is one convolution, by channels: on CPUs of
# float32 numbers, of so many channels at a time that a sum of integers is exact.
#
# A place outside of the image counts nothing: where an image has zero points, that is the code of its zero point.


@dataclass(frozen=True)
class ConvGeometry:
    """Where the places of a kernel fall on an image.

    Args:
        strides: of windows, along each axis of space.
        padding: places before and after the image.
        image_gaps: the distance of neighbouring places of the image.
        kernel_gaps: of the kernel.
        flips_kernel: whether the last place of the kernel falls on the first of a window.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    image_gaps: tuple[int, ...]
    kernel_gaps: tuple[int, ...]
    flips_kernel: bool = False

    def windows(self, space: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
        """How many windows an image has along each axis."""
        spans = [(n - 1) * gap + 1 for n, gap in zip(places, self.kernel_gaps, strict=True)]
        whole = zip(space, self.image_gaps, self.padding, strict=True)
        sizes = [max((n - 1) * gap + 1, 0) + low + high for n, gap, (low, high) in whole]
        every = zip(sizes, spans, self.strides, strict=True)
        return tuple(max((size - span) // step + 1, 0) for size, span, step in every)

    def backward(self, space: Sequence[int], places: Sequence[int]) -> ConvGeometry:
        """The geometry of the derivative by the image: the gradient as an image under the mirrored kernel."""
        padding = []
        for n, size, k, step, (low, _), gap, kernel_gap in zip(
            space, self.windows(space, places), places, self.strides, self.padding, self.image_gaps, self.kernel_gaps,
            strict=True,
        ):  # fmt: skip
            span, whole, windows = (k - 1) * kernel_gap + 1, (n - 1) * gap + 1, (size - 1) * step + 1
            before = span - low - 1
            padding.append((before, whole + span - 1 - windows - before))
        return ConvGeometry(self.image_gaps, tuple(padding), self.strides, self.kernel_gaps, not self.flips_kernel)

    @property
    def extends(self) -> bool:
        """Whether windows may have places outside of the image."""
        return any(max(pair) > 0 for pair in self.padding) or set(self.image_gaps) != {1}

    def extend(self, image: Array, fill: Array | None) -> Array:
        """An image (n, *space, channels) with the places outside of it: numbers that broadcast to it, or zeros."""
        sides = [(low, high, gap - 1) for (low, high), gap in zip(self.padding, self.image_gaps, strict=True)]
        sides = [(0, 0, 0), *sides, (0, 0, 0)]
        wide = lax.pad(image, jnp.zeros((), image.dtype), sides)
        if fill is None:
            return wide
        inside = lax.pad(jnp.ones((1, *image.shape[1:-1], 1), bool), False, sides)
        return jnp.where(inside, wide, fill.astype(image.dtype))

    def patches(self, image: Array, places: Sequence[int]) -> Array:
        """The windows of an image, (n, *windows, places, channels)."""
        counts, image, rank = self.windows(image.shape[1:-1], places), self.extend(image, None), len(places)
        for i, (count, k) in enumerate(zip(counts, places, strict=True)):
            offsets = self.kernel_gaps[i] * np.arange(k)[:: -1 if self.flips_kernel else 1]
            index = self.strides[i] * np.arange(count)[:, None] + offsets
            image = jnp.take(image, index, axis=1 + 2 * i, mode="clip")
        order = (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)
        return image.transpose(order).reshape(image.shape[0], *counts, math.prod(places), image.shape[-1])


class _ConvSums(MatrixSums):
    """The sums of a convolution of (n, *space, groups, channels) and (*places, groups, rows, channels)."""

    def __init__(self, geometry: ConvGeometry, places: tuple[int, ...]) -> None:
        self.geometry, self.places, self.width = geometry, places, math.prod(places)

    def shape(self, a: Array, b: Array) -> tuple[int, ...]:
        """The shape of the result, (n, *windows, groups, rows)."""
        return (a.shape[0], *self.geometry.windows(a.shape[1:-2], self.places), *b.shape[-3:-1])

    def dot(self, a: Array, b: Array, dtype: Any) -> Array:
        """One convolution; of two types, which `lax` has none of, one product of matrices."""
        if a.dtype != b.dtype:
            return self._as_matrices(a, b, dtype)
        geometry, rank = self.geometry, len(self.places)
        image = a.reshape(*a.shape[:-2], -1)
        kernel = b.reshape(*self.places, -1, b.shape[-1])
        kernel = lax.rev(kernel, range(rank)) if geometry.flips_kernel else kernel
        space = tuple(range(1, rank + 1))
        numbers = lax.ConvDimensionNumbers((0, rank + 1, *space), (rank, rank + 1, *range(rank)), (0, rank + 1, *space))
        y = lax.conv_general_dilated(
            image, kernel, geometry.strides, geometry.padding, geometry.image_gaps, geometry.kernel_gaps, numbers,
            feature_group_count=a.shape[-2], precision=dot_precision(a.dtype), preferred_element_type=dtype,
        )  # fmt: skip
        return y.reshape(self.shape(a, b))

    def left(self, rows: Array) -> Array:
        """One number for each image, as (n, 1, ..., 1), which broadcasts to the result."""
        return rows.reshape(rows.shape[0], -1)[:, 0].reshape(-1, *(1,) * (len(self.places) + 2))

    def right(self, rows: Array) -> Array:
        """A number for each row of the kernel, the same at all places, as (groups, rows)."""
        return rows.reshape(-1, *rows.shape[-2:])[0]

    def left_sum(self, a: Array) -> Array:
        """The sum of each window of the image, int32, as a convolution with ones."""
        return self.integers(a, jnp.ones((*self.places, a.shape[-2], 1, a.shape[-1]), a.dtype))

    def right_sum(self, b: Array) -> Array:
        """The sum of each row of the kernel, int32, (groups, rows): every window of an extended image has all of it."""
        return jnp.sum(b, (*range(len(self.places)), b.ndim - 1), jnp.int32)

    def integers_on_cpu(self, a: Array, b: Array) -> Array:
        """The exact sums of int8, in float32, panel by panel: XLA has no fast convolution of integers."""
        return self.panels(lambda a, b: self.wide(a, b, jnp.float32).astype(jnp.int32), a, b)

    def run(self, on_cpu: Callable[..., Array], native: Callable[..., Array], a: Array, b: Array) -> Array:
        """The sums on each platform; GPUs take a product of matrices."""
        return by_platform(partial(native, self._as_matrices), a, b, cpu=on_cpu, tpu=partial(native, self.dot))

    def _as_matrices(self, a: Array, b: Array, dtype: Any) -> Array:
        left = self.geometry.patches(a.reshape(*a.shape[:-2], -1), self.places)
        y = MatrixSums().on_gpu(patch_rows(left, a.shape[-2]), _kernel_rows(b), dtype)
        return y.swapaxes(0, 1).reshape(self.shape(a, b))


def patch_rows(patches: Array, groups: int) -> Array:
    """(n, *windows, places, channels) as the matrices (groups, n windows, places channels)."""
    *front, places, channels = patches.shape
    apart = patches.reshape(math.prod(front), places, groups, channels // groups)
    return apart.transpose(2, 0, 1, 3).reshape(groups, math.prod(front), -1)


def _kernel_rows(kernel: Array) -> Array:
    """(*places, groups, rows, channels) as the matrices (groups, rows, places channels)."""
    *places, groups, rows, channels = kernel.shape
    apart = kernel.reshape(math.prod(places), groups, rows, channels)
    return apart.transpose(1, 2, 0, 3).reshape(groups, rows, -1)


def convolve_codes(image: CodedArray, kernel: CodedArray, geometry: ConvGeometry, dtype: Any) -> Array:
    """A convolution, the image first.

    Args:
        image: (n, *space, groups, channels); its blocks lie along the channels, or it has one scale for each n.
        kernel: (*places, groups, rows, channels); its blocks lie along places and channels together, or it has one
            scale for each group and row.
        geometry: of the windows.
        dtype: of the result.

    Returns:
        (n, *windows, groups, rows).

    Raises:
        ValueError: for blocks that lie otherwise.
    """
    places = kernel.elements.shape[:-3]
    groups, _, channels = kernel.elements.shape[-3:]
    sums = _ConvSums(geometry, places)
    if not image.elements.size or not kernel.elements.size:
        return jnp.zeros(sums.shape(image.elements, kernel.elements), dtype)
    # All that a scale of a kernel may be of.
    sum_length = sums.width * channels * (groups if geometry.flips_kernel else 1)
    image, kernel = _limit_block(image, math.prod(image.elements.shape[1:])), _limit_block(kernel, sum_length)
    if image.block is not None and channels % image.block:
        raise _block_misfit(image.block, f"{channels} channels of an image")
    if kernel.block is not None and geometry.flips_kernel and groups > 1 and channels % kernel.block:
        raise _block_misfit(kernel.block, f"{channels} channels of a kernel")
    if image.zero is not None and image.block is None and geometry.extends:
        image_shape = image.elements.shape
        rows = sums.left(image.zero[..., 0])[..., 0]
        elements = geometry.extend(image.elements.reshape(*image_shape[:-2], -1), rows)
        shape = (*elements.shape[:-1], *image_shape[-2:])
        over = jnp.broadcast_to(rows[..., None], shape)
        scale = None if image.scale is None else jnp.broadcast_to(sums.left(image.scale[..., 0]), shape)
        image = CodedArray(elements.reshape(shape), scale, over)
        rank = len(places)
        geometry = replace(geometry, padding=((0, 0),) * rank, image_gaps=(1,) * rank)
        sums = _ConvSums(geometry, places)
    if image.block is None and kernel.block is None and sums.width <= LARGEST_SUM_WIDTH:
        return multiply_codes(image, kernel, dtype, sums)
    out = sums.shape(image.elements, kernel.elements)
    y = multiply_codes(_windows_as_rows(image, sums), kernel.map_arrays(_kernel_rows), dtype)
    return y.swapaxes(0, 1).reshape(out)


def _limit_block(v: CodedArray, size: int) -> CodedArray:
    """Codes whose blocks are not longer than `size`, which is all that has one scale."""
    return replace(v, block=None) if v.scale is None or v.block is None or v.block >= size else v


def _windows_as_rows(image: CodedArray, sums: _ConvSums) -> CodedArray:
    """The windows of an image as rows of matrices."""
    groups = image.elements.shape[-2]

    def rows(v: Array) -> Array:
        return patch_rows(sums.geometry.patches(v.reshape(*v.shape[:-2], -1), sums.places), groups)

    if image.block is not None:
        return image.map_arrays(rows)
    elements = rows(image.elements)
    windows = elements.shape[1] // image.elements.shape[0]

    def per_window(v: Array) -> Array:
        """One number for each image, over its windows."""
        return jnp.broadcast_to(jnp.repeat(v.reshape(v.shape[0], -1)[:, 0], windows)[:, None], elements.shape)

    return image.with_elements(elements, per_window)


def correlate_codes(
    gradient: CodedArray, image: CodedArray, geometry: ConvGeometry, places: Sequence[int], groups: int, dtype: Any
) -> Array:
    """The derivative of a convolution with respect to the kernel, the gradient first, place by place of the kernel.

    Args:
        gradient: (rows, n, *windows), with blocks along the sum over all but the first axis.
        image: (channels, n, *space), with one scale for each channel, if windows are not the places of the image.
        geometry: of the windows.
        places: of the kernel.
        groups: of channels and rows.
        dtype: of the result.

    Returns:
        (*places, groups, rows of a group, channels of a group).

    Raises:
        ValueError: for blocks of the image that lie otherwise.
    """
    if not gradient.elements.size or not image.elements.size:
        sizes = (v.elements.shape[0] // groups for v in (gradient, image))
        return jnp.zeros((*places, groups, *sizes), dtype)
    count = math.prod(gradient.elements.shape[1:])
    windows, space = gradient.elements.shape[2:], image.elements.shape[2:]
    same = math.prod(places) == 1 and windows == space and geometry.strides == (1,) * len(space)
    same = same and not geometry.extends and not any(min(pair) for pair in geometry.padding)
    gradient, image = _limit_block(gradient, count), _limit_block(image, math.prod(image.elements.shape[1:]))
    if image.block is not None and not same:
        raise _block_misfit(image.block, "the images and places that dw sums over", field="weight_gradient")

    def split_groups(v: Array) -> Array:
        return v.reshape(groups, v.shape[0] // groups, -1)

    left = gradient.map_arrays(split_groups)
    if same:
        y = multiply_codes(left, image.map_arrays(split_groups), dtype)
        return y.reshape(*places, *y.shape)
    fill = None if image.zero is None else _channel_numbers(image.zero).reshape(-1)
    wide = jnp.moveaxis(geometry.extend(jnp.moveaxis(image.elements, 0, -1), fill), -1, 0)
    gaps = geometry.kernel_gaps
    spans = [(n - 1) * step + 1 for n, step in zip(windows, geometry.strides, strict=True)]

    def at_place(place: Array) -> Array:
        starts = [0, 0, *(place[i] * gap for i, gap in enumerate(gaps))]
        part = lax.dynamic_slice(wide, starts, (*wide.shape[:2], *spans))
        part = lax.slice(part, (0,) * part.ndim, part.shape, (1, 1, *geometry.strides))
        own = image.with_elements(part, lambda v: jnp.broadcast_to(_channel_numbers(v), part.shape))
        return multiply_codes(left, own.map_arrays(split_groups), dtype)

    index = np.stack(np.unravel_index(np.arange(math.prod(places)), tuple(places)), -1).astype(np.int32)
    y = lax.map(at_place, jnp.asarray(index))
    return y.reshape(*places, *y.shape[1:])


def _channel_numbers(v: Array) -> Array:
    """The number of each channel, (channels, 1, ...)."""
    return v.reshape(v.shape[0], -1)[:, 0].reshape(-1, *(1,) * (v.ndim - 1))


def _block_misfit(block: int, of: str, field: str = "") -> ValueError:
    more = f", or {field}= without groups" if field else ""
    return ValueError(
        f"product='codes': scales of {block} numbers are no blocks along {of}; name a group that divides them, or "
        f"group=all{more}"
    )


# -- experts -----------------------------------------------------------------------------------------------------------


class ExpertSums(MatrixSums):
    """The sums of rows (m, k) with the matrices (experts, n, k) that they belong to, (m, n).

    Rows beyond the last expert's have zeros.

    Args:
        sizes: how many rows each expert has, in order.
        rows: how many rows there are.
        experts: how many experts.
    """

    def __init__(self, sizes: Array, rows: int, experts: int) -> None:
        self.sizes, self.experts = sizes, experts
        owner = _expert_of_rows(sizes, rows)
        self.inside, self.owner = owner < experts, jnp.minimum(owner, max(experts - 1, 0))

    def shape(self, a: Array, b: Array) -> tuple[int, ...]:
        """The shape of the result."""
        return a.shape[0], b.shape[1]

    def dot(self, a: Array, b: Array, dtype: Any) -> Array:
        """The sums of products of elements: by the units of a device that has this product."""
        # The kernel of TPUs takes no integers under a precision.
        precision = None if a.dtype.itemsize == 1 else lax.Precision.HIGHEST
        return lax.ragged_dot(a, b.swapaxes(1, 2), self.sizes, precision=precision, preferred_element_type=dtype)

    def wide(self, a: Array, b: Array, dtype: Any) -> Array:
        """The sums of products of elements as numbers of a wider dtype, which one matrix at a time is written in."""
        return self._sum_by_expert(lambda a, b: MatrixSums().wide(a, b, dtype), a, b)

    def integers_on_cpu(self, a: Array, b: Array) -> Array:
        """The exact sums of int8 on a CPU, one matrix after the other."""
        return self._sum_by_expert(MatrixSums().integers_on_cpu, a, b)

    def _sum_by_expert(self, product: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
        """Each row's product with the matrix of its expert: all experts in turn, of which each row takes one."""

        def product_of_expert(i: Array) -> Array:
            return product(a[None], lax.dynamic_index_in_dim(b, i, 0))[0]

        def add_expert(i: Array, total: Array) -> Array:
            return jnp.where(((self.owner == i) & self.inside)[:, None], product_of_expert(i), total)

        shape = jax.eval_shape(product_of_expert, jnp.int32(0))
        start = varying_like(jnp.zeros(shape.shape, shape.dtype), a, b, self.owner)
        return lax.fori_loop(0, self.experts, add_expert, start)

    def left(self, rows: Array) -> Array:
        """The values of rows as a column, with zero for rows of no expert."""
        return jnp.where(self.inside, rows, jnp.zeros((), rows.dtype))[:, None]

    def right(self, rows: Array) -> Array:
        """The values of each expert's columns, (experts, n), for each row: (rows, n), of its own expert."""
        return rows[self.owner]


def expert_weight_gradients(gradient: CodedArray, x: CodedArray, sizes: Array, experts: int, dtype: Any) -> Array:
    """The derivative of the product with respect to the matrices, the gradient first.

    Args:
        gradient: (n, m), with the sum along the rows m.
        x: (k, m).
        sizes: how many rows each expert has.
        experts: how many experts.
        dtype: of the result.

    Returns:
        (experts, k, n): for each expert the sum over its rows, in blocks that begin at the first row of all.
    """
    owner = _expert_of_rows(sizes, x.elements.shape[1])

    def gradient_of_expert(expert: Array) -> Array:
        is_own_row = owner == expert

        def own_rows(v: CodedArray) -> CodedArray:
            """Other rows have zeros, which is the code of a zero point where there is one."""
            none = jnp.zeros((), v.elements.dtype) if v.zero is None else v.zero.astype(v.elements.dtype)
            return v.with_elements(jnp.where(is_own_row, v.elements, none), lambda u: u).map_arrays(lambda u: u[None])

        return multiply_codes(own_rows(gradient), own_rows(x), dtype)[0].T

    return lax.map(gradient_of_expert, jnp.arange(experts))


def _expert_of_rows(sizes: Array, rows: int) -> Array:
    """The expert of each row; the number of experts for rows of none."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right").astype(jnp.int32)


# -- packed weights ----------------------------------------------------------------------------------------------------
#
# Products with packed weights, which are never unpacked whole: of floats, and of int8 with several scales or few
# bits.
#
# On a CPU panel by panel along the sum, each decoded where it is multiplied: a block, if scales of an operand change
# along the sum; else 512 integers or 128 floats, or 1,024 floats for more than 256 rows. Beside floats, blocks of at
# most 64 numbers share such a panel: each number is multiplied by its scale first, as if dequantized. On other
# devices floats are multiplied by the kernel of `dequantize_matmul` if it takes such codes; the rest is as other
# products of codes.


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

    of_one_row = if_static(lambda: rows == 1) and leading and not (integers or scales_numbers or zeros is not None)
    adds_in_eights = of_one_row and w.elements.dtype == jnp.int8

    def sums_of_panel(start: Any, size: int) -> list[Array]:
        if adds_in_eights and size % 16 == 0:
            halves = [(at, size // 2) for at in (start, start + size // 2)]
            operands = [(lax.dynamic_slice_in_dim(x_elements, *half, 1), panel(*half)) for half in halves]
            return scaled_sums(start, dot_with_one_float_row(*operands))
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
        return scaled_sums(start, sums if leading else [reduce(operator.add, sums)])

    def scaled_sums(start: Any, sums: list[Array]) -> list[Array]:
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

    The function gives these as floats, (size, n) or (n, size), in one array for each place in a byte. To put them side
    by side takes longer than to multiply them apart.
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
    """The product of x and a packed matrix, in the kernel that reads codes and scales of groups."""
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
