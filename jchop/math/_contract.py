"""Sums of products in other shapes than matrices: dot, conv, axpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import in_auto_mesh
from jchop._common.checks import check_bool, check_int
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import check_matmul, check_operation, widen_operand
from jchop._core.rounding.grid import require_carrier
from jchop._round.arguments import Array, SpecLike, as_operands, carrier_of_dtype, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec, SumSpecLike, as_matmul_spec
from jchop._spec.spec import Spec, as_spec
from jchop.math._matmul import matmul, product_of_matrices
from jchop.math._row import as_dtype, check_cotangent_rounding, exact_operation

__all__ = ["axpy", "conv", "dot"]


def dot(a: Any, b: Any, spec: SumSpecLike, key: Array | None = None) -> Any:
    """The sum of products over the last axis of `a` and the last but one of `b`, as `jax.numpy.dot`.

    It is `jchop.math.matmul` of `a` and `b`, each reshaped to one matrix; a scalar is multiplied with every element.

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., k).
        b: of the same dtype, or promoted as in `jax.numpy`, shape (..., k, n) or (k,).
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`.

    Returns:
        An array of shape ``a.shape[:-1] + b.shape[:-2] + b.shape[-1:]``.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.dot([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], "e5m2"))
        32.0
    """
    x, y = as_operands("ab", (a, b))
    if not x.ndim or not y.ndim:
        shape = x.shape or y.shape
        left, right = (x.reshape(-1, 1), y.reshape(1, 1)) if x.ndim else (x.reshape(1, 1), y.reshape(1, -1))
        return matmul(left, right, spec, key).reshape(shape)[()]
    if y.ndim <= 2:
        return matmul(x, y, spec, key)
    k = y.shape[-2]
    columns = y.transpose(y.ndim - 2, *range(y.ndim - 2), y.ndim - 1).reshape(k, -1)
    return matmul(x, columns, spec, key).reshape(*x.shape[:-1], *y.shape[:-2], y.shape[-1])


def conv(
    x: Any,
    kernel: Any,
    spec: SumSpecLike,
    key: Array | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Literal["VALID", "SAME"] | Sequence[tuple[int, int]] = "VALID",
    dilation: int | Sequence[int] = 1,
) -> Any:
    """A convolution of neural networks (the kernel is not mirrored), as `jax.lax.conv_with_general_padding`.

    The sum of an output element runs over the input channels and then the positions of the kernel, in C order of
    `kernel`. Every product and every sum is rounded as in `jchop.math.matmul`. The padding is +0.

    Args:
        x: float16, bfloat16, float32 or float64, shape (n, c, ...space).
        kernel: of the same dtype, or promoted as in `jax.numpy`, shape (m, c, ...window).
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`; random bits are indexed by an output array of shape (n, ...space, m).
        stride: step of the windows, one for all axes or one each. Default 1.
        padding: ``"VALID"`` (default), ``"SAME"``, or (before, after) for each axis.
        dilation: distance between positions of the kernel, one for all axes or one each. Default 1.

    Returns:
        Shape (n, m, ...space of the result).

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`, or for shapes that do not match.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.math.conv(jnp.ones((1, 9, 3)), jnp.ones((1, 9, 2)), "e5m2").tolist()
        [[[8.0, 8.0]]]
    """
    mspec = as_matmul_spec(spec)
    arrays = as_operands(("x", "kernel"), (x, kernel))
    window = _conv_window(arrays[0].shape, arrays[1].shape, stride, padding, dilation)
    check_matmul(mspec, arrays[0].dtype)
    key = rounding_key(key, mspec.stochastic, mspec)
    return run_on_operands(partial(_traced_conv, mspec, window), arrays, key)


def axpy(a: Any, x: Any, y: Any, spec: SpecLike, key: Array | None = None, *, fused: bool = False) -> Any:
    """A x + y, like the BLAS routine, with product and sum rounded; with `fused` only the sum is rounded.

    Args:
        a: float16, bfloat16, float32 or float64, a scalar or an array; all operands are rounded to `spec` first.
        x: of the same dtype, or promoted as in `jax.numpy`.
        y: as `x`; the three broadcast.
        spec: a `jchop.Spec`, a format, or its text.
        key: a typed key, required if `spec` is stochastic; it is split into five, for the operands, the product and the
            sum. Default None.
        fused: whether the product is exact. Default False.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.axpy(1.25, 1.25, -1.5, "e5m2")), float(jc.math.axpy(1.25, 1.25, -1.5, "e5m2", fused=True))
        (0.0, 0.0625)
    """
    spec = as_spec(spec)
    check_bool("fused", fused)
    arrays = as_operands("axy", (a, x, y))
    require_carrier(spec, carrier_of_dtype(arrays[0].dtype))
    check_operation(spec, arrays[0].dtype)
    check_cotangent_rounding(spec)
    return run_on_operands(
        partial(_traced_axpy, spec, fused), arrays, rounding_key(key, spec.rounding.stochastic, spec)
    )


@partial(always_jit, static_argnums=(0, 1), inline=True)
def _traced_axpy(spec: Spec, fused: bool, a: Array, x: Array, y: Array, key: Array | None) -> Array:
    keys = (None,) * 5 if key is None else tuple(split_prng_key(key, 5))
    dtype = a.dtype
    a, x, y = (
        widen_operand(round_to_format(jnp.asarray(v), spec, k)) for v, k in zip((a, x, y), keys[:3], strict=True)
    )
    if fused:
        return as_dtype(exact_operation("fma", (a, x, y), spec, keys[4]), dtype)
    return as_dtype(exact_operation("add", (exact_operation("mul", (a, x), spec, keys[3]), y), spec, keys[4]), dtype)


def _round_conv_operands(spec: MatmulSpec, keys: Sequence[Array | None], *arrays: Any) -> list[Array]:
    wide = (widen_operand(jnp.asarray(array)) for array in arrays)
    rounding = spec.operands
    return [v if rounding is None else round_to_format(v, rounding, k) for v, k in zip(wide, keys, strict=False)]


def _split_conv_key(key: Array | None) -> tuple[Array | None, ...]:
    return (None,) * 4 if key is None else tuple(split_prng_key(key, 4))


# -- convolution -------------------------------------------------------------------------------------------------------


_AxisSizes = tuple[int, ...]


@dataclass(frozen=True)
class _ConvWindow:
    """Static parameters of a convolution, each with one entry for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]


def _conv_window(x: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> _ConvWindow:
    if len(x) < 3 or len(x) != len(kernel) or x[1] != kernel[1]:
        raise ValueError(
            f"x has shape {x} and kernel has shape {kernel}: they must be (n, c, *space) and (m, c, *window) with as "
            "many axes and the same c"
        )
    axes = len(x) - 2
    strides, dilations = _per_spatial_axis("stride", stride, axes), _per_spatial_axis("dilation", dilation, axes)
    dilated_sizes = [(size - 1) * step + 1 for size, step in zip(kernel[2:], dilations, strict=True)]
    pads = _conv_padding(padding, x[2:], dilated_sizes, strides)
    for size, span, pad in zip(x[2:], dilated_sizes, pads, strict=True):
        if size + pad[0] + pad[1] < span or span < 1:
            raise ValueError(f"x has shape {x}, too small for a kernel of shape {kernel} with padding={padding!r}")
    return _ConvWindow(strides, pads, dilations)


def _per_spatial_axis(name: str, value: Any, axis_count: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * axis_count
    if len(values) != axis_count:
        raise ValueError(f"{name}={value!r} must be one integer, or one for each of {axis_count} axes")
    return tuple(check_int(name, v, 1) for v in values)


def _conv_padding(
    padding: Any, sizes: Sequence[int], dilated_sizes: list[int], strides: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if padding == "VALID":
        return ((0, 0),) * len(sizes)
    if padding == "SAME":
        totals = [
            max((math.ceil(size / step) - 1) * step + span - size, 0)
            for size, span, step in zip(sizes, dilated_sizes, strides, strict=True)
        ]
        return tuple((total // 2, total - total // 2) for total in totals)
    pairs = [] if isinstance(padding, str) or np.ndim(padding) != 2 else [tuple(pair) for pair in padding]
    if len(pairs) != len(sizes) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"padding={padding!r} must be 'VALID', 'SAME' or (before, after) for each of {len(sizes)} axes"
        )
    return tuple((check_int("padding", low, 0), check_int("padding", high, 0)) for low, high in pairs)


@partial(always_jit, static_argnums=(0, 1), inline=True)
def _traced_conv(spec: MatmulSpec, window: _ConvWindow, x: Any, kernel: Any, key: Array | None) -> Array:
    def like(x: Array, kernel: Array, key: Array | None) -> Array:
        return lax.conv_general_dilated(x, kernel, window.stride, window.padding, rhs_dilation=window.dilation)

    along = range(1 - x.ndim, 0)
    return in_auto_mesh(partial(_conv_as_matmul, spec, window), x, kernel, key, along=(along, along, ()), like=like)


def _conv_as_matmul(spec: MatmulSpec, window: _ConvWindow, x: Any, kernel: Any, key: Array | None) -> Array:
    keys = _split_conv_key(key)
    a, w = _round_conv_operands(spec, keys, x, kernel)
    a = jnp.pad(a, ((0, 0), (0, 0), *window.padding))
    axis_count, output_sizes = len(window.stride), []
    for i, (window_size, stride, dilation) in enumerate(zip(w.shape[2:], window.stride, window.dilation, strict=True)):
        axis = 2 + 2 * i  # each earlier axis is now two axes: the position of the window, and the position within it
        starts = np.arange(0, a.shape[axis] - (window_size - 1) * dilation, stride)
        a = jnp.take(a, starts[:, None] + dilation * np.arange(window_size), axis=axis)
        output_sizes.append(len(starts))
    axis_order = (0, *range(2, 2 + 2 * axis_count, 2), 1, *range(3, 2 + 2 * axis_count, 2))
    rows = a.transpose(axis_order).reshape(1, a.shape[0] * math.prod(output_sizes), -1)
    out = product_of_matrices(rows, w.reshape(1, w.shape[0], -1).transpose(0, 2, 1), spec, x.dtype, keys)
    return jnp.moveaxis(out.reshape(a.shape[0], *output_sizes, w.shape[0]), -1, 1)
