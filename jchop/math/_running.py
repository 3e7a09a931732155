"""Products along axes, and cumulative sums and products, every step rounded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.bit_ops import in_auto_mesh
from jchop._common.checks import check_bool
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import check_operation, spec_draws, widen_operand
from jchop._core.matmul.sums import cumulative_along, product_along
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import seed_words
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
    fold_key,
    mask_rows,
    reduce_in_auto_mesh,
)
from jchop.math._row import check_cotangent_rounding

__all__ = ["cumprod", "cumsum", "prod"]


def prod(
    x: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
    keepdims: bool = False,
    where: Any = None,
    initial: Any = None,
) -> Any:
    """The product of elements, sequentially from 1, every multiplication rounded.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and for the products. Every
            step has different seeds. Default None.
        axis: an axis, or several, with elements in C order; None (default): all.
        keepdims: whether to keep the axes, with length one. Default False.
        where: booleans, which broadcast to the shape of `x`; an element at False is left out. Default None: all.
        initial: a number, the first factor of each product. It is rounded to `spec` and draws from
            `jax.random.fold_in` of the first part with 0. Default None.

    Returns:
        An array of the dtype of `x`; 1 for no elements. The derivative is the derivative of `jax.numpy.prod` at the
        rounded elements.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for an axis that `x` does not have.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.prod([3.0, 3.0, 3.0], "e5m2"))
        24.0
    """
    check_bool("keepdims", keepdims)
    spec, arrays = as_spec(spec), as_reduction_operands(x, initial)
    array = arrays[0]
    _check_running_spec(spec, array)
    axes = as_axis_indices(axis, array.ndim)
    mask = as_mask_operands(where, array.shape)
    key = rounding_key(key, spec_draws(spec), spec)
    return run_on_operands(partial(_traced_prod, spec, axes, keepdims, len(arrays) > 1), (*arrays, *mask), key)


def cumsum(x: Any, spec: SpecLike, key: Array | None = None, *, axis: int | None = None) -> Any:
    """Cumulative sums: c <- A(c + x_k) from +0, every addition rounded.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and for the sums. Every step
            has different seeds. Default None.
        axis: axis of the sums; None (default): over all elements, in C order, as in `jax.numpy.cumsum`.

    Returns:
        An array of the dtype of `x`, and of its shape except for ``axis=None``.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for an axis that `x` does not have.

    Example:
        >>> import jchop as jc
        >>> jc.math.cumsum([1.0, 0.25, 0.125, 4.0], "e5m2").tolist()
        [1.0, 1.25, 1.5, 6.0]
    """
    return _run_cumulative("sum", x, spec, key, axis)


def cumprod(x: Any, spec: SpecLike, key: Array | None = None, *, axis: int | None = None) -> Any:
    """Cumulative products: c <- A(c x_k) from 1, every multiplication rounded.

    Args:
        x: as in `jchop.math.cumsum`.
        spec: as in `jchop.math.cumsum`.
        key: as in `jchop.math.cumsum`.
        axis: as in `jchop.math.cumsum`.

    Returns:
        As `jchop.math.cumsum`.

    Raises:
        TypeError, ValueError: as for `jchop.math.cumsum`.

    Example:
        >>> import jchop as jc
        >>> jc.math.cumprod([3.0, 3.0, 3.0], "e5m2").tolist()
        [3.0, 8.0, 24.0]
    """
    return _run_cumulative("prod", x, spec, key, axis)


# -- implementation ----------------------------------------------------------------------------------------------------


def _check_running_spec(spec: Spec, array: Any) -> None:
    require_carrier(spec, carrier_of_dtype(array.dtype))
    check_operation(spec, array.dtype)
    check_cotangent_rounding(spec)


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _traced_prod(spec: Spec, axes: AxisIndices, keepdims: bool, has_initial: bool, *operands_and_key: Any) -> Array:
    function = partial(_prod_along_axes, spec, axes, keepdims, has_initial)
    return reduce_in_auto_mesh(function, axes, keepdims, *operands_and_key)


def _prod_along_axes(spec: Spec, axes: AxisIndices, keepdims: bool, has_initial: bool, *operands_and_key: Any) -> Array:
    """The operands are x, the initial value if `has_initial`, and the mask if there is one."""
    x, *others, key = operands_and_key
    keys = (None, None) if key is None else tuple(split_prng_key(key))
    x = jnp.asarray(x)
    rows, outer_shape = as_rows(widen_operand(round_to_format(x, spec, keys[0])), axes)
    mask = mask_rows(others[-1] if len(others) > has_initial else None, x, axes)
    if has_initial:
        start = widen_operand(round_to_format(jnp.asarray(others[0]), spec, fold_key(keys[0], 0)))
        rows = jnp.concatenate([jnp.broadcast_to(start, (rows.shape[0], 1)), rows], 1)
        mask = None if mask is None else jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
    result = _row_products(spec, rows, mask, keys[1]).reshape(outer_shape)
    return (jnp.expand_dims(result, axes) if keepdims else result).astype(x.dtype)


@partial(CustomJvp, nondiff_argnums=(0,))
def _row_products(spec: Spec, rows: Array, mask: Array | None, key: Array | None) -> Array:
    return product_along(rows, 1, spec, None if key is None else seed_words(key), mask)


@_row_products.defjvp
def _row_products_jvp(spec: Spec, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    rows, mask, _ = primals

    def carrier_product(rows: Array) -> Array:
        return jnp.prod(rows if mask is None else jnp.where(mask, rows, 1), axis=1)

    return _row_products(spec, *primals), jax.jvp(carrier_product, (rows,), tangents[:1])[1]


def _run_cumulative(operation: str, x: Any, spec: SpecLike, key: Any, axis: int | None) -> Any:
    spec = as_spec(spec)
    (array,) = as_operands("x", (x,))
    _check_running_spec(spec, array)
    axes = None if axis is None else (check_axis(axis, array.ndim),)
    return run_on_operands(
        partial(_traced_cumulative, operation, spec, axes), (array,), rounding_key(key, spec_draws(spec), spec)
    )


@partial(always_jit, static_argnums=(0, 1, 2), inline=True)
def _traced_cumulative(operation: str, spec: Spec, axes: AxisIndices | None, x: Array, key: Array | None) -> Array:
    along = [i - x.ndim for i in (range(x.ndim) if axes is None else axes)], ()
    like = None if axes is not None else lambda x, key: x.ravel()
    return in_auto_mesh(partial(_cumulative_along_axes, operation, spec, axes), x, key, along=along, like=like)


def _cumulative_along_axes(operation: str, spec: Spec, axes: AxisIndices | None, x: Array, key: Array | None) -> Array:
    keys = (None, None) if key is None else tuple(split_prng_key(key))
    values = widen_operand(round_to_format(jnp.asarray(x), spec, keys[0]))
    return _cumulative_op(operation, spec, axes, values, keys[1]).astype(x.dtype)


@partial(CustomJvp, nondiff_argnums=(0, 1, 2))
def _cumulative_op(operation: str, spec: Spec, axes: AxisIndices | None, x: Array, key: Array | None) -> Array:
    values, axis = (x.ravel(), 0) if axes is None else (x, axes[0])
    return cumulative_along(operation, values, axis, spec, None if key is None else seed_words(key))


@_cumulative_op.defjvp
def _cumulative_op_jvp(
    operation: str, spec: Spec, axes: AxisIndices | None, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    cumulate = partial({"sum": jnp.cumsum, "prod": jnp.cumprod}[operation], axis=None if axes is None else axes[0])
    return _cumulative_op(operation, spec, axes, *primals), jax.jvp(cumulate, primals[:1], tangents[:1])[1]
