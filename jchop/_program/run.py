"""Plans are made from jaxprs, then run one equation after the other, on arrays or on tracers of a transformation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import batching, mlir

from jchop._program.bind import constant_of
from jchop._program.control import CONTROL, Interpret, Loops, run_implementation
from jchop._program.step import BATCHED_CALLS, PLAIN_CALLS, ProgramPlan, ProgramStep, is_jchop_scope, jaxpr_of, scope_of
from jchop._program.stopped_loops import COMPARISONS

# -- plans -------------------------------------------------------------------------------------------------------------
#
# The plan of a program, made from its jaxpr before anything is computed.
#
# A plan has a step for every equation: its rule, and the facts about its results. So unsupported equations raise errors
# early, a loop's carry has only the facts that hold in every turn, a report needs no run, and each random draw has its
# own number.


class Planner:
    """Makes plans. A table of rules is a subclass; it defines the facts about values, and about an unknown one."""

    no_facts: Any = None

    def __init__(self) -> None:
        self._implementation_programs: dict[int, Any] = {}

    def plan(
        self, closed: Any, known: Sequence[Any], scope: str = "", constants: Sequence[Any] | None = None
    ) -> ProgramPlan:
        """The plan of a jaxpr, from the facts about its arguments (`known`) and constants."""
        jaxpr, consts = jaxpr_of(closed)
        jaxpr = self.prepare(jaxpr)
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

    def prepare(self, jaxpr: Any) -> Any:
        """The jaxpr that is planned in place of another."""
        return jaxpr

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
        """The step of a primitive of another package, with the plan of its implementation.

        It keeps its own rule for batches if it calls foreign code and has one.
        """
        inner = self.plan(self.implementation(step.eqn), step.known, step.scope)
        tables = (getattr(batching, name, None) for name in ("fancy_primitive_batchers", "primitive_batchers"))
        has_rule = any(isinstance(table, dict) and step.eqn.primitive in table for table in tables)
        keeps = step.name in BATCHED_CALLS or (has_rule and _calls_foreign_code(inner))
        later = partial(self.later, facts=step.known, scope=step.scope) if keeps else None
        return replace(step, inner=(inner,), out=inner.out, later=later)


def variables_outside_jchop(jaxpr: Any) -> set[Any]:
    """The results of a program, and the operands of equations outside of jchop's public functions."""
    others = (eqn for eqn in jaxpr.eqns if not is_jchop_scope(scope_of("", eqn.source_info.name_stack)))
    operands = (v for eqn in others for v in eqn.invars)
    return {v for v in (*operands, *jaxpr.outvars) if not isinstance(v, Literal)}


# -- primitives of other packages ------------------------------------------------------------------------------------


#: Calls of code that JAX cannot differentiate, and may not take apart for batches.
_FOREIGN_CALLS = frozenset(("pure_callback", "io_callback", "ffi_call"))


def implementation_of(eqn: Any) -> Any:
    """The program of the implementation of an equation's primitive; None if it cannot be traced."""
    primitive = eqn.primitive
    params = primitive.get_bind_params(eqn.params)
    for function in _implementations(primitive):
        try:
            program = jax.make_jaxpr(lambda *args, f=function: f(*args, **params))(*(v.aval for v in eqn.invars))
        except Exception:  # any error of another package that needs numbers
            continue
        same = [v.aval.shape for v in program.jaxpr.outvars] == [v.aval.shape for v in eqn.outvars]
        if same and all(one.primitive is not primitive for one in program.jaxpr.eqns):
            return program
    return None


def _implementations(primitive: Any) -> Iterator[Callable[..., Any]]:
    """The functions that compute a primitive: its own, and its lowering if that is a function of JAX."""
    if primitive.impl is not None and not _is_in_package(primitive.impl, "jax._src.dispatch"):
        yield primitive.impl
    platforms = getattr(mlir, "_platform_specific_lowerings", {}).values()
    for rules in (*platforms, getattr(mlir, "_lowerings", {})):
        rule: Any = getattr(rules.get(primitive), "rule", rules.get(primitive))
        if getattr(rule, "__qualname__", "").startswith("lower_fun."):
            function = inspect.getclosurevars(rule).nonlocals["fun"]
            if not _is_in_package(function, "jax"):
                yield function


def _is_in_package(function: Any, package: str) -> bool:
    """Whether a function is defined in a module or package."""
    function = function.func if isinstance(function, partial) else function
    return f"{getattr(function, '__module__', '')}.".startswith(f"{package}.")


def is_foreign_primitive(step: ProgramStep) -> bool:
    """Whether a step is a primitive of another package that calls foreign code; its derivative is its own."""
    return step.kind == "control" and step.name not in CONTROL and any(map(_calls_foreign_code, step.inner))


def _calls_foreign_code(plan: ProgramPlan) -> bool:
    return any(step.name in _FOREIGN_CALLS for step in plan.walk())


class Runner(Loops):
    """Runs the steps of a plan. A table of rules is a subclass."""

    def parts(self, plan: ProgramPlan) -> Iterable[Any]:
        """The parts to run, in order: single steps, or groups of steps. Each has `eqn`, `operands` and `results`."""
        return plan.steps

    def context(self, part: Any) -> AbstractContextManager[Any]:
        """The settings of JAX for a part."""
        return part.eqn.ctx.manager

    def constant(self, value: Any) -> Any:
        """A constant or a literal of a program."""
        return value

    def prepare(self, part: Any, env: dict[Any, Any], seeds: Any) -> None:
        """Called before a part is run; may replace values of `env` that the part cannot take."""

    def finish(self, value: Any, seeds: Any) -> Any:
        """A result of a program."""
        return value

    def prepare_operands(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The operands of a step in the form that it takes."""
        return args

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a part that holds no program."""
        raise NotImplementedError

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a step that holds programs."""

        def inner(plan: ProgramPlan, seeds: Any, args: Sequence[Any]) -> list[Any]:
            return interpret(self, plan, seeds, args)

        return self.enter(step, seeds, args, inner)

    def enter(self, step: Any, seeds: Any, args: list[Any], inner: Interpret) -> list[Any]:
        """The results of a step that holds programs, which `inner` carries out."""
        row = CONTROL.get(step.name)
        return (run_implementation if row is None else row.run)(self, step, seeds, args, inner)

    def watch(self, plan: ProgramPlan, seeds: Any, args: Sequence[Any]) -> tuple[list[tuple[Any, list[Any]]], Any]:
        """The comparisons of a condition's plan, each a step and its operands, and the condition's value."""
        watching = _ComparisonRecorder(self)
        (result,) = interpret(watching, plan, seeds, args)
        return watching.comparisons, result


def interpret(
    runner: Runner, plan: ProgramPlan, seeds: Any, args: Sequence[Any], constants: Sequence[Any] | None = None
) -> list[Any]:
    """The results of a planned program.

    Args:
        runner: runs its steps.
        plan: the plan.
        seeds: the seeds of this program; None if nothing draws.
        args: its arguments.
        constants: replace the program's own constants. Default: none.
    """
    constants = constants or list(map(runner.constant, plan.consts))
    env: dict[Any, Any] = dict(zip(plan.jaxpr.constvars, constants, strict=True))
    env.update(zip(plan.jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return runner.constant(constant_of(v)) if isinstance(v, Literal) else env[v]

    for part in runner.parts(plan):
        run = runner.control if getattr(part, "kind", None) == "control" else runner.run
        with runner.context(part):
            runner.prepare(part, env, seeds)
            out = run(part, seeds, [read(v) for v in part.operands])
        env.update(zip(part.results, out, strict=True))
    return [runner.finish(read(v), seeds) for v in plan.jaxpr.outvars]


class _ComparisonRecorder(Runner):
    """Another runner, which also records its comparisons, except within loops and branches."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.comparisons: list[tuple[Any, list[Any]]] = []

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a step."""
        if part.name in COMPARISONS:
            self.comparisons.append((part, self.runner.prepare_operands(part, seeds, args)))
        return self.runner.run(part, seeds, args)

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a step that holds programs."""
        return (super() if step.name in PLAIN_CALLS else self.runner).control(step, seeds, args)
