"""Whether two jaxprs are the same program: equal equations on corresponding variables, under equal scopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jchop._program.step import jaxpr_of

__all__ = ["same_constant", "same_param", "same_program"]


def same_program(one: Any, other: Any) -> bool:
    """Whether a plan of one jaxpr is a plan of the other; constants may differ. False in case of doubt.

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
    if not _bound(place, [*one.invars, *one.constvars], [*other.invars, *other.constvars]):
        return False
    return all(_same_eqn(place, a, b) for a, b in zip(one.eqns, other.eqns, strict=True)) and _read(
        place, one.outvars, other.outvars
    )


def _bound(place: dict[Any, Any], ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether new variables have the same types; from here on they correspond."""
    place.update(zip(ones, others, strict=False))
    return [v.aval for v in ones] == [v.aval for v in others]


def _read(place: dict[Any, Any], ones: Sequence[Any], others: Sequence[Any]) -> bool:
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


def _same_eqn(place: dict[Any, Any], a: Any, b: Any) -> bool:
    return (
        a.primitive is b.primitive
        and _read(place, a.invars, b.invars)
        and str(a.source_info.name_stack) == str(b.source_info.name_stack)
        and a.params.keys() == b.params.keys()
        and all(same_param(value, b.params[name]) for name, value in a.params.items())
        and a.ctx == b.ctx
        and a.effects == b.effects
        and _bound(place, a.outvars, b.outvars)
    )


def same_param(a: Any, b: Any) -> bool:
    """Whether two parameters of one name are equal. False in case of doubt."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if hasattr(a, "eqns") or hasattr(a, "jaxpr"):
        (one, constants), (other, others) = jaxpr_of(a), jaxpr_of(b)
        pairs = zip(constants, others, strict=False)
        return len(constants) == len(others) and all(same_constant(x, y) for x, y in pairs) and same_program(one, other)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_param, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_param(value, b[key]) for key, value in a.items())
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False
