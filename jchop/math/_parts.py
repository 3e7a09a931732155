"""Functions with two results, an integer argument, or neighbours: frexp, modf, ldexp, diff; axes and masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.bit_ops import in_auto_mesh
from jchop._common.checks import check_int
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import check_operation, operation_words, widen_operand
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import seed_words
from jchop._round.arguments import (
    Array,
    SpecLike,
    as_array,
    as_operands,
    carrier_of_dtype,
    rounding_key,
    run_on_operands,
)
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.math import _carrier, _exact
from jchop.math._row import MathRow, as_dtype, call_row, check_cotangent_rounding, exact_operation

__all__ = ["diff", "frexp", "ldexp", "modf"]

#: Axes; None means all.
AxisArgument = int | Sequence[int] | None
#: The same, counted from 0.
AxisIndices = tuple[int, ...]

_FREXP_ROW = MathRow("frexp", ("x",), _carrier.carrier_frexp, "x = m 2^e", carrier_is_exact=True)
_MODF_ROW = MathRow("modf", ("x",), _carrier.carrier_modf, "x = f + i", carrier_is_exact=True)


def frexp(x: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The significand m and the exponent e of x = m 2^e, as `jax.numpy.frexp`: ``0.5 <= |m| < 1``.

    `x` and then m are rounded to `spec`; the integer e is not rounded. For zeros, infinities and NaN, e = 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and for the results, and m
            draws from `jax.random.fold_in` of the latter with 0. Default None.

    Returns:
        m, of the dtype of `x`, and e, int32.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`.

    Example:
        >>> import jchop as jc
        >>> significand, exponent = jc.math.frexp(12.3, "e5m2")
        >>> float(significand), int(exponent)
        (0.75, 4)
    """
    return call_row(_FREXP_ROW, (x,), spec, key)


def modf(x: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The fraction and the integer part of `x`, both of its sign, as `jax.numpy.modf`.

    `x` and then both parts are rounded to `spec`. An infinity has the fraction 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and for the results, which
            draw from `jax.random.fold_in` of the latter with 0 and 1. Default None.

    Returns:
        The fraction and the integer part, of the dtype of `x`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`.

    Example:
        >>> import jchop as jc
        >>> fraction, whole = jc.math.modf(-2.8, "e5m2")
        >>> float(fraction), float(whole)
        (-0.0, -3.0)
    """
    return call_row(_MODF_ROW, (x,), spec, key)


def ldexp(x: Any, n: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The exact x 2^n, rounded once, as `jax.numpy.ldexp`.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        n: integers, which broadcast against `x`; they are not rounded.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and for the result.

    Returns:
        An array of the dtype of `x`. The derivative by `x` is 2^n.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or if `n` is not of an integer dtype.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.ldexp(0.3, -5, "e5m2"))
        0.009765625
    """
    spec = as_spec(spec)
    (array,), exponent = as_operands("x", (x,)), as_array("n", n)
    if not jnp.issubdtype(exponent.dtype, jnp.integer):
        raise TypeError(f"n has dtype {exponent.dtype}; allowed: integers")
    require_carrier(spec, carrier_of_dtype(array.dtype))
    check_operation(spec, array.dtype)
    check_cotangent_rounding(spec)
    if isinstance(exponent, np.ndarray):  # 64-bit integers would lose their high words
        exponent = np.clip(exponent, -(1 << 30), 1 << 30).astype(np.int32)
    return run_on_operands(
        partial(_traced_ldexp, spec), (array, exponent), rounding_key(key, spec.rounding.stochastic, spec)
    )


@partial(always_jit, static_argnums=0, inline=True)
def _traced_ldexp(spec: Spec, x: Array, n: Array, key: Array | None) -> Array:
    keys = [None] * 2 if key is None else list(split_prng_key(key))
    values = widen_operand(round_to_format(jnp.asarray(x), spec, keys[0]))
    return as_dtype(_ldexp_op(spec, *jnp.broadcast_arrays(values, n), keys[1]), x.dtype)


@partial(CustomJvp, nondiff_argnums=(0,))
def _ldexp_op(spec: Spec, x: Array, n: Array, key: Array | None) -> Array:
    return _exact.exact_ldexp(x, n, spec, None if key is None else operation_words(seed_words(key), x))


@_ldexp_op.defjvp
def _ldexp_op_jvp(spec: Spec, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, n, key = primals

    def smooth(x: Array) -> Array:
        return round_to_format(jnp.ldexp(x, n), spec, key)

    return _ldexp_op(spec, *primals), jax.jvp(smooth, (x,), tangents[:1])[1]


def diff(x: Any, spec: SpecLike, key: Array | None = None, *, n: int = 1, axis: int = -1) -> Any:
    """Differences of neighbours, x[i+1] - x[i], applied `n` times, each rounded once, as `jax.numpy.diff`.

    Args:
        x: float16, bfloat16, float32 or float64, of at least one axis; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into n + 1, for `x` and for each difference.
        n: number of repetitions. Default 1.
        axis: axis of the differences. Default -1.

    Returns:
        An array of the dtype of `x`, shorter by `n` along `axis`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for an axis that `x` does not have.

    Example:
        >>> import jchop as jc
        >>> jc.math.diff([1.0, 1.25, 6.0], "e5m2").tolist()
        [0.25, 5.0]
    """
    spec = as_spec(spec)
    (array,), n = as_operands("x", (x,)), check_int("n", n, 0)
    axis = check_axis(axis, array.ndim)
    require_carrier(spec, carrier_of_dtype(array.dtype))
    check_operation(spec, array.dtype)
    check_cotangent_rounding(spec)
    key = rounding_key(key, spec.rounding.stochastic, spec)
    return run_on_operands(partial(_traced_diff, spec, n, axis), (array,), key)


@partial(always_jit, static_argnums=(0, 1, 2), inline=True)
def _traced_diff(spec: Spec, n: int, axis: int, x: Array, key: Array | None) -> Array:
    keys = [None] * (n + 1) if key is None else list(split_prng_key(key, n + 1))
    differences = jnp.moveaxis(widen_operand(round_to_format(jnp.asarray(x), spec, keys[0])), axis, 0)
    for step_key in keys[1:]:
        differences = exact_operation("sub", (differences[1:], differences[:-1]), spec, step_key)
    return as_dtype(jnp.moveaxis(differences, 0, axis), x.dtype)


def check_axis(axis: Any, ndim: int, name: str = "axis") -> int:
    """`axis` as a nonnegative integer."""
    if not ndim:
        raise ValueError(f"{name}={axis!r}, but x is a scalar; it needs at least one axis")
    return check_int(name, axis, -ndim, ndim - 1) % ndim


def as_axis_indices(axis: Any, ndim: int) -> AxisIndices:
    """The axes as nonnegative integers, in order; None means all."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(check_axis(a, ndim) for a in (axis if isinstance(axis, Sequence) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis={axis!r} names an axis twice")
    return tuple(sorted(axes))


def as_mask_operands(where: Any, shape: tuple[int, ...]) -> tuple[Array | np.ndarray, ...]:
    """The argument `where` as an operand, which must broadcast to `shape`; nothing for None."""
    if where is None:
        return ()
    mask = as_array("where", where)
    if mask.dtype != np.bool_:
        raise TypeError(f"where has dtype {mask.dtype}; it must be of booleans")
    try:
        fits = np.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"where has shape {mask.shape}, which does not broadcast to that of x, {shape}")
    return (mask,)


def as_reduction_operands(x: Any, initial: Any) -> list[Array | np.ndarray]:
    """`x`, and `initial` if it is given, of one dtype."""
    if initial is None:
        return as_operands("x", (x,))
    arrays = as_operands(("x", "initial"), (x, initial))
    if arrays[1].shape != ():
        raise ValueError(f"initial has shape {arrays[1].shape}; it must be a scalar")
    return arrays


def as_rows(x: Array, axes: AxisIndices) -> tuple[Array, tuple[int, ...]]:
    """A matrix with the elements of `axes` in each row, in C order, and the shape of the other axes."""
    others = [a for a in range(x.ndim) if a not in axes]
    outer = tuple(x.shape[a] for a in others)
    return jnp.transpose(x, (*others, *axes)).reshape(math.prod(outer), math.prod(x.shape[a] for a in axes)), outer


def from_rows(rows: Array, axes: AxisIndices, shape: tuple[int, ...]) -> Array:
    """The inverse of `as_rows`: an array of `shape`."""
    order = [*(a for a in range(len(shape)) if a not in axes), *axes]
    return jnp.transpose(rows.reshape([shape[a] for a in order]), [order.index(a) for a in range(len(shape))])


def mask_rows(mask: Array | None, x: Array, axes: AxisIndices) -> Array | None:
    """The mask of each row of `as_rows`."""
    return None if mask is None else as_rows(jnp.broadcast_to(mask, x.shape), axes)[0]


def reduce_in_auto_mesh(
    function: Callable[..., Array], axes: AxisIndices, keepdims: bool | None, x: Array, *more: Any
) -> Array:
    """`in_auto_mesh` of a function of `x`, masks and a key that sums along `axes`; `keepdims` is None if these stay."""
    along = [axis - jnp.ndim(x) for axis in axes]
    like = None if keepdims is None else lambda x, *_: jnp.sum(x, axes, keepdims=keepdims)
    return in_auto_mesh(function, x, *more, along=[along] * (1 + len(more)), like=like)


def fold_key(key: Array | None, number: int) -> Array | None:
    """A separate key, `jax.random.fold_in` of a key; None for None."""
    return None if key is None else jax.random.fold_in(key, number)
