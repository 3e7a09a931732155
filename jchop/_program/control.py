"""Equations that hold programs: calls, loops and branches are taken apart and put together again around the plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jchop._core.xla.cpu import is_short_float, loop_entry
from jchop._program.bind import bind, with_derivative_of
from jchop._program.loop_limits import warn_of_stop
from jchop._program.seeds import Seeds
from jchop._program.step import (
    BATCHED_CALLS,
    CUSTOM_CALLS,
    HIGH_CALLS,
    PLAIN_CALLS,
    REMAT_CALLS,
    ProgramPlan,
    ProgramStep,
    carry_count,
    is_reference,
)

Array = jax.Array
Interpret = Callable[..., list[Any]]

__all__ = [
    "CONTROL_RULES",
    "Interpret",
    "LoopLimit",
    "as_jax_value",
    "copy_if_reference",
    "run_implementation",
    "where_active",
    "with_weak_types",
    "without_weak_types",
]


def _turn_seeds(seeds: Seeds | None, number: int, step: Array | int = 0) -> Seeds | None:
    return None if seeds is None else seeds.turn(number, step)


def without_weak_types(values: Sequence[Any]) -> list[Any]:
    """Values without weak types, because the types of carried values must not change."""
    return [lax.convert_element_type(x, x.dtype) if _has_number_dtype(x) else x for x in map(as_jax_value, values)]


def with_weak_types(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The results of a program as JAX arrays, with the weak types that their variables have."""
    return [
        lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
        if getattr(v.aval, "weak_type", False) and not x.weak_type
        else x
        for x, v in zip(map(as_jax_value, values), variables, strict=True)
    ]


def as_jax_value(x: Any) -> Any:
    """A constant of a program as a JAX array; arrays, keys and mutable references unchanged."""
    return x if isinstance(x, Array) or is_reference(x) else jnp.asarray(x)


def copy_if_reference(x: Any) -> Any:
    """A value that another run may use: a mutable reference with the same contents, any other value itself."""
    return jax.new_ref(x[...]) if is_reference(x) else x


def _has_number_dtype(x: Any) -> bool:
    return not is_reference(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _run_call(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    return interpret(step.inner[0], _turn_seeds(seeds, step.number), args)


def _run_remat(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    params = step.eqn.params
    inner = partial(interpret, step.inner[0], _turn_seeds(seeds, step.number))
    return jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(args)


def _run_custom_rule(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """The function's own derivative rule, in the carrier."""
    own = partial(bind, step.eqn.primitive, step.eqn.params)

    def run(values: list[Any], seeds: Seeds | None) -> list[Any]:
        return interpret(step.inner[0], seeds, values)

    return with_derivative_of(own, run, without_weak_types(args), _turn_seeds(seeds, step.number))


def run_implementation(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """A primitive by its implementation, which is a program; the derivative is the primitive's own, in the carrier.

    What has its own rule for batches has it also under `jax.vmap`.
    """
    if step.later is None or not any(isinstance(x, Tracer) for x in jax.tree.leaves((seeds, args))):
        return _run_custom_rule(step, seeds, args, interpret)
    if step.name in BATCHED_CALLS:
        return _with_batch_rule(
            step, interpret, lambda seeds, args: _run_custom_rule(step, seeds, args, interpret), seeds, args
        )

    # The derivative outside: JAX has none in reverse mode for a function with a rule for batches.
    def inner(plan: ProgramPlan, *seeds_and_args: Any) -> list[Any]:
        return _with_batch_rule(step, interpret, partial(interpret, plan), *seeds_and_args)

    return _run_custom_rule(step, seeds, args, inner)


def _with_batch_rule(
    step: ProgramStep, interpret: Interpret, run: Callable[..., list[Any]], seeds: Seeds | None, args: Sequence[Any]
) -> list[Any]:
    """``run(seeds, args)``, in a batch the rule of the step."""
    leaves, tree = jax.tree.flatten((seeds, list(args)))

    def alone(*leaves: Any) -> list[Any]:
        return run(*jax.tree.unflatten(tree, leaves))

    def batch(size: int, flags: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
        if any(flags) and not any(flags[len(leaves) - len(args) :]):  # the seeds alone
            return jax.vmap(alone, [0 if b else None for b in flags])(*leaves), [True] * len(step.eqn.outvars)
        return _run_batch_rule(step, interpret, size, *(jax.tree.unflatten(tree, each) for each in (flags, leaves)))

    call = jax.custom_batching.custom_vmap(alone)  # of leaves, as JAX's derivative of it does not take None
    call.def_vmap(batch)
    return call(*leaves)


def _run_batch_rule(
    step: ProgramStep, interpret: Interpret, size: int, batch_flags: Any, seeds_and_args: Any
) -> tuple[list[Any], list[bool]]:
    """The results of a function's own rule for batches, which is run as the function is, and which are batched."""
    (rows, flags), (seeds, args), out_flags = batch_flags, seeds_and_args, list[bool]()
    seeds = jax.tree.map(lambda x, b: x[0] if b else x, seeds, rows)  # one program rounds the whole batch

    def rule(*values: Any) -> list[Any]:
        if step.name not in BATCHED_CALLS:
            out_flags[:] = [True] * len(step.eqn.outvars)
            return jax.vmap(partial(bind, step.eqn.primitive, step.eqn.params), [0 if b else None for b in flags])(
                *values
            )
        trees = (list(jax.tree.unflatten(step.eqn.params["in_tree"], each)) for each in (flags, values))
        out, out_flags[:] = map(jax.tree.leaves, step.eqn.params["rule"](size, next(trees), *next(trees)))
        return out

    assert step.later is not None
    program = jax.make_jaxpr(rule)(*args)
    plan = step.later(program)

    def run(values: list[Any], seeds: Seeds | None) -> list[Any]:
        return interpret(plan, seeds, values)

    return with_derivative_of(
        jaxpr_as_fun(program), run, without_weak_types(args), _turn_seeds(seeds, step.number)
    ), out_flags


def _run_linear_solve(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """The solver is emulated; the linear system gives the derivatives, in the carrier."""
    lengths = step.eqn.params["const_lengths"]
    first, last = lengths.matvec + lengths.vecmat, sum(lengths)
    own = partial(bind, step.eqn.primitive, step.eqn.params)

    def run(values: list[Any], seeds: Seeds | None) -> list[Any]:
        return interpret(step.inner[0], seeds, [*values[first : first + lengths.solve], *values[last:]])

    return with_derivative_of(own, run, without_weak_types(args), _turn_seeds(seeds, step.number))


def _run_cond(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    index, *operands = args

    def branch(i: int, values: list[Any]) -> list[Any]:
        return without_weak_types(interpret(step.inner[i], _turn_seeds(seeds, step.number + i), values))

    return lax.switch(index, [partial(branch, i) for i in range(len(step.inner))], operands)


def _run_scan(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    params = step.eqn.params
    consts, carry_size = carry_count(params)
    fixed, start, xs = args[:consts], args[consts : consts + carry_size], args[consts + carry_size :]

    leaves, structure = jax.tree.flatten(xs)
    apart = [bool(params["length"]) and is_short_float(x) and x.dtype.itemsize == 1 for x in leaves]

    def turn(carry: tuple[list[Any], Array], entries: list[Any]) -> tuple[tuple[list[Any], Array], list[Any]]:
        values, count = carry
        place = jnp.uint32(params["length"] - 1) - count if params["reverse"] else count
        rest = iter(entries)
        row = [loop_entry(x, place) if own else next(rest) for x, own in zip(leaves, apart, strict=True)]
        x = jax.tree.unflatten(structure, row)
        out = without_weak_types(
            interpret(step.inner[0], _turn_seeds(seeds, step.number, count), [*fixed, *values, *x])
        )
        return (out[:carry_size], count + jnp.uint32(1)), out[carry_size:]

    (last, _), ys = lax.scan(
        turn,
        (without_weak_types(start), jnp.uint32(0)),
        [x for x, own in zip(leaves, apart, strict=True) if not own],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *ys]


@dataclass(frozen=True)
class LoopLimit:
    """The limit of `while` loops.

    Args:
        most: the most turns.
        watch: a function of the plan of a condition, seeds and arguments. It returns the comparisons in the condition,
            each a step and its operands, and the result.
    """

    most: int
    watch: Callable[..., tuple[list[tuple[ProgramStep, list[Any]]], Any]]


def _run_while(
    step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret, limit: LoopLimit | None = None
) -> list[Any]:
    test, body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    first, fixed, start = args[:test], args[test : test + body], args[test + body :]

    def go_on(values: list[Any], count: Array) -> Any:
        return interpret(step.inner[0], _turn_seeds(seeds, step.number, count), [*first, *values])[0]

    def next_of(values: list[Any], count: Array) -> list[Any]:
        return without_weak_types(
            interpret(step.inner[1], _turn_seeds(seeds, step.number + 1, count), [*fixed, *values])
        )

    start, zero = without_weak_types(start), jnp.uint32(0)
    if not step.inner[0].jaxpr.outvars[0].aval.shape:

        def turn(carry: tuple[list[Any], Array]) -> tuple[list[Any], Array]:
            return next_of(*carry), carry[1] + jnp.uint32(1)

        def goes_on(carry: tuple[list[Any], Array]) -> Any:
            return go_on(*carry) if limit is None else go_on(*carry) & (carry[1] < limit.most)

        last, count = lax.while_loop(goes_on, turn, (start, zero))
        if limit is not None:
            _warn_at_limit(step, _turn_seeds(seeds, step.number, count), [*first, *last], limit, count)
        return last

    def turn_some(carry: tuple[list[Any], Array, Array]) -> tuple[list[Any], Array, Array]:
        values, count, active = carry
        out = [where_active(active, *pair) for pair in zip(next_of(values, count), values, strict=True)]
        count = count + jnp.uint32(1)
        return out, count, active & go_on(out, count)

    # A batch of loops: the values of a finished loop stay the same until the last loop ends.
    def some_go_on(carry: tuple[list[Any], Array, Array]) -> Any:
        return jnp.any(carry[2]) if limit is None else jnp.any(carry[2]) & (carry[1] < limit.most)

    last, count, _ = lax.while_loop(some_go_on, turn_some, (start, zero, go_on(start, zero)))
    if limit is not None:
        _warn_at_limit(step, _turn_seeds(seeds, step.number, count), [*first, *last], limit, count)
    return last


def _warn_at_limit(step: ProgramStep, seeds: Seeds | None, args: list[Any], limit: LoopLimit, count: Array) -> None:
    """A warning, when the program runs, if a condition still holds after the last turn."""

    def look() -> None:
        comparisons, goes_on = limit.watch(step.inner[0], seeds, args)
        say = partial(warn_of_stop, step, [one for one, _ in comparisons], limit.most)
        jax.debug.callback(say, *lax.stop_gradient((goes_on, [operands for _, operands in comparisons])))

    lax.cond(count >= limit.most, look, lambda: None)


def where_active(active: Array, new: Any, old: Any) -> Any:
    """The new values of the loops of a batch that still run; the batch comes first."""
    if not active.ndim:
        return new
    mask = lax.broadcast_in_dim(active, jnp.shape(new), tuple(range(active.ndim)))
    return lax.select(mask, new, as_jax_value(old))


def _run_shard_map(step: ProgramStep, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """Each shard counts its own elements, so values that vary over shards have different seeds on each shard."""
    params = step.eqn.params
    axes = tuple(sorted(params.get("newly_manual_axes", params.get("manual_axes"))))
    own, tree = jax.tree.flatten(_turn_seeds(seeds, step.number))
    check_vma = params["check_vma"]

    def shard(own: list[Array], *values: Any) -> tuple[Any, ...]:
        inside = jax.tree.unflatten(tree, own)
        return tuple(interpret(step.inner[0], None if inside is None else inside.within(axes, check_vma), list(values)))

    return list(
        jax.shard_map(
            shard,
            mesh=params["mesh"],
            in_specs=([PartitionSpec()] * len(own), *params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(axes),
            check_vma=check_vma,
        )(own, *args)
    )


CONTROL_RULES: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys((*PLAIN_CALLS, *HIGH_CALLS), _run_call),
    **dict.fromkeys(REMAT_CALLS, _run_remat),
    **dict.fromkeys(CUSTOM_CALLS, _run_custom_rule),
    "custom_linear_solve": _run_linear_solve,
    "cond": _run_cond,
    "scan": _run_scan,
    "while": _run_while,
    "shard_map": _run_shard_map,
}
