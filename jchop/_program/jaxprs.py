"""Jaxprs compared, and jaxprs with other constants, programs within, or dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from jchop._program import step
from jchop._program.bind import bind, constant_of, with_derivative_of
from jchop._program.control import as_jax_value

#: Calls whose other parameters are rules of transformations. JAX makes new ones in each trace.
_CALLS_WITH_RULES = (*step.CUSTOM_CALLS, *step.REMAT_CALLS, *step.BATCHED_CALLS)


def same_program(one: Any, other: Any, rules: bool = True) -> bool:
    """Whether a plan of one jaxpr is a plan of the other; constants may differ. False in case of doubt.

    Args:
        one: a jaxpr.
        other: another one.
        rules: whether the rules of derivatives and batches are compared, too; a run on values needs none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> programs = [jax.make_jaxpr(lambda x, a=a: jnp.sin(x) * a)(1.0).jaxpr for a in (2.0, 2.0, 3.0)]
        >>> same_program(*programs[:2]), same_program(*programs[1:])
        (True, False)
    """
    if one is other:
        return True
    if len(one.eqns) != len(other.eqns) or one.effects != other.effects:
        return False
    place: dict[Any, Any] = {}
    if not _bind_variables(place, [*one.invars, *one.constvars], [*other.invars, *other.constvars]):
        return False
    return all(_same_eqn(place, a, b, rules) for a, b in zip(one.eqns, other.eqns, strict=True)) and _same_atoms(
        place, one.outvars, other.outvars
    )


def _bind_variables(place: dict[Any, Any], ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether new variables have the same types; from here on they correspond."""
    place.update(zip(ones, others, strict=False))
    return [v.aval for v in ones] == [v.aval for v in others]


def _same_atoms(place: dict[Any, Any], ones: Sequence[Any], others: Sequence[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if not isinstance(a, Literal):
            return not isinstance(b, Literal) and place.get(a) is b
        return isinstance(b, Literal) and a.aval == b.aval and same_constant(a.val, b.val)

    return len(ones) == len(others) and all(map(same, ones, others))


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants have the same bits. False in case of doubt."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, np.ndarray | np.generic | bool | int | float | complex):
        return False
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()  # NaN and -0, too


def _same_eqn(place: dict[Any, Any], a: Any, b: Any, rules: bool) -> bool:
    names = [n for n, x in a.params.items() if rules or a.primitive.name not in _CALLS_WITH_RULES or _is_program(x)]
    return (
        a.primitive is b.primitive
        and _same_atoms(place, a.invars, b.invars)
        and str(a.source_info.name_stack) == str(b.source_info.name_stack)
        and a.params.keys() == b.params.keys()
        and all(same_param(a.params[name], b.params[name], rules) for name in names)
        and a.ctx == b.ctx
        and a.effects == b.effects
        and _bind_variables(place, a.outvars, b.outvars)
    )


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def same_param(a: Any, b: Any, rules: bool = True) -> bool:
    """Whether two parameters of one name are equal. False in case of doubt."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if _is_program(a):
        (one, constants), (other, others) = step.jaxpr_of(a), step.jaxpr_of(b)
        pairs = zip(constants, others, strict=False)
        same = len(constants) == len(others) and all(same_constant(x, y) for x, y in pairs)
        return same and same_program(one, other, rules)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same_param(x, y, rules) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_param(value, b[key], rules) for key, value in a.items())
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False


# -- copies of constants ---------------------------------------------------------------------------------------------
#
# JAX takes an array of NumPy that a function read as a constant without a copy. If it converts the dtype, it takes the
# same converted array again as long as anything refers to it, also in other functions, and although the array has
# changed since. So a program that is kept must not refer to either.


#: Constants that never change.
_IMMUTABLE_CONSTANTS = (jax.Array, np.generic, bool, int, float, complex)


def with_own_constants(program: Any, consts: Sequence[Any] | None = None) -> Any:
    """A jaxpr with copies of its constants and literals that are NumPy arrays; itself if there are none.

    Args:
        program: the jaxpr, with or without its constants.
        consts: replace its own constants. Default: copies of them.

    Example:
        >>> import jax, numpy as np
        >>> array = np.array(2.0)
        >>> own = with_own_constants(jax.make_jaxpr(lambda x: x * array)(1.0))
        >>> array[...] = 7.0
        >>> new = jax.make_jaxpr(lambda x: x * array)(1.0)
        >>> [float(one.eqns[-1].invars[1].val) for one in (own, new)]
        [2.0, 7.0]
    """
    jaxpr, before = step.jaxpr_of(program)
    after = [_own_constant(x) for x in before] if consts is None else consts
    eqns, results = list(map(_own_equation, jaxpr.eqns)), list(map(_own_atom, jaxpr.outvars))
    same = _same_items(eqns, jaxpr.eqns) and _same_items(results, jaxpr.outvars)
    new = jaxpr if same else jaxpr.replace(eqns=eqns, outvars=results)
    if program is jaxpr and not before:
        return new
    return program if new is jaxpr and _same_items(after, before) else program.replace(jaxpr=new, consts=list(after))


def _same_items(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _own_constant(x: Any) -> Any:
    changes = hasattr(x, "__array__") and not isinstance(x, _IMMUTABLE_CONSTANTS) and not step.is_reference(x)
    return np.array(x) if changes else x


def _own_atom(v: Any) -> Any:
    value = _own_constant(v.val) if isinstance(v, Literal) else None
    return v if value is None or value is v.val else Literal(value, v.aval)


def _own_equation(eqn: Any) -> Any:
    operands = list(map(_own_atom, eqn.invars))
    params = {name: map_param(value, with_own_constants, lambda x: x) for name, value in eqn.params.items()}
    if _same_items(operands, eqn.invars) and _same_items(list(params.values()), list(eqn.params.values())):
        return eqn
    return eqn.replace(invars=operands, params=params)


def map_param(value: Any, program: Callable[[Any], Any], leaf: Callable[[Any], Any]) -> Any:
    """A parameter of an equation after changes of the programs in it, and of everything else."""
    if isinstance(value, tuple | list):
        new = [map_param(each, program, leaf) for each in value]
        if _same_items(new, value):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return program(value) if hasattr(step.jaxpr_of(value)[0], "eqns") else leaf(value)


# -- wider dtypes ------------------------------------------------------------------------------------------------------


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
    inexact = not step.is_reference(aval) and hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)
    return inexact and jnp.finfo(aval.dtype).bits >= 16


@dataclass(frozen=True)
class Widening:
    """Writes programs again with a carrier in place of narrower dtypes.

    Args:
        carrier: the dtype.
        primitives: the names of primitives that take other dtypes.
        constant: gives a real constant its new value, from its value in its own dtype, the primitive and the scope that
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
        jaxpr, consts = step.jaxpr_of(program)
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
        pairs = zip(consts, constvars, strict=True)
        wide_consts = [as_jax_value(x).astype(v.aval.dtype) if _is_wide_number(v.aval) else x for x, v in pairs]
        return program.replace(jaxpr=new.replace(constvars=constvars), consts=wide_consts)

    def _has_narrow(self, jaxpr: Any) -> bool:
        variables = [v for part in (jaxpr, *jaxpr.eqns) for v in (*part.invars, *part.outvars)]
        own = any(self.is_narrower(v.aval) for v in (*jaxpr.constvars, *variables))
        return own or any(self._has_narrow(each) for eqn in jaxpr.eqns for each in step.programs_of(eqn))

    def param(self, value: Any, scope: str) -> Any:
        """A parameter of an equation, with wide dtypes and programs."""

        def wide_dtype(value: Any) -> Any:
            is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
            return self.wide(jax.ShapeDtypeStruct((), value)).dtype if is_dtype else value

        return map_param(value, lambda program: self.program(program, scope, inner=True), wide_dtype)


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
            like = np.zeros((), variable.aval.dtype)
            (cast,) = jax.make_jaxpr(lambda x: lax.convert_element_type(x, aval.dtype))(like).eqns
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
        return self.to.constant(value, eqn.primitive.name, step.scope_of(self.scope, eqn.source_info.name_stack))

    def add(self, eqn: Any) -> None:
        """Writes an equation in the carrier, or in its own dtypes if it has no other form or is a part of jchop."""
        self._at, name = eqn, eqn.primitive.name
        scope = step.scope_of(self.scope, eqn.source_info.name_stack)
        is_jchop_eqn, params = step.is_jchop_scope(scope) and not step.is_jchop_result(eqn, scope), eqn.params
        if not is_jchop_eqn and name in step.CUSTOM_CALLS:
            if self._add_custom(eqn, scope):
                return
        elif not is_jchop_eqn and name not in _DTYPE_DEPENDENT_PRIMITIVES:
            inner_scope = step.scope_of(scope, "", params.get("name"))
            params = {key: self.to.param(value, inner_scope) for key, value in params.items()}
            if self._supports_carrier(eqn, params):
                operands = list(map(self.read, eqn.invars))
                self.eqns.append(eqn.replace(invars=operands, outvars=list(map(self.new, eqn.outvars)), params=params))
                return
        self.eqns.append(eqn.replace(invars=[self.read(v, v.aval) for v in eqn.invars]))

    def _supports_carrier(self, eqn: Any, params: dict[str, Any]) -> bool:
        """Whether a primitive takes and gives wide numbers; those without a rule are asked."""
        name, narrow = eqn.primitive.name, any(self.to.is_narrower(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if not narrow or name in self.to.primitives or name in step.BATCHED_CALLS:
            return True
        try:
            avals = [self.to.wide(v.aval) for v in eqn.invars]
            out = jax.make_jaxpr(lambda *args: bind(eqn.primitive, params, *args))(*avals).out_avals
        except Exception:  # any error of another package
            return False
        return not any(map(self.to.is_narrower, out))

    def _add_custom(self, eqn: Any, scope: str) -> bool:
        """Writes a function with a rule for derivatives, which is in the function's own dtypes; False if all is."""
        (program,) = (x for x in eqn.params.values() if hasattr(step.jaxpr_of(x)[0], "eqns"))
        inner = self.to.program(program, scope, inner=True)
        if inner is program:
            return False

        def own(*args: Any) -> list[Any]:
            pairs = zip(args, eqn.invars, strict=True)
            own_args = (x.astype(v.aval.dtype) if _is_wide_number(v.aval) else x for x, v in pairs)
            out = bind(eqn.primitive, eqn.params, *own_args)
            return [x.astype(self.to.wide(v.aval).dtype) for x, v in zip(out, eqn.outvars, strict=True)]

        def call(*args: Any) -> list[Any]:
            return with_derivative_of(own, lambda args, _: jaxpr_as_fun(inner)(*args), args, None)

        operands = list(map(self.read, eqn.invars))
        (new,) = jax.make_jaxpr(call)(*(v.aval for v in operands)).eqns
        self.eqns.append(new.replace(invars=operands, outvars=list(map(self.new, eqn.outvars)), **self._place(new)))
        return True
