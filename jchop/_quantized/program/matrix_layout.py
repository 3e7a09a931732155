"""A parameter as the matrices of its product, and the rotation of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jchop._quantized.products.rotation import Hadamard
from jchop._quantized.program.provenance import AxisFactor, AxisFactors

Array = jax.Array


@dataclass(frozen=True)
class MatrixView:
    """The axes of a parameter as a product takes them: the free ones, in order, and the contracting ones (summed over).

    Args:
        free: the parts of each free axis of the operand.
        contracting: the parts that are summed over, the last one moving fastest.
    """

    free: tuple[AxisFactors, ...]
    contracting: AxisFactors


def split_axes(shape: Sequence[int], factors: Iterable[AxisFactor]) -> list[tuple[AxisFactor, ...]]:
    """The parts of each axis, the slowest first; an axis that these parts do not make up is one part."""
    result: list[tuple[AxisFactor, ...]] = []
    for axis, n in enumerate(shape):
        own = sorted({part for part in factors if part.axis == axis}, key=lambda part: -part.inner)
        ends = [*(part.inner * part.size for part in own[1:]), 1]
        whole = own and own[0].inner * own[0].size == n and [part.inner for part in own] == ends
        result.append(tuple(own) if whole else (AxisFactor(axis, n),))
    return result


@dataclass(frozen=True)
class MatrixLayout:
    """The axes of a parameter as matrices (batch, contracting, free).

    Args:
        shape: of the parameter, without axes of a stack.
        sizes: of the parts of its axes, in their order.
        batch: the parts over which the product is batched, each index of which has a matrix of its own.
        contracting: the parts that the product sums over, the last one moving fastest.
        free: all others.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    contracting: tuple[int, ...]
    free: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], stack: int, view: MatrixView, batch: int) -> MatrixLayout | None:
        """The layout of a parameter.

        Args:
            shape: of the parameter, with the axes of a stack.
            stack: how many of these there are.
            view: how a product takes the parameter.
            batch: how many of the free axes, the first ones, are axes of a batch.

        Returns:
            None if the product sums, or is batched, over a part of an axis of which the rest is elsewhere.
        """
        own_batch = tuple(part for parts in view.free[:batch] for part in parts)
        matters = {*own_batch, *view.contracting}
        factors = {*matters, *(part for parts in view.free for part in parts)}
        parts = [part for own in split_axes(shape, factors)[stack:] for part in own]
        if not {part for part in matters if part.axis >= stack} <= {*parts}:
            return None
        number = {part: i for i, part in enumerate(parts)}
        first, along = (tuple(number[part] for part in some) for some in (own_batch, view.contracting))
        rest = tuple(i for i in range(len(parts)) if i not in {*first, *along})
        return MatrixLayout(tuple(shape[stack:]), tuple(part.size for part in parts), first, along, rest)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape of the matrices."""
        batch, contracting, free = (
            math.prod(self.sizes[i] for i in some) for some in (self.batch, self.contracting, self.free)
        )
        return batch, contracting, free

    def lay(self, x: Array) -> Array:
        """A parameter, or what has its shape or another with its numbers in their order, as matrices."""
        return x.reshape(self.sizes).transpose(*self._order).reshape(self.matrices)

    def back(self, matrices: Array) -> Array:
        """The inverse of `lay`."""
        parts = matrices.reshape([self.sizes[i] for i in self._order])
        return parts.transpose(*np.argsort(self._order)).reshape(self.shape)

    def results(self, x: Any) -> Any:
        """An array in the shape of the parameter, the same along the axes summed over, as (batch, free)."""
        parts = x.reshape(self.sizes).transpose(*self.batch, *self.free, *self.contracting)
        first = parts[(..., *(0,) * len(self.contracting))]
        return first.reshape(self.matrices[0], self.matrices[2])

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.batch, *self.contracting, *self.free)


@dataclass(frozen=True)
class WeightRotation:
    """The rotation of a parameter along the axes that its product sums over.

    Args:
        rotation: it.
        layout: the parameter as matrices.
    """

    rotation: Hadamard
    layout: MatrixLayout

    def parameter(self, x: Array) -> Array:
        """A parameter without axes of a stack, rotated."""
        return self.layout.back(self.inputs(self.layout.lay(x).swapaxes(1, 2)).swapaxes(1, 2))

    def inputs(self, x: Array) -> Array:
        """Inputs, whose last axis is the sum, rotated."""
        return self.rotation.rotate(x)

    def gram(self, x: Array) -> Array:
        """Means of x y^T of inputs, (batch, contracting, contracting), as those of rotated ones."""
        return self.inputs(self.inputs(x).swapaxes(1, 2)).swapaxes(1, 2)
