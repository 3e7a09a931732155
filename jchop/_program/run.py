"""Plans are run one equation after the other, on arrays or on tracers of a transformation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax.extend.core import Literal

from jchop._program.bind import constant_of
from jchop._program.control import CONTROL, Interpret, Loops, run_implementation
from jchop._program.loop_limits import COMPARISONS
from jchop._program.step import PLAIN_CALLS, ProgramPlan


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
