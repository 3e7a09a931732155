"""Whether two jaxprs are the same program: equal equations on corresponding variables, under equal scopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jchop._program.step import BATCHED_CALLS, CUSTOM_CALLS, REMAT_CALLS, jaxpr_of

__all__ = ["same_constant", "same_param", "same_program"]


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
