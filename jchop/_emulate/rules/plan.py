"""The plan of an emulated program: for every equation its arithmetic, and the operands that are rounded first."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import require_operation
from jchop._core.matmul.aligned import require_aligned_order
from jchop._core.matmul.operations import check_operation, operation_carrier, require_dtype_holds
from jchop._core.rounding.grid import require_carrier
from jchop._emulate.rules import rules
from jchop._emulate.rules.carrier_ops import draws_of
from jchop._emulate.rules.counts import Counts
from jchop._emulate.rules.functions import NamedFunction, with_functions
from jchop._emulate.rules.interpret import run_step
from jchop._emulate.rules.run_task import EmulatedStep, RandomDraw
from jchop._program.bind import constant_of
from jchop._program.jaxprs import Widening
from jchop._program.run import Planner
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, equations_of, is_jchop_result, is_jchop_scope, scope_of, source_line_of
from jchop._spec.spec import Spec, as_spec
from jchop.formats._catalogue import bfloat16, binary16, binary32, binary64
from jchop.formats.rounding import Overflow

# -- facts about steps -------------------------------------------------------------------------------------------------


def _facts_of_results(step: EmulatedStep, fact: rules.ValueFact) -> tuple[rules.ValueFact, ...]:
    return tuple(fact if rules.is_number(v.aval) else None for v in step.eqn.outvars)


def _with_rounded_operands(step: EmulatedStep, spec: Spec | None, among: Sequence[bool] | None = None) -> EmulatedStep:
    """The operands that `spec` may change are rounded, except counts; of those that `among` marks. None: of all."""
    rounds = tuple(
        step.choice.rounds_operands
        and (among is None or among[i])
        and rules.is_number(v.aval)
        and i not in step.counts
        and not rules.is_exact_under(k, spec)
        for i, (v, k) in enumerate(zip(step.eqn.invars, step.known, strict=True))
    )
    facts = tuple(spec if r else k for r, k in zip(rounds, step.known, strict=True))
    return replace(step, rounds=rounds, known=facts)


def _operation_facts(step: EmulatedStep) -> EmulatedStep:
    """Operands rounded, the result rounded."""
    spec = step.choice.spec
    function = step.eqn.primitive
    exact = step.kind in ("exact", "power", "linear", "complex")
    exact = exact or (isinstance(function, NamedFunction) and function.exact is not None)
    _check_dtypes_of_step(step, spec, (*step.eqn.invars, *step.eqn.outvars), exact)
    _check_double_rounding(step)
    if step.name in ("neg", "abs") and step.known[0] is rules.WIDE:
        return replace(step, kind="structural", out=step.known)
    return replace(_with_rounded_operands(step, spec), out=_facts_of_results(step, spec))


def _carrier_result_facts(step: EmulatedStep) -> EmulatedStep:
    _check_dtypes_of_step(step, step.choice.spec, step.eqn.outvars)
    _check_double_rounding(step)
    return replace(step, out=_facts_of_results(step, step.choice.spec))


#: Sums of an order; cumulative sums and products add or multiply one by one.
_SUMS_WITH_ORDER = frozenset({"reduce_sum", "reduce_window_sum", "dot_general", "conv_general_dilated"})


def _sum_facts(step: EmulatedStep) -> EmulatedStep:
    """A sum's step with the facts about its results; a MatmulSpec must fit the carrier."""
    spec, how = step.choice.spec, step.choice.accumulate
    step = _operation_facts(step)
    if how is None:
        return step
    carrier = operation_carrier(step.eqn.outvars[0].aval.dtype)
    with errors_at(step):
        if how.order.aligned and step.name in _SUMS_WITH_ORDER:
            require_aligned_order(how, carrier)
        else:
            for name in ("product", "accumulate"):
                require_operation(getattr(how, name), carrier, f"accumulate: {name}")
        if how.operands is not None:
            require_carrier(as_spec(how.operands, "operands"), carrier)
    return replace(step, out=_facts_of_results(step, spec or how.accumulate))


def _factorization_facts(step: EmulatedStep) -> EmulatedStep:
    """A matrix, or a batch of matrices. The carrier computes factorizations that `linalg.py` has no algorithm for."""
    params, shape = step.eqn.params, step.eqn.invars[0].aval.shape
    square, pivoting = shape[-1] == shape[-2], params.get("pivoting", False)
    if (step.name == "lu" and not square) or (step.name == "qr" and (pivoting or shape[-2] < shape[-1])):
        return _carrier_op_facts(step)
    return _operation_facts(step)


def _carrier_op_facts(step: EmulatedStep) -> EmulatedStep:
    """Operands rounded, the carrier's results rounded once."""
    in_carrier = step.choice.spec is None and step.choice.function is None
    return _operation_facts(replace(step, kind="carrier" if in_carrier else "carried"))


def _structural_facts(step: EmulatedStep) -> EmulatedStep:
    if _structural_computes(step):
        return _carrier_op_facts(step)
    step = _round_constants(step, beside_wide=rules.WIDE in step.known)
    if step.name in _BY_OPERAND:
        return replace(step, out=tuple(step.known[: len(step.eqn.outvars)]))
    facts = [k for k, v in zip(step.known, step.eqn.invars, strict=True) if rules.is_number(v.aval)]
    return replace(step, out=_facts_of_results(step, rules.common_fact(facts)))


def _structural_computes(step: EmulatedStep) -> bool:
    """Whether a primitive that moves values also computes: a gather that fills, a scatter that applies a function."""
    fill, update = step.eqn.params.get("fill_value"), step.eqn.params.get("update_jaxpr")
    fills = fill is not None and not rules.holds_constant(step.choice.spec, fill)
    return (step.name == "gather" and fills) or (step.name == "scatter" and bool(getattr(update, "eqns", ())))


def _round_constants(step: EmulatedStep, beside_wide: bool = False) -> EmulatedStep:
    """Constants are rounded also if they are only moved. Infinite constants are not rounded: they are bounds.

    With `beside_wide`, neither are numbers that would be rounded later, if results among the others are not.
    """
    among = [
        k is None and rules.is_number(v.aval) and (bool(np.isfinite(v.val)) if isinstance(v, Literal) else beside_wide)
        for v, k in zip(step.eqn.invars, step.known, strict=True)
    ]
    return _with_checked_operands(step, among)


def _with_checked_operands(step: EmulatedStep, among: Sequence[bool]) -> EmulatedStep:
    """The step with operands `among` its own rounded on entry; their dtypes must hold the spec's values."""
    step = _with_rounded_operands(step, step.choice.spec, among)
    _check_dtypes_of_step(step, step.choice.spec, itertools.compress(step.eqn.invars, step.rounds))
    return step


#: Structural primitives whose result i has the numbers of operand i.
_BY_OPERAND = {"sort", "optimization_barrier", "device_put", "copy", "copy_p", "pvary", "pcast", "psum_invariant"}


def _comparison_facts(step: EmulatedStep) -> EmulatedStep:
    """Operands are rounded, results are not numbers. Infinite constants are not rounded: they are bounds."""
    among = [not (isinstance(v, Literal) and rules.is_number(v.aval) and np.isinf(v.val)) for v in step.eqn.invars]
    return _no_facts(_with_checked_operands(step, among))


def _conversion_facts(step: EmulatedStep) -> EmulatedStep:
    """A conversion: the known format is kept if the new dtype holds all its values."""
    spec, (source,), (target,) = step.choice.spec, step.eqn.invars, step.eqn.outvars
    try:
        _check_dtypes_of_step(step, spec, [target], exact=not rules.is_carrier_float(source.aval))
    except ValueError as error:
        raise ValueError(f"{error}; x is what the program casts to {target.aval.dtype} there") from None
    fact = step.known[0]
    if rules.is_complex_value(target.aval):  # a part that is zero, or a wider dtype
        return replace(step, kind="structural", out=step.known) if fact is not None else _carrier_op_facts(step)
    keeps = fact is not None and rules.is_exact_under(fact, _DTYPE_SPECS.get(target.aval.dtype.name))
    if keeps and rules.is_carrier_float(source.aval):
        return replace(step, kind="structural", out=(fact,))
    return replace(step, out=(spec,))


_DTYPE_SPECS = {
    name: Spec(fmt) for name, fmt in zip(rules.CARRIER_DTYPES, (binary16, bfloat16, binary32, binary64), strict=True)
}


def _no_facts(step: EmulatedStep) -> EmulatedStep:
    return replace(step, out=(None,) * len(step.eqn.outvars))


def _draw_facts(step: EmulatedStep) -> EmulatedStep:
    """The user's arguments of a call of `jax.random` are rounded, and its results; nothing is rounded in between."""
    draw, spec, eqn = step.draw, step.choice.spec, step.eqn
    if draw is None:  # a primitive that draws
        return _operation_facts(step)
    from_user = [draw.calls if isinstance(v, Literal) else v not in draw.inner for v in eqn.invars]
    step = _with_rounded_operands(step, spec, from_user)
    leaving = [leaves and rules.is_number(v.aval) for v, leaves in zip(eqn.outvars, draw.leaves, strict=True)]
    _check_dtypes_of_step(step, spec, itertools.compress(eqn.outvars, leaving))
    kind = "own" if not any(leaving) else "carrier" if spec is None else "draw"
    return replace(step, kind=kind, out=tuple(spec if leaves else None for leaves in leaving))


STEP_FACTS = {
    **dict.fromkeys(("exact", "power", "elementary", "neighbour", "complex"), _operation_facts),
    **dict.fromkeys(("made", "result"), _carrier_result_facts),
    **dict.fromkeys(("structural", "extremum"), _structural_facts),
    **dict.fromkeys(("accumulating", "complex sum"), _sum_facts),
    **dict.fromkeys(("carrier", "own"), _no_facts),
    "draw": _draw_facts,
    "converted": _conversion_facts,
    "linear": _factorization_facts,
    "carried": _carrier_op_facts,
    "compared": _comparison_facts,
    "control": _round_constants,
}


def _check_dtypes_of_step(step: EmulatedStep, spec: Spec | None, variables: Iterable[Any], exact: bool = False) -> None:
    """Refuses a dtype of numbers that cannot hold the values of the spec."""
    if spec is None:
        return
    for dtype in dict.fromkeys(jnp.finfo(v.aval.dtype).dtype for v in variables if rules.is_number(v.aval)):
        try:
            with errors_at(step):
                if exact:
                    check_operation(spec, dtype)
                else:
                    require_carrier(spec, CARRIERS[dtype.name])
        except ValueError as error:
            if dtype.itemsize > 2 and step.kind != "converted":
                raise
            why = "narrow='carrier' computes in the dtype of wider arguments, except results and foreign functions"
            raise ValueError(f"{error}; {why}") from None


#: Kinds whose results the carrier computes, and kinds of primitives whose results are exact.
_DOUBLE_ROUNDING = frozenset(("elementary", "neighbour", "accumulating", "complex sum", "carried", "made"))
_EXACT_IN_CARRIER = frozenset(
    ("bitcast_convert_type", "ceil", "floor", "iota", "reduce_precision", "rem", "round", "sign")
)


def _check_double_rounding(step: EmulatedStep) -> None:
    """Refuses a format with values that the carrier's results, which are rounded once more, cannot have."""
    has_order = step.kind in ("accumulating", "complex sum") and step.choice.accumulate is not None
    function = step.eqn.primitive
    if step.kind not in _DOUBLE_ROUNDING or step.name in _EXACT_IN_CARRIER or has_order:
        return
    if isinstance(function, NamedFunction) and (function.carrier_is_exact or function.exact is not None):
        return
    for v in step.eqn.outvars:
        if rules.is_number(v.aval):
            with errors_at(step):
                require_dtype_holds(step.choice.spec, jnp.finfo(v.aval.dtype).dtype)


@contextmanager
def errors_at(step: EmulatedStep) -> Iterator[None]:
    """Errors say the primitive and its line."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"primitive {step.name!r} ({step.place}): {error}") from error


class EmulationPlanner(Planner):
    """Makes plans under some settings, of programs in wider dtypes if so; `used` collects the rules that matched."""

    def __init__(self, settings: rules.Settings, widening: Widening | None = None) -> None:
        super().__init__()
        self.settings, self.widening = settings, widening
        self.used: set[str] = set()
        self._draws: dict[int, RandomDraw] = {}
        self._counts = Counts()
        self._apart: bool | None = None  # until the whole program is seen
        self._line = self._call_line = ""

    def prepare(self, jaxpr: Any) -> Any:
        """The jaxpr that is planned; its calls of `jax.random` and its counts are found."""
        if self._apart is None:
            self._apart = sum(1 for _ in equations_of(jaxpr)) >= _MANY_EQUATIONS
        self._counts.add(jaxpr)
        jaxpr = _copy_constant_results(with_functions(jaxpr, self.settings.functions))
        self._draws |= draws_of(jaxpr)
        return jaxpr

    def read(self, v: Any, env: dict[Any, rules.ValueFact]) -> rules.ValueFact:
        """The spec that holds a variable's numbers, or a literal, if known."""
        return _fact_of(v, env, self.settings.spec)

    common = staticmethod(rules.common_fact)  # type: ignore[assignment]

    def step(self, eqn: Any, env: dict[Any, rules.ValueFact], scope: str, number: int) -> EmulatedStep:
        """The step of one equation."""
        nothing = (None,) * len(eqn.outvars)
        no_rounding = (False,) * len(eqn.invars)
        make_step = partial(
            EmulatedStep, eqn=eqn, scope=scope, number=number, rounds=no_rounding, apart=bool(self._apart)
        )
        if is_jchop_result(eqn, scope):
            choice = self._choose(eqn, scope)
            return _with_wide_results(STEP_FACTS["result"](make_step(kind="result", choice=choice, known=(None,))))
        own = make_step(
            kind="own", choice=rules.ArithmeticChoice(None, None), known=(None,) * len(eqn.invars), out=nothing
        )
        if is_jchop_scope(scope):
            return own
        draw = self._draws.get(id(eqn))
        if draw is not None:
            scope = scope_of(scope, "", eqn.params.get("name"))
        choice = self._choose(eqn, scope)
        if id(eqn) in self._counts.equations and choice.function is None:
            return own
        counts, eqn = self._counts.operands.get(id(eqn), ()), _literals_at_limits(eqn, choice.spec)
        facts = tuple(_fact_of(v, env, rules.WIDE if choice.wide else choice.spec) for v in eqn.invars)
        make_step = partial(make_step, eqn=eqn, scope=scope, choice=choice, known=facts, counts=counts)
        if draw is not None:
            return _with_wide_results(STEP_FACTS["draw"](make_step(kind="draw", draw=draw)))
        step = make_step(kind=rules.primitive_kind(eqn.primitive))
        if choice.function is not None:
            return _with_wide_results(STEP_FACTS["carried"](replace(step, kind="carried")))
        if step.kind == "alone":
            return replace(step, kind="carrier", out=nothing)
        _check_narrow_results(step)
        if step.kind not in ("control", "unknown"):
            if not any(rules.is_number(v.aval) for v in eqn.outvars):
                step = replace(step, kind="compared")
            elif any(rules.is_complex_value(v.aval) for v in (*eqn.invars, *eqn.outvars)):
                step = replace(step, kind=_complex_kind(step))
        elif step.kind == "unknown":
            step = self._unknown(step)
        step = STEP_FACTS[step.kind](step)
        _check_wrapping(step)
        return step if step.kind == "control" else _with_wide_results(step)

    def _choose(self, eqn: Any, scope: str) -> rules.ArithmeticChoice:
        """The arithmetic of an equation. One without a line of its own has the arithmetic of the call that holds it."""
        if self.settings.has_lines:
            self._line = source_line_of(eqn.source_info, self._call_line)
        return self.settings.choose(eqn.primitive.name, scope, self.used, self._line)

    def plan(self, closed: Any, known: Any, scope: str = "", constants: Sequence[Any] | None = None) -> ProgramPlan:
        """The plan of a program; the lines of its equations are within the line that was last read."""
        before, self._call_line = self._call_line, self._line
        plan = super().plan(closed, known, scope, constants)
        self._line, self._call_line = self._call_line, before
        return plan

    def later(self, program: Any, facts: Sequence[rules.ValueFact], scope: str) -> ProgramPlan:
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
        gives_numbers = any(rules.is_number(v.aval) for v in step.eqn.outvars)
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
    if step.name in rules.COMPLEX_OPS:
        return "complex" if step.choice.spec is not None else "carrier"
    if step.kind == "accumulating" and step.choice.accumulate is not None:
        return "complex sum"
    widens = step.kind == "converted" and rules.is_complex_value(step.eqn.outvars[0].aval)
    return step.kind if widens or step.kind in ("structural", "draw") else "carried"


def _check_narrow_results(step: EmulatedStep) -> None:
    """Refuses arithmetic in dtypes of 8 bits and fewer, which are only stored, moved and converted."""
    narrow = [v.aval.dtype.name for v in step.eqn.outvars if rules.is_narrow_float(v.aval)]
    if step.choice.spec is None or step.kind in _NARROW_KINDS or not narrow:
        return
    raise TypeError(
        f"primitive {step.name!r} (scope {step.scope!r}) computes in dtype {narrow[0]}, which is not a carrier; "
        f"convert the operands to one of {', '.join(rules.CARRIER_DTYPES)}, or leave it alone by a rule, such as "
        f"rules={{{step.name!r}: None}}"
    )


#: The kinds of equations that may give numbers of such dtypes.
_NARROW_KINDS = ("control", "converted", "structural", "extremum", "own", "unknown")


def _check_wrapping(step: EmulatedStep) -> None:
    """Refuses results that cannot wrap. The rule of the equation decides, which is traced, but does not run."""
    how, spec = step.choice.accumulate, step.choice.spec
    specs = filter(None, (spec, how and how.product, how and how.accumulate))
    if step.kind not in _WRAPPING_KINDS or all(each.overflow is not Overflow.WRAP for each in specs):
        return
    seeds = Seeds(tuple(map(np.uint32, range(6))))  # type: ignore[arg-type]
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in step.eqn.invars]
    with step.eqn.ctx.manager, errors_at(step):
        jax.eval_shape(partial(run_step, step, seeds), avals)


#: The kinds of equations that round exact results.
_WRAPPING_KINDS = ("exact", "power", "accumulating", "linear", "complex", "complex sum")


def _copy_constant_results(jaxpr: Any) -> Any:
    """A jaxpr whose results are variables: constant results are copied, so that they are rounded like others."""
    copies, results = [], list(jaxpr.outvars)
    for i, v in enumerate(results):
        aval: Any = v.aval
        if isinstance(v, Literal) and rules.is_number(aval):
            like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            (eqn,) = jax.make_jaxpr(lax.optimization_barrier)(like).eqns
            copies.append(eqn.replace(invars=[v]))
            results[i] = eqn.outvars[0]
    return jaxpr.replace(eqns=[*jaxpr.eqns, *copies], outvars=results) if copies else jaxpr


def _literals_at_limits(eqn: Any, spec: Spec | None) -> Any:
    """An equation whose literals at limits of the carrier are at the limits of the format."""
    operands = list(eqn.invars)
    for i, v in enumerate(operands):
        if spec is not None and isinstance(v, Literal) and rules.is_carrier_float(v.aval):
            old = constant_of(v)
            new = rules.at_format_limits(old, spec)
            operands[i] = v if new is old else Literal(new, v.aval)
    return eqn if all(map(operator.is_, operands, eqn.invars)) else eqn.replace(invars=operands)


def _fact_of(v: Any, env: dict[Any, rules.ValueFact], spec: rules.ValueFact) -> rules.ValueFact:
    """The known spec of a variable; for a literal, `spec` if it holds the literal."""
    if not isinstance(v, Literal):
        return env[v]
    return spec if rules.is_number(v.aval) and rules.holds_constant(rules.spec_of_fact(spec), v.val) else None


def _with_wide_results(step: EmulatedStep) -> EmulatedStep:
    """A step under the rule "wide": nothing that it gives is rounded later. Moved values keep a known spec."""
    moves = step.kind in ("structural", "extremum")
    facts = (
        rules.WIDE if rules.is_number(v.aval) and not (moves and fact) else fact
        for v, fact in zip(step.eqn.outvars, step.out, strict=True)
    )
    return replace(step, out=tuple(facts)) if step.choice.wide else step


#: Programs of this many equations or more compile each operation apart. Otherwise XLA computes an operation once for
#: each use, and again for each use of these results, so that the compile time grows faster than the program. A call
#: costs about 0.1 µs.
_MANY_EQUATIONS = 100

#: The draws of a complex operation: two operands of two parts, four products and two sums.
_COMPLEX_DRAWS = 10
