"""Sums and products along axes, also cumulative; every step is rounded, in a named order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._core.arithmetic.ranges import ValueRange, carrier_range, range_of
from jchop._core.matmul.matmul import matmul_body
from jchop._core.matmul.operations import fold_seeds, operation_carrier, operation_words, round_operation, spec_draws
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec

Array = jax.Array
SumAxes = int | Sequence[int]


def sum_along(
    x: Array,
    axis: SumAxes,
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
    rows, outer = _rows_of_sums(x, axis)
    spec = replace(mspec, operands=_spec_if_holds_one(value_spec or mspec.operands, x.dtype), product=None, fused=False)
    wide = rows.astype(operation_carrier(x.dtype).name)
    ones = jnp.ones((1, rows.shape[1], 1), wide.dtype)
    total = matmul(wide[None], ones, *(() if seeds is None else (seeds,)), spec=spec)
    return _restore_axes(total.reshape(outer), x, axis, keepdims).astype(x.dtype)


def _spec_if_holds_one(value_spec: Spec | None, dtype: Any) -> Spec | None:
    """`value_spec` if 1 is in the range of its values, else None."""
    if value_spec is None:
        return None
    value_range = range_of(value_spec, operation_carrier(dtype))
    return replace(value_spec, gradient="straight_through") if value_range.bottom <= 0 < value_range.top else None


def product_along(
    x: Array, axis: SumAxes, spec: Spec, seeds: Sequence[Array] | None = None, where: Array | None = None
) -> Array:
    """The products of `x` along axes, one factor after the other in C order from 1: c <- A(c x_k).

    Args:
        x: values that are rounded to `spec` already.
        axis: the axis, or several.
        spec: the rounding of every product.
        seeds: six uint32, if `spec` draws.
        where: booleans of the shape of `x`; an element at False leaves c as it is. Default None: all elements.
    """
    rows, outer = _rows_of_sums(x, axis)
    last, _ = _scan_recurrence("prod", rows.T, spec, seeds, None if where is None else _rows_of_sums(where, axis)[0].T)
    return last.reshape(outer)


def cumulative_along(
    operation: str, x: Array, axis: int, spec: Spec, seeds: Sequence[Array] | None = None, *, reverse: bool = False
) -> Array:
    """Sums or products of the elements up to each one: c <- A(c + x_k) from 0, or c <- A(c x_k) from 1.

    Args:
        operation: ``"sum"`` or ``"prod"``.
        x: values that are rounded to `spec` already.
        axis: the axis.
        spec: the rounding of every step.
        seeds: six uint32, if `spec` draws.
        reverse: from the last element to the first.
    """
    columns = jnp.moveaxis(x, axis, 0)
    if not x.shape[axis]:
        return x
    _, values = _scan_recurrence(operation, columns[::-1] if reverse else columns, spec, seeds)
    return jnp.moveaxis(values[::-1] if reverse else values, 0, axis)


_RECURRENCES = {"sum": ("add", 0.0), "prod": ("mul", 1.0)}


def _scan_recurrence(
    operation: str, columns: Array, spec: Spec, seeds: Sequence[Array] | None, where: Array | None = None
) -> tuple[Array, Array]:
    """The last value and all values of c along the first axis; iteration k has the seeds of iteration k of loop 0."""
    name, start = _RECURRENCES[operation]
    ranges = _recurrence_ranges(spec, columns.dtype)

    def iterate(carry: tuple[Array, Array], element: tuple[Array, Array | None]) -> tuple[tuple[Array, Array], Array]:
        (c, k), (column, is_included) = carry, element
        word = operation_words(fold_seeds(seeds, 0, k), c) if spec_draws(spec) and seeds is not None else None
        next_c = round_operation(name, [c, column], spec, word, ranges=ranges)
        c = next_c if is_included is None else bit_ops.lax_where(is_included, next_c, c)
        return (c, k + jnp.uint32(1)), c

    first = jnp.full_like(columns[0] if columns.shape[0] else columns.sum(0), start)
    (last, _), values = lax.scan(iterate, (first, jnp.uint32(0)), (columns, where))
    return last, values


def _recurrence_ranges(spec: Spec, dtype: Any) -> tuple[ValueRange, ValueRange]:
    """The range of c, which is a value of the format or the start 0 or 1, and the range of an element."""
    carrier = operation_carrier(dtype)
    value_range = range_of(spec, carrier)
    return (value_range if value_range.bottom <= 0 < value_range.top else carrier_range(carrier)), value_range


# -- shapes ------------------------------------------------------------------------------------------------------------


def _normalize_axes(x: Array, axis: SumAxes) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(a % x.ndim for a in axes)


def _rows_of_sums(x: Array, axis: SumAxes) -> tuple[Array, tuple[int, ...]]:
    """A matrix with a row for each result, and the shape of the results."""
    axes = _normalize_axes(x, axis)
    outer_axes = [a for a in range(x.ndim) if a not in axes]
    outer = tuple(x.shape[a] for a in outer_axes)
    length = math.prod(x.shape[a] for a in axes)
    return jnp.transpose(x, (*outer_axes, *sorted(axes))).reshape(math.prod(outer), length), outer


def _restore_axes(total: Array, x: Array, axis: SumAxes, keepdims: bool) -> Array:
    return jnp.expand_dims(total, sorted(_normalize_axes(x, axis))) if keepdims else total
