"""softmax and logsumexp: exponentials, their sum in a named order, and quotients or the logarithm of the sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jchop._common.checks import check_bool
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import check_matmul, check_operation, spec_draws
from jchop._round.arguments import Array, as_operands, rounding_key, run_on_operands
from jchop._spec.accumulation import MatmulSpec, SumSpecLike
from jchop.math import _elementwise
from jchop.math._extrema import row_extremum
from jchop.math._matmul import round_to_dtype
from jchop.math._parts import (
    AxisArgument,
    AxisIndices,
    as_axis_indices,
    as_mask_operands,
    as_rows,
    fold_key,
    from_rows,
    mask_rows,
    reduce_in_auto_mesh,
)
from jchop.math._row import evaluate_function, exact_operation
from jchop.math._sums import as_sum_spec, carrier_range_pair, round_operand, row_sums

__all__ = ["logsumexp", "softmax"]


def softmax(x: Any, spec: SumSpecLike, key: Array | None = None, *, axis: AxisArgument = -1, where: Any = None) -> Any:
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
    return _run_softmax(_row_softmax, x, spec, key, axis, where)


def logsumexp(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
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
    return _run_softmax(_row_logsumexp, x, spec, key, axis, where, keepdims)


def _run_softmax(
    function: Callable[..., Array],
    x: Any,
    spec: SumSpecLike,
    key: Any,
    axis: AxisArgument,
    where: Any,
    keepdims: bool = False,
) -> Any:
    mspec = as_sum_spec(spec)
    (array,) = as_operands("x", (x,))
    check_matmul(mspec, array.dtype)
    check_operation(mspec.operands, array.dtype, "operands")
    check_operation(mspec.accumulate, array.dtype, "accumulate")
    axes, mask = as_axis_indices(axis, array.ndim), as_mask_operands(where, array.shape)
    key = rounding_key(key, mspec.stochastic, mspec)
    return run_on_operands(partial(_traced_softmax, function, mspec, axes, keepdims), (array, *mask), key)


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _traced_softmax(
    function: Callable[..., Array], spec: MatmulSpec, axes: AxisIndices, keepdims: bool, *operands_and_key: Any
) -> Array:
    in_rows = partial(_softmax_along_axes, function, spec, axes, keepdims)
    return reduce_in_auto_mesh(in_rows, axes, None if function is _row_softmax else keepdims, *operands_and_key)


def _softmax_along_axes(
    function: Callable[..., Array], spec: MatmulSpec, axes: AxisIndices, keepdims: bool, *operands_and_key: Any
) -> Array:
    """`function` of rows, which gives a number for each row or for each element; the operands are x and the mask."""
    x, *masks, key = operands_and_key
    keys = (None,) * 4 if key is None else tuple(split_prng_key(key, 4))
    x = jnp.asarray(x)
    rows, outer_shape = as_rows(round_operand(x, spec, keys[0]), axes)
    mask = mask_rows(masks[0] if masks else None, x, axes)
    result = round_to_dtype(function(rows, spec, keys, mask), spec, x.dtype)
    if result.ndim == 2:
        return from_rows(result, axes, x.shape)
    return jnp.expand_dims(result.reshape(outer_shape), axes) if keepdims else result.reshape(outer_shape)


_SoftmaxKeys = tuple[Array | None, ...]


def _row_exponentials(rows: Array, shift: Array, spec: MatmulSpec, keys: _SoftmaxKeys, mask: Array | None) -> Array:
    """e^(x - m), or +0 if the mask is False."""
    stochastic = spec_draws(spec.operands)
    shift = jnp.broadcast_to(shift[:, None], rows.shape)
    if mask is not None:
        rows = jnp.where(mask, rows, shift)
    differences = exact_operation("sub", (rows, shift), spec.operands, keys[1] if stochastic else None)
    exponentials = evaluate_function(_elementwise.exp, differences, spec.operands, keys[2] if stochastic else None)
    return exponentials if mask is None else jnp.where(mask, exponentials, 0)


def _row_maximum(rows: Array, mask: Array | None) -> Array:
    """The largest element of each row, -inf for none, as a constant."""
    rows = rows if mask is None else jnp.where(mask, rows, -jnp.inf)
    lowest = jnp.full((rows.shape[0], 1), -jnp.inf, rows.dtype)
    return lax.stop_gradient(row_extremum("max", jnp.concatenate([lowest, rows], 1)))


def _accumulate_key(spec: MatmulSpec, key: Array | None, number: int) -> Array | None:
    return fold_key(key, number) if spec_draws(spec.accumulate) else None


def _row_softmax(rows: Array, spec: MatmulSpec, keys: _SoftmaxKeys, mask: Array | None) -> Array:
    e = _row_exponentials(rows, _row_maximum(rows, mask), spec, keys, mask)
    total = jnp.broadcast_to(row_sums(e, spec, keys)[:, None], e.shape)
    return exact_operation("div", (e, total), spec.accumulate, _accumulate_key(spec, keys[3], 0), carrier_range_pair(e))


def _row_logsumexp(rows: Array, spec: MatmulSpec, keys: _SoftmaxKeys, mask: Array | None) -> Array:
    largest = _row_maximum(rows, mask)
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    total = row_sums(_row_exponentials(rows, shift, spec, keys, mask), spec, keys)
    log_total = evaluate_function(_elementwise.log, total, spec.accumulate, _accumulate_key(spec, keys[3], 0))
    return exact_operation(
        "add", (log_total, shift), spec.accumulate, _accumulate_key(spec, keys[3], 1), carrier_range_pair(rows)
    )
