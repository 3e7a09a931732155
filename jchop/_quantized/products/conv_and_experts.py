"""Convolutions of codes, and products of codes of rows with the matrices of experts: forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import varying_like
from jchop._core.xla.gpu import dot_precision
from jchop._kernels.primitive import by_platform
from jchop._quantized.products.codes import LARGEST_SUM_WIDTH, CodedArray, MatrixSums, multiply_codes

# -- convolutions ------------------------------------------------------------------------------------------------------
#
# Convolutions of codes, forward and backward.
#
# An image is (n, *space, channels), a kernel (*places, groups, rows, channels of a group). A sum runs over the places
# of the kernel in their order, then over the channels of a group. If scales change along it, the windows of the image
# are rows of a matrix, and the product is that of matrices. So it is for GPUs, whose units have no convolution of
# int8 with int32 sums, and for kernels of more than 1,024 places. Else it is one convolution, by channels: on CPUs of
# float32 numbers, of so many channels at a time that a sum of integers is exact.
#
# A place outside of the image counts nothing: where an image has zero points, that is the code of its zero point.


Array = jax.Array


@dataclass(frozen=True)
class ConvGeometry:
    """Where the places of a kernel fall on an image.

    Args:
        strides: of windows, along each axis of space.
        padding: places before and after the image.
        image_gaps: the distance of neighbouring places of the image.
        kernel_gaps: of the kernel.
        mirrored: whether the last place of the kernel falls on the first of a window.
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
        """That of the derivative with respect to the image: of the gradient as an image under the mirrored kernel."""
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
        """Of an image."""
        return rows.reshape(rows.shape[0], -1)[:, 0].reshape(-1, *(1,) * (len(self.places) + 2))

    def right(self, rows: Array) -> Array:
        """Of a row of the kernel."""
        return rows.reshape(-1, *rows.shape[-2:])[0]

    def left_sum(self, a: Array) -> Array:
        """Of a window: a product with ones."""
        return self.integers(a, jnp.ones((*self.places, a.shape[-2], 1, a.shape[-1]), a.dtype))

    def right_sum(self, b: Array) -> Array:
        """Of a row of the kernel, all of which lies in every window of an extended image."""
        return jnp.sum(b, (*range(len(self.places)), b.ndim - 1), jnp.int32)

    def integers_on_cpu(self, a: Array, b: Array) -> Array:
        """In float32, panel by panel: XLA has no fast convolution of integers."""
        return self.panels(lambda a, b: self.wide(a, b, jnp.float32).astype(jnp.int32), a, b)

    def run(self, on_cpu: Callable[..., Array], native: Callable[..., Array], a: Array, b: Array) -> Array:
        """On a GPU a product of matrices."""
        return by_platform(partial(native, self._as_matrices), a, b, cpu=on_cpu, tpu=partial(native, self.dot))

    def _as_matrices(self, a: Array, b: Array, dtype: Any) -> Array:
        left = self.geometry.patches(a.reshape(*a.shape[:-2], -1), self.places)
        y = MatrixSums().on_gpu(_patch_rows(left, a.shape[-2]), _kernel_rows(b), dtype)
        return y.swapaxes(0, 1).reshape(self.shape(a, b))


def _patch_rows(patches: Array, groups: int) -> Array:
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
        return _patch_rows(sums.geometry.patches(v.reshape(*v.shape[:-2], -1), sums.places), groups)

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
        """The sums of products of elements: by the units of a device that has such a product."""
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
        def product_of_expert(i: Array) -> Array:
            return product(a[None], lax.dynamic_index_in_dim(b, i, 0))[0]

        def add_expert(i: Array, total: Array) -> Array:
            return jnp.where(((self.owner == i) & self.inside)[:, None], product_of_expert(i), total)

        shape = jax.eval_shape(product_of_expert, jnp.int32(0))
        start = varying_like(jnp.zeros(shape.shape, shape.dtype), a, b, self.owner)
        return lax.fori_loop(0, self.experts, add_expert, start)

    def left(self, rows: Array) -> Array:
        """Of a row, and zero for those of no expert."""
        return jnp.where(self.inside, rows, jnp.zeros((), rows.dtype))[:, None]

    def right(self, rows: Array) -> Array:
        """Of a column of the expert that a row belongs to."""
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
