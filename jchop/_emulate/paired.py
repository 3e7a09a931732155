"""Runs an emulated program beside a reference, operation by operation, and measures the results.

Measures are counts, ranges, errors, cancelled bits, and first events.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._emulate.rules.interpret import EagerRunner, round_operands
from jchop._emulate.rules.rules import (
    CARRIER_DTYPES,
    EVENTS,
    EXACT,
    finite_range_of,
    is_complex_value,
    is_number,
    spec_of_fact,
)
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._emulate.rules.trace import EmulatedProgram, ProgramEntry, is_program_variable
from jchop._program import lanes
from jchop._program.control import as_jax_value, copy_if_reference, turns_around, where_active
from jchop._program.lanes import LaneRunner, ShardAxes, bind_shards, broadcast_to_shards, map_shards
from jchop._program.run import interpret
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, is_library_file, is_reference, source_line_of
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop.formats import FloatFormat, UniformFormat
from jchop.formats._catalogue import binary64


@dataclass(frozen=True)
class Event:
    """The place of the first event of a kind.

    Args:
        turn: the turns of the enclosing loops, from 0, the outermost first; empty outside of loops.
        where: the index in the result; empty for a scalar.
        order: the number of earlier operations.
    """

    turn: tuple[int, ...]
    where: tuple[int, ...]
    order: int

    def __str__(self) -> str:
        turn = f"turn {'.'.join(map(str, self.turn))}" if self.turn else ""
        where = str(list(self.where)) if self.where else ""
        return ", ".join(filter(None, (turn, where))) or "scalar"


@dataclass
class Measure:
    """Counts, ranges and errors of some results."""

    overflows: int = 0
    underflows: int = 0
    infinities: int = 0
    nans: int = 0
    invalid: int = 0
    new_nonfinite: int = 0  # infinities and NaN of finite operands, without regard to constants
    digit_loss: float = 0.0  # cancelled bits of all sums
    sums: int = 0
    cancelled: float = -math.inf
    smallest: float = math.inf
    largest: float = -math.inf
    error: float = -math.inf
    deviation: float = -math.inf
    exponents: Counter[int] = field(default_factory=Counter)  # this and the next: of `EmulatedFunction.ranges` alone
    numbers: int = 0
    zeros: int = 0
    subnormals: int = 0
    first_overflow: Event | None = None
    first_nan: Event | None = None
    first_invalid: Event | None = None

    def facts(self) -> dict[str, Any]:
        """The fields of a row; NaN if there is no number."""
        inner = ("new_nonfinite", "digit_loss", "sums", "exponents", "numbers", "zeros", "subnormals")
        rest = ((name, v) for name, v in vars(self).items() if name not in inner)
        numbers = {name: math.nan if isinstance(v, float) and not math.isfinite(v) else v for name, v in rest}
        return numbers | {"cancelled_mean": self.digit_loss / self.sums if self.sums else math.nan}

    def add(self, other: Measure | None) -> None:
        """Adds another measure."""
        if other is None:
            return
        for name in (f.name for f in fields(self)):
            one, two = getattr(self, name), getattr(other, name)
            if name.startswith("first_"):
                new = min(filter(None, (one, two)), key=lambda event: event.order, default=None)
            elif name in _MAXIMUM_FIELDS:
                new = max(one, two)
            else:
                new = min(one, two) if name == "smallest" else one + two
            setattr(self, name, new)

    def events(self) -> Iterator[tuple[str, Event]]:
        """The names in `EVENTS` of the events that happened, each with its place."""
        for name in EVENTS:
            event = getattr(self, f"first_{name}")
            if event is not None:
                yield name, event


_MAXIMUM_FIELDS = ("largest", "error", "deviation", "cancelled")


def measure_results(
    low: Any,
    same: Any,
    reference: Any,
    operands: Sequence[Any],
    from_program: Sequence[bool] | None = None,
    *,
    turn: tuple[int, ...] = (),
    order: int = 0,
    elementwise: bool = False,
    digits: int | None = None,
    spec: Spec | None = None,
) -> Measure:
    """The measure of results.

    Args:
        low: the emulated results.
        same: the results without rounding, for the same operands.
        reference: the results of the reference program.
        operands: the operands that are numbers.
        from_program: whether each operand is a result; infinities and NaN of constants count as new. None: all are.
        turn: the turns of the enclosing loops.
        order: the number of earlier operations.
        elementwise: whether each result depends only on the operands at the same index.
        digits: the precision of the operands of a sum or difference; None for other operations.
        spec: the rounding of the results; None for none.
    """
    low, same, reference = (as_double_precision(x) for x in (low, same, reference))
    operands = [as_double_precision(x) for x in operands]
    magnitude = np.abs(low[np.isfinite(low) & (low != 0)])
    nan, infinite = np.isnan(low), np.isinf(low)
    overflow = np.isfinite(same) & (~np.isfinite(low) | _beyond_format(same, spec))
    invalid = _without_operand_cause(nan, [np.isnan(x) for x in operands], elementwise)
    sources = operands if from_program is None else [x for x, flag in zip(operands, from_program, strict=True) if flag]
    new_nonfinite = _without_operand_cause(infinite | nan, [~np.isfinite(x) for x in sources], elementwise)
    losses = _cancellation_bits(low, operands, digits) if digits is not None else np.zeros(0)
    events = {"overflow": overflow, "nan": nan, "invalid": invalid}
    firsts: dict[str, Any] = {
        f"first_{name}": Event(turn, tuple(map(int, np.argwhere(mask)[0])), order) if mask.any() else None
        for name, mask in events.items()
    }
    return Measure(
        overflows=int(overflow.sum()),
        underflows=int(np.sum((low == 0) & (same != 0))),
        infinities=int(infinite.sum()),
        nans=int(nan.sum()),
        invalid=int(invalid.sum()),
        new_nonfinite=int(new_nonfinite.sum()),
        digit_loss=float(losses.sum()),
        sums=losses.size,
        cancelled=float(losses.max(initial=-math.inf)),
        smallest=float(magnitude.min(initial=math.inf)),
        largest=float(magnitude.max(initial=-math.inf)),
        error=_largest_relative_error(low, same),
        deviation=_largest_relative_error(low, reference),
        **firsts,
    )


def as_double_precision(x: Any) -> np.ndarray:
    """Numbers in float64 or complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _beyond_format(exact: np.ndarray, spec: Spec | None) -> Any:
    """Whether numbers lie beyond the ends of the format by more than half its step there: they saturate or wrap.

    The step of a tapered format or a codebook counts as zero.
    """
    if spec is None:
        return False
    if np.iscomplexobj(exact):
        return _beyond_format(np.real(exact), spec) | _beyond_format(np.imag(exact), spec)
    fmt, half = spec.format, 0.0
    if isinstance(fmt, FloatFormat):
        half = math.ldexp(1.0, fmt.emax - fmt.frac_bits - 1)
    elif isinstance(fmt, UniformFormat):
        half = math.ldexp(1.0, -fmt.frac_bits - 1)
    low, high = finite_range_of(fmt)
    below = 0.0 if isinstance(fmt, FloatFormat) and not fmt.signed else half
    return (exact > high + half) | (exact < low - below)


def _without_operand_cause(mask: np.ndarray, operand_masks: Sequence[np.ndarray], elementwise: bool) -> np.ndarray:
    """The found results for which no operand has such a value: at the same index, or anywhere."""
    for has in operand_masks:
        if elementwise and has.shape in (mask.shape, ()):
            mask = mask & ~has
        elif has.any():
            return np.zeros_like(mask)
    return mask


def _cancellation_bits(low: np.ndarray, operands: Sequence[np.ndarray], digits: int) -> np.ndarray:
    """The number of cancelled leading bits: the larger operand's exponent minus the exponent of the result.

    A sum of zero has lost every digit.
    """
    a, b, result = (np.broadcast_to(x, low.shape) for x in (*operands, low))
    use = np.isfinite(a) & np.isfinite(b) & np.isfinite(result) & ((a != 0) | (b != 0))
    largest, result = np.maximum(np.abs(a[use]), np.abs(b[use])), np.abs(result[use])
    drop = np.where(result == 0, digits, np.frexp(largest)[1] - np.frexp(result)[1])
    return np.maximum(drop, 0).astype(np.float64)


def _largest_relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest |got - want| / |want| of finite numbers; two zeros give 0, a single zero in want is skipped."""
    use = np.isfinite(got) & np.isfinite(want) & ((want != 0) | (got == 0))
    got, want = got[use], want[use]
    return float(np.max(np.abs(got - want) / np.where(want == 0, 1, np.abs(want)), initial=-math.inf))


# == runs ==============================================================================================================


# -- references --------------------------------------------------------------------------------------------------------


class CarrierReference:
    """Every operation in the carrier."""

    #: Its name in a report.
    text = "carrier"
    #: Primitives whose result came from the carrier.
    narrow: frozenset[str] = frozenset()

    def as_reference(self, x: Any) -> Any:
        """An argument or a constant."""
        return x

    def bind(self, step: EmulatedStep, args: Sequence[Any], axes: ShardAxes = (), *, rounds: bool = True) -> list[Any]:
        """The results of an equation, of operands that have these axes of a mesh first."""
        del rounds
        return bind_shards(axes, step.eqn.primitive, step.eqn.params, args)

    def select(self, active: Any, new: Any, old: Any) -> Any:
        """The new values of the loops of a batch that still run, and the old values of others."""
        return where_active(active, new, old)


class Float64Reference(CarrierReference):
    """Every operation in float64, then rounded to a spec; its numbers are NumPy's.

    An equation without a float64 form, or with random draws, gives the carrier's result.

    Args:
        spec: the rounding of float64 results.
    """

    def __init__(self, spec: Spec) -> None:
        self.text, self.spec = str(spec), None if spec.format == binary64 else spec
        self.narrow = frozenset()

    def as_reference(self, x: Any) -> Any:
        """Numbers in float64; other values unchanged."""
        if not hasattr(x, "dtype") or not is_number(x):
            return np.asarray(x, np.float64) if isinstance(x, float) else x
        return np.asarray(x).astype(np.complex128 if is_complex_value(x) else np.float64)

    def bind(self, step: EmulatedStep, args: Sequence[Any], axes: ShardAxes = (), *, rounds: bool = True) -> list[Any]:
        """The results of an equation, of operands in any dtype."""
        bind_primitive = partial(bind_shards, axes, step.eqn.primitive)
        out = None
        args = [  # Python numbers in their dtypes in the program, which could differ under jax_enable_x64
            np.asarray(x, v.aval.dtype) if isinstance(x, bool | int | float | complex) else x
            for x, v in zip(args, step.eqn.invars, strict=True)
        ]
        if not any(is_number(v.aval) for v in (*step.eqn.invars, *step.eqn.outvars)):
            return bind_primitive(step.eqn.params, args)
        if not step.inner and step.kind not in ("draw", "own", "result") and step.draw is None:
            with jax.enable_x64(True):
                float64_args = [self.as_reference(x) for x in args]
                try:
                    params = {name: _wide_dtype(value) for name, value in step.eqn.params.items()}
                    out = [self.as_reference(x) for x in bind_primitive(params, float64_args)]
                except Exception:  # any error of a primitive without a float64 form
                    self.narrow |= {step.name}
        elif step.inner:
            self.narrow |= {step.name}
        if out is None:
            carrier_args = [
                jnp.asarray(x, v.aval.dtype) if isinstance(x, np.ndarray) and is_number(v.aval) else x
                for x, v in zip(args, step.eqn.invars, strict=True)
            ]
            return [self.as_reference(x) for x in bind_primitive(step.eqn.params, carrier_args)]
        if not rounds or self.spec is None or step.kind in _MOVE_KINDS:
            return out
        return [round_to_format(x, self.spec) if isinstance(x, np.ndarray) else x for x in out]

    def select(self, active: Any, new: Any, old: Any) -> Any:
        """The new values of the loops of a batch that still run, and the old values of others."""
        if not isinstance(new, np.ndarray):
            return where_active(active, new, old)
        active = np.asarray(active)
        return np.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)


#: The kinds of equations that only move values.
_MOVE_KINDS = ("structural", "extremum", "compared")


def _wide_dtype(value: Any) -> Any:
    if not isinstance(value, np.dtype) and not (isinstance(value, type) and issubclass(value, np.generic)):
        return value
    wide = {**dict.fromkeys(CARRIER_DTYPES, np.dtype(np.float64)), "complex64": np.dtype(np.complex128)}
    return wide.get(np.dtype(value).name, value)


def make_reference(reference: SpecLike | None) -> CarrierReference:
    """The reference of a report.

    Raises:
        ValueError: for a spec that draws.
    """
    if reference is None:
        return CarrierReference()
    spec = as_spec(reference, "reference")
    if spec.rounding.stochastic:
        raise ValueError(f"reference={str(spec)!r} rounds stochastically; a reference must be deterministic")
    return Float64Reference(spec)


#: A value of the emulated program, and the reference's value for it.
ValuePair = tuple[Any, Any]
LaneSeeds = Sequence[Seeds | None]
#: A step, the number of its runs, and its line of source.
SourcedStep = tuple[EmulatedStep, int, str]
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
class PairedRun(LaneRunner):
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

    reference: CarrierReference
    max_turns: int
    stop_at: str | None = None
    measures: dict[int, Measure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    entries: list[tuple[str, bool, int, Measure]] = field(default_factory=list)
    literal_steps: dict[int, EmulatedStep] = field(default_factory=dict)
    order: int = 0

    def __post_init__(self) -> None:
        self.runner = EagerRunner(self.max_turns)

    def constant(self, value: Any) -> ValuePair:
        """A constant or a literal."""
        wide = self.reference.as_reference(value)
        return broadcast_to_shards(value, self.axes), broadcast_to_shards(wide, self.axes)

    def whole(
        self, program: EmulatedProgram, spec: Spec | None, entry: ProgramEntry, names: Sequence[str]
    ) -> list[ValuePair]:
        """The results of a program, given its arguments and constants as `spec` rounds them on entry, and its seeds."""
        values, constants, seeds = entry
        every = (*program.values, *program.plan.consts)
        names = (*names, *("constant" for _ in constants))
        for name, x, whole, rounds in zip(names, (*values, *constants), every, program.rounds, strict=True):
            if rounds or (hasattr(x, "dtype") and is_number(x)):
                measure = self._measure(x, whole, whole, [whole], elementwise=True, spec=spec if rounds else None)
                self.entries.append((name, rounds, int(np.size(x)), measure))
                self._check_stop(None, measure, x, [whole], f"{name}, {{given}}, is {{result}}")
                self.order += 1
        references = (self.reference.as_reference(copy_if_reference(as_jax_value(x))) for x in every)
        pairs = list(zip((*values, *constants), references, strict=True))
        return interpret(self, program.plan, [seeds], pairs[: len(values)], pairs[len(values) :])

    def _measure(self, *values: Any, **facts: Any) -> Measure:
        return measure_results(*values, turn=self.turn, order=self.order, **facts)

    def control(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The results of an equation that holds programs, run step by step."""
        self._look_at_literals(step, seeds, args)
        return super().control(step, seeds, args)

    def run(self, part: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The results of one equation."""
        self._look_at_literals(part, seeds, args)
        low, wide = ([pair[i] for pair in args] for i in (0, 1))
        step = lanes.with_vmap_collective(part, self.axes)
        run = self.runner.control if step.kind == "control" else self.runner.run
        results = map_shards(self.axes, partial(run, step), seeds[0], low)
        alike = args and step.kind in SILENT_KINDS and not any(step.rounds) and all(x is y for x, y in args)
        alike = alike and not any(is_reference(v.aval) for v in step.eqn.outvars)  # each program writes to its own
        reference = results if alike else self.reference.bind(step, wide, self.axes)
        if step.kind not in ("control", "untouched", "compared", "own"):
            self._look(step, low, results, reference)
        self.order += 1
        return list(zip(results, reference, strict=True))

    def _look(self, step: EmulatedStep, low: list[Any], results: list[Any], reference: list[Any]) -> None:
        """Adds the errors of a step's results to the measures, and raises StopEventError at the event `stop_at`."""
        silent = step.kind in SILENT_KINDS
        same = results if silent else self.reference.bind(step, low, self.axes, rounds=False)
        numbers = [(x, v) for x, v in zip(low, step.eqn.invars, strict=True) if is_number(v.aval)]
        ndim = len(self.axes) + max((len(v.aval.shape) for _, v in numbers), default=0)
        operands = [lanes.align_shard_axes(x, ndim) if self.axes and not v.aval.shape else x for x, v in numbers]
        from_program = [not isinstance(v, Literal) for _, v in numbers]
        for v, spec, result, exact, wide in zip(step.eqn.outvars, step.out, results, same, reference, strict=True):
            if not is_number(v.aval):
                continue
            facts = {"elementwise": step.kind in ELEMENTWISE_KINDS, "spec": None if silent else spec_of_fact(spec)}
            digits = _sum_precision(step, v.aval)
            measure = self._measure(result, exact, wide, operands, from_program, digits=digits, **facts)
            if silent and not measure.new_nonfinite:
                continue
            self.measures.setdefault(id(step), Measure()).add(measure)
            self._check_stop(step, measure, result, operands, f"{step.name} of {{given}} is {{result}}")

    def _look_at_literals(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> None:
        """Counts the literals that overflow or become zero, and the literals of calls and loops that are not finite."""
        first = id(step) not in self.literal_steps
        for i, low, measure in self.literals_out_of_range(step, seeds, args):
            own = self.literal_steps.setdefault(id(step), replace(step, kind="constant"))
            if first:  # a literal of a loop is one constant
                self.measures.setdefault(id(own), Measure()).add(measure)
            self._check_stop(step, measure, low, [args[i][0]], "constant, {given}, is {result}")
        for v in step.eqn.invars if step.kind == "control" else ():
            if isinstance(v, Literal) and is_number(v.aval) and not np.all(np.isfinite(v.val)):
                measure = self._measure(v.val, v.val, v.val, [])
                self.measures.setdefault(id(step), Measure()).add(measure)

    def literals_out_of_range(
        self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]
    ) -> Iterator[tuple[int, Any, Measure]]:
        """The literals whose rounding overflows or gives zero: the place, the rounded value and its measure."""
        places = [i for i, v in enumerate(step.eqn.invars) if step.rounds[i] and isinstance(v, Literal)]
        low = self.emulated_operands(step, seeds, args) if places else []
        for i in places:
            whole, spec = args[i][0], step.choice.spec
            measure = self._measure(low[i], whole, whole, [whole], elementwise=True, spec=spec)
            if measure.overflows or measure.underflows:
                yield i, low[i], measure

    def with_literal_steps(self, steps: Iterable[SourcedStep]) -> Iterator[SourcedStep]:
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
                result, here = np.asarray(result), []
                for x in map(np.asarray, operands):
                    other = f"an array of shape {x.shape}" if x.shape else x  # one of another shape than the result
                    here.append(str(x[event.where] if x.shape == result.shape else other))
                facts = text.format(given=", ".join(here), result=result[event.where])
                raise StopEventError(what, step, event, facts, measure)

    # -- pairs made of pairs -------------------------------------------------------------------------------------------

    def rounded_operands(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The operands of an equation that holds programs; the operands that the plan marks are rounded."""
        low = self.emulated_operands(step, seeds, args)
        return [(x, pair[1]) for x, pair in zip(low, args, strict=True)]

    def emulated_operands(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[Any]:
        """The emulated values of operands; the operands that the plan marks are rounded."""
        return map_shards(self.axes, partial(round_operands, step), seeds[0], [pair[0] for pair in args])

    def map_lanes(self, move: Callable[[Any], Any], value: ValuePair) -> ValuePair:
        """The pair with its numbers in another place."""
        return move(value[0]), move(value[1])

    def stack(self, rows: list[ValuePair], aval: Any) -> ValuePair:
        """The results of the turns of a scan along a first axis."""
        low, wide = (lanes.stack_turns([row[side] for row in rows], aval, self.axes) for side in (0, 1))
        return low, self.reference.as_reference(wide)

    def choose(self, active: Mapping[int, Any], new: ValuePair, old: ValuePair) -> ValuePair:
        """The new values where loops of a batch still run, and old ones elsewhere; the emulated program decides."""
        return where_active(active[0], new[0], old[0]), self.reference.select(active[0], new[1], old[1])


def _sum_precision(step: EmulatedStep, aval: Any) -> int | None:
    """The precision of a sum or difference of two real numbers; None for anything else."""
    if EXACT.get(step.name, step.name) not in ("add", "sub") or is_complex_value(aval):
        return None
    fmt = None if step.choice.spec is None else step.choice.spec.format
    return fmt.precision if isinstance(fmt, FloatFormat) else int(jnp.finfo(aval.dtype).nmant) + 1


# -- places ------------------------------------------------------------------------------------------------------------


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
    """The spec of a step; "carrier" if it is not rounded, "wide" if neither it nor its consumers round it."""
    in_carrier = step.choice.spec is None or step.kind == "carrier"
    return "wide" if step.choice.wide else "carrier" if in_carrier else str(step.choice.spec)


def walk_sources(plan: ProgramPlan, outer: str) -> Iterator[SourcedStep]:
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
