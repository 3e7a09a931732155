"""`emulate.report`: what is rounded where, how often, and what that does to the values."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import numpy as np

from jchop._checks import check_bool
from jchop._emulate._emulate import Emulated, enter, seeds_of
from jchop._emulate._trace import trace
from jchop._emulate._known import is_number
from jchop._emulate._measure import Measure, measure
from jchop._emulate._step import Step
from jchop._program.source import here, source_of
from jchop._program.step import Plan
from jchop._text import table_lines

__all__ = ["Report", "Row", "report"]

Array = jax.Array
#: The kinds of equations that round nothing.
_SILENT = frozenset({"structural", "extremum", "untouched", "compared", "control", "own"})


@dataclass(frozen=True)
class Row:
    """The equations of one primitive, scope, arithmetic and line of source.

    Args:
        scope: the path of `jax.named_scope` and `jax.jit` names; empty outside of all.
        primitive: its name; ``"jchop"`` for a function of jchop, the function's own for one of `jax.random`.
        spec: what results are rounded to, as text; ``"carrier"`` for nothing.
        sums: how sums are formed, as text; ``"carrier"`` for the carrier's own, empty where there are none.
        equations: how many there are in the program.
        results: numbers that they give in a run; of a `while` loop, in one turn.
        source: file and line that the equations come from, as ``"folder/model.py:12"``: the innermost line outside of
            JAX and jchop. Inside a function of JAX, the line that calls it.
        overflows: finite results of the carrier that became infinite or NaN; this and what follows, where traced.
        underflows: results that became zero.
        infinities: results that are infinite, for whatever reason; this and ``nans``, too, where traced.
        nans: results that are NaN, for whatever reason.
        smallest: the smallest magnitude but zero.
        largest: the largest finite magnitude.
        error: the largest relative error of one operation, against the carrier's on the same operands. This and
            ``deviation`` are of results that are finite in both, and NaN when there are none.
        deviation: the largest relative error against the program run in the carrier from the start.
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

    @property
    def place(self) -> str:
        """The source without its folders: ``"model.py:12"``."""
        return os.path.basename(self.source)


@dataclass(frozen=True)
class Report:
    """The rows of a program in the order in which they first come; as text, a table.

    Args:
        rows: a `Row` for each primitive, scope, arithmetic and line of source.
        traced: whether values were looked at.
    """

    rows: tuple[Row, ...]
    traced: bool = field(default=False)

    @property
    def operations(self) -> int:
        """How many numbers are rounded results."""
        return sum(row.results for row in self.rows)

    def __str__(self) -> str:
        head = ("scope", "primitive", "spec", "sums", "equations", "results")
        more = ("overflows", "underflows", "infinities", "nans", "smallest", "largest", "error", "deviation")
        names = head + more * self.traced
        lines = [(*names, "source"), *((*(_text(getattr(row, n)) for n in names), row.place) for row in self.rows)]
        return "\n".join(table_lines(lines))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(fun: Emulated, *args: Any, trace_values: bool = False, key: Array | None = None, **kwargs: Any) -> Report:
    """What an emulated function rounds for these arguments, and where it loses digits.

    Args:
        fun: what `jchop.emulate` returned.
        *args: arguments of the function.
        trace_values: run the program, loops turn by turn, beside the same program in the carrier, and compare: ranges,
            overflows, underflows, infinities, NaN and errors of each operation. Branches and numbers of turns are those
            of the emulated program. Inside `jax.shard_map` nothing is looked at. Needs arguments that are not traced.
            Default False: nothing is computed.
        key: a typed key, where values are traced and anything rounds stochastically.
        **kwargs: keyword arguments of the function.

    Returns:
        A `Report`; ``str`` of it is a table.

    Raises:
        TypeError: for a function that `emulate` did not make, or traced arguments.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: jnp.exp(x) * x, "e4m3")
        >>> print(jc.emulate.report(low, jnp.array([1.0, 8.0])))
        scope  primitive  spec         sums  equations  results  source
               exp        float8_e4m3        1          2        ...:1
               mul        float8_e4m3        1          2        ...:1
        >>> seen = jc.emulate.report(low, jnp.array([1.0, 8.0]), trace_values=True)
        >>> [(row.primitive, row.overflows, row.infinities, row.largest) for row in seen.rows]
        [('exp', 1, 1, 2.75), ('mul', 0, 1, 2.75)]
    """
    if not isinstance(fun, Emulated):
        raise TypeError(f"fun={fun!r} must be a function that jchop.emulate returned")
    check_bool("trace_values", trace_values)
    program = trace(fun.fun, fun.settings, args, kwargs)
    steps = list(_walk(program.plan, 1, here()))
    found: dict[int, Measure] = {}
    if trace_values:
        if any(isinstance(v, jax.core.Tracer) for v in program.values):
            raise TypeError("trace_values=True needs arguments that are not traced: call report outside of jax.jit")
        seeds = seeds_of(fun.settings, fun.key if key is None else key)
        low, constants, inside = enter(program, fun.settings.spec, seeds)
        measure(program.plan, inside, list(zip(low, program.values, strict=True)), found, constants)
    return Report(tuple(_rows(steps, found)), trace_values)


def _walk(plan: Plan, times: int, outer: str) -> Iterator[tuple[Step, int, str]]:
    """The steps that round, how often they run, and their source; `outer` is that of the call around them."""
    for step in plan.steps:
        source = source_of(step.eqn.source_info, outer)
        if step.kind not in _SILENT:
            yield step, times, source
        turns = step.eqn.params["length"] if step.name == "scan" else 1
        for inner in step.inner:
            yield from _walk(inner, times * turns, source)


def _rows(steps: Sequence[tuple[Step, int, str]], found: dict[int, Measure]) -> Iterator[Row]:
    groups: dict[tuple[str, str, str, str, str], list[tuple[Step, int]]] = {}
    for step, times, source in steps:
        choice = step.choice
        sums = str(choice.accumulate or "carrier") if step.kind == "accumulating" else ""
        spec = "carrier" if choice.spec is None or step.kind == "carrier" else str(choice.spec)
        groups.setdefault((step.scope, _label(step), spec, sums, source), []).append((step, times))
    for (scope, name, spec, sums, source), members in groups.items():
        results = sum(_size(step) * times for step, times in members)
        seen = Measure()
        for step, _ in members:
            seen.add(found.get(id(step)))
        yield Row(scope, name, spec, sums, len(members), results, source, **seen.facts())


def _label(step: Step) -> str:
    """The primitive; of a function of jchop, or of `jax.random`, which is one operation, its name."""
    if step.kind == "result":
        return "jchop"
    return step.eqn.params.get("name", step.name) if step.draw is not None else step.name


def _size(step: Step) -> int:
    return sum(int(np.prod(v.aval.shape)) for v in step.eqn.outvars if is_number(v.aval))
