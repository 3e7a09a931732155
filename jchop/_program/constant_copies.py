"""Programs with their own copies of NumPy arrays that a function read, which may change after the trace.

JAX takes such an array as a constant without a copy. If it converts the dtype, it takes the same converted array again
as long as anything refers to it, also in other functions, and although the array has changed since. So a program that
is kept must not refer to either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jchop._program.step import is_reference, jaxpr_of

__all__ = ["with_own_constants"]

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
    operands, params = list(map(_own_atom, eqn.invars)), {name: _own_param(value) for name, value in eqn.params.items()}
    if _same_items(operands, eqn.invars) and _same_items(list(params.values()), list(eqn.params.values())):
        return eqn
    return eqn.replace(invars=operands, params=params)


def _own_param(value: Any) -> Any:
    if isinstance(value, tuple | list):
        new = list(map(_own_param, value))
        if _same_items(new, value):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return with_own_constants(value) if hasattr(jaxpr_of(value)[0], "eqns") else value
