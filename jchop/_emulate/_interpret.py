"""Runs the equations of an emulated program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._arguments import OWN_RESULT
from jchop._core.arithmetic.operations import draws
from jchop._emulate._accumulate import accumulated
from jchop._emulate._carried import carried, neighbour, rounded
from jchop._emulate._chain import Chain, parts_of, run_chain
from jchop._emulate._complex import by_parts, summed_by_parts
from jchop._emulate._draws import drawn
from jchop._emulate._known import is_float, is_narrow
from jchop._emulate._linear import factored
from jchop._emulate._perform import Task, perform, power_draws
from jchop._emulate._step import Step
from jchop._program.bind import bind
from jchop._program.control import as_jax
from jchop._program.repeats import Turns, run_turns, with_turns
from jchop._program.run import Runner, interpret
from jchop._program.seeds import Draw, Seeds
from jchop._program.step import REMAT_CALLS, Plan, is_reference

Array = jax.Array

__all__ = ["EMULATION", "Eager", "run_step"]


class Emulation(Runner):
    """Emulated arithmetic.

    Args:
        max_turns: the most turns of a `while` loop. Default None: any number.
    """

    def __init__(self, max_turns: int | None = None) -> None:
        self.max_turns = max_turns

    def parts(self, plan: Plan) -> Iterable[Any]:
        """The steps, repeated ones as loops, and some as chains. A warning of `max_turns` names a line of each turn."""
        return parts_of(plan, plan.steps if self.max_turns is not None else with_turns(plan))

    def prepare_operands(self, step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The operands of a step, with those rounded that the plan marks."""
        return with_rounded_operands(step, seeds, args)

    def run(self, part: Step | Chain | Turns, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of one equation, chain or loop, given its operands before they are rounded."""
        if isinstance(part, Turns):
            return run_turns(part, seeds, args, partial(interpret, self))
        if isinstance(part, Chain):
            return [run_chain(part, seeds, args)]
        own = None if seeds is None else seeds.like(*(v.aval for v in part.eqn.outvars))
        return _BY_KIND[part.kind](part, own, with_rounded_operands(part, seeds, args))

    def control(self, step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of an equation that holds programs; its constants are rounded first."""
        return super().control(step, seeds, with_rounded_operands(step, seeds, args))


EMULATION = Emulation()


class Eager(Emulation):
    """Emulated arithmetic on values: each loop, branch and algorithm of matrices is compiled once, in the first run.

    An instance serves one plan, and knows its steps by their ids.
    """

    def __init__(self, max_turns: int | None = None) -> None:
        super().__init__(max_turns)
        self._step_functions: dict[int, Callable[..., list[Any]]] = {}
        self._parts: dict[int, list[Any]] = {}

    def parts(self, plan: Plan) -> Iterable[Any]:
        """The steps, some of them as chains."""
        if id(plan.steps) not in self._parts:
            self._parts[id(plan.steps)] = list(parts_of(plan, plan.steps))
        return self._parts[id(plan.steps)]

    def control(self, step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of an equation that holds programs."""
        if step.name not in _UNITS or any(is_reference(v.aval) for v in step.eqn.invars):
            return super().control(step, seeds, args)
        return self._once(step, Emulation(self.max_turns).control, seeds, args)

    def run(self, part: Step | Chain | Turns, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of one equation or chain."""
        if isinstance(part, Step) and part.kind == "linear":
            return self._once(part, EMULATION.run, seeds, args)
        return super().run(part, seeds, args)

    def _once(self, step: Step, run: Callable[..., list[Any]], seeds: Seeds | None, args: list[Any]) -> list[Any]:
        if id(step) not in self._step_functions:
            self._step_functions[id(step)] = jax.jit(partial(run, step))
        return self._step_functions[id(step)](seeds, args)


#: The equations whose programs JAX compiles also outside of `jax.jit`.
_UNITS = ("scan", "while", "cond", "shard_map", *REMAT_CALLS)


def with_rounded_operands(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The operands of a step, with those rounded that the plan marks. A step with inner plans uses separate seeds."""
    spec = step.choice.spec
    if spec is None or not any(step.rounds):
        return args
    number = step.number
    if step.inner and seeds is not None:
        seeds, number = seeds.turn(step.number + len(step.inner)), 0

    def round_one(i: int, x: Any) -> Any:
        own = None if seeds is None else seeds.like(step.eqn.invars[i].aval)
        return rounded(as_jax(x), spec, own, number + i)

    return [round_one(i, x) if rounds else x for i, (x, rounds) in enumerate(zip(args, step.rounds, strict=True))]


def run_step(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of one equation, which may hold programs."""
    return (EMULATION.control if step.kind == "control" else EMULATION.run)(step, seeds, args)


def _bound(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    del seeds
    return bind(step.eqn.primitive, step.eqn.params, *args)


def _own(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """A part of a function of jchop, unchanged. Marks of results are dropped after the innermost emulation."""
    return args if step.name == OWN_RESULT else _bound(step, seeds, args)


def _result(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The result of a function of jchop, which is one operation."""
    (x,), (spec,) = args, step.out
    return [x if spec is None else rounded(x, spec, seeds, step.result_number)]


def _performed(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    spec = step.choice.spec
    if spec is None:
        return _bound(step, seeds, args)
    words = [] if seeds is None or not draws(spec) else _drawn(step, seeds)
    return perform(step.task, [as_jax(x) for x in args], words)


def _drawn(step: Step, seeds: Seeds) -> list[Draw]:
    """A draw for each rounding of the results."""
    first = step.result_number
    outs = [v.aval for v in step.eqn.outvars if is_float(v.aval)]
    if step.kind == "power":
        outs = outs * power_draws(step.eqn.params["y"])
    return [seeds.draw(aval, first + i) for i, aval in enumerate(outs)]


def _extremum(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The maximum or minimum. Values of a known format are compared by bits if the device could read them as zero."""
    fact = step.out[0]
    if fact is None:
        return _bound(step, seeds, args)
    task = Task(step.eqn.primitive, tuple(sorted(step.eqn.params.items())), "extremum", fact, (fact, fact))
    return perform(task, [jnp.asarray(x) for x in args])


def _accumulated(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    if step.choice.accumulate is None:
        return _performed(step, seeds, args)
    out = step.eqn.outvars[0].aval
    args = [
        lax.convert_element_type(x, out.dtype) if is_narrow(v.aval) else x
        for x, v in zip(args, step.eqn.invars, strict=True)
    ]
    return accumulated(step, seeds, args)


_BY_KIND: dict[str, Callable[[Step, Seeds | None, list[Any]], list[Any]]] = {
    **dict.fromkeys(("untouched", "compared", "structural", "carrier"), _bound),
    "own": _own,
    "result": _result,
    **dict.fromkeys(("exact", "power", "elementary", "made", "converted"), _performed),
    "extremum": _extremum,
    "accumulating": _accumulated,
    "linear": factored,
    "complex": by_parts,
    "complex sum": summed_by_parts,
    "carried": carried,
    "draw": drawn,
    "neighbour": neighbour,
}
