"""The two products of layers, and how each operand is laid out for a product and for its two backward products.

Each is y = x w, linear in both: dx = g w is summed over the axes of y that come from w, dw = x g over those that come
from x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._kernels.primitive import one_device_at_hand
from jchop._quantized.products.codes import (
    CodedArray,
    MatrixSums,
    block_along_sum,
    multiply_codes,
    to_batched_matrices,
    why_no_codes,
)
from jchop._quantized.products.conv import ConvGeometry, convolve_codes, correlate_codes
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.ragged_dot import ExpertSums, expert_weight_gradients
from jchop._quantized.products.weight_only import multiply_packed_weights, reads_panels, suits_panels
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.math import conv as emulated_conv
from jchop.math import matmul as emulated_matmul

Array = jax.Array
OperandShapes = tuple[tuple[int, ...], tuple[int, ...]]

__all__ = ["AnyProduct", "ConvProduct", "DotProduct", "OperandLayouts", "OperandSwap", "RaggedProduct"]


@dataclass(frozen=True)
class OperandLayouts:
    """The layouts of the two operands of one product."""

    left: OperandLayout
    right: OperandLayout


@dataclass(frozen=True)
class DotProduct:
    """`jax.lax.dot_general`, with everything static about it."""

    contracting: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ndims: tuple[int, int]
    precision: Any = None
    preferred_element_type: Any = None
    out_sharding: Any = None

    def __call__(self, x: Array, w: Array) -> Array:
        """The product, in the carrier."""
        more = {} if self.out_sharding is None else {"out_sharding": self.out_sharding}
        run = partial(
            lax.dot_general, precision=self.precision, preferred_element_type=self.preferred_element_type, **more
        )
        free, contracting = self.forward.left.free[len(self.batch[0]) :], self.contracting[0]
        if len(free) < 2 or (*free, *contracting) != tuple(range(x.ndim)) or more or not one_device_at_hand():
            return run(x, w, (self.contracting, self.batch))
        # The quirk `rows_of_two_axes_moved` (`_core/xla/cpu.py`): with one axis of rows dw is up to twice as fast. But
        # axes that are sharded should not be joined.
        rows = x.reshape(math.prod(x.shape[axis] for axis in free), *(x.shape[axis] for axis in contracting))
        y = run(rows, w, ((tuple(range(1, rows.ndim)), self.contracting[1]), self.batch))
        return y.reshape(*(x.shape[axis] for axis in free), *y.shape[1:])

    @cached_property
    def forward(self) -> OperandLayouts:
        """Of x and w."""
        layouts = []
        for ndim, batch, contracting in zip(self.ndims, self.batch, self.contracting, strict=True):
            free = (axis for axis in range(ndim) if axis not in (*batch, *contracting))
            layouts.append(OperandLayout((*batch, *free), contracting))
        return OperandLayouts(*layouts)

    @property
    def for_input(self) -> OperandLayouts:
        """Of g and w, for dx."""
        b, rows, columns = len(self.batch[1]), self.forward.left.free, self.forward.right.free
        result = tuple(range(len(rows) + len(columns) - b))
        return OperandLayouts(
            OperandLayout(result[: len(rows)], result[len(rows) :]),
            OperandLayout((*self.batch[1], *self.contracting[1]), columns[b:]),
        )

    @property
    def for_weight(self) -> OperandLayouts:
        """Of x and g, for dw."""
        b, rows, columns = len(self.batch[0]), self.forward.left.free, self.forward.right.free
        result = tuple(range(len(rows) + len(columns) - b))
        return OperandLayouts(
            OperandLayout((*self.batch[0], *self.contracting[0]), rows[b:]),
            OperandLayout((*result[:b], *result[len(rows) :]), result[b : len(rows)]),
        )

    def _matrices(self, operands: OperandLayouts, left: Array, right: Array) -> tuple[Array, Array]:
        """Both operands as (batch, rows, contracting)."""
        b = len(self.batch[0])
        arrays = operands.left.lay(left), operands.right.lay(right)
        x, y = (v.reshape(math.prod(v.shape[:b]), math.prod(v.shape[b:-1]), v.shape[-1]) for v in arrays)
        return x, y

    def emulate(self, x: Array, w: Array, spec: MatmulSpec, key: Array | None) -> Array:
        """The product, in an emulated arithmetic."""
        left, right = self._matrices(self.forward, x, w)
        rows, columns = self.forward.left.free, self.forward.right.free[len(self.batch[1]) :]
        shape = [x.shape[axis] for axis in rows] + [w.shape[axis] for axis in columns]
        return emulated_matmul(left, right.swapaxes(1, 2), spec, key).reshape(shape)

    def by_codes(self, x: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """The product of codes, each in its layout; `shapes` are those of x and w."""
        b, shape = len(self.batch[0]), (*x.elements.shape[:-1], *w.elements.shape[len(self.batch[0]) : -1])
        leading, last = self._sum_axes_at_ends()
        if not b and (leading or last) and math.prod(shape) * x.elements.shape[-1]:
            rows = replace(x.reshape(-1, x.elements.shape[-1]), block=x.block)
            qarray, columns = w.qarray, w.elements.size // w.elements.shape[-1]
            if qarray is not None and x.is_plain and qarray.ndim > 2:
                matrix = (-1, columns) if leading else (columns, -1)
                qarray = _as_matrix(qarray, *matrix)
            if qarray is not None and not reads_panels(qarray.spec.element.bits, qarray.shape, leading, w.block):
                qarray = None
            right = replace(w.reshape(-1, w.elements.shape[-1]), block=w.block, qarray=qarray, shift=w.shift)
            if suits_panels(rows, right, leading):
                return multiply_packed_weights(rows, right, leading, dtype).reshape(shape)
            sums = MatrixSums(apart=qarray is not None and leading and not last)
            return multiply_codes(to_batched_matrices(x, b), to_batched_matrices(w, b), dtype, sums).reshape(shape)
        return multiply_codes(to_batched_matrices(x, b), to_batched_matrices(w, b), dtype).reshape(shape)

    def _sum_axes_at_ends(self) -> tuple[bool, bool]:
        """Whether the weight is summed over its first axes, and over its last."""
        axes, ndim = self.contracting[1], self.ndims[1]
        return axes == tuple(range(len(axes))), axes == tuple(range(ndim - len(axes), ndim))

    def reads_stored(self, spec: Spec, shape: tuple[int, ...]) -> bool:
        """Whether a weight alone of a shape is multiplied from its bytes, without an array of its elements."""
        leading, last = self._sum_axes_at_ends()
        free = self.forward.right.free[len(self.batch[1]) :]
        bits, block = spec.element.bits, block_along_sum(spec, len(free) + 1)
        columns = math.prod(shape[axis] for axis in free)
        matrix = (math.prod(shape) // max(columns, 1), columns)
        reads = reads_panels(bits, matrix if leading else matrix[::-1], leading, block)
        return not self.batch[0] and (leading or last) and reads and not why_no_codes(spec)

    def input_by_codes(self, g: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """The product dx, of codes in their layouts."""
        b = len(self.batch[0])
        return self.forward.left.back(
            multiply_codes(to_batched_matrices(g, b), to_batched_matrices(w, b), dtype), shapes[0]
        )

    def weight_by_codes(self, x: CodedArray, g: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """The product dw, of codes in their layouts."""
        b = len(self.batch[0])
        return self.forward.right.back(
            multiply_codes(to_batched_matrices(g, b), to_batched_matrices(x, b), dtype), shapes[1]
        )

    @property
    def emulates_backward(self) -> bool:
        """Whether its backward products can be in an emulated arithmetic, too."""
        return True

    def emulate_input(self, g: Array, w: Array, shape: Sequence[int], spec: MatmulSpec, key: Array | None) -> Array:
        """The product dx of `shape`, in an emulated arithmetic."""
        left, right = self._matrices(self.for_input, g, w)
        return self.forward.left.back(emulated_matmul(left, right.swapaxes(1, 2), spec, key), shape)

    def emulate_weight(self, x: Array, g: Array, shape: Sequence[int], spec: MatmulSpec, key: Array | None) -> Array:
        """The product dw of `shape`, in an emulated arithmetic."""
        left, right = self._matrices(self.for_weight, x, g)
        return self.forward.right.back(emulated_matmul(right, left.swapaxes(1, 2), spec, key), shape)


@dataclass(frozen=True)
class ConvProduct:
    """`jax.lax.conv_general_dilated`, with everything static about it.

    A sum runs over the places of the kernel and the channels, so an image is laid out as (image, places and channels):
    groups lie along its channels if their size divides the number of channels.
    """

    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    numbers: lax.ConvDimensionNumbers
    feature_groups: int = 1
    precision: Any = None
    preferred_element_type: Any = None
    out_sharding: Any = None

    def __call__(self, x: Array, w: Array) -> Array:
        """The product, in the carrier."""
        more = {} if self.out_sharding is None else {"out_sharding": self.out_sharding}
        return lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.padding,
            lhs_dilation=self.input_dilation,
            rhs_dilation=self.kernel_dilation,
            dimension_numbers=self.numbers,
            feature_group_count=self.feature_groups,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            **more,
        )

    @property
    def forward(self) -> OperandLayouts:
        """Of x and w."""
        return OperandLayouts(
            _channels_last_layout(self.numbers.lhs_spec), _channels_last_layout(self.numbers.rhs_spec)
        )

    @property
    def for_input(self) -> OperandLayouts:
        """Of g and w, for dx."""
        out, inside, *space = self.numbers.rhs_spec
        return OperandLayouts(_channels_last_layout(self.numbers.out_spec), OperandLayout((inside,), (*space, out)))

    @property
    def for_weight(self) -> OperandLayouts:
        """Of x and g, for dw: summed over images and places."""
        return OperandLayouts(
            *(OperandLayout((s[1],), (s[0], *s[2:])) for s in (self.numbers.lhs_spec, self.numbers.out_spec))
        )

    def emulate(self, x: Array, w: Array, spec: MatmulSpec, key: Array | None) -> Array:
        """The product, in an emulated arithmetic."""
        if self.feature_groups != 1 or set(self.input_dilation) != {1}:
            raise NotImplementedError(
                f"matmul={str(spec)!r}: a convolution of feature_group_count={self.feature_groups} and input_dilation="
                f"{self.input_dilation} cannot be emulated; both must be 1"
            )
        image, kernel = x.transpose(self.numbers.lhs_spec), w.transpose(self.numbers.rhs_spec)
        pads = self._pads(image.shape[2:], kernel.shape[2:])
        out = emulated_conv(image, kernel, spec, key, stride=self.strides, padding=pads, dilation=self.kernel_dilation)
        return out.transpose(np.argsort(self.numbers.out_spec))

    def _pads(self, space: Sequence[int], places: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The padding of an image, along each axis of space."""
        padding = self.padding
        if isinstance(padding, str):
            spans, space = (
                [max((n - 1) * gap + 1, 0) for n, gap in zip(sizes, gaps, strict=True)]
                for sizes, gaps in ((places, self.kernel_dilation), (space, self.input_dilation))
            )
            padding = lax.padtype_to_pads(space, spans, self.strides, padding)
        return tuple((int(low), int(high)) for low, high in padding)

    def _image_and_kernel(self, shapes: OperandShapes) -> tuple[list[int], list[int], ConvGeometry]:
        """The shapes of x, as (n, channels, *space), and of w, as (rows, channels of a group, *places)."""
        x, w = ([shape[a] for a in s] for shape, s in zip(shapes, self.numbers[:2], strict=True))
        geometry = ConvGeometry(self.strides, self._pads(x[2:], w[2:]), self.input_dilation, self.kernel_dilation)
        return x, w, geometry

    def by_codes(self, x: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """The product of codes, each in its layout; `shapes` are those of x and w."""
        (n, channels, *space), (rows, inner, *places), geometry = self._image_and_kernel(shapes)
        groups = self.feature_groups
        image = x.reshape(n, *space, groups, channels // groups)
        kernel = w.reshape(groups, rows // groups, *places, inner).map_arrays(
            lambda v: jnp.moveaxis(v, (0, 1), (-3, -2))
        )
        y = convolve_codes(image, kernel, geometry, dtype)
        return _image_from_groups(y, self.numbers.out_spec)

    def input_by_codes(self, g: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """The product dx, of codes in their layouts: a convolution with the mirrored kernel."""
        (n, _, *space), (rows, inner, *places), geometry = self._image_and_kernel(shapes)
        groups, windows = self.feature_groups, geometry.windows(space, places)
        image = g.reshape(n, *windows, groups, rows // groups)
        kernel = w.reshape(inner, *places, groups, rows // groups).map_arrays(lambda v: jnp.moveaxis(v, 0, -2))
        return _image_from_groups(
            convolve_codes(image, kernel, geometry.backward(space, places), dtype), self.numbers.lhs_spec
        )

    def weight_by_codes(self, x: CodedArray, g: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """The product dw, of codes in their layouts: summed over images and places."""
        (n, channels, *space), (rows, inner, *places), geometry = self._image_and_kernel(shapes)
        gradient = g.reshape(rows, n, *geometry.windows(space, places))
        y = correlate_codes(gradient, x.reshape(channels, n, *space), geometry, places, self.feature_groups, dtype)
        y = y.reshape(*places, rows, inner)
        return jnp.moveaxis(y, (-2, -1), (0, 1)).transpose(np.argsort(self.numbers.rhs_spec))


def _image_from_groups(y: Array, axes: Sequence[int]) -> Array:
    """An image (n, *space, groups, channels) with its axes (n, channels, *space) at `axes`."""
    image = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])
    return jnp.moveaxis(image, -1, 1).transpose(np.argsort(axes))


@dataclass(frozen=True)
class RaggedProduct:
    """`jax.lax.ragged_dot_general` of rows and a stack of matrices, one for each group of rows: (m, k), (g, k, n)."""

    params: tuple[tuple[str, Any], ...]

    @staticmethod
    def of_rows() -> RaggedProduct:
        """`jax.lax.ragged_dot`."""
        numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))  # type: ignore[arg-type]
        return RaggedProduct((("ragged_dot_dimension_numbers", numbers),))

    def __call__(self, x: Array, w: Array, sizes: Array) -> Array:
        """The product, in the carrier; `sizes` are the numbers of rows."""
        more = dict(self.params)
        numbers = more.pop("ragged_dot_dimension_numbers")
        more = {name: value for name, value in more.items() if value is not None}
        return lax.ragged_dot_general(x, w, sizes, numbers, **more)

    @property
    def preferred_element_type(self) -> Any:
        """The dtype of the result, or None."""
        return dict(self.params).get("preferred_element_type")

    @property
    def forward(self) -> OperandLayouts:
        """Of x and w."""
        return OperandLayouts(OperandLayout((0,), (1,)), OperandLayout((0, 2), (1,)))

    @property
    def for_input(self) -> OperandLayouts:
        """Of g and w, for dx."""
        return OperandLayouts(OperandLayout((0,), (1,)), OperandLayout((0, 1), (2,)))

    @property
    def for_weight(self) -> OperandLayouts:
        """Of x and g, for dw: summed over rows, of all groups as one."""
        return OperandLayouts(OperandLayout((1,), (0,)), OperandLayout((1,), (0,)))

    def by_codes(self, x: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any, sizes: Array) -> Array:
        """The product of codes, each in its layout."""
        return multiply_codes(x, w, dtype, ExpertSums(sizes, x.elements.shape[0], shapes[1][0]))

    def input_by_codes(self, g: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any, sizes: Array) -> Array:
        """The product dx, of codes in their layouts."""
        return multiply_codes(g, w, dtype, ExpertSums(sizes, g.elements.shape[0], shapes[1][0]))

    def weight_by_codes(self, x: CodedArray, g: CodedArray, shapes: OperandShapes, dtype: Any, sizes: Array) -> Array:
        """The product dw, of codes in their layouts: for each expert of its rows."""
        return expert_weight_gradients(g, x, sizes, shapes[1][0], dtype)

    def emulate(self, x: Array, w: Array, spec: MatmulSpec, key: Array | None) -> Array:
        """Refused."""
        raise NotImplementedError(f"matmul={str(spec)!r}: ragged_dot cannot be emulated; leave matmul out of its rule")


@dataclass(frozen=True)
class OperandSwap:
    """A product whose left operand is the weight: x is its right one."""

    product: DotProduct | ConvProduct | RaggedProduct

    def __call__(self, x: Array, w: Array, *extra: Array) -> Array:
        """The product, in the carrier."""
        return self.product(w, x, *extra)

    @property
    def forward(self) -> OperandLayouts:
        """Of x and w."""
        return _swap_operands(self.product.forward)

    @property
    def for_input(self) -> OperandLayouts:
        """Of g and w, for dx."""
        return _swap_operands(self.product.for_weight)

    @property
    def for_weight(self) -> OperandLayouts:
        """Of x and g, for dw."""
        return _swap_operands(self.product.for_input)

    def emulate(self, x: Array, w: Array, spec: MatmulSpec, key: Array | None) -> Array:
        """The product, in an emulated arithmetic."""
        return self.product.emulate(w, x, spec, key)

    def by_codes(self, x: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any, *extra: Array) -> Array:
        """The product of codes, each in its layout."""
        return self.product.by_codes(w, x, (shapes[1], shapes[0]), dtype, *extra)

    def input_by_codes(self, g: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any, *extra: Array) -> Array:
        """The product dx, of codes in their layouts."""
        return self.product.weight_by_codes(w, g, (shapes[1], shapes[0]), dtype, *extra)

    def weight_by_codes(self, x: CodedArray, g: CodedArray, shapes: OperandShapes, dtype: Any, *extra: Array) -> Array:
        """The product dw, of codes in their layouts."""
        return self.product.input_by_codes(g, x, (shapes[1], shapes[0]), dtype, *extra)

    @property
    def emulates_backward(self) -> bool:
        """Whether its backward products can be in an emulated arithmetic, too."""
        return isinstance(self.product, DotProduct)

    def emulate_input(self, g: Array, w: Array, shape: Sequence[int], spec: MatmulSpec, key: Array | None) -> Array:
        """The product dx of `shape`, in an emulated arithmetic."""
        assert isinstance(self.product, DotProduct)
        return self.product.emulate_weight(w, g, shape, spec, key)

    def emulate_weight(self, x: Array, g: Array, shape: Sequence[int], spec: MatmulSpec, key: Array | None) -> Array:
        """The product dw of `shape`, in an emulated arithmetic."""
        assert isinstance(self.product, DotProduct)
        return self.product.emulate_input(g, x, shape, spec, key)


def _as_matrix(q: Any, *shape: int) -> Any:
    try:
        return q.reshape(*shape)
    except ValueError:
        return None


AnyProduct = DotProduct | ConvProduct | RaggedProduct | OperandSwap


def _swap_operands(operands: OperandLayouts) -> OperandLayouts:
    return OperandLayouts(operands.right, operands.left)


def _channels_last_layout(axes: Sequence[int]) -> OperandLayout:
    """One of (first, channels, *space) with the rest summed over, the channels fastest."""
    first, channels, *space = axes
    return OperandLayout((first,), (*space, channels))
