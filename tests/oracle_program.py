"""A program of JAX run one number at a time in exact rational arithmetic, each operation rounded once.

It walks a plan, of which it takes only the equations and the numbers under which roundings draw; the values come from
`oracle_arithmetic` and `oracle_matmul`. Equations that compute no floats, or only move them, are JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
import oracle_arithmetic
import oracle_matmul
from jax.extend.core import Literal
from oracle import CARRIERS, Value

CARRIER = CARRIERS["float32"]
#: words(seeds, shape, number) and fold(seeds, number, step), the rules of where random words lie.
Words = Callable[[Any, tuple[int, ...], int], np.ndarray]
Fold = Callable[..., Any]


def root(v: Value, down: bool = False) -> Value:
    """The root cut far below any format, a last bit standing for what follows."""
    if oracle_arithmetic.is_zero(v) or v in (oracle.Special.INF, oracle.Special.NAN):
        return v
    if oracle_arithmetic.is_negative(v):
        return oracle.Special.NAN
    assert isinstance(v, Fraction)
    scaled = v * 2**800
    assert scaled.denominator == 1
    whole = isqrt(scaled.numerator)
    return Fraction(2 * whole + (whole * whole != scaled.numerator), 2**401)


def subtract(x: Value, y: Value, down: bool = False) -> Value:
    return oracle_arithmetic.add(x, oracle_arithmetic.multiply(y, Fraction(-1)), down)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": oracle_arithmetic.add,
    "add_any": oracle_arithmetic.add,
    "sub": subtract,
    "mul": oracle_arithmetic.multiply,
    "div": oracle_arithmetic.divide,
    "sqrt": root,
    "square": lambda x, down=False: oracle_arithmetic.multiply(x, x),
}


def values(x: Any) -> list[Value]:
    array = np.asarray(x, np.float32)
    return [oracle.from_bits(int(b), CARRIER) for b in array.ravel().view(np.uint32)]


def array_of(found: Sequence[Value], shape: tuple[int, ...]) -> np.ndarray:
    return np.array([oracle.to_bits(v, CARRIER) for v in found], np.uint32).view(np.float32).reshape(shape)


@dataclass(frozen=True)
class Machine:
    """An arithmetic: a format and a mode for every operation, sums one after the other, and where words come from."""

    how: oracle_matmul.How
    words: Words
    fold: Fold

    @property
    def draws(self) -> bool:
        return self.how.mode in oracle.STOCHASTIC

    def rounded(self, found: Sequence[Value], shape: tuple[int, ...], seeds: Any, number: int) -> np.ndarray:
        word = self.words(seeds, shape, number).ravel() if self.draws else np.zeros(len(found), np.uint32)
        return array_of(
            [oracle_matmul.rounded(v, self.how, CARRIER, int(w)) for v, w in zip(found, word, strict=True)], shape
        )

    def run(self, plan: Any, seeds: Any, args: Sequence[Any]) -> list[Any]:
        env = dict(zip([*plan.jaxpr.constvars, *plan.jaxpr.invars], [*plan.consts, *args], strict=True))

        def read(v: Any) -> Any:
            return np.asarray(v.val, getattr(v.aval, "dtype", None)) if isinstance(v, Literal) else env[v]

        for step in plan.steps:
            out = self.step(step, seeds, [read(v) for v in step.eqn.invars])
            env.update(zip(step.eqn.outvars, out, strict=True))
        return [read(v) for v in plan.jaxpr.outvars]

    def step(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        eqn, name = step.eqn, step.eqn.primitive.name
        floats = np.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
        if name in ("jit", "scan", "while", "cond"):
            return getattr(self, f"_{name}")(step, seeds, args)
        if name in OPERATIONS and floats:
            args = [
                self.rounded(values(x), np.shape(x), seeds, step.number + i) if rounds else x
                for i, (x, rounds) in enumerate(zip(args, step.rounds, strict=True))
            ]
            shape = eqn.outvars[0].aval.shape
            columns = [values(np.broadcast_to(x, shape)) for x in args]
            exact = [OPERATIONS[name](*row, down=self.how.mode == "down") for row in zip(*columns, strict=True)]
            return [self.rounded(exact, shape, seeds, step.number + len(args))]
        if name == "reduce_sum" and floats:
            return [self.total(np.asarray(args[0]), seeds, step)]
        out = eqn.primitive.bind(*map(jnp.asarray, args), **eqn.params)
        return [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]

    def total(self, x: np.ndarray, seeds: Any, step: Any) -> np.ndarray:
        """The sum of a vector, drawing at the steps that a matrix product draws at."""
        assert x.ndim == 1
        arithmetic = oracle_matmul.Arithmetic(None, self.how, CARRIER)
        word = lambda which, k: self.words(self.fold(seeds, step.number + 5, 1), (1,), k)[0] if self.draws else 0  # noqa: E731
        sums = oracle_matmul.Sum(values(x), [Fraction(1)] * len(x), arithmetic, lambda which, k: int(word(which, k)))
        return array_of([sums.result()], ())

    def _jit(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        return self.run(step.inner[0], self.fold(seeds, step.number, 0), args)

    def _cond(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        index = int(args[0])
        return self.run(step.inner[index], self.fold(seeds, step.number + index, 0), args[1:])

    def _while(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        test, body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
        first, fixed, carry = args[:test], args[test : test + body], args[test + body :]
        turn = 0
        while self.run(step.inner[0], self.fold(seeds, step.number, turn), [*first, *carry])[0]:
            carry = self.run(step.inner[1], self.fold(seeds, step.number + 1, turn), [*fixed, *carry])
            turn += 1
        return carry

    def _scan(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """Of a loop that carries everything and maps nothing: `fori_loop`."""
        fixed = len(args) - len(step.eqn.outvars)
        carry = args[fixed:]
        for turn in range(step.eqn.params["length"]):
            carry = self.run(step.inner[0], self.fold(seeds, step.number, turn), [*args[:fixed], *carry])
        return carry
