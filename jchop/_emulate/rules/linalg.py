"""Linear algebra, every operation rounded: operations, algorithms of one matrix, and their equations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import ValueRange, carrier_range
from jchop._core.matmul.operations import fold_seeds, operation_words, spec_draws, sum_along
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._kernels.operation import operation_on_device
from jchop._kernels.products.matmul import matmul_op
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import Seeds
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.formats._catalogue import binary32, binary64

# -- operations --------------------------------------------------------------------------------------------------------


#: The own format of each carrier; arithmetic in it is the hardware's.
_HARDWARE_SPECS = {"float32": Spec(binary32), "float64": Spec(binary64)}


class SpecArithmetic:
    """Operations in the arithmetic of one spec; each call in a program draws from another part of the stream.

    Args:
        spec: the rounding of every result.
        seeds: six uint32 for a stochastic spec, else None.
        dtype: float32 or float64; for its own format the hardware's arithmetic is used.
        iteration: number of the loop iteration.
    """

    def __init__(self, spec: Spec, seeds: Sequence[Array] | None, dtype: Any, iteration: Any = 0) -> None:
        self.spec, self.seeds, self.dtype, self.iteration = spec, seeds, dtype, iteration
        self._spec_or_hardware = None if spec == _HARDWARE_SPECS[dtype.name] else spec
        self._numbers = itertools.count()

    def at(self, step: Any) -> SpecArithmetic:
        """The same arithmetic in iteration `step` of a loop."""
        seeds = None if self.seeds is None else fold_seeds(self.seeds, next(self._numbers), step)
        return SpecArithmetic(self.spec, seeds, self.dtype, step)

    def _operation(self, name: str, *operands: Array, ranges: Sequence[ValueRange] = ()) -> Array:
        number = next(self._numbers)
        operands = tuple(jnp.broadcast_arrays(*operands))
        word = None if self.seeds is None else operation_words(self.seeds, operands[0], number)
        return operation_on_device(name, operands, self._spec_or_hardware, word, ranges=ranges)

    add = partialmethod(_operation, "add")
    sub = partialmethod(_operation, "sub")
    mul = partialmethod(_operation, "mul")
    div = partialmethod(_operation, "div")
    sqrt = partialmethod(_operation, "sqrt")

    def matmul(self, a: Array, b: Array) -> Array:
        """A product of matrices, or of a matrix and a vector, every sum in sequential order."""
        spec = self._spec_or_hardware
        columns, seeds = b if b.ndim == 2 else b[:, None], self._twelve()
        how = MatmulSpec(spec, spec, spec)
        out = matmul_op(a[None], columns[None], *(() if seeds is None else (seeds,)), spec=how)[0]
        return out if b.ndim == 2 else out[:, 0]

    def dot(self, x: Array, y: Array) -> Array:
        """The sum of products of two vectors."""
        return self.matmul(x[None], y)[0]

    def sum(self, x: Array) -> Array:
        """The sum over the first axis."""
        how = MatmulSpec(self._spec_or_hardware, accumulate=self._spec_or_hardware)
        return sum_along(x, 0, how, self._twelve(), matmul=matmul_op)

    def norm(self, x: Array) -> Array:
        """The Euclidean norm √(Σ x_k²)."""
        return self.sqrt(self.dot(x, x))

    def _twelve(self) -> Array | None:
        if self.seeds is None:
            return None
        number = next(self._numbers)
        return jnp.stack([*fold_seeds(self.seeds, number, 0), *fold_seeds(self.seeds, number, 1)])

    def rounded(self, x: Array) -> Array:
        """Values of the carrier, rounded."""
        if self._spec_or_hardware is None:
            return x
        whole = carrier_range(CARRIERS[x.dtype.name])
        return self._operation("add", x, jnp.where(jnp.signbit(x), -0.0, 0.0).astype(x.dtype), ranges=(whole, whole))


# -- algorithms --------------------------------------------------------------------------------------------------------
#
# Triangular systems and factorizations of one matrix of rounded values, every operation rounded.
#
# The algorithms are the textbook ones: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.


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


# -- equations ---------------------------------------------------------------------------------------------------------


MatrixRule = Callable[..., tuple[Array, ...]]


def run_factorization(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of an equation of linear algebra, for each matrix of a batch; derivatives are the carrier's."""
    spec, own = step.choice.spec, partial(bind, step.eqn.primitive, step.eqn.params)
    if spec is None:
        return own(*args)

    def run(arrays: list[Array], seeds: Seeds | None) -> list[Array]:
        number = step.number + 2 * len(arrays)
        six = seeds.turn(number).of(*arrays) if spec_draws(spec) and seeds is not None else None

        def steps_of(index: Array, matrix: Array) -> SpecArithmetic:
            return SpecArithmetic(spec, None if six is None else fold_seeds(six, 0, index), matrix.dtype)

        return map_matrices(step, arrays, steps_of)

    return straight_through(run, own, [jnp.asarray(x) for x in args], seeds)


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


def _factor_qr(params: dict[str, Any], steps: SpecArithmetic, a: Array) -> tuple[Array, Array]:
    q, r = factor_qr(steps, a)
    n = a.shape[1]
    return (q, r) if params["full_matrices"] else (q[:, :n], r[:n])


_MATRIX_RULES: dict[str, MatrixRule] = {
    "triangular_solve": _solve_triangular,
    "cholesky": lambda params, steps, a: (factor_cholesky(steps, a),),
    "lu": lambda params, steps, a: tuple(factor_lu(steps, a)[i] for i in (0, 2, 1)),
    "qr": _factor_qr,
}
