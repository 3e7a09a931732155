"""Primitives of other packages, opened: their Python implementations are programs of known primitives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

__all__ = ["program_of"]


def program_of(eqn: Any) -> Any:
    """The program of the implementation of an equation's primitive; None if it cannot be traced."""
    primitive = eqn.primitive
    if primitive.impl is None or _is_compiled(primitive.impl):
        return None
    params = primitive.get_bind_params(eqn.params)
    try:
        closed = jax.make_jaxpr(lambda *args: primitive.impl(*args, **params))(*(v.aval for v in eqn.invars))
    except Exception:  # any error of another package that needs numbers
        return None
    same = [v.aval.shape for v in closed.jaxpr.outvars] == [v.aval.shape for v in eqn.outvars]
    return closed if same and all(one.primitive is not primitive for one in closed.jaxpr.eqns) else None


def _is_compiled(impl: Any) -> bool:
    """Whether the implementation is JAX's own, which compiles the primitive."""
    function = impl.func if isinstance(impl, partial) else impl
    return getattr(function, "__module__", "") == "jax._src.dispatch"
