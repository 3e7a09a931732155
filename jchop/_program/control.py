"""Equations that hold programs, and how these run.

`CONTROL` says once for each primitive how it is planned and run. `Loops` has the
loops of JAX. A runner of concrete values replaces them (`_program/lanes.py`); another may add carried values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jchop._core.xla.cpu import is_short_float, loop_entry
from jchop._program.bind import bind, with_derivative_of
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
    scope_of,
)
from jchop._program.stopped_loops import warn_of_stop

Interpret = Callable[..., list[Any]]

# -- values ------------------------------------------------------------------------------------------------------------


def without_weak_types(values: Any) -> Any:
    """A tree of values without weak types, because the types of carried values must not change."""
    return jax.tree.map(_without_weak_type, values)


def _without_weak_type(x: Any) -> Any:
    x = as_jax_value(x)
    is_number = not is_reference(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return lax.convert_element_type(x, x.dtype) if is_number else x


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


def where_active(active: Array, new: Any, old: Any) -> Any:
    """The new values of the loops of a batch that still run; the batch comes first."""
    if not active.ndim:
        return new
    mask = lax.broadcast_in_dim(active, jnp.shape(new), tuple(range(active.ndim)))
    return lax.select(mask, new, as_jax_value(old))


# -- loops -------------------------------------------------------------------------------------------------------------


class ScanOrder(NamedTuple):
    """The turns of a scan."""

    length: int
    reverse: bool = False
    unroll: int = 1


class WhileParts(NamedTuple):
    """Functions of the carried values and the count of turns.

    Args:
        condition: the seeds and arguments of the program of the condition.
        goes_on: its result.
        next_of: the next carried values.
    """

    condition: Callable[[Any, Any], tuple[Any, list[Any]]]
    goes_on: Callable[[Any, Any], Any]
    next_of: Callable[[Any, Any], Any]


ScanTurn = Callable[[Any, Any, Any], tuple[Any, Any]]


#: After so many turns a loop is checked whether a turn kept its values.
_LOOK_TURNS = 64


class Loops:
    """How the programs that an equation holds run: as calls, loops and branches of JAX.

    A value is a pytree of arrays.
    """

    #: The most turns of a `while` loop, which then ends with a warning; None for any number.
    max_turns: int | None = None
    #: Whether a `while` loop without a limit ends when no later turn can end it, and whether a warning says so.
    ends_stuck_loops = warns = False
    #: Whether derivatives of the results may be asked for.
    differentiates = True

    def inside(self, seeds: Any, number: int, turn: Array | int = 0) -> Any:
        """The seeds of one turn of a program within an equation."""
        return None if seeds is None else seeds.turn(number, turn)

    def with_derivative(
        self, own: Callable[..., Any], run: Callable[[list[Any], Any], list[Any]], args: list[Any], seeds: Any
    ) -> list[Any]:
        """``run(args, seeds)`` with the derivative of ``own(*args)``."""
        if not self.differentiates:
            return run(args, seeds)
        return with_derivative_of(own, run, without_weak_types(args), seeds)

    def remat(self, run: Callable[[list[Any]], list[Any]], args: list[Any], params: dict[str, Any]) -> list[Any]:
        """``run(args)``, computed again for derivatives."""
        if not self.differentiates:
            return run(args)
        return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(args)

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
        """The results of the branch at the index."""
        runs = [lambda values, run=run: without_weak_types(run(values)) for run in branches]
        return lax.switch(index, runs, operands)

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """The last carried values and the stacked results of ``turn(carried values, row of xs, count)``."""
        leaves, structure = jax.tree.flatten(xs)
        apart = [bool(order.length) and is_short_float(x) and x.dtype.itemsize == 1 for x in leaves]

        def body(carry: tuple[Any, Array], entries: list[Any]) -> tuple[tuple[Any, Array], Any]:
            values, count = carry
            place = jnp.uint32(order.length - 1) - count if order.reverse else count
            rest = iter(entries)
            row = [loop_entry(x, place) if own else next(rest) for x, own in zip(leaves, apart, strict=True)]
            values, ys = without_weak_types(turn(values, jax.tree.unflatten(structure, row), count))
            return (values, count + jnp.uint32(1)), ys

        stacks = [x for x, own in zip(leaves, apart, strict=True) if not own]
        (last, _), ys = lax.scan(body, (without_weak_types(start), jnp.uint32(0)), stacks, **order._asdict())
        return last, ys

    def while_loop(self, step: Any, loop: WhileParts, start: Any) -> Any:
        """The values with which a loop ends; its numbers are NaN if it was stuck."""
        start, zero, most = without_weak_types(start), jnp.uint32(0), self.max_turns
        draws = loop.condition(start, zero)[0] is not None
        places = deciding_places(step) if self.ends_stuck_loops and most is None and not draws else ()
        batch = jnp.ndim(step.inner[0].jaxpr.outvars[0].aval)

        def same(new: Any, old: Any) -> Any:
            return reduce(jnp.logical_and, [_same_bits(new[i], old[i], batch) for i in places])

        def turn(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            values, count, *active = carry
            new, count = without_weak_types(loop.next_of(values, count)), count + jnp.uint32(1)
            if not active:
                return new, count
            new = jax.tree.map(partial(where_active, *active), new, values)
            goes_on = active[0] & loop.goes_on(new, count)
            if places:
                look = partial(lax.cond, count % _LOOK_TURNS == 0)
                goes_on &= look(lambda: active[0] & ~same(new, values), lambda: active[0])
            return new, count, goes_on

        def holds(carry: tuple[Any, ...]) -> Any:
            values, count, *active = carry
            more = jnp.any(active[0]) if active else loop.goes_on(values, count)
            return more if most is None else more & (count < most)

        # A batch of loops: the values of a finished loop stay the same until the last loop ends.
        active = [loop.goes_on(start, zero)] if batch or places else []
        if places:  # a comparison that is true, with the mesh axes of the values
            active = [active[0] & same(start, start)]
        last, count, *_ = lax.while_loop(holds, turn, (start, zero, *active))
        if most is not None:
            return self.at_limit(step, loop, last, count, count >= most)
        if not places:
            return last
        stuck = loop.goes_on(last, count)
        if self.warns:
            self.at_limit(step, loop, last, count, jnp.any(stuck))
        return [_nan_where(stuck, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in last]

    def at_limit(self, step: Any, loop: WhileParts, last: Any, count: Array, stopped: Array) -> Any:
        """The values of a loop; a warning, when the program runs, if it was stopped and its condition still holds."""
        (seeds, args), most = loop.condition(last, count), self.max_turns

        def look() -> None:
            comparisons, result = self.watch(step.inner[0], seeds, args)
            say = partial(warn_of_stop, step, [one for one, _ in comparisons], most)
            jax.debug.callback(say, *lax.stop_gradient((count, result, [operands for _, operands in comparisons])))

        lax.cond(stopped, look, lambda: None)
        return last

    def watch(self, plan: ProgramPlan, seeds: Any, args: Sequence[Any]) -> tuple[list[tuple[Any, list[Any]]], Any]:
        """The comparisons of a condition's plan, each a step and its operands, and the condition's value."""
        raise NotImplementedError

    def shard_map(self, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
        """Each shard counts its own elements, so values that vary over shards have different seeds on each shard."""
        params = step.eqn.params
        axes = manual_axes(params)
        own, tree = jax.tree.flatten(self.inside(seeds, step.number))
        check_vma = params["check_vma"]

        def shard(own: list[Array], *values: Any) -> tuple[Any, ...]:
            inside = jax.tree.unflatten(tree, own)
            inside = None if inside is None else inside.within(axes, check_vma)
            return tuple(interpret(step.inner[0], inside, list(values)))

        in_specs, out_specs = ([PartitionSpec()] * len(own), *params["in_specs"]), tuple(params["out_specs"])
        same = {"mesh": params["mesh"], "axis_names": set(axes), "check_vma": check_vma}
        return list(jax.shard_map(shard, in_specs=in_specs, out_specs=out_specs, **same)(own, *args))


def _same_bits(new: Array, old: Array, batch: int) -> Array:
    """Whether two numbers have the same bits, for every loop of a batch."""
    if jnp.iscomplexobj(new):
        return _same_bits(new.real, old.real, batch) & _same_bits(new.imag, old.imag, batch)
    if jnp.issubdtype(new.dtype, jnp.floating):
        new, old = (lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}") for x in (new, old))
    return jnp.all(new == old, axis=tuple(range(batch, new.ndim)))


def _nan_where(stuck: Array, x: Array) -> Array:
    return jnp.where(stuck.reshape(stuck.shape + (1,) * (x.ndim - stuck.ndim)), jnp.nan, x)


def deciding_places(step: ProgramStep) -> tuple[int, ...]:
    """The carried values of a `while` whose bits decide that it never ends: if a turn keeps them, each later one does.

    None if they have no real or complex number, if the loop has effects, or if its condition needs a count of turns,
    as that of `jax.lax.fori_loop`. A count is left out that only itself and comparisons with infinity need.
    """
    (test, body), params = step.inner, step.eqn.params
    own, outs = body.jaxpr.invars[params["body_nconsts"] :], body.jaxpr.outvars
    read = _inputs_of(test, test.jaxpr.outvars)
    needed, size = {i for i, v in enumerate(test.jaxpr.invars[params["cond_nconsts"] :]) if v in read}, -1
    while size < len(needed):
        size, inputs = len(needed), _inputs_of(body, [outs[i] for i in needed])
        needed |= {i for i, v in enumerate(own) if v in inputs}
    dtypes = [getattr(own[i].aval, "dtype", jax.dtypes.extended) for i in needed]
    if step.eqn.effects or any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):
        return ()
    if any(_counts(one.eqn, own[i]) for i in needed for one in body.steps if outs[i] in one.eqn.outvars):
        return ()
    return tuple(sorted(needed)) if any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes) else ()


def _inputs_of(plan: ProgramPlan, results: Sequence[Any]) -> set[Any]:
    """The variables of a program that some of its results need, without comparisons with infinity that always hold."""
    read = {v for v in results if not isinstance(v, Literal)}
    integers = {step.eqn.outvars[0] for step in plan.steps if _holds_integers(step)}
    for step in reversed(plan.steps):
        needed = {v for v in step.eqn.invars if not isinstance(v, Literal)}
        limits = [v.val for v in step.eqn.invars[1:] if isinstance(v, Literal)]
        below = step.name in ("lt", "le") and bool(limits) and np.all(limits[0] == np.inf) and needed <= integers
        if read.intersection(step.eqn.outvars) and not below:
            read |= needed
    return read


def _holds_integers(step: Any) -> bool:
    """Whether a step makes finite floats of any integers."""
    wide = step.name == "convert_element_type" and getattr(getattr(step.out[0], "format", None), "max", 0) >= 1 << 64
    return wide and jnp.issubdtype(step.eqn.invars[0].aval.dtype, jnp.integer)


def _counts(eqn: Any, value: Any) -> bool:
    """Whether an equation adds a constant integer, not zero, to a value."""
    steps = [v.val for v in eqn.invars if isinstance(v, Literal) and np.issubdtype(np.result_type(v.val), np.integer)]
    return eqn.primitive.name in ("add", "sub") and value in eqn.invars and bool(steps) and bool(np.all(steps[0]))


def manual_axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The names of the axes over which a `shard_map` splits its operands, in order."""
    return tuple(sorted(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]))


# -- primitives --------------------------------------------------------------------------------------------------------


class ControlPrimitive(NamedTuple):
    """A primitive that holds programs.

    Args:
        plan: of a planner and a step its step with inner plans.
        run: gives the results, from the loops, a step, its seeds, its operands and the function that runs a plan.
        roles: gives the `Role` of each operand of a step.
        turns: of a step how often its program runs, if that is known before and more than once.
    """

    plan: Callable[[Any, Any], Any]
    run: Callable[[Loops, Any, Any, list[Any], Interpret], list[Any]]
    roles: Callable[[Any], list[Role]]
    turns: Callable[[Any], int] | None = None


#: An operand is passed to a program as it is, the same in all turns, carried from turn to turn, taken apart along its
#: first axis, or used in another way.
Role = str


def roles_of(step: ProgramStep) -> list[Role]:
    """The role of each operand of a step that holds programs."""
    row = CONTROL.get(step.name)
    return ["other"] * len(step.eqn.invars) if row is None else row.roles(step)


def turns_around(steps: Iterable[Any]) -> list[tuple[Any, int]]:
    """The steps whose programs run a known number of times, each with this number."""
    rows = ((step, CONTROL.get(step.name)) for step in steps)
    return [(step, row.turns(step)) for step, row in rows if row is not None and row.turns is not None]


def operands_of_role(step: ProgramStep, role: Role, values: Sequence[Any]) -> list[Any]:
    """The values whose operands have a role; there is one value for each operand of a step."""
    return [value for value, own in zip(values, roles_of(step), strict=True) if own == role]


def _roles_of_all(role: Role) -> Callable[[ProgramStep], list[Role]]:
    return lambda step: [role] * len(step.eqn.invars)


def _common_facts(planner: Any, before: Sequence[Any], after: Sequence[Any]) -> tuple[Any, ...]:
    """The facts about carried values that hold in this turn and the next."""
    return tuple(planner.common(pair) for pair in zip(before, after, strict=True))


def _plan_call(planner: Any, step: Any) -> Any:
    params = step.eqn.params
    scope = scope_of(step.scope, "", params.get("name"))
    inner = planner.plan(params.get("jaxpr", params.get("call_jaxpr")), step.known, scope)
    return replace(step, inner=(inner,), out=inner.out)


def _run_call(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    return interpret(step.inner[0], loops.inside(seeds, step.number), args)


def _plan_high_call(planner: Any, step: Any) -> Any:
    (primitive,) = step.eqn.params.values()

    def expand_call(*values: Any) -> Any:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, values)))

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in step.eqn.invars]
    inner = planner.plan(jax.make_jaxpr(expand_call)(*avals), step.known, step.scope)
    return replace(step, inner=(inner,), out=inner.out)


def _run_remat(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    inner = partial(interpret, step.inner[0], loops.inside(seeds, step.number))
    return loops.remat(inner, args, step.eqn.params)


def _run_custom_rule(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    """The function's own derivative rule, in the carrier; of a linear system, the system gives the derivatives."""

    def run(values: list[Any], seeds: Any) -> list[Any]:
        return interpret(step.inner[0], seeds, _solve_operands(step, values))

    own = partial(bind, step.eqn.primitive, step.eqn.params)
    return loops.with_derivative(own, run, args, loops.inside(seeds, step.number))


def _plan_solve(planner: Any, step: Any) -> Any:
    inner = planner.plan(step.eqn.params["jaxprs"].solve, _solve_operands(step, step.known), step.scope)
    return replace(step, inner=(inner,), out=inner.out)


def _solve_operands(step: Any, values: Sequence[Any]) -> list[Any]:
    """The operands of the program that a step runs: for a linear system the solver's, for any other step all."""
    if step.name != "custom_linear_solve":
        return list(values)
    lengths = step.eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*values[first : first + lengths.solve], *values[sum(lengths) :]]


def _plan_cond(planner: Any, step: Any) -> Any:
    inner = tuple(planner.plan(branch, step.known[1:], step.scope) for branch in step.eqn.params["branches"])
    return replace(step, inner=inner, out=tuple(map(planner.common, zip(*(plan.out for plan in inner), strict=True))))


def _run_cond(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    index, *operands = args

    def branch(i: int, values: list[Any]) -> list[Any]:
        return interpret(step.inner[i], loops.inside(seeds, step.number + i), values)

    return loops.switch(index, [partial(branch, i) for i in range(len(step.inner))], operands)


def _plan_scan(planner: Any, step: Any) -> Any:
    """The step of a scan, planned again until the facts about its carry hold in every turn."""
    consts, carry = carry_count(step.eqn.params)
    facts = (*step.known[: consts + carry], *map(planner.one_turn, step.known[consts + carry :]))
    while True:
        inner = planner.plan(step.eqn.params["jaxpr"], facts, step.scope)
        carry_facts = _common_facts(planner, facts[consts : consts + carry], inner.out[:carry])
        if carry_facts == facts[consts : consts + carry]:
            return replace(step, inner=(inner,), out=(*carry_facts, *map(planner.all_turns, inner.out[carry:])))
        facts = (*facts[:consts], *carry_facts, *facts[consts + carry :])


def _run_scan(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    """The results of a scan: the last carry, then the stacked results of its turns."""
    consts, carry_size = carry_count(step.eqn.params)
    fixed, start, xs = args[:consts], args[consts : consts + carry_size], args[consts + carry_size :]

    def turn(values: list[Any], row: list[Any], count: Any) -> tuple[list[Any], list[Any]]:
        out = interpret(step.inner[0], loops.inside(seeds, step.number, count), [*fixed, *values, *row])
        return out[:carry_size], out[carry_size:]

    last, ys = loops.scan(step, turn, start, xs, ScanOrder(*(step.eqn.params[name] for name in ScanOrder._fields)))
    return [*last, *ys]


def _scan_roles(step: ProgramStep) -> list[Role]:
    consts, carry = carry_count(step.eqn.params)
    return [*["fixed"] * consts, *["carried"] * carry, *["sliced"] * (len(step.eqn.invars) - consts - carry)]


def _plan_while(planner: Any, step: Any) -> Any:
    """The step of a while loop, planned again until the facts about its carry hold in every turn."""
    params = step.eqn.params
    test, body = params["cond_nconsts"], params["body_nconsts"]
    first, consts, carry_facts = step.known[:test], step.known[test : test + body], step.known[test + body :]
    while True:
        inner = planner.plan(params["body_jaxpr"], (*consts, *carry_facts), step.scope)
        next_facts = _common_facts(planner, carry_facts, inner.out)
        if next_facts == carry_facts:
            plans = (planner.plan(params["cond_jaxpr"], (*first, *carry_facts), step.scope), inner)
            return replace(step, inner=plans, out=next_facts)
        carry_facts = next_facts


def _run_while(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    """The last carry of a while loop."""
    test, body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    first, fixed, start = args[:test], args[test : test + body], args[test + body :]

    def condition(values: list[Any], count: Any) -> tuple[Any, list[Any]]:
        return loops.inside(seeds, step.number, count), [*first, *values]

    def goes_on(values: list[Any], count: Any) -> Any:
        return interpret(step.inner[0], *condition(values, count))[0]

    def next_of(values: list[Any], count: Any) -> list[Any]:
        return interpret(step.inner[1], loops.inside(seeds, step.number + 1, count), [*fixed, *values])

    return loops.while_loop(step, WhileParts(condition, goes_on, next_of), start)


def _while_roles(step: ProgramStep) -> list[Role]:
    fixed = step.eqn.params["cond_nconsts"] + step.eqn.params["body_nconsts"]
    return [*["fixed"] * fixed, *["carried"] * (len(step.eqn.invars) - fixed)]


#: The primitives that hold programs. A new one is a row here.
CONTROL: dict[str, ControlPrimitive] = {
    **dict.fromkeys(PLAIN_CALLS, ControlPrimitive(_plan_call, _run_call, _roles_of_all("passed"))),
    **dict.fromkeys(HIGH_CALLS, ControlPrimitive(_plan_high_call, _run_call, _roles_of_all("passed"))),
    **dict.fromkeys(REMAT_CALLS, ControlPrimitive(_plan_call, _run_remat, _roles_of_all("passed"))),
    **dict.fromkeys(CUSTOM_CALLS, ControlPrimitive(_plan_call, _run_custom_rule, _roles_of_all("other"))),
    "custom_linear_solve": ControlPrimitive(_plan_solve, _run_custom_rule, _roles_of_all("other")),
    "cond": ControlPrimitive(_plan_cond, _run_cond, lambda step: ["other", *["passed"] * (len(step.eqn.invars) - 1)]),
    "scan": ControlPrimitive(_plan_scan, _run_scan, _scan_roles, lambda step: step.eqn.params["length"]),
    "while": ControlPrimitive(_plan_while, _run_while, _while_roles),
    "shard_map": ControlPrimitive(_plan_call, lambda loops, *call: loops.shard_map(*call), _roles_of_all("other")),
}


# -- primitives of other packages --------------------------------------------------------------------------------------


def run_implementation(loops: Loops, step: ProgramStep, seeds: Any, args: list[Any], interpret: Interpret) -> list[Any]:
    """A primitive by its implementation, which is a program; the derivative is the primitive's own, in the carrier.

    A primitive with its own rule for batches has it also under `jax.vmap`.
    """
    if step.later is None or not any(isinstance(x, Tracer) for x in jax.tree.leaves((seeds, args))):
        return _run_custom_rule(loops, step, seeds, args, interpret)
    batched = partial(_with_batch_rule, loops, step, interpret)
    if step.name in BATCHED_CALLS:
        return batched(lambda seeds, args: _run_custom_rule(loops, step, seeds, args, interpret), seeds, args)
    # The derivative outside: JAX has none in reverse mode for a function with a rule for batches.
    return _run_custom_rule(loops, step, seeds, args, lambda plan, *own: batched(partial(interpret, plan), *own))


def _with_batch_rule(
    loops: Loops, step: ProgramStep, interpret: Interpret, run: Callable[..., list[Any]], seeds: Any, args: list[Any]
) -> list[Any]:
    """``run(seeds, args)``, in a batch the rule of the step."""
    leaves, tree = jax.tree.flatten((seeds, list(args)))

    def alone(*leaves: Any) -> list[Any]:
        return run(*jax.tree.unflatten(tree, leaves))

    def batch(size: int, flags: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
        if any(flags) and not any(flags[len(leaves) - len(args) :]):  # the seeds alone
            return jax.vmap(alone, [0 if b else None for b in flags])(*leaves), [True] * len(step.eqn.outvars)
        both = (jax.tree.unflatten(tree, each) for each in (flags, leaves))
        return _run_batch_rule(loops, step, interpret, size, *both)

    call = jax.custom_batching.custom_vmap(alone)  # of leaves, as JAX's derivative of it does not take None
    call.def_vmap(batch)
    return call(*leaves)


def _run_batch_rule(
    loops: Loops, step: ProgramStep, interpret: Interpret, size: int, batch_flags: Any, seeds_and_args: Any
) -> tuple[list[Any], list[bool]]:
    """The results of a function's own rule for batches, which is run as the function is, and which are batched."""
    (rows, flags), (seeds, args), out_flags = batch_flags, seeds_and_args, list[bool]()
    seeds = jax.tree.map(lambda x, b: x[0] if b else x, seeds, rows)  # one program rounds the whole batch

    def rule(*values: Any) -> list[Any]:
        if step.name not in BATCHED_CALLS:
            out_flags[:] = [True] * len(step.eqn.outvars)
            own = partial(bind, step.eqn.primitive, step.eqn.params)
            return jax.vmap(own, [0 if b else None for b in flags])(*values)
        trees = (list(jax.tree.unflatten(step.eqn.params["in_tree"], each)) for each in (flags, values))
        out, out_flags[:] = map(jax.tree.leaves, step.eqn.params["rule"](size, next(trees), *next(trees)))
        return out

    assert step.later is not None
    program = jax.make_jaxpr(rule)(*args)
    plan = step.later(program)

    def run(values: list[Any], seeds: Any) -> list[Any]:
        return interpret(plan, seeds, values)

    return loops.with_derivative(jaxpr_as_fun(program), run, args, loops.inside(seeds, step.number)), out_flags
