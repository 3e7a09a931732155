"""Functions that are one operation, although JAX composes them of several, whose roundings would add up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.scipy import special

from jchop._emulate.rules import exact_functions
from jchop._program.jaxprs import same_constant, same_param
from jchop._program.step import programs_of
from jchop._spec.spec import Spec

Array = jax.Array


@dataclass(frozen=True)
class NamedFunction:
    """A function in place of the primitive of an equation.

    Args:
        name: its name; if `_core.elementary` has it, its exact value is rounded once.
        function: the function whose equations are found in a program.
        operands: the dtypes of operands with which it is traced for that.
        exact: the exact result of operands, rounded once under a spec, with a random word for each element. None: by
            the name, else the carrier's results are rounded.
        carrier: the function in the carrier, if it is another one; it also defines the derivative.
        carrier_is_exact: whether the carrier's results are exact.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[str, ...] = ("float32",)
    exact: Callable[[tuple[Array, ...], Spec, Array | None], Array] | None = None
    carrier: Callable[..., Any] | None = None
    carrier_is_exact: bool = False
    multiple_results: bool = False

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """As of a primitive."""
        return params

    def bind(self, *args: Any) -> Any:
        """The carrier's results, as of a primitive."""
        return (self.carrier or self.function)(*args)


_TWO = ("float32", "float32")
#: Functions of `jax.numpy`, `jax.scipy.special` and `jax.nn`.
FUNCTIONS = (
    NamedFunction("degrees", jnp.degrees),
    NamedFunction("radians", jnp.radians),
    NamedFunction("log2", jnp.log2),
    NamedFunction("log10", jnp.log10),
    NamedFunction("logaddexp", jnp.logaddexp, _TWO),
    NamedFunction("hypot", jnp.hypot, _TWO),
    NamedFunction("gamma", special.gamma),
    NamedFunction("gelu", partial(jax.nn.gelu, approximate=False)),
    NamedFunction("floor_divide", jnp.floor_divide, _TWO, exact_functions.exact_floor_divide),
    NamedFunction("remainder", jnp.remainder, _TWO, exact_functions.exact_mod),
    NamedFunction("ldexp", jnp.ldexp, ("float32", "int32"), exact_functions.exact_ldexp),
    NamedFunction("trunc", jnp.trunc, carrier_is_exact=True),
    NamedFunction(
        "frexp", jnp.frexp, carrier=exact_functions.carrier_frexp, carrier_is_exact=True, multiple_results=True
    ),
    NamedFunction("modf", jnp.modf, carrier=exact_functions.carrier_modf, carrier_is_exact=True, multiple_results=True),
)


def with_functions(jaxpr: Any, functions: Sequence[NamedFunction]) -> Any:
    """A jaxpr with one equation for each call of these functions."""
    by_start: dict[Any, list[NamedFunction]] = {}
    for function in functions:
        avals = tuple(((), dtype, False) for dtype in function.operands)
        if (known := _equations_of(function, avals)) is not None:
            by_start.setdefault(_start_of(known[0]), []).append(function)
    eqns, place = [], 0
    while place < len(jaxpr.eqns):
        candidates = by_start.get(_start_of(jaxpr.eqns[place]), ())
        calls = (_call_at(jaxpr, place, function) for function in candidates)
        eqn, count = next((call for call in calls if call is not None), (jaxpr.eqns[place], 1))
        eqns.append(eqn)
        place += count
    return jaxpr if all(map(lambda new, old: new is old, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


@lru_cache(maxsize=1024)
def _equations_of(function: NamedFunction, avals: tuple[Any, ...]) -> list[Any] | None:
    """The equations of a function for operands of these shapes and dtypes, weak or not; None if it takes no such."""
    try:
        return jax.make_jaxpr(function.function)(*(jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals)).eqns
    except (TypeError, ValueError):
        return None


def _start_of(eqn: Any) -> tuple[str, Any]:
    return eqn.primitive.name, eqn.params.get("name")


def _call_at(jaxpr: Any, place: int, function: NamedFunction) -> tuple[Any, int] | None:
    """The equation of a call whose equations begin at a place, and their number."""
    operands = [v for v in jaxpr.eqns[place].invars if len(function.operands) > 1 or not isinstance(v, Literal)]
    if len(operands) != len(function.operands) or not _have_dtypes(operands, function.operands):
        return None
    avals = tuple((v.aval.shape, v.aval.dtype, getattr(v.aval, "weak_type", False)) for v in operands)
    known = _equations_of(function, avals)
    if known is None:
        return None
    end = place + len(known)
    eqns, rest = jaxpr.eqns[place:end], jaxpr.eqns[end:]
    if len(eqns) != len(known) or not all(map(_are_alike, eqns, known)):
        return None
    inner = {v for eqn in eqns[:-1] for v in eqn.outvars}
    read = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)} - inner - set(_variables(operands))
    if read or any(v in inner for reader in (jaxpr.outvars, *(eqn.invars for eqn in rest)) for v in _variables(reader)):
        return None
    if not _have_equal_programs(eqns, known) and not _are_made_by(eqns, function):
        return None
    dtype = operands[0].aval.dtype
    floats = [
        _as_dtype(v, dtype) if name == "float32" else v for v, name in zip(operands, function.operands, strict=True)
    ]
    return eqns[-1].replace(primitive=function, params={}, invars=floats, effects=set()), len(known)


def _have_dtypes(operands: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether operands are of one dtype of floating-point numbers, or of integers, as those of the example are.

    An integer that is a constant may stand for a floating-point number.
    """
    first = getattr(operands[0].aval, "dtype", None)
    if first is None or not jnp.issubdtype(first, jnp.floating):
        return False
    for v, name in zip(operands, names, strict=True):
        dtype = getattr(v.aval, "dtype", np.dtype(bool))
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        if not (is_integer if name != "float32" else dtype == first or (is_integer and isinstance(v, Literal))):
            return False
    return True


def _as_dtype(v: Any, dtype: Any) -> Any:
    """A variable, or a constant of this dtype."""
    return Literal(np.asarray(v.val, dtype), v.aval.update(dtype=dtype)) if isinstance(v, Literal) else v


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _programs_of(eqn: Any) -> dict[str, Any]:
    return {name: x for name, x in eqn.params.items() if hasattr(x, "eqns") or hasattr(x, "jaxpr")}


def _are_alike(eqn: Any, known: Any) -> bool:
    """Whether two equations compute the same of corresponding operands, the programs that they call aside."""
    names = [] if _programs_of(known) else list(known.params)
    constants = [(v, k) for v, k in zip(eqn.invars, known.invars, strict=False) if isinstance(k, Literal)]
    return (
        _start_of(eqn) == _start_of(known)
        and len(eqn.invars) == len(known.invars)
        and all(same_param(eqn.params.get(name), known.params[name], rules=False) for name in names)
        and all(isinstance(v, Literal) and same_constant(v.val, k.val) for v, k in constants)
    )


def _have_equal_programs(eqns: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether equations call equal programs, one at least."""
    pairs = [
        (eqn.params.get(name), program)
        for eqn, other in zip(eqns, known, strict=True)
        for name, program in _programs_of(other).items()
    ]
    return bool(pairs) and all(same_param(one, other, rules=False) for one, other in pairs)


def _are_made_by(eqns: Sequence[Any], function: NamedFunction) -> bool:
    """Whether the function made these equations, as their tracebacks tell; a user may write the same operations.

    It is in the traceback of the last one, or within the program that this calls, which `jax.vmap` changes. The
    equations of a function that JAX compiles in place have the traceback of the call.
    """
    python = function.function.func if isinstance(function.function, partial) else function.function
    code = getattr(inspect.unwrap(python), "__code__", None)
    inner = [eqn for program in programs_of(eqns[-1]) for eqn in program.eqns[-1:]]
    frames = [_frames_of(eqn) for eqn in (*eqns, *inner)]
    is_inlined = len(eqns) > 1 and all(each == frames[0] for each in frames[: len(eqns)])
    return None not in frames and (any(code in codes for codes, _ in frames[len(eqns) - 1 :]) or is_inlined)


def _frames_of(eqn: Any) -> Any:
    traceback = eqn.source_info.traceback
    return None if traceback is None else traceback.raw_frames()
