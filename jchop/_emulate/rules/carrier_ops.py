"""Operations of the carrier, their results rounded once: `nextafter`, which gives neighbours in the format; draws."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from jchop._common.bit_ops import CARRIERS, ordered_integers, split_sign
from jchop._common.checks import short_repr
from jchop._common.settings import always_jit
from jchop._core.matmul.operations import spec_draws
from jchop._emulate.rules.run_task import EmulatedStep, RandomDraw, round_value
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import SeedDraw, Seeds
from jchop._program.step import PLAIN_CALLS, jaxpr_of
from jchop._spec.spec import Spec
from jchop.formats.rounding import Rounding

#: The first draw number of imaginary parts.
_FIRST_IMAGINARY_DRAW = 1 << 30


def run_in_carrier(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The carrier's results of an equation, rounded once if the plan has a spec; derivatives are the carrier's."""
    return round_results(step, seeds, _carrier_results(step, args))


def round_results(step: EmulatedStep, seeds: Seeds | None, results: list[Any]) -> list[Any]:
    """The results of an equation rounded to the specs of its plan."""
    pairs = enumerate(zip(results, step.out, strict=True), step.result_number)
    return [round_with_draw(x, spec, seeds, number) if isinstance(spec, Spec) else x for number, (x, spec) in pairs]


def _carrier_results(step: EmulatedStep, args: list[Any]) -> list[Any]:
    """The carrier's results, or the results of the user's rule."""
    eqn, function = step.eqn, step.choice.function
    if function is None:
        return bind(eqn.primitive, eqn.params, *args)
    name = f"rules[{step.name!r}]"
    try:
        out = function.call(*args, **eqn.params)
    except TypeError as error:
        if _takes_arguments(function.call, args, eqn.params):
            raise
        raise TypeError(
            f"{name} is a function that does not take what it is called with: the operands, of which there are "
            f"{len(args)}, and the primitive's parameters as keywords ({', '.join(eqn.params) or 'here none'}); write "
            f"it as lambda x, **params: ...; Python: {error}"
        ) from error
    want = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    try:
        results = [jnp.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} returned {short_repr(out)}; the primitive has arrays of (shape, dtype) {want}"
        ) from error
    got = [(x.shape, x.dtype) for x in results]
    if got != want:
        raise TypeError(f"{name} returned arrays of (shape, dtype) {got}; the primitive has {want}")
    return results


def _takes_arguments(function: Any, args: list[Any], params: dict[str, Any]) -> bool:
    """Whether a function has parameters for these arguments."""
    try:
        inspect.signature(function).bind(*args, **params)
    except TypeError:
        return False
    except ValueError:  # some builtin functions have no signature
        pass
    return True


def round_with_draw(x: Array, spec: Spec, seeds: Seeds | None, number: int) -> Array:
    """`x`, or its two parts, rounded with the draw of this number; the derivative is the identity's."""
    has_parts, draw = jnp.iscomplexobj(x), None
    if spec_draws(spec):
        assert seeds is not None
        draw = seeds.draw(jax.eval_shape(lax.real, x) if has_parts else jax.typeof(x), number)
    return (_round_complex if has_parts else round_value)(x, spec, draw)


@partial(always_jit, static_argnums=1)
def _round_complex(x: Array, spec: Spec, draw: SeedDraw | None) -> Array:
    later = None if draw is None else draw.later(_FIRST_IMAGINARY_DRAW)
    return lax.complex(round_value(lax.real(x), spec, draw), round_value(lax.imag(x), spec, later))


def run_nextafter(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """`nextafter`: the next value of the format, which is the carrier's next value rounded in that direction."""
    del seeds
    spec = step.choice.spec
    if spec is None:
        return bind(step.eqn.primitive, step.eqn.params, *args)

    def run(values: list[Array], _: None) -> Array:
        x, y = values
        next_value = lax.nextafter(x, y)
        down, up = (round_toward(next_value, spec, way) for way in (Rounding.DOWN, Rounding.UP))
        return jnp.where(is_less_by_bits(y, x), down, up)

    return [straight_through(run, lax.nextafter, list(jnp.broadcast_arrays(*args)), None)]


def is_less_by_bits(x: Array, y: Array) -> Array:
    """Whether x < y, by bits: a device may take subnormal numbers for zero."""
    carrier = CARRIERS[x.dtype.name]
    return ordered_integers(*split_sign(x, carrier)) < ordered_integers(*split_sign(y, carrier))


def round_toward(x: Array, spec: Spec, rounding: Rounding) -> Array:
    """The next value of the format in a direction, or `x` itself if it is one."""
    return round_value(x, Spec(spec.format, rounding, flush=spec.flush))


# -- random draws ------------------------------------------------------------------------------------------------------
#
# Random draws: a call of a function of `jax.random` is one operation of the carrier, rounded once.
#
# Intermediate values are not rounded: a rounded uniform number may be 0, and its logarithm would be infinite.
# Tracebacks tell which equations belong to a call, also for functions that JAX does not compile apart
# (`jax.random.categorical`).


@lru_cache(maxsize=1)
def _random_files() -> frozenset[str]:
    """The source files of the functions of `jax.random`."""
    functions = (inspect.unwrap(f) for f in vars(jax.random).values() if callable(f))
    return frozenset(f.__code__.co_filename for f in functions if inspect.isfunction(f))


def draws_of(jaxpr: Any) -> dict[int, RandomDraw]:
    """The equations of a jaxpr that belong to calls of `jax.random`, by their id."""
    if not any(_is_key_variable(v) for eqn in jaxpr.eqns for v in eqn.invars):
        return {}
    home = str(getattr(jaxpr.debug_info, "func_src_info", "")).rpartition(":")[0]
    calls = [_random_call_of(eqn, home) for eqn in jaxpr.eqns]
    results_of: dict[Hashable, set[Any]] = {}
    readers: dict[Any, set[Hashable]] = {v: {None} for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn, call in zip(jaxpr.eqns, calls, strict=True):
        results_of.setdefault(call, set()).update(eqn.outvars)
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, set()).add(call)
    draws = {}
    for eqn, call in zip(jaxpr.eqns, calls, strict=True):
        if call is not None:
            leaves = tuple(bool(readers.get(v, set()) - {call}) for v in eqn.outvars)
            draws[id(eqn)] = RandomDraw(frozenset(results_of[call]), leaves, eqn.primitive.name in PLAIN_CALLS)
    return draws


def _is_key_variable(v: Any) -> bool:
    return hasattr(v.aval, "dtype") and jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _random_call_of(eqn: Any, home: str) -> Hashable | None:
    """The frames around the call of `jax.random` that made the equation; None for other equations.

    Frames outside of the jaxpr's function (`home`) are not searched: JAX may take a traced function from a cache.
    """
    frames = eqn.source_info.traceback
    if frames is None:
        return None
    codes, places = frames.raw_frames()
    outermost = None
    for i, code in enumerate(codes):
        if home == f"{code.co_name} at {code.co_filename}":
            break
        if code.co_filename in _random_files():
            outermost = i
    if outermost is None:
        return None
    return tuple((id(code), place) for code, place in list(zip(codes, places, strict=True))[outermost + 1 :])


# -- ends --------------------------------------------------------------------------------------------------------------

#: Functions whose results grow with their random bits, and are never one of the ends of their interval.
_MONOTONE_DRAWS = ("_uniform", "_truncated_normal")


def run_draw(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of a draw, rounded once; derivatives are the carrier's."""
    results, spec = run_in_carrier(step, seeds, args), step.choice.spec
    limits = None if spec is None else _draw_limits(step, args)
    if spec is None or limits is None:
        return results
    return [_clamp_to_limits(results[0], spec, limits), *results[1:]]  # then values that a derivative needs


def _draw_limits(step: EmulatedStep, args: list[Any]) -> tuple[Array, Array] | None:
    """The least and the largest result that a draw may have, in the carrier; None for a draw without excluded ends."""
    draws = any(map(_is_key_variable, step.eqn.invars))  # else a part before the draw
    if draws and step.eqn.params.get("name") in _MONOTONE_DRAWS:
        run = partial(_run_with_bits, jaxpr_of(step.eqn.params["jaxpr"]), args)
        least, largest = (lax.stop_gradient(run(bits)[0]) for bits in (0, -1))
        # The end is the last operand, or the one of a program's derivative: the operands are the least and the length.
        ends = [args[-1], *([args[-2] + args[-1]] if len(args) > 2 else [])]
        among = jnp.any(jnp.stack([_equals_end(largest, end) for end in ends]), 0)
        return least, jnp.where(among, lax.nextafter(largest, least), largest)
    if step.name == "rng_uniform":
        least, end = args
        return least, lax.nextafter(end, least)
    return None


def _equals_end(x: Array, end: Any) -> Array:
    """Whether a result equals the end of its interval, by a rounding of the carrier; the end may have batch axes."""
    end = jnp.asarray(end)
    shapes = {end.shape, (*end.shape, *(1,) * (x.ndim - end.ndim))}
    fits = [shape for shape in shapes if all(n in (1, m) for n, m in zip(shape[::-1], x.shape[::-1], strict=False))]
    return sum((x == end.reshape(shape) for shape in fits), jnp.zeros(x.shape, bool))


def _run_with_bits(program: tuple[Any, tuple[Any, ...]], args: list[Any], bits: int) -> list[Array]:
    """The results of a program if every random bit is the given one."""
    jaxpr, consts = program
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        if eqn.primitive.name == "random_bits":
            (v,) = eqn.outvars
            out = [jnp.full(v.aval.shape, bits, jnp.int32).astype(v.aval.dtype)]
        elif "jaxpr" in eqn.params and any(map(_is_key_variable, eqn.invars)):
            out = _run_with_bits(jaxpr_of(eqn.params["jaxpr"]), values, bits)
        else:
            out = bind(eqn.primitive, eqn.params, *values)
        env.update(zip(eqn.outvars, out, strict=True))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _clamp_to_limits(x: Array, spec: Spec, limits: tuple[Array, Array]) -> Array:
    """`x`, which is rounded, moved to the nearest value of the format within the limits, if there is one.

    Only results at an excluded end are moved; rounding toward zero would move all results.
    """

    def run(values: list[Array], limits: tuple[Array, Array]) -> Array:
        (x,) = values
        least, largest = round_toward(limits[0], spec, Rounding.UP), round_toward(limits[1], spec, Rounding.DOWN)
        least, largest = (jnp.broadcast_to(v, x.shape) for v in (least, largest))
        inside = jnp.where(is_less_by_bits(x, least), least, jnp.where(is_less_by_bits(largest, x), largest, x))
        return jnp.where(is_less_by_bits(largest, least) | jnp.isnan(x), x, inside)

    return straight_through(run, lambda x: x, [x], limits)
