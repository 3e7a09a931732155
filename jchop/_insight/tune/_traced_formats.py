"""A program whose formats are arguments: one compilation for all assignments of formats to sites.

All real numbers are float64, and each site rounds its operands and its results to the row of integers of its format.
Operations that `emulate` leaves to the carrier take and give numbers of the carrier. The results have the bits of
`emulate` with the same formats, but for subnormal numbers of the carrier, which devices read as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._core.elementary.functions import supports_function
from jchop._emulate.rules.accumulate import accumulate_in_order
from jchop._emulate.rules.linalg import map_matrices
from jchop._emulate.rules.rules import CARRIER_DTYPES, ArithmeticChoice
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._insight.tune._format_rows import FLOAT64_ROW, format_row, is_spec_traceable, round_to_44_bits, round_to_row
from jchop._program.bind import bind
from jchop._program.control import CONTROL, WhileParts, as_jax_value
from jchop._program.run import Runner, interpret
from jchop._program.step import ProgramPlan
from jchop._spec.spec import Spec
from jchop.formats import bfloat16, binary16, binary32

Array = jax.Array

_ROW_OF_DTYPE = {
    "float16": format_row(Spec(binary16)),
    "bfloat16": format_row(Spec(bfloat16)),
    "float32": format_row(Spec(binary32)),
    "float64": FLOAT64_ROW,
}
_TUNABLE_KINDS = frozenset({"exact", "power", "elementary", "made", "converted", "accumulating", "linear", "carried",
                    "result", "structural", "extremum", "compared", "own", "carrier", "control",
                    "untouched"})  # fmt: skip
_TUNABLE_LINALG = frozenset({"triangular_solve", "lu"})
_FLOAT64_OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": jnp.add,
    "add_any": jnp.add,
    "add_jaxvals": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "neg": jnp.negative,
    "abs": jnp.abs,
}


def is_plan_traceable(plan: ProgramPlan, menu: Iterable[ArithmeticChoice]) -> bool:
    """Whether `run_with_levels` has a rule for every equation and every format."""
    return all(is_spec_traceable(choice.spec) for choice in menu) and all(map(_is_step_traceable, plan.walk()))


def _is_step_traceable(step: EmulatedStep) -> bool:
    values = [v.aval for v in (*step.eqn.invars, *step.eqn.outvars)]
    if step.kind not in _TUNABLE_KINDS or step.choice.function is not None or step.draw is not None:
        return False
    if any(hasattr(aval, "inner_aval") for aval in values) or step.name == "shard_map":
        return False
    if any(hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in values):
        return False
    if step.name == "while" and step.inner[0].jaxpr.outvars[0].aval.shape:
        return False
    return step.kind != "linear" or step.name in _TUNABLE_LINALG


def run_with_levels(
    plan: ProgramPlan,
    sites: dict[int, int],
    menu: Sequence[ArithmeticChoice],
    max_turns: int,
    levels: Array,
    values: Sequence[Any],
    consts: Sequence[Any],
) -> list[Any]:
    """The results of a plan; to be traced under ``jax_enable_x64``.

    Args:
        plan: a plan with kinds of equations.
        sites: the number of the site of each step, by its id.
        menu: the formats and rules of sums.
        max_turns: the most turns of a `while` loop. The results of a loop that does not end by then are NaN.
        levels: the number in the menu of each site, an integer array.
        values: the arguments, in float64 if they are real.
        consts: the constants, in float64 if they are real.
    """
    dtypes = {
        v.aval.dtype.name
        for step in plan.walk()
        for v in (*step.eqn.invars, *step.eqn.outvars)
        if hasattr(v.aval, "dtype") and v.aval.dtype.name in CARRIER_DTYPES
    }
    rows = {
        name: jnp.asarray(np.stack([_row_for_dtype(choice.spec, name) for choice in menu]))[levels]
        for name in sorted(dtypes)
    }
    return interpret(_LevelRunner(sites, menu, max_turns, levels, rows), plan, None, values, consts)


def _row_for_dtype(spec: Spec | None, dtype: str) -> np.ndarray:
    return _ROW_OF_DTYPE[dtype] if spec is None else format_row(spec)


class _LevelRunner(Runner):
    """Runs one plan. It knows the results that are already in the format of a site."""

    differentiates = False
    max_turns: int

    def __init__(
        self,
        sites: dict[int, int],
        menu: Sequence[ArithmeticChoice],
        max_turns: int,
        levels: Array,
        rows: dict[str, Array],
    ) -> None:
        self.sites, self.menu, self.max_turns, self.levels, self.rows = sites, menu, max_turns, levels, rows
        self.formats_of_values: dict[int, tuple[Any, tuple[int, str]]] = {}  # keeps the value and its id
        self.results_of_rounding: dict[tuple[int, int, str], Array] = {}

    def finish(self, value: Any, seeds: Any) -> Any:
        """A result of a program."""
        return _as_float64(value)

    def run(self, part: EmulatedStep, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of one equation."""
        args = [_as_float64(x) for x in args]
        site = self.sites.get(id(part))
        if site is None or part.kind in ("structural", "extremum", "own", "carrier"):
            return self._run_without_rounding(part, args)
        if part.kind not in ("made", "result", "converted"):
            args = [
                self._round(x, site, v.aval.dtype.name) if _is_carrier_aval(v.aval) else x
                for x, v in zip(args, part.eqn.invars, strict=True)
            ]
        out = _TUNABLE_BY_KIND[part.kind](self, part, site, args)
        return [
            self._round(x, site, v.aval.dtype.name) if _is_carrier_aval(v.aval) else x
            for x, v in zip(out, part.eqn.outvars, strict=True)
        ]

    def _round(self, x: Array, site: int, dtype: str) -> Array:
        key = (site, dtype)
        current = self.formats_of_values.get(id(x))
        if current is not None and current[1] == key:
            return x
        if (id(x), *key) not in self.results_of_rounding:
            out = round_to_row(x, self.rows[dtype][site])
            self.results_of_rounding[id(x), *key] = out
            self.formats_of_values[id(out)] = (out, key)
            self.formats_of_values.setdefault(id(x), (x, (-1, "")))
        return self.results_of_rounding[id(x), *key]

    def _run_without_rounding(self, step: EmulatedStep, args: list[Any]) -> list[Any]:
        """An equation that makes no error."""
        if step.name == "convert_element_type" and _is_carrier_aval(step.eqn.outvars[0].aval):
            return [_round_to_program_dtype(args[0], step)]
        if step.kind == "exact":
            return [_FLOAT64_OPERATIONS[step.name](*args)]
        if step.kind not in ("structural", "extremum", "elementary"):
            return _bind_in_carrier(step, args)
        out = bind(step.eqn.primitive, step.eqn.params, *args)
        keys = {
            self.formats_of_values.get(id(x), (x, None))[1]
            for x, v in zip(args, step.eqn.invars, strict=True)
            if _is_carrier_aval(v.aval)
        }
        if step.kind != "elementary" and len(keys) == 1:
            (key,) = keys
            self.formats_of_values.update({id(x): (x, key) for x in out if key is not None})
        return out

    # -- equations that hold programs ----------------------------------------------------------------------------------

    def control(self, step: EmulatedStep, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of an equation that holds programs."""
        args = [_as_float64(x) for x in args]
        if step.name not in CONTROL:
            return self._inner(step.inner[0], None, args)
        return self.enter(step, None, args, self._inner)

    def _inner(self, plan: ProgramPlan, seeds: Any, args: Sequence[Any]) -> list[Any]:
        runner = _LevelRunner(self.sites, self.menu, self.max_turns, self.levels, self.rows)
        return interpret(runner, plan, None, args, [_as_float64(x) for x in plan.consts])

    def at_limit(self, step: EmulatedStep, loop: WhileParts, last: Any, count: Array) -> list[Any]:
        """The values of a loop, NaN if its condition still holds."""
        hit_limit = (count >= self.max_turns) & loop.goes_on(last, count)
        return [jnp.where(hit_limit, jnp.nan, x) if x.dtype == jnp.float64 else x for x in last]


# -- numbers -----------------------------------------------------------------------------------------------------------


def _is_carrier_aval(aval: Any) -> bool:
    return hasattr(aval, "dtype") and aval.dtype.name in CARRIER_DTYPES


def _as_float64(x: Any) -> Any:
    """A real number in float64."""
    x = as_jax_value(x) if not isinstance(x, np.ndarray) else x
    return jnp.asarray(x.astype(np.float64)) if x.dtype.name in CARRIER_DTYPES else as_jax_value(x)


def _round_to_program_dtype(x: Any, step: EmulatedStep) -> Array:
    """A conversion to a real dtype of the program."""
    source, target = step.eqn.invars[0].aval, step.eqn.outvars[0].aval
    if _is_carrier_aval(source):
        return round_to_row(x, jnp.asarray(_ROW_OF_DTYPE[target.dtype.name]))
    if source.dtype.itemsize == 8:
        x = x.astype(target.dtype)
    return x.astype(jnp.float64)


def _bind_in_carrier(step: EmulatedStep, args: Sequence[Any], **params: Any) -> list[Any]:
    """The carrier's results."""
    carrier_args = [
        x.astype(v.aval.dtype) if _is_carrier_aval(v.aval) else x for x, v in zip(args, step.eqn.invars, strict=True)
    ]
    return [_as_float64(x) for x in bind(step.eqn.primitive, {**step.eqn.params, **params}, *carrier_args)]


# -- operations by kind; operands and results are rounded around them --------------------------------------------------


def _tunable_power(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    """By squaring, every product rounded."""
    (x,), exponent, dtype = args, step.eqn.params["y"], step.eqn.outvars[0].aval.dtype.name
    total, square, n = None, x, abs(exponent)

    def product(a: Array, b: Array) -> Array:
        return run._round(a * b, site, dtype)

    while n:
        if n & 1:
            total = square if total is None else product(total, square)
        n >>= 1
        if n:
            square = product(square, square)
    one = run._round(jnp.ones_like(x), site, dtype)
    if total is None:
        return [one]
    return [total if exponent > 0 else one / total]


def _tunable_elementary(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    """The exact value to 44 digits for the formats in which `emulate` rounds it, else the carrier's."""
    is_exact = [choice.spec is not None and supports_function(step.name, choice.spec) for choice in run.menu]
    results = []
    if any(is_exact):
        results.append(round_to_44_bits(bind(step.eqn.primitive, step.eqn.params, *args)[0]))
    if not all(is_exact):
        results.append(_bind_in_carrier(step, args)[0])
    if len(results) == 1:
        return results
    return [jnp.where(jnp.asarray(is_exact)[run.levels[site]], *results)]


def _tunable_sum(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    """The carrier's sum, or that of the site's rule of sums."""
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    params = {"precision": highest} if "precision" in step.eqn.params else {}
    rules = [choice.accumulate for choice in run.menu]
    if not any(rules):
        return _bind_in_carrier(step, args, **params)
    branches = [
        partial(_bind_in_carrier, step, **params)
        if choice.accumulate is None
        else partial(_accumulate_by_choice, step, choice)
        for choice in run.menu
    ]
    return lax.switch(run.levels[site], branches, args)


def _accumulate_by_choice(step: EmulatedStep, choice: ArithmeticChoice, args: Sequence[Any]) -> list[Any]:
    carrier_args = [
        x.astype(v.aval.dtype) if _is_carrier_aval(v.aval) else x for x, v in zip(args, step.eqn.invars, strict=True)
    ]
    specs = (choice.spec,) * len(carrier_args)
    return [_as_float64(x) for x in accumulate_in_order(replace(step, choice=choice, known=specs), None, carrier_args)]


def _tunable_linalg(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    dtype = step.eqn.outvars[0].aval.dtype.name
    steps = _RowSteps(partial(round_to_row, row=run.rows[dtype][site]))
    return list(map_matrices(step, args, lambda index, matrix: steps))


_TUNABLE_BY_KIND: dict[str, Callable[[_LevelRunner, EmulatedStep, int, list[Any]], list[Any]]] = {
    "exact": lambda run, step, site, args: [_FLOAT64_OPERATIONS[step.name](*args)],
    "power": _tunable_power,
    "elementary": _tunable_elementary,
    **dict.fromkeys(
        ("made", "carried", "compared", "untouched"), lambda run, step, site, args: _bind_in_carrier(step, args)
    ),
    "accumulating": _tunable_sum,
    "converted": lambda run, step, site, args: [_round_to_program_dtype(args[0], step)],
    "result": lambda run, step, site, args: args,
    "linear": _tunable_linalg,
}


class _RowSteps:
    """The arithmetic of the algorithms of linear algebra, as `Steps` has it; those of `_TUNABLE_LINALG` use no more."""

    def __init__(self, round_: Callable[[Array], Array]) -> None:
        self.round = round_

    def at(self, step: Any) -> _RowSteps:
        return self

    def sub(self, x: Array, y: Array) -> Array:
        return self.round(x - y)

    def mul(self, x: Array, y: Array) -> Array:
        return self.round(x * y)

    def div(self, x: Array, y: Array) -> Array:
        return self.round(x / y)
