"""`jchop.tune`: the cheapest formats for the operations of a program within a tolerance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import call_hint, check, check_choice, check_float, check_instance, check_int, short_repr
from jchop._common.text import PictureReport, TableOrLine, plain_data
from jchop._emulate.emulate import EmulatedFunction
from jchop._emulate.paired import SILENT_KINDS, as_double_precision, walk_sources
from jchop._emulate.rules.rules import CARRIER_DTYPES, ArithmeticChoice, Settings, make_settings
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._emulate.rules.trace import EmulatedProgram, ProgramCache, as_program_arguments
from jchop._insight.reports.report import refuse_tracers, unbind_method
from jchop._insight.tune._search import AssignmentSearch, Trial
from jchop._insight.tune._traced_formats import is_plan_traceable, run_with_levels
from jchop._program.step import ProgramPlan
from jchop._quantized.program.call import batch_arguments
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop.formats import FloatFormat

ErrorMetric = Callable[[Any, Any], Any]
#: The values of `by`.
GRANULARITIES = ("scope", "equation")


def _norm_of_leaves(values: list[np.ndarray]) -> float:
    return math.sqrt(math.fsum(float(np.sum(np.abs(x) ** 2)) for x in values))


#: Of the errors of all numbers of a result, and the result: the norm over the result's norm, the norm, the largest.
ERROR_METRICS: dict[str, Callable[[list[np.ndarray], list[np.ndarray]], float]] = {
    "relative": lambda errors, exact: _norm_of_leaves(errors) / (_norm_of_leaves(exact) or 1.0),
    "absolute": lambda errors, exact: _norm_of_leaves(errors),
    "largest": lambda errors, exact: max(float(np.max(np.abs(x), initial=0.0)) for x in errors),
}


def error_by_metric(metric: str | ErrorMetric, low: Any, exact: Any) -> float:
    """The error by name, or by a function of both results; not finite becomes infinite.

    By name, an infinity or NaN that both results have in the same place is no error.

    Raises:
        ValueError: for a negative error.
        TypeError: for a function that gives no number.
    """
    if callable(metric):
        out = np.asarray(metric(low, exact))
        if out.size != 1 or (out.dtype.kind not in "fiu" and not jnp.issubdtype(out.dtype, jnp.floating)):
            raise TypeError(f"metric={metric!r} must give a real number, but gives {out!r}")
        number = float(out.reshape(()))
    else:
        pairs = list(zip(_inexact_leaves(low), _inexact_leaves(exact), strict=True))
        with np.errstate(all="ignore"):
            common = [~np.isfinite(y) & ((x == y) | (np.isnan(x) & np.isnan(y))) for x, y in pairs]
            errors = [np.where(c, 0, x) - np.where(c, 0, y) for c, (x, y) in zip(common, pairs, strict=True)]
            number = ERROR_METRICS[metric](errors, [np.where(c, 0, y) for c, (_, y) in zip(common, pairs, strict=True)])
    if number < 0:
        raise ValueError(f"metric={metric!r} gave {number}; an error is not negative")
    return number if math.isfinite(number) else math.inf


def _inexact_leaves(tree: Any) -> list[np.ndarray]:
    leaves = (leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact))
    return list(map(as_double_precision, leaves))


# -- sites ------------------------------------------------------------------------------------------------------------

#: Functions whose results need no more digits than their operands.
_INHERITING_PRIMITIVES = frozenset({"neg", "abs", "floor", "ceil", "round", "sign"})

#: The scope and the primitive of equations.
ScopePrimitive = tuple[str, str]


@dataclass
class TuningSite:
    """The equations that share a format.

    Args:
        path: their scope, and by equation the primitive; ``"/"`` is the scope outside of all.
        pattern: of the rule.
        equations: their number.
        results: the count of results, with all turns of scans.
        bits: the bits of a result in the carrier.
        pairs: their scopes and primitives.
        sums: the scopes and primitives of sums.
    """

    path: str
    pattern: str
    equations: int = 0
    results: int = 0
    bits: int = 0
    pairs: set[ScopePrimitive] = field(default_factory=set)
    sums: set[ScopePrimitive] = field(default_factory=set)

    def bits_in(self, spec: Spec | None) -> int:
        """The bits of a result in a format; None is the carrier."""
        return self.bits if spec is None else spec.format.bits


def tuning_sites(plan: ProgramPlan, by: str) -> tuple[list[TuningSite], dict[int, int], set[ScopePrimitive]]:
    """The sites, the number of the site of each step by its id, and scopes and primitives without a site."""
    sites: dict[str, TuningSite] = {}
    steps = [(step, runs) for step, runs, _ in walk_sources(plan, "") if step.kind != "own"]
    pairs = {(step.scope, step.name) for step, _ in steps if _makes_errors(step)}
    path_of_step: dict[int, str] = {}
    for step, iterations in steps:
        if (step.scope, step.name) not in pairs:
            continue
        path = "/".join(part for part in (step.scope, step.name if by == "equation" else "") if part) or "/"
        pattern = _site_pattern(step.scope, step.name if by == "equation" else None)
        site = sites.setdefault(path, TuningSite(path, pattern))
        path_of_step[id(step)] = path
        site.pairs.add((step.scope, step.name))
        if step.kind == "accumulating":
            site.sums.add((step.scope, step.name))
        avals = [v.aval for v in step.eqn.outvars if is_inexact_aval(v.aval)]
        site.equations += bool(avals)
        site.results += iterations * sum(math.prod(aval.shape) for aval in avals)
        site.bits = max([site.bits, *(8 * aval.dtype.itemsize for aval in avals)])
    site_index = {path: i for i, path in enumerate(sites)}
    others = {(step.scope, step.name) for step, _ in steps} - pairs
    return list(sites.values()), {key: site_index[path] for key, path in path_of_step.items()}, others


def _makes_errors(step: EmulatedStep) -> bool:
    """Whether the results of an equation may need more digits than its operands; else it inherits their format."""
    if step.kind in SILENT_KINDS or step.kind == "carrier" or step.name in _INHERITING_PRIMITIVES:
        return False
    if step.name == "convert_element_type" and is_inexact_aval(step.eqn.invars[0].aval):
        return False  # the program chooses the dtype
    return any(is_inexact_aval(v.aval) for v in step.eqn.outvars)


def is_inexact_aval(aval: Any) -> bool:
    """Whether a value has a real or complex dtype."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _site_pattern(scope: str, primitive: str | None) -> str:
    """A pattern that matches this scope alone, with any primitive or with this one."""
    parts = [_literal_pattern(scope)] if scope else []
    return "/" + "/".join([*parts, "*" if primitive is None else _literal_pattern(primitive)]) + "/"


def _literal_pattern(text: str) -> str:
    """A path as a pattern: any character stands for one that has a meaning in patterns."""
    return "".join("?" if char in "*?[]{}!, \\" else char for char in text)


def make_tuning_rules(
    sites: Sequence[TuningSite], others: set[ScopePrimitive], choices: Sequence[ArithmeticChoice]
) -> dict[str, Spec | MatmulSpec | None]:
    """The rules of `emulate` for an assignment, with the carrier for all else."""
    scopes = {scope for site in sites if site.pattern.endswith("/*/") for scope, _ in site.pairs}
    rest_of_scopes = {(scope, name) for scope, name in others if scope in scopes}
    site_names = {name for site in sites for _, name in site.pairs}
    names = sorted({name for _, name in rest_of_scopes} - site_names)
    # The rules of sums come first: None, the carrier, would end them.
    rules: dict[str, Spec | MatmulSpec | None] = {
        f"{_site_pattern(scope, None).removesuffix('*/')}{{{_literal_pattern(name)}}}/": choice.accumulate
        for site, choice in zip(sites, choices, strict=True)
        for scope, name in sorted(site.sums)
        if choice.accumulate is not None
    }
    if names:
        text = ",".join(map(_literal_pattern, names))
        rules[f"{{{text}}}/" if len(names) > 1 else f"{text}/"] = None
    rules |= {_site_pattern(scope, name): None for scope, name in sorted(rest_of_scopes) if name in site_names}
    return rules | {site.pattern: choice.spec for site, choice in zip(sites, choices, strict=True)}


@dataclass(frozen=True)
class TuningCase:
    """An input, its program and its exact result."""

    args: tuple[Any, ...]
    program: EmulatedProgram
    sites: dict[int, int]
    exact: Any


@dataclass
class TuningProblem:
    """A function, its sites and its inputs.

    Args:
        fun: the function.
        menu: the formats, from few bits to many, with the rules of sums.
        sites: the sites.
        others: scopes and primitives without a site.
        cases: the inputs.
        metric: the error of a result.
        max_turns: the most turns of a `while` loop.
        has_program: whether `error` runs the compiled program.
    """

    fun: Callable[..., Any]
    menu: tuple[ArithmeticChoice, ...]
    sites: list[TuningSite]
    others: set[tuple[str, str]]
    cases: list[TuningCase]
    metric: str | ErrorMetric
    max_turns: int
    has_program: bool
    _runs: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)

    def rules(self, assignment: Sequence[int]) -> dict[str, Spec | MatmulSpec | None]:
        """The rules of `emulate` for an assignment."""
        return make_tuning_rules(self.sites, self.others, [self.menu[level] for level in assignment])

    def error(self, assignment: Sequence[int]) -> float:
        """The largest error of all inputs."""
        if not self.has_program:
            return max(self.emulation_errors(assignment))
        return max(error_by_metric(self.metric, self.run_program(case, assignment), case.exact) for case in self.cases)

    def run_program(self, case: TuningCase, assignment: Sequence[int]) -> Any:
        """The result of the compiled program for an input."""
        plan = case.program.plan
        with jax.enable_x64(True):
            values, consts = ([_as_host_float64(x) for x in arrays] for arrays in (case.program.values, plan.consts))
            results = self.run_of(case)(np.asarray(assignment, np.int32), values, consts)
        avals = [v.aval for v in plan.jaxpr.outvars]
        out = [
            np.asarray(x).astype(aval.dtype) if aval.dtype.name in CARRIER_DTYPES else x
            for x, aval in zip(results, avals, strict=True)
        ]
        return jax.tree.unflatten(case.program.tree, out)

    def run_of(self, case: TuningCase) -> Callable[..., list[Any]]:
        """The compiled program of an input: of the number in the menu of each site, the arguments and the constants."""
        plan = case.program.plan
        if id(plan.steps) not in self._runs:
            self._runs[id(plan.steps)] = jax.jit(partial(run_with_levels, plan, case.sites, self.menu, self.max_turns))
        return self._runs[id(plan.steps)]

    def emulation_errors(self, assignment: Sequence[int], inputs: Sequence[TuningCase] | None = None) -> list[float]:
        """The error on each input of the function from `emulate`; a loop that was stopped has an infinite one."""
        settings = make_settings(None, self.rules(assignment), None, "raise", self.max_turns)
        low, errors = EmulatedFunction(self.fun, settings, None), []
        for case in self.cases if inputs is None else inputs:
            with warnings.catch_warnings(record=True) as records:
                warnings.simplefilter("always")
                error = error_by_metric(self.metric, low(*case.args), case.exact)
            hit_limit = any(
                issubclass(w.category, RuntimeWarning) and "loop was stopped" in str(w.message) for w in records
            )
            errors.append(math.inf if hit_limit else error)
        return errors

    def check(self) -> None:
        """Refuses sites that rules do not tell apart."""
        marks = [ArithmeticChoice(Spec("e8m1"), None), ArithmeticChoice(Spec("e8m2"), None)]
        for bit in range(len(self.sites).bit_length()):
            choices = [marks[site >> bit & 1] for site in range(len(self.sites))]
            settings = make_settings(None, make_tuning_rules(self.sites, self.others, choices), None, "raise")
            for case in self.cases:
                for step in (step for step in case.program.plan.walk() if step.kind != "own"):
                    site = case.sites.get(id(step))
                    if settings.choose(step.name, step.scope).spec != (None if site is None else choices[site].spec):
                        raise ValueError(
                            f"scope {step.scope!r}: no rule of emulate tells its {step.name!r} from other operations; "
                            "give the scope another name by jax.named_scope"
                        )


def _as_host_float64(x: Any) -> Any:
    """A value in float64 if it is real, converted on the host, which keeps subnormal numbers."""
    is_real = isinstance(x, float) or (hasattr(x, "dtype") and x.dtype.name in CARRIER_DTYPES)
    return np.asarray(x).astype(np.float64) if is_real else x


def make_tuning_problem(
    fun: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    held_out: Sequence[tuple[Any, ...]],
    menu: tuple[ArithmeticChoice, ...],
    by: str,
    metric: str | ErrorMetric,
    max_turns: int,
) -> tuple[TuningProblem, list[TuningCase]]:
    """The problem, and the cases of the inputs held out.

    Raises:
        ValueError: for a function without operations that make errors, or whose operations depend on the input. By
            name of a metric, for a result without a finite number.
    """
    mark = next(choice.spec for choice in menu if choice.spec is not None)
    programs = ProgramCache(fun, Settings(mark, (), None, "raise", max_turns))
    all_sites: list[TuningSite] | None = None
    others: set[tuple[str, str]] = set()
    plans: dict[int, dict[int, int]] = {}
    cases: list[TuningCase] = []
    for index, args in enumerate((*inputs, *held_out)):
        name = f"inputs[{index}]" if index < len(inputs) else f"held_out[{index - len(inputs)}]"
        program = programs.of(args, {})
        sites, site_of_step, other_pairs = tuning_sites(program.plan, by)
        if all_sites is None:
            all_sites = sites
        elif [site.path for site in sites] != [site.path for site in all_sites]:
            raise ValueError(f"{name} has other operations than inputs[0], so that no rules fit both")
        others |= other_pairs
        site_of_step = plans.setdefault(id(program.plan.steps), site_of_step)
        exact = fun(*as_program_arguments(args))
        if not callable(metric):
            # Refuses an input whose result in the carrier has no finite number: every error by name would be 0.
            numbers = _inexact_leaves(exact)
            if not any(np.isfinite(x).any() for x in numbers):
                kind = "finite" if numbers else "real"
                raise ValueError(
                    f"{name}: the result of fun has no {kind} number, so it has no error; pass a function as metric"
                )
        cases.append(TuningCase(args, program, site_of_step, exact))
    assert all_sites is not None
    check(all_sites, "fun has no operation that rounds, so there is nothing to tune")
    pairs = {pair for site in all_sites for pair in site.pairs}
    has_program = all(is_plan_traceable(case.program.plan, menu) for case in cases)
    problem = TuningProblem(fun, menu, all_sites, others - pairs, cases[: len(inputs)], metric, max_turns, has_program)
    problem.check()
    return problem, cases[len(inputs) :]


# == formats ===========================================================================================================


@dataclass(frozen=True)
class TunedSite:
    """The equations that share a format.

    Args:
        path: their scope, and with ``by="equation"`` the primitive; ``"/"`` is the scope outside of all.
        spec: their rounding as text; ``"carrier"`` for none. The rule of sums follows, if there is one.
        bits: the bits of a result.
        equations: their number.
        results: the count of their results, in all turns of scans.
        alone: the error if every other site has the most exact format of the menu; NaN if it was not measured.
    """

    path: str
    spec: str
    bits: int
    equations: int
    results: int
    alone: float = math.nan

    def _cells(self) -> tuple[str, ...]:
        """The row of the table."""
        alone = "" if math.isnan(self.alone) else f"{self.alone:.2g}"
        return self.path, self.spec, str(self.bits), str(self.equations), str(self.results), alone


@dataclass(frozen=True)
class TuningPoint:
    """A measured assignment that no other one beats in cost and error.

    Args:
        cost: its cost.
        error: its largest error of all inputs, as the search measured it.
        specs: the roundings of the sites as text, in the order of the rows.
    """

    cost: float
    error: float
    specs: tuple[str, ...]


@dataclass(frozen=True)
class Tuning(PictureReport):
    """The result of `jchop.tune`; its ``str`` is a table.

    Args:
        rules: for ``jchop.emulate(fun, None, rules=rules)``: a pattern for each site, with its spec or None,
            and for sums with a rule their `MatmulSpec`.
        rows: the sites, in the order of the program.
        tolerance: the largest error allowed.
        errors: the error on each input, of the function from `emulate` with these rules.
        held_out: the same on each input of `held_out`.
        cost: the cost of the assignment.
        cost_name: its unit.
        uniform: the cheapest single format within the tolerance as text, and its cost; None if there is none.
        front: measured assignments from cheap to exact.
        evaluations: the number of assignments measured.
        compiled: whether formats were arguments of one compiled program, or each assignment ran by `emulate`.
        notes: sentences about the search.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> def f(x):
        ...     with jax.named_scope("root"):
        ...         y = jnp.sqrt(x)
        ...     return y - 1.0
        >>> found = jc.tune(f, ["bfloat16", "e4m3"], [(jnp.float32(1.1),)], 0.05)
        >>> [(row.path, row.spec) for row in found.rows], found.error <= 0.05
        ([('root', 'bfloat16'), ('/', 'bfloat16')], True)
    """

    rules: dict[str, Spec | MatmulSpec | None]
    rows: tuple[TunedSite, ...]
    tolerance: float
    errors: tuple[float, ...]
    held_out: tuple[float, ...]
    cost: float
    cost_name: str
    uniform: tuple[str, float] | None
    front: tuple[TuningPoint, ...]
    evaluations: int
    compiled: bool
    notes: tuple[str, ...] = ()

    _align, _optional = "<<>>>>", ("equations", "results")
    _picture, _title = "draw_tuning", "Formats within a tolerance"

    @property
    def error(self) -> float:
        """The largest error of the inputs."""
        return max(self.errors)

    def as_dict(self) -> dict[str, Any]:
        """Returns the data of every report, and the largest error."""
        return {"error": plain_data(self.error), **super().as_dict()}

    def _parts(self) -> Iterator[TableOrLine]:
        head = ("site", "format", "bits", "equations", "results", "error alone")
        yield [head, *(row._cells() for row in self.rows)]
        yield f"error {self.error:.3g} on {_inputs_text(self.errors)}, tolerance {self.tolerance:.3g}"
        if self.held_out:
            yield f"error {max(self.held_out):.3g} on {_inputs_text(self.held_out)} held out"
        uniform = "no single format is" if self.uniform is None else f"{self.uniform[0]} alone: {self.uniform[1]:.4g}"
        yield f"cost {self.cost:.4g} ({self.cost_name}); {uniform}{' within it' if self.uniform is None else ''}"
        yield from self.notes


def _inputs_text(errors: tuple[float, ...]) -> str:
    return f"{len(errors)} input{'' if len(errors) == 1 else 's'}"


#: The most assignments that are emulated before the search gives up.
_MOST_EMULATIONS = 64
_COST_NAMES = ("bits", "bytes")
_COST_UNITS = {"bits": "mean bits of a site", "bytes": "bytes of all results"}

#: A format, or one with a rule of sums.
MenuOption = SpecLike | tuple[SpecLike | None, MatmulSpec] | None
CostFunction = Callable[[Mapping[str, Any]], float]


@call_hint("jchop.tune(fun, ['bfloat16', 'tf32'], [(x,)], 1e-3)")
def tune(
    fun: Callable[..., Any],
    menu: Sequence[MenuOption],
    inputs: Sequence[Any],
    tolerance: float,
    *,
    cost: Literal["bits", "bytes"] | CostFunction = "bits",
    by: Literal["scope", "equation"] = "scope",
    metric: Literal["relative", "absolute", "largest"] | ErrorMetric = "relative",
    held_out: Sequence[Any] = (),
    evaluations: int = 2000,
    seconds: float | None = None,
    max_turns: int = 10_000,
    progress: Callable[[str, int, int, str], None] | None = None,
) -> Tuning:
    """Finds the cheapest formats for the parts of a function that keep its error within a tolerance on all inputs.

    Every part, called a site, gets one format of the menu. The search starts from single formats. It lowers the site
    with the least measured error per saved cost, one after the other, and then exchanges pairs. Every assignment is
    measured on all inputs. A prediction from runs in one format would be wrong in mixes, because a rounding error
    depends on the formats before it. `jchop.emulate` then runs the cheapest assignments. The first one within the
    tolerance is the result, with the errors that `emulate` gave. The same arguments give the same result, unless
    `seconds` ends the search.

    Operations that make no error of their own have no format, and compute in the carrier. These are negation,
    magnitude, maximum, comparisons, gathers and other moves, and conversions between floating-point dtypes. Arguments
    and constants are rounded by the operations that read them.

    Formats that round to nearest even, with at most 25 significant bits, subnormal numbers and -0, are integers of one
    compiled program. A measurement then needs the time of a run. `emulate`, which is slower, measures other formats,
    complex numbers, Cholesky and QR factorizations, `jax.random`, mutable references and `shard_map`. `compiled` of the
    result says which.

    Args:
        fun: a function that JAX can trace.
        menu: two formats or more: `Spec`, format or text. None is the carrier, without rounding. No stochastic ones. A
            pair ``(format, MatmulSpec)`` also has a rule for sums and matrix products: their accumulator and order.
        inputs: a list of its arguments: tuples, or the only argument. Few shapes are best, since each compiles a
            program.
        tolerance: the largest error allowed, in the unit of `metric`.
        cost: ``"bits"`` (default), the mean of the sites' bits; or ``"bytes"``, the bytes of the results of all sites.
            Or a function of a mapping from the path of each site to its spec, or its pair of the menu. If the menu has
            rules of sums, the bits of a site with sums are the mean of its format's and its accumulator's. The carrier
            is the accumulator without a rule. Accumulators are not stored, so bytes do not count them.
        by: ``"scope"`` (default): a site is a path of `jax.named_scope` and `jax.jit` names. ``"equation"``: a site is
            a primitive within a path.
        metric: ``"relative"`` (default), the Euclidean norm of the error of all numbers over the norm of the carrier's
            result. ``"absolute"``, the norm of the error. ``"largest"``, the largest magnitude of an error. Or a
            function of the result and of the carrier's result to a number. Infinities and NaN that both results have in
            the same place are no errors; others are infinite ones.
        held_out: further inputs, whose errors are reported and do not count. Default: none.
        evaluations: the most assignments measured. Default 2000.
        seconds: the most seconds of the search. Default None: any number.
        max_turns: the most turns of a `while` loop; an assignment whose loop is stopped has an infinite error.
        progress: a function of the stage, the assignments measured, their most, and a text with the best cost so far.

    Returns:
        A `Tuning`, with ``rules`` for ``jchop.emulate(fun, None, rules=...)``.

    Raises:
        TypeError, ValueError: for an argument of another type or value, traced arguments, or a function that no rules
            can divide.
        ValueError: if no assignment is within the tolerance; the message has the smallest error found. If `metric` is a
            name, for an input whose result in the carrier has no finite number.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> def variance(x):
        ...     with jax.named_scope("mean"):
        ...         mean = jnp.sum(x) / x.size
        ...     with jax.named_scope("squares"):
        ...         return jnp.sum((x - mean) ** 2) / x.size
        >>> x = jnp.linspace(99.0, 101.0, 16)
        >>> found = jc.tune(variance, ["e8m4", "e8m7", "e8m16"], [(x,)], 1e-2)
        >>> [(row.path, row.spec) for row in found.rows]
        [('mean', 'e8m4'), ('squares', 'e8m7')]
        >>> low = jc.emulate(variance, None, rules=found.rules)
        >>> float(abs(low(x) / variance(x) - 1)) <= 1e-2
        True
    """
    fun, inputs, held_out = _as_tuning_inputs(fun, inputs, held_out)
    tolerance = check_float("tolerance", tolerance, 0)
    check_choice("by", by, GRANULARITIES)
    if not callable(metric):
        check_choice("metric", metric, tuple(ERROR_METRICS))
    if not callable(cost):
        check_choice("cost", cost, _COST_NAMES)
    levels = _as_menu(menu)
    evaluations = check_int("evaluations", evaluations, 1)
    seconds = None if seconds is None else check_float("seconds", seconds, 0, ends="(]")
    max_turns = check_int("max_turns", max_turns, 1, (1 << 32) - 1)
    problem, held_out_cases = make_tuning_problem(fun, inputs, held_out, levels, by, metric, max_turns)

    def tell(count: int, most: int, best: Trial | None) -> None:
        text = f"cost {best.cost:.4g}, error {best.error:.3g}" if best else "nothing within the tolerance yet"
        if progress is not None:
            progress("measuring", count, most, text)

    costs = _cost_function(problem, cost)
    search = AssignmentSearch(
        len(problem.sites), len(levels), problem.error, costs, tolerance, evaluations, seconds, tell
    )
    search.run()
    trial, errors, emulations = _emulate_cheapest(problem, search)
    held_errors = tuple(problem.emulation_errors(trial.assignment, held_out_cases)) if held_out_cases else ()
    name = _COST_UNITS[cost] if isinstance(cost, str) else getattr(cost, "__name__", "cost")
    texts = [_choice_text(choice) for choice in problem.menu]
    uniform = [search.trials.get((level,) * search.sites) for level in range(search.levels)]
    trials = [run for run in uniform if run is not None]
    finest = min(trials, key=lambda run: run.error).assignment[0] if trials else 0
    feasible = [run for run in trials if run.error <= search.tolerance]
    single = min(feasible, key=lambda run: (run.cost, run.error), default=None)
    rows = []
    for i, (site, level) in enumerate(zip(problem.sites, trial.assignment, strict=True)):
        alone = search.trials.get(tuple(level if j == i else finest for j in range(search.sites)))
        error = math.nan if alone is None else alone.error
        bits = site.bits_in(problem.menu[level].spec)
        rows.append(TunedSite(site.path, texts[level], bits, site.equations, site.results, error))
    points = ((run.cost, run.error, tuple(texts[level] for level in run.assignment)) for run in search.front())
    front = tuple(TuningPoint(*point) for point in points)
    uniform_cost = None if single is None else (texts[single.assignment[0]], single.cost)
    all_errors = search.tolerance, tuple(errors), tuple(held_errors)
    costs, facts = (
        (trial.cost, name, uniform_cost),
        (len(search.trials), problem.has_program, _tuning_notes(search, emulations, held_errors)),
    )
    return Tuning(problem.rules(trial.assignment), tuple(rows), *all_errors, *costs, front, *facts)


def _as_tuning_inputs(fun: Any, inputs: Any, held_out: Any) -> tuple[Any, list[Any], list[Any]]:
    if isinstance(unbind_method(fun, ())[0], EmulatedFunction):
        raise TypeError(f"fun={fun!r} is emulated already; pass the function itself, and its formats in menu")
    check_instance("fun", fun, Callable, "a function")
    for name, value in (("inputs", inputs), ("held_out", held_out)):
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name}={short_repr(value)} must be a list of arguments, as [(x, y), (x2, y2)] or [x, x2]")
    check(inputs, "inputs=[] must have at least one")
    refuse_tracers("tune", (list(inputs), list(held_out)))
    return fun, list(map(batch_arguments, inputs)), list(map(batch_arguments, held_out))


def _as_menu(menu: Any) -> tuple[ArithmeticChoice, ...]:
    """The formats from few bits to many."""
    if isinstance(menu, str) or not isinstance(menu, Sequence):
        raise TypeError(f"menu={menu!r} must be a list of formats, as ['bfloat16', 'e5m10', None]")
    choices = [_as_menu_choice(value, f"menu[{i}]") for i, value in enumerate(menu)]
    check(len(set(choices)) == len(choices), f"menu={list(menu)!r} has a format twice")
    if all(choice.spec is None for choice in choices) or len(choices) < 2:
        raise ValueError(f"menu={list(menu)!r} must have two formats or more; None (in a shell: carrier) counts")

    def fineness(choice: ArithmeticChoice) -> tuple[float, ...]:
        return *_bits_and_precision(choice.spec), *_bits_and_precision(_choice_accumulator(choice))

    return tuple(sorted(choices, key=fineness))


def _as_menu_choice(value: Any, name: str) -> ArithmeticChoice:
    sums = None
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[1], MatmulSpec):
            raise TypeError(f"{name}={value!r} must be a format, or a pair of a format and a MatmulSpec")
        value, sums = value
    spec = None if value is None else as_spec(value, name)
    for item, stochastic in ((spec, spec is not None and spec.rounding.stochastic), (sums, sums and sums.stochastic)):
        check(not stochastic, f"{name}={str(item)!r} rounds stochastically; tune needs deterministic roundings")
    return ArithmeticChoice(spec, sums)


def _choice_accumulator(choice: ArithmeticChoice) -> Spec | None:
    return None if choice.accumulate is None else choice.accumulate.accumulate


def _bits_and_precision(spec: Spec | None) -> tuple[float, int]:
    """The bits and the precision of a format; the carrier is last."""
    if spec is None:
        return math.inf, 0
    return spec.format.bits, spec.format.precision if isinstance(spec.format, FloatFormat) else 0


def _choice_text(choice: ArithmeticChoice) -> str:
    name = "carrier" if choice.spec is None else str(choice.spec)
    return name if choice.accumulate is None else f"{name}, sums {choice.accumulate}"


def _cost_function(problem: TuningProblem, cost: str | CostFunction) -> Callable[[tuple[int, ...]], float]:
    """The cost of an assignment: bytes, mean bits, or the function that the user gave."""
    if callable(cost):

        def custom_cost(assignment: tuple[int, ...]) -> float:
            choices = [problem.menu[level] for level in assignment]
            values = [one.spec if one.accumulate is None else (one.spec, one.accumulate) for one in choices]
            number = float(cost({site.path: value for site, value in zip(problem.sites, values, strict=True)}))
            check(math.isfinite(number), f"cost={cost!r} gave {number}; a cost must be finite")
            return number

        return custom_cost
    counts_sums = any(choice.accumulate for choice in problem.menu)

    def site_cost(site: TuningSite, choice: ArithmeticChoice) -> float:
        bits = site.bits_in(choice.spec)
        if cost == "bytes":
            return site.results * bits
        return (bits + site.bits_in(_choice_accumulator(choice))) / 2 if site.sums and counts_sums else bits

    costs = [[site_cost(site, choice) for choice in problem.menu] for site in problem.sites]
    divisor = 8 if cost == "bytes" else len(costs)
    return lambda assignment: sum(row[level] for row, level in zip(costs, assignment, strict=True)) / divisor


def _emulate_cheapest(problem: TuningProblem, search: AssignmentSearch) -> tuple[Trial, list[float], int]:
    """The cheapest assignment that `emulate` finds within the tolerance, its errors, and the count of those tried."""
    smallest = min((trial.error for trial in search.trials.values()), default=math.inf)
    for index, trial in enumerate(search.within_tolerance(_MOST_EMULATIONS)):
        errors = problem.emulation_errors(trial.assignment)
        if max(errors) <= search.tolerance:
            return trial, errors, index + 1
        smallest = min(smallest, max(errors))
    raise ValueError(
        f"tolerance={search.tolerance!r}: no assignment of the menu was found within it; the smallest error of "
        f"{len(search.trials)} measured is {smallest:.3g}. Add a format with more bits, "
        "or the carrier (None; in a shell: carrier)"
    )


def _tuning_notes(search: AssignmentSearch, emulations: int, held_out_errors: Sequence[float]) -> tuple[str, ...]:
    notes = []
    if search.out_of_budget:
        notes.append(f"the search ended by its budget, after {len(search.trials)} assignments")
    if emulations > 1:
        notes.append(
            f"{emulations - 1} cheaper assignments were within the tolerance when measured, but not when emulated"
        )
    beyond = [i for i, error in enumerate(held_out_errors) if error > search.tolerance]
    if beyond:
        notes.append(f"beyond the tolerance: held_out {', '.join(map(str, beyond))}")
    return tuple(notes)
