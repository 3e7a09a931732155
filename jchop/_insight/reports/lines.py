"""Programs by line of source: `EmulatedFunction.ranges`, and two arithmetics side by side."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array

from jchop._common.checks import check, check_int
from jchop._common.text import PictureReport, RowReport, TableOrLine
from jchop._emulate.emulate import round_on_entry, seeds_of_call
from jchop._emulate.paired import (
    MOST_REPORT_TURNS,
    SILENT_KINDS,
    CarrierReference,
    Measure,
    PairedRun,
    argument_names,
    as_double_precision,
    first_line_of,
    step_label,
    step_spec_text,
    walk_sources,
)
from jchop._emulate.rules.trace import trace_program
from jchop._insight.reports.report import PlacedRow, emulated_call, refuse_tracers, report
from jchop._program.step import text_of_line, user_line
from jchop._quantized.program.call import batch_arguments, check_batches
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat

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
