"""Jaxprs compared, and jaxprs with other constants or programs within."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jchop._program.step import BATCHED_CALLS, CUSTOM_CALLS, REMAT_CALLS, is_reference, jaxpr_of

#: Calls whose other parameters are rules of transformations. JAX makes new ones in each trace.
_CALLS_WITH_RULES = (*CUSTOM_CALLS, *REMAT_CALLS, *BATCHED_CALLS)


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
    return len(ones) == len(others) and all(_same_atom(place, a, b) for a, b in zip(ones, others, strict=True))


def _same_atom(place: dict[Any, Any], a: Any, b: Any) -> bool:
    if not isinstance(a, Literal):
        return not isinstance(b, Literal) and place.get(a) is b
    return isinstance(b, Literal) and a.aval == b.aval and same_constant(a.val, b.val)


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
        (one, constants), (other, others) = jaxpr_of(a), jaxpr_of(b)
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
    jaxpr, before = jaxpr_of(program)
    after = [_own_constant(x) for x in before] if consts is None else consts
    eqns, results = list(map(_own_equation, jaxpr.eqns)), list(map(_own_atom, jaxpr.outvars))
    changes = {
        name: new for name, new in (("eqns", eqns), ("outvars", results)) if not _same_items(new, getattr(jaxpr, name))
    }
    new = jaxpr.replace(**changes) if changes else jaxpr
    if program is jaxpr and not before:
        return new
    return program if new is jaxpr and _same_items(after, before) else program.replace(jaxpr=new, consts=list(after))


def _same_items(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _own_constant(x: Any) -> Any:
    changes = hasattr(x, "__array__") and not isinstance(x, _IMMUTABLE_CONSTANTS) and not is_reference(x)
    return np.array(x) if changes else x


def _own_atom(v: Any) -> Any:
    if not isinstance(v, Literal):
        return v
    value = _own_constant(v.val)
    return v if value is v.val else Literal(value, v.aval)


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
    return program(value) if hasattr(jaxpr_of(value)[0], "eqns") else leaf(value)
