"""Chains: consecutive elementwise equations of a plan under one spec, run as one operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jchop._bits import varying
from jchop._core.arithmetic.chain import ELEMENTWISE, Link, gains, is_in_safe_range, words_of
from jchop._core.arithmetic.operations import draws
from jchop._core.sizes import if_known
from jchop._emulate._known import within
from jchop._emulate._perform import Task, perform
from jchop._emulate._rules import EXACT
from jchop._emulate._step import Step
from jchop._kernels.chain import LEAST_TRIED, chain_op
from jchop._program.bind import straight_through
from jchop._program.repeats import Turns
from jchop._program.seeds import Seeds
from jchop._program.step import Plan
from jchop._settings import compiled
from jchop.spec import Spec

__all__ = ["Chain", "parts_of", "run_chain"]

Array = jax.Array

#: The fewest operations of a chain.
_LEAST_LINKS = 3


@dataclass(frozen=True)
class Chain:
    """Consecutive equations, their operands, and the one result that is used after them."""

    steps: tuple[Step, ...]
    operands: tuple[Any, ...]
    result: Any

    @property
    def eqn(self) -> Any:
        """The first equation."""
        return self.steps[0].eqn

    @property
    def results(self) -> tuple[Any, ...]:
        """The variable of its result."""
        return (self.result,)


@dataclass(frozen=True)
class _Static:
    """Everything static about a chain; equal ones are traced once."""

    tasks: tuple[Task, ...]
    links: tuple[Link, ...]
    shape: tuple[int, ...]
    result: int
    spec: Spec


def parts_of(plan: Plan, parts: Sequence[Step | Turns]) -> Iterator[Step | Chain | Turns]:
    """The parts of a plan, some of them as chains.

    Consecutive equations of one kind are one chain, or none. A chain with several results would compute each result
    from the start. A chain among other equations would keep the compiler from fusing them.
    """
    last = {id(v): i for i, part in enumerate(parts) for v in part.operands}
    last |= {id(v): len(parts) for v in plan.jaxpr.outvars}
    end = 0
    for kind, together in groupby(parts, _kind):
        steps: Any = tuple(together)
        end += len(steps)
        results = [v for step in steps for v in step.results if last.get(id(v), -1) >= end]
        if kind is not None and len(steps) >= _LEAST_LINKS and len(results) == 1:
            yield _chain(steps, results[0])
        else:
            yield from steps


def _kind(step: Step | Turns) -> Any:
    """A key that the steps of one chain share; None for a step that cannot be in a chain."""
    if isinstance(step, Turns):
        return None
    spec = step.choice.spec
    if step.kind != "exact" or spec is None or any(step.rounds) or EXACT[step.name] not in ELEMENTWISE:
        return None
    (out,) = step.eqn.outvars
    fits = all(v.aval.dtype == jnp.float32 and v.aval.shape in ((), out.aval.shape) for v in step.eqn.invars)
    few = if_known(lambda: prod(out.aval.shape) < LEAST_TRIED, True)
    if not fits or out.aval.dtype != jnp.float32 or few or not gains(spec):
        return None
    constants = [v for v in step.eqn.invars if isinstance(v, Literal)]
    exact = all(k is not None and within(k, spec) for k in step.known)
    if not exact or not all(is_in_safe_range(float(v.val), spec) for v in constants):
        return None
    return spec, out.aval.shape, varying(out.aval), step.eqn.ctx


def _chain(steps: tuple[Step, ...], result: Any) -> Chain:
    result_ids = {id(step.eqn.outvars[0]) for step in steps}
    operands = {id(v): v for step in steps for v in step.eqn.invars if id(v) not in result_ids}
    return Chain(steps, tuple(operands.values()), result)


def run_chain(chain: Chain, seeds: Seeds | None, operands: Sequence[Any]) -> Array:
    """The result of a chain, given its operands."""
    outvars = [step.eqn.outvars[0] for step in chain.steps]
    place = {id(v): i for i, v in enumerate((*chain.operands, *outvars))}
    spec = chain.steps[0].choice.spec
    assert spec is not None
    tasks, links = [], []
    for step in chain.steps:
        params = tuple(sorted(step.eqn.params.items()))
        tasks.append(Task(step.eqn.primitive, params, step.kind, spec, step.known))
        facts = tuple(k for k in step.known if k is not None)
        places = tuple(place[id(v)] for v in step.eqn.invars)
        links.append((EXACT[step.name], places, facts, step.result_number))
    static = _Static(tuple(tasks), tuple(links), outvars[0].aval.shape, place[id(chain.result)], spec)
    seed_arrays: list[Any] = []
    if seeds is not None and draws(spec):
        seed_arrays = [*seeds.of(outvars[0].aval), jnp.uint32(0) if seeds.shift is None else seeds.shift]
    return _run(static, [jnp.asarray(x) for x in operands], seed_arrays)


@partial(compiled, static_argnums=0, inline=True)
def _run(static: _Static, operands: list[Array], seed_arrays: list[Array]) -> Array:
    count = len(operands)

    def run(arrays: list[Array], extra: None) -> Array:
        del extra
        more = {"links": static.links, "shape": static.shape, "result": static.result, "spec": static.spec}
        return chain_op(*arrays, **more)

    def plain(*arrays: Array) -> Array:
        """The equations one by one, for the derivative, which is taken at every intermediate result."""
        return _one_by_one(static, arrays[:count], arrays[count:])

    return straight_through(run, plain, [*operands, *seed_arrays], None)


def _one_by_one(static: _Static, operands: Sequence[Array], seeds: Sequence[Array]) -> Array:
    values = list(operands)
    for task, (_, places, _, number) in zip(static.tasks, static.links, strict=True):
        words = [words_of(seeds, static.shape, number)] if seeds else []
        values += perform(task, [values[place] for place in places], words)
    return values[static.result]
