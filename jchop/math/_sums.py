"""Sums along axes, means, variances and norms; every step is rounded, in a named order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_bool, check_int
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.arithmetic.ranges import ValueRange, carrier_range
from jchop._core.matmul.operations import check_matmul, check_operation, spec_draws, widen_operand
from jchop._core.matmul.sums import sum_along
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.materialize import materialize
from jchop._kernels.products.matmul import matmul_op
from jchop._round.arguments import Array, as_array, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec, SumSpecLike, as_matmul_spec
from jchop.math._matmul import product_of_matrices, round_to_dtype
from jchop.math._parts import (
    AxisArgument,
    AxisIndices,
    as_axis_indices,
    as_mask_operands,
    as_reduction_operands,
    as_rows,
    fold_key,
    mask_rows,
    reduce_in_auto_mesh,
)
from jchop.math._row import exact_operation

__all__ = ["mean", "norm", "std", "sum", "var"]

# -- the public functions ----------------------------------------------------------------------------------------------


def sum(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
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
        key: a typed key, required if `spec` is stochastic. It is split into four; the first is for `x` and the last for
            the sums, with the words of `jchop.math.matmul`. Default None.
        axis: an axis, or several, with elements in C order; None (default): all.
        keepdims: whether to keep the axes, with length one. Default False.
        where: booleans, which broadcast to the shape of `x`; an element at False is +0 in its place in the order.
            Default None: all elements.
        initial: a number, an element before the others in the order of each sum: in sequential order the start of c. It
            is rounded to ``spec.operands`` and draws from `jax.random.fold_in` of the first part with 0. Default None.

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
    return _run_reduction(_row_sum, x, as_sum_spec(spec), key, axis, keepdims, where, initial)


def mean(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The sum of elements as in `jchop.math.sum`, divided by their number n; the quotient is rounded once.

    n is an integer and is not rounded; the quotient is rounded to ``spec.accumulate``.

    Args:
        x: as in `jchop.math.sum`.
        spec: as in `jchop.math.sum`.
        key: as in `jchop.math.sum`; the quotient draws from `jax.random.fold_in` of the last part with 0.
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
    return _run_reduction(_row_mean, x, as_sum_spec(spec), key, axis, keepdims, where)


def var(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The variance by two passes: d_k = x_k - mean, then the sum of d_k d_k divided by n - ddof.

    Every operation is rounded: the mean as in `jchop.math.mean`; the differences to ``spec.operands``, because they are
    operands of products; products, sums and their order as in `jchop.math.matmul`; the quotient to ``spec.accumulate``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: a `jchop.MatmulSpec`; or a `jchop.Spec`, a format or text for every rounding, in sequential order.
        key: a typed key, required if `spec` is stochastic. It is split into four, for `x`, for the differences, for the
            products and for the sums. The mean draws as in `jchop.math.mean`, with the first part and
            `jax.random.fold_in` of the last with 1 as its first and last part; the quotient draws from ``fold_in`` of
            the last with 0. Default None.
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
    return _run_reduction(
        partial(_row_variance, check_int("ddof", ddof)), x, as_matmul_spec(spec), key, axis, keepdims, where
    )


def std(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    axis: AxisArgument = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The square root of `jchop.math.var`, rounded once to ``spec.accumulate``.

    Args:
        x: as in `jchop.math.var`.
        spec: as in `jchop.math.var`.
        key: as in `jchop.math.var`; the root draws from `jax.random.fold_in` of the last part with 2.
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
    return _run_reduction(
        partial(_row_deviation, check_int("ddof", ddof)), x, as_matmul_spec(spec), key, axis, keepdims, where
    )


def norm(
    x: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    ord: float | None = None,
    axis: AxisArgument = None,
    keepdims: bool = False,
) -> Any:
    """A norm of vectors: ``√(Σ x_k²)``, ``Σ |x_k|`` or ``max |x_k|``, every operation rounded, without scaling.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; it is rounded to ``spec.operands`` first.
        spec: as in `jchop.math.var`; with ``ord=1`` as in `jchop.math.sum`, and with infinity only the operands are
            rounded.
        key: a typed key, required if `spec` is stochastic. It is split into four: for `x`, unused, for the products and
            for the sums; the root draws from `jax.random.fold_in` of the last part with 2. Default None.
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
    if ord not in _VECTOR_NORMS:
        raise ValueError(f"ord={ord!r} must be one of None, 1, 2, inf")
    has_several_axes = axis is None or isinstance(axis, Sequence)
    if ord is not None and has_several_axes and as_array("x", x).ndim > 1:
        raise ValueError(f"ord={ord!r} with axis={axis!r} is a norm of matrices; pass one axis, or ord=None")
    mspec = as_sum_spec(spec) if ord == 1 else as_matmul_spec(spec)
    return _run_reduction(_VECTOR_NORMS[ord], x, mspec, key, axis, keepdims)


# -- sums --------------------------------------------------------------------------------------------------------------


def as_sum_spec(value: Any) -> MatmulSpec:
    """A MatmulSpec without a product; a plain spec applies to operands and sums."""
    if not isinstance(value, MatmulSpec):
        spec = as_matmul_spec(value).operands
        return MatmulSpec(operands=spec, accumulate=spec)
    if value.product is not None or value.fused:
        raise ValueError(f"spec={str(value)!r}: a sum has no products; leave product=None and fused=False")
    return value


def _run_reduction(
    function: Callable[..., Array],
    x: Any,
    spec: MatmulSpec,
    key: Any,
    axis: AxisArgument,
    keepdims: bool,
    where: Any = None,
    initial: Any = None,
) -> Any:
    check_bool("keepdims", keepdims)
    arrays = as_reduction_operands(x, initial)
    array = arrays[0]
    check_matmul(spec, array.dtype)
    if function is not _row_sum:  # quotients and roots are rounded as sums are
        check_operation(spec.accumulate, array.dtype, "accumulate")
    mask = as_mask_operands(where, array.shape)
    key = rounding_key(key, spec.stochastic, spec)
    reduction = partial(_traced_reduction, function, spec, as_axis_indices(axis, array.ndim), keepdims, len(arrays) > 1)
    return run_on_operands(reduction, (*arrays, *mask), key)


@partial(always_jit, static_argnums=(0, 1, 2, 3, 4), inline=True)
def _traced_reduction(
    function: Callable[..., Array],
    spec: MatmulSpec,
    axes: AxisIndices,
    keepdims: bool,
    has_initial: bool,
    *operands_and_key: Any,
) -> Array:
    in_rows = partial(_reduce_rows, function, spec, axes, keepdims, has_initial)
    return reduce_in_auto_mesh(in_rows, axes, keepdims, *operands_and_key)


def _reduce_rows(
    function: Callable[..., Array],
    spec: MatmulSpec,
    axes: AxisIndices,
    keepdims: bool,
    has_initial: bool,
    *operands_and_key: Any,
) -> Array:
    """`function` of rows, a matrix of float32 or float64, in C order of the reduced axes.

    The operands are x, the initial value if `has_initial`, and the mask if there is one.
    """
    x, *others, key = operands_and_key
    keys = (None,) * 4 if key is None else tuple(split_prng_key(key, 4))
    x = jnp.asarray(x)
    rows, outer_shape = as_rows(round_operand(x, spec, keys[0]), axes)
    mask = mask_rows(others[-1] if len(others) > has_initial else None, x, axes)
    if mask is not None:
        rows = jnp.where(mask, rows, 0)
    if has_initial:
        start = round_operand(jnp.asarray(others[0]), spec, fold_key(keys[0], 0))
        rows = jnp.concatenate([jnp.broadcast_to(start, (rows.shape[0], 1)), rows], 1)
    result = round_to_dtype(function(rows, spec, keys, mask), spec, x.dtype).reshape(outer_shape)
    return jnp.expand_dims(result, axes) if keepdims else result


def round_operand(x: Array, spec: MatmulSpec, key: Array | None) -> Array:
    """An operand in a wide dtype, rounded."""
    wide = widen_operand(x)
    return wide if spec.operands is None else round_to_format(wide, spec.operands, key)


_SumKeys = tuple[Array | None, ...]


def row_sums(rows: Array, spec: MatmulSpec, keys: _SumKeys) -> Array:
    """The sum of each row, drawn from the last key."""
    return _row_sums_op(spec, rows, keys[3] if spec_draws(spec.accumulate) else None)


def _row_sum(rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: Array | None) -> Array:
    return row_sums(rows, spec, keys)


@partial(CustomJvp, nondiff_argnums=(0,))
def _row_sums_op(spec: MatmulSpec, rows: Array, key: Array | None) -> Array:
    seeds = None if key is None else jnp.stack([*seed_words(key)] * 2)
    return sum_along(rows, 1, spec, seeds, matmul=matmul_op)


@_row_sums_op.defjvp
def _row_sums_op_jvp(spec: MatmulSpec, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _row_sums_op(spec, *primals), jnp.sum(tangents[0], 1)


def _row_mean(rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: Array | None) -> Array:
    return _divide_by_row_count(row_sums(rows, spec, keys), _row_counts(rows, mask), spec, keys)


def _row_counts(rows: Array, mask: Array | None) -> int | Array:
    """The number of elements in each row."""
    if mask is not None and rows.shape[1] > 2 << CARRIERS[rows.dtype.name].fraction:
        raise ValueError(f"{rows.shape[1]} elements may be more than {rows.dtype} counts exactly; cast x to float64")
    return rows.shape[1] if mask is None else jnp.sum(mask, 1, dtype=jnp.int32)


def _divide_by_row_count(total: Array, count: int | Array, spec: MatmulSpec, keys: _SumKeys) -> Array:
    """A(total / count), the count an integer that is not rounded."""
    carrier = CARRIERS[total.dtype.name]
    if isinstance(count, int):
        precision = carrier.fraction + 1
        if abs(count).bit_length() > precision and count % (1 << (abs(count).bit_length() - precision)):
            raise ValueError(f"the number of elements, {count}, is not held by {total.dtype}; cast x to float64")
    counts = jnp.broadcast_to(jnp.asarray(count, total.dtype), total.shape)
    key = fold_key(keys[3], 0) if spec_draws(spec.accumulate) else None
    return exact_operation("div", (total, counts), spec.accumulate, key, carrier_range_pair(total))


def carrier_range_pair(x: Array) -> tuple[ValueRange, ValueRange]:
    """The ranges of two operands that hold any number of the dtype."""
    full_range = carrier_range(CARRIERS[x.dtype.name])
    return full_range, full_range


def _row_variance(ddof: int, rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: Array | None) -> Array:
    row_length, count = rows.shape[1], _row_counts(rows, mask)
    if ddof >= max(row_length, 1):
        raise ValueError(f"ddof={ddof} must be less than the number of elements, {row_length}")
    # Quirk `long_fusion_compiled_for_minutes` of `_core/xla/cpu.py`: each difference would repeat the mean of its row.
    centre = materialize(_row_mean(rows, spec, (keys[0], None, None, fold_key(keys[3], 1)), mask))
    key = keys[1] if spec_draws(spec.operands) else None
    differences = exact_operation(
        "sub", (rows, jnp.broadcast_to(centre[:, None], rows.shape)), spec.operands, key, carrier_range_pair(rows)
    )
    if mask is None:
        return _divide_by_row_count(_row_squares(differences, spec, keys), count - ddof, spec, keys)
    total = _divide_by_row_count(
        _row_squares(jnp.where(mask, differences, 0), spec, keys), jnp.maximum(count - ddof, 1), spec, keys
    )
    return jnp.where(count > ddof, total, jnp.nan)


def _row_squares(rows: Array, spec: MatmulSpec, keys: _SumKeys) -> Array:
    """The sum of the squares of each row."""
    return product_of_matrices(rows[:, None, :], rows[:, :, None], spec, rows.dtype, keys)[:, 0, 0]


def _root_of_total(total: Array, spec: MatmulSpec, keys: _SumKeys) -> Array:
    return exact_operation(
        "sqrt", (total,), spec.accumulate, fold_key(keys[3], 2) if spec_draws(spec.accumulate) else None
    )


def _row_deviation(ddof: int, rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: Array | None) -> Array:
    return _root_of_total(_row_variance(ddof, rows, spec, keys, mask), spec, keys)


def _euclidean_norm(rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: None) -> Array:
    return _root_of_total(_row_squares(rows, spec, keys), spec, keys)


def _absolute_norm(rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: None) -> Array:
    return row_sums(jnp.abs(rows), spec, keys)


def _maximum_norm(rows: Array, spec: MatmulSpec, keys: _SumKeys, mask: None) -> Array:
    # The maximum of all may lose a NaN: `maximum_loses_nan` in `_core/xla/cpu.py`.
    return jnp.where(jnp.isnan(rows).any(1), jnp.nan, jnp.max(jnp.abs(rows), 1, initial=0))


_VECTOR_NORMS: dict[float | None, Callable[..., Array]] = {
    None: _euclidean_norm,
    1: _absolute_norm,
    2: _euclidean_norm,
    math.inf: _maximum_norm,
}
