"""The formulas of kept scales: ranges that move, histories, and the rounding of an array under them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.gradients import CustomJvp
from jchop._core.scaled.groups import Groups
from jchop._quantized.products.codes import CodedArray, expand_codes
from jchop._quantized.products.operand_layout import OperandLayout, keep_nan
from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage
from jchop._spec.spec import Gradient, Spec
from jchop.storage import QArray, dequantize, fit_scale, quantize

Array = jax.Array


def update_range(source: MovingAverage, current: Array, x: Array, fixed: bool) -> Array:
    """The range for the rounding of `x`: the known one, updated unless it is fixed; that of `x` if there is none."""
    own_range = finite_range(x)
    span = current if fixed else source.decay * current + (1 - source.decay) * own_range
    return jnp.where(jnp.isnan(current), own_range, span)


def update_history(source: DelayedScaling, history: Array, x: Array) -> tuple[Array, Array]:
    """The range that `x` is rounded under, and the history with it."""
    own_magnitude = jnp.max(jnp.abs(_finite_numbers(x)))
    past_magnitude = history[0] if source.take == "last" else history.max()
    magnitude = jnp.where(past_magnitude > 0, past_magnitude, own_magnitude)
    return jnp.stack([-magnitude, magnitude]), jnp.concatenate([own_magnitude[None], history[:-1]])


def round_lsq_operand(
    source: LSQ, layout: OperandLayout | None, x: Array, spec: Spec, scale: Array, key: Array | None
) -> Array:
    """`x` rounded under a learned scale: of a kernel in its layout, or (None) of an activation, which has one scale."""
    if layout is None:
        numbers, scale = x, scale.reshape((1,) * x.ndim)
        sharing = x.size // x.shape[0] if x.ndim > 1 else x.size
    else:
        numbers = layout.lay(x)
        sharing = numbers.size // scale.size
    y = round_lsq(numbers, spec, scale, key, sharing=sharing if source.factor else None)
    return keep_nan(x, y if layout is None else layout.back(y, x.shape), spec)


def initial_scale(span: Array, spec: Spec) -> Array:
    """The scale that an activation of this range starts with."""
    return fit_scale(span.astype(jnp.float32), spec)[0].reshape(())


def finite_range(x: Array) -> Array:
    """The least and the largest number of an array."""
    numbers = _finite_numbers(x)
    return jnp.stack([numbers.min(), numbers.max()])


def _finite_numbers(x: Array) -> Array:
    """The finite numbers of an array, which alone count for a scale."""
    x = lax.stop_gradient(x).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), x, 0)


def round_in_range(x: Array, spec: Spec, span: Array, key: Array | None = None) -> Array:
    """`x` rounded under the scale that an array of the range `span` has; gradients pass straight through."""
    if spec.gradient != Gradient():
        raise ValueError(f"activation={str(spec)!r} has a gradient; under a fixed scale it passes straight through")
    y = lax.stop_gradient(dequantize(_quantize_in_range(spec, *lax.stop_gradient((x, span)), key)))
    return keep_nan(x, _straight_through(x, y), spec)


def round_in_range_with_codes(x: Array, spec: Spec, span: Array, key: Array | None = None) -> tuple[Array, CodedArray]:
    """As `round_in_range`, and the codes of the numbers."""
    numbers = lax.stop_gradient(x)
    return round_in_range(x, spec, span, key), expand_codes(_quantize_in_range(spec, numbers, span, key), numbers)


def _quantize_in_range(spec: Spec, x: Array, span: Array, key: Array | None) -> QArray:
    # The scale of an array has as many axes as the array.
    ends = span.astype(x.dtype).reshape(*(1,) * (x.ndim - 1), 2) if x.ndim else jnp.max(jnp.abs(span)).astype(x.dtype)
    scale, zero_point = fit_scale(ends, spec)
    return quantize(x, spec, key, scale=scale, zero_point=zero_point)


@CustomJvp
def _straight_through(x: Array, y: Array) -> Array:
    """`y`, with the derivative of `x`."""
    return y


def _straight_through_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Any]:
    return _straight_through(*primals), tangents[0]


_straight_through.defjvp(_straight_through_jvp, symbolic_zeros=True)


# -- learned scales --------------------------------------------------------------------------------------------------


def round_lsq(x: Array, spec: Spec, scale: Array, key: Array | None = None, *, sharing: int | None = None) -> Array:
    """`x` rounded under given scales, with LSQ's gradients for both.

    Args:
        x: a carrier.
        spec: of a scaled format without zero points.
        scale: as `fit_scale` returns it for `x`.
        key: a typed key where the spec is stochastic.
        sharing: how many numbers share a scale, n in the factor 1/sqrt(n M) of its gradient. Default None: no factor.

    Source: Esser et al., "Learned step size quantization", ICLR 2020, equations 1 to 3 and section 2.2.
    """
    largest = float(spec.element.max)
    return _round_lsq(spec, 1.0 if sharing is None else 1 / math.sqrt(sharing * largest), x, scale, key)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _round_lsq(spec: Spec, factor: float, x: Array, scale: Array, key: Array | None) -> Array:
    return dequantize(quantize(x, spec, key, scale=scale))


def _round_lsq_fwd(spec: Spec, factor: float, x: Array, scale: Array, key: Array | None) -> tuple[Any, tuple]:
    y = _round_lsq(spec, factor, x, scale, key)
    return y, (x, y, scale)


def _round_lsq_bwd(spec: Spec, factor: float, residuals: tuple, g: Array) -> tuple[Any, Array, None]:
    x, y, scale = residuals
    fmt = spec.scaled
    assert fmt is not None
    wide = jnp.promote_types(x.dtype, jnp.float32)
    groups = Groups(x.shape, fmt.group_shape(x.shape))
    numbers, rounded_numbers, slope = (groups.view(v.astype(wide)) for v in (x, y, g))
    s = groups.expand(scale.astype(wide))
    inside = (numbers > float(spec.element.min) * s) & (numbers < float(spec.element.max) * s)
    # e - v/s inside, e beyond; both with s e = y
    by_scale = slope * (rounded_numbers - jnp.where(inside, numbers, 0)) / s
    total = factor * jnp.sum(by_scale, axis=groups.axes, keepdims=True)
    of_x = groups.back(jnp.where(inside, slope, 0)).astype(x.dtype)
    return of_x, groups.squeeze(total).astype(scale.dtype), None


_round_lsq.defvjp(_round_lsq_fwd, _round_lsq_bwd)
