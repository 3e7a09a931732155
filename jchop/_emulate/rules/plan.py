"""The plan of an emulated program: for every equation its arithmetic, and the operands that are rounded first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jchop._core.arithmetic.exact import wraps_results
from jchop._emulate.rules.counts import Counts
from jchop._emulate.rules.draws import draws_of
from jchop._emulate.rules.functions import with_functions
from jchop._emulate.rules.interpret import run_step
from jchop._emulate.rules.rules import COMPLEX_OPS, ArithmeticChoice, Settings, primitive_kind
from jchop._emulate.rules.step import EmulatedStep, RandomDraw
from jchop._emulate.rules.step_facts import STEP_FACTS, errors_at
from jchop._emulate.rules.value_facts import (
    CARRIER_DTYPES,
    ValueFact,
    at_format_limits,
    common_fact,
    holds_constant,
    is_carrier_float,
    is_complex_value,
    is_narrow_float,
    is_number,
)
from jchop._program import planner
from jchop._program.bind import constant_of
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, equations_of, is_jchop_result, is_jchop_scope, jaxpr_of, scope_of
from jchop._program.widening import Widening
from jchop._spec.spec import Spec


class EmulationPlanner(planner.Planner):
    """Makes plans under some settings, of programs in wider dtypes if so; `used` collects the rules that matched."""

    def __init__(self, settings: Settings, widening: Widening | None = None) -> None:
        super().__init__()
        self.settings, self.widening = settings, widening
        self.used: set[str] = set()
        self._draws: dict[int, RandomDraw] = {}
        self._counts = Counts()
        self._apart: bool | None = None  # until the whole program is seen

    def plan(
        self, closed: Any, known: Sequence[ValueFact], scope: str = "", constants: Sequence[ValueFact] | None = None
    ) -> ProgramPlan:
        """The plan of a jaxpr; its calls of `jax.random` are found first."""
        jaxpr, consts = jaxpr_of(closed)
        if self._apart is None:
            self._apart = sum(1 for _ in equations_of(jaxpr)) >= _MANY_EQUATIONS
        program = _copy_constant_results(with_functions(jaxpr, self.settings.functions), consts)
        self._draws |= draws_of(program.jaxpr)
        self._counts.add(jaxpr)
        return super().plan(program, known, scope, constants)

    def read(self, v: Any, env: dict[Any, ValueFact]) -> ValueFact:
        """The spec that holds a variable's numbers, or a literal, if known."""
        return _fact_of(v, env, self.settings.spec)

    def common(self, knowns: Iterable[ValueFact]) -> ValueFact:
        """The fact that holds for every one of several values."""
        return common_fact(knowns)

    def step(self, eqn: Any, env: dict[Any, ValueFact], scope: str, number: int) -> EmulatedStep:
        """The step of one equation."""
        name, nothing = eqn.primitive.name, (None,) * len(eqn.outvars)
        no_rounding = (False,) * len(eqn.invars)
        make_step = partial(
            EmulatedStep, eqn=eqn, scope=scope, number=number, rounds=no_rounding, apart=bool(self._apart)
        )
        if is_jchop_result(eqn, scope):
            choice = self.settings.choose(name, scope, self.used)
            return STEP_FACTS["result"](make_step(kind="result", choice=choice, known=(None,)))
        own = make_step(kind="own", choice=ArithmeticChoice(None, None), known=(None,) * len(eqn.invars), out=nothing)
        if is_jchop_scope(scope):
            return own
        draw = self._draws.get(id(eqn))
        if draw is not None:
            scope = scope_of(scope, "", eqn.params.get("name"))
        choice = self.settings.choose(name, scope, self.used)
        if id(eqn) in self._counts.equations and choice.function is None:
            return own
        counts, eqn = self._counts.operands.get(id(eqn), ()), _literals_at_limits(eqn, choice.spec)
        facts = tuple(_fact_of(v, env, choice.spec) for v in eqn.invars)
        make_step = partial(make_step, eqn=eqn, scope=scope, choice=choice, known=facts, counts=counts)
        if draw is not None:
            return STEP_FACTS["draw"](make_step(kind="draw", draw=draw))
        step = make_step(kind=primitive_kind(eqn.primitive))
        if choice.function is not None:
            return STEP_FACTS["carried"](replace(step, kind="carried"))
        if step.kind == "alone":
            return replace(step, kind="carrier", out=nothing)
        _check_narrow_results(step)
        if step.kind not in ("control", "unknown"):
            if not any(is_number(v.aval) for v in eqn.outvars):
                step = replace(step, kind="compared")
            elif any(is_complex_value(v.aval) for v in (*eqn.invars, *eqn.outvars)):
                step = replace(step, kind=_complex_kind(step))
        elif step.kind == "unknown":
            step = self._unknown(step)
        step = STEP_FACTS[step.kind](step)
        _check_wrapping(step)
        return step

    def later(self, program: Any, facts: Sequence[ValueFact], scope: str) -> ProgramPlan:
        """The plan of a program that is traced in a run, by a new planner: this one knows equations by their ids."""
        new = EmulationPlanner(self.settings, self.widening)
        new._apart = self._apart
        return new.plan(self._widen(program, scope, inner=True), facts, scope)

    def implementation(self, eqn: Any) -> Any:
        """The program of a primitive of another package; None if there is none."""
        program = super().implementation(eqn)
        return None if program is None else self._widen(program, scope_of("", eqn.source_info.name_stack))

    def _widen(self, program: Any, scope: str, inner: bool = False) -> Any:
        return program if self.widening is None else self.widening.program(program, scope, inner=inner)

    def draws(self, step: EmulatedStep) -> int:
        """The most random draws of a step: of operands, results, and the products of a power."""
        if step.kind == "complex":
            return _COMPLEX_DRAWS
        power = abs(step.eqn.params["y"]).bit_length() * 2 if step.kind == "power" else 0
        return 2 * len(step.eqn.invars) + len(step.eqn.outvars) + 4 + power

    def _unknown(self, step: EmulatedStep) -> EmulatedStep:
        """A primitive without a rule; it becomes a call if its implementation consists of other primitives."""
        if step.choice.spec is None:
            return replace(step, kind="carrier")
        gives_numbers = any(is_number(v.aval) for v in step.eqn.outvars)
        # A primitive that computes nothing, such as a check of its package, may refuse transformations; so it is left
        # out.
        program = self.implementation(step.eqn)
        if program is not None and (gives_numbers or not program.jaxpr.eqns):
            return replace(step, kind="control")
        if not gives_numbers:
            return replace(step, kind="compared")
        if self.settings.unknown == "carrier":
            return replace(step, kind="carrier")
        if self.settings.unknown == "raise":
            raise NotImplementedError(
                f"primitive {step.name!r} ({step.place}): there is no rule for it; pass unknown='carrier' to "
                "leave such primitives in the carrier, unknown='round_output' to round their results"
            )
        return replace(step, kind="carried")


def _complex_kind(step: EmulatedStep) -> str:
    """The kind of an equation with complex numbers whose primitive has a rule for real numbers."""
    if step.name in COMPLEX_OPS:
        return "complex" if step.choice.spec is not None else "carrier"
    if step.kind == "accumulating" and step.choice.accumulate is not None:
        return "complex sum"
    widens = step.kind == "converted" and is_complex_value(step.eqn.outvars[0].aval)
    return step.kind if widens or step.kind in ("structural", "draw") else "carried"


def _check_narrow_results(step: EmulatedStep) -> None:
    """Refuses arithmetic in dtypes of 8 bits and fewer, which are only stored, moved and converted."""
    narrow = [v.aval.dtype.name for v in step.eqn.outvars if is_narrow_float(v.aval)]
    if step.choice.spec is None or step.kind in _NARROW_KINDS or not narrow:
        return
    raise TypeError(
        f"primitive {step.name!r} (scope {step.scope!r}) computes in dtype {narrow[0]}, which is not a carrier; "
        f"convert the operands to one of {', '.join(CARRIER_DTYPES)}, or leave it alone by a rule, such as "
        f"rules={{{step.name!r}: None}}"
    )


#: The kinds of equations that may give numbers of such dtypes.
_NARROW_KINDS = ("control", "converted", "structural", "extremum", "own", "unknown")


def _check_wrapping(step: EmulatedStep) -> None:
    """Refuses results that cannot wrap. The rule of the equation decides, which is traced, but does not run."""
    how, spec = step.choice.accumulate, step.choice.spec
    if step.kind not in _WRAPPING_KINDS or not any(
        map(wraps_results, (spec, how and how.product, how and how.accumulate))
    ):
        return
    seeds = Seeds(tuple(map(np.uint32, range(6))))  # type: ignore[arg-type]
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in step.eqn.invars]
    with step.eqn.ctx.manager, errors_at(step):
        jax.eval_shape(partial(run_step, step, seeds), avals)


#: The kinds of equations that round exact results.
_WRAPPING_KINDS = ("exact", "power", "accumulating", "linear", "complex", "complex sum")


class _JaxprAndConstants(NamedTuple):
    """A jaxpr with its constants."""

    jaxpr: Any
    consts: tuple[Any, ...]


def _copy_constant_results(jaxpr: Any, consts: tuple[Any, ...]) -> _JaxprAndConstants:
    """A jaxpr whose results are variables: constant results are copied, so that they are rounded like others."""
    copies = [_copy_equation(v) if isinstance(v, Literal) and is_number(v.aval) else None for v in jaxpr.outvars]
    if not any(copies):
        return _JaxprAndConstants(jaxpr, consts)
    results = [v if eqn is None else eqn.outvars[0] for v, eqn in zip(jaxpr.outvars, copies, strict=True)]
    return _JaxprAndConstants(jaxpr.replace(eqns=[*jaxpr.eqns, *filter(None, copies)], outvars=results), consts)


def _copy_equation(literal: Literal) -> Any:
    aval: Any = literal.aval
    (eqn,) = jax.make_jaxpr(lax.optimization_barrier)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns
    return eqn.replace(invars=[literal])


def _literals_at_limits(eqn: Any, spec: Spec | None) -> Any:
    """An equation whose literals at limits of the carrier are at those of the format."""
    literals = [isinstance(v, Literal) and is_carrier_float(v.aval) for v in eqn.invars]
    if spec is None or not any(literals):
        return eqn
    pairs = [(v, constant_of(v) if literal else None) for v, literal in zip(eqn.invars, literals, strict=True)]
    changes = [(v, x, None if x is None else at_format_limits(x, spec)) for v, x in pairs]
    if all(old is new for _, old, new in changes):
        return eqn
    return eqn.replace(invars=[v if old is new else Literal(new, v.aval) for v, old, new in changes])


def _fact_of(v: Any, env: dict[Any, ValueFact], spec: Spec | None) -> ValueFact:
    """The known spec of a variable; for a literal, `spec` if it holds the literal."""
    if not isinstance(v, Literal):
        return env[v]
    return spec if is_number(v.aval) and holds_constant(spec, v.val) else None


#: Programs of this many equations or more compile each operation apart. Otherwise XLA computes an operation once for
#: each use, and again for each use of these results, so that the compile time grows faster than the program. A call
#: costs about 0.1 µs.
_MANY_EQUATIONS = 100

#: The draws of a complex operation: two operands of two parts, four products and two sums.
_COMPLEX_DRAWS = 10
