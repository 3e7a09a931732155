"""What each kind of equation rounds first, and what is then known of its results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jchop._bits import CARRIERS
from jchop._core.arithmetic.operations import check_operation, operation_carrier
from jchop._core.arithmetic.ranges import require_operation
from jchop._core.rounding.grid import require_carrier
from jchop._emulate._known import CARRIER_DTYPES, Known, common, is_complex, is_float, within
from jchop._emulate._step import Step
from jchop.formats import bfloat16, binary16, binary32, binary64
from jchop.spec import Spec

__all__ = ["OUTCOMES"]


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
        _check(step, spec, v.aval, exact=step.kind in ("exact", "power", "linear"))
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


def _factored(step: Step) -> Step:
    """A matrix, or many; what the algorithms do not do is refused."""
    params, shape = step.eqn.params, step.eqn.invars[0].aval.shape
    square, pivoting = shape[-1] == shape[-2], params.get("pivoting", False)
    if (step.name == "lu" and not square) or (step.name == "qr" and (pivoting or shape[-2] < shape[-1])):
        raise NotImplementedError(
            f"primitive {step.name!r} (scope {step.scope!r}) of a matrix of shape {tuple(shape)}"
            f"{' with pivoting' * pivoting}: emulated are lu of square matrices, and qr without pivoting of matrices "
            f"with as many rows as columns or more; leave it in the carrier by rules={{{step.name!r}: None}}"
        )
    return _operation(step)


def _by_parts(step: Step) -> Step:
    """Complex operands are never known to be rounded, so their parts are rounded anew, which changes nothing."""
    spec = step.choice.spec
    for v in (*step.eqn.invars, *step.eqn.outvars):
        dtype = _PART[v.aval.dtype.name] if is_complex(v.aval) else v.aval.dtype
        if spec is not None:
            check_operation(spec, dtype)
    return replace(step, out=_results(step, spec))


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


OUTCOMES = {
    "exact": _operation,
    "power": _operation,
    "elementary": _operation,
    "made": _made,
    "structural": _structural,
    "extremum": _structural,
    "converted": _converted,
    "accumulating": _accumulating,
    "carrier": _carried,
    "own": _carried,
    "linear": _factored,
    "complex": _by_parts,
}

_PART = {"complex64": np.dtype("float32"), "complex128": np.dtype("float64")}


def _check(step: Step, spec: Spec | None, aval: Any, exact: bool) -> None:
    """Refuse a dtype that cannot hold what the spec gives."""
    if spec is None or not is_float(aval):
        return
    name = aval.dtype.name
    if name not in CARRIER_DTYPES:
        raise TypeError(
            f"primitive {step.name!r} has a value of dtype {name}, which is not a carrier; allowed: "
            f"{', '.join(CARRIER_DTYPES)}. Leave it alone by a rule, such as rules={{{step.name!r}: None}}"
        )
    if exact:
        check_operation(spec, aval.dtype)
    else:
        require_carrier(spec, CARRIERS[name])
