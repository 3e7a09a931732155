"""The two products of layers, and how each operand is laid out for a product and for its two backward products.

Each is y = x w, linear in both. Sum dx = g w over the axes of y that come from w, and dw = x g over axes that come
from x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._kernels.primitive import one_device_at_hand
from jchop._quantized.products.code_products import (
    ConvGeometry,
    ExpertSums,
    convolve_codes,
    correlate_codes,
    expert_weight_gradients,
    multiply_packed_weights,
    reads_panels,
    suits_panels,
)
from jchop._quantized.products.codes import (
    CodedArray,
    MatrixSums,
    block_along_sum,
    multiply_codes,
    to_batched_matrices,
    why_no_codes,
)
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.math import matmul as emulated_matmul
from jchop.math._products import conv as emulated_conv

OperandShapes = tuple[tuple[int, ...], tuple[int, ...]]
#: The three products: y of x and w, dx of g and w, dw of x and g.
Which = Literal["forward", "input", "weight"]


class OperandLayouts(NamedTuple):
    """The layouts of the two operands of one product."""

    left: OperandLayout
    right: OperandLayout


class _Product:
    """The common part of the products."""

    @cached_property
    def forward(self) -> OperandLayouts:
        """The layouts of x and w in the forward product."""
        return self.layouts("forward")

    def layouts(self, which: Which) -> OperandLayouts:
        """The layouts of the operands of one of the three products."""
        raise NotImplementedError


@dataclass(frozen=True)
class DotProduct(_Product):
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
        dtypes = {"precision": self.precision, "preferred_element_type": self.preferred_element_type}
        run = partial(lax.dot_general, **dtypes, **more)
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
        """The layouts of x and w in the forward product."""
        layouts = []
        for ndim, batch, contracting in zip(self.ndims, self.batch, self.contracting, strict=True):
            free = (axis for axis in range(ndim) if axis not in (*batch, *contracting))
            layouts.append(OperandLayout((*batch, *free), contracting))
        return OperandLayouts(*layouts)

    def layouts(self, which: Which) -> OperandLayouts:
        """The layouts of the operands of one of the three products."""
        b, rows, columns = len(self.batch[0]), self.forward.left.free, self.forward.right.free
        result = tuple(range(len(rows) + len(columns) - b))
        if which == "input":
            return OperandLayouts(
                OperandLayout(result[: len(rows)], result[len(rows) :]),
                OperandLayout((*self.batch[1], *self.contracting[1]), columns[b:]),
            )
        if which == "weight":
            return OperandLayouts(
                OperandLayout((*self.batch[0], *self.contracting[0]), rows[b:]),
                OperandLayout((*result[:b], *result[len(rows) :]), result[b : len(rows)]),
            )
        return self.forward

    def result_axes(self, side: int) -> dict[int, int]:
        """The axes of the result, by the axes of an operand; axes that are summed over have none."""
        batch, rows = len(self.batch[0]), len(self.forward.left.free)
        start = rows - batch if side else 0
        return {axis: i if i < batch else start + i for i, axis in enumerate(self.forward[side].free)}

    def _result(self, which: Which, y: Array, shapes: OperandShapes) -> Array:
        """The result, or the derivative with respect to x or w, from its layout as (batch, rows, columns)."""
        if which == "forward":
            free = zip(shapes, (self.forward.left.free, self.forward.right.free[len(self.batch[0]) :]), strict=True)
            return y.reshape([shape[axis] for shape, axes in free for axis in axes])
        side = 0 if which == "input" else 1
        return self.forward[side].back(y, shapes[side])

    def emulate(
        self, which: Which, left: Array, right: Array, shapes: OperandShapes, spec: MatmulSpec, key: Array | None
    ) -> Array:
        """One of the products, in an emulated arithmetic; `shapes` are the shapes of x and w."""
        layouts = self.layouts(which)
        arrays = layouts.left.lay(left), layouts.right.lay(right)
        x, y = (to_batched_matrices(CodedArray(v, None, None), len(self.batch[0])).elements for v in arrays)
        if which == "weight":
            x, y = y, x
        return self._result(which, emulated_matmul(x, y.swapaxes(1, 2), spec, key), shapes)

    def by_codes(self, which: Which, x: CodedArray, w: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """One of the products, of codes in their layouts; `shapes` are the shapes of x and w."""
        b, sums = len(self.batch[0]), MatrixSums()
        left, right = (to_batched_matrices(v, b) for v in (x, w))
        if which == "weight":
            left, right = right, left
        leading, last = self._sum_axes_at_ends()
        size = x.elements.size * w.elements.size
        if which == "forward" and not b and (leading or last) and size:
            rows = x.reshape(-1, x.elements.shape[-1])
            qarray, columns = w.qarray, w.elements.size // w.elements.shape[-1]
            if qarray is not None and x.is_plain and qarray.ndim > 2:
                with suppress(ValueError):  # else its panels are not read
                    qarray = qarray.reshape(*((-1, columns) if leading else (columns, -1)))
            if qarray is not None and not reads_panels(qarray.spec.element.bits, qarray.shape, leading, w.block):
                qarray = None
            stored = replace(w.reshape(-1, w.elements.shape[-1]), qarray=qarray, shift=w.shift)
            if suits_panels(rows, stored, leading):
                return self._result(which, multiply_packed_weights(rows, stored, leading, dtype), shapes)
            sums = MatrixSums(apart=qarray is not None and leading and not last)
        return self._result(which, multiply_codes(left, right, dtype, sums), shapes)

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


@dataclass(frozen=True)
class ConvProduct(_Product):
    """`jax.lax.conv_general_dilated`, with everything static about it.

    A sum runs over the places of the kernel and the channels. So an image is laid out as (image, places and channels).
    Groups lie along its channels if their size divides the number of channels.
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
        windows = self.strides, self.padding, self.input_dilation, self.kernel_dilation, self.numbers
        dtypes = {"precision": self.precision, "preferred_element_type": self.preferred_element_type}
        return lax.conv_general_dilated(x, w, *windows, feature_group_count=self.feature_groups, **dtypes, **more)

    def layouts(self, which: Which) -> OperandLayouts:
        """Of the operands of one of the three products; dw is summed over images and places."""
        image, kernel, result = self.numbers.lhs_spec, self.numbers.rhs_spec, self.numbers.out_spec
        if which == "forward":
            return OperandLayouts(_channels_last_layout(image), _channels_last_layout(kernel))
        if which == "input":
            out, inside, *space = kernel
            return OperandLayouts(_channels_last_layout(result), OperandLayout((inside,), (*space, out)))
        return OperandLayouts(*(OperandLayout((s[1],), (s[0], *s[2:])) for s in (image, result)))

    def emulate(
        self, which: Which, x: Array, w: Array, shapes: OperandShapes, spec: MatmulSpec, key: Array | None
    ) -> Array:
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
            both = (places, self.kernel_dilation), (space, self.input_dilation)
            spans, space = ([max((n - 1) * gap + 1, 0) for n, gap in zip(*one, strict=True)] for one in both)
            padding = lax.padtype_to_pads(space, spans, self.strides, padding)
        return tuple((int(low), int(high)) for low, high in padding)

    def geometry(self, space: Sequence[int], places: Sequence[int]) -> ConvGeometry:
        """Where the places of a kernel fall on an image."""
        return ConvGeometry(self.strides, self._pads(space, places), self.input_dilation, self.kernel_dilation)

    def by_codes(self, which: Which, left: CodedArray, right: CodedArray, shapes: OperandShapes, dtype: Any) -> Array:
        """One of the products, of codes in their layouts; `shapes` are the shapes of x and w."""
        x, w = ([shape[a] for a in s] for shape, s in zip(shapes, self.numbers[:2], strict=True))
        (n, channels, *space), (rows, inner, *places), groups = x, w, self.feature_groups
        geometry = self.geometry(space, places)
        if which == "weight":  # summed over images and places
            gradient, image = right.reshape(rows, n, *geometry.windows(space, places)), left
            y = correlate_codes(gradient, image.reshape(channels, n, *space), geometry, places, groups, dtype)
            y = y.reshape(*places, rows, inner)
            return jnp.moveaxis(y, (-2, -1), (0, 1)).transpose(np.argsort(self.numbers.rhs_spec))
        if which == "input":  # a convolution with the mirrored kernel
            image = left.reshape(n, *geometry.windows(space, places), groups, rows // groups)
            kernel = right.reshape(inner, *places, groups, rows // groups)
            kernel = kernel.map_arrays(lambda v: jnp.moveaxis(v, 0, -2))
            geometry, axes = geometry.backward(space, places), self.numbers.lhs_spec
        else:
            image = left.reshape(n, *space, groups, channels // groups)
            kernel = right.reshape(groups, rows // groups, *places, inner)
            kernel = kernel.map_arrays(lambda v: jnp.moveaxis(v, (0, 1), (-3, -2)))
            axes = self.numbers.out_spec
        y = convolve_codes(image, kernel, geometry, dtype)
        image = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])
        return jnp.moveaxis(image, -1, 1).transpose(np.argsort(axes))


@dataclass(frozen=True)
class RaggedProduct(_Product):
    """`jax.lax.ragged_dot_general` of rows and a stack of matrices, one for each group of rows: (m, k), (g, k, n)."""

    params: tuple[tuple[str, Any], ...]

    @staticmethod
    def of_rows() -> RaggedProduct:
        """The product that `jax.lax.ragged_dot` computes."""
        numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))  # type: ignore[arg-type]
        return RaggedProduct((("ragged_dot_dimension_numbers", numbers),))

    def __call__(self, x: Array, w: Array, sizes: Array) -> Array:
        """The product, in the carrier; `sizes` are the numbers of rows."""
        more = {name: value for name, value in self.params if value is not None}
        return lax.ragged_dot_general(x, w, sizes, more.pop("ragged_dot_dimension_numbers"), **more)

    @property
    def preferred_element_type(self) -> Any:
        """The dtype of the result, or None."""
        return dict(self.params).get("preferred_element_type")

    def layouts(self, which: Which) -> OperandLayouts:
        """The layouts of the operands of one of the three products; dw is summed over rows, of all groups as one."""
        if which == "weight":
            return OperandLayouts(OperandLayout((1,), (0,)), OperandLayout((1,), (0,)))
        right = OperandLayout((0, 2), (1,)) if which == "forward" else OperandLayout((0, 1), (2,))
        return OperandLayouts(OperandLayout((0,), (1,)), right)

    def by_codes(
        self, which: Which, left: CodedArray, right: CodedArray, shapes: OperandShapes, dtype: Any, sizes: Array
    ) -> Array:
        """One of the products, of codes in their layouts; `shapes` are the shapes of x and w."""
        if which == "weight":
            return expert_weight_gradients(right, left, sizes, shapes[1][0], dtype)
        return multiply_codes(left, right, dtype, ExpertSums(sizes, left.elements.shape[0], shapes[1][0]))

    def emulate(
        self, which: Which, x: Array, w: Array, shapes: OperandShapes, spec: MatmulSpec, key: Array | None
    ) -> Array:
        """Raises: this product cannot be emulated."""
        raise NotImplementedError(f"matmul={str(spec)!r}: ragged_dot cannot be emulated; leave matmul out of its rule")


@dataclass(frozen=True)
class OperandSwap(_Product):
    """A product whose left operand is the weight: x is its right one."""

    product: DotProduct | ConvProduct | RaggedProduct

    def __call__(self, x: Array, w: Array, *extra: Array) -> Array:
        """The product, in the carrier."""
        return self.product(w, x, *extra)

    def layouts(self, which: Which) -> OperandLayouts:
        """The layouts of the operands of one of the three products."""
        return OperandLayouts(*reversed(self.product.layouts(_SWAPPED[which])))

    def emulate(
        self, which: Which, left: Array, right: Array, shapes: OperandShapes, spec: MatmulSpec, key: Array | None
    ) -> Array:
        """One of the products, in an emulated arithmetic; `shapes` are the shapes of x and w."""
        return self.product.emulate(_SWAPPED[which], right, left, (shapes[1], shapes[0]), spec, key)

    def by_codes(
        self, which: Which, left: CodedArray, right: CodedArray, shapes: OperandShapes, dtype: Any, *extra: Array
    ) -> Array:
        """One of the products, of codes in their layouts; `shapes` are the shapes of x and w."""
        return self.product.by_codes(_SWAPPED[which], right, left, (shapes[1], shapes[0]), dtype, *extra)


AnyProduct = DotProduct | ConvProduct | RaggedProduct | OperandSwap
_SWAPPED: dict[Which, Which] = {"forward": "forward", "input": "weight", "weight": "input"}


def _channels_last_layout(axes: Sequence[int]) -> OperandLayout:
    """One of (first, channels, *space) with the rest summed over, the channels fastest."""
    first, channels, *space = axes
    return OperandLayout((first,), (*space, channels))
