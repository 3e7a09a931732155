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

from jchop._common.bit_ops import varying_axes
from jchop._common.settings import always_jit
from jchop._core.matmul.operations import (
    CHAIN_OPERATIONS,
    ChainLink,
    chain_words,
    gains_by_trial,
    is_constant_in_safe_range,
    spec_draws,
)
from jchop._core.xla.sizes import if_static
from jchop._emulate.rules.rules import EXACT
from jchop._emulate.rules.run_task import Task, run_task
from jchop._emulate.rules.step import EmulatedStep
from jchop._emulate.rules.value_facts import is_exact_under
from jchop._kernels.operation import MIN_CHAIN_ELEMENTS_TO_TRY, chain_op
from jchop._program.bind import straight_through
from jchop._program.repeats import Turns
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan
from jchop._spec.spec import Spec

Array = jax.Array

#: The fewest operations of a chain.
_LEAST_LINKS = 3


@dataclass(frozen=True)
class Chain:
    """Consecutive equations, their operands, and the one result that is used after them."""

    steps: tuple[EmulatedStep, ...]
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
class _ChainFacts:
    """Everything static about a chain; equal ones are traced once."""

    tasks: tuple[Task, ...]
    links: tuple[ChainLink, ...]
    shape: tuple[int, ...]
    result: int
    spec: Spec


def with_chains(plan: ProgramPlan, parts: Sequence[EmulatedStep | Turns]) -> Iterator[EmulatedStep | Chain | Turns]:
    """The parts of a plan, some of them as chains.

    Consecutive equations of one kind are one chain, or none. A chain with several results would compute each result
    from the start. A chain among other equations would keep the compiler from fusing them.
    """
    last = {id(v): i for i, part in enumerate(parts) for v in part.operands}
    last |= {id(v): len(parts) for v in plan.jaxpr.outvars}
    end = 0
    for kind, together in groupby(parts, _chain_key):
        steps: Any = tuple(together)
        end += len(steps)
        results = [v for step in steps for v in step.results if last.get(id(v), -1) >= end]
        if kind is not None and len(steps) >= _LEAST_LINKS and len(results) == 1:
            yield _make_chain(steps, results[0])
        else:
            yield from steps


def _chain_key(step: EmulatedStep | Turns) -> Any:
    """A key that the steps of one chain share; None for a step that cannot be in a chain."""
    if isinstance(step, Turns):
        return None
    spec = step.choice.spec
    if step.kind != "exact" or spec is None or any(step.rounds) or EXACT[step.name] not in CHAIN_OPERATIONS:
        return None
    (out,) = step.eqn.outvars
    fits = all(v.aval.dtype == jnp.float32 and v.aval.shape in ((), out.aval.shape) for v in step.eqn.invars)
    few = if_static(lambda: prod(out.aval.shape) < MIN_CHAIN_ELEMENTS_TO_TRY, True)
    if not fits or out.aval.dtype != jnp.float32 or few or not gains_by_trial(spec):
        return None
    constants = [v for v in step.eqn.invars if isinstance(v, Literal)]
    exact = all(k is not None and is_exact_under(k, spec) for k in step.known)
    if not exact or not all(is_constant_in_safe_range(float(v.val), spec) for v in constants):
        return None
    return spec, out.aval.shape, varying_axes(out.aval), step.eqn.ctx


def _make_chain(steps: tuple[EmulatedStep, ...], result: Any) -> Chain:
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
    static = _ChainFacts(tuple(tasks), tuple(links), outvars[0].aval.shape, place[id(chain.result)], spec)
    seed_arrays: list[Any] = []
    if seeds is not None and spec_draws(spec):
        seed_arrays = [*seeds.of(outvars[0].aval), jnp.uint32(0) if seeds.shift is None else seeds.shift]
    return _run_links(static, [jnp.asarray(x) for x in operands], seed_arrays)


@partial(always_jit, static_argnums=0, inline=True)
def _run_links(static: _ChainFacts, operands: list[Array], seed_arrays: list[Array]) -> Array:
    count = len(operands)

    def run(arrays: list[Array], extra: None) -> Array:
        del extra
        more = {"links": static.links, "shape": static.shape, "result": static.result, "spec": static.spec}
        return chain_op(*arrays, **more)

    def plain(*arrays: Array) -> Array:
        """The equations one by one, for the derivative, which is taken at every intermediate result."""
        return _run_equations(static, arrays[:count], arrays[count:])

    return straight_through(run, plain, [*operands, *seed_arrays], None)


def _run_equations(static: _ChainFacts, operands: Sequence[Array], seeds: Sequence[Array]) -> Array:
    values = list(operands)
    for task, (_, places, _, number) in zip(static.tasks, static.links, strict=True):
        words = [chain_words(seeds, static.shape, number)] if seeds else []
        values += run_task(task, [values[place] for place in places], words)
    return values[static.result]
