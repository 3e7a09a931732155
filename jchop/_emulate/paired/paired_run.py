"""Runs an emulated program beside a reference, operation by operation, and measures the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._emulate.paired.measure import Event, Measure, measure_results
from jchop._emulate.paired.reference import Reference
from jchop._emulate.paired.shards import (
    ShardAxes,
    ShardMap,
    align_shard_axes,
    broadcast_to_shards,
    map_shards,
    seeds_of_turn,
    shard_row,
    stack_turns,
    with_vmap_collective,
)
from jchop._emulate.rules.interpret import EagerRunner, EmulationRunner, round_operands
from jchop._emulate.rules.rules import EXACT
from jchop._emulate.rules.step import EmulatedStep
from jchop._emulate.rules.trace import EmulatedProgram
from jchop._emulate.rules.value_facts import is_complex_value, is_number
from jchop._program.bind import constant_of
from jchop._program.control import as_jax_value, copy_if_reference, where_active
from jchop._program.loop_limits import text_of_stop
from jchop._program.run import watch_condition
from jchop._program.seeds import Seeds
from jchop._program.step import CALLS, ProgramPlan, carry_count, is_reference
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat

__all__ = [
    "CHOOSING_KINDS",
    "ELEMENTWISE_KINDS",
    "SILENT_KINDS",
    "PairedRun",
    "StopEventError",
    "ValuePair",
    "note_of_stop",
    "same_bits",
]

#: A value of the emulated program, and the reference's value for it.
ValuePair = tuple[Any, Any]
#: The number of turns from which a `while` loop is long.
LONG_LOOP = 64
#: The kinds of equations that round nothing.
SILENT_KINDS = frozenset({"structural", "extremum", "untouched", "compared", "control", "own"})
#: The kinds of equations whose results depend only on the operands at the same index.
ELEMENTWISE_KINDS = frozenset({"exact", "power", "elementary", "converted", "extremum", "neighbour"})
#: The kinds of equations whose results are some of the operands' numbers.
CHOOSING_KINDS = frozenset({"structural", "extremum"})


class StopEventError(Exception):
    """The event `stop_at` has happened.

    Args:
        what: the name of the event.
        step: the equation; None on entry.
        event: its turn, index and order.
        facts: the operands and the result at this index, as text.
        measure: the measure of all results of the equation.
    """

    def __init__(self, what: str, step: EmulatedStep | None, event: Event, facts: str, measure: Measure) -> None:
        super().__init__(what)
        self.what, self.step, self.event, self.facts, self.measure = what, step, event, facts, measure


@dataclass
class PairedRun:
    """A run of a program and its reference.

    Args:
        reference: the program to compare with.
        max_turns: the most turns of a `while` loop.
        stop_at: the event that ends the run with a `StopEventError`; None for none.
        measures: the measure of each step, by its id.
        notes: sentences about loops that were stopped.
        entries: of each argument and constant its name, whether it is rounded, its size and its measure.
        literal_steps: the roundings of literals that overflow or become zero, as own steps, by the id of their step.
    """

    reference: Reference
    max_turns: int
    stop_at: str | None = None
    measures: dict[int, Measure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    entries: list[tuple[str, bool, int, Measure]] = field(default_factory=list)
    literal_steps: dict[int, EmulatedStep] = field(default_factory=dict)
    turn: tuple[int, ...] = ()
    order: int = 0
    axes: ShardAxes = ()  # of the mesh, which values have first
    loops: int = 0  # the `while` loops around

    def __post_init__(self) -> None:
        self.runner = EagerRunner(self.max_turns)

    def run(
        self,
        plan: ProgramPlan,
        seeds: Seeds | None,
        args: Sequence[ValuePair],
        constants: Sequence[ValuePair] | None = None,
    ) -> list[ValuePair]:
        """The results of a planned program on concrete values."""

        def pair_of(x: Any) -> ValuePair:
            return broadcast_to_shards(x, self.axes), broadcast_to_shards(self.reference.as_reference(x), self.axes)

        env: dict[Any, ValuePair] = dict(
            zip(plan.jaxpr.constvars, constants or [pair_of(x) for x in plan.consts], strict=True)
        )
        env.update(zip(plan.jaxpr.invars, args, strict=True))

        def read(v: Any) -> ValuePair:
            return pair_of(constant_of(v)) if isinstance(v, Literal) else env[v]

        for step in plan.steps:
            with nullcontext() if self.axes else step.eqn.ctx.manager:  # a mesh is no part of the context here
                out = self._step(step, seeds, [read(v) for v in step.eqn.invars])
            env.update(zip(step.eqn.outvars, out, strict=True))
        return [read(v) for v in plan.jaxpr.outvars]

    def whole(
        self,
        program: EmulatedProgram,
        spec: Spec | None,
        entry: tuple[list[Any], list[Any], Seeds | None],
        names: Sequence[str],
    ) -> list[ValuePair]:
        """The results of a program, given its arguments and constants as `spec` rounds them on entry, and its seeds."""
        values, constants, seeds = entry
        every = (*program.values, *program.plan.consts)
        names = (*names, *("constant" for _ in constants))
        for name, x, whole, rounds in zip(names, (*values, *constants), every, program.rounds, strict=True):
            if rounds or (hasattr(x, "dtype") and is_number(x)):
                own = spec if rounds else None
                measure = measure_results(x, whole, whole, [whole], order=self.order, elementwise=True, spec=own)
                self.entries.append((name, rounds, int(np.size(x)), measure))
                self._check_stop(None, measure, x, [whole], f"{name}, {{given}}, is {{result}}")
                self.order += 1
        pairs = list(
            zip(
                (*values, *constants),
                (self.reference.as_reference(copy_if_reference(as_jax_value(x))) for x in every),
                strict=True,
            )
        )
        return self.run(program.plan, seeds, pairs[: len(values)], pairs[len(values) :])

    def _step(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        walk = self.walk_of(step)
        self._look_at_literals(step, seeds, args)
        if walk is not None:
            return walk(self, step, seeds, self.rounded_operands(step, seeds, args))
        low, wide = ([pair[i] for pair in args] for i in (0, 1))
        step = with_vmap_collective(step, self.axes)
        run = self.runner.control if step.kind == "control" else self.runner.run
        results = map_shards(self.axes, partial(run, step), seeds, low)
        alike = args and step.kind in SILENT_KINDS and not any(step.rounds) and all(x is y for x, y in args)
        alike = alike and not any(is_reference(v.aval) for v in step.eqn.outvars)  # each program writes to its own
        reference = results if alike else self.reference.bind(step, wide, self.axes)
        if step.kind not in ("control", "untouched", "compared", "own"):
            self._look(step, low, results, reference)
        self.order += 1
        return list(zip(results, reference, strict=True))

    def walk_of(self, step: EmulatedStep) -> Callable[..., list[ValuePair]] | None:
        """The way through the programs of an equation; None for one that is run as a whole."""
        return _PAIR_WALKS.get(step.name, PairedRun._call if step.inner else None) if step.kind == "control" else None

    def _look(self, step: EmulatedStep, low: list[Any], results: list[Any], reference: list[Any]) -> None:
        silent = step.kind in SILENT_KINDS
        same = results if silent else self.reference.bind(step, low, self.axes, rounds=False)
        numbers = [(x, v) for x, v in zip(low, step.eqn.invars, strict=True) if is_number(v.aval)]
        most = max((len(v.aval.shape) for _, v in numbers), default=0)
        ndim = len(self.axes) + most
        operands = [align_shard_axes(x, ndim) if self.axes and not v.aval.shape else x for x, v in numbers]
        from_program = [not isinstance(v, Literal) for _, v in numbers]
        for v, spec, result, exact, wide in zip(step.eqn.outvars, step.out, results, same, reference, strict=True):
            if not is_number(v.aval):
                continue
            measure = measure_results(
                result,
                exact,
                wide,
                operands,
                from_program,
                turn=self.turn,
                order=self.order,
                elementwise=step.kind in ELEMENTWISE_KINDS,
                digits=_sum_precision(step, v.aval),
                spec=None if silent else spec,
            )
            if silent and not measure.new_nonfinite:
                continue
            self.measures.setdefault(id(step), Measure()).add(measure)
            self._check_stop(step, measure, result, operands, f"{step.name} of {{given}} is {{result}}")

    def _look_at_literals(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> None:
        """Counts the literals that overflow or become zero, and those of calls and loops that are not finite."""
        first = id(step) not in self.literal_steps
        for i, low, measure in self.literals_out_of_range(step, seeds, args):
            own = self.literal_steps.setdefault(id(step), replace(step, kind="constant"))
            if first:  # a literal of a loop is one constant
                self.measures.setdefault(id(own), Measure()).add(measure)
            self._check_stop(step, measure, low, [args[i][0]], "constant, {given}, is {result}")
        for v in step.eqn.invars if step.kind == "control" else ():
            if isinstance(v, Literal) and is_number(v.aval) and not np.all(np.isfinite(v.val)):
                measure = measure_results(v.val, v.val, v.val, [], turn=self.turn, order=self.order)
                self.measures.setdefault(id(step), Measure()).add(measure)

    def literals_out_of_range(
        self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]
    ) -> Iterator[tuple[int, Any, Measure]]:
        """The literals whose rounding overflows or gives zero: the place, the rounded value and its measure."""
        places = [i for i, v in enumerate(step.eqn.invars) if step.rounds[i] and isinstance(v, Literal)]
        low = self.emulated_operands(step, seeds, args) if places else []
        for i in places:
            whole, spec = args[i][0], step.choice.spec
            measure = measure_results(
                low[i], whole, whole, [whole], turn=self.turn, order=self.order, elementwise=True, spec=spec
            )
            if measure.overflows or measure.underflows:
                yield i, low[i], measure

    def with_literal_steps(
        self, steps: Iterable[tuple[EmulatedStep, int, str]]
    ) -> Iterator[tuple[EmulatedStep, int, str]]:
        """The steps of `walk_sources`, each after the rounding of its literals."""
        for step, times, source in steps:
            if id(step) in self.literal_steps:
                yield self.literal_steps[id(step)], 1, source
            yield step, times, source

    def _check_stop(
        self, step: EmulatedStep | None, measure: Measure, result: Any, operands: list[Any], text: str
    ) -> None:
        for what, event in measure.events():
            if what == self.stop_at:
                result = np.asarray(result)
                here = [_operand_at(np.asarray(x), event.where, result.shape) for x in operands]
                facts = text.format(given=", ".join(here), result=result[event.where])
                raise StopEventError(what, step, event, facts, measure)

    # -- pairs made of pairs -------------------------------------------------------------------------------------------

    def rounded_operands(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        """The operands of an equation that holds programs, with those rounded that the plan marks."""
        low = self.emulated_operands(step, seeds, args)
        return [(x, pair[1]) for x, pair in zip(low, args, strict=True)]

    def emulated_operands(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[Any]:
        """The emulated values of operands, with those rounded that the plan marks."""
        return map_shards(self.axes, partial(round_operands, step), seeds, [pair[0] for pair in args])

    def map_pair(self, move: Callable[[Any], Any], pair: ValuePair) -> ValuePair:
        """The pair with its numbers in another place."""
        return move(pair[0]), move(pair[1])

    def row(self, pair: ValuePair, k: int) -> ValuePair:
        """Row k of arrays."""
        return self.map_pair(lambda x: shard_row(x, k, self.axes), pair)

    def stack(self, rows: list[ValuePair], aval: Any) -> ValuePair:
        """The results of the turns of a scan along a first axis."""
        low, wide = (stack_turns([row[side] for row in rows], aval, self.axes) for side in (0, 1))
        return low, self.reference.as_reference(wide)

    def select(self, active: Any, new: ValuePair, old: ValuePair) -> ValuePair:
        """The new values of the loops of a batch that still run, and the old values of others."""
        return where_active(active, new[0], old[0]), self.reference.select(active, new[1], old[1])

    # -- equations that hold programs ----------------------------------------------------------------------------------

    def _inside(self, seeds: Seeds | None, number: int, turn: int = 0) -> Seeds | None:
        return seeds_of_turn(self.axes, seeds, number, turn)

    def _call(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        return self.run(step.inner[0], self._inside(seeds, step.number), args)

    def _shard_map(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        """All shards at once."""
        shards = ShardMap(step, self.axes)
        parts = list(map(self.map_pair, shards.cuts(), args))
        self.axes = shards.axes
        out = self.run(step.inner[0], shards.seeds(seeds), parts)
        self.axes = shards.outer
        return list(map(self.map_pair, shards.joins(), out))

    def _solve(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        lengths = step.eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        return self._call(step, seeds, [*args[first : first + lengths.solve], *args[sum(lengths) :]])

    def _cond(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        branches = np.clip(np.asarray(self.path_value(args[0])), 0, len(step.inner) - 1)
        out: list[ValuePair] = []
        for index in map(int, np.unique(branches)):  # several if shards differ
            new = self.run(step.inner[index], self._inside(seeds, step.number + index), args[1:])
            own = jnp.asarray(branches == index)
            out = [self.select(own, *pair) for pair in zip(new, out, strict=True)] if out else new
        return out

    def _scan(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        params = step.eqn.params
        consts, carry_size = carry_count(params)
        fixed, carry, xs = args[:consts], args[consts : consts + carry_size], args[consts + carry_size :]
        order = range(params["length"])
        each: list[list[ValuePair]] = []
        outer = self.turn
        for turn, k in enumerate(reversed(order) if params["reverse"] else order):
            self.turn = (*outer, turn)
            row = [self.row(x, k) for x in xs]
            out = self.run(step.inner[0], self._inside(seeds, step.number, turn), [*fixed, *carry, *row])
            carry, ys = out[:carry_size], out[carry_size:]
            each.append(ys)
        self.turn = outer
        if params["reverse"]:
            each.reverse()
        avals = [v.aval for v in step.eqn.outvars[carry_size:]]
        return [*carry, *(self.stack([ys[i] for ys in each], aval) for i, aval in enumerate(avals))]

    def _while(self, step: EmulatedStep, seeds: Seeds | None, args: list[ValuePair]) -> list[ValuePair]:
        test, body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
        first, fixed, carry = args[:test], args[test : test + body], args[test + body :]
        turn, outer, active = 0, self.turn, jnp.asarray(True)
        draws = seeds is not None or bool(step.eqn.effects)
        self.loops += 1
        while True:
            self.turn = (*outer, turn)
            goes_on = self.run(step.inner[0], self._inside(seeds, step.number, turn), [*first, *carry])[0]
            active = active & self.path_value(goes_on)
            if not bool(jnp.any(active)):
                break
            if turn >= self.max_turns:
                why = f"after max_turns={turn} turns"
                inside = self._inside(seeds, step.number, turn)
                self._note_stop(step, why, inside, (*first, *carry))
                break
            if turn == LONG_LOOP:
                self.check_long()
            out = self.run(step.inner[1], self._inside(seeds, step.number + 1, turn), [*fixed, *carry])
            new = [self.select(active, one, two) for one, two in zip(out, carry, strict=True)]
            turn += 1
            if not draws and all(same_bits(one[0], two[0]) for one, two in zip(new, carry, strict=True)):
                why = f"after {turn} turns, as its values no longer change and it would never end"
                self._note_stop(step, why, None, (*first, *carry))
                break
            carry = new
        self.turn, self.loops = outer, self.loops - 1
        return carry

    def path_value(self, pair: ValuePair) -> Any:
        """The emulated value of what chooses a path: an index of branches, a condition."""
        return pair[0]

    def check_long(self) -> None:
        """Called when a `while` loop has made `LONG_LOOP` turns."""

    def _note_stop(self, step: EmulatedStep, why: str, seeds: Seeds | None, args: Sequence[ValuePair]) -> None:
        self.notes.append(note_of_stop(self.runner, step, why, seeds, [pair[0] for pair in args], self.axes))


def note_of_stop(
    runner: EmulationRunner, step: EmulatedStep, why: str, seeds: Seeds | None, args: list[Any], axes: ShardAxes = ()
) -> str:
    """A sentence about a `while` loop that is stopped, with its line and the numbers compared."""
    steps: list[EmulatedStep] = []

    def look(seeds: Seeds | None, args: list[Any]) -> tuple[Any, list[list[Any]]]:
        comparisons, goes_on = watch_condition(runner, step.inner[0], seeds, args)
        steps[:] = [one for one, _ in comparisons]
        return goes_on, [values for _, values in comparisons]

    return text_of_stop(step, steps, why, *map_shards(axes, look, seeds, args))


def same_bits(one: Any, two: Any) -> bool:
    """Whether two values have the same bits."""
    one, two = as_jax_value(one), as_jax_value(two)
    if jnp.issubdtype(one.dtype, jax.dtypes.extended):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    return np.asarray(one).tobytes() == np.asarray(two).tobytes()


def _sum_precision(step: EmulatedStep, aval: Any) -> int | None:
    """The precision of a sum or difference of two real numbers; None for anything else."""
    if EXACT.get(step.name, step.name) not in ("add", "sub") or is_complex_value(aval):
        return None
    fmt = None if step.choice.spec is None else step.choice.spec.format
    return fmt.precision if isinstance(fmt, FloatFormat) else int(jnp.finfo(aval.dtype).nmant) + 1


def _operand_at(x: np.ndarray, where: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """An operand at the index of a result, or the operand's shape if it differs."""
    return str(x[where] if x.shape == shape else x if not x.shape else f"an array of shape {x.shape}")


_PAIR_WALKS = {
    **dict.fromkeys(CALLS, PairedRun._call),
    "custom_linear_solve": PairedRun._solve,
    "cond": PairedRun._cond,
    "scan": PairedRun._scan,
    "while": PairedRun._while,
    "shard_map": PairedRun._shard_map,
}
