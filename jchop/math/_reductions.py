"""Reductions: sums, means, variances, norms, products, extrema, softmax; every step is rounded, in a named order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import gather_axes, has_sharding, reshard_like
from jchop._common.checks import check, check_bool, check_int
from jchop._core.matmul.operations import operation_carrier
from jchop._kernels.primitive import materialize
from jchop._round.arguments import Array, Key, as_array, as_operands
from jchop._spec.accumulation import MatmulSpec, SumSpecLike, as_matmul_spec
from jchop._spec.spec import SpecLike
from jchop.math._call import (
    Axes,
    AxisIndices,
    as_axis_indices,
    as_mask_operands,
    as_math_operands,
    as_sum_spec,
    check_axis,
    run_emulated,
    run_sums,
    without_gradient,
)

__all__ = ["argmax", "argmin", "cumprod", "cumsum", "logsumexp", "max", "mean", "min", "norm", "prod", "softmax"]
__all__ += ["std", "sum", "var"]

# -- sums --------------------------------------------------------------------------------------------------------------


def sum(
    x: Any,
    spec: SumSpecLike,
    key: Key = None,
    *,
    axis: Axes = None,
    keepdims: bool = False,
    where: Any = None,
    initial: Any = None,
) -> Any:
    """The sum of elements, every addition rounded, in the order of `spec`.

    It is `jchop.math.matmul` of `x` and ones, without products: c <- A(c + x_k) from c = +0 in sequential order.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: a `jchop.MatmulSpec` without a product; ``accumulate=None`` is the carrier. A `jchop.Spec`, a format or
            text applies to `x` and every addition, in sequential order.
        key: a typed key, required if `spec` is stochastic. Default None.
        axis: an axis, or several, with elements in C order; None (default): all.
        keepdims: whether to keep the axes, with length one. Default False.
        where: booleans, which broadcast to the shape of `x`; an element at False is +0 in its place in the order.
            Default None: all elements.
        initial: a number, an element before the others in the order of each sum: in sequential order the start of c. It
            is rounded to ``spec.operands``. Default None.

    Returns:
        An array of the dtype of `x`; NumPy if `x` is. An empty sum is +0. The derivative is 1.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`, or for an axis that `x` does not have.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> float(jc.math.sum(jnp.ones(100), "e5m2"))
        8.0
        >>> float(jc.math.sum(jnp.ones(100), jc.MatmulSpec(accumulate="e5m2", order="pairwise")))
        96.0
    """
    return _run_reduction(_sum, x, as_sum_spec(spec), key, axis, keepdims, where, initial)


def mean(
    x: Any, spec: SumSpecLike, key: Key = None, *, axis: Axes = None, keepdims: bool = False, where: Any = None
) -> Any:
    """The sum of elements as in `jchop.math.sum`, divided by their number n; the quotient is rounded once.

    n is an integer and is not rounded; the quotient is rounded to ``spec.accumulate``.

    Args:
        x: as in `jchop.math.sum`.
        spec: as in `jchop.math.sum`.
        key: as in `jchop.math.sum`.
        axis: as in `jchop.math.sum`.
        keepdims: as in `jchop.math.sum`.
        where: as in `jchop.math.sum`; n is the number of elements at True. Default None.

    Returns:
        An array of the dtype of `x`; NaN for no elements.

    Raises:
        TypeError, ValueError: as for `jchop.math.sum`, or if the carrier does not hold n.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.mean([1.0, 2.0, 4.0], "bfloat16"))
        2.328125
    """
    return _run_reduction(_mean, x, as_sum_spec(spec), key, axis, keepdims, where)


def var(
    x: Any,
    spec: SumSpecLike,
    key: Key = None,
    *,
    axis: Axes = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The variance by two passes: d_k = x_k - mean, then the sum of d_k d_k divided by n - ddof.

    Every operation is rounded. The mean is rounded as in `jchop.math.mean`. The differences are rounded to
    ``spec.operands``, because they are operands of products. Products, sums and their order are as in
    `jchop.math.matmul`. The quotient is rounded to ``spec.accumulate``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: a `jchop.MatmulSpec`; or a `jchop.Spec`, a format or text for every rounding, in sequential order.
        key: a typed key, required if `spec` is stochastic. Default None.
        axis: as in `jchop.math.sum`.
        ddof: an integer below n, which is subtracted from n. Default 0.
        keepdims: as in `jchop.math.sum`.
        where: as in `jchop.math.sum`, of elements and of squares; n is the number of elements at True. Default None.

    Returns:
        An array of the dtype of `x`; NaN if `where` leaves no more than `ddof` elements. The derivative is the
        derivative of the formula in the carrier, at rounded values.

    Raises:
        TypeError, ValueError: as for `jchop.math.sum`, or for `ddof` >= n.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.var([1.0, 2.0, 4.0], "bfloat16"))
        1.5625
    """
    return _run_reduction(_variance, x, as_matmul_spec(spec), key, axis, keepdims, where, ddof=check_int("ddof", ddof))


def std(
    x: Any,
    spec: SumSpecLike,
    key: Key = None,
    *,
    axis: Axes = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The square root of `jchop.math.var`, rounded once to ``spec.accumulate``.

    Args:
        x: as in `jchop.math.var`.
        spec: as in `jchop.math.var`.
        key: as in `jchop.math.var`.
        axis: as in `jchop.math.var`.
        ddof: as in `jchop.math.var`.
        keepdims: as in `jchop.math.var`.
        where: as in `jchop.math.var`.

    Returns:
        An array of the dtype of `x`.

    Raises:
        TypeError, ValueError: as for `jchop.math.var`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.std([1.0, 2.0, 4.0], "bfloat16"))
        1.25
    """
    return _run_reduction(_deviation, x, as_matmul_spec(spec), key, axis, keepdims, where, ddof=check_int("ddof", ddof))


def norm(
    x: Any, spec: SumSpecLike, key: Key = None, *, ord: float | None = None, axis: Axes = None, keepdims: bool = False
) -> Any:
    """A norm of vectors: ``√(Σ x_k²)``, ``Σ |x_k|`` or ``max |x_k|``, every operation rounded, without scaling.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: as in `jchop.math.var`; with ``ord=1`` as in `jchop.math.sum`, and with infinity only the operands are
            rounded.
        key: a typed key, required if `spec` is stochastic. Default None.
        ord: None or 2 for the Euclidean norm (default), 1, or infinity.
        axis: as in `jchop.math.sum`; None (default): the norm of all elements as one vector.
        keepdims: as in `jchop.math.sum`.

    Returns:
        An array of the dtype of `x`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sum`; for another `ord`, or one that is a matrix norm in
            `jax.numpy.linalg.norm`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.norm([3.0, 4.0], "e5m2")), float(jc.math.norm([3.0, 4.0], "e5m2", ord=1))
        (5.0, 7.0)
    """
    check(ord in _VECTOR_NORMS, f"ord={ord!r} must be one of None, 1, 2, inf")
    has_several_axes = axis is None or isinstance(axis, Sequence)
    if ord is not None and has_several_axes and as_array("x", x).ndim > 1:
        raise ValueError(f"ord={ord!r} with axis={axis!r} is a norm of matrices; pass one axis, or ord=None")
    mspec = as_sum_spec(spec) if ord == 1 else as_matmul_spec(spec)
    return _run_reduction(_VECTOR_NORMS[ord], x, mspec, key, axis, keepdims)


def softmax(x: Any, spec: SumSpecLike, key: Key = None, *, axis: Axes = -1, where: Any = None) -> Any:
    """e^x / Σ e^x along an axis, as `jax.nn.softmax`, every operation rounded.

    Let m be the largest element, which is exact. Then d_k = x_k - m and e_k = e^(d_k) are rounded to
    ``spec.operands``, e_k as in `jchop.math.exp`. The sum s = Σ e_k is as in `jchop.math.sum`, in the order of `spec`.
    Then e_k / s is rounded to ``spec.accumulate``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: as in `jchop.math.sum`.
        key: a typed key, required if `spec` is stochastic. Default None.
        axis: an axis, or several, which count as one; None: all. Default -1.
        where: booleans, which broadcast to the shape of `x`. An element at False is left out of m, counts as +0 in the
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
    return _run_reduction(_softmax, x, as_sum_spec(spec), key, axis, True, where)


def logsumexp(
    x: Any, spec: SumSpecLike, key: Key = None, *, axis: Axes = None, keepdims: bool = False, where: Any = None
) -> Any:
    """The logarithm of Σ e^x along axes, as `jax.nn.logsumexp`, every operation rounded.

    Let m be the largest element, or 0 if that is not finite. Then d_k = x_k - m and e_k = e^(d_k) are rounded to
    ``spec.operands``. The sum s = Σ e_k is as in `jchop.math.sum`. Both log(s), as in `jchop.math.log`, and log(s) + m
    are rounded to ``spec.accumulate``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: as in `jchop.math.sum`.
        key: a typed key, required if `spec` is stochastic. Default None.
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
    return _run_reduction(_logsumexp, x, as_sum_spec(spec), key, axis, keepdims, where)


def _run_reduction(
    function: Any, x: Any, spec: MatmulSpec, key: Any, axis: Axes, keepdims: bool, *masked: Any, **options: Any
) -> Any:
    """A sum, or a function made of sums, over axes of `x`, in an emulated order."""
    arrays, axes, mask = _reduction_operands(x, axis, keepdims, *masked)
    count = math.prod(arrays[0].shape[a] for a in axes)
    if function in (_mean, _variance, _deviation):
        _check_count(count, options.get("ddof", 0), bool(mask), arrays[0].dtype)
    more = {_sum: "", _softmax: "operands accumulate", _logsumexp: "operands accumulate"}.get(function, "accumulate")
    options |= {"axes": axes, "keepdims": keepdims, "has_initial": len(arrays) > 1}
    operands = [*arrays, *mask]
    if function is not _softmax:  # whose results have the axes of x
        operands = _gather_summed_axes(operands, axes)
    return run_sums(function, spec, operands, key, more, **options)


def _reduction_operands(
    x: Any, axis: Axes, keepdims: bool, where: Any = None, initial: Any = None
) -> tuple[list[Any], AxisIndices, tuple[Any, ...]]:
    """`x`, and `initial` if it is given, of one dtype; the axes; and the mask if there is one."""
    check_bool("keepdims", keepdims)
    arrays = as_operands("x", (x,)) if initial is None else as_operands(("x", "initial"), (x, initial))
    for scalar in arrays[1:]:
        check(scalar.shape == (), f"initial has shape {scalar.shape}; it must be a scalar")
    return arrays, as_axis_indices(axis, arrays[0].ndim), as_mask_operands(where, arrays[0].shape)


def _check_count(count: int, ddof: int, has_mask: bool, dtype: Any) -> None:
    """Refuses numbers of elements that the carrier does not hold, or too few elements."""
    check(ddof <= 0 or ddof < count, f"ddof={ddof} must be less than the number of elements, {count}")
    carrier, divisor = operation_carrier(dtype), abs(count - ddof)
    if has_mask and count > 2 << carrier.fraction:
        raise ValueError(f"{count} elements may be more than {carrier.name} counts exactly; cast x to float64")
    more = divisor.bit_length() - carrier.fraction - 1
    if not has_mask and more > 0 and divisor % (1 << more):
        raise ValueError(f"the number of elements, {divisor}, is not held by {carrier.name}; cast x to float64")


def _gather_summed_axes(arrays: Sequence[Any], axes: Sequence[int]) -> list[Any]:
    """Arrays without an explicit sharding along axes, before the program is traced, so that it has the same draws."""
    ndim = arrays[0].ndim
    return [gather_axes(x, [axis - ndim for axis in axes]) if x.ndim == ndim else x for x in arrays]


def _rows(x: Array, axes: AxisIndices) -> Array:
    """The elements of `axes` as the last axis, in C order."""
    others = [a for a in range(x.ndim) if a not in axes]
    shape = [x.shape[a] for a in others]
    return jnp.transpose(x, (*others, *axes)).reshape(*shape, math.prod(x.shape[a] for a in axes))


def _sharding_of(x: Array, last: int | None = None) -> Any:
    """The explicit sharding of the axes before `last`; None without one."""
    sharding = jax.typeof(x).sharding
    return sharding.update(spec=jax.P(*sharding.spec[:last])) if has_sharding(x) else None


def _with_first(x: Array, first: Array, axes: AxisIndices) -> Array:
    """The elements of `axes` as the last axis, after another one."""
    rows = _rows(x, axes)
    start = lax.broadcast_in_dim(first, (*rows.shape[:-1], 1), (), out_sharding=_sharding_of(rows))
    return jnp.concatenate([start, rows], -1)


def _masked(x: Array, mask: tuple[Array, ...], other: Any = 0) -> Array:
    """The numbers, with `other` where a mask is False."""
    return jnp.where(mask[0], x, jnp.asarray(other, x.dtype)) if mask else x


def _sum(x: Array, *more: Array, axes: AxisIndices, keepdims: bool, has_initial: bool = False) -> Array:
    x = _masked(x, more[has_initial:])
    if not has_initial:
        return jnp.sum(x, axes, keepdims=keepdims)
    total = jnp.sum(_with_first(x, more[0], axes), -1)
    return jnp.expand_dims(total, axes) if keepdims else total


def _mean(x: Array, *mask: Array, axes: AxisIndices, keepdims: bool, **_: Any) -> Array:
    return _sum(x, *mask, axes=axes, keepdims=keepdims) / _count(x, mask, axes, keepdims)


def _count(x: Array, mask: tuple[Array, ...], axes: AxisIndices, keepdims: bool) -> Array:
    """The number of elements of each sum, an integer."""
    if mask:
        return jnp.sum(jnp.broadcast_to(mask[0], x.shape), axes, keepdims=keepdims, dtype=jnp.int32)
    return jnp.asarray(math.prod(x.shape[a] for a in axes), jnp.int32)


def _variance(x: Array, *mask: Array, axes: AxisIndices, keepdims: bool, ddof: int, **_: Any) -> Array:
    # Quirk `long_fusion_compiled_for_minutes` of `_core/xla/cpu.py`: each difference would repeat the mean.
    centre = materialize(_mean(x, *mask, axes=axes, keepdims=True))
    squares = _squares(_masked(x - centre, mask), axes, keepdims)
    count = _count(x, mask, axes, keepdims) - ddof
    if not mask:
        return squares / count
    return jnp.where(count > 0, squares / jnp.maximum(count, 1), jnp.nan)


def _squares(x: Array, axes: AxisIndices, keepdims: bool) -> Array:
    """The sum of squares, as a product of vectors."""
    others = [a for a in range(x.ndim) if a not in axes]
    total = lax.dot_general(x, x, ((axes, axes), (others, others)))
    return jnp.expand_dims(total, axes) if keepdims else total


def _deviation(x: Array, *mask: Array, **options: Any) -> Array:
    return jnp.sqrt(_variance(x, *mask, **options))


def _euclidean_norm(x: Array, *, axes: AxisIndices, keepdims: bool, **_: Any) -> Array:
    return jnp.sqrt(_squares(x, axes, keepdims))


def _absolute_norm(x: Array, *, axes: AxisIndices, keepdims: bool, **_: Any) -> Array:
    return jnp.sum(jnp.abs(x), axes, keepdims=keepdims)


def _maximum_norm(x: Array, *, axes: AxisIndices, keepdims: bool, **_: Any) -> Array:
    # The carrier's maximum may lose a NaN: `maximum_loses_nan` in `_core/xla/cpu.py`.
    is_nan = jnp.isnan(x).any(axes, keepdims=keepdims)
    return jnp.where(is_nan, jnp.nan, jnp.max(jnp.abs(x), axes, keepdims=keepdims, initial=0))


_VECTOR_NORMS: dict[float | None, Callable[..., Array]] = {
    None: _euclidean_norm,
    1: _absolute_norm,
    2: _euclidean_norm,
    math.inf: _maximum_norm,
}


def _exponentials(x: Array, shift: Array, mask: tuple[Array, ...]) -> Array:
    """e^(x - m), or +0 where the mask is False."""
    return _masked(jnp.exp(_masked(x, mask, shift) - shift), mask)


def _largest(x: Array, mask: tuple[Array, ...], axes: AxisIndices) -> Array:
    """The largest element, -inf for none, as a constant."""
    return lax.stop_gradient(jnp.max(x, axes, keepdims=True, where=mask[0] if mask else None, initial=-jnp.inf))


def _softmax(x: Array, *mask: Array, axes: AxisIndices, **_: Any) -> Array:
    exponentials = _exponentials(x, _largest(x, mask, axes), mask)
    return exponentials / jnp.sum(exponentials, axes, keepdims=True)


def _logsumexp(x: Array, *mask: Array, axes: AxisIndices, keepdims: bool, **_: Any) -> Array:
    largest = _largest(x, mask, axes)
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    result = jnp.log(jnp.sum(_exponentials(x, shift, mask), axes, keepdims=True)) + shift
    return result if keepdims else jnp.squeeze(result, axes)


# -- products and cumulative sums --------------------------------------------------------------------------------------


def prod(
    x: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    axis: Axes = None,
    keepdims: bool = False,
    where: Any = None,
    initial: Any = None,
) -> Any:
    """The product of elements, sequentially from 1, every multiplication rounded.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
        axis: an axis, or several, with elements in C order; None (default): all.
        keepdims: whether to keep the axes, with length one. Default False.
        where: booleans, which broadcast to the shape of `x`; an element at False is left out. Default None: all.
        initial: a number, the first factor of each product. It is rounded to `spec`. Default None.

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
    arrays, axes, mask = _reduction_operands(x, axis, keepdims, where, initial)
    options = {"axes": axes, "keepdims": keepdims, "has_initial": len(arrays) > 1}
    operands = _gather_summed_axes([*arrays, *mask], axes)
    return _run_recurrence(_product, operands, spec, key, **options)


def cumsum(x: Any, spec: SpecLike, key: Key = None, *, axis: int | None = None) -> Any:
    """Cumulative sums: c <- A(c + x_k) from +0, every addition rounded.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
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
    return _run_cumulative(jnp.cumsum, x, spec, key, axis)


def cumprod(x: Any, spec: SpecLike, key: Key = None, *, axis: int | None = None) -> Any:
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
    return _run_cumulative(jnp.cumprod, x, spec, key, axis)


def _run_cumulative(function: Callable[..., Array], x: Any, spec: SpecLike, key: Any, axis: int | None) -> Any:
    array: Any = as_operands("x", (x,))[0]
    axis = None if axis is None else check_axis(axis, array.ndim)
    (whole,) = _gather_summed_axes([array], range(array.ndim) if axis is None else (axis,))
    result = _run_recurrence(function, (whole,), spec, key, axis=axis)
    return result if axis is None else reshard_like(result, array)


def _run_recurrence(
    function: Callable[..., Array], arrays: Sequence[Any], spec: SpecLike, key: Any, **more: Any
) -> Any:
    spec, _ = as_math_operands("x", arrays[:1], spec)
    return run_sums(function, MatmulSpec(spec, accumulate=without_gradient(spec)), arrays, key, **more)


def _product(x: Array, *more: Array, axes: AxisIndices, keepdims: bool, has_initial: bool) -> Array:
    """The product over axes of `x`, after an initial value, without the numbers that a mask leaves out."""
    mask = tuple(_rows(jnp.broadcast_to(v, x.shape), axes) for v in more[has_initial:])
    rows = _with_first(x, more[0], axes) if has_initial else _rows(x, axes)
    if not mask:
        result = jnp.prod(rows, -1)
    else:  # a loop, since the format may have no 1 to multiply by
        counts = jnp.pad(mask[0], [(0, 0)] * (rows.ndim - 1) + [(int(has_initial), 0)], constant_values=True)
        factors = [jnp.moveaxis(v, -1, 0) for v in (jnp.where(counts, rows, 1), counts)]
        one = lax.broadcast_in_dim(jnp.ones((), rows.dtype), rows.shape[:-1], (), out_sharding=_sharding_of(rows, -1))
        result = lax.scan(_multiply_if, one, factors)[0]
    return jnp.expand_dims(result, axes) if keepdims else result


def _multiply_if(total: Array, factor: list[Array]) -> tuple[Array, None]:
    value, counts = factor
    return jnp.where(counts, total * value, total), None


# -- extrema -----------------------------------------------------------------------------------------------------------


def max(
    x: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    axis: Axes = None,
    keepdims: bool = False,
    where: Any = None,
    initial: Any = None,
) -> Any:
    """The largest element, as `jax.numpy.max`; NaN if one is.

    The elements are rounded to `spec`, and one of them is chosen, by comparisons of bits. Subnormal numbers are not
    read as zero, and +0 is above -0. So nothing is rounded after that, and the order does not matter.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
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
    return _run_extremum(jnp.max, x, spec, key, axis, keepdims, where, initial)


def min(
    x: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    axis: Axes = None,
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
    return _run_extremum(jnp.min, x, spec, key, axis, keepdims, where, initial)


def argmax(x: Any, spec: SpecLike, key: Key = None, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """The index of the first largest element of the rounded array, or of the first NaN, as `jax.numpy.argmax`.

    Bits are compared, except that -0 and +0 are equal.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to `spec` first.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic. Default None.
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
    return _run_arg_extremum(jnp.argmax, x, spec, key, axis, keepdims)


def argmin(x: Any, spec: SpecLike, key: Key = None, *, axis: int | None = None, keepdims: bool = False) -> Any:
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
    return _run_arg_extremum(jnp.argmin, x, spec, key, axis, keepdims)


def _run_extremum(
    function: Any, x: Any, spec: SpecLike, key: Any, axis: Any, keepdims: bool, where: Any, initial: Any
) -> Any:
    arrays, axes, mask = _reduction_operands(x, axis, keepdims, where, initial)
    spec, _ = as_math_operands("x", arrays[:1], spec, "held")
    if initial is None:
        check(not mask, "where without initial: a group without elements would have no result; pass initial")
        _check_nonempty_axes(arrays[0].shape, axes)
    options = {"choose": function, "axes": axes, "keepdims": keepdims}
    return run_emulated(_extremum, spec, (*arrays, *mask), key, **options)


def _run_arg_extremum(function: Any, x: Any, spec: SpecLike, key: Any, axis: int | None, keepdims: bool) -> Any:
    check_bool("keepdims", keepdims)
    spec, (array,) = as_math_operands("x", (x,), spec, "held")
    axis = axis if axis is None else check_axis(axis, array.ndim)
    _check_nonempty_axes(array.shape, as_axis_indices(axis, array.ndim))
    return run_emulated(function, spec, (array,), key, axis=axis, keepdims=keepdims)


def _check_nonempty_axes(shape: tuple[int, ...], axes: AxisIndices) -> None:
    check(not any(not shape[axis] for axis in axes), f"x has shape {shape}, so there are no elements to choose from")


def _extremum(x: Array, *more: Array, choose: Any, axes: AxisIndices, keepdims: bool) -> Array:
    """The largest or smallest element; `more` has the initial value, and the mask if there is one."""
    options = dict(zip(("initial", "where"), more, strict=False))
    return choose(x, axes, keepdims=keepdims, **options)
