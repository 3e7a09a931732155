"""Complex numbers as pairs: sums, differences and products by real operations, each rounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.settings import always_jit
from jchop._core.matmul.operations import round_operation, spec_draws
from jchop._emulate.rules.accumulate import accumulate_in_order
from jchop._emulate.rules.run_task import Task, run_task
from jchop._emulate.rules.step import EmulatedStep
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import SeedDraw, Seeds
from jchop._spec.spec import Spec

Array = jax.Array
ComplexParts = tuple[Array, Array]


def run_complex(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The result of an equation with complex operands or a complex result; derivatives are the carrier's."""
    spec, name = step.choice.spec, step.name
    assert spec is not None
    arrays = list(jnp.broadcast_arrays(*map(jnp.asarray, args)))
    first = None
    if seeds is not None and spec_draws(spec) and name in _COMPLEX_ROUNDING:
        first = seeds.draw(jax.eval_shape(lambda x: x.real, arrays[0]), step.number + 4)
    params = tuple(sorted(step.eqn.params.items()))
    return [_run_complex_op(step.eqn.primitive, params, spec, step.apart, arrays, first)]


@partial(always_jit, static_argnums=(0, 1, 2, 3))
def _run_complex_op(
    primitive: Any, params: Any, spec: Spec, apart: bool, arrays: list[Array], first: SeedDraw | None
) -> Array:
    """A function of the program that all equations with equal facts call."""
    run = partial(_apply_complex_rule, primitive.name, spec, apart)
    return straight_through(run, lambda *args: bind(primitive, dict(params), *args)[0], arrays, first)


def run_complex_sum(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """A sum is two real sums, and a scatter that adds is two scatters.

    A product of matrices is four real products: two are subtracted and two are added.
    """
    (aval,), spec = (v.aval for v in step.eqn.outvars), step.choice.spec
    if step.name in _SEQUENTIAL_PRODUCTS:
        raise NotImplementedError(
            f"primitive {step.name!r} ({step.place}): accumulate={step.choice.accumulate} forms no products of "
            f"complex numbers one after the other; leave it in the carrier by rules={{{step.name!r}: None}}"
        )
    params, zero = dict(step.eqn.params), jnp.zeros((), aval.dtype).real
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = zero.dtype
    if "update_jaxpr" in params:
        params["update_jaxpr"] = jax.make_jaxpr(_SCATTER_UPDATES[step.name])(zero, zero).jaxpr

    def total(part: int, *values: Array) -> Array:
        program = jax.make_jaxpr(partial(step.eqn.primitive.bind, **params))(*values)
        one = replace(step, eqn=program.jaxpr.eqns[0], kind="accumulating", number=0)
        return accumulate_in_order(one, None if seeds is None else seeds.turn(step.number + 5, part), list(values))[0]

    def two(name: str, part: int, x: Array, y: Array) -> Array:
        if spec is None:
            return x + y if name == "add" else x - y
        word = seeds.words(x, step.result_number + part) if spec_draws(spec) and seeds is not None else None
        return straight_through(
            lambda values, word: round_operation(name, values, spec, word),
            lax.add if name == "add" else lax.sub,
            [x, y],
            word,
        )

    real, imag = ([of(x) if jnp.iscomplexobj(x) else x for x in args] for of in (lax.real, lax.imag))
    if len(args) != 2:
        return [lax.complex(total(0, *real), total(1, *imag))]
    (a, c), (b, d) = real, imag
    first = two("sub", 0, total(0, a, c), total(1, b, d))
    return [lax.complex(first, two("add", 1, total(2, a, d), total(3, b, c)))]


_SCATTER_UPDATES = {"scatter-add": lax.add, "scatter-sub": lax.sub}
_SEQUENTIAL_PRODUCTS = ("reduce_prod", "cumprod", "scatter-mul")


class _PartArithmetic:
    """Operations rounded to one spec. Each call takes the next draw."""

    def __init__(self, spec: Spec, apart: bool, first: SeedDraw | None) -> None:
        self.spec, self.apart, self._first, self._count = spec, apart, first, itertools.count()

    def do(self, name: str, x: Array, y: Array) -> Array:
        """An operation on parts."""
        task = Task(_PART_PRIMITIVES[name], (), "exact", self.spec, (self.spec, self.spec), self.apart)
        return run_task(task, [x, y], [] if self._first is None else [self._first.later(next(self._count))])[0]


_PART_PRIMITIVES = {"add": lax.add_p, "mul": lax.mul_p}
#: Those that round.
_COMPLEX_ROUNDING = frozenset(("add", "add_any", "sub", "mul", "square"))


def _apply_complex_rule(name: str, spec: Spec, apart: bool, args: list[Array], first: SeedDraw | None) -> Array:
    parts = [(lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x, x) for x in args]
    result = _COMPLEX_RULES[name](_PartArithmetic(spec, apart, first), *parts)
    return lax.complex(*result) if isinstance(result, tuple) else result


def _complex_add(now: _PartArithmetic, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    return now.do("add", x[0], y[0]), now.do("add", x[1], y[1])


def _complex_sub(now: _PartArithmetic, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    return now.do("add", x[0], -y[0]), now.do("add", x[1], -y[1])  # which is how a difference is computed


def _complex_mul(now: _PartArithmetic, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    """Four products and two sums."""
    (a, b), (c, d) = x, y
    real = now.do("add", now.do("mul", a, c), -now.do("mul", b, d))
    return real, now.do("add", now.do("mul", a, d), now.do("mul", b, c))


_COMPLEX_RULES: dict[str, Callable[..., ComplexParts | Array]] = {
    "add": _complex_add,
    "add_any": _complex_add,
    "sub": _complex_sub,
    "mul": _complex_mul,
    "square": lambda now, x: _complex_mul(now, x, x),
    "neg": lambda now, x: (-x[0], -x[1]),
    "conj": lambda now, x: (x[0], -x[1]),
    "real": lambda now, x: x[0],
    "imag": lambda now, x: x[1],
    "complex": lambda now, x, y: (x[0], y[0]),
}
