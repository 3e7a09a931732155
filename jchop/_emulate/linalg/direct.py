"""Triangular systems and factorizations of one matrix of rounded values, every operation rounded.

The algorithms are the textbook ones: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jchop._emulate.linalg.spec_arithmetic import SpecArithmetic

Array = jax.Array


def substitute_triangular(arithmetic: SpecArithmetic, a: Array, b: Array, *, lower: bool, unit: bool) -> Array:
    """The solution for one right-hand side, or for each column of several (Higham, algorithm 8.1).

    By columns of the matrix: each known element is eliminated from the remaining equations.
    """
    n = b.shape[0]
    if not b.size:
        return b
    row_indices = jnp.arange(n)[:, None]

    def iterate(i: Array, x: Array) -> Array:
        j = i if lower else n - 1 - i
        ops = arithmetic.at(i)
        column = a[:, j, None]
        solution = x[j] if unit else ops.div(x[j], column[j])
        rest = ops.sub(x, ops.mul(column, solution[None]))
        remaining = row_indices > j if lower else row_indices < j
        return jnp.where(remaining, rest, jnp.where(row_indices == j, solution[None], x))

    return lax.fori_loop(0, n, iterate, b.reshape(n, -1)).reshape(b.shape)


def factor_lu(arithmetic: SpecArithmetic, a: Array) -> tuple[Array, Array, Array]:
    """The packed factors, the rows in pivot order, and the pivot row of each step."""
    n = a.shape[0]
    row_indices = jnp.arange(n)
    if not n:
        return a, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)

    def iterate(k: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, p, pivots = state
        ops = arithmetic.at(k)
        candidates = jnp.where(row_indices >= k, jnp.abs(a[:, k]), -1)
        best = jnp.argmax(candidates)
        order = row_indices.at[k].set(best).at[best].set(k)
        a, p = a[order], p[order]
        below = row_indices > k
        multipliers = ops.div(a[:, k], a[k, k])
        schur_complement = ops.sub(a, ops.mul(multipliers[:, None], a[k][None, :]))
        a = jnp.where(below[:, None] & below[None, :], schur_complement, a)
        a = a.at[:, k].set(jnp.where(below, multipliers, a[:, k]))
        return a, p, pivots.at[k].set(best.astype(jnp.int32))

    return lax.fori_loop(0, n, iterate, (a, jnp.arange(n, dtype=jnp.int32), jnp.zeros(n, jnp.int32)))


def solve_with_factors(arithmetic: SpecArithmetic, packed_factors: Array, b: Array) -> Array:
    """The solution for a right-hand side in pivot order."""
    y = substitute_triangular(arithmetic, packed_factors, b, lower=True, unit=True)
    return substitute_triangular(arithmetic, packed_factors, y, lower=False, unit=False)


def factor_cholesky(arithmetic: SpecArithmetic, a: Array) -> Array:
    """Cholesky's lower factor, from the lower triangle (Higham, algorithm 10.2, by outer products)."""
    n = a.shape[0]
    if not n:
        return a
    row_indices = jnp.arange(n)

    def iterate(k: Array, a: Array) -> Array:
        ops = arithmetic.at(k)
        root = ops.sqrt(a[k, k])
        column = ops.div(a[:, k], root)
        schur_complement = ops.sub(a, ops.mul(column[:, None], column[None, :]))
        below = row_indices > k
        a = jnp.where(below[:, None] & below[None, :], schur_complement, a)
        return a.at[:, k].set(jnp.where(row_indices == k, root, jnp.where(below, column, a[:, k])))

    return jnp.tril(lax.fori_loop(0, n, iterate, a))


def factor_qr(steps: SpecArithmetic, a: Array) -> tuple[Array, Array]:
    """q, square, and r by Householder reflections (Higham, sections 19.1 to 19.3); see `jchop.math.linalg.qr`."""
    m, n = a.shape
    if not n:
        return jnp.eye(m, dtype=a.dtype), a
    places = jnp.arange(m)

    def iterate(k: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, vs, taus = state
        ops = steps.at(k)
        x = jnp.where(places >= k, a[:, k], 0)
        first = a[k, k]
        beta = -jnp.copysign(ops.norm(x), first)
        below = jnp.any((x != 0) & (places > k))  # none in the last column of a square matrix
        nothing = (beta == 0) | ~below
        tau = jnp.where(nothing, 0, ops.div(ops.sub(beta, first), beta))
        v = jnp.where(places > k, ops.div(x, ops.sub(first, beta)), (places == k).astype(a.dtype))
        v = jnp.where(nothing & (places != k), 0, v)
        r = _reflect(ops, a, v, tau)
        column = jnp.where(places == k, jnp.where(nothing, first, beta), jnp.where(places > k, 0, a[:, k]))
        r = jnp.where((jnp.arange(n)[None, :] > k) & ~nothing, r, a).at[:, k].set(column)
        return r, vs.at[k].set(v), taus.at[k].set(tau)

    start = (a, jnp.zeros((n, m), a.dtype), jnp.zeros(n, a.dtype))
    r, vs, taus = lax.fori_loop(0, n, iterate, start)

    def back(i: Array, q: Array) -> Array:
        k = n - 1 - i
        return jnp.where(taus[k] == 0, q, _reflect(steps_of_q.at(i), q, vs[k], taus[k]))

    steps_of_q = steps.at(n)
    return lax.fori_loop(0, n, back, jnp.eye(m, dtype=a.dtype)), r


def _reflect(ops: SpecArithmetic, a: Array, v: Array, tau: Array) -> Array:
    """A reflection a - v (tau (vᵀ a))."""
    w = ops.mul(tau, ops.matmul(v[None], a)[0])
    return ops.sub(a, ops.mul(v[:, None], w[None, :]))
