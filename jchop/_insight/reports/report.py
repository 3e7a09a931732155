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

from jchop._common.checks import check, check_bool, check_choice, check_instance, check_int
from jchop._common.text import PictureReport, RowReport, TableOrLine, plain_data
from jchop._emulate.emulate import EmulatedFunction, round_on_entry, seeds_of_call
from jchop._emulate.paired import (
    MOST_REPORT_TURNS,
    SILENT_KINDS,
    CarrierReference,
    Event,
    Measure,
    PairedRun,
    SourcedStep,
    StopEventError,
    argument_names,
    as_double_precision,
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
from jchop._program.step import text_of_line, user_line
from jchop._quantized.program.call import batch_arguments, check_batches
from jchop._round.arguments import has_tracer
from jchop._spec.spec import Spec, SpecLike
from jchop.formats import FloatFormat


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


# == programs by line of source: `EmulatedFunction.ranges`, and two arithmetics side by side ===========================


# -- ranges ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RangesRow(PlacedRow):
    """The numbers of a line of source, or of an argument, in one arithmetic: results before they are rounded.

    Args:
        text: the text of the line; the name of an argument.
        spec: the rounding, as text.
        numbers: the count of results, of all batches.
        zeros: share of results that are zero before the rounding.
        subnormals: share of results that are subnormal in the format.
        underflows: share of results that the rounding makes zero.
        overflows: share of results beyond the format, as in `jchop.EmulatedFunction.report`.
        smallest: the smallest magnitude but zero; NaN without any. This and the next are of finite results.
        largest: the largest magnitude.
        cancelled: the most leading bits that cancelled in a sum or difference of two numbers; NaN without any.
        cancelled_mean: their mean.
        exponent_bits: the fewest exponent bits for which all results are normal numbers of a format with infinities.
        bias: the bias of this format, with which the largest result does not overflow.
        scale: the power of two by which results can be multiplied without overflow in the format of the row; below 0
            if they overflow. None for a format without exponent.
        backward: whether the line was differentiated in reverse mode, and these are derivatives.
        exponents: the count of results for each exponent ⌊log2 |x|⌋, as pairs.
        limits: the smallest and the largest exponent of the normal numbers of the format; empty without exponent.
    """

    text: str
    spec: str
    numbers: int
    zeros: float
    subnormals: float
    underflows: float
    overflows: float
    smallest: float
    largest: float
    cancelled: float
    cancelled_mean: float
    exponent_bits: int
    bias: int
    scale: int | None
    backward: bool
    exponents: tuple[tuple[int, int], ...]
    limits: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class Ranges(PictureReport):
    """The result of `jchop.EmulatedFunction.ranges`; its ``str`` is a table.

    Args:
        rows: the rows, in program order.
        loss_scale: the exponent of the largest power of two by which a loss can be multiplied so that no derivative
            overflows, nor this power itself; None without derivatives.
        notes: sentences about stopped loops, and about the scale of the loss.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> seen = jc.emulate(lambda x: x * x, "e4m3").ranges([jnp.array([0.001, 3.0, 100.0])])
        >>> [(row.underflows, row.overflows, row.exponent_bits, row.scale) for row in seen.rows[1:]]
        [(0.3333333333333333, 0.3333333333333333, 6, -6)]
    """

    rows: tuple[RangesRow, ...]
    loss_scale: int | None = None
    notes: tuple[str, ...] = ()

    _picture, _title = "draw_ranges", "Exponents of the results"
    _align, _optional = "<<" + ">" * 10 + "<", ("cancelled", "numbers", "spec")

    def _parts(self) -> Iterator[TableOrLine]:
        head = ("line", "spec", "numbers", "zero", "subnormal", "to zero", "overflow", "exponents", "cancelled", "bits")
        yield [(*head, "bias", "scale", "source"), *map(_ranges_cells, self.rows)]
        yield from self.notes


def _ranges_cells(row: RangesRow) -> tuple[str, ...]:
    exponents = f"{row.exponents[0][0]}..{row.exponents[-1][0]}" if row.exponents else "-"
    shares = (_share(x) for x in (row.zeros, row.subnormals, row.underflows, row.overflows))
    bits = "-" if math.isnan(row.cancelled) else f"{row.cancelled:.0f}"
    scale = "-" if row.scale is None else f"2^{row.scale}"
    text = f"∂ {row.text}" if row.backward else row.text
    own = exponents, bits, str(row.exponent_bits), str(row.bias), scale, row.place
    return text, row.spec, str(row.numbers), *shares, *own


def _share(part: float) -> str:
    return "-" if not part else f"{part:.1%}" if part >= 5e-4 else f"{part:.0e}"


class _RangesRun(PairedRun):
    """A run that also counts exponents."""

    def _measure(self, low: Any, same: Any, reference: Any, operands: Any, *more: Any, **facts: Any) -> Measure:
        measure = super()._measure(low, same, reference, operands, *more, **facts)
        exact, spec = as_double_precision(same), facts.get("spec")
        parts = [np.real(exact), np.imag(exact)] if np.iscomplexobj(exact) else [exact]
        x = np.abs(np.concatenate([np.ravel(part) for part in parts]))
        finite = x[np.isfinite(x) & (x != 0)]
        found = zip(*np.unique(np.frexp(finite)[1] - 1, return_counts=True), strict=True)
        measure.exponents = Counter({int(k): int(n) for k, n in found})
        measure.numbers, measure.zeros = x.size, int((x == 0).sum())
        measure.smallest, measure.largest = finite.min(initial=math.inf), finite.max(initial=-math.inf)
        if spec is not None and isinstance(spec.format, FloatFormat):
            rounded = np.abs(np.stack([np.real(low), np.imag(low)]) if len(parts) > 1 else as_double_precision(low))
            measure.subnormals = int(((rounded != 0) & (rounded < float(spec.format.smallest_normal))).sum())
        return measure


def ranges(low: Any, batches: Iterable[Any], /, *, key: Array | None = None, max_turns: int | None = None) -> Ranges:
    """Counts the exponents of the results of each line over many inputs, and says which format holds them.

    The program runs operation by operation, as in `jchop.EmulatedFunction.report`. Exponents are those of each
    operation's result in the carrier, of the emulated operands. Only operations that round are counted.

    Args:
        low: a function from `jchop.emulate`.
        batches: tuples of its arguments, or the only argument of each call.
        key: a typed key, needed if a rounding is stochastic; all batches draw the same bits.
        max_turns: the most turns of a `while` loop, 10 000 if neither this nor the limit of `emulate` is set.

    Returns:
        A `Ranges`; its ``str`` is a table, ``columns()`` its columns, ``plot()`` a picture of the exponents.

    Raises:
        TypeError: for a function that `emulate` did not make, or traced arguments.
        ValueError: without a batch.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2) * 1e-6), "e5m2")
        >>> seen = low.ranges([jnp.array([0.5, 1.0]), jnp.array([2.0, 3.0])])
        >>> seen.loss_scale
        15
    """
    check_batches(batches, repeated=False)
    every = list(map(batch_arguments, batches))
    check(every, "batches=[] must have at least one")
    refuse_tracers("ranges", every)
    call, groups, notes = user_line(), dict[tuple[str, str, str, bool], Measure](), list[str]()
    formats: dict[str, Spec | None] = {}
    for batch in every:
        fun, args = emulated_call("low", low, batch, {})
        limit = max_turns if max_turns is not None else fun.settings.max_turns or MOST_REPORT_TURNS
        run = _RangesRun(CarrierReference(), check_int("max_turns", limit, 1, (1 << 32) - 1))
        program, spec = trace_program(fun.fun, fun.settings, args, {}), fun.settings.spec
        entry = round_on_entry(program, spec, seeds_of_call(fun, key, args, {}))
        run.whole(program, spec, entry, argument_names(args, {}))
        home = first_line_of(fun.fun, call)
        for name, rounds, _, measure in run.entries:
            if rounds:
                formats[str(spec)] = spec
                groups.setdefault((home, name, str(spec), False), Measure()).add(measure)
        backward = {
            id(step)
            for step, around in program.plan.walk_within()
            if any("transpose(" in str(one.eqn.source_info.name_stack) for one in (*around, step))
        }
        for step, _, source in walk_sources(program.plan, call):
            text = step_spec_text(step)
            if id(step) in run.measures and step.kind not in SILENT_KINDS:
                formats[text] = step.choice.spec
                line = text_of_line(source) or step_label(step)
                groups.setdefault((source, line, text, id(step) in backward), Measure()).add(run.measures[id(step)])
        notes += run.notes
    for note in dict.fromkeys(notes):
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    rows = tuple(_ranges_row(*place, measure, formats[place[2]]) for place, measure in groups.items())
    derivatives = [(row.scale, row.limits) for row in rows if row.backward and row.scale is not None]
    # The derivative of the loss by itself is 1, where the first of them reads it.
    scale = min(*(own for own, _ in derivatives), derivatives[0][1][1]) if derivatives else None
    return Ranges(rows, scale, (*dict.fromkeys(notes), *_loss_notes(rows, scale)))


def _ranges_row(source: str, text: str, name: str, backward: bool, measure: Measure, spec: Spec | None) -> RangesRow:
    fmt = spec.format if spec is not None and isinstance(spec.format, FloatFormat) else None
    exponents = tuple(sorted(measure.exponents.items()))
    least, top = (exponents[0][0], exponents[-1][0]) if exponents else (0, 0)
    fraction = fmt.frac_bits if fmt else 23
    # A number above the last one of its exponent may be rounded up to the next.
    if exponents and measure.largest > math.ldexp(2 - math.ldexp(1, -fraction), top):
        top += 1
    bits = max(2, math.ceil(math.log2(top - least + 3)))
    counts = {"zeros": measure.zeros, "subnormals": measure.subnormals, "underflows": measure.underflows}
    shares = {key: n / max(measure.numbers, 1) for key, n in (counts | {"overflows": measure.overflows}).items()}
    facts = {key: measure.facts()[key] for key in ("smallest", "largest", "cancelled", "cancelled_mean")}
    scale = _scale_to_limit(measure.largest, fmt) if fmt and exponents else None
    limits = (fmt.emin, fmt.emax) if fmt else ()
    format_facts = {"exponent_bits": bits, "bias": (1 << bits) - 2 - top, "scale": scale, "limits": limits}
    fields: dict[str, Any] = {**shares, **facts, **format_facts, "exponents": exponents}
    return RangesRow(text, name, measure.numbers, backward=backward, source=source, **fields)


def _scale_to_limit(largest: float, fmt: FloatFormat) -> int:
    """The largest k with largest · 2^k within the format."""
    (limit, top), (part, exponent) = math.frexp(float(fmt.max)), math.frexp(largest)
    return top - exponent - (part > limit)


def _loss_notes(rows: Sequence[RangesRow], scale: int | None) -> Iterator[str]:
    """What a scale of the loss does for derivatives."""
    if scale is None:
        return
    lost = [0, 0]
    for row in rows:
        if row.backward and row.limits:
            for i, shift in enumerate((0, scale)):
                lost[i] += sum(n for exponent, n in row.exponents if exponent + shift < row.limits[0])
    count = max(sum(n for row in rows if row.backward for _, n in row.exponents), 1)
    now, then = (_share(n / count) if n else "none" for n in lost)
    yield f"derivatives: {now} below the normal numbers; a loss times 2^{scale} leaves {then}, and none overflows"


# -- two arithmetics ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinesRow(PlacedRow):
    """A line of source in two arithmetics; each field but the line has a value for each.

    Args:
        text: the text of the line.
        specs: the roundings of its results, as text.
        errors: the largest relative error of one operation of the line.
        deviations: the largest relative error against the program in the carrier.
        losses: results that overflow, become zero or are NaN.
        source: file and line.
    """

    text: str
    specs: tuple[str, str]
    errors: tuple[float, float]
    deviations: tuple[float, float]
    losses: tuple[int, int]
    source: str = ""


@dataclass(frozen=True)
class LinesComparison(RowReport):
    """The result of `jchop.compare` for two emulated functions; its ``str`` is a table.

    Args:
        rows: the lines, in the order of the first program, then those of the second alone.
        notes: sentences about stopped loops, and about operations left in the carrier, of either program.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> one, two = (jc.emulate(lambda x: jnp.exp(x), spec) for spec in ("e4m3", "e5m2"))
        >>> jc.compare(one, two, jnp.array([1.0, 8.0])).rows[0].losses
        (1, 0)
    """

    rows: tuple[LinesRow, ...]
    notes: tuple[str, ...] = ()

    _align, _optional = "<<<>>>>>><", ("spec a", "spec b", "lost a", "lost b")

    def _parts(self) -> Iterator[TableOrLine]:
        names = ("spec", "error", "deviation", "lost")
        head = ("line", *(f"{name} {side}" for name in names for side in "ab"), "source")
        rows = [
            (row.text, *row.specs, *map(_digits, (*row.errors, *row.deviations)), *map(str, row.losses), row.place)
            for row in self.rows
        ]
        yield [head, *rows]
        yield from self.notes


def _digits(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def compare_lines(low_a: Any, low_b: Any, args: tuple[Any, ...], key: Array | None) -> LinesComparison:
    """The lines of two emulated functions of the same arguments."""
    lows = [emulated_call(name, low, args, {}) for name, low in (("x", low_a), ("formats", low_b))]
    reports = [report(low, *args, trace_values=True, key=key) for low, args in lows]
    by_line: dict[str, list[list[Any]]] = {}
    for side, seen in enumerate(reports):
        for row in seen.rows:
            by_line.setdefault(row.source, [[], []])[side].append(row)
    rows = []
    for source, sides in by_line.items():
        specs = [" ".join(dict.fromkeys(row.spec for row in side)) for side in sides]
        largest = [
            [max((x for row in side if not math.isnan(x := getattr(row, name))), default=math.nan) for side in sides]
            for name in ("error", "deviation")
        ]
        losses = [sum(row.overflows + row.underflows + row.nans for row in side) for side in sides]
        text = text_of_line(source) or (sides[0] or sides[1])[0].primitive
        rows.append(LinesRow(text, *map(tuple, (specs, *largest, losses)), source))  # type: ignore[arg-type]
    notes = [f"{side}: {note}" for side, seen in zip("ab", reports, strict=True) for note in seen.notes]
    return LinesComparison(tuple(rows), tuple(notes))
