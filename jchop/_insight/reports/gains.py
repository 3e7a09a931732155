"""`EmulatedFunction.what_if`: the measured fall of an error where a part of a program is kept wide.

Each part has a run of its own, as under the rule ``"wide"`` of `emulate`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.checks import check, check_choice, check_instance, check_int
from jchop._common.text import RowReport, TableOrLine
from jchop._emulate import paired
from jchop._emulate.emulate import EmulatedFunction, round_on_entry, seeds_of_call
from jchop._emulate.paired import SourcedStep, argument_names, as_double_precision, walk_sources
from jchop._emulate.rules.interpret import EagerRunner
from jchop._emulate.rules.plan import EmulationPlanner
from jchop._emulate.rules.rules import WIDE, Place, Settings, is_number
from jchop._emulate.rules.trace import EmulatedProgram, ProgramEntry, trace_program
from jchop._insight.reports.report import PlacedRow, emulated_call, refuse_tracers
from jchop._program.control import as_jax_value, copy_if_reference
from jchop._program.run import interpret
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, source_function_of, text_of_line, user_line
from jchop._spec.spec import Spec

#: Without a limit, a `while` loop of more turns has no gain and no blame. Blame takes about 0.1 s for a turn of an
#: adaptive solver of an ODE.
MOST_TURNS = 1000
#: The most letters of a line of source in a table.
_MOST_LINE_LETTERS = 40
#: A scope, a name, a spec and a line of source, as a row of a report has them.
RowKey = tuple[str, str, str, str]


@dataclass(frozen=True)
class WhatIfRow(PlacedRow):
    """A part of a program, and the error without its roundings.

    Args:
        scope: the path of `jax.named_scope` and `jax.jit` names; empty for a part over several.
        primitive: its name, as in `jchop.Blame`; for a line its text, for another part the number of its equations.
        spec: the rounding of the results, as text; empty for several.
        error: the norm of the error if the results of this part are not rounded, nor by the operations that read them.
        gain: the fall of the error's norm, over this norm. 1: nothing is left. Below 0: the error grows.
        projection: the fall along the error, ⟨e − e', e⟩/⟨e, e⟩; for a single number 1 − e'/e. Above 1: the error
            changes its sign.
        source: file and line; the file and the name of a function with ``by="function"``.
    """

    scope: str
    primitive: str
    spec: str
    error: float
    gain: float
    projection: float
    source: str = ""


@dataclass(frozen=True)
class WhatIf(RowReport):
    """The result of `jchop.EmulatedFunction.what_if`; its ``str`` is a table.

    Args:
        rows: the parts, the largest gain first.
        error: the norm of the error of the emulated program.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> found = jc.emulate(lambda x: jnp.sum(x / 3), "bfloat16").what_if(jnp.array([1.0, 2.5]))
        >>> found.rows[0].primitive, found.rows[0].gain > 0.5
        ('reduce_sum', True)
    """

    rows: tuple[WhatIfRow, ...]
    error: float

    _align, _optional = "<<<>>><", ("scope", "error")

    def _parts(self) -> Iterator[TableOrLine]:
        numbers = [(f"{row.error:.4g}", *percents(row.gain, row.projection)) for row in self.rows]
        yield (
            ("scope", "primitive", "spec", "error", "gain", "projection", "source"),
            *(
                (row.scope, row.primitive[:_MOST_LINE_LETTERS], row.spec, *own, row.place)
                for row, own in zip(self.rows, numbers, strict=True)
            ),
        )
        yield f"error {self.error:.4g}"


def limit_of_turns(low: EmulatedFunction, max_turns: int | None) -> tuple[int, bool]:
    """The most turns of a `while` loop, and whether the user limits them."""
    limit = max_turns if max_turns is not None else low.settings.max_turns
    return check_int("max_turns", MOST_TURNS if limit is None else limit, 1, (1 << 32) - 1), limit is not None


def percents(*parts: float) -> list[str]:
    """Parts as texts; empty for NaN."""
    return ["" if math.isnan(part) else f"{part:z.1%}" for part in parts]


def what_if(
    low: Callable[..., Any],
    /,
    *args: Any,
    by: Literal["row", "line", "scope", "function"] = "row",
    output: Callable[[Any], Any] | None = None,
    key: Array | None = None,
    max_turns: int | None = None,
    **kwargs: Any,
) -> WhatIf:
    """Measures the error of an emulated program without the roundings of each of its parts.

    For each part the program runs again. There this part gives its results in the carrier. No operation that
    reads them rounds them, as under the rule ``"wide"`` of `jchop.emulate`. Each run has its own path through loops and
    branches. The error is the result minus the result in the carrier.

    Args:
        low: a function from `jchop.emulate`.
        *args: its arguments.
        by: the parts. ``"row"`` (default): the rows of `jchop.EmulatedFunction.blame`. ``"line"``: lines of source.
            ``"scope"``: paths of `jax.named_scope` and `jax.jit` names. ``"function"``: Python functions. An argument
            is a part of its own.
        output: a function of the result of `low` to a number. Default: all numbers of the result.
        key: a typed key, needed if a rounding is stochastic. All runs have the same draws.
        max_turns: the most turns of a `while` loop, 1 000 if neither this nor the limit of `emulate` is set. Then a
            longer loop has NaN, and no gain. With a limit it ends with its present values.
        **kwargs: keyword arguments of the function.

    Returns:
        A `WhatIf`; its ``str`` is a table, ``columns()`` its columns.

    Raises:
        TypeError: for a function that `emulate` did not make, traced arguments, or an `output` that gives no number.
        ValueError: for a result without numbers, or one that is not finite in the carrier.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: 0.5 * (1 + jax.lax.erf(x)) * x, "bfloat16")
        >>> {row.primitive: round(row.gain, 2) for row in low.what_if(jnp.array([0.3, 0.7])).rows}["add"]
        0.0
    """
    low, args = emulated_call("low", low, args, kwargs)
    check_choice("by", by, ("row", "line", "scope", "function"))
    check_instance("output", output, Callable | None, "a function of the result, or None")
    most, stops = limit_of_turns(low, max_turns)
    program, call = trace_program(low.fun, low.settings, args, kwargs), user_line()
    refuse_tracers("what_if", program.values)
    entry = round_on_entry(program, low.settings.spec, seeds_of_call(low, key, args, kwargs))
    steps, first = steps_by_source(low, program, call)
    parts = parts_of(program, low.settings.spec, argument_names(args, kwargs), steps, first)
    runs = WideRuns(low, program, entry, output, most, stops)
    groups: dict[RowKey, Part] = {}
    for row, part in parts.items():
        own = by == "row" or part.entries
        key_of = {"line": ("", row[3]), "scope": (row[0], ""), "function": ("", part.function)}
        scope, source = ("", "") if own else key_of[by]
        groups.setdefault(row if own else (scope, "", "", source), Part()).add(part)
    rows = []
    for ((scope, name, spec, source), part), measured in zip(
        groups.items(), runs.measure(groups.values()), strict=True
    ):
        text = name or (by == "line" and text_of_line(source)) or f"{part.equations} equations"
        rows.append(WhatIfRow(scope, text, spec, *measured, "" if by == "scope" and not name else source))
    rows.sort(key=lambda row: math.inf if math.isnan(row.gain) else -row.gain)
    return WhatIf(tuple(rows), runs.error)


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Equations by their places, and arguments and constants by their numbers."""

    places: set[Place] = field(default_factory=set)
    entries: set[int] = field(default_factory=set)
    equations: int = 0
    function: str = ""

    def add(self, other: Part) -> None:
        self.places |= other.places
        self.entries |= other.entries
        self.equations += other.equations


def steps_by_source(low: EmulatedFunction, program: EmulatedProgram, call: str) -> tuple[list[SourcedStep], str]:
    """The steps, the number of their runs and their sources; and the first line of the function.

    The first line is also the source of a constant result, because `emulate` makes its equation in the call.
    """
    first = paired.first_line_of(low.fun, call)
    steps = walk_sources(program.plan, call)
    return [(step, runs, first if line == call else line) for step, runs, line in steps], first


def parts_of(
    program: EmulatedProgram, spec: Spec | None, names: Sequence[str], steps: Iterable[SourcedStep], first: str
) -> dict[RowKey, Part]:
    """The parts that round, by the rows of a blame."""
    parts: dict[RowKey, Part] = {}
    names = (*names, *("constant" for _ in program.plan.consts))
    for i, (name, rounds) in enumerate(zip(names, program.rounds, strict=True)):
        if rounds:
            parts.setdefault(("", name, str(spec), first), Part()).entries.add(i)
    lines = (line for _, _, line in walk_sources(program.plan, ""))
    for (step, _, source), line in zip(steps, lines, strict=True):
        silent = step.kind in paired.SILENT_KINDS
        if step.choice.spec is None or step.kind == "carrier" or (silent and not any(step.rounds)):
            continue
        name = "constant" if silent else paired.step_label(step)
        row = (step.scope, name, paired.step_spec_text(step), source)
        part = parts.setdefault(row, Part(function=source_function_of(step.eqn.source_info)))
        part.places.add((step.scope, step.name, line))
        part.equations += 1
    return parts


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class WideRuns:
    """Runs of a program, each with a wide part.

    Args:
        low: the emulated function.
        program: its program.
        entry: the arguments and constants as they are rounded on entry, and the seeds.
        output: a function of the result to a number; None for all numbers.
        max_turns: the most turns of a `while` loop.
        stops: whether a longer loop ends there with its present values; else the error is infinite.
        error: the norm of the error.
    """

    low: EmulatedFunction
    program: EmulatedProgram
    entry: ProgramEntry
    output: Callable[[Any], Any] | None
    max_turns: int
    stops: bool
    error: float = math.nan

    def measure(self, parts: Iterable[Part]) -> list[tuple[float, float, float]]:
        """The norm of the error, its fall and the fall along the error, for each wide part."""
        own = self.low.settings
        exact = self._numbers(replace(own, spec=None, rules=(), accumulate=None), set(range(len(self.program.rounds))))
        check(exact.size, "the result has no floating-point number, so it has no error")
        check(np.isfinite(exact).all(), "the result is not finite in the carrier, so it has no error")
        errors = [
            self._numbers(replace(own, wide=frozenset(part.places)), part.entries) - exact for part in (Part(), *parts)
        ]
        self.error = _norm(errors[0])
        return [_fall(error, errors[0]) for error in errors[1:]]

    def _numbers(self, settings: Settings, entries: set[int]) -> np.ndarray:
        """The numbers of the result, or its output, with the arguments and constants of these numbers not rounded."""
        values, consts, seeds = self.entry
        rounded, whole = (*values, *consts), (*self.program.values, *self.program.plan.consts)
        pairs = enumerate(zip(rounded, whole, strict=True))
        args = [copy_if_reference(as_jax_value(y) if i in entries else x) for i, (x, y) in pairs]
        facts = [
            WIDE if i in entries else settings.spec if rounds else None for i, rounds in enumerate(self.program.rounds)
        ]
        count, planner = len(values), EmulationPlanner(settings, self.program.widening)
        plan = planner.plan(self.program.plan.jaxpr, facts[:count], constants=facts[count:])
        leaves, stopped = run_limited(plan, seeds, args[:count], args[count:], self.max_turns)
        if self.output is not None:
            leaves = [jnp.asarray(self.output(jax.tree.unflatten(self.program.tree, list(map(as_jax_value, leaves)))))]
            if leaves[0].size != 1 or not is_number(jax.typeof(leaves[0])):
                raise TypeError(f"output={self.output!r} must give a real number, but gives {jax.typeof(leaves[0])}")
        numbers = [np.ravel(as_double_precision(x)) for x in leaves if is_number(jax.typeof(x))]
        out = np.concatenate([np.zeros(0), *numbers])
        return np.full_like(out, math.nan) if stopped and not self.stops else out


def run_limited(
    plan: ProgramPlan, seeds: Seeds | None, values: list[Any], constants: list[Any], max_turns: int
) -> tuple[list[Any], list[str]]:
    """The results of a plan, and the warnings of its loops that were stopped."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        results = interpret(EagerRunner(max_turns), plan, seeds, values, constants)
        jax.effects_barrier()
    return results, [str(record.message) for record in records if issubclass(record.category, RuntimeWarning)]


def _norm(error: np.ndarray) -> float:
    """The norm; infinite for a NaN."""
    return math.inf if np.isnan(error).any() else float(np.linalg.norm(error))


def _fall(left: np.ndarray, error: np.ndarray) -> tuple[float, float, float]:
    with np.errstate(all="ignore"):
        now, before = _norm(left), _norm(error)
        unit = error / before
        along = float(np.real(np.vdot(unit, (error - left) / before)))
    return now, (1 - now / before if before else math.nan), along
