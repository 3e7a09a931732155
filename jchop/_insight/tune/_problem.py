"""The error of a result as one number; the sites of a program with a format of their own, and the error of these."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import check
from jchop._emulate.emulate import EmulatedFunction
from jchop._emulate.paired.measure import as_double_precision
from jchop._emulate.paired.paired_run import SILENT_KINDS, walk_sources
from jchop._emulate.rules.rules import CARRIER_DTYPES, ArithmeticChoice, Settings, make_settings
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._emulate.rules.trace import EmulatedProgram, ProgramCache, as_program_arguments
from jchop._insight.tune._traced_formats import is_plan_traceable, run_with_levels
from jchop._program.step import ProgramPlan
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec

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


def check_finite_result(name: str, exact: Any) -> None:
    """Refuses an input whose result in the carrier has no finite number: every error by name would be 0."""
    numbers = _inexact_leaves(exact)
    if not any(np.isfinite(x).any() for x in numbers):
        kind = "finite" if numbers else "real"
        raise ValueError(
            f"{name}: the result of fun has no {kind} number, so it has no error; pass a function as metric"
        )


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
            check_finite_result(name, exact)
        cases.append(TuningCase(args, program, site_of_step, exact))
    assert all_sites is not None
    check(all_sites, "fun has no operation that rounds, so there is nothing to tune")
    pairs = {pair for site in all_sites for pair in site.pairs}
    has_program = all(is_plan_traceable(case.program.plan, menu) for case in cases)
    problem = TuningProblem(fun, menu, all_sites, others - pairs, cases[: len(inputs)], metric, max_turns, has_program)
    problem.check()
    return problem, cases[len(inputs) :]
