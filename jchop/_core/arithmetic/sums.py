"""Sums and products along axes, also cumulative; every step is rounded, in a named order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._core.arithmetic.basic import carrier_range, range_of
from jchop._core.arithmetic.matmul import matmul_body
from jchop._core.arithmetic.operations import draws, fold_seeds, operation, operation_carrier, words
from jchop._core.arithmetic.ranges import Range
from jchop.accumulation import MatmulSpec
from jchop.spec import Spec

__all__ = ["cumulative", "product_along", "sum_along"]

Array = jax.Array
Axes = int | Sequence[int]


def sum_along(
    x: Array,
    axis: Axes,
    mspec: MatmulSpec,
    seeds: Array | None = None,
    *,
    keepdims: bool = False,
    value_spec: Spec | None = None,
    matmul: Callable[..., Array] = matmul_body,
) -> Array:
    """The sums of `x` along axes, in the order and with the rounding of ``mspec.accumulate``.

    A sum of x_k is the sum of products x_k 1, so the order is the same as in a matrix product; ``mspec.product`` and
    ``mspec.fused`` have no effect.

    Args:
        x: float16, bfloat16, float32 or float64, with values already rounded to ``mspec.operands``.
        axis: the axis, or several, with elements in C order.
        mspec: the arithmetic.
        seeds: twelve uint32, if ``mspec.accumulate`` draws.
        keepdims: whether to keep the axes, with length one.
        value_spec: the spec that holds the values of `x`, for a faster way. Default: ``mspec.operands``.
        matmul: the function that multiplies matrices.

    Returns:
        The sums, of the dtype of `x`; +0 for no elements.
    """
    rows, outer = _rows(x, axis)
    spec = replace(mspec, operands=_with_one(value_spec or mspec.operands, x.dtype), product=None, fused=False)
    wide = rows.astype(operation_carrier(x.dtype).name)
    ones = jnp.ones((1, rows.shape[1], 1), wide.dtype)
    total = matmul(wide[None], ones, *(() if seeds is None else (seeds,)), spec=spec)
    return _shaped(total.reshape(outer), x, axis, keepdims).astype(x.dtype)


def _with_one(value_spec: Spec | None, dtype: Any) -> Spec | None:
    """`value_spec` if 1 is in the range of its values, else None."""
    if value_spec is None:
        return None
    r = range_of(value_spec, operation_carrier(dtype))
    return replace(value_spec, gradient="straight_through") if r.bottom <= 0 < r.top else None


def product_along(
    x: Array, axis: Axes, spec: Spec, seeds: Sequence[Array] | None = None, where: Array | None = None
) -> Array:
    """The products of `x` along axes, one factor after the other in C order from 1: c <- A(c x_k).

    Args:
        x: values that are rounded to `spec` already.
        axis: the axis, or several.
        spec: the rounding of every product.
        seeds: six uint32, if `spec` draws.
        where: booleans of the shape of `x`; an element at False leaves c as it is. Default None: all elements.
    """
    rows, outer = _rows(x, axis)
    last, _ = _run("prod", rows.T, spec, seeds, None if where is None else _rows(where, axis)[0].T)
    return last.reshape(outer)


def cumulative(
    kind: str, x: Array, axis: int, spec: Spec, seeds: Sequence[Array] | None = None, *, reverse: bool = False
) -> Array:
    """Sums or products of the elements up to each one: c <- A(c + x_k) from 0, or c <- A(c x_k) from 1.

    Args:
        kind: ``"sum"`` or ``"prod"``.
        x: values that are rounded to `spec` already.
        axis: the axis.
        spec: the rounding of every step.
        seeds: six uint32, if `spec` draws.
        reverse: from the last element to the first.
    """
    columns = jnp.moveaxis(x, axis, 0)
    if not x.shape[axis]:
        return x
    _, each = _run(kind, columns[::-1] if reverse else columns, spec, seeds)
    return jnp.moveaxis(each[::-1] if reverse else each, 0, axis)


_STEPS = {"sum": ("add", 0.0), "prod": ("mul", 1.0)}


def _run(
    kind: str, columns: Array, spec: Spec, seeds: Sequence[Array] | None, where: Array | None = None
) -> tuple[Array, Array]:
    """The last value and all values of c along the first axis; iteration k has the seeds of iteration k of loop 0."""
    name, start = _STEPS[kind]
    ranges = _with_start(spec, columns.dtype)

    def iterate(carry: tuple[Array, Array], element: tuple[Array, Array | None]) -> tuple[tuple[Array, Array], Array]:
        (c, k), (column, counts) = carry, element
        word = words(fold_seeds(seeds, 0, k), c) if draws(spec) and seeds is not None else None
        following = operation(name, [c, column], spec, word, ranges=ranges)
        c = following if counts is None else _bits.where(counts, following, c)
        return (c, k + jnp.uint32(1)), c

    first = jnp.full_like(columns[0] if columns.shape[0] else columns.sum(0), start)
    (last, _), values = lax.scan(iterate, (first, jnp.uint32(0)), (columns, where))
    return last, values


def _with_start(spec: Spec, dtype: Any) -> tuple[Range, Range]:
    """The range of c, which is a value of the format or the start 0 or 1, and the range of an element."""
    carrier = operation_carrier(dtype)
    r = range_of(spec, carrier)
    return (r if r.bottom <= 0 < r.top else carrier_range(carrier)), r


# -- shapes ------------------------------------------------------------------------------------------------------------


def _axes(x: Array, axis: Axes) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(a % x.ndim for a in axes)


def _rows(x: Array, axis: Axes) -> tuple[Array, tuple[int, ...]]:
    """A matrix with a row for each result, and the shape of the results."""
    axes = _axes(x, axis)
    outer_axes = [a for a in range(x.ndim) if a not in axes]
    outer = tuple(x.shape[a] for a in outer_axes)
    length = math.prod(x.shape[a] for a in axes)
    return jnp.transpose(x, (*outer_axes, *sorted(axes))).reshape(math.prod(outer), length), outer


def _shaped(total: Array, x: Array, axis: Axes, keepdims: bool) -> Array:
    return jnp.expand_dims(total, sorted(_axes(x, axis))) if keepdims else total
