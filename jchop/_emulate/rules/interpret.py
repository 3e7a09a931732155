"""Runs the equations of an emulated program, some of them as chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import eval_context
from jax.extend.core import Literal

from jchop._common.bit_ops import in_auto_mesh, varying_axes
from jchop._common.settings import always_jit
from jchop._core.matmul import operations
from jchop._core.xla.sizes import if_static
from jchop._emulate.rules.accumulate import accumulate_in_order, run_complex, run_complex_sum
from jchop._emulate.rules.carrier_ops import round_results, round_with_draw, run_draw, run_in_carrier, run_nextafter
from jchop._emulate.rules.functions import arg_extremum_by_bits, extremum_by_bits
from jchop._emulate.rules.linalg import run_factorization
from jchop._emulate.rules.rules import EXACT, is_carrier_float, is_exact_under, is_narrow_float, spec_of_fact
from jchop._emulate.rules.run_task import EmulatedStep, Task, power_draws, run_task
from jchop._kernels.operation import MIN_CHAIN_ELEMENTS_TO_TRY, chain_op
from jchop._program.bind import bind, constant_of, straight_through
from jchop._program.control import WhileParts, as_jax_value
from jchop._program.repeats import Turns, run_turns, with_turns
from jchop._program.run import Runner, interpret
from jchop._program.seeds import Seeds
from jchop._program.step import REMAT_CALLS, ProgramPlan, is_reference
from jchop._program.stopped_loops import source_of_condition, warn_at_condition
from jchop._round.arguments import JCHOP_RESULT
from jchop._spec.spec import Spec

# -- chains ------------------------------------------------------------------------------------------------------------


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
            result_ids = {id(step.eqn.outvars[0]) for step in steps}
            operands = {id(v): v for step in steps for v in step.eqn.invars if id(v) not in result_ids}
            yield Chain(steps, tuple(operands.values()), results[0])
        else:
            yield from steps


def _chain_key(step: EmulatedStep | Turns) -> Any:
    """A key that the steps of one chain share; None for a step that cannot be in a chain."""
    if isinstance(step, Turns):
        return None
    spec = step.choice.spec
    if step.kind != "exact" or spec is None or any(step.rounds) or EXACT[step.name] not in operations.CHAIN_OPERATIONS:
        return None
    (out,) = step.eqn.outvars
    fits = all(v.aval.dtype == jnp.float32 and v.aval.shape in ((), out.aval.shape) for v in step.eqn.invars)
    few = if_static(lambda: prod(out.aval.shape) < MIN_CHAIN_ELEMENTS_TO_TRY, True)
    if not fits or out.aval.dtype != jnp.float32 or few or not operations.gains_by_trial(spec):
        return None
    constants = [v for v in step.eqn.invars if isinstance(v, Literal)]
    exact = all(isinstance(k, Spec) and is_exact_under(k, spec) for k in step.known)
    if not exact or not all(operations.is_constant_in_safe_range(float(v.val), spec) for v in constants):
        return None
    return spec, out.aval.shape, varying_axes(out.aval), step.eqn.ctx


def run_chain(chain: Chain, seeds: Seeds | None, operands: Sequence[Any]) -> Array:
    """The result of a chain, given its operands."""
    outvars = [step.eqn.outvars[0] for step in chain.steps]
    place = {id(v): i for i, v in enumerate((*chain.operands, *outvars))}
    spec = chain.steps[0].choice.spec
    assert spec is not None
    tasks, links = [], []
    for step in chain.steps:
        tasks.append(replace(step.task, apart=False))
        facts = tuple(k for k in step.known if isinstance(k, Spec))
        places = tuple(place[id(v)] for v in step.eqn.invars)
        links.append((EXACT[step.name], places, facts, step.result_number))
    seed_arrays: list[Any] = []
    if seeds is not None and operations.spec_draws(spec):
        seed_arrays = [*seeds.of(outvars[0].aval), jnp.uint32(0) if seeds.shift is None else seeds.shift]
    result, shape = place[id(chain.result)], outvars[0].aval.shape
    arrays = [jnp.asarray(x) for x in operands]
    return _run_links(tuple(tasks), tuple(links), shape, result, spec, arrays, seed_arrays)


@partial(always_jit, static_argnums=(0, 1, 2, 3, 4), inline=True)
def _run_links(
    tasks: tuple[Task, ...],
    links: tuple[operations.ChainLink, ...],
    shape: tuple[int, ...],
    result: int,
    spec: Spec,
    operands: list[Array],
    seeds: list[Array],
) -> Array:
    """Chains of equal tasks and links are traced once."""
    count = len(operands)

    def plain(*arrays: Array) -> Array:
        """The equations one by one, for the derivative, which is taken at every intermediate result."""
        values, seeds = list(arrays[:count]), arrays[count:]
        for task, (_, places, _, number) in zip(tasks, links, strict=True):
            words = [operations.chain_words(seeds, shape, number)] if seeds else []
            values += run_task(task, [values[place] for place in places], words)
        return values[result]

    def run(arrays: list[Array], _: None) -> Array:
        return chain_op(*arrays, links=links, shape=shape, result=result, spec=spec)

    return straight_through(run, plain, [*operands, *seeds], None)


class EmulationRunner(Runner):
    """Runs a plan in emulated arithmetic.

    Args:
        max_turns: the most turns of a `while` loop. Default None: any number.
        warns: whether a warning names a stuck loop.
    """

    ends_stuck_loops = True

    def __init__(self, max_turns: int | None = None, warns: bool = False) -> None:
        self.max_turns, self.warns = max_turns, warns

    def parts(self, plan: ProgramPlan) -> Iterable[Any]:
        """The steps, repeated ones as loops, and some as chains. A warning of `max_turns` names a line of each turn."""
        return with_chains(plan, plan.steps if self.max_turns is not None else with_turns(plan))

    def while_loop(self, step: EmulatedStep, loop: WhileParts, start: Any) -> Any:
        """The values with which a loop ends; a warning, when it is traced, if the format rounds its steps away."""
        if self.max_turns is None:
            _warn_of_lost_steps(step)
        return super().while_loop(step, loop, start)

    def prepare_operands(self, step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The operands of a step; the operands that the plan marks are rounded."""
        return round_operands(step, seeds, args)

    def run(self, part: EmulatedStep | Chain | Turns, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of one equation, chain or loop, given its operands before they are rounded."""
        if isinstance(part, Turns):
            return run_turns(part, seeds, args, partial(interpret, self))
        if isinstance(part, Chain):
            return [run_chain(part, seeds, args)]
        own = None if seeds is None else seeds.like(*(v.aval for v in part.eqn.outvars))
        return _STEP_RULES[part.kind](part, own, round_operands(part, seeds, args))

    def control(self, step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of an equation that holds programs; its constants are rounded first."""
        return super().control(step, seeds, round_operands(step, seeds, args))


EMULATION_RUNNER = EmulationRunner()


class EagerRunner(EmulationRunner):
    """Emulated arithmetic on values: each loop, branch and algorithm of matrices is compiled once, in the first run.

    An instance serves one plan, and knows its steps by their ids.
    """

    def __init__(self, max_turns: int | None = None) -> None:
        super().__init__(max_turns, warns=True)
        self._step_functions: dict[int, Callable[..., list[Any]]] = {}
        self._parts: dict[int, list[Any]] = {}

    def parts(self, plan: ProgramPlan) -> Iterable[Any]:
        """The steps, some of them as chains."""
        if id(plan.steps) not in self._parts:
            self._parts[id(plan.steps)] = list(with_chains(plan, plan.steps))
        return self._parts[id(plan.steps)]

    def control(self, step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of an equation that holds programs."""
        if step.name not in _COMPILE_UNITS or any(is_reference(v.aval) for v in step.eqn.invars):
            return super().control(step, seeds, args)
        return self._once(step, EmulationRunner(self.max_turns, warns=True).control, seeds, args)

    def run(self, part: EmulatedStep | Chain | Turns, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of one equation or chain."""
        if isinstance(part, EmulatedStep) and part.kind == "linear":
            return self._once(part, EMULATION_RUNNER.run, seeds, args)
        return super().run(part, seeds, args)

    def _once(self, step: EmulatedStep, run: Callable[..., Any], seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """Runs a step by a function that is compiled at its first run."""
        if id(step) not in self._step_functions:
            self._step_functions[id(step)] = jax.jit(partial(run, step))
        return self._step_functions[id(step)](seeds, args)


#: The equations whose programs JAX compiles also outside of `jax.jit`.
_COMPILE_UNITS = ("scan", "while", "cond", "shard_map", *REMAT_CALLS)


def round_operands(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The operands of a step, rounded if the plan marks them. A step with inner plans uses separate seeds."""
    spec = step.choice.spec
    if spec is None or not any(step.rounds):
        return args
    number = step.number
    if step.inner and seeds is not None:
        seeds, number = seeds.turn(step.number + len(step.inner)), 0

    def round_one(i: int, x: Any) -> Any:
        own = None if seeds is None else seeds.like(step.eqn.invars[i].aval)
        return round_with_draw(as_jax_value(x), spec, own, number + i)

    return [round_one(i, x) if rounds else x for i, (x, rounds) in enumerate(zip(args, step.rounds, strict=True))]


def _warn_of_lost_steps(loop: EmulatedStep) -> None:
    """Warns of a loop that ends where a counter reaches a constant, if rounding keeps the counter before it."""
    test, body = loop.inner
    last = next((one for one in test.steps if one.eqn.outvars[0] is test.jaxpr.outvars[0]), None)
    if last is None or last.name not in ("lt", "le", "gt", "ge"):
        return
    own = [i for i, v in enumerate(test.jaxpr.invars) if v in last.eqn.invars[:2] and not v.aval.shape]
    limits = [v for v in last.eqn.invars if isinstance(v, Literal) and is_carrier_float(v.aval)]
    place = own[0] - loop.eqn.params["cond_nconsts"] if own else -1
    if place < 0 or not limits:
        return
    counter = body.jaxpr.invars[place + loop.eqn.params["body_nconsts"]]
    result, limit = body.jaxpr.outvars[place], constant_of(limits[0])
    step = next((one for one in body.steps if one.eqn.outvars[0] is result and one.name in ("add", "sub")), None)
    if step is None or step.kind != "exact" or step.choice.spec is None or counter not in step.eqn.invars:
        return
    steps = [constant_of(v) for v in step.eqn.invars if isinstance(v, Literal)]
    if not steps:
        return
    spec, rises = step.choice.spec, (last.name in ("lt", "le")) is (last.eqn.invars[1] is limits[0])
    if operations.spec_draws(spec) or not np.isfinite(limit):
        return
    with eval_context():
        near = round_operands(last, None, [limit, limit])[last.eqn.invars[1] is limits[0]]
        if last.name in ("lt", "gt"):
            near = np.nextafter(np.asarray(near), -np.inf if rises else np.inf, dtype=limit.dtype)
            near = round_with_draw(jnp.asarray(near), replace(spec, rounding="down" if rises else "up"), None, 0)
        new = run_step(step, None, [near if v is counter else constant_of(v) for v in step.eqn.invars])[0]
    if np.isfinite(near) and np.array_equal(new, near):
        text = f"a while loop may never end: the counter of its condition at {source_of_condition(loop, [last])} stays "
        text += f"at {near} below {limit:.6g}" if rises else f"at {near} above {limit:.6g}"
        text += f", as {spec} rounds the step {steps[0]:.6g} away; max_turns= stops the loop, a larger step ends it"
        warn_at_condition(loop, [last], text)


def run_step(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of one equation, which may hold programs."""
    return (EMULATION_RUNNER.control if step.kind == "control" else EMULATION_RUNNER.run)(step, seeds, args)


def _bind_step(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    del seeds
    return bind(step.eqn.primitive, step.eqn.params, *args)


def _run_step_task(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of a step, rounded under its spec; one random word for each rounding that draws."""
    spec = step.choice.spec
    if spec is None:
        return _bind_step(step, seeds, args)
    words = []
    if seeds is not None and operations.spec_draws(spec):  # a draw for each rounding of the results
        outs = [v.aval for v in step.eqn.outvars if is_carrier_float(v.aval)]
        if step.kind == "power":
            outs = outs * power_draws(step.eqn.params["y"])
        words = [seeds.draw(aval, step.result_number + i) for i, aval in enumerate(outs)]
    return run_task(step.task, [as_jax_value(x) for x in args], words)


def _run_extremum_step(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The maximum or minimum. Values of a known format are compared by bits if the device could read them as zero."""
    fact = spec_of_fact(step.out[0])
    if fact is None:
        return _bind_step(step, seeds, args)
    task = Task(step.eqn.primitive, tuple(sorted(step.eqn.params.items())), "extremum", fact, (fact, fact))
    return run_task(task, [jnp.asarray(x) for x in args])


def _run_structural(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """A move of values. The largest or smallest along axes, or its index, by bits: a device may lose subnormals."""
    by_bits = step.name in _BY_BITS and step.choice.spec is not None and is_carrier_float(step.eqn.invars[0].aval)
    if not by_bits or not if_static(lambda: args[0].size, True):
        return _bind_step(step, seeds, args)
    (x,), axes = args, step.eqn.params["axes"]
    if step.name in ("argmax", "argmin"):
        return [arg_extremum_by_bits(step.name, lax.stop_gradient(x), axes, step.eqn.params["index_dtype"])]

    def plain(x: Array) -> Array:
        return _bind_step(step, seeds, [x])[0]

    def run(values: list[Array], _: None) -> Array:
        find = partial(extremum_by_bits, step.name, axes=axes)
        return in_auto_mesh(find, *values, along=[[axis - x.ndim for axis in axes]], like=plain)

    return [straight_through(run, plain, [x], None)]


#: Primitives that choose among the numbers along axes.
_BY_BITS = ("reduce_max", "reduce_min", "argmax", "argmin")


def _run_sum(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    if step.choice.accumulate is None:
        return _run_step_task(step, seeds, args)
    dtype, pairs = step.eqn.outvars[0].aval.dtype, zip(args, step.eqn.invars, strict=True)
    args = [lax.convert_element_type(x, dtype) if is_narrow_float(v.aval) else x for x, v in pairs]
    return accumulate_in_order(step, seeds, args)


_STEP_RULES: dict[str, Callable[[EmulatedStep, Seeds | None, list[Any]], list[Any]]] = {
    **dict.fromkeys(("untouched", "carrier"), _bind_step),
    **dict.fromkeys(("structural", "compared"), _run_structural),
    # A part of a function of jchop is unchanged. Marks of results are dropped after the innermost emulation.
    "own": lambda step, seeds, args: args if step.name == JCHOP_RESULT else _bind_step(step, seeds, args),
    "result": round_results,  # of a function of jchop, which is one operation
    **dict.fromkeys(("exact", "power", "elementary", "made", "converted"), _run_step_task),
    "extremum": _run_extremum_step,
    "accumulating": _run_sum,
    "linear": run_factorization,
    "complex": run_complex,
    "complex sum": run_complex_sum,
    "carried": run_in_carrier,
    "draw": run_draw,
    "neighbour": run_nextafter,
}
