"""The sites of a program, each with a format of its own, and the rules of `emulate` for an assignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jchop._emulate.paired.paired_run import SILENT_KINDS
from jchop._emulate.rules.rules import ArithmeticChoice, Settings
from jchop._emulate.rules.step import EmulatedStep
from jchop._program.step import ProgramPlan
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec

__all__ = ["GRANULARITIES", "TuningSite", "check_tuning_rules", "is_inexact_aval", "make_tuning_rules", "tuning_sites"]

#: The values of `by`.
GRANULARITIES = ("scope", "equation")
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
        results: the count of results, those of all turns of scans.
        bits: the bits of a result in the carrier.
        pairs: their scopes and primitives.
        sums: those of sums.
    """

    path: str
    pattern: str
    equations: int = 0
    results: int = 0
    bits: int = 0
    pairs: set[ScopePrimitive] = field(default_factory=set)
    sums: set[ScopePrimitive] = field(default_factory=set)


def tuning_sites(plan: ProgramPlan, by: str) -> tuple[list[TuningSite], dict[int, int], set[ScopePrimitive]]:
    """The sites, the number of the site of each step by its id, and scopes and primitives without a site."""
    sites: dict[str, TuningSite] = {}
    steps = [(step, turns) for step, turns in _walk_with_iterations(plan.steps, 1) if step.kind != "own"]
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


def _walk_with_iterations(steps: Sequence[Any], iterations: int) -> Iterator[tuple[Any, int]]:
    for step in steps:
        yield step, iterations
        inner_iterations = iterations * (step.eqn.params["length"] if step.name == "scan" else 1)
        for plan in step.inner:
            yield from _walk_with_iterations(plan.steps, inner_iterations)


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
        rules[
            "{" + ",".join(map(_literal_pattern, names)) + "}/" if len(names) > 1 else f"{_literal_pattern(names[0])}/"
        ] = None
    for scope, name in sorted(rest_of_scopes):
        if name in site_names:
            rules[_site_pattern(scope, name)] = None
    return rules | {site.pattern: choice.spec for site, choice in zip(sites, choices, strict=True)}


def check_tuning_rules(
    settings: Settings, plan: ProgramPlan, sites: dict[int, int], choices: Sequence[ArithmeticChoice]
) -> None:
    """Refuses sites that rules do not tell apart.

    Args:
        settings: with the rules.
        plan: of the program, of any settings.
        sites: the number of the site of each step of the plan, by its id.
        choices: of the sites.
    """
    for step in plan.walk():
        if step.kind == "own":
            continue
        site = sites.get(id(step))
        if settings.choose(step.name, step.scope).spec != (None if site is None else choices[site].spec):
            raise ValueError(
                f"scope {step.scope!r}: no rule of emulate tells its {step.name!r} from other operations; give the "
                "scope another name by jax.named_scope"
            )
