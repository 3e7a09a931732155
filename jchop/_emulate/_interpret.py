"""Plans carried out: one equation after the other, on arrays or on whatever a transformation puts in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jchop._core.arithmetic.operations import draws
from jchop._emulate import _control
from jchop._emulate._accumulate import accumulated
from jchop._emulate._chain import Chain, parts_of, run_chain
from jchop._emulate._complex import by_parts
from jchop._emulate._known import constant_of, is_float
from jchop._emulate._linear import factored
from jchop._emulate._perform import Task, bind, perform, power_draws, round_value
from jchop._emulate._seeds import Seeds
from jchop._emulate._step import Plan, Step
from jchop.spec import Spec

Array = jax.Array

__all__ = ["interpret", "run_step"]


def interpret(
    plan: Plan, seeds: Seeds | None, args: Sequence[Any], constants: Sequence[Any] | None = None
) -> list[Any]:
    """The results of a planned program.

    Args:
        plan: the plan.
        seeds: of this program.
        args: its arguments, rounded where the plan knows them to be.
        constants: in place of the program's own.
    """
    env: dict[Any, Any] = dict(zip(plan.jaxpr.constvars, constants or plan.consts, strict=True))
    env.update(zip(plan.jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return constant_of(v) if isinstance(v, Literal) else env[v]

    for part in parts_of(plan):
        if isinstance(part, Chain):
            with part.steps[0].eqn.ctx.manager:
                env[part.result] = run_chain(part, seeds, [read(v) for v in part.operands])
            continue
        with part.eqn.ctx.manager:
            out = run_step(part, seeds, [read(v) for v in part.eqn.invars])
        env.update(zip(part.eqn.outvars, out, strict=True))
    return [read(v) for v in plan.jaxpr.outvars]


def run_step(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of one equation, given its operands before they are rounded."""
    if step.kind == "control":
        return _control.RUNS[step.name](step, seeds, args, interpret)
    spec = step.choice.spec
    if spec is not None and any(step.rounds):
        args = [
            round_value(jnp.asarray(x), spec, _word(spec, seeds, jnp.asarray(x), step.number + i)) if r else x
            for i, (x, r) in enumerate(zip(args, step.rounds, strict=True))
        ]
    return _BY_KIND[step.kind](step, seeds, args)


def _word(spec: Spec, seeds: Seeds | None, like: Any, number: int) -> Array | None:
    if not draws(spec):
        return None
    assert seeds is not None
    return seeds.words(like, number)


def _bound(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    del seeds
    return bind(step.eqn.primitive, step.eqn.params, *args)


def _performed(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    spec = step.choice.spec
    if spec is None:
        return _bound(step, seeds, args)
    drawn = [] if seeds is None or not draws(spec) else _drawn(step, seeds)
    task = Task(step.eqn.primitive, tuple(sorted(step.eqn.params.items())), step.kind, spec, step.known)
    return perform(task, [jnp.asarray(x) for x in args], drawn)


def _drawn(step: Step, seeds: Seeds) -> list[Array]:
    """A word array for each rounding of the results."""
    first = step.result_number
    outs = [v.aval for v in step.eqn.outvars if is_float(v.aval)]
    if step.kind == "power":
        outs = outs * power_draws(step.eqn.params["y"])
    return [seeds.words(aval, first + i) for i, aval in enumerate(outs)]


def _extremum(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """Of values that are known, by bits where a comparison could take them for zero."""
    known = step.out[0]
    if known is None:
        return _bound(step, seeds, args)
    task = Task(step.eqn.primitive, tuple(sorted(step.eqn.params.items())), "extremum", known, (known, known))
    return perform(task, [jnp.asarray(x) for x in args])


def _accumulated(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    if step.choice.accumulate is None:
        return _performed(step, seeds, args)
    return accumulated(step, seeds, args)


_BY_KIND: dict[str, Callable[[Step, Seeds | None, list[Any]], list[Any]]] = {
    **dict.fromkeys(("untouched", "structural", "carrier", "own"), _bound),
    **dict.fromkeys(("exact", "power", "elementary", "made", "converted"), _performed),
    "extremum": _extremum,
    "accumulating": _accumulated,
    "linear": factored,
    "complex": by_parts,
}
