"""The plan of a program: for every equation its arithmetic, which operands are rounded first, and what is then known.

A plan is made of a jaxpr alone, before anything is computed. So an unknown primitive is found early, a loop's carry
gets what is known in every turn, a report can be made without running anything, and each rounding that draws has a
number of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from jchop._bits import CARRIERS
from jchop._emulate._known import CARRIER_DTYPES, Known, common, holds_all, is_complex, is_float, within
from jchop._emulate._rules import CALLS, KINDS, Choice, Settings, scope_of
from jchop._reference.grid import require_carrier
from jchop._reference.operations import check_operation, operation_carrier
from jchop._reference.ranges import require_operation
from jchop.formats import bfloat16, binary16, binary32, binary64
from jchop.spec import Spec

__all__ = ["Plan", "Planner", "Step", "carry_count", "jaxpr_of"]


@dataclass(frozen=True)
class Step:
    """One equation and what becomes of it."""

    eqn: Any
    kind: str
    scope: str
    choice: Choice
    rounds: tuple[bool, ...]  # which operands are rounded first
    known: tuple[Known, ...]  # of the operands, once rounded
    out: tuple[Known, ...]
    number: int  # of the first of its roundings
    inner: tuple[Plan, ...] = ()

    @property
    def name(self) -> str:
        """The primitive."""
        return self.eqn.primitive.name


@dataclass(frozen=True)
class Plan:
    """The steps of a jaxpr."""

    jaxpr: Any
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    out: tuple[Known, ...]

    def walk(self) -> Iterator[Step]:
        """Every step, those of inner plans after the one they belong to."""
        for step in self.steps:
            yield step
            for plan in step.inner:
                yield from plan.walk()


def jaxpr_of(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr and its constants; newer versions of JAX keep them in one object."""
    return getattr(value, "jaxpr", value), tuple(getattr(value, "consts", ()))


def carry_count(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


class Planner:
    """Makes plans under some settings; `used` collects the rules that spoke."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.used: set[str] = set()

    def plan(self, closed: Any, known: Sequence[Known], scope: str = "", constants: Known = None) -> Plan:
        """The plan of a jaxpr whose arguments and constants are known to be what is said of them."""
        jaxpr, consts = jaxpr_of(closed)
        env: dict[Any, Known] = {v: constants if is_float(v.aval) else None for v in jaxpr.constvars}
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
        choice = self.settings.choose(name, scope, self.used)
        known = tuple(_known_of(v, env, choice.spec) for v in eqn.invars)
        step = Step(eqn, KINDS.get(name, "unknown"), scope, choice, (False,) * len(known), known, known[:0], number)
        if step.kind == "control":
            return _CONTROL[name](self, step)
        floats = [is_float(v.aval) for v in eqn.outvars]
        if not any(floats) and not any(is_complex(v.aval) for v in eqn.outvars):
            return replace(step, kind="untouched", out=(None,) * len(floats))
        if step.kind == "unknown" or any(is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            step = self._unknown(step)
        return _OUT[step.kind](step)

    def _unknown(self, step: Step) -> Step:
        is_unknown, how = step.kind == "unknown", self.settings.unknown
        if how == "carrier":
            return replace(step, kind="carrier")
        if how == "raise" or not is_unknown:
            what = "there is no rule for it" if is_unknown else "it is complex, which is not emulated"
            raise NotImplementedError(
                f"primitive {step.name!r} (scope {step.scope!r}): {what}; pass unknown='carrier' to leave such "
                "primitives in the carrier" + (", unknown='round_output' to round their results" * is_unknown)
            )
        return replace(step, kind="made")

    # -- equations that hold others ------------------------------------------------------------------------------------

    def _call(self, step: Step) -> Step:
        params = step.eqn.params
        inner = self.plan(
            params.get("jaxpr", params.get("call_jaxpr")), step.known, scope_of(step.scope, "", params.get("name"))
        )
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


def _kept(before: tuple[Known, ...], after: tuple[Known, ...]) -> tuple[Known, ...]:
    """What is known of a carried value in this turn and the next."""
    return tuple(common(pair) for pair in zip(before, after, strict=True))


_CONTROL = {
    **dict.fromkeys(CALLS, Planner._call),
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


# -- what is known of results ------------------------------------------------------------------------------------------


def _results(step: Step, known: Known) -> tuple[Known, ...]:
    return tuple(known if is_float(v.aval) else None for v in step.eqn.outvars)


def _rounded_operands(step: Step, spec: Spec | None) -> Step:
    floats = [is_float(v.aval) for v in step.eqn.invars]
    rounds = tuple(f and not within(k, spec) for f, k in zip(floats, step.known, strict=True))
    known = tuple(spec if r else k for r, k in zip(rounds, step.known, strict=True))
    return replace(step, rounds=rounds, known=known)


def _operation(step: Step) -> Step:
    """Operands rounded, the result rounded."""
    spec = step.choice.spec
    for v in (*step.eqn.invars, *step.eqn.outvars):
        _check(step, spec, v.aval, exact=step.kind in ("exact", "power"))
    return replace(_rounded_operands(step, spec), out=_results(step, spec))


def _made(step: Step) -> Step:
    for v in step.eqn.outvars:
        _check(step, step.choice.spec, v.aval, exact=False)
    return replace(step, out=_results(step, step.choice.spec))


def _accumulating(step: Step) -> Step:
    spec, how = step.choice.spec, step.choice.accumulate
    step = _operation(step)
    if how is None:
        return step
    carrier = operation_carrier(step.eqn.outvars[0].aval.dtype)
    for name in ("product", "accumulate"):
        require_operation(getattr(how, name), carrier, f"accumulate: {name}")
    if how.operands is not None:
        require_carrier(how.operands, carrier)
    return replace(step, out=_results(step, spec or how.accumulate))


def _structural(step: Step) -> Step:
    step = _rounded_constants(step)
    if step.name in _BY_OPERAND:
        return replace(step, out=tuple(step.known[: len(step.eqn.outvars)]))
    known = [k for k, v in zip(step.known, step.eqn.invars, strict=True) if is_float(v.aval)]
    return replace(step, out=_results(step, common(known)))


def _rounded_constants(step: Step) -> Step:
    """Constants of the program are rounded where they are moved, too; infinities are not, where they only bound."""
    spec = step.choice.spec
    rounds = tuple(
        spec is not None and isinstance(v, Literal) and is_float(v.aval) and k is None and math.isfinite(v.val)
        for v, k in zip(step.eqn.invars, step.known, strict=True)
    )
    for v, r in zip(step.eqn.invars, rounds, strict=True):
        if r:
            _check(step, spec, v.aval, exact=False)
    known = tuple(spec if r else k for r, k in zip(rounds, step.known, strict=True))
    return replace(step, rounds=rounds, known=known)


#: Structural primitives whose first results are made of one operand each.
_BY_OPERAND = {"sort", "optimization_barrier", "device_put", "copy", "copy_p", "pvary", "pcast", "psum_invariant"}


def _converted(step: Step) -> Step:
    """A conversion: what is known stays so where the new dtype holds it all."""
    spec, (source,), (target,) = step.choice.spec, step.eqn.invars, step.eqn.outvars
    _check(step, spec, target.aval, exact=not is_float(source.aval))
    known = step.known[0]
    if is_float(source.aval) and known is not None and within(known, _OF_DTYPE.get(target.aval.dtype.name)):
        return replace(step, kind="structural", out=(known,))
    return replace(step, out=(spec,))


_OF_DTYPE = {
    name: Spec(fmt) for name, fmt in zip(CARRIER_DTYPES, (binary16, bfloat16, binary32, binary64), strict=True)
}


def _carried(step: Step) -> Step:
    return replace(step, out=(None,) * len(step.eqn.outvars))


_OUT = {
    "exact": _operation,
    "power": _operation,
    "elementary": _operation,
    "made": _made,
    "structural": _structural,
    "extremum": _structural,
    "converted": _converted,
    "accumulating": _accumulating,
    "carrier": _carried,
}


def _check(step: Step, spec: Spec | None, aval: Any, exact: bool) -> None:
    """Refuse a dtype that cannot hold what the spec gives."""
    if spec is None or not is_float(aval):
        return
    name = aval.dtype.name
    if name not in CARRIER_DTYPES:
        raise TypeError(
            f"primitive {step.name!r} has a value of dtype {name}, which is no carrier; allowed: "
            f"{', '.join(CARRIER_DTYPES)}. Leave it alone by a rule, such as rules={{{step.name!r}: None}}"
        )
    if exact:
        check_operation(spec, aval.dtype)
    else:
        require_carrier(spec, CARRIERS[name])


def _numbers(step: Step) -> int:
    """How many numbers the roundings of a step may take: operands, results, and the products of a power."""
    if step.inner:
        return len(step.inner) + 1
    power = abs(step.eqn.params["y"]).bit_length() * 2 if step.kind == "power" else 0
    return 2 * len(step.eqn.invars) + len(step.eqn.outvars) + 4 + power
