"""Products of codes of rows with the matrices of experts, as `jax.lax.ragged_dot`: forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import varying_like
from jchop._quantized.products.codes import CodedArray, MatrixSums, multiply_codes

Array = jax.Array


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

        def mask_other_rows(v: CodedArray) -> CodedArray:
            """Other rows have zeros, which is the code of a zero point where there is one."""
            none = jnp.zeros((), v.elements.dtype) if v.zero is None else v.zero.astype(v.elements.dtype)
            return replace(v, elements=jnp.where(is_own_row, v.elements, none))

        left, right = (replace(mask_other_rows(v).map_arrays(lambda u: u[None]), block=v.block) for v in (gradient, x))
        return multiply_codes(left, right, dtype)[0].T

    return lax.map(gradient_of_expert, jnp.arange(experts))


def _expert_of_rows(sizes: Array, rows: int) -> Array:
    """The expert of each row; the number of experts for rows of none."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right").astype(jnp.int32)
