"""Factorizations and triangular systems: the step-by-step algorithms of `_emulate/linalg/`, every operation rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.matmul.operations import fold_seeds, spec_draws
from jchop._emulate.linalg.direct import factor_cholesky, factor_lu, factor_qr, substitute_triangular
from jchop._emulate.linalg.spec_arithmetic import SpecArithmetic
from jchop._emulate.rules.step import EmulatedStep
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import Seeds

Array = jax.Array
MatrixRule = Callable[..., tuple[Array, ...]]


def run_factorization(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of an equation of linear algebra, for each matrix of a batch; derivatives are the carrier's."""
    own = partial(bind, step.eqn.primitive, step.eqn.params)
    if step.choice.spec is None:
        return own(*args)
    return straight_through(partial(_run_matrices, step), own, [jnp.asarray(x) for x in args], seeds)


def _run_matrices(step: EmulatedStep, arrays: list[Array], seeds: Seeds | None) -> list[Array]:
    spec = step.choice.spec
    assert spec is not None
    number = step.number + 2 * len(arrays)
    six = seeds.turn(number).of(*arrays) if spec_draws(spec) and seeds is not None else None

    def steps_of(index: Array, matrix: Array) -> SpecArithmetic:
        return SpecArithmetic(spec, None if six is None else fold_seeds(six, 0, index), matrix.dtype)

    return map_matrices(step, arrays, steps_of)


def map_matrices(step: EmulatedStep, arrays: Sequence[Array], steps_of: Callable[[Array, Array], Any]) -> list[Array]:
    """The algorithm of an equation for each matrix of a batch.

    Args:
        step: the equation.
        arrays: its operands.
        steps_of: the arithmetic, of the number of the matrix in the batch and the first matrix.
    """
    run = partial(_MATRIX_RULES[step.name], step.eqn.params)

    def one(index: Array, *matrices: Array) -> tuple[Array, ...]:
        return run(steps_of(index, matrices[0]), *matrices)

    outer = arrays[0].shape[:-2]
    if not outer:  # not under vmap, which runs both sides of a branch on values
        return list(one(jnp.uint32(0), *arrays))
    count = math.prod(outer)  # not -1, which an array of size zero does not determine
    flat = [x.reshape(count, *x.shape[-2:]) for x in arrays]
    results = jax.vmap(one)(jnp.arange(count, dtype=jnp.uint32), *flat)
    return [x.reshape(*outer, *x.shape[1:]) for x in results]


# -- one rule each -----------------------------------------------------------------------------------------------------


def _solve_triangular(params: dict[str, Any], steps: SpecArithmetic, a: Array, b: Array) -> tuple[Array]:
    """Solves op(a) x = b, or x op(a) = b by its transpose."""
    on_left, lower = params["left_side"], params["lower"]
    flip = params["transpose_a"] == on_left
    a, b = a.T if flip else a, b if on_left else b.T
    x = substitute_triangular(steps, a, b, lower=lower != flip, unit=params["unit_diagonal"])
    return (x if on_left else x.T,)


def _factor_cholesky(params: dict[str, Any], steps: SpecArithmetic, a: Array) -> tuple[Array]:
    del params
    return (factor_cholesky(steps, a),)


def _factor_lu(params: dict[str, Any], steps: SpecArithmetic, a: Array) -> tuple[Array, Array, Array]:
    del params
    factors, permutation, pivots = factor_lu(steps, a)
    return factors, pivots, permutation


def _factor_qr(params: dict[str, Any], steps: SpecArithmetic, a: Array) -> tuple[Array, Array]:
    q, r = factor_qr(steps, a)
    n = a.shape[1]
    return (q, r) if params["full_matrices"] else (q[:, :n], r[:n])


_MATRIX_RULES: dict[str, MatrixRule] = {
    "triangular_solve": _solve_triangular,
    "cholesky": _factor_cholesky,
    "lu": _factor_lu,
    "qr": _factor_qr,
}
