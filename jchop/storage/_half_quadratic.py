"""Scales and zero points by half-quadratic quantization: a search over the data, not a rule of a format."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import enable_x64_for
from jchop._common.checks import check_bool, check_float, check_int
from jchop._common.settings import always_jit
from jchop._core.scaled.groups import Groups
from jchop._round.arguments import JCHOP_SCOPE, as_array
from jchop._spec.spec import Gradient, Spec, as_spec
from jchop.formats import ScaledFormat
from jchop.formats.rounding import Rounding
from jchop.storage._axis_groupings import axes_from_end
from jchop.storage._codes import CARRIER_FORMATS
from jchop.storage._quantize import dequantize, fit_scale, quantize

Array = jax.Array


def fit_half_quadratic(
    x: Any,
    spec: Spec | ScaledFormat | str,
    *,
    iterations: int = 20,
    norm: float = 0.7,
    weight: float = 10.0,
    growth: float = 1.01,
    whole_start: bool = False,
) -> tuple[Any, Any]:
    """Zero points that minimize the p-th powers of the errors, p < 1, in which outliers have little weight (HQQ).

    The scales come from `fit_scale`. Each iteration updates sparse errors E, which are subtracted from x, and then the
    zero points: ``E = sign(r) max(abs(r) - abs(r)^(p - 1) / b, 0)`` for the errors r = x - s e - z, and z is the mean
    of x - E - s e of a group; b grows with each iteration. The search ends when the mean of the absolute errors no
    longer falls, and returns the best zero points. Sums and powers are computed in the device's float32 (float64 for
    float64 data), so the last bits may differ between devices. `quantize` with given zero points is the same on all
    devices.

    Args:
        x: the array, as in `quantize`.
        spec: of a format with ``zero_point="float"`` whose scales are float16, bfloat16, float32 or float64, as
            ``"uint4(group=64,zero_point=float)"``. A stochastic rounding counts as one to nearest in the search.
        iterations: number of iterations, at least 1. Default 20.
        norm: p, between 0 and 1, both excluded. Default 0.7.
        weight: b in the first iteration, above 0. Default 10.
        growth: factor of b after each iteration, above 0. Default 1.01.
        whole_start: whether to start with zero points that are whole multiples of the scales, as the authors do for 4
            bits. Default False, which gives smaller errors on normally distributed numbers.

    Returns:
        ``(scale, zero_point)`` in the form of `fit_scale`, for `quantize`.

    Raises:
        TypeError, ValueError: for another format, or a number out of range.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    Example:
        >>> import numpy as np, jchop as jc
        >>> x = np.array([[0.0, 0.4, 0.4, 0.4, 1.4, 15.0]], np.float32)
        >>> scale, zero_point = jc.storage.fit_half_quadratic(x, jc.formats.uint4(channel=0, zero_point="float"))
        >>> scale.tolist(), round(float(zero_point[0, 0]), 2)  # four of six errors become smaller
        ([[1.0]], 0.34)
    """
    spec = as_spec(spec, scaled=True)
    fmt = check_float_zero_points(spec)
    settings = check_hqq_search(iterations, norm, weight, growth, whole_start)
    array = as_array("x", x)
    nearest = Rounding.NEAREST_EVEN if spec.rounding.stochastic else spec.rounding  # the search has no key
    spec = replace(spec, format=axes_from_end(fmt, array.ndim), rounding=nearest, gradient=Gradient())
    scale, zero_point = fit_scale(array, spec)
    with enable_x64_for(array.dtype), jax.named_scope(JCHOP_SCOPE):
        if whole_start:
            zero_point = ((zero_point / scale).round() * scale).astype(scale.dtype)
        if array.size:
            zero_point = _search_zero_points(
                jnp.asarray(array), scale, zero_point, settings, spec=spec, iterations=iterations
            )
        return scale, zero_point if isinstance(x, Array) else np.asarray(zero_point)


def check_float_zero_points(spec: Spec) -> ScaledFormat:
    """The format of a spec, whose zero points the search can move.

    Raises:
        ValueError: for another one.
    """
    fmt = spec.scaled
    if fmt is None or fmt.zero_point != "float":
        raise ValueError(
            f"spec={str(spec)!r} has zero_point={fmt.zero_point if fmt else None}; the search moves zero points that "
            "are numbers: zero_point='float', in text 'uint4(group=64,zero_point=float)'"
        )
    if fmt.sparse is not None:
        raise ValueError(f"spec={str(spec)!r} drops numbers, which the search does not; leave sparse out")
    if fmt.scale not in CARRIER_FORMATS.values():
        raise ValueError(
            f"spec={str(spec)!r} has scale={str(fmt.scale)!r}; the search needs one of "
            "float16, bfloat16, float32 and float64"
        )
    return fmt


def check_hqq_search(iterations: Any, norm: Any, weight: Any, growth: Any, whole_start: Any) -> tuple[float, ...]:
    """The numbers of a search.

    Raises:
        TypeError, ValueError: for one out of range.
    """
    check_int("iterations", iterations, 1, (1 << 31) - 1)
    check_bool("whole_start", whole_start)
    limits = {"norm": (norm, 1.0), "weight": (weight, math.inf), "growth": (growth, math.inf)}
    return tuple(check_float(name, value, 0, high, "()") for name, (value, high) in limits.items())


class _HqqState(NamedTuple):
    turn: Array
    zero: Array  # the next candidate
    best: Array  # the zero points with the least error so far
    error: Array  # their mean of |x - s e - z|
    improves: Array


@partial(always_jit, static_argnames=("spec", "iterations"))
def _search_zero_points(
    x: Array, scale: Array, zero: Array, settings: tuple[float, ...], *, spec: Spec, iterations: int
) -> Array:
    fmt = spec.scaled
    assert fmt is not None
    groups, wide = Groups(x.shape, fmt.group_shape(x.shape)), jnp.promote_types(x.dtype, jnp.float32)
    finite = jnp.isfinite(x)
    numbers = jnp.where(finite, x, 0).astype(wide)
    norm, weight, growth = (jnp.asarray(value, wide) for value in settings)

    def total(values: Array) -> Array:
        return jnp.sum(groups.view(values), axis=groups.axes, keepdims=True)

    def spread(values: Array) -> Array:
        return groups.back(jnp.broadcast_to(groups.expand(values).astype(wide), groups.view(numbers).shape))

    count = jnp.maximum(total(finite.astype(wide)), 1)

    def turn(state: _HqqState) -> _HqqState:
        q = quantize(x, spec, scale=scale, zero_point=state.zero)
        whole = dequantize(replace(q, zero_point=jnp.zeros_like(zero)), wide)  # s e
        rest = jnp.where(finite, numbers - whole - spread(state.zero), 0)
        size = jnp.abs(rest)
        error = jnp.mean(size)
        better = error < state.error
        power = weight * growth ** state.turn.astype(wide)
        sparse = jnp.sign(rest) * jnp.maximum(size - size ** (norm - 1) / power, 0)
        means = total(jnp.where(finite, numbers - sparse - whole, 0)) / count
        best = jnp.where(better, state.zero, state.best)
        following = groups.squeeze(means).astype(zero.dtype)
        return _HqqState(state.turn + 1, following, best, jnp.minimum(error, state.error), better)

    first = _HqqState(jnp.zeros((), jnp.int32), zero, zero, jnp.full((), jnp.inf, wide), jnp.ones((), bool))
    return lax.while_loop(lambda state: (state.turn <= iterations) & state.improves, turn, first).best
