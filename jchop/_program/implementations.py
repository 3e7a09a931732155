"""Primitives of other packages, opened: their Python implementations are programs of known primitives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from jax.interpreters import batching, mlir

from jchop._program.control import CONTROL
from jchop._program.step import ProgramPlan, ProgramStep

__all__ = ["has_batch_rule", "implementation_of", "is_foreign_primitive"]

#: Calls of code that JAX cannot differentiate, and may not take apart for batches.
_FOREIGN_CALLS = frozenset(("pure_callback", "io_callback", "ffi_call"))


def implementation_of(eqn: Any) -> Any:
    """The program of the implementation of an equation's primitive; None if it cannot be traced."""
    primitive = eqn.primitive
    params = primitive.get_bind_params(eqn.params)
    for function in _implementations(primitive):
        try:
            program = jax.make_jaxpr(lambda *args, f=function: f(*args, **params))(*(v.aval for v in eqn.invars))
        except Exception:  # any error of another package that needs numbers
            continue
        same = [v.aval.shape for v in program.jaxpr.outvars] == [v.aval.shape for v in eqn.outvars]
        if same and all(one.primitive is not primitive for one in program.jaxpr.eqns):
            return program
    return None


def _implementations(primitive: Any) -> Iterator[Callable[..., Any]]:
    """The functions that compute a primitive: its own, and what it is lowered to if that is a function of JAX."""
    if primitive.impl is not None and not _is_in_package(primitive.impl, "jax._src.dispatch"):
        yield primitive.impl
    platforms = getattr(mlir, "_platform_specific_lowerings", {}).values()
    for rules in (*platforms, getattr(mlir, "_lowerings", {})):
        rule: Any = getattr(rules.get(primitive), "rule", rules.get(primitive))
        if getattr(rule, "__qualname__", "").startswith("lower_fun."):
            function = inspect.getclosurevars(rule).nonlocals["fun"]
            if not _is_in_package(function, "jax"):
                yield function


def _is_in_package(function: Any, package: str) -> bool:
    """Whether a function is defined in a module or package."""
    function = function.func if isinstance(function, partial) else function
    return f"{getattr(function, '__module__', '')}.".startswith(f"{package}.")


def has_batch_rule(primitive: Any, plan: ProgramPlan) -> bool:
    """Whether a primitive with this program keeps its own rule for batches: it calls foreign code and has a rule."""
    tables = (getattr(batching, name, None) for name in ("fancy_primitive_batchers", "primitive_batchers"))
    return _calls_foreign_code(plan) and any(isinstance(table, dict) and primitive in table for table in tables)


def is_foreign_primitive(step: ProgramStep) -> bool:
    """Whether a step is a primitive of another package that calls foreign code; its derivative is its own."""
    return step.kind == "control" and step.name not in CONTROL and any(map(_calls_foreign_code, step.inner))


def _calls_foreign_code(plan: ProgramPlan) -> bool:
    return any(step.name in _FOREIGN_CALLS for step in plan.walk())
