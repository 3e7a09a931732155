"""softmax and logsumexp: exponentials, their sum in a named order, and quotients or the logarithm of the sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jchop._arguments import Array, as_operands, checked_key, run
from jchop._checks import check_bool
from jchop._core.arithmetic.operations import check_matmul, check_operation, draws
from jchop._settings import compiled, split
from jchop.accumulation import MatmulSpec, SumSpecLike
from jchop.math import _elementwise
from jchop.math._extrema import extremum
from jchop.math._family import evaluated, exactly
from jchop.math._matmul import to_dtype
from jchop.math._parts import (
    Axes,
    Axis,
    as_axes,
    as_mask,
    as_rows,
    fold,
    from_rows,
    mask_rows,
    reduced_in_auto_mesh,
)
from jchop.math._sums import anything, as_sum_spec, rounded_operand, row_sums

__all__ = ["logsumexp", "softmax"]


def softmax(x: Any, spec: SumSpecLike, key: Array | None = None, *, axis: Axis = -1, where: Any = None) -> Any:
    """e^x / Σ e^x along an axis, as `jax.nn.softmax`, every operation rounded.

    With m the largest element, which is exact: d_k = x_k - m and e_k = e^(d_k) are rounded to ``spec.operands``, e_k as
    in `jchop.math.exp`; s = Σ e_k is summed as in `jchop.math.sum`, in the order of `spec`; and e_k / s is rounded to
    ``spec.accumulate``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: as in `jchop.math.sum`.
        key: a typed key, required if `spec` is stochastic. It is split into four, for `x`, for the differences, for the
            exponentials and for the sums; the quotient draws from `jax.random.fold_in` of the last with 0. Words of
            differences, exponentials and quotients are indexed by an array with the reduced axes last. Default None.
        axis: an axis, or several, which count as one; None: all. Default -1.
        where: booleans, which broadcast to the shape of `x`; an element at False is left out of m, counts as +0 in the
            sum, and its result is 0. Default None: all elements.

    Returns:
        An array of the shape and dtype of `x`. NaN if all elements are left out, or are -inf. The derivative is the
        derivative of the formula in the carrier, at rounded values, with m as a constant.

    Raises:
        TypeError, ValueError: as for `jchop.math.sum`.

    Example:
        >>> import jchop as jc
        >>> jc.math.softmax([1.0, 2.0, 3.0], "e5m2").tolist()
        [0.078125, 0.25, 0.625]
    """
    return _reduced(_softmax, x, spec, key, axis, where)


def logsumexp(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    axis: Axis = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The logarithm of Σ e^x along axes, as `jax.nn.logsumexp`, every operation rounded.

    With m the largest element, or 0 if that is not finite: d_k = x_k - m and e_k = e^(d_k) are rounded to
    ``spec.operands``, s = Σ e_k is summed as in `jchop.math.sum`, and log(s), as in `jchop.math.log`, and log(s) + m
    are rounded to ``spec.accumulate``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: as in `jchop.math.sum`.
        key: a typed key, required if `spec` is stochastic. It is split into four, for `x`, for the differences, for the
            exponentials and for the sums; the logarithm and the last sum draw from `jax.random.fold_in` of the last
            with 0 and 1. Default None.
        axis: an axis, or several; None (default): all.
        keepdims: whether to keep the axes, with length one. Default False.
        where: booleans, which broadcast to the shape of `x`; an element at False is left out of m and counts as +0 in
            the sum. Default None: all elements.

    Returns:
        An array of the dtype of `x`; -inf for no elements. The derivative is the derivative of the formula in the
        carrier, at rounded values, with m as a constant.

    Raises:
        TypeError, ValueError: as for `jchop.math.sum`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.logsumexp([1.0, 2.0, 3.0], "bfloat16"))
        3.40625
    """
    check_bool("keepdims", keepdims)
    return _reduced(_logsumexp, x, spec, key, axis, where, keepdims)


def _reduced(
    function: Callable[..., Array], x: Any, spec: SumSpecLike, key: Any, axis: Axis, where: Any, keepdims: bool = False
) -> Any:
    mspec = as_sum_spec(spec)
    (array,) = as_operands("x", (x,))
    check_matmul(mspec, array.dtype)
    check_operation(mspec.operands, array.dtype, "operands")
    check_operation(mspec.accumulate, array.dtype, "accumulate")
    axes, mask = as_axes(axis, array.ndim), as_mask(where, array.shape)
    key = checked_key(key, mspec.stochastic, mspec)
    return run(partial(_reduce, function, mspec, axes, keepdims), (array, *mask), key)


@partial(compiled, static_argnums=(0, 1, 2, 3), inline=True)
def _reduce(
    function: Callable[..., Array], spec: MatmulSpec, axes: Axes, keepdims: bool, *operands_and_key: Any
) -> Array:
    in_rows = partial(_over_rows, function, spec, axes, keepdims)
    return reduced_in_auto_mesh(in_rows, axes, None if function is _softmax else keepdims, *operands_and_key)


def _over_rows(
    function: Callable[..., Array], spec: MatmulSpec, axes: Axes, keepdims: bool, *operands_and_key: Any
) -> Array:
    """`function` of rows, which gives a number for each row or for each element; the operands are x and the mask."""
    x, *masks, key = operands_and_key
    keys = (None,) * 4 if key is None else tuple(split(key, 4))
    x = jnp.asarray(x)
    rows, outer = as_rows(rounded_operand(x, spec, keys[0]), axes)
    mask = mask_rows(masks[0] if masks else None, x, axes)
    result = to_dtype(function(rows, spec, keys, mask), spec, x.dtype)
    if result.ndim == 2:
        return from_rows(result, axes, x.shape)
    return jnp.expand_dims(result.reshape(outer), axes) if keepdims else result.reshape(outer)


_Keys = tuple[Array | None, ...]


def _exponentials(rows: Array, shift: Array, spec: MatmulSpec, keys: _Keys, mask: Array | None) -> Array:
    """e^(x - m), or +0 if the mask is False."""
    stochastic = draws(spec.operands)
    shift = jnp.broadcast_to(shift[:, None], rows.shape)
    if mask is not None:
        rows = jnp.where(mask, rows, shift)
    d = exactly("sub", (rows, shift), spec.operands, keys[1] if stochastic else None)
    e = evaluated(_elementwise.exp, d, spec.operands, keys[2] if stochastic else None)
    return e if mask is None else jnp.where(mask, e, 0)


def _largest(rows: Array, mask: Array | None) -> Array:
    """The largest element of each row, -inf for none, as a constant."""
    rows = rows if mask is None else jnp.where(mask, rows, -jnp.inf)
    lowest = jnp.full((rows.shape[0], 1), -jnp.inf, rows.dtype)
    return lax.stop_gradient(extremum("max", jnp.concatenate([lowest, rows], 1)))


def _own(spec: MatmulSpec, key: Array | None, number: int) -> Array | None:
    return fold(key, number) if draws(spec.accumulate) else None


def _softmax(rows: Array, spec: MatmulSpec, keys: _Keys, mask: Array | None) -> Array:
    e = _exponentials(rows, _largest(rows, mask), spec, keys, mask)
    total = jnp.broadcast_to(row_sums(e, spec, keys)[:, None], e.shape)
    return exactly("div", (e, total), spec.accumulate, _own(spec, keys[3], 0), anything(e))


def _logsumexp(rows: Array, spec: MatmulSpec, keys: _Keys, mask: Array | None) -> Array:
    largest = _largest(rows, mask)
    m = jnp.where(jnp.isfinite(largest), largest, 0)
    total = row_sums(_exponentials(rows, m, spec, keys, mask), spec, keys)
    log = evaluated(_elementwise.log, total, spec.accumulate, _own(spec, keys[3], 0))
    return exactly("add", (log, m), spec.accumulate, _own(spec, keys[3], 1), anything(rows))
