"""Places in the source of emulated programs, and sentences about them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax

from jchop._emulate.paired.paired_run import StopEventError
from jchop._emulate.rules.step import EmulatedStep
from jchop._emulate.rules.trace import is_program_variable
from jchop._program.control import turns_around
from jchop._program.source import is_library_file, source_line_of
from jchop._program.step import ProgramPlan

#: The default limit of turns of a `while` loop in a report.
MOST_REPORT_TURNS = 10_000


def argument_names(args: Any, kwargs: Any) -> list[str]:
    """The names of the arguments that are variables of the program."""
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    paths = [path for path, leaf in leaves if is_program_variable(leaf)]
    return [f"argument {jax.tree_util.keystr(path[1:])}" for path in paths]


def first_line_of(fun: Any, otherwise: str) -> str:
    """The first line of the function, if it is a Python function outside of libraries; else `otherwise`."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if code is None or is_library_file(code.co_filename):
        return otherwise
    return f"{code.co_filename}:{code.co_firstlineno}"


def text_of_event(stop: StopEventError, plan: ProgramPlan, outer: str, home: str) -> str:
    """A sentence about the event that ended a run, with its place."""
    source = next((source for step, _, source in walk_sources(plan, outer) if step is stop.step), home)
    scope = f" in scope {stop.step.scope!r}" if stop.step is not None and stop.step.scope else ""
    return f"stopped at the first {stop.what}: {stop.facts} ({stop.event}) at {source}{scope}"


def step_spec_text(step: EmulatedStep) -> str:
    """The spec of a step, or "carrier" for one that is not rounded."""
    return "carrier" if step.choice.spec is None or step.kind == "carrier" else str(step.choice.spec)


def walk_sources(plan: ProgramPlan, outer: str) -> Iterator[tuple[EmulatedStep, int, str]]:
    """The steps, the number of their runs, and their sources; `outer` is the source of the enclosing call."""
    sources: dict[int, str] = {}
    for step, around in plan.walk_within():
        holder = sources[id(around[-1])] if around else outer
        source = sources[id(step)] = source_line_of(step.eqn.source_info, holder)
        yield step, math.prod(turns for _, turns in turns_around(around)), source


def step_label(step: EmulatedStep) -> str:
    """The primitive's name; ``"jchop"`` for a function of jchop; the function's name for a call of `jax.random`.

    ``"constant"`` for the rounding of literals.
    """
    if step.kind in ("result", "constant"):
        return {"result": "jchop"}.get(step.kind, step.kind)
    return step.eqn.params.get("name", step.name) if step.draw is not None else step.name
