"""Binding of primitives, and functions with the derivative of another function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from jchop._common.gradients import moved_by, with_rule
from jchop._program.step import is_reference


def bind(primitive: Any, params: dict[str, Any], *args: Any) -> list[Any]:
    """The primitive itself, its results as a list."""
    # Constants are arrays of NumPy. A custom derivative keeps them, and may take an entry at a traced index.
    args = tuple(a if isinstance(a, Array) or is_reference(a) or not np.ndim(a) else jnp.asarray(a) for a in args)
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def constant_of(literal: Literal) -> Any:
    """The value of a literal, of its dtype."""
    aval: Any = literal.aval
    inexact = hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
    return np.asarray(literal.val, aval.dtype) if inexact else literal.val


# -- operations --------------------------------------------------------------------------------------------------------


def straight_through(run: Callable[..., Any], plain: Callable[..., Any], args: Sequence[Any], extra: Any) -> Any:
    """``run(args, extra)`` with the derivative of ``plain(*args)``; neither function may close over tracers."""
    values, tree = jax.tree.flatten((list(args), extra))
    count = len(args)

    def flat(*values: Any) -> Any:
        return run(*jax.tree.unflatten(tree, values))

    def rule(primals: list[Any], tangents: list[Any]) -> tuple[None, list[Any]]:
        out_tangents = jax.tree.leaves(moved_by(plain, primals[:count], tangents[:count]))
        return None, [None if t.dtype == jax.dtypes.float0 else t for t in out_tangents]

    return with_rule(flat, values, rule)


# -- programs ----------------------------------------------------------------------------------------------------------


def with_derivative_of(plain: Callable[..., Any], run: Callable[..., Any], args: Sequence[Any], extra: Any) -> Any:
    """``run(args, extra)`` of a program, which may have effects, with the derivative of ``plain(*args)``."""

    @jax.custom_jvp
    def rounded(args: Any, extra: Any) -> Any:
        return run(args, extra)

    rounded.defjvp(partial(_tangents, run, plain), symbolic_zeros=True)
    return rounded(list(args), extra)


def _tangents(run: Callable[..., Any], plain: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    args, extra = primals
    out = with_derivative_of(plain, run, args, extra)  # so that second derivatives come out too
    if all(isinstance(t, SymbolicZero) for t in tangents[0]):
        return out, jax.tree.map(_zero_tangent, out)
    return out, moved_by(plain, args, tangents[0])


def _zero_tangent(x: Array) -> Any:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if inexact else np.zeros(x.shape, jax.dtypes.float0)
