"""Backward rules for the cotangent of a rounded value.

The derivative of rounding is zero almost everywhere, which is useless for training. The straight-through estimator
replaces rounding by the identity (Bengio et al., arXiv 1308.3432). `jax.custom_vjp` does not support forward mode. So a
tangent passes through the linear map `on_cotangent`, whose transpose is an arbitrary rule; jvp, vjp, and both nested,
work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array


def on_cotangent(rule: Callable[..., Array], tangent: Array, *residuals: Any) -> Array:
    """`tangent` itself, linear in it; its transpose maps a cotangent g to ``rule(g, *residuals)``.

    Args:
        rule: a hashable function; equal rules share one trace.
        tangent: the tangent of a value, any shape.
        residuals: further arrays for the rule, without derivatives.
    """
    return _on_cotangent_p.bind(tangent, *residuals, rule=rule, vmaps=())


_on_cotangent_p = Primitive("jchop_on_cotangent")
_on_cotangent_p.def_impl(lambda tangent, *residuals, **static: tangent)
_on_cotangent_p.def_abstract_eval(lambda tangent, *residuals, **static: tangent)
mlir.register_lowering(
    _on_cotangent_p, mlir.lower_fun(lambda tangent, *residuals, **static: tangent, multiple_results=False)
)


def _jvp(primals, tangents, **static):
    tangent = tangents[0]
    out = _on_cotangent_p.bind(*primals, **static)
    if type(tangent) is ad.Zero:
        return out, tangent
    return out, _on_cotangent_p.bind(tangent, *primals[1:], **static)


def _transpose(cotangent, tangent, *residuals, rule, vmaps):
    nothing = [None] * len(residuals)
    if type(cotangent) is ad.Zero:
        return [ad.Zero(tangent.aval), *nothing]
    for axes in vmaps:  # the rule is applied inside each vmap, the outermost last
        rule = jax.vmap(rule, in_axes=axes)
    return [rule(cotangent, *residuals), *nothing]


def _batch(args, dims, *, rule, vmaps):
    tangent, *residuals = args
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is None:  # the cotangent has a row for each row of the residuals
        tangent = jnp.broadcast_to(tangent, (size, *tangent.shape))
    else:
        tangent = jnp.moveaxis(tangent, dims[0], 0)
    residuals = [
        residual if dim is None else jnp.moveaxis(residual, dim, 0)
        for residual, dim in zip(residuals, dims[1:], strict=True)
    ]
    axes = (0, *(None if dim is None else 0 for dim in dims[1:]))
    return _on_cotangent_p.bind(tangent, *residuals, rule=rule, vmaps=(*vmaps, axes)), 0


ad.primitive_jvps[_on_cotangent_p] = _jvp
ad.primitive_transposes[_on_cotangent_p] = _transpose
batching.primitive_batchers[_on_cotangent_p] = _batch
