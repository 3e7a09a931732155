"""Activations rounded under a scale that is fixed, not taken from each array anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jchop._products.codes import Coded, parts_of
from jchop._products.layout import with_nan
from jchop.spec import Gradient, Spec
from jchop.storage import QArray, dequantize, fit_scale, quantize

Array = jax.Array

__all__ = ["ActivationRange", "codes_within", "round_within"]


class ActivationRange(nnx.Variable):
    """The range (least, largest) of a layer's input that its scale is made for, as `calibrate` found it.

    It is ordinary state of the model, saved and restored with it, and may be set by hand.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> rule = jc.nn.Rule(activation="int8")
        >>> layer = jc.nn.Linear(2, 2, rule=rule, rngs=nnx.Rngs(0))
        >>> static = jc.nn.calibrate(layer, [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])])
        >>> static.dot_general.range[...].tolist()
        [-3.0, 2.0]
    """


def round_within(x: Array, spec: Spec, span: Array, key: Array | None = None) -> Array:
    """`x` rounded under the scale that an array of the range `span` has; gradients pass straight through."""
    if spec.gradient != Gradient():
        raise ValueError(f"activation={str(spec)!r} has a gradient; under a fixed scale it passes straight through")
    return _rounded(spec, x, span, key)


def codes_within(x: Array, spec: Spec, span: Array, key: Array | None = None) -> tuple[Array, Coded]:
    """As `round_within`, with the codes of the numbers beside them."""
    stored = _stored(spec, jax.lax.stop_gradient(x), span, key)
    return round_within(x, spec, span, key), parts_of(stored)


def _stored(spec: Spec, x: Array, span: Array, key: Array | None) -> QArray:
    # The scale of an array has as many axes as the array.
    ends = span.astype(x.dtype).reshape(*(1,) * (x.ndim - 1), 2) if x.ndim else jnp.max(jnp.abs(span)).astype(x.dtype)
    scale, zero_point = fit_scale(ends, spec)
    return quantize(x, spec, key, scale=scale, zero_point=zero_point)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(spec: Spec, x: Array, span: Array, key: Array | None) -> Array:
    return with_nan(x, dequantize(_stored(spec, x, span, key)), spec)


def _forward(spec: Spec, x: Array, span: Array, key: Array | None) -> tuple[Array, None]:
    return _rounded(spec, x, span, key), None


def _backward(spec: Spec, kept: None, g: Array) -> tuple[Any, None, None]:
    return g, None, None


_rounded.defvjp(_forward, _backward)
