"""Plans carried out: one equation after the other, on arrays or on whatever a transformation puts in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from jchop._program.bind import constant_of
from jchop._program.control import RUNS, run_opened
from jchop._program.step import Plan

__all__ = ["Runner", "interpret"]


class Runner:
    """What a table of rules does with the steps of a plan."""

    def parts(self, plan: Plan) -> Iterable[Any]:
        """What is run one after the other: steps, or several as one. Each has `eqn`, `operands` and `results`."""
        return plan.steps

    def prepare(self, part: Any, env: dict[Any, Any], seeds: Any) -> None:
        """Before a part is run: values of `env` that it cannot take as they are may be replaced."""

    def finish(self, value: Any, seeds: Any) -> Any:
        """A result of a program."""
        return value

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a part that holds no program."""
        raise NotImplementedError

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a step that holds programs."""

        def inner(plan: Plan, seeds: Any, args: Sequence[Any]) -> list[Any]:
            return interpret(self, plan, seeds, args)

        return RUNS.get(step.name, run_opened)(step, seeds, args, inner)


def interpret(
    runner: Runner, plan: Plan, seeds: Any, args: Sequence[Any], constants: Sequence[Any] | None = None
) -> list[Any]:
    """The results of a planned program.

    Args:
        runner: what is done with its steps.
        plan: the plan.
        seeds: of this program; None where nothing draws.
        args: its arguments.
        constants: in place of the program's own.
    """
    env: dict[Any, Any] = dict(zip(plan.jaxpr.constvars, constants or plan.consts, strict=True))
    env.update(zip(plan.jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return constant_of(v) if isinstance(v, Literal) else env[v]

    for part in runner.parts(plan):
        run = runner.control if getattr(part, "kind", None) == "control" else runner.run
        with part.eqn.ctx.manager:
            runner.prepare(part, env, seeds)
            out = run(part, seeds, [read(v) for v in part.operands])
        env.update(zip(part.results, out, strict=True))
    return [runner.finish(read(v), seeds) for v in plan.jaxpr.outvars]
