"""Operations of the carrier, their results rounded once; and `nextafter`, which gives neighbours in the format."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import CARRIERS, ordered_integers, split_sign
from jchop._common.checks import short_repr
from jchop._common.settings import always_jit
from jchop._core.matmul.operations import spec_draws
from jchop._emulate.rules.run_task import round_value
from jchop._emulate.rules.step import EmulatedStep
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import SeedDraw, Seeds
from jchop._spec.spec import Spec
from jchop.formats.rounding import Rounding

Array = jax.Array

#: The first draw number of imaginary parts.
_FIRST_IMAGINARY_DRAW = 1 << 30


def run_in_carrier(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The carrier's results of an equation, rounded once if the plan has a spec; derivatives are the carrier's."""
    results = _carrier_results(step, args)
    numbers = range(step.result_number, step.result_number + len(results))
    return [
        x if spec is None else round_with_draw(x, spec, seeds, number)
        for x, spec, number in zip(results, step.out, numbers, strict=True)
    ]


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

    def run(values: list[Array], extra: None) -> Array:
        del extra
        x, y = values
        next_value = lax.nextafter(x, y)
        return jnp.where(
            is_less_by_bits(y, x),
            round_toward(next_value, spec, Rounding.DOWN),
            round_toward(next_value, spec, Rounding.UP),
        )

    return [straight_through(run, lax.nextafter, list(jnp.broadcast_arrays(*args)), None)]


def is_less_by_bits(x: Array, y: Array) -> Array:
    """Whether x < y, by bits: a device may take subnormal numbers for zero."""
    carrier = CARRIERS[x.dtype.name]
    return ordered_integers(*split_sign(x, carrier)) < ordered_integers(*split_sign(y, carrier))


def round_toward(x: Array, spec: Spec, rounding: Rounding) -> Array:
    """The next value of the format in a direction, or `x` itself if it is one."""
    return round_value(x, Spec(spec.format, rounding, flush=spec.flush))
