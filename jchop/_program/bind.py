"""A primitive by itself, and functions whose derivative is that of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

__all__ = ["bind", "constant_of", "straight_through", "with_derivative_of"]

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


# -- operations --------------------------------------------------------------------------------------------------------

#: An operation and the one that has its derivative. It is a primitive, because JAX drops the rule of a `custom_jvp` if
#: it takes the loop around it apart: the derivative of a derivative by reverse mode would be one of bits, zero.
_straight = Primitive("straight_through")
_straight.multiple_results = True


def straight_through(run: Callable[..., Any], plain: Callable[..., Any], args: Sequence[Any], extra: Any) -> Any:
    """``run(args, extra)``, with the derivative by `args` that ``plain(*args)`` has; neither may close over tracers."""
    values, tree = jax.tree.flatten((list(args), extra))

    def flat(*values: Any) -> Any:
        return run(*jax.tree.unflatten(tree, values))

    program, shapes = jax.make_jaxpr(flat, return_shape=True)(*values)
    out = _straight.bind(*values, program=program, plain=partial(_leaves, plain), count=len(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _leaves(fun: Callable[..., Any], *args: Any) -> list[Any]:
    return jax.tree.leaves(fun(*args))


def _run(*values: Any, program: Any, **_: Any) -> list[Any]:
    return list(jaxpr_as_fun(program)(*values))


def _abstract(*avals: Any, program: Any, **_: Any) -> Any:
    del avals
    return list(program.out_avals), program.effects


def _jvp(primals: Any, tangents: Any, *, program: Any, plain: Callable[..., Any], count: int) -> Any:
    out = _straight.bind(*primals, program=program, plain=plain, count=count)
    moved = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
    none = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    if not moved:
        return out, none

    def of_moved(*values: Any) -> Any:
        every = list(primals[:count])
        for i, value in zip(moved, values, strict=True):
            every[i] = value
        return plain(*every)

    _, found = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    return out, [zero if t.dtype == jax.dtypes.float0 else t for t, zero in zip(found, none, strict=True)]


def _batch(axis: Any, args: Any, dims: Any, *, program: Any, plain: Callable[..., Any], count: int) -> Any:
    """The operation of each element of a batch; the axis has its name there if the operation uses it."""
    if all(dim is None for dim in dims):
        out = _straight.bind(*args, program=program, plain=plain, count=count)
        return out, [None] * len(out)
    uses = any(getattr(effect, "name", None) == axis.name for effect in program.effects)
    how: Any = {"axis_size": axis.size, "axis_name": axis.name if uses else None, "spmd_axis_name": axis.spmd_name}
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), in_axes=tuple(dims), **how))(*args)
    if all(dim is None for dim in dims[:count]):  # the random words alone differ

        def plain_mapped(*values: Any) -> list[Any]:
            return [jnp.broadcast_to(x, (axis.size, *x.shape)) for x in plain(*values)]
    else:
        plain_mapped = jax.vmap(plain, in_axes=tuple(dims[:count]), **how)
    out = _straight.bind(*args, program=mapped, plain=plain_mapped, count=count)
    return out, [0] * len(out)


_straight.def_impl(_run)
_straight.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_straight] = _jvp
batching.fancy_primitive_batchers[_straight] = _batch
mlir.register_lowering(_straight, mlir.lower_fun(_run, multiple_results=True))


# -- programs ----------------------------------------------------------------------------------------------------------


def with_derivative_of(plain: Callable[..., Any], run: Callable[..., Any], args: Sequence[Any], extra: Any) -> Any:
    """``run(args, extra)`` of a program, which may have effects, with the derivative by `args` of ``plain(*args)``."""

    @jax.custom_jvp
    def rounded(args: Any, extra: Any) -> Any:
        return run(args, extra)

    rounded.defjvp(partial(_tangents, run, plain), symbolic_zeros=True)
    return rounded(list(args), extra)


def _tangents(run: Callable[..., Any], plain: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    args, extra = primals
    out = with_derivative_of(plain, run, args, extra)  # so that second derivatives come out too
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
