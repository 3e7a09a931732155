"""The plan of a program, made from its jaxpr before anything is computed.

A plan has a step for every equation: its rule, and the facts about its results. So unsupported equations raise errors
early, a loop's carry has only the facts that hold in every turn, a report needs no run, and each random draw has its
own number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax.extend.core import Literal

from jchop._program.control import CONTROL
from jchop._program.implementations import has_batch_rule, implementation_of
from jchop._program.step import BATCHED_CALLS, ProgramPlan, is_jchop_scope, jaxpr_of, scope_of

__all__ = ["Planner", "variables_outside_jchop"]


class Planner:
    """Makes plans. A table of rules is a subclass; it defines the facts about values, and those of an unknown one."""

    no_facts: Any = None

    def __init__(self) -> None:
        self._implementation_programs: dict[int, Any] = {}

    def plan(
        self, closed: Any, known: Sequence[Any], scope: str = "", constants: Sequence[Any] | None = None
    ) -> ProgramPlan:
        """The plan of a jaxpr, from the facts about its arguments (`known`) and constants."""
        jaxpr, consts = jaxpr_of(closed)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants or (None,) * len(jaxpr.constvars), strict=True))
        env.update(zip(jaxpr.invars, known, strict=True))
        steps, number = [], 0
        for eqn in jaxpr.eqns:
            step = self.step(eqn, env, scope_of(scope, eqn.source_info.name_stack), number)
            if step.kind == "control":
                row = CONTROL.get(step.name)
                step = self.plan_implementation(step) if row is None else row.plan(self, step)
            number += len(step.inner) + 1 if step.inner else self.draws(step)
            env.update(zip(eqn.outvars, step.out, strict=True))
            steps.append(step)
        return ProgramPlan(jaxpr, consts, tuple(steps), tuple(self.read(v, env) for v in jaxpr.outvars))

    # -- the table's part ----------------------------------------------------------------------------------------------

    def step(self, eqn: Any, env: dict[Any, Any], scope: str, number: int) -> Any:
        """The step of one equation. Programs that it holds (kind ``"control"``) are planned later."""
        raise NotImplementedError

    def read(self, v: Any, env: dict[Any, Any]) -> Any:
        """The facts about a variable or a literal."""
        fact = None if isinstance(v, Literal) else env[v]
        return self.no_facts if fact is None else fact

    def draws(self, step: Any) -> int:
        """The most random draws that a step without inner plans may take."""
        raise NotImplementedError

    def common(self, knowns: Iterable[Any]) -> Any:
        """The facts that hold for every one of several values."""
        raise NotImplementedError

    def later(self, program: Any, facts: Sequence[Any], scope: str) -> ProgramPlan:
        """The plan of a program that is traced in a run, after the plan of the whole."""
        raise NotImplementedError

    def one_turn(self, known: Any) -> Any:
        """The facts about one part along the first axis, over which a scan runs."""
        return known

    def all_turns(self, known: Any) -> Any:
        """The facts about the results of a scan's turns, stacked along a first axis."""
        return known

    def implementation(self, eqn: Any) -> Any:
        """The program of a primitive of another package; None if there is none. It is traced once."""
        if id(eqn) not in self._implementation_programs:
            self._implementation_programs[id(eqn)] = (eqn, implementation_of(eqn))  # keeps the equation and its id
        return self._implementation_programs[id(eqn)][1]

    def plan_implementation(self, step: Any) -> Any:
        """The step of a primitive of another package, with the plan of its implementation."""
        inner = self.plan(self.implementation(step.eqn), step.known, step.scope)
        keeps = step.name in BATCHED_CALLS or has_batch_rule(step.eqn.primitive, inner)
        later = partial(self.later, facts=step.known, scope=step.scope) if keeps else None
        return replace(step, inner=(inner,), out=inner.out, later=later)


def variables_outside_jchop(jaxpr: Any) -> set[Any]:
    """The results of a program, and the operands of equations outside of jchop's public functions."""
    others = (eqn for eqn in jaxpr.eqns if not is_jchop_scope(scope_of("", eqn.source_info.name_stack)))
    operands = (v for eqn in others for v in eqn.invars)
    return {v for v in (*operands, *jaxpr.outvars) if not isinstance(v, Literal)}
