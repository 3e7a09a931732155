"""A primitive by itself, and functions whose derivative is that of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

__all__ = ["bind", "constant_of", "straight_through"]

Array = jax.Array


def bind(primitive: Any, params: dict[str, Any], *args: Any) -> list[Any]:
    """The primitive itself, its results as a list."""
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def constant_of(literal: Literal) -> Any:
    """The value of a literal, of its dtype."""
    aval: Any = literal.aval
    inexact = hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
    return np.asarray(literal.val, aval.dtype) if inexact else literal.val


def straight_through(run: Callable[..., Any], plain: Callable[..., Any], args: Sequence[Any], extra: Any) -> Any:
    """``run(args, extra)``, with the derivative by `args` that ``plain(*args)`` has."""

    @jax.custom_jvp
    def rounded(args: Any, extra: Any) -> Any:
        return run(args, extra)

    rounded.defjvp(partial(_tangents, run, plain), symbolic_zeros=True)
    return rounded(list(args), extra)


def _tangents(run: Callable[..., Any], plain: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    args, extra = primals
    out = straight_through(run, plain, args, extra)  # so that second derivatives come out too
    moved = [i for i, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]
    if not moved:
        return out, jax.tree.map(_no_tangent, out)

    def of_moved(*values: Any) -> Any:
        every = list(args)
        for i, value in zip(moved, values, strict=True):
            every[i] = value
        return plain(*every)

    _, tangent = jax.jvp(of_moved, [args[i] for i in moved], [tangents[0][i] for i in moved])
    return out, tangent


def _no_tangent(x: Array) -> Any:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if inexact else np.zeros(x.shape, jax.dtypes.float0)
