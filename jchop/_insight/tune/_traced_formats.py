"""A program whose formats are arguments: one compilation for all assignments of formats to sites.

All real numbers are float64, and each site rounds its operands and its results to the row of integers of its format.
Operations that `emulate` leaves to the carrier take and give numbers of the carrier. The results have the bits of
`emulate` with the same formats, but for subnormal numbers of the carrier, which devices read as zero.

A format is a row of integers. Rounding works on the bits of float64. It holds all values of the formats of
`is_spec_traceable`. To more than twice their digits it holds all sums, products, quotients and roots of these. So the
result of one operation in float64, rounded once more, is the exact result rounded once (S. A. Figueroa, "When is double
rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import FLOAT64
from jchop._core.elementary.functions import supports_function
from jchop._emulate.rules.accumulate import accumulate_in_order
from jchop._emulate.rules.linalg import map_matrices
from jchop._emulate.rules.rules import CARRIER_DTYPES, ArithmeticChoice
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._kernels.primitive import make_op
from jchop._program.bind import bind
from jchop._program.control import CONTROL, WhileParts, as_jax_value
from jchop._program.run import Runner, interpret
from jchop._program.step import ProgramPlan
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat
from jchop.formats._catalogue import bfloat16, binary16, binary32
from jchop.formats.rounding import Overflow, Rounding

#: The most significant bits: 2 p + 2 are at most the significant bits of float64.
_MOST_PRECISION = (FLOAT64.fraction + 1 - 2) // 2
#: Products of the smallest values, and of the largest, are normal numbers of float64.
_LEAST_EXPONENT, _MOST_EXPONENT = -500, 500


def is_spec_traceable(spec: Spec | None) -> bool:
    """Whether a rounding is a row of integers: to nearest even, of a signed format with subnormal numbers and -0."""
    if spec is None:
        return True
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or spec.rounding is not Rounding.NEAREST_EVEN or spec.flush:
        return False
    is_signed_ieee = fmt.signed and fmt.zero and fmt.subnormals and fmt.has_negative_zero
    is_in_range = fmt.emin - fmt.frac_bits >= _LEAST_EXPONENT and fmt.emax <= _MOST_EXPONENT
    return is_signed_ieee and is_in_range and fmt.precision <= _MOST_PRECISION


def format_row(spec: Spec) -> np.ndarray:
    """A format as int64[5]: precision, smallest exponent, bits of the largest value, and the bits of results beyond it.

    The last two are the results of a finite value beyond the largest one, and of an infinity.
    """
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    largest = FLOAT64.ceil_bits(Fraction(fmt.exact_max))
    beyond = largest if fmt.saturates else FLOAT64.inf if fmt.has_inf else FLOAT64.nan
    finite = beyond if spec.overflow is Overflow.IEEE else largest
    infinity = largest if spec.overflow is Overflow.SATURATE else beyond
    return np.array([fmt.precision, fmt.emin, largest, finite, infinity], np.int64)


#: float64 itself, which rounds nothing.
FLOAT64_ROW = np.array([FLOAT64.fraction + 1, 1 - FLOAT64.bias, FLOAT64.inf - 1, FLOAT64.inf, FLOAT64.inf], np.int64)


def _round_bits_to_row(x: Array, row: Array) -> Array:
    """Numbers rounded to nearest even in float formats that are data: rows of precision, emin and three limits."""
    precision, emin, largest, finite, infinity = (row[..., i] for i in range(5))
    bits = lax.bitcast_convert_type(x, jnp.int64)
    magnitude = bits & jnp.int64((1 << 63) - 1)
    exponent = (magnitude >> FLOAT64.fraction) - FLOAT64.bias
    fraction = magnitude & jnp.int64((1 << FLOAT64.fraction) - 1)
    excess = (FLOAT64.fraction + 1 - precision) + jnp.maximum(emin - exponent, 0)
    shift = jnp.minimum(excess, FLOAT64.fraction)
    last_bit = ((fraction | jnp.int64(1 << FLOAT64.fraction)) >> shift) & 1
    half = (jnp.int64(1) << shift) >> 1
    new_magnitude = magnitude + jnp.where(shift > 0, half - 1 + last_bit, 0)
    new_magnitude = (new_magnitude >> shift) << shift
    # Below the smallest value: from half of it on, which is a tie, up to it.
    smallest = jnp.where(fraction == 0, jnp.int64(0), (exponent + 1 + FLOAT64.bias) << FLOAT64.fraction)
    new_magnitude = jnp.where(
        excess <= FLOAT64.fraction, new_magnitude, jnp.where(excess == FLOAT64.fraction + 1, smallest, 0)
    )
    new_magnitude = jnp.where(new_magnitude > largest, finite, new_magnitude)
    new_magnitude = jnp.where(magnitude == FLOAT64.inf, infinity, new_magnitude)
    new_magnitude = jnp.where(magnitude > FLOAT64.inf, magnitude, new_magnitude)
    return lax.bitcast_convert_type(new_magnitude | (bits & jnp.int64(-(1 << 63))), jnp.float64)


#: Compiled apart: fused, it would be computed again for each use of its result.
_round_to_row_op = make_op("jchop_round_to_row", _round_bits_to_row, no_inline=True)


def round_to_row(x: Array, row: Array) -> Array:
    """float64 numbers rounded to the format of a row, in an array of any shape."""
    return _round_to_row_op(x, row)


_ROW_OF_44_BITS = np.array([44, *FLOAT64_ROW[1:]], np.int64)


# -- programs ---------------------------------------------------------------------------------------------------------

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
        name: jnp.asarray(np.stack([format_row(c.spec) if c.spec else _ROW_OF_DTYPE[name] for c in menu]))[levels]
        for name in sorted(dtypes)
    }
    return interpret(_LevelRunner(sites, menu, levels, rows, max_turns), plan, None, values, consts)


@dataclass
class _LevelRunner(Runner):
    """Runs one plan. It knows the results that are already in the format of a site."""

    differentiates = False
    sites: dict[int, int]
    menu: Sequence[ArithmeticChoice]
    levels: Array
    rows: dict[str, Array]
    max_turns: int
    #: By the identity of a value, which is kept.
    formats_of_values: dict[int, tuple[Any, tuple[int, str]]] = field(default_factory=dict)
    results_of_rounding: dict[tuple[int, int, str], Array] = field(default_factory=dict)

    def finish(self, value: Any, seeds: Any) -> Any:
        """A result of a program."""
        return _as_float64(value)

    def run(self, part: EmulatedStep, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of one equation."""
        args = list(map(_as_float64, args))
        site = self.sites.get(id(part))
        if site is None or part.kind in ("structural", "extremum", "own", "carrier"):
            return self._run_without_rounding(part, args)
        if part.kind not in ("made", "result", "converted"):
            args = self._round_all(args, part.eqn.invars, site)
        return self._round_all(_TUNABLE_BY_KIND[part.kind](self, part, site, args), part.eqn.outvars, site)

    def _round_all(self, values: Sequence[Any], variables: Sequence[Any], site: int) -> list[Any]:
        return [
            self._round(x, site, v.aval.dtype.name) if _is_carrier_aval(v.aval) else x
            for x, v in zip(values, variables, strict=True)
        ]

    def _round(self, x: Array, site: int, dtype: str) -> Array:
        """A value in the format of a site; each value is rounded once for a site and dtype."""
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
        if step.kind not in ("exact", "structural", "extremum", "elementary"):
            return _bind_in_carrier(step, args)
        out = bind(step.eqn.primitive, step.eqn.params, *args)
        if step.kind in ("exact", "elementary"):
            return out
        numbers = [x for x, v in zip(args, step.eqn.invars, strict=True) if _is_carrier_aval(v.aval)]
        key, *others = {self.formats_of_values.get(id(x), (x, None))[1] for x in numbers} or {None}
        if key is not None and not others:
            self.formats_of_values.update({id(x): (x, key) for x in out})
        return out

    # -- equations that hold programs ----------------------------------------------------------------------------------

    def control(self, step: EmulatedStep, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of an equation that holds programs."""
        args = [_as_float64(x) for x in args]
        if step.name not in CONTROL:
            return self._inner(step.inner[0], None, args)
        return self.enter(step, None, args, self._inner)

    def _inner(self, plan: ProgramPlan, seeds: Any, args: Sequence[Any]) -> list[Any]:
        runner = replace(self, formats_of_values={}, results_of_rounding={})
        return interpret(runner, plan, None, args, [_as_float64(x) for x in plan.consts])

    def at_limit(self, step: EmulatedStep, loop: WhileParts, last: Any, count: Array, stopped: Array) -> list[Any]:
        """The values of a loop, NaN if its condition still holds."""
        hit_limit = stopped & loop.goes_on(last, count)
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


def _in_carrier(step: EmulatedStep, args: Sequence[Any]) -> list[Any]:
    """Operands as the program has them."""
    pairs = zip(args, step.eqn.invars, strict=True)
    return [x.astype(v.aval.dtype) if _is_carrier_aval(v.aval) else x for x, v in pairs]


def _bind_in_carrier(step: EmulatedStep, args: Sequence[Any], **params: Any) -> list[Any]:
    """The results of an equation in the carrier, not rounded."""
    return list(map(_as_float64, bind(step.eqn.primitive, {**step.eqn.params, **params}, *_in_carrier(step, args))))


# -- operations by kind; operands and results are rounded around them --------------------------------------------------


def _tunable_power(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    """A power to an integer by squaring, every product rounded to the traced format."""
    (x,), exponent, dtype = args, step.eqn.params["y"], step.eqn.outvars[0].aval.dtype.name
    total, square, n = None, x, abs(exponent)
    while n:
        if n & 1:
            total = square if total is None else run._round(total * square, site, dtype)
        n >>= 1
        if n:
            square = run._round(square * square, site, dtype)
    one = run._round(jnp.ones_like(x), site, dtype)
    return [one if total is None else total if exponent > 0 else one / total]


def _tunable_elementary(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    """The exact value to 44 digits for the formats in which `emulate` rounds it, else the carrier's."""
    is_exact = [choice.spec is not None and supports_function(step.name, choice.spec) for choice in run.menu]
    if not any(is_exact):
        return _bind_in_carrier(step, args)
    result = _round_bits_to_row(bind(step.eqn.primitive, step.eqn.params, *args)[0], jnp.asarray(_ROW_OF_44_BITS))
    if not all(is_exact):
        result = jnp.where(jnp.asarray(is_exact)[run.levels[site]], result, _bind_in_carrier(step, args)[0])
    return [result]


def _tunable_sum(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    """The carrier's sum, or the sum of the site's rule."""
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
    chosen = replace(step, choice=choice, known=(choice.spec,) * len(args))
    return list(map(_as_float64, accumulate_in_order(chosen, None, _in_carrier(step, args))))


def _tunable_linalg(run: _LevelRunner, step: EmulatedStep, site: int, args: list[Any]) -> list[Any]:
    steps = _RowSteps(partial(round_to_row, row=run.rows[step.eqn.outvars[0].aval.dtype.name][site]))
    return list(map_matrices(step, args, lambda index, matrix: steps))


_TUNABLE_BY_KIND: dict[str, Callable[[_LevelRunner, EmulatedStep, int, list[Any]], list[Any]]] = {
    "exact": lambda run, step, site, args: bind(step.eqn.primitive, step.eqn.params, *args),
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


@dataclass
class _RowSteps:
    """The arithmetic of the algorithms of linear algebra, as `Steps` has it; `_TUNABLE_LINALG` uses no more."""

    round: Callable[[Array], Array]

    def at(self, step: Any) -> _RowSteps:
        return self

    def sub(self, x: Array, y: Array) -> Array:
        return self.round(x - y)

    def mul(self, x: Array, y: Array) -> Array:
        return self.round(x * y)

    def div(self, x: Array, y: Array) -> Array:
        return self.round(x / y)
