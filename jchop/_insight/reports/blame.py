"""`EmulatedFunction.blame`: the part of each operation in the error of an emulated program."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.checks import check, check_instance, check_int
from jchop._common.text import PictureReport, TableOrLine
from jchop._emulate import paired
from jchop._emulate.emulate import round_on_entry, seeds_of_call
from jchop._emulate.paired import SourcedStep, ValuePair, argument_names, as_double_precision
from jchop._emulate.rules.rules import is_number
from jchop._emulate.rules.trace import EmulatedProgram, ProgramEntry, trace_program
from jchop._insight.reports.gains import (
    MOST_TURNS,
    Part,
    RowKey,
    WideRuns,
    limit_of_turns,
    parts_of,
    percents,
    run_limited,
    steps_by_source,
)
from jchop._insight.reports.report import PlacedRow, emulated_call, refuse_tracers
from jchop._insight.reports.tape import ErrorShare, Tape
from jchop._program.control import as_jax_value
from jchop._program.run import interpret, is_foreign_primitive
from jchop._program.step import user_line

#: A rest of more than the first part of the error is named. One of less than the second part of the largest
#: contribution is small beside it.
_NAMED_REST, _SMALL_REST = 0.2, 0.01


@dataclass(frozen=True)
class BlameRow(PlacedRow):
    """The equations of one primitive, scope, arithmetic and line of source, or an argument.

    Args:
        scope: the path of `jax.named_scope` and `jax.jit` names; empty outside of all.
        primitive: its name. ``"argument [0]['w']"`` is an argument that is rounded on entry. ``"constant"`` is a
            constant that is rounded on entry. It is rounded where it is moved or enters a call, branch or loop, or
            where it overflows or becomes zero. Another constant of an operation belongs to the operation.
        spec: the rounding of the results, as text.
        equations: their number in the program.
        results: the count of results, in all turns of loops.
        rms: the root mean square of its rounding errors, in units of the results.
        contribution: their part in the error of the output, with its sign, in units of the output.
        share: the contribution over the error of the output; NaN if that is zero.
        source: file and line, as in `jchop.EmulatedFunction.report`.
        turns: the contribution of each turn of the outermost loop; empty outside of loops.
        gain, projection: as in `jchop.EmulatedFunction.what_if`; NaN for a row that was not measured.
    """

    scope: str
    primitive: str
    spec: str
    equations: int
    results: int
    rms: float
    contribution: float
    share: float
    source: str = ""
    turns: tuple[float, ...] = ()
    gain: float = math.nan
    projection: float = math.nan

    def _cells(self) -> tuple[str, ...]:
        """The row of the table."""
        numbers = f"{self.rms:.2g}", f"{self.contribution:.4g}", *percents(self.share, self.gain, self.projection)
        return self.scope, self.primitive, self.spec, str(self.equations), *numbers, self.place


@dataclass(frozen=True)
class Blame(PictureReport):
    """The result of `jchop.EmulatedFunction.blame`; its ``str`` is a table.

    Args:
        rows: the rows, the largest gain first, then rows without one, the largest contribution first. Their
            contributions and ``unexplained`` add up to ``error``.
        error: the output of the emulated program minus the output of the program in the carrier.
        value: the output of the emulated program; NaN for arrays without ``output=``.
        reference: the output of the program in the carrier; NaN for arrays without ``output=``.
        unexplained: the part of the error that no row has.
        notes: sentences about stopped loops, about a path that the carrier alone would not go, and about an
            `unexplained` above 20 % of the error.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> found = jc.emulate(lambda x: jnp.sum(x / 3), "bfloat16").blame(jnp.array([1.0, 2.0]))
        >>> found.value, found.reference, sorted(found.columns()["primitive"])
        (1.0, 1.0, ['div', 'reduce_sum'])
    """

    rows: tuple[BlameRow, ...]
    error: float
    value: float
    reference: float
    unexplained: float
    notes: tuple[str, ...] = ()

    _align, _optional = "<<<>>>>>><", ("equations", "rms", "scope", "projection")
    _picture, _title = "draw_blame", "Where the error comes from"

    def _parts(self) -> Iterator[TableOrLine]:
        numbers = ("contribution", "share", "gain", "projection")
        head = ("scope", "primitive", "spec", "equations", "rms", *numbers, "source")
        yield [head, *(row._cells() for row in self.rows)]
        yield f"error {self.error:.4g}, of which no row explains {self.unexplained:.2g}"
        yield from self.notes


def blame(
    low: Callable[..., Any],
    /,
    *args: Any,
    output: Callable[[Any], Any] | None = None,
    key: Array | None = None,
    max_turns: int | None = None,
    gains: int | None = 5,
    **kwargs: Any,
) -> Blame:
    """Divides the error of an emulated program among its operations.

    The program runs beside the same program in the carrier. Equation i makes the rounding error δᵢ: its emulated result
    minus the carrier's result of the same operands. Its contribution is ⟨aᵢ, δᵢ⟩. The adjoint aᵢ is the derivative of
    the output by the result, computed from transposed derivatives of each equation. Each derivative is the mean of two,
    at the emulated operands and at the carrier's. For a function of numbers it is the secant, if the two operands are
    far apart or a derivative is infinite there. Where both operands are equal, an infinite derivative counts as 0, as
    it multiplies no error. If a maximum or a sort chooses another operand than the carrier's, the mean has weights that
    make it a secant.

    The contributions of a program of products, sums and these choices then add up to the error of the output.
    `unexplained` is the rest, from functions with curvature and from jumps. A bound as Σ|aᵢ||δᵢ| has no signs and is
    often a hundred times too large.

    Loops and branches follow the emulated program, and so do choices (`jnp.where`) within `while` loops. A row adds up
    all turns, and ``turns`` has each. Inside `jax.shard_map` all shards run at once, on one device, and a row adds up
    all shards. An equation that only moves values makes no error, but may round a constant. The values of all
    operations are kept in memory. The program runs operation by operation, outside of `jax.jit`.

    A contribution is an account, and no prediction: the operation after a large one may make the same rounding again.
    ``gain`` is a prediction. It is measured by `jchop.EmulatedFunction.what_if`, for the rows of the largest
    contributions.

    Args:
        low: a function from `jchop.emulate`.
        *args: its arguments.
        output: a function of the result of `low` to a number, which JAX can differentiate. Default: the result itself
            if it is a single number, else the Euclidean norm of the error of all its numbers.
        key: a typed key, needed if a rounding is stochastic.
        max_turns: the most turns of a `while` loop. The rows then describe a loop that stops there, with a note.
            Default None: the limit of `emulate`; if this is None too, a loop of more than 1 000 turns is an error.
        gains: the most rows whose gain is measured. None: all rows.
        **kwargs: keyword arguments of the function.

    Returns:
        A `Blame`; its ``str`` is a table, ``columns()`` its columns, ``plot()`` a figure.

    Raises:
        TypeError: for a function that `emulate` did not make, traced arguments, or an `output` that gives no number.
        ValueError: if the output of either program is not finite, or a derivative or an error on the way to it. If no
            number depends on the arguments, or a loop is too long.
        NotImplementedError: for an equation without a derivative on the way to the output.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: jnp.sum(x * x) - 4.0, "e4m3")
        >>> found = low.blame(jnp.array([1.1, 2.0]))
        >>> [(row.primitive, round(row.contribution, 4)) for row in found.rows]
        [('reduce_sum', -0.25), ('argument [0]', 0.0556), ('sub', 0.0), ('mul', -0.0156)]
    """
    low, args = emulated_call("low", low, args, kwargs)
    check_instance("output", output, Callable | None, "a function of the result, or None")
    most_turns, is_limited = limit_of_turns(low, max_turns)
    tape = Tape(paired.CarrierReference(), most_turns)
    program = trace_program(low.fun, low.settings, args, kwargs)
    refuse_tracers("blame", program.values)
    steps, first = steps_by_source(low, program, user_line())
    tape.sources.update((id(step), source) for step, _, source in steps)
    entry = round_on_entry(program, low.settings.spec, seeds_of_call(low, key, args, kwargs))
    if not is_limited:
        tape.check = partial(_check_loop_turns, program, entry)
    names = argument_names(args, kwargs)
    results = _run_tape(program, tape, names, entry)
    error, value, reference, cotangents = _output_cotangents(program, results, output)
    shares = tape.shares(results, cotangents)
    for note in dict.fromkeys(tape.notes):
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    arguments = {
        ("", name, str(low.settings.spec), first): [share]
        for name, share in shares.items()
        if isinstance(name, str) and share.squares
    }
    groups = [*arguments.items(), *_shares_by_place(tape.with_literal_steps(steps), shares).items()]
    rows = sorted(
        (_blame_row(*place, members, error) for place, members in groups), key=lambda row: -abs(row.contribution)
    )
    if gains is None or check_int("gains", gains, 0):
        parts = parts_of(program, low.settings.spec, names, steps, first)
        rows = _with_gains(rows, gains, parts, WideRuns(low, program, entry, output, most_turns, is_limited))
    unexplained = error - math.fsum(row.contribution for row in rows)
    notes = (*dict.fromkeys(tape.notes), *_blame_notes(tape.diverges, error, value, unexplained, rows))
    return Blame(tuple(rows), error, value, reference, unexplained, notes)


def _with_gains(
    rows: Sequence[BlameRow], most: int | None, parts: dict[RowKey, Part], runs: WideRuns
) -> list[BlameRow]:
    measured = {key: row for row in rows[:most] if (key := (row.scope, row.primitive, row.spec, row.source)) in parts}
    falls = runs.measure(map(parts.__getitem__, measured)) if measured else []
    new = [replace(row, gain=x, projection=y) for row, (_, x, y) in zip(measured.values(), falls, strict=True)]
    others = [row for row in rows if all(row is not own for own in measured.values())]
    return [*sorted(new, key=lambda row: -math.inf if math.isnan(row.gain) else row.gain, reverse=True), *others]


def _blame_notes(diverges: bool, error: float, value: float, rest: float, rows: Sequence[BlameRow]) -> Iterator[str]:
    if diverges:
        yield (
            "the carrier alone would make other turns or choices, so this is the error on the path of the emulated "
            "program, and not the difference from a plain run"
        )
    if error and abs(rest) > _NAMED_REST * abs(error):
        part = "a part larger than the error" if abs(rest) > abs(error) else f"{abs(rest / error):.0%} of the error"
        largest = max((abs(row.contribution) for row in rows), default=0.0)
        why = "between the two runs the program is far from linear, or jumps"
        if abs(rest) <= float(jnp.finfo(jnp.result_type(float)).eps) * abs(value):
            why = "it is less than a step of the carrier"
        elif diverges:
            why = "the carrier alone would make other turns or choices"
        elif abs(rest) <= _SMALL_REST * largest:
            why = f"the rows cancel, and the largest is {largest / abs(error):.3g} times the error"
        yield f"no row explains {part}: {why}; blame fewer turns of loops, or take a format with more digits"


def _run_tape(program: EmulatedProgram, tape: Tape, names: Sequence[str], entry: ProgramEntry) -> list[ValuePair]:
    """Runs an emulated program and its reference on the tape; gives the pairs of its results."""
    values, constants, inner_seeds = entry
    all_values = (*program.values, *program.plan.consts)
    names = (*names, *("constant" for _ in program.plan.consts))
    pairs: list[ValuePair] = [
        tape.argument(name, x, as_jax_value(exact))
        for name, x, exact in zip(names, (*values, *constants), all_values, strict=True)
    ]
    return interpret(tape, program.plan, [inner_seeds], pairs[: len(values)], pairs[len(values) :])


def _check_loop_turns(program: EmulatedProgram, entry: ProgramEntry) -> None:
    """Refuses loops of too many turns, by a run of the emulated program alone, which is much faster."""
    values, constants, inner_seeds = entry
    _, messages = run_limited(program.plan, inner_seeds, values, constants, MOST_TURNS)
    if messages:
        raise ValueError(
            f"{messages[0]}. blame records every operation of every turn: max_turns=100 gives the parts of the first "
            "turns, a larger number those of more. A tolerance below the spacing of the format is never reached"
        )


def _output_cotangents(
    program: EmulatedProgram, results: Sequence[ValuePair], output: Callable[[Any], Any] | None
) -> tuple[float, float, float, list[Any]]:
    """The error, both outputs, and the derivative of the output by each result."""
    low, wide = ([as_jax_value(pair[side]) for pair in results] for side in (0, 1))
    numbers = [i for i, x in enumerate(low) if is_number(jax.typeof(x))]
    check(numbers, "the result has no floating-point number, so it has no error")
    if output is not None:
        return _cotangents_of_output(program, low, wide, numbers, output)
    errors = [as_double_precision(low[i]) - as_double_precision(wide[i]) for i in numbers]
    if not all(np.all(np.isfinite(error)) for error in errors):
        raise _not_finite_error(*low, *wide)
    cotangents: list[Any] = [None] * len(low)
    if sum(error.size for error in errors) == 1 and not np.iscomplexobj(errors[0]):
        cotangents[numbers[0]] = jnp.ones_like(low[numbers[0]])
        value, reference = (float(np.ravel(as_double_precision(side[numbers[0]]))[0]) for side in (low, wide))
        return value - reference, value, reference, cotangents
    norm = math.sqrt(sum(float(np.sum(np.abs(error) ** 2)) for error in errors))
    for i, error in zip(numbers, errors, strict=True):
        cotangents[i] = jnp.asarray(np.conj(error) / (norm or 1.0), low[i].dtype)
    return norm, math.nan, math.nan, cotangents


def _cotangents_of_output(
    program: EmulatedProgram, low: list[Any], wide: list[Any], numbers: list[int], output: Callable[[Any], Any]
) -> tuple[float, float, float, list[Any]]:
    """The error of an output, both its values, and its derivative by each result, the mean of both sides."""

    def number(side: list[Any], values: Sequence[Any]) -> Any:
        leaves = list(side)
        for i, value in zip(numbers, values, strict=True):
            leaves[i] = value
        out = jnp.asarray(output(jax.tree.unflatten(program.tree, leaves)))
        if out.size != 1 or not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(f"output={output!r} must give a real number, but gives {jax.typeof(out)}")
        return jnp.reshape(out, ())

    gradients = [
        jax.value_and_grad(lambda values, side=side: number(side, values))([side[i] for i in numbers])
        for side in (low, wide)
    ]
    (value, low_gradient), (reference, wide_gradient) = gradients
    if not (math.isfinite(value) and math.isfinite(reference)):
        raise _not_finite_error(value, reference)
    cotangents: list[Any] = [None] * len(low)
    for i, x, y in zip(numbers, low_gradient, wide_gradient, strict=True):
        mean = (x + y) / 2
        # A number that is equal in both results adds nothing, so that 0 is as good as an infinite derivative.
        cotangents[i] = jnp.where(~jnp.isfinite(mean) & (low[i] == wide[i]), 0, mean)
        if not bool(jnp.all(jnp.isfinite(cotangents[i]))):
            raise ValueError(
                f"output={output!r} has no finite derivative at both results; the norm of an error has none at zero, "
                "and output=None gives the parts of that norm"
            )
    return float(value) - float(reference), float(value), float(reference), cotangents


def _not_finite_error(*output: Any) -> ValueError:
    nan = any(is_number(jax.typeof(x)) and bool(jnp.isnan(x).any()) for x in map(as_jax_value, output))
    event, verb = ("nan", "gives a NaN") if nan else ("overflow", "overflows")
    return ValueError(
        f"the output is {'NaN' if nan else 'not finite'}, so its error has no parts; "
        f"low.report(..., stop_at={event!r}) names the first equation that {verb}"
    )


def _shares_by_place(steps: Iterable[SourcedStep], shares: dict[Any, ErrorShare]) -> dict[RowKey, list[ErrorShare]]:
    """The shares of the steps of each scope, name, rounding and line of source."""
    groups: dict[RowKey, list[ErrorShare]] = {}
    for step, _, source in steps:
        if id(step) in shares:
            moves = step.kind in paired.SILENT_KINDS and not is_foreign_primitive(step)  # which round nothing else
            name = "constant" if moves else paired.step_label(step)
            groups.setdefault((step.scope, name, paired.step_spec_text(step), source), []).append(shares[id(step)])
    return groups


def _blame_row(scope: str, name: str, spec: str, source: str, members: Sequence[ErrorShare], error: float) -> BlameRow:
    count = sum(share.count for share in members)
    rms = math.sqrt(sum(share.squares for share in members) / count) if count else 0.0
    contribution = math.fsum(share.contribution for share in members)
    last_turn = max((turn for share in members for turn in share.turns), default=-1)
    turns = tuple(math.fsum(share.turns.get(turn, 0.0) for share in members) for turn in range(last_turn + 1))
    share = contribution / error if error else math.nan
    return BlameRow(scope, name, spec, len(members), count, rms, contribution, share, source, turns)
