"""Products along axes, and cumulative sums and products, every step rounded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._arguments import Array, SpecLike, as_operands, carrier_of, checked_key, run
from jchop._bits import in_auto_mesh
from jchop._checks import check_bool
from jchop._core.arithmetic.operations import check_operation, draws, widened
from jchop._core.arithmetic.sums import cumulative, product_along
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import seed_words
from jchop._round.round_to_format import round_to_format
from jchop._settings import compiled, split
from jchop.gradients import CustomJvp
from jchop.math._family import check_backward
from jchop.math._parts import (
    Axes,
    Axis,
    as_axes,
    as_initial,
    as_mask,
    as_rows,
    check_axis,
    fold,
    mask_rows,
    reduced_in_auto_mesh,
)
from jchop.spec import Spec, as_spec

__all__ = ["cumprod", "cumsum", "prod"]


def prod(
    x: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    axis: Axis = None,
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
    spec, arrays = as_spec(spec), as_initial(x, initial)
    array = arrays[0]
    _check(spec, array)
    axes = as_axes(axis, array.ndim)
    mask = as_mask(where, array.shape)
    key = checked_key(key, draws(spec), spec)
    return run(partial(_reduce, spec, axes, keepdims, len(arrays) > 1), (*arrays, *mask), key)


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
    return _stepped("sum", x, spec, key, axis)


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
    return _stepped("prod", x, spec, key, axis)


# -- implementation ----------------------------------------------------------------------------------------------------


def _check(spec: Spec, array: Any) -> None:
    require_carrier(spec, carrier_of(array.dtype))
    check_operation(spec, array.dtype)
    check_backward(spec)


@partial(compiled, static_argnums=(0, 1, 2, 3), inline=True)
def _reduce(spec: Spec, axes: Axes, keepdims: bool, starts: bool, *operands_and_key: Any) -> Array:
    function = partial(_products, spec, axes, keepdims, starts)
    return reduced_in_auto_mesh(function, axes, keepdims, *operands_and_key)


def _products(spec: Spec, axes: Axes, keepdims: bool, starts: bool, *operands_and_key: Any) -> Array:
    """The operands are x, the initial value if `starts`, and the mask if there is one."""
    x, *more, key = operands_and_key
    keys = (None, None) if key is None else tuple(split(key))
    x = jnp.asarray(x)
    rows, outer = as_rows(widened(round_to_format(x, spec, keys[0])), axes)
    mask = mask_rows(more[-1] if len(more) > starts else None, x, axes)
    if starts:
        first = widened(round_to_format(jnp.asarray(more[0]), spec, fold(keys[0], 0)))
        rows = jnp.concatenate([jnp.broadcast_to(first, (rows.shape[0], 1)), rows], 1)
        mask = None if mask is None else jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
    result = _prod(spec, rows, mask, keys[1]).reshape(outer)
    return (jnp.expand_dims(result, axes) if keepdims else result).astype(x.dtype)


@partial(CustomJvp, nondiff_argnums=(0,))
def _prod(spec: Spec, rows: Array, mask: Array | None, key: Array | None) -> Array:
    return product_along(rows, 1, spec, None if key is None else seed_words(key), mask)


@_prod.defjvp
def _prod_jvp(spec: Spec, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    rows, mask, _ = primals

    def smooth(rows: Array) -> Array:
        return jnp.prod(rows if mask is None else jnp.where(mask, rows, 1), axis=1)

    return _prod(spec, *primals), jax.jvp(smooth, (rows,), tangents[:1])[1]


def _stepped(kind: str, x: Any, spec: SpecLike, key: Any, axis: int | None) -> Any:
    spec = as_spec(spec)
    (array,) = as_operands("x", (x,))
    _check(spec, array)
    axes = None if axis is None else (check_axis(axis, array.ndim),)
    return run(partial(_steps, kind, spec, axes), (array,), checked_key(key, draws(spec), spec))


@partial(compiled, static_argnums=(0, 1, 2), inline=True)
def _steps(kind: str, spec: Spec, axes: Axes | None, x: Array, key: Array | None) -> Array:
    along = [i - x.ndim for i in (range(x.ndim) if axes is None else axes)], ()
    like = None if axes is not None else lambda x, key: x.ravel()
    return in_auto_mesh(partial(_stepped_in_order, kind, spec, axes), x, key, along=along, like=like)


def _stepped_in_order(kind: str, spec: Spec, axes: Axes | None, x: Array, key: Array | None) -> Array:
    keys = (None, None) if key is None else tuple(split(key))
    values = widened(round_to_format(jnp.asarray(x), spec, keys[0]))
    return _cumulative(kind, spec, axes, values, keys[1]).astype(x.dtype)


@partial(CustomJvp, nondiff_argnums=(0, 1, 2))
def _cumulative(kind: str, spec: Spec, axes: Axes | None, x: Array, key: Array | None) -> Array:
    flat, axis = (x.ravel(), 0) if axes is None else (x, axes[0])
    return cumulative(kind, flat, axis, spec, None if key is None else seed_words(key))


@_cumulative.defjvp
def _cumulative_jvp(kind: str, spec: Spec, axes: Axes | None, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    smooth = partial({"sum": jnp.cumsum, "prod": jnp.cumprod}[kind], axis=None if axes is None else axes[0])
    return _cumulative(kind, spec, axes, *primals), jax.jvp(smooth, primals[:1], tangents[:1])[1]
