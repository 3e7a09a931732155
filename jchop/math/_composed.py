"""Functions of a few operations on each element, every one rounded: where, cross, linspace, interp."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_bool, check_int
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.arithmetic.ranges import carrier_range, range_of
from jchop._core.matmul.operations import check_operation, widen_operand
from jchop._core.rounding.grid import require_carrier
from jchop._kernels.materialize import materialize
from jchop._round.arguments import (
    Array,
    SpecLike,
    as_array,
    as_operands,
    carrier_of_dtype,
    is_integer_or_bool,
    rounding_key,
    run_on_operands,
)
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.math._extrema import sort_keys
from jchop.math._parts import check_axis
from jchop.math._row import as_dtype, check_cotangent_rounding, exact_operation
from jchop.math._sums import carrier_range_pair

__all__ = ["cross", "interp", "linspace", "where"]


def where(condition: Any, x: Any, y: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """`x` if `condition` is true, else `y`, as `jax.numpy.where`; both are rounded to `spec` first.

    Args:
        condition: booleans, or integers, of which 0 is false.
        x: float16, bfloat16, float32 or float64.
        y: of the same dtype, or promoted as in `jax.numpy`; the three broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into two, for `x` and `y`. Default None.

    Returns:
        An array of the dtype of `x` and `y`.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for a condition of another dtype.

    Example:
        >>> import jchop as jc
        >>> jc.math.where([True, False], [1.1, 1.1], 0.3, "e5m2").tolist()
        [1.0, 0.3125]
    """
    spec, arrays = _spec_and_operands(("x", "y"), (x, y), spec)
    mask = as_array("condition", condition)
    if not is_integer_or_bool(mask.dtype):
        raise TypeError(f"condition has dtype {mask.dtype}; allowed: booleans and integers, such as condition != 0")
    key = rounding_key(key, spec.rounding.stochastic, spec)
    return run_on_operands(partial(_traced_where, spec), (*arrays, mask), key)


@partial(always_jit, static_argnums=0, inline=True)
def _traced_where(spec: Spec, x: Array, y: Array, condition: Array, key: Array | None) -> Array:
    x, y = _round_operands(spec, (x, y), _split_into_keys(key, 2))
    return jnp.where(jnp.asarray(condition) != 0, x, y)


def cross(
    a: Any,
    b: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    axisa: int = -1,
    axisb: int = -1,
    axisc: int = -1,
    axis: int | None = None,
) -> Any:
    """The cross product of vectors, as `jax.numpy.cross`: each element is A(P(a_i b_j) - P(a_j b_i)).

    Both products and their difference are rounded to `spec`. A vector of two elements gets a third element, +0. For two
    such vectors, the result is the third element of the product.

    Args:
        a: float16, bfloat16, float32 or float64, vectors of two or three elements; rounded to `spec` first.
        b: of the same dtype, or promoted as in `jax.numpy`; the other axes broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into five, for `a`, `b`, the first and the
            second products, and the differences. Random bits of these are indexed by an array with the elements of a
            vector last. Default None.
        axisa: the axis of `a` with the elements. Default -1.
        axisb: the axis of `b` with the elements. Default -1.
        axisc: the axis of the result with the elements. Default -1.
        axis: replaces all three. Default None.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.

    Example:
        >>> import jchop as jc
        >>> jc.math.cross([1.0, 2.0, 3.0], [1.25, 1.0, -1.0], "e5m2").tolist()
        [-5.0, 5.0, -1.5]
    """
    spec, (x, y) = _spec_and_operands(("a", "b"), (a, b), spec)
    if axis is not None:
        axisa = axisb = axisc = axis
    vector_axes = check_axis(axisa, x.ndim, "axisa"), check_axis(axisb, y.ndim, "axisb")
    lengths = x.shape[vector_axes[0]], y.shape[vector_axes[1]]
    if not {*lengths} <= {2, 3}:
        raise ValueError(f"a has shape {x.shape} and b has shape {y.shape}: their vectors must have 2 or 3 elements")
    outer_shapes = [tuple(np.delete(v.shape, place)) for v, place in zip((x, y), vector_axes, strict=True)]
    try:
        outer_shape = np.broadcast_shapes(*outer_shapes)
    except ValueError:
        raise ValueError(f"a has shape {x.shape} and b has shape {y.shape}: they do not broadcast") from None
    is_planar = lengths == (2, 2)
    result_axis = -1 if is_planar else check_axis(axisc, len(outer_shape) + 1, "axisc")
    key = rounding_key(key, spec.rounding.stochastic, spec)
    return run_on_operands(partial(_traced_cross, spec, vector_axes, result_axis, is_planar), (x, y), key)


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _traced_cross(
    spec: Spec, vector_axes: tuple[int, int], result_axis: int, is_planar: bool, a: Array, b: Array, key: Array | None
) -> Array:
    keys = _split_into_keys(key, 5)
    x, y = (
        jnp.moveaxis(widen_operand(v), place, -1)
        for v, place in zip(_round_operands(spec, (a, b), keys), vector_axes, strict=True)
    )
    if not is_planar:
        x, y = (jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 3 - v.shape[-1])]) for v in (x, y))
    i, j = (np.array([0]), np.array([1])) if is_planar else (np.array([1, 2, 0]), np.array([2, 0, 1]))
    left = exact_operation("mul", (x[..., i], y[..., j]), spec, keys[2])
    right = exact_operation("mul", (x[..., j], y[..., i]), spec, keys[3])
    result = as_dtype(exact_operation("sub", (left, right), spec, keys[4]), a.dtype)
    return result[..., 0] if is_planar else jnp.moveaxis(result, -1, result_axis)


def linspace(
    start: Any,
    stop: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    num: int = 50,
    endpoint: bool = True,
    axis: int = 0,
) -> Any:
    """Evenly spaced numbers, as `jax.numpy.linspace`: x_i = A(start + P(i h)) with h = A(A(stop - start) / n).

    n is the number of intervals, `num` - 1, or `num` without the endpoint. Every operation is rounded to `spec`; the
    integers n and i are not rounded. With `endpoint` the last number is `stop`.

    Args:
        start: float16, bfloat16, float32 or float64, the first number, any shape; rounded to `spec` first.
        stop: of the same dtype, or promoted as in `jax.numpy`; both broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into six, for `start`, `stop`, the difference,
            the quotient, the products and the sums. Random bits are indexed by an array with i first. Default None.
        num: the number of numbers, >= 0. Default 50.
        endpoint: whether `stop` is the last number. Default True.
        axis: the axis of i in the result. Default 0.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for more numbers than the carrier counts exactly.

    Example:
        >>> import jchop as jc
        >>> jc.math.linspace(0.0, 1.0, "e5m2", num=4).tolist()
        [0.0, 0.3125, 0.625, 1.0]
    """
    spec, arrays = _spec_and_operands(("start", "stop"), (start, stop), spec)
    check_bool("endpoint", endpoint)
    carrier_bytes = 4 if arrays[0].dtype.itemsize <= 4 else 8
    max_count = 2 << CARRIERS[f"float{8 * carrier_bytes}"].fraction
    num = check_int("num", num, 0, max_count)
    axis = check_axis(axis, len(np.broadcast_shapes(*(array.shape for array in arrays))) + 1)
    key = rounding_key(key, spec.rounding.stochastic, spec)
    return run_on_operands(partial(_traced_linspace, spec, num, endpoint, axis), arrays, key)


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _traced_linspace(spec: Spec, num: int, endpoint: bool, axis: int, a: Array, b: Array, key: Array | None) -> Array:
    keys = _split_into_keys(key, 6)
    # Quirk `long_fusion_compiled_for_minutes`: each of these is read by several operations.
    start, stop = jnp.broadcast_arrays(
        *(widen_operand(materialize(operand)) for operand in _round_operands(spec, (a, b), keys))
    )
    carrier = CARRIERS[start.dtype.name]
    intervals = num - 1 if endpoint else num
    if intervals > 0:
        span = materialize(exact_operation("sub", (stop, start), spec, keys[2]))
        step = materialize(
            exact_operation("div", (span, jnp.full_like(span, intervals)), spec, keys[3], carrier_range_pair(span))
        )
        indices = jnp.arange(num, dtype=start.dtype).reshape(-1, *(1,) * start.ndim)
        full_range, format_range = carrier_range(carrier), range_of(spec, carrier)
        offsets = exact_operation("mul", (indices, step[None]), spec, keys[4], (full_range, format_range))
        result = exact_operation("add", (start[None], offsets), spec, keys[5])
        result = jnp.concatenate([result[:-1], stop[None]]) if endpoint else result
    else:
        result = jnp.broadcast_to(start, (num, *start.shape))
    return jnp.moveaxis(as_dtype(result, a.dtype), 0, axis)


def interp(
    x: Any, xp: Any, fp: Any, spec: SpecLike, key: Array | None = None, *, left: Any = None, right: Any = None
) -> Any:
    """Piecewise linear interpolation, as `jax.numpy.interp`: f = A(f_i + P(Q(d / h) e)).

    Here xp_i is the last node not above x, d = A(x - xp_i), h = A(xp_(i+1) - xp_i) and e = A(fp_(i+1) - fp_i). A, Q and
    P are the sum, the quotient and the product, rounded to `spec`. At a node the value is its value in `fp`. If several
    nodes are rounded to one number, the value there is the value of the last one.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; rounded to `spec` first, like all operands.
        xp: of the same dtype, or promoted as in `jax.numpy`, the nodes, shape (n,), ascending, n >= 1.
        fp: values at the nodes, shape (n,).
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into eleven, for `x`, `xp`, `fp`, `left`,
            `right`, d, h, e, the quotient, the product and the sum. Default None.
        left: the value below the first node, a scalar. Default None: the first of `fp`.
        right: the value above the last node, a scalar. Default None: the last of `fp`.

    Returns:
        An array of the shape of `x`. NaN for NaN. The derivative is the derivative of the formula in the carrier, at
        rounded values.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.

    Example:
        >>> import jchop as jc
        >>> jc.math.interp([0.5, 1.75, 9.0], [0.0, 1.0, 2.0], [0.0, 3.0, 2.0], "e5m2").tolist()
        [1.5, 2.0, 2.0]
    """
    operands = {"x": x, "xp": xp, "fp": fp, "left": left, "right": right}
    names = [name for name, value in operands.items() if value is not None or name in ("x", "xp", "fp")]
    spec, arrays = _spec_and_operands(names, [operands[name] for name in names], spec)
    nodes, values = arrays[1].shape, arrays[2].shape
    if len(nodes) != 1 or not nodes[0] or nodes != values:
        raise ValueError(f"xp has shape {nodes} and fp has shape {values}; both must be (n,), n >= 1")
    for name, array in zip(names[3:], arrays[3:], strict=True):
        if array.shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be a scalar")
    key = rounding_key(key, spec.rounding.stochastic, spec)
    return run_on_operands(partial(_traced_interp, spec, tuple(names)), arrays, key)


@partial(always_jit, static_argnums=(0, 1), inline=True)
def _traced_interp(spec: Spec, names: tuple[str, ...], *operands_and_key: Any) -> Array:
    *operands, key = operands_and_key
    rounding_names: tuple[str, ...] = ("x", "xp", "fp", "left", "right", "d", "h", "e", "div", "mul", "add")
    keys: dict[str, Array | None] = dict(zip(rounding_names, _split_into_keys(key, len(rounding_names)), strict=True))
    arrays = _round_operands(spec, operands, [keys[name] for name in names])
    by_name = {name: widen_operand(value) for name, value in zip(names, arrays, strict=True)}
    x, xp, fp = by_name["x"], by_name["xp"], by_name["fp"]
    x_keys, node_keys = sort_keys(x, zeros_equal=True), sort_keys(xp, zeros_equal=True)
    # Places among the nodes are found by bits, since a device may read subnormal numbers as zero.
    # Quirk `long_fusion_compiled_for_minutes`: the search is read by every operand of the quotient.
    node_index = materialize(jnp.clip(jnp.searchsorted(node_keys, x_keys, side="right") - 1, 0, xp.shape[0] - 1))
    next_index = jnp.minimum(node_index + 1, xp.shape[0] - 1)
    is_node = (x_keys == node_keys[node_index]) | (next_index == node_index)
    offset = exact_operation("sub", (x, xp[node_index]), spec, keys["d"])
    gap = exact_operation("sub", (xp[next_index], xp[node_index]), spec, keys["h"])
    value_gap = exact_operation("sub", (fp[next_index], fp[node_index]), spec, keys["e"])
    slope = exact_operation(
        "div", (jnp.where(is_node, 0, offset), jnp.where(is_node, 1, gap)), spec, keys["div"], carrier_range_pair(x)
    )
    increment = exact_operation("mul", (slope, value_gap), spec, keys["mul"])
    result = jnp.where(is_node, fp[node_index], exact_operation("add", (fp[node_index], increment), spec, keys["add"]))
    result = jnp.where(x_keys < node_keys[0], by_name.get("left", fp[0]), result)
    result = jnp.where(x_keys > node_keys[-1], by_name.get("right", fp[-1]), result)
    return as_dtype(jnp.where(jnp.isnan(x), x, result), operands[0].dtype)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _spec_and_operands(names: Any, values: Any, spec: SpecLike) -> tuple[Spec, list[Any]]:
    spec, arrays = as_spec(spec), as_operands(names, values)
    require_carrier(spec, carrier_of_dtype(arrays[0].dtype))
    check_operation(spec, arrays[0].dtype)
    check_cotangent_rounding(spec)
    return spec, arrays


def _split_into_keys(key: Array | None, count: int) -> list[Array | None]:
    return [None] * count if key is None else list(split_prng_key(key, count))


def _round_operands(spec: Spec, operands: Any, keys: Any) -> list[Array]:
    return [round_to_format(jnp.asarray(x), spec, key) for x, key in zip(operands, keys, strict=False)]
