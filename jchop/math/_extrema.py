"""The largest and the smallest element along axes, and their indices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_bool
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import spec_draws
from jchop._core.rounding.grid import require_carrier
from jchop._round.arguments import Array, SpecLike, as_operands, carrier_of_dtype, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.math._parts import (
    AxisArgument,
    AxisIndices,
    as_axis_indices,
    as_mask_operands,
    as_reduction_operands,
    as_rows,
    check_axis,
    mask_rows,
)
from jchop.math._row import check_cotangent_rounding

__all__ = ["argmax", "argmin", "max", "min"]


def max(
    x: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
    keepdims: bool = False,
    where: Any = None,
    initial: Any = None,
) -> Any:
    """The largest element, as `jax.numpy.max`; NaN if one is.

    The elements are rounded to `spec`, and one of them is chosen, by comparisons of bits: subnormal numbers are not
    read as zero, and +0 is above -0. So nothing is rounded after that, and the order does not matter.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and for `initial`. Default
            None.
        axis: an axis, or several; None (default): all.
        keepdims: whether to keep the axes, with length one. Default False.
        where: booleans, which broadcast to the shape of `x`; an element at False is left out. It requires `initial`.
            Default None: all.
        initial: a number, one more element of each group. Default None.

    Returns:
        An array of the dtype of `x`; NumPy if `x` is. The derivative is as in `jax.numpy.max`: equal elements share it.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`; for an axis that `x` does not have, no elements without
            `initial`, or `where` without `initial`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.max([1.0, 1.3, -2.0], "e5m2"))
        1.25
    """
    return _run_extremum("max", x, spec, key, axis, keepdims, where, initial)


def min(
    x: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
    keepdims: bool = False,
    where: Any = None,
    initial: Any = None,
) -> Any:
    """The smallest element, as `jax.numpy.min`, otherwise as `jchop.math.max`.

    Args:
        x: as in `jchop.math.max`.
        spec: as in `jchop.math.max`.
        key: as in `jchop.math.max`.
        axis: as in `jchop.math.max`.
        keepdims: as in `jchop.math.max`.
        where: as in `jchop.math.max`.
        initial: as in `jchop.math.max`.

    Returns:
        As `jchop.math.max`.

    Raises:
        TypeError, ValueError: as for `jchop.math.max`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.min([1.0, 1.3, -2.3], "e5m2"))
        -2.5
    """
    return _run_extremum("min", x, spec, key, axis, keepdims, where, initial)


def argmax(x: Any, spec: SpecLike, key: Array | None = None, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """The index of the first largest element of the rounded array, or of the first NaN, as `jax.numpy.argmax`.

    Bits are compared, except that -0 and +0 are equal.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; `x` draws from the first of two parts. Default None.
        axis: an axis; None (default): all elements, in C order.
        keepdims: whether to keep the axes, with length one. Default False.

    Returns:
        int32, NumPy if `x` is. There is no derivative.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for an axis that `x` does not have, or no elements.

    Example:
        >>> import jchop as jc
        >>> int(jc.math.argmax([2.9, 3.0, 3.1], "e5m2"))
        0
    """
    return _run_arg_extremum("max", x, spec, key, axis, keepdims)


def argmin(x: Any, spec: SpecLike, key: Array | None = None, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """The index of the first smallest element of the rounded array, otherwise as `jchop.math.argmax`.

    Args:
        x: as in `jchop.math.argmax`.
        spec: as in `jchop.math.argmax`.
        key: as in `jchop.math.argmax`.
        axis: as in `jchop.math.argmax`.
        keepdims: as in `jchop.math.argmax`.

    Returns:
        As `jchop.math.argmax`.

    Raises:
        TypeError, ValueError: as for `jchop.math.argmax`.

    Example:
        >>> import jchop as jc
        >>> int(jc.math.argmin([3.1, 3.0, 2.9], "e5m2"))
        0
    """
    return _run_arg_extremum("min", x, spec, key, axis, keepdims)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _run_extremum(
    extremum: str, x: Any, spec: SpecLike, key: Any, axis: AxisArgument, keepdims: bool, where: Any, initial: Any
) -> Any:
    check_bool("keepdims", keepdims)
    arrays = as_reduction_operands(x, initial)
    spec, axes = _check_extremum_spec(arrays[0], spec), as_axis_indices(axis, arrays[0].ndim)
    mask = as_mask_operands(where, arrays[0].shape)
    if initial is None:
        if mask:
            raise ValueError("where without initial: a group without elements would have no result; pass initial")
        _check_nonempty_axes(arrays[0].shape, axes)
    function = partial(_traced_extremum, extremum, spec, axes, keepdims, len(arrays) > 1)
    return run_on_operands(function, (*arrays, *mask), rounding_key(key, spec_draws(spec), spec))


def _run_arg_extremum(kind: str, x: Any, spec: SpecLike, key: Any, axis: int | None, keepdims: bool) -> Any:
    check_bool("keepdims", keepdims)
    (array,) = as_operands("x", (x,))
    spec = _check_extremum_spec(array, spec)
    axes = as_axis_indices(axis if axis is None else check_axis(axis, array.ndim), array.ndim)
    _check_nonempty_axes(array.shape, axes)
    return run_on_operands(
        partial(_traced_arg_extremum, kind, spec, axes, keepdims), (array,), rounding_key(key, spec_draws(spec), spec)
    )


def _check_extremum_spec(array: Any, spec: SpecLike) -> Spec:
    spec = as_spec(spec)
    require_carrier(spec, carrier_of_dtype(array.dtype))
    check_cotangent_rounding(spec)
    return spec


def _check_nonempty_axes(shape: tuple[int, ...], axes: AxisIndices) -> None:
    if any(not shape[axis] for axis in axes):
        raise ValueError(f"x has shape {shape}, so there are no elements to choose from")


# -- the traced part ---------------------------------------------------------------------------------------------------


@partial(always_jit, static_argnums=(0, 1, 2, 3, 4), inline=True)
def _traced_extremum(
    extremum: str, spec: Spec, axes: AxisIndices, keepdims: bool, has_initial: bool, *operands_and_key: Any
) -> Array:
    """The operands are x, the initial value if `has_initial`, and the mask if there is one."""
    x, *others, key = operands_and_key
    keys = (None, None) if key is None else tuple(split_prng_key(key))
    x = jnp.asarray(x)
    rows, outer_shape = as_rows(round_to_format(x, spec, keys[0]), axes)
    if has_initial:
        start = jnp.broadcast_to(round_to_format(jnp.asarray(others[0]), spec, keys[1]), (rows.shape[0], 1))
        mask = mask_rows(others[1] if len(others) > 1 else None, x, axes)
        rows = rows if mask is None else jnp.where(mask, rows, start)
        rows = jnp.concatenate([start, rows], 1)
    result = row_extremum(extremum, rows).reshape(outer_shape)
    return jnp.expand_dims(result, axes) if keepdims else result


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _traced_arg_extremum(
    extremum: str, spec: Spec, axes: AxisIndices, keepdims: bool, x: Array, key: Array | None
) -> Array:
    values = round_to_format(jnp.asarray(x), spec, None if key is None else split_prng_key(key)[0])
    rows, outer_shape = as_rows(lax.stop_gradient(values), axes)
    order_keys = sort_keys(rows, zeros_equal=True)
    is_nan = jnp.isnan(rows)
    if extremum == "max":
        indices = jnp.argmax(jnp.where(is_nan, jnp.iinfo(order_keys.dtype).max, order_keys), 1)
    else:
        indices = jnp.argmin(jnp.where(is_nan, jnp.iinfo(order_keys.dtype).min, order_keys), 1)
    result = indices.astype(jnp.int32).reshape(outer_shape)
    return jnp.expand_dims(result, axes) if keepdims else result


def sort_keys(x: Array, *, zeros_equal: bool = False) -> Array:
    """Integers in the order of the values of a carrier; -0 is next below +0, or equal."""
    sign, magnitude = bit_ops.split_sign(x, CARRIERS[x.dtype.name])
    return bit_ops.ordered_integers(sign, magnitude) if zeros_equal else jnp.where(sign != 0, ~magnitude, magnitude)


@partial(CustomJvp, nondiff_argnums=(0,))
def row_extremum(extremum: str, rows: Array) -> Array:
    """The largest or the smallest element of each row, by bits; NaN if one is."""
    carrier = CARRIERS[rows.dtype.name]
    order_keys = sort_keys(rows)
    best = (jnp.max if extremum == "max" else jnp.min)(order_keys, 1)
    is_negative = best < 0
    value = bit_ops.join_sign(
        jnp.where(is_negative, carrier.sign_bit, 0).astype(best.dtype), jnp.where(is_negative, ~best, best), carrier
    )
    return jnp.where(jnp.isnan(rows).any(1), jnp.asarray(jnp.nan, rows.dtype), value)


@row_extremum.defjvp
def _row_extremum_jvp(extremum: str, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The derivative, as in `jax.numpy`: elements that are equal to the result share it."""
    carrier_extremum = partial(jnp.max if extremum == "max" else jnp.min, axis=1)
    return row_extremum(extremum, *primals), jax.jvp(carrier_extremum, primals, tangents)[1]
