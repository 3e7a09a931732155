"""`EmulatedFunction.report`: the roundings of a program, their places and counts, and their effect on the values."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from types import MethodType
from typing import Any, Literal

import numpy as np
from jax import Array

from jchop._common.checks import check_bool, check_choice, check_instance, check_int
from jchop._common.text import PictureReport, TableOrLine, plain_data
from jchop._emulate.emulate import EmulatedFunction, round_on_entry, seeds_of_call
from jchop._emulate.paired import (
    MOST_REPORT_TURNS,
    SILENT_KINDS,
    Event,
    Measure,
    PairedRun,
    SourcedStep,
    StopEventError,
    argument_names,
    first_line_of,
    make_reference,
    step_label,
    step_spec_text,
    text_of_event,
    walk_sources,
)
from jchop._emulate.rules.rules import EVENTS, is_number
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._emulate.rules.trace import trace_program
from jchop._program.step import user_line
from jchop._round.arguments import has_tracer
from jchop._spec.spec import SpecLike


class PlacedRow:
    """A row with a line of source."""

    source: str

    @property
    def place(self) -> str:
        """The source without its folders: ``"model.py:12"``."""
        return os.path.basename(self.source)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name. A number that is not finite is None, an event a dict of its fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return plain_data({name: vars(value) if isinstance(value, Event) else value for name, value in values.items()})


def emulated_call(name: str, fun: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[EmulatedFunction, tuple[Any, ...]]:
    """An emulated function and its arguments; the arguments of a method begin with its object."""
    fun, args = unbind_method(fun, args)
    check_instance(name, fun, EmulatedFunction, "a function that jchop.emulate returned")
    if not args and not kwargs:
        with contextlib.suppress(ValueError):  # of a function without a signature
            needed = [p.name for p in inspect.signature(fun.fun).parameters.values() if p.default is p.empty]
            if needed:
                arguments = ", ".join(needed)
                raise TypeError(
                    f"the function takes {arguments}; write low.report({arguments}), as low.blame({arguments})"
                )
    return fun, args


def unbind_method(fun: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """An emulated method as a function of its object; any other function as it is."""
    is_method = isinstance(fun, MethodType) and isinstance(fun.__func__, EmulatedFunction)
    return (fun.__func__, (fun.__self__, *args)) if is_method else (fun, args)


def refuse_tracers(what: str, arguments: Any) -> None:
    """Refuses arguments without numbers.

    Raises:
        TypeError: if an argument is traced.
    """
    if has_tracer(arguments):
        raise TypeError(f"{what} needs arguments that are not traced: call it outside of jax.jit")


@dataclass(frozen=True)
class ReportRow(PlacedRow):
    """The equations of one primitive, scope, arithmetic and line of source.

    Args:
        scope: the path of `jax.named_scope` and `jax.jit` names; empty outside of all.
        primitive: its name; ``"jchop"`` for a function of jchop, the function's name for `jax.random`.
        spec: the rounding of the results, as text; ``"carrier"`` if they are not rounded.
        sums: the order and the roundings of sums, as text; ``"carrier"`` for the carrier's own sums; empty without
            sums.
        equations: their number in the program.
        results: the count of their results in a run; for a `while` loop, in one turn.
        source: file and line of the equations, as ``"folder/model.py:12"``: the innermost line outside of JAX and
            jchop. For a function of JAX, the line of its call.
        overflows: results that are finite without rounding, and infinite or NaN here. Also ones that saturate or wrap:
            beyond the largest or the lowest value of the format by more than half its step there. This and the next
            fields are set only with ``trace_values=True``.
        underflows: results that are not zero without rounding, and zero here.
        infinities: infinite results, for any reason.
        nans: NaN results, for any reason.
        smallest: the smallest nonzero magnitude.
        largest: the largest finite magnitude.
        error: the largest relative error of one operation, against the reference's operation on the same operands. This
            and ``deviation`` count results that are finite in both. NaN if there are none.
        deviation: the largest relative error against the reference program, run from the start.
        invalid: NaN results of operands without NaN: inf - inf, 0/0, sqrt(-1). Results of an operation that is not
            elementwise, as a sum, count if no operand has a NaN anywhere.
        cancelled: the most leading bits that cancelled in a sum or difference of two numbers. It is the larger exponent
            of the operands minus the exponent of the result. For a result of zero it is the precision of the format.
            NaN for other operations.
        cancelled_mean: the mean of the cancelled bits.
        first_overflow: the place of the first overflow, an `Event`; None if there is none.
        first_nan: the place of the first NaN.
        first_invalid: the place of the first invalid result.
    """

    scope: str
    primitive: str
    spec: str
    sums: str
    equations: int
    results: int
    source: str = ""
    overflows: int = 0
    underflows: int = 0
    infinities: int = 0
    nans: int = 0
    smallest: float = math.nan
    largest: float = math.nan
    error: float = math.nan
    deviation: float = math.nan
    invalid: int = 0
    cancelled: float = math.nan
    cancelled_mean: float = math.nan
    first_overflow: Event | None = None
    first_nan: Event | None = None
    first_invalid: Event | None = None


@dataclass(frozen=True)
class Report(PictureReport):
    """The result of `EmulatedFunction.report`; its ``str`` is a table, with the notes below.

    Args:
        rows: the rows, in program order.
        traced: whether values were measured.
        reference: the reference of the errors: ``"carrier"``, or a spec as text.
        stopped: the event that ended the run, with ``stop_at``; empty if there was none.
        notes: sentences about stopped loops, about operations left in the carrier, and about the reference.
    """

    rows: tuple[ReportRow, ...]
    traced: bool = field(default=False)
    reference: str = "carrier"
    stopped: str = ""
    notes: tuple[str, ...] = ()

    _picture, _title = "draw_report", "Where the digits go"
    _optional = ("cancelled_mean", "equations", "smallest", *(f"first_{event}" for event in EVENTS), "invalid",
        "infinities", "cancelled", "scope", "sums", "underflows", "results")  # fmt: skip

    @property
    def operations(self) -> int:
        """The number of results of all rows."""
        return sum(row.results for row in self.rows)

    def first(self, event: Literal["overflow", "nan", "invalid"]) -> ReportRow | None:
        """Returns the row of the first event of a kind; None if there is none.

        Args:
            event: ``"overflow"``, ``"nan"`` or ``"invalid"``.

        Raises:
            ValueError: for another event.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> low = jc.emulate(lambda x: jnp.log(jnp.exp(x)), "e4m3")
            >>> row = low.report(jnp.array([1.0, 8.0]), trace_values=True).first("overflow")
            >>> row.primitive, row.first_overflow.where
            ('exp', (1,))
        """
        name = f"first_{check_choice('event', event, EVENTS)}"
        rows = [row for row in self.rows if getattr(row, name) is not None]
        return min(rows, key=lambda row: getattr(row, name).order, default=None)

    def _parts(self) -> list[TableOrLine]:
        names = ("scope", "primitive", "spec", "sums", "equations", "results") + _MEASURE_COLUMNS * self.traced
        firsts = [f"first_{name}" for name in EVENTS]
        names += tuple(name for name in firsts if any(getattr(row, name) is not None for row in self.rows))
        lines = [
            (*names, "source"),
            *((*(_report_cell(getattr(row, n)) for n in names), row.place) for row in self.rows),
        ]
        return [lines, *self.notes, *filter(None, [self.stopped])]


#: Columns of a report with measured values.
_MEASURE_COLUMNS = ("overflows", "underflows", "infinities", "nans", "invalid", "smallest", "largest", "cancelled",
         "cancelled_mean", "error", "deviation")  # fmt: skip


def _report_cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(
    fun: Any,
    /,
    *args: Any,
    trace_values: bool = False,
    key: Array | None = None,
    reference: SpecLike | None = None,
    max_turns: int | None = None,
    stop_at: Literal["overflow", "nan", "invalid"] | None = None,
    **kwargs: Any,
) -> Report:
    """Lists the roundings of an emulated function for these arguments, and the operations that lose digits.

    Args:
        fun: a function that `jchop.emulate` returned, or a method that it decorates.
        *args: arguments of the function.
        trace_values: whether to run the program, loops turn by turn, beside a reference program. The run measures
            ranges, overflows, underflows, infinities, NaN, cancelled bits and errors of each operation, and the first
            events. Arguments and constants have rows only for overflows, infinities, NaN and underflows; moved values
            only for new infinities or NaN. The emulated program decides branches and numbers of turns. Inside
            `jax.shard_map` all shards run at once, and an index of an event begins with the shard's. Needs arguments
            that are not traced. Default False: nothing is computed.
        key: a typed key, needed if values are traced and a rounding is stochastic.
        reference: the reference of the errors. Default None: the same program in the carrier, without rounding. Under a
            deterministic spec or its text, every operation is computed in float64 and rounded to that spec;
            ``"binary64"`` is float64 itself. Arguments and constants are not rounded. If a primitive has no form in
            float64, the carrier's result is used, and a note says so. Implies `trace_values`.
        max_turns: the most turns of a `while` loop. Default None: the limit of `emulate`, or 10 000, which a note
            states. A stopped loop has a note and a `RuntimeWarning` with the line of its condition and the numbers
            compared. A loop without random draws stops at once if its values no longer change.
        stop_at: the event that ends the run, like ``jax_debug_nans`` for NaN of the carrier. ``"overflow"`` is the
            first result that is finite in the reference, but not in the format, or that saturates or wraps there.
            ``"nan"`` is the first NaN, and ``"invalid"`` the first NaN of operands without NaN. ``stopped`` of the
            report names the equation, its line, turn, operands and result. Rows hold the measures up to this event.
            Implies `trace_values`.
        **kwargs: keyword arguments of the function.

    Returns:
        A `Report`; its ``str`` is a table.

    Raises:
        TypeError: for a function that `emulate` did not make, or traced arguments.
        ValueError: for a reference that draws, ``max_turns`` below 1, or another event.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: jnp.exp(x) * x, "e4m3")
        >>> print(low.report(jnp.array([1.0, 8.0])))
        scope  primitive  spec         sums  equations  results  source
               exp        float8_e4m3        1          2        ...:1
               mul        float8_e4m3        1          2        ...:1
        >>> seen = low.report(jnp.array([1.0, 8.0]), trace_values=True)
        >>> [(row.primitive, row.overflows, row.infinities, row.largest) for row in seen.rows]
        [('exp', 1, 1, 2.75), ('mul', 0, 1, 2.75)]
        >>> str(seen.rows[0].first_overflow)
        '[1]'
    """
    fun, args = emulated_call("fun", fun, args, kwargs)
    trace_values = check_bool("trace_values", trace_values) or reference is not None or stop_at is not None
    if stop_at is not None:
        check_choice("stop_at", stop_at, EVENTS)
    limit = max_turns if max_turns is not None else fun.settings.max_turns or MOST_REPORT_TURNS
    paired_run = PairedRun(make_reference(reference), check_int("max_turns", limit, 1, (1 << 32) - 1), stop_at)
    # Traced again, because an equal program may have other lines.
    program, call_line = trace_program(fun.fun, fun.settings, args, kwargs), user_line()
    home = first_line_of(fun.fun, call_line)
    steps = list(walk_sources(program.plan, call_line))
    if not trace_values:
        return Report(tuple(_report_rows(steps, {})), notes=tuple(_carrier_notes(steps)))
    refuse_tracers("trace_values=True", program.values)
    stop_text, spec = "", fun.settings.spec
    seeds = seeds_of_call(fun, key, args, kwargs)
    try:
        paired_run.whole(program, spec, round_on_entry(program, spec, seeds), argument_names(args, kwargs))
    except StopEventError as stop:
        stop_text = text_of_event(stop, program.plan, call_line, home)
    for note in dict.fromkeys(paired_run.notes):
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    notes = (*dict.fromkeys(paired_run.notes), *_report_notes(steps, paired_run), *_carrier_notes(steps))
    entry_rows = [
        ReportRow("", name, str(spec) if rounds else "carrier", "", 1, size, home, **measure.facts())
        for name, rounds, size, measure in paired_run.entries
        if measure.overflows or measure.infinities or measure.nans or measure.underflows
    ]
    rows = (*entry_rows, *_report_rows(paired_run.with_literal_steps(steps), paired_run.measures))
    return Report(rows, True, paired_run.reference.text, stop_text, notes)


def _report_notes(steps: Sequence[SourcedStep], paired_run: PairedRun) -> Iterator[str]:
    if any(step.name == "while" for step, _, _ in steps):
        yield f"while loops make at most {paired_run.max_turns} turns in this report (max_turns)"
    if paired_run.reference.narrow:
        yield f"the reference is the carrier's for: {', '.join(sorted(paired_run.reference.narrow))}"


def _carrier_notes(steps: Sequence[SourcedStep]) -> Iterator[str]:
    """A sentence about the operations that rules and `unknown` leave in the carrier."""
    unrounded = [step for step, _, _ in steps if step.kind not in SILENT_KINDS and step_spec_text(step) == "carrier"]
    if unrounded:
        counts = Counter(map(step_label, unrounded))
        yield f"left in the carrier: {', '.join(f'{name} ({n})' for name, n in counts.items())}"


def _report_rows(steps: Iterable[SourcedStep], measures: dict[int, Measure]) -> Iterator[ReportRow]:
    groups: dict[tuple[str, str, str, str, str], list[tuple[EmulatedStep, int]]] = {}
    for step, times, source in steps:
        if step.kind in SILENT_KINDS and id(step) not in measures:
            continue
        choice = step.choice
        sums = str(choice.accumulate or "carrier") if step.kind == "accumulating" else ""
        groups.setdefault((step.scope, step_label(step), step_spec_text(step), sums, source), []).append((step, times))
    for (scope, name, spec, sums, source), members in groups.items():
        results = sum(_result_size(step) * times for step, times in members)
        measure = Measure()
        for step, _ in members:
            measure.add(measures.get(id(step)))
        yield ReportRow(scope, name, spec, sums, len(members), results, source, **measure.facts())


def _result_size(step: EmulatedStep) -> int:
    if step.kind == "constant":
        return 1
    return sum(int(np.prod(v.aval.shape)) for v in step.eqn.outvars if is_number(v.aval))
