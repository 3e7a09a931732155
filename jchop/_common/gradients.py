"""Backward rules for the cotangent of a rounded value.

The derivative of rounding is zero almost everywhere, which is useless for training. The straight-through estimator
replaces rounding by the identity (Bengio et al., arXiv 1308.3432). `jax.custom_vjp` does not support forward mode. So a
tangent passes through the linear map `on_cotangent`, whose transpose is an arbitrary rule; jvp, vjp, and both nested,
work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe


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


def _define_linear(primitive: Primitive, pull_back: Callable[..., Any]) -> None:
    """Gives a primitive that is linear in its first operand its derivative, and a transpose by `pull_back`."""

    def jvp(primals: Any, tangents: Any, **static: Any) -> Any:
        out = primitive.bind(*primals, **static)
        if type(tangents[0]) is ad.Zero:
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, primitive.bind(tangents[0], *primals[1:], **static)

    def transpose(cotangent: Any, tangent: Any, *residuals: Any, **static: Any) -> list[Any]:
        is_zero = type(cotangent) is ad.Zero
        first = ad.Zero(tangent.aval) if is_zero else pull_back(cotangent, *residuals, **static)
        return [first, *[None] * len(residuals)]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def _pull_back_by_rule(cotangent: Array, *residuals: Any, rule: Callable[..., Array], vmaps: Any) -> Array:
    for axes in vmaps:  # the rule is applied inside each vmap, the outermost last
        rule = jax.vmap(rule, in_axes=axes)
    return rule(cotangent, *residuals)


def _batch_on_cotangent(args, dims, *, rule, vmaps):
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    # The cotangent has a row for each row of the residuals.
    tangent = batching.bdim_at_front(args[0], dims[0], size)
    residuals = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args[1:], dims[1:], strict=True)]
    axes = (0, *(None if dim is None else 0 for dim in dims[1:]))
    return _on_cotangent_p.bind(tangent, *residuals, rule=rule, vmaps=(*vmaps, axes)), 0


_define_linear(_on_cotangent_p, _pull_back_by_rule)
batching.primitive_batchers[_on_cotangent_p] = _batch_on_cotangent


# -- functions with a derivative rule ----------------------------------------------------------------------------------


class CustomJvp:
    """`jax.custom_jvp`, with a rule that JAX keeps.

    For a derivative in reverse mode, JAX drops the rule of a `custom_jvp` if it takes the surrounding loop apart. A
    second derivative then differentiates operations on bits. Here the function is a primitive, so the rule stays.

    Args:
        fun: a function of arrays and static values; its results are arrays.
        nondiff_argnums: the positions of its static arguments. `defjvp` is as in JAX: the rule takes them first.
    """

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.static = frozenset(nondiff_argnums)
        self.rule: Callable[..., Any] | None = None
        self.symbolic_zeros = False

    def defjvp(self, rule: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Sets the rule."""
        self.rule, self.symbolic_zeros = rule, symbolic_zeros
        return rule

    def __call__(self, *args: Any) -> Any:
        """The results of the function."""
        static = [arg for i, arg in enumerate(args) if i in self.static]
        values, tree = jax.tree.flatten(tuple(arg for i, arg in enumerate(args) if i not in self.static))

        def flat(*values: Any) -> Any:
            fixed, moving = iter(static), iter(jax.tree.unflatten(tree, values))
            return self.fun(*(next(fixed if i in self.static else moving) for i in range(len(args))))

        def rule(primals: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
            assert self.rule is not None
            full_tangents = [self._zero(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
            operands = (jax.tree.unflatten(tree, leaves) for leaves in (primals, full_tangents))
            out, out_tangents = self.rule(*static, *operands)
            return jax.tree.leaves(out), [None if _is_zero_tangent(t) else t for t in jax.tree.leaves(out_tangents)]

        return with_rule(flat, values, rule)

    def _zero(self, primal: Any) -> Any:
        aval = jax.typeof(primal).to_tangent_aval()
        if self.symbolic_zeros:
            return SymbolicZero(aval)
        return np.zeros(aval.shape, aval.dtype) if aval.dtype == jax.dtypes.float0 else jnp.zeros_like(primal)


def _is_zero_tangent(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


def moved_by(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangents of ``fun(*primals)``; operands with a tangent of None or a symbolic zero count as constants."""
    indexes = [i for i, t in enumerate(tangents) if t is not None and not isinstance(t, SymbolicZero)]

    def partial_fun(*values: Any) -> Any:
        every = list(primals)
        for i, value in zip(indexes, values, strict=True):
            every[i] = value
        return fun(*every)

    return jax.jvp(partial_fun, [primals[i] for i in indexes], [tangents[i] for i in indexes])[1]


def with_rule(fun: Callable[..., Any], values: Sequence[Any], rule: Callable[..., Any]) -> Any:
    """``fun(*values)`` with the derivative rule `rule`.

    Args:
        fun: a function of arrays; it may not close over tracers.
        values: the arrays.
        rule: a function of lists of primals and tangents, with None for a tangent of zero. It returns the lists of the
            results and of their tangents. None in place of the results means the results of `fun`.
    """
    if not any(isinstance(value, Tracer) for value in values):
        return fun(*values)
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*values)
    out = with_rule_p.bind(*values, program=program, rule=rule)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


with_rule_p = Primitive("jchop_with_rule")
with_rule_p.multiple_results = True


def _run_with_rule(*values: Any, program: Any, **_: Any) -> list[Any]:
    return list(jaxpr_as_fun(program)(*values))


def _abstract_with_rule(*avals: Any, program: Any, **_: Any) -> Any:
    return list(program.out_avals), program.effects


def _jvp_with_rule(primals: Any, tangents: Any, *, program: Any, rule: Callable[..., Any]) -> Any:
    rule_tangents = [None if type(t) is ad.Zero else t for t in tangents]
    if all(t is None for t in rule_tangents):
        out, out_tangents = None, [None] * len(program.out_avals)
    else:
        out, out_tangents = rule(list(primals), rule_tangents)
    if out is None:
        out = with_rule_p.bind(*primals, program=program, rule=rule)
    zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out)
    return out, [zero if t is None else t for t, zero in zip(out_tangents, zeros, strict=True)]


def _batch_with_rule(axis: Any, args: Any, dims: Any, *, program: Any, rule: Callable[..., Any]) -> Any:
    """The operation for each element of a batch; the batch axis keeps its name if the operation uses it."""
    args, dims, vmap_options = _batch_operands(axis, args, dims, program.effects)
    if vmap_options is None:
        out = with_rule_p.bind(*args, program=program, rule=rule)
        return out, [None] * len(out)
    batch_program = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), in_axes=tuple(dims), **vmap_options))(*args)

    def batch_rule(primals: list[Any], tangents: list[Any]) -> tuple[Any, list[Any]]:
        tangent_dims = [None if t is None else dim for t, dim in zip(tangents, dims, strict=True)]
        return jax.vmap(rule, in_axes=(dims, tangent_dims), **vmap_options)(primals, tangents)

    out = with_rule_p.bind(*args, program=batch_program, rule=batch_rule)
    return out, [0] * len(out)


def _batch_operands(axis: Any, args: Any, dims: Any, effects: Any) -> tuple[list[Any], list[Any], Any]:
    """Operands, their batch axes, and the other arguments of `jax.vmap`; None in place of these if it is not needed."""
    args, dims = list(args), list(dims)
    uses_axis = any(getattr(effect, "name", None) == axis.name for effect in effects)
    if all(dim is None for dim in dims):
        if not uses_axis:
            return args, dims, None
        args[0], dims[0] = jnp.broadcast_to(args[0], (axis.size, *jnp.shape(args[0]))), 0  # equal on all ranks
    name = axis.name if uses_axis else None
    vmap_options = {"axis_size": axis.size, "axis_name": name, "spmd_axis_name": axis.spmd_name}
    return args, dims, vmap_options


def _transpose_with_rule(cotangents: Any, *values: Any, program: Any, rule: Callable[..., Any]) -> list[Any]:
    """The transpose of the rule's map of tangents; it must not depend on the unknown primals."""
    unknown = [ad.is_undefined_primal(x) for x in values]
    avals = [x.aval for x in values if ad.is_undefined_primal(x)]
    residuals = [x for x in values if not ad.is_undefined_primal(x)]

    def tangents_of(primals: list[Any], tangents_in: list[Any], residuals: list[Any]) -> list[Any]:
        p, t, k = iter(primals), iter(tangents_in), iter(residuals)
        _, out_tangents = rule([next(p if u else k) for u in unknown], [next(t) if u else None for u in unknown])
        pairs = zip(out_tangents, program.out_avals, strict=True)
        return [jnp.zeros(a.shape, a.dtype) if t is None else t for t, a in pairs]

    closed_jaxpr = jax.make_jaxpr(tangents_of)(avals, avals, residuals)
    instantiate = [False] * len(avals) + [True] * len(values)
    jaxpr, used = pe.dce_jaxpr(closed_jaxpr.jaxpr, [True] * len(program.out_avals), instantiate)
    if any(used[: len(avals)]):
        raise ValueError(
            f"a rounded operation on {', '.join(map(str, avals))} has a derivative that depends on this operand, so it "
            "is not linear in it; only a linear function can be transposed"
        )
    tangents = jaxpr_as_fun(closed_jaxpr.replace(jaxpr=jaxpr))
    transpose = jax.linear_transpose(lambda *tangents_in: tangents(*tangents_in, *residuals), *avals)
    cotangents_in = iter(transpose([ad.instantiate_zeros(c) for c in cotangents]))
    return [next(cotangents_in) if u else None for u in unknown]


with_rule_p.def_impl(_run_with_rule)
# In newer versions of JAX a program with primitives of a higher level is lowered in place.
with_rule_p.to_lojax = _run_with_rule
with_rule_p.def_effectful_abstract_eval(_abstract_with_rule)
ad.primitive_jvps[with_rule_p] = _jvp_with_rule
ad.primitive_transposes[with_rule_p] = _transpose_with_rule
batching.fancy_primitive_batchers[with_rule_p] = _batch_with_rule
mlir.register_lowering(with_rule_p, mlir.lower_fun(_run_with_rule, multiple_results=True))


# -- linear functions with another transpose ---------------------------------------------------------------------------


def linear_with_transpose(
    fun: Callable[..., Array], transpose: Callable[..., Array], tangent: Array, *residuals: Any
) -> Array:
    """``fun(tangent, *residuals)``, linear in `tangent`.

    Its transpose maps a cotangent g to ``transpose(g, *residuals)``. Both may use named axes, as collectives do.
    `on_cotangent` is shorter if `fun` is the identity.

    Args:
        fun: a function of arrays, which gives one; it may not close over tracers.
        transpose: likewise; its result has the type of `tangent`.
        tangent: the tangent of a value.
        residuals: further arrays for both functions, without derivatives.
    """
    there = jax.make_jaxpr(fun)(tangent, *residuals)
    back = jax.make_jaxpr(transpose)(*there.out_avals, *residuals)
    return _linear_p.bind(tangent, *residuals, there=there, back=back)


_linear_p = Primitive("jchop_linear")


def _run_linear(*values: Any, there: Any, **_: Any) -> Any:
    return jaxpr_as_fun(there)(*values)[0]


def _batch_linear(axis: Any, args: Any, dims: Any, *, there: Any, back: Any) -> Any:
    args, dims, vmap_options = _batch_operands(axis, args, dims, there.effects | back.effects)
    if vmap_options is None:
        return _linear_p.bind(*args, there=there, back=back), None
    # The cotangent has a row for each row of the residuals.
    tangent = batching.bdim_at_front(args[0], dims[0], axis.size)

    def batch_fun(program: Any) -> Callable[..., Any]:
        return jax.vmap(lambda *values: jaxpr_as_fun(program)(*values)[0], in_axes=(0, *dims[1:]), **vmap_options)

    return linear_with_transpose(batch_fun(there), batch_fun(back), tangent, *args[1:]), 0


_linear_p.def_impl(_run_linear)
_linear_p.to_lojax = _run_linear
_linear_p.def_effectful_abstract_eval(lambda *avals, there, back: (there.out_avals[0], there.effects | back.effects))
_define_linear(_linear_p, lambda g, *more, there, back: _linear_p.bind(g, *more, there=back, back=there))
batching.fancy_primitive_batchers[_linear_p] = _batch_linear
mlir.register_lowering(_linear_p, mlir.lower_fun(_run_linear, multiple_results=False))
