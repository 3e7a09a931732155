"""For each kind of equation, the operands that are rounded first, and the facts about its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import require_operation
from jchop._core.matmul.aligned import require_aligned_order
from jchop._core.matmul.operations import check_operation, operation_carrier, require_dtype_holds
from jchop._core.rounding.grid import require_carrier
from jchop._emulate.rules.functions import NamedFunction
from jchop._emulate.rules.step import EmulatedStep
from jchop._emulate.rules.value_facts import (
    CARRIER_DTYPES,
    ValueFact,
    common_fact,
    holds_constant,
    is_carrier_float,
    is_complex_value,
    is_exact_under,
    is_number,
)
from jchop._spec.spec import Spec, as_spec
from jchop.formats import bfloat16, binary16, binary32, binary64


def _facts_of_results(step: EmulatedStep, fact: ValueFact) -> tuple[ValueFact, ...]:
    return tuple(fact if is_number(v.aval) else None for v in step.eqn.outvars)


def _with_rounded_operands(step: EmulatedStep, spec: Spec | None, among: Sequence[bool] | None = None) -> EmulatedStep:
    """The operands that `spec` may change are rounded, except counts; of those that `among` marks. None: of all."""
    rounds = tuple(
        step.choice.rounds_operands
        and (among is None or among[i])
        and is_number(v.aval)
        and i not in step.counts
        and not is_exact_under(k, spec)
        for i, (v, k) in enumerate(zip(step.eqn.invars, step.known, strict=True))
    )
    facts = tuple(spec if r else k for r, k in zip(rounds, step.known, strict=True))
    return replace(step, rounds=rounds, known=facts)


def _operation_facts(step: EmulatedStep) -> EmulatedStep:
    """Operands rounded, the result rounded."""
    spec = step.choice.spec
    exact = step.kind in ("exact", "power", "linear", "complex") or _rounds_exact_result(step)
    _check_dtypes_of_step(step, spec, (*step.eqn.invars, *step.eqn.outvars), exact)
    _check_double_rounding(step)
    return replace(_with_rounded_operands(step, spec), out=_facts_of_results(step, spec))


def _carrier_result_facts(step: EmulatedStep) -> EmulatedStep:
    _check_dtypes_of_step(step, step.choice.spec, step.eqn.outvars)
    _check_double_rounding(step)
    return replace(step, out=_facts_of_results(step, step.choice.spec))


#: Sums of an order; cumulative sums and products add or multiply one by one.
_SUMS_WITH_ORDER = frozenset({"reduce_sum", "reduce_window_sum", "dot_general", "conv_general_dilated"})


def _sum_facts(step: EmulatedStep) -> EmulatedStep:
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
    """A matrix, or a batch of matrices. If `_emulate/linalg/` has no algorithm, the carrier computes the result."""
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
    step = _round_constants(step)
    if step.name in _RESULT_BY_OPERAND:
        return replace(step, out=tuple(step.known[: len(step.eqn.outvars)]))
    facts = [k for k, v in zip(step.known, step.eqn.invars, strict=True) if is_number(v.aval)]
    return replace(step, out=_facts_of_results(step, common_fact(facts)))


def _structural_computes(step: EmulatedStep) -> bool:
    """Whether a primitive that moves values also computes: a gather that fills, a scatter that applies a function."""
    fill, update = step.eqn.params.get("fill_value"), step.eqn.params.get("update_jaxpr")
    fills = fill is not None and not holds_constant(step.choice.spec, fill)
    return (step.name == "gather" and fills) or (step.name == "scatter" and bool(getattr(update, "eqns", ())))


def _round_constants(step: EmulatedStep) -> EmulatedStep:
    """Constants are rounded also if they are only moved. Infinite constants are not rounded: they are bounds."""
    spec = step.choice.spec
    among = [
        k is None and isinstance(v, Literal) and is_number(v.aval) and bool(np.isfinite(v.val))
        for v, k in zip(step.eqn.invars, step.known, strict=True)
    ]
    step = _with_rounded_operands(step, spec, among)
    _check_dtypes_of_step(step, spec, itertools.compress(step.eqn.invars, step.rounds))
    return step


#: Structural primitives whose result i has the numbers of operand i.
_RESULT_BY_OPERAND = {
    "sort",
    "optimization_barrier",
    "device_put",
    "copy",
    "copy_p",
    "pvary",
    "pcast",
    "psum_invariant",
}


def _comparison_facts(step: EmulatedStep) -> EmulatedStep:
    """Operands are rounded, results are not numbers. Infinite constants are not rounded: they are bounds."""
    among = [not (isinstance(v, Literal) and is_number(v.aval) and np.isinf(v.val)) for v in step.eqn.invars]
    step = _with_rounded_operands(step, step.choice.spec, among)
    _check_dtypes_of_step(step, step.choice.spec, itertools.compress(step.eqn.invars, step.rounds))
    return _no_facts(step)


def _conversion_facts(step: EmulatedStep) -> EmulatedStep:
    """A conversion: the known format is kept if the new dtype holds all its values."""
    spec, (source,), (target,) = step.choice.spec, step.eqn.invars, step.eqn.outvars
    try:
        _check_dtypes_of_step(step, spec, [target], exact=not is_carrier_float(source.aval))
    except ValueError as error:
        raise ValueError(f"{error}; x is what the program casts to {target.aval.dtype} there") from None
    fact = step.known[0]
    if is_complex_value(target.aval):  # a part that is zero, or a wider dtype
        return replace(step, kind="structural", out=step.known) if fact is not None else _carrier_op_facts(step)
    if (
        is_carrier_float(source.aval)
        and fact is not None
        and is_exact_under(fact, _DTYPE_SPECS.get(target.aval.dtype.name))
    ):
        return replace(step, kind="structural", out=(fact,))
    return replace(step, out=(spec,))


_DTYPE_SPECS = {
    name: Spec(fmt) for name, fmt in zip(CARRIER_DTYPES, (binary16, bfloat16, binary32, binary64), strict=True)
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
    leaving = [leaves and is_number(v.aval) for v, leaves in zip(eqn.outvars, draw.leaves, strict=True)]
    _check_dtypes_of_step(step, spec, itertools.compress(eqn.outvars, leaving))
    kind = "own" if not any(leaving) else "carrier" if spec is None else "draw"
    return replace(step, kind=kind, out=tuple(spec if leaves else None for leaves in leaving))


STEP_FACTS = {
    "draw": _draw_facts,
    "neighbour": _operation_facts,
    "result": _carrier_result_facts,
    "exact": _operation_facts,
    "power": _operation_facts,
    "elementary": _operation_facts,
    "made": _carrier_result_facts,
    "structural": _structural_facts,
    "extremum": _structural_facts,
    "converted": _conversion_facts,
    "accumulating": _sum_facts,
    "carrier": _no_facts,
    "own": _no_facts,
    "linear": _factorization_facts,
    "complex": _operation_facts,
    "complex sum": _sum_facts,
    "carried": _carrier_op_facts,
    "compared": _comparison_facts,
    "control": _round_constants,
}

_PART_DTYPES = {"complex64": np.dtype("float32"), "complex128": np.dtype("float64")}


def _part_dtype(dtype: Any) -> Any:
    """The dtype of a number, or of the parts of a complex one."""
    return _PART_DTYPES.get(dtype.name, dtype)


def _check_dtypes_of_step(step: EmulatedStep, spec: Spec | None, variables: Iterable[Any], exact: bool = False) -> None:
    """Refuses a dtype of numbers that cannot hold the values of the spec."""
    if spec is None:
        return
    for dtype in dict.fromkeys(_part_dtype(v.aval.dtype) for v in variables if is_number(v.aval)):
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


#: Kinds whose results the carrier computes, and those of their primitives whose results are exact.
_DOUBLE_ROUNDING = frozenset(("elementary", "neighbour", "accumulating", "complex sum", "carried", "made"))
_EXACT_IN_CARRIER = frozenset(
    ("bitcast_convert_type", "ceil", "floor", "iota", "reduce_precision", "rem", "round", "sign")
)


def _rounds_exact_result(step: EmulatedStep) -> bool:
    """Whether a function has a rule that rounds its exact result."""
    return isinstance(step.eqn.primitive, NamedFunction) and step.eqn.primitive.exact is not None


def _check_double_rounding(step: EmulatedStep) -> None:
    """Refuses a format with values that the carrier's results, which are rounded once more, cannot have."""
    has_order = step.kind in ("accumulating", "complex sum") and step.choice.accumulate is not None
    function = step.eqn.primitive
    if step.kind not in _DOUBLE_ROUNDING or step.name in _EXACT_IN_CARRIER or has_order:
        return
    if isinstance(function, NamedFunction) and (function.carrier_is_exact or function.exact is not None):
        return
    for v in step.eqn.outvars:
        if is_number(v.aval):
            with errors_at(step):
                require_dtype_holds(step.choice.spec, _part_dtype(v.aval.dtype))


@contextmanager
def errors_at(step: EmulatedStep) -> Iterator[None]:
    """Errors say the primitive and its line."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"primitive {step.name!r} ({step.place}): {error}") from error
