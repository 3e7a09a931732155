"""`jchop.significant_digits`: the decimal digits of a result that rounding errors leave."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jchop._common.checks import call_hint, check, check_float, check_instance, check_int
from jchop._common.text import RowReport, TableOrLine, plain_data
from jchop._emulate.emulate import EmulatedFunction, call_seeds, round_on_entry
from jchop._emulate.paired import MOST_REPORT_TURNS, SILENT_KINDS, step_label, walk_sources
from jchop._emulate.rules.interpret import EagerRunner, round_operands
from jchop._emulate.rules.rules import EXACT, Settings, is_carrier_float, make_settings
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._emulate.rules.trace import EmulatedProgram, trace_program
from jchop._insight.reports.report import PlacedRow, refuse_tracers, unbind_method
from jchop._program.control import as_jax_value, copy_if_reference, where_active
from jchop._program.lanes import (
    LaneRunner,
    align_shard_axes,
    bind_shards,
    broadcast_to_shards,
    map_shards,
    stack_turns,
    with_vmap_collective,
)
from jchop._program.run import interpret
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, user_line
from jchop._program.stopped_loops import COMPARISONS
from jchop._round.arguments import check_key
from jchop._spec.spec import SpecLike
from jchop.formats import FloatFormat

#: A value in every sample.
ValueSamples = list[Any]
SampleSeeds = Sequence[Seeds | None]
#: A sum or difference that loses this many digits counts as a cancellation, as in CADNA.
_CANCELLATION_DIGITS = 4.0
_DEFAULT_SPEC = "binary32:stochastic"
_SCATTER_SUMS = frozenset(("scatter-add", "scatter-sub"))
#: Sums of many terms.
_TERM_SUMS = frozenset(("reduce_sum", "cumsum", "reduce_window_sum", "psum", "psum_invariant")) | _SCATTER_SUMS
#: Sums of products.
_PRODUCT_SUMS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))
#: The equations whose digits are compared with the digits of their operands.
_CANCELLATION_OPS = _TERM_SUMS | _PRODUCT_SUMS | {"add", "sub", "div"}
#: The kinds of equations that round nothing, or the exact result.
_EXACT_KINDS = SILENT_KINDS | {"exact", "power"}


@dataclass(frozen=True)
class Instability(PlacedRow):
    """Operations of one kind and line of source whose operands or outcomes have too few digits.

    Args:
        kind: ``"branching"``: comparisons with different outcomes in different samples. ``"cancellation"``: sums and
            differences with at least four digits fewer than their operands. A sum of many terms is compared with the
            digits that it would have if no terms cancelled. ``"division"``: quotients with a divisor of less than one
            digit. Operations inside factorizations and solvers (``lu``, ``cholesky``, ``triangular_solve``, ``eigh``)
            are left out.
        count: the number of these results, in all turns of loops.
        primitive: the name of the primitive.
        scope: the path of `jax.named_scope` and `jax.jit` names; empty outside of all.
        source: file and line, as in `jchop.EmulatedFunction.report`.
    """

    kind: str
    count: int
    primitive: str
    scope: str
    source: str


@dataclass(frozen=True)
class SignificantDigits(RowReport):
    """The result of `jchop.significant_digits`; its ``str`` is a table.

    Args:
        digits: the significant decimal digits of each number of the result, from 0 to `most`: NumPy float64 in the tree
            of the result. Below 1 no digit can be trusted. None for a leaf of random keys.
        mean: the means of the samples, in the same tree.
        spread: their standard deviations.
        most: the digits of the format, p·log10(2) for p significant bits.
        samples: the number of samples.
        instabilities: operations that explain a loss, the largest count first.
        notes: sentences about stopped loops.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> found = jc.significant_digits(lambda x: (x + 1e6) - 1e6, 0.1, key=jax.random.key(0))
        >>> found.worst < 2, [row.kind for row in found.instabilities]
        (True, ['cancellation'])
    """

    digits: Any
    mean: Any
    spread: Any
    most: float
    samples: int
    instabilities: tuple[Instability, ...] = ()
    notes: tuple[str, ...] = ()

    _align, _rows_field = "<><<<", "instabilities"

    @property
    def worst(self) -> float:
        """The fewest digits of any number; NaN if there is none."""
        return min((float(np.min(x)) for x in jax.tree.leaves(self.digits) if x.size), default=math.nan)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain data for JSON, with the leaves of the result by path."""

        def by_path(tree: Any) -> dict[str, Any]:
            leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
            return {jax.tree_util.keystr(path): _strict_json(np.asarray(x).tolist()) for path, x in leaves}

        out = {name: by_path(getattr(self, name)) for name in ("digits", "mean", "spread")}
        return out | {name: plain_data(getattr(self, name)) for name in ("most", "samples", "instabilities", "notes")}

    def _parts(self) -> Iterator[TableOrLine]:
        leaves = [np.ravel(x) for x in jax.tree.leaves(self.digits)]
        numbers = np.concatenate(leaves) if leaves else np.zeros(0)
        if numbers.size == 1:
            yield f"significant digits: {_digits_text(numbers[0])} of {self.most:.1f} ({self.samples} samples)"
        elif numbers.size:
            worst, median = _digits_text(float(np.min(numbers))), _digits_text(float(np.median(numbers)))
            without_digits = int(np.sum(numbers < 1))
            yield f"significant digits of {numbers.size} numbers: worst {worst}, median {median} of {self.most:.1f}"
            yield f"{without_digits} numbers have none ({self.samples} samples)"
        if self.instabilities:
            rows = [(r.kind, str(r.count), r.primitive, r.scope, r.place) for r in self.instabilities]
            yield [("unstable", "count", "primitive", "scope", "source"), *rows]
        yield from self.notes


def _digits_text(digits: float) -> str:
    return "none" if digits < 1 else f"{digits:.1f}"


def _strict_json(value: Any) -> Any:
    """A value whose numbers that are not finite are None; a complex number is the list of its parts."""
    if isinstance(value, list):
        return [_strict_json(x) for x in value]
    if isinstance(value, complex):
        return [_strict_json(value.real), _strict_json(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@call_hint("jchop.significant_digits(fun, x, key=jax.random.key(0))")
def significant_digits(
    fun: Callable[..., Any],
    *args: Any,
    key: Array,
    samples: int = 3,
    spec: SpecLike | None = None,
    confidence: float = 0.95,
    max_turns: int = MOST_REPORT_TURNS,
    narrow: Literal["raise", "carrier"] = "raise",
    **kwargs: Any,
) -> SignificantDigits:
    """Estimates the significant decimal digits of a program's result from runs with random roundings.

    The program runs `samples` times with stochastic rounding, each time with other draws. Let m be the mean and s the
    standard deviation of N samples. Then log10(√N·abs(m) / (τ·s)) digits are common to the samples and the exact
    result, with the given confidence. The quantile of Student's distribution with N - 1 degrees of freedom is τ: 4.303
    for N = 3 and 0.95. The method is CESTAC (J. Vignes, "Discrete stochastic arithmetic for validating results of
    numerical software", Numerical Algorithms 37, 2004). It assumes that the rounding errors are small against the
    values. Read less than one digit as none, and look at `instabilities`. The samples do not show a bias that all of
    them share, as the truncation error of a method.

    Every sample has its own branches and turns of loops. The operations run one after the other, outside of `jax.jit`.
    Operations inside `jax.shard_map` run for all shards at once.

    Args:
        fun: a function that JAX can trace. It runs in float64 with every operation rounded to `spec`; its float
            arguments are converted to float64. A function from `jchop.emulate` with stochastic rounding keeps its
            carrier and rules.
        *args: its arguments.
        key: a typed key. Sample i of a function from `emulate` is ``fun(*args, key=jax.random.fold_in(key, i))``.
        samples: the number of runs, at least 2. Default 3, as in CADNA. Few different values remain after a
            cancellation, and few samples may agree by chance. More samples give a sharper estimate.
        spec: a stochastic rounding. Default None: ``"binary32:stochastic"``; for a function from `emulate`, its own.
        confidence: the probability, between 0 and 1.
        max_turns: the most turns of a `while` loop. A stopped loop has a note and a `RuntimeWarning`.
        narrow: the treatment of arrays of fewer bits than float64 in `fun`, as from ``jnp.float32(0)``. ``"raise"``
            (default) raises an error where they do not mix with float64, or have no digits beyond the format's.
            ``"carrier"`` computes them in float64. A function from `emulate` keeps its own.
        **kwargs: keyword arguments of the function.

    Returns:
        A `SignificantDigits`.

    Raises:
        TypeError: for an argument of another type, or traced arguments. With ``narrow="raise"``, also for a `fun` that
            mixes its arguments with values of a fixed dtype, because it cannot run in float64.
        ValueError: for a spec without draws, fewer than 2 samples, or a confidence outside of (0, 1).

    Example:
        >>> import jax, jchop as jc
        >>> found = jc.significant_digits(lambda x: x / 3, 1.0, key=jax.random.key(0))
        >>> bool(found.digits > 6), round(found.most, 2)
        (True, 7.22)
    """
    check_key("key", key)
    samples = check_int("samples", samples, 2, 1 << 16)
    max_turns = check_int("max_turns", max_turns, 1, (1 << 32) - 1)
    confidence = check_float("confidence", confidence, 0, 1, "()")
    fun, args = unbind_method(fun, args)
    refuse_tracers("significant_digits", (args, kwargs))
    if isinstance(fun, EmulatedFunction):
        check(spec is None, f"spec={spec!r}: a function from emulate has its own arithmetic; leave spec out")
        check(narrow == "raise", f"narrow={narrow!r}: a function from emulate has its own; pass it to emulate")
        program = trace_program(fun.fun, _require_stochastic(fun.settings), args, kwargs)
        return _measure_digits(fun.settings, program, key, samples, confidence, max_turns)
    check_instance("fun", fun, Callable, "a function")
    settings = make_settings(_DEFAULT_SPEC if spec is None else spec, None, None, "raise", narrow=narrow)
    own_x64 = jax.enable_x64(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    with jax.enable_x64(True):
        program = _trace_in_float64(fun, _require_stochastic(settings), args, kwargs, own_x64)
        return _measure_digits(settings, program, key, samples, confidence, max_turns)


def _trace_in_float64(fun: Callable[..., Any], settings: Settings, args: Any, kwargs: Any, x64: Any) -> EmulatedProgram:
    """The program of a function of float64 arguments; `x64` is the context of its own dtypes."""
    widens, run = settings.narrow == "carrier", fun
    if widens:
        run = lambda *args, **kwargs: jax.tree.map(_number_in_float64, fun(*args, **kwargs))  # noqa: E731
    try:
        return trace_program(run, settings, *jax.tree.map(_number_in_float64, (args, kwargs)))
    except TypeError as error:
        with x64:  # its own error, if it has one
            program = trace_program(fun, make_settings(None, None, None, "carrier"), args, kwargs)
        if widens:
            source = ClosedJaxpr(program.source, program.plan.consts)

            def rerun(*values: Any) -> Any:
                """The results of the program of other dtypes."""
                args = [
                    lax.convert_element_type(x, v.aval.dtype) for x, v in zip(values, source.jaxpr.invars, strict=True)
                ]
                return jax.tree.unflatten(program.tree, list(map(_number_in_float64, jaxpr_as_fun(source)(*args))))

            return trace_program(rerun, settings, list(map(_number_in_float64, program.values)), {})
        reason = str(error).splitlines()[0].rstrip(":")
        raise TypeError(
            f"fun={fun!r} does not run in float64: it mixes its arguments, which are float64 here, with values of a "
            "fixed dtype such as jnp.float32(0); pass narrow='carrier', which computes those in float64, or give them "
            f"the dtype of an argument, as in jnp.zeros((), x.dtype). JAX: {reason}"
        ) from error


def _require_stochastic(settings: Settings) -> Settings:
    check(settings.stochastic, f"spec={str(settings.spec)!r} rounds to one value; a stochastic spec is needed")
    return settings


def _number_in_float64(x: Any) -> Any:
    if not isinstance(x, Array | np.ndarray | np.generic) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
    return x.astype(wide) if isinstance(x, jax.core.Tracer) else np.asarray(x).astype(wide)


def _measure_digits(
    settings: Settings, program: EmulatedProgram, key: Array, samples: int, confidence: float, max_turns: int
) -> SignificantDigits:
    fmt = None if settings.spec is None else settings.spec.format
    bits = fmt.precision if isinstance(fmt, FloatFormat) else 53
    factor = math.sqrt(samples) / student_quantile(samples - 1, confidence)
    measure = _DigitsMeasure(factor, bits * math.log10(2))
    _check_carrier_digits(program.plan)
    seeds = [call_seeds(settings, jax.random.fold_in(key, i)) for i in range(samples)]
    entries = [round_on_entry(program, settings.spec, sample_seeds) for sample_seeds in seeds]
    # Each sample writes to its own references.
    values, constants = (
        [list(map(copy_if_reference, many)) for many in zip(*(e[i] for e in entries), strict=True)] for i in (0, 1)
    )
    call_line = user_line()
    sample_run = _SampleRun(measure, max_turns, range(samples))
    results = interpret(sample_run, program.plan, [e[2] for e in entries], values, constants)
    for note in dict.fromkeys(sample_run.notes):
        warnings.warn(note, RuntimeWarning, stacklevel=4)
    is_key = [jnp.issubdtype(as_jax_value(many[0]).dtype, jax.dtypes.extended) for many in results]
    facts = [(None,) * 3 if key else measure.facts(many) for key, many in zip(is_key, results, strict=True)]
    digits, mean, spread = (jax.tree.unflatten(program.tree, [fact[i] for fact in facts]) for i in range(3))
    rows = tuple(_instability_rows(walk_sources(program.plan, call_line), sample_run.counts))
    return SignificantDigits(digits, mean, spread, measure.most, samples, rows, tuple(dict.fromkeys(sample_run.notes)))


def _check_carrier_digits(plan: ProgramPlan) -> None:
    """Refuses operations whose results in the carrier have no bits below the format's, so that nothing draws."""
    for step in plan.walk():
        spec = step.choice.spec
        if spec is None or not spec.rounding.stochastic or not isinstance(spec.format, FloatFormat):
            continue
        for v in step.eqn.outvars if step.kind not in _EXACT_KINDS else ():
            if is_carrier_float(v.aval) and jnp.finfo(v.aval.dtype).nmant < spec.format.precision:
                raise ValueError(
                    f"primitive {step.name!r} (scope {step.scope!r}) gives {v.aval.dtype.name}, which has no digits "
                    f"below those of {spec.format}, so its rounding cannot draw; pass narrow='carrier', which leaves "
                    f"out the conversion to {v.aval.dtype.name}, or a spec of fewer bits"
                )


def _instability_rows(steps: Any, counts: Counter[tuple[int, str]]) -> list[Instability]:
    by_id = {id(step): (step, source) for step, _, source in steps}
    groups: Counter[tuple[str, str, str, str]] = Counter()
    for (number, kind), count in counts.items():
        step, source = by_id[number]
        groups[kind, step_label(step), step.scope, source] += count
    return [Instability(kind, count, *place) for (kind, *place), count in groups.most_common()]


def student_quantile(freedom: int, confidence: float) -> float:
    """The number that the magnitude of Student's t does not exceed with this probability."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_probability(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _student_probability(angle: float, freedom: int) -> float:
    """P(|t| ≤ √freedom·tan angle): Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    odd, cos = freedom % 2, math.cos(angle)
    term, total = cos if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cos * cos * k / (k + 1)
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


@dataclass(frozen=True)
class _DigitsMeasure:
    """The digits of samples: `factor` is √N / τ, `most` the digits of the format."""

    factor: float
    most: float

    def facts(self, many: ValueSamples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The digits, mean and standard deviation of samples; a complex number has the digits of its worse part."""
        stacked = np.stack([np.asarray(x) for x in many])
        if np.iscomplexobj(stacked):
            real, imaginary = (self.facts(list(part)) for part in (np.real(stacked), np.imag(stacked)))
            spread = np.hypot(real[2], imaginary[2])
            return np.minimum(real[0], imaginary[0]), real[1] + 1j * imaginary[1], spread
        stacked = stacked.astype(np.float64)
        with np.errstate(all="ignore"):
            deviations = stacked - stacked[0]  # equal samples have a spread of exactly zero
            mean, spread = stacked[0] + deviations.mean(0), deviations.std(0, ddof=1)
        return np.where(np.all(np.isfinite(stacked), axis=0), self.digits(mean, spread), 0.0), mean, spread

    def digits(self, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
        """The digits of numbers with this mean and standard deviation."""
        with np.errstate(all="ignore"):
            digits = np.log10(self.factor * np.abs(mean) / spread)
        return np.clip(np.where(spread == 0, self.most, digits), 0, self.most)


@dataclass
class _SampleRun(LaneRunner):
    """A run of a program in several samples at once, each with its own branches and turns of loops.

    A value has None for samples that do not run.
    """

    measure: _DigitsMeasure
    max_turns: int
    lanes: Sequence[int]
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner, self.samples = EagerRunner(self.max_turns), len(self.lanes)

    def constant(self, value: Any) -> ValueSamples:
        """A constant or a literal."""
        return [broadcast_to_shards(value, self.axes)] * self.samples

    def map_lanes(self, move: Callable[[Any], Any], value: ValueSamples) -> ValueSamples:
        """The value with its numbers in another place."""
        return [None if x is None else move(x) for x in value]

    def stack(self, rows: list[ValueSamples], aval: Any) -> ValueSamples:
        """The results of the turns of a scan along a first axis."""
        return self._by_lane([stack_turns([row[i] for row in rows], aval, self.axes) for i in self.lanes])

    def choose(self, active: Mapping[int, Any], new: ValueSamples, old: ValueSamples) -> ValueSamples:
        """The new values where samples are active; else the old ones."""
        return [
            x if i not in active else as_jax_value(y) if x is None else where_active(active[i], as_jax_value(y), x)
            for i, (y, x) in enumerate(zip(new, old, strict=True))
        ]

    def rounded_operands(self, step: EmulatedStep, seeds: SampleSeeds, args: list[ValueSamples]) -> list[ValueSamples]:
        """The operands of an equation that holds programs; the operands that the plan marks are rounded."""
        return list(map(self._by_lane, self._run_each(partial(round_operands, step), seeds, args)))

    def run(self, part: EmulatedStep, seeds: SampleSeeds, args: list[ValueSamples]) -> list[ValueSamples]:
        """The results of one equation, whose instabilities are counted."""
        step = with_vmap_collective(part, self.axes)
        results = self._run_each(partial(self.runner.run, step), seeds, args)
        if len(self.lanes) > 1:
            self._count_unstable(part, seeds, args, results)
        return list(map(self._by_lane, results))

    def _run_each(
        self, run: Callable[[Seeds | None, list[Any]], Any], seeds: SampleSeeds, args: list[ValueSamples]
    ) -> list[ValueSamples]:
        """The results of ``run(seeds, args)``, each in the samples that run."""
        by_sample = [map_shards(self.axes, run, seeds[i], [many[i] for many in args]) for i in self.lanes]
        return list(map(list, zip(*by_sample, strict=True)))

    def _by_lane(self, many: Sequence[Any]) -> ValueSamples:
        """A value in all samples, of one in those that run."""
        value = dict(zip(self.lanes, many, strict=True))
        return [value.get(i) for i in range(self.samples)]

    def _count_unstable(
        self, step: EmulatedStep, seeds: SampleSeeds, args: list[ValueSamples], results: list[ValueSamples]
    ) -> None:
        """Counts the instabilities of one equation."""
        if step.name in COMPARISONS:
            outcomes = np.stack(list(map(np.asarray, results[0])))
            self._count(step, "branching", np.any(outcomes != outcomes[0], axis=0))
            return
        name = EXACT.get(step.name, step.name)
        if name not in _CANCELLATION_OPS or step.choice.spec is None or not is_carrier_float(step.eqn.outvars[0].aval):
            return
        after = [] if name == "div" else [self.measure.facts(many)[0] for many in results]
        if after and all(np.all(x > self.measure.most - _CANCELLATION_DIGITS) for x in after):
            return  # no operand has more than the most digits
        operands = self._run_each(partial(self.runner.prepare_operands, step), seeds, args)
        if name in _TERM_SUMS | _PRODUCT_SUMS:
            before = self._digits_without_cancellation(with_vmap_collective(step, self.axes), operands)
        else:
            shape = results[0][0].shape
            facts = [self.measure.facts(many)[0] for many in operands[name == "div" :]]
            before = [np.minimum.reduce([np.broadcast_to(align_shard_axes(x, len(shape)), shape) for x in facts])]
        if name == "div":
            self._count(step, "division", before[0] < 1)
        for digits, rest, many in zip(before, after, results, strict=False):
            finite = np.all([np.isfinite(np.asarray(x)) for x in many], axis=0)  # an overflow cancels nothing
            self._count(step, "cancellation", finite & (digits - rest >= _CANCELLATION_DIGITS))

    def _digits_without_cancellation(self, step: EmulatedStep, operands: list[ValueSamples]) -> list[np.ndarray]:
        """The digits of sums of many terms, had no terms cancelled.

        Then the square of a sum is as large as the sum of the squares of its terms, and so is its spread's. So a term
        that is small and noisy does not count: it does not spread the sum.
        """
        eqn = step.eqn
        real = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars]
        params = {name: None if name == "preferred_element_type" else x for name, x in eqn.params.items()}
        if step.name in _SCATTER_SUMS:  # these hold the addition of two numbers of their dtype
            params = {name: x for name, x in params.items() if not name.startswith("update_")}

        def sum_of(*squares: np.ndarray) -> list[np.ndarray]:
            terms = iter(squares)
            args = [next(terms) if r else many[0] for many, r in zip(operands, real, strict=True)]
            if step.name in _SCATTER_SUMS:
                out = map_shards(self.axes, lambda _, args: [lax.scatter_add(*args, **params)], None, args)
            else:
                out = bind_shards(self.axes, eqn.primitive, params, args)
            return [np.asarray(x) for x in out]

        with np.errstate(all="ignore"), jax.enable_x64(True):  # type: ignore[attr-defined]
            facts = [self.measure.facts(many)[1:] for many, r in zip(operands, real, strict=True) if r]
            means, spreads = ([x * x for x in each] for each in zip(*facts, strict=True))
            if step.name in _PRODUCT_SUMS:
                (a, b), (da, db) = means, spreads
                noises = [x + y for x, y in zip(sum_of(da, b + db), sum_of(a, db), strict=True)]
            else:
                noises = sum_of(*spreads)
            sizes = sum_of(*means)
            return [self.measure.digits(np.sqrt(x), np.sqrt(d)) for x, d in zip(sizes, noises, strict=True)]

    def _count(self, step: EmulatedStep, kind: str, unstable: np.ndarray) -> None:
        if count := int(np.sum(unstable)):
            self.counts[id(step), kind] += count
