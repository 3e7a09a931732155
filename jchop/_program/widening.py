"""Programs whose arrays in narrower dtypes are computed in a wider one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from jchop._program.bind import bind, constant_of, with_derivative_of
from jchop._program.control import as_jax_value
from jchop._program.jaxprs import map_param
from jchop._program.step import (
    BATCHED_CALLS,
    CUSTOM_CALLS,
    is_jchop_result,
    is_jchop_scope,
    is_reference,
    jaxpr_of,
    programs_of,
    scope_of,
)

#: Primitives that depend on the dtype of their operands or results.
_DTYPE_DEPENDENT_PRIMITIVES = frozenset(
    ("bitcast_convert_type", "ffi_call", "io_callback", "pallas_call", "pure_callback")
)


def widest_carrier(variables: Sequence[Any]) -> Any:
    """The widest real dtype of variables, or of parts of complex ones; JAX's default if none has a dtype of its own."""
    dtypes = [jnp.finfo(v.aval.dtype).dtype for v in variables if _is_wide_number(v.aval) and not v.aval.weak_type]
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits, default=jnp.result_type(float))


def _is_wide_number(aval: Any) -> bool:
    """Whether a value has a real dtype of 16 bits or more, or a complex one."""
    inexact = not is_reference(aval) and hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)
    return inexact and jnp.finfo(aval.dtype).bits >= 16


@dataclass(frozen=True)
class Widening:
    """Writes programs again with a carrier in place of narrower dtypes.

    Args:
        carrier: the dtype.
        primitives: the names of primitives that take other dtypes.
        constant: what a real constant becomes, of its value in its own dtype, and of the primitive and the scope that
            take it.
    """

    carrier: Any
    primitives: Collection[str]
    constant: Callable[[Any, str, str], Any]

    def is_narrower(self, aval: Any) -> bool:
        """Whether a value is a number of a dtype with fewer bits."""
        return _is_wide_number(aval) and jnp.finfo(aval.dtype).bits < jnp.finfo(self.carrier).bits

    def wide(self, aval: Any) -> Any:
        """The type of a value after widening."""
        if not self.is_narrower(aval):
            return aval
        parts = jnp.issubdtype(aval.dtype, jnp.complexfloating)
        return aval.update(dtype=np.result_type(self.carrier, np.complex64) if parts else self.carrier)

    def program(self, program: Any, scope: str = "", *, inner: bool = False) -> Any:
        """The program of a jaxpr; an inner program also takes and gives wide numbers."""
        jaxpr, consts = jaxpr_of(program)
        if not self._has_narrow(jaxpr):
            return program
        level = _WideEquations(self, scope)
        invars, constvars = ([level.new(v) if inner else v for v in each] for each in (jaxpr.invars, jaxpr.constvars))
        for eqn in jaxpr.eqns:
            level.add(eqn)
        outvars = [level.read(v, None if inner else v.aval) for v in jaxpr.outvars]
        new = jaxpr.replace(invars=invars, eqns=level.eqns, outvars=outvars)
        if not inner or not consts:
            return new if program is jaxpr else program.replace(jaxpr=new)
        wide_consts = [
            as_jax_value(x).astype(v.aval.dtype) if _is_wide_number(v.aval) else x
            for x, v in zip(consts, constvars, strict=True)
        ]
        return program.replace(jaxpr=new.replace(constvars=constvars), consts=wide_consts)

    def _has_narrow(self, jaxpr: Any) -> bool:
        variables = (v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars))
        return any(
            self.is_narrower(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars, *variables)
        ) or any(self._has_narrow(each) for eqn in jaxpr.eqns for each in programs_of(eqn))

    def param(self, value: Any, scope: str) -> Any:
        """A parameter of an equation, with wide dtypes and programs."""
        return map_param(value, lambda program: self.program(program, scope, inner=True), self._wide_dtype)

    def _wide_dtype(self, value: Any) -> Any:
        is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
        return self.wide(jax.ShapeDtypeStruct((), value)).dtype if is_dtype else value


class _WideEquations:
    """The new equations of one jaxpr."""

    def __init__(self, widening: Widening, scope: str) -> None:
        self.to, self.scope = widening, scope
        self.eqns: list[Any] = []
        self._new: dict[Any, Any] = {}
        self._cast: dict[Any, Any] = {}
        self._at: Any = None  # the equation that is written

    def new(self, v: Any) -> Any:
        """The variable in place of another."""
        if self.to.is_narrower(v.aval):
            self._new[v] = type(v)(self.to.wide(v.aval))
        return self._new.get(v, v)

    def read(self, v: Any, aval: Any = None) -> Any:
        """A variable or literal as an operand of a type. Default: of a wide one."""
        aval = aval or self.to.wide(v.aval)
        if isinstance(v, Literal):
            return v if aval is v.aval else Literal(self._constant(v).astype(aval.dtype), aval)
        variable = self._new.get(v, v)
        if not _is_wide_number(aval) or variable.aval.dtype == aval.dtype:
            return variable
        if (variable, aval.dtype) not in self._cast:
            (cast,) = jax.make_jaxpr(lambda x: lax.convert_element_type(x, aval.dtype))(
                np.zeros((), variable.aval.dtype)
            ).eqns
            result = type(cast.outvars[0])(variable.aval.update(dtype=aval.dtype))
            self.eqns.append(cast.replace(invars=[variable], outvars=[result], **self._place(cast)))
            self._cast[variable, aval.dtype] = result
        return self._cast[variable, aval.dtype]

    def _place(self, eqn: Any) -> dict[str, Any]:
        source = self._at or eqn
        return {"source_info": source.source_info, "ctx": source.ctx}

    def _constant(self, v: Any) -> Any:
        value, eqn = np.asarray(constant_of(v)), self._at
        if eqn is None or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return self.to.constant(value, eqn.primitive.name, scope_of(self.scope, eqn.source_info.name_stack))

    def add(self, eqn: Any) -> None:
        """Writes an equation in the carrier, or in its own dtypes if it has no other form or is a part of jchop."""
        self._at, name = eqn, eqn.primitive.name
        scope = scope_of(self.scope, eqn.source_info.name_stack)
        is_jchop_eqn = is_jchop_scope(scope) and not is_jchop_result(eqn, scope)
        if not is_jchop_eqn and name in CUSTOM_CALLS:
            self._add_custom(eqn, scope)
            return
        params = eqn.params
        if not is_jchop_eqn and name not in _DTYPE_DEPENDENT_PRIMITIVES:
            inner_scope = scope_of(scope, "", params.get("name"))
            params = {key: self.to.param(value, inner_scope) for key, value in params.items()}
        if is_jchop_eqn or name in _DTYPE_DEPENDENT_PRIMITIVES or not self._supports_carrier(eqn, params):
            self.eqns.append(eqn.replace(invars=[self.read(v, v.aval) for v in eqn.invars]))
            return
        operands = list(map(self.read, eqn.invars))
        self.eqns.append(eqn.replace(invars=operands, outvars=list(map(self.new, eqn.outvars)), params=params))

    def _supports_carrier(self, eqn: Any, params: dict[str, Any]) -> bool:
        """Whether a primitive takes and gives wide numbers; those without a rule are asked."""
        name, narrow = eqn.primitive.name, any(self.to.is_narrower(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if not narrow or name in self.to.primitives or name in BATCHED_CALLS:
            return True
        try:
            avals = [self.to.wide(v.aval) for v in eqn.invars]
            out = jax.make_jaxpr(lambda *args: bind(eqn.primitive, params, *args))(*avals).out_avals
        except Exception:  # any error of another package
            return False
        return not any(map(self.to.is_narrower, out))

    def _add_custom(self, eqn: Any, scope: str) -> None:
        """A function with a rule for derivatives, which the rule computes in the function's own dtypes."""
        (program,) = (x for x in eqn.params.values() if hasattr(jaxpr_of(x)[0], "eqns"))
        inner = self.to.program(program, scope, inner=True)
        if inner is program:
            self.eqns.append(eqn.replace(invars=[self.read(v, v.aval) for v in eqn.invars]))
            return

        def own(*args: Any) -> list[Any]:
            own_args = [
                x.astype(v.aval.dtype) if _is_wide_number(v.aval) else x for x, v in zip(args, eqn.invars, strict=True)
            ]
            out = bind(eqn.primitive, eqn.params, *own_args)
            return [x.astype(self.to.wide(v.aval).dtype) for x, v in zip(out, eqn.outvars, strict=True)]

        def run(args: Any, extra: None) -> list[Any]:
            del extra
            return jaxpr_as_fun(inner)(*args)

        operands = list(map(self.read, eqn.invars))
        call_jaxpr = jax.make_jaxpr(lambda *args: with_derivative_of(own, run, args, None))(*(v.aval for v in operands))
        (call,) = call_jaxpr.jaxpr.eqns
        self.eqns.append(call.replace(invars=operands, outvars=list(map(self.new, eqn.outvars)), **self._place(call)))
