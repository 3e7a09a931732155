"""The plan of a program: for every equation its arithmetic, which operands are rounded first, and what is then known.

A plan is made of a jaxpr alone, before anything is computed. So an unknown primitive is found early, a loop's carry
gets what is known in every turn, a report can be made without running anything, and each rounding that draws has a
number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from jchop._emulate._known import Known, common, holds_all, is_complex, is_float
from jchop._emulate._outcome import OUTCOMES
from jchop._emulate._rules import CALLS, COMPLEX, HIGH_CALLS, Choice, Settings, is_own, kind_of, scope_of
from jchop._emulate._step import Plan, Step, carry_count, jaxpr_of
from jchop.spec import Spec

__all__ = ["Planner", "taken_by_others"]


class Planner:
    """Makes plans under some settings; `used` collects the rules that spoke."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.used: set[str] = set()

    def plan(
        self, closed: Any, known: Sequence[Known], scope: str = "", constants: Sequence[Known] | None = None
    ) -> Plan:
        """The plan of a jaxpr whose arguments and constants are known to be what is said of them."""
        jaxpr, consts = jaxpr_of(closed)
        env: dict[Any, Known] = dict(zip(jaxpr.constvars, constants or (None,) * len(jaxpr.constvars), strict=True))
        env.update(zip(jaxpr.invars, known, strict=True))
        steps, number = [], 0
        for eqn in jaxpr.eqns:
            step = self._step(eqn, env, scope, number)
            number += _numbers(step)
            env.update(zip(eqn.outvars, step.out, strict=True))
            steps.append(step)
        out = tuple(_known_of(v, env, self.settings.spec) for v in jaxpr.outvars)
        return Plan(jaxpr, consts, tuple(steps), out)

    # -- one equation --------------------------------------------------------------------------------------------------

    def _step(self, eqn: Any, env: dict[Any, Known], outer: str, number: int) -> Step:
        name = eqn.primitive.name
        scope = scope_of(outer, eqn.source_info.name_stack)
        if is_own(scope):
            rounds, known = (False,) * len(eqn.invars), (None,) * len(eqn.invars)
            return Step(eqn, "own", scope, Choice(None, None), rounds, known, (None,) * len(eqn.outvars), number)
        choice = self.settings.choose(name, scope, self.used)
        known = tuple(_known_of(v, env, choice.spec) for v in eqn.invars)
        step = Step(eqn, kind_of(eqn.primitive), scope, choice, (False,) * len(known), known, known[:0], number)
        if step.kind == "control":
            return _CONTROL[name](self, step)
        floats = [is_float(v.aval) for v in eqn.outvars]
        if not any(floats) and not any(is_complex(v.aval) for v in eqn.outvars):
            return replace(step, kind="untouched", out=(None,) * len(floats))
        if any(is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            step = self._complex(step)
        elif step.kind == "unknown":
            step = self._unknown(step)
        return OUTCOMES[step.kind](step)

    def _unknown(self, step: Step) -> Step:
        if self.settings.unknown == "carrier":
            return replace(step, kind="carrier")
        if self.settings.unknown == "raise":
            raise NotImplementedError(
                f"primitive {step.name!r} (scope {step.scope!r}): there is no rule for it; pass unknown='carrier' to "
                "leave such primitives in the carrier, unknown='round_output' to round their results"
            )
        return replace(step, kind="made")

    def _complex(self, step: Step) -> Step:
        if step.name in COMPLEX:
            return replace(step, kind="complex")
        if step.kind == "structural" or _widens_to_complex(step):
            return replace(step, kind="carrier" if step.kind == "converted" else "structural")
        if self.settings.unknown == "carrier":
            return replace(step, kind="carrier")
        raise NotImplementedError(
            f"primitive {step.name!r} (scope {step.scope!r}): of complex numbers only sums, differences and products "
            "have a rule; write it with real and imaginary parts, or pass unknown='carrier' to leave such primitives "
            "in the carrier"
        )

    # -- equations that hold others ------------------------------------------------------------------------------------

    def _call(self, step: Step) -> Step:
        params = step.eqn.params
        inner = self.plan(
            params.get("jaxpr", params.get("call_jaxpr")), step.known, scope_of(step.scope, "", params.get("name"))
        )
        return replace(step, inner=(inner,), out=inner.out)

    def _high_call(self, step: Step) -> Step:
        (primitive,) = step.eqn.params.values()

        def expanded(*values: Any) -> Any:
            return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, values)))

        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in step.eqn.invars]
        inner = self.plan(jax.make_jaxpr(expanded)(*avals), step.known, step.scope)
        return replace(step, inner=(inner,), out=inner.out)

    def _solve(self, step: Step) -> Step:
        params = step.eqn.params
        lengths = params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        known = (*step.known[first : first + lengths.solve], *step.known[sum(lengths) :])
        inner = self.plan(params["jaxprs"].solve, known, step.scope)
        return replace(step, inner=(inner,), out=inner.out)

    def _cond(self, step: Step) -> Step:
        inner = tuple(self.plan(branch, step.known[1:], step.scope) for branch in step.eqn.params["branches"])
        return replace(step, inner=inner, out=tuple(map(common, zip(*(plan.out for plan in inner), strict=True))))

    def _scan(self, step: Step) -> Step:
        consts, carry = carry_count(step.eqn.params)
        known = step.known
        while True:
            inner = self.plan(step.eqn.params["jaxpr"], known, step.scope)
            kept = _kept(known[consts : consts + carry], inner.out[:carry])
            if kept == known[consts : consts + carry]:
                return replace(step, inner=(inner,), out=(*kept, *inner.out[carry:]))
            known = (*known[:consts], *kept, *known[consts + carry :])

    def _while(self, step: Step) -> Step:
        params = step.eqn.params
        test, body = params["cond_nconsts"], params["body_nconsts"]
        first, consts, known = step.known[:test], step.known[test : test + body], step.known[test + body :]
        while True:
            inner = self.plan(params["body_jaxpr"], (*consts, *known), step.scope)
            kept = _kept(known, inner.out)
            if kept == known:
                plans = (self.plan(params["cond_jaxpr"], (*first, *known), step.scope), inner)
                return replace(step, inner=plans, out=kept)
            known = kept


def taken_by_others(jaxpr: Any) -> set[Any]:
    """The variables that are results, or operands of an equation that is no part of a public function of jchop."""
    others = (eqn for eqn in jaxpr.eqns if not is_own(scope_of("", eqn.source_info.name_stack)))
    operands = (v for eqn in others for v in eqn.invars)
    return {v for v in (*operands, *jaxpr.outvars) if not isinstance(v, Literal)}


def _kept(before: tuple[Known, ...], after: tuple[Known, ...]) -> tuple[Known, ...]:
    """What is known of a carried value in this turn and the next."""
    return tuple(common(pair) for pair in zip(before, after, strict=True))


_CONTROL = {
    **dict.fromkeys(CALLS, Planner._call),
    **dict.fromkeys(HIGH_CALLS, Planner._high_call),
    "custom_linear_solve": Planner._solve,
    "cond": Planner._cond,
    "scan": Planner._scan,
    "while": Planner._while,
}


def _known_of(v: Any, env: dict[Any, Known], spec: Spec | None) -> Known:
    """Of a literal that the spec holds, the spec itself."""
    if not isinstance(v, Literal):
        return env[v]
    return spec if is_float(v.aval) and holds_all(spec, v.val) else None


def _widens_to_complex(step: Step) -> bool:
    """Whether it only puts zeros beside real numbers, or moves complex ones to a wider dtype."""
    if step.kind != "converted":
        return False
    source, target = step.eqn.invars[0].aval, step.eqn.outvars[0].aval
    return is_complex(target) and (not is_complex(source) or source.dtype.itemsize <= target.dtype.itemsize)


#: Two operands of two parts, and four products and two sums.
_OF_PARTS = 10


def _numbers(step: Step) -> int:
    """How many numbers the roundings of a step may take: operands, results, and the products of a power."""
    if step.inner:
        return len(step.inner) + 1
    if step.kind == "complex":
        return _OF_PARTS
    power = abs(step.eqn.params["y"]).bit_length() * 2 if step.kind == "power" else 0
    return 2 * len(step.eqn.invars) + len(step.eqn.outvars) + 4 + power
