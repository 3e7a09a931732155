"""Numbers rounded under scales that are learned: the forward and the backward formula of LSQ."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.scaled.groups import Groups
from jchop._spec.spec import Spec
from jchop.storage import dequantize, quantize

Array = jax.Array

__all__ = ["round_lsq"]


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
