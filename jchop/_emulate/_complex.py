"""Complex numbers as pairs: sums, differences and products by real operations, each rounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._bits import CARRIERS
from jchop._core.arithmetic.operations import draws, operation
from jchop._core.rounding.elements import round_elements
from jchop._emulate._perform import bind, straight_through
from jchop._emulate._seeds import Seeds
from jchop._emulate._step import Step
from jchop.spec import Spec

Array = jax.Array
Pair = tuple[Array, Array]

__all__ = ["by_parts"]


def by_parts(step: Step, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The result of an equation with complex operands or a complex result; derivatives are the carrier's."""
    own = partial(bind, step.eqn.primitive, step.eqn.params)
    if step.choice.spec is None:
        return own(*args)
    arrays = list(jnp.broadcast_arrays(*map(jnp.asarray, args)))
    return [straight_through(partial(_run, step), lambda *args: own(*args)[0], arrays, seeds)]


class _Arithmetic:
    """Roundings and operations in one spec, which take their numbers in the order of the calls."""

    def __init__(self, spec: Spec, seeds: Seeds | None, number: int) -> None:
        self.spec = spec
        self._words: Callable[[Array], Array | None] = partial(_next_word, spec, seeds, itertools.count(number))

    def rounded(self, x: Array) -> Array:
        """A part of an operand."""
        return round_elements(x, self.spec, CARRIERS[x.dtype.name], self._words(x))

    def do(self, name: str, x: Array, y: Array) -> Array:
        """An operation on parts."""
        return operation(name, [x, y], self.spec, self._words(x))


def _next_word(spec: Spec, seeds: Seeds | None, numbers: Iterator[int], like: Array) -> Array | None:
    number = next(numbers)
    return seeds.words(like, number) if draws(spec) and seeds is not None else None


def _run(step: Step, args: list[Array], seeds: Seeds | None) -> Array:
    assert step.choice.spec is not None
    now = _Arithmetic(step.choice.spec, seeds, step.number)
    parts = [
        (now.rounded(lax.real(x)), now.rounded(lax.imag(x))) if jnp.iscomplexobj(x) else (now.rounded(x), x)
        for x in args
    ]
    result = _RUNS[step.name](now, *parts)
    return lax.complex(*result) if isinstance(result, tuple) else result


def _add(now: _Arithmetic, x: Pair, y: Pair) -> Pair:
    return now.do("add", x[0], y[0]), now.do("add", x[1], y[1])


def _sub(now: _Arithmetic, x: Pair, y: Pair) -> Pair:
    return now.do("sub", x[0], y[0]), now.do("sub", x[1], y[1])


def _mul(now: _Arithmetic, x: Pair, y: Pair) -> Pair:
    """Four products and two sums."""
    (a, b), (c, d) = x, y
    real = now.do("sub", now.do("mul", a, c), now.do("mul", b, d))
    return real, now.do("add", now.do("mul", a, d), now.do("mul", b, c))


_RUNS: dict[str, Callable[..., Pair | Array]] = {
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "square": lambda now, x: _mul(now, x, x),
    "neg": lambda now, x: (-x[0], -x[1]),
    "conj": lambda now, x: (x[0], -x[1]),
    "real": lambda now, x: x[0],
    "imag": lambda now, x: x[1],
    "complex": lambda now, x, y: (x[0], y[0]),
}
