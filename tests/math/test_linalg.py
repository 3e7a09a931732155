"""`jchop.math.linalg` against the same algorithms in exact rational arithmetic, one operation at a time, and theory."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_arithmetic as arithmetic
import oracle_math
import pytest
from further import Further
from jax.scipy.sparse import linalg as sparse
from oracle import Fraction, Value
from oracle_matmul import How, rounded
from refusals import assert_refused

import jchop as jc

further = Further()

linalg = jc.math.linalg
KEY = jax.random.key(9)
F32 = oracle.CARRIERS["float32"]
ZERO, ONE = Fraction(0), Fraction(1)
Vector = list[Value]
Matrix = list[Vector]


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    cases.assert_bits(expected.ravel(), got.ravel(), cases.bits(expected.ravel()))


def matrix(rows: Matrix) -> np.ndarray:
    return np.array([oracle_math.array(row) for row in rows])


class Machine:
    """The operations of a format, each exact and then rounded once."""

    def __init__(self, how: How) -> None:
        self.how = how

    def rounded(self, x: Value) -> Value:
        return rounded(x, self.how, F32, 0)

    def add(self, x: Value, y: Value) -> Value:
        return self.rounded(arithmetic.add(x, y, self.how.mode == "down"))

    def sub(self, x: Value, y: Value) -> Value:
        return self.add(x, oracle_math.negative(y))

    def mul(self, x: Value, y: Value) -> Value:
        return self.rounded(arithmetic.multiply(x, y))

    def div(self, x: Value, y: Value) -> Value:
        return self.rounded(arithmetic.divide(x, y))

    def sqrt(self, x: Value) -> Value:
        return self.rounded(oracle_math.sqrt(x))

    def dot(self, x: Vector, y: Vector) -> Value:
        total: Value = ZERO
        for a, b in zip(x, y, strict=True):
            total = self.add(total, self.mul(a, b))
        return total

    def substitute(self, a: Matrix, b: Vector, lower: bool, unit: bool) -> Vector:
        x, n = list(b), len(b)
        for j in range(n) if lower else reversed(range(n)):
            if not unit:
                x[j] = self.div(x[j], a[j][j])
            for i in range(j + 1, n) if lower else range(j):
                x[i] = self.sub(x[i], self.mul(a[i][j], x[j]))
        return x

    def lu(self, a: Matrix) -> tuple[Matrix, list[int]]:
        a, n = [list(row) for row in a], len(a)
        order = list(range(n))
        for k in range(n):
            best = max(range(k, n), key=lambda i: abs(arithmetic.number(a[i][k])))
            a[k], a[best], order[k], order[best] = a[best], a[k], order[best], order[k]
            for i in range(k + 1, n):
                a[i][k] = self.div(a[i][k], a[k][k])
                for j in range(k + 1, n):
                    a[i][j] = self.sub(a[i][j], self.mul(a[i][k], a[k][j]))
        return a, order

    def cholesky(self, a: Matrix) -> Matrix:
        a, n = [list(row) for row in a], len(a)
        for k in range(n):
            a[k][k] = self.sqrt(a[k][k])
            for i in range(k + 1, n):
                a[i][k], a[k][i] = self.div(a[i][k], a[k][k]), ZERO
            for i in range(k + 1, n):
                for j in range(k + 1, n):
                    a[i][j] = self.sub(a[i][j], self.mul(a[i][k], a[j][k]))
        return a

    def reflect(self, a: Matrix, v: Vector, tau: Value, columns: range) -> None:
        for j in columns:
            w = self.mul(tau, self.dot(v, [row[j] for row in a]))
            for i, row in enumerate(a):
                row[j] = self.sub(row[j], self.mul(v[i], w))

    def qr(self, a: Matrix) -> tuple[Matrix, Matrix]:
        r, m, n = [list(row) for row in a], len(a), len(a[0])
        reflections: list[tuple[Vector, Value] | None] = []
        for k in range(n):
            x = [ZERO] * k + [r[i][k] for i in range(k, m)]
            if all(arithmetic.is_zero(r[i][k]) for i in range(k + 1, m)):
                reflections.append(None)
                continue
            length = self.sqrt(self.dot(x, x))
            beta = length if arithmetic.is_negative(r[k][k]) else oracle_math.negative(length)
            tau = self.div(self.sub(beta, r[k][k]), beta)
            v = [ZERO] * k + [ONE] + [self.div(x[i], self.sub(r[k][k], beta)) for i in range(k + 1, m)]
            self.reflect(r, v, tau, range(k + 1, n))
            for i in range(k, m):
                r[i][k] = beta if i == k else ZERO
            reflections.append((v, tau))
        q: Matrix = [[ONE if i == j else ZERO for j in range(m)] for i in range(m)]
        for reflection in reversed(reflections):
            if reflection is not None:
                self.reflect(q, *reflection, range(m))
        return q, r

    def cg(self, a: Matrix, b: Vector, count: int) -> tuple[Vector, Vector]:
        x: Vector = [ZERO] * len(b)
        r, p, squares = list(b), list(b), self.dot(b, b)
        history = [squares]
        for _ in range(count):
            image = [self.dot(row, p) for row in a]
            length = self.div(squares, self.dot(p, image))
            x = [self.add(u, self.mul(length, v)) for u, v in zip(x, p, strict=True)]
            r = [self.sub(u, self.mul(length, v)) for u, v in zip(r, image, strict=True)]
            new = self.dot(r, r)
            ratio = self.div(new, squares)
            p = [self.add(u, self.mul(ratio, v)) for u, v in zip(r, p, strict=True)]
            squares = new
            history.append(squares)
        return x, history

    def product(self, a: Matrix, x: Vector) -> Vector:
        return [self.dot(row, x) for row in a]

    def gmres(self, image: Callable[[Vector], Vector], b: Vector, count: int) -> tuple[Vector, Vector]:
        """For systems whose basis grows in every step."""
        length = self.sqrt(self.dot(b, b))
        basis, small, norms = [[self.div(v, length) for v in b]], [length], [length]
        columns: Matrix = []
        turns: list[tuple[Value, Value]] = []
        for j in range(count):
            w, h = image(basis[j]), []
            for v in basis:
                h.append(self.dot(v, w))
                w = [self.sub(u, self.mul(h[-1], t)) for u, t in zip(w, v, strict=True)]
            following = self.sqrt(self.dot(w, w))
            for i, (c, s) in enumerate(turns):
                one, two = h[i], h[i + 1]
                h[i] = self.add(self.mul(c, one), self.mul(s, two))
                h[i + 1] = self.sub(self.mul(c, two), self.mul(s, one))
            top = self.sqrt(self.add(self.mul(h[j], h[j]), self.mul(following, following)))
            c, s = self.div(h[j], top), self.div(following, top)
            basis.append([self.div(v, following) for v in w])
            turns.append((c, s))
            columns.append([*h[:j], top] + [ZERO] * (count - j - 1))
            last = small[j]
            small[j:] = [self.mul(c, last), self.mul(oracle_math.negative(s), last)]
            norms.append(abs(arithmetic.number(small[j + 1])))
        triangle = [[columns[j][i] for j in range(count)] for i in range(count)]
        y = self.substitute(triangle, small[:count], lower=False, unit=False)
        return self.product([list(row) for row in zip(*basis[:count], strict=True)], y), norms


def power_above(r: Vector) -> Fraction:
    largest = max(abs(arithmetic.number(v)) for v in r)
    return next(oracle.pow2(k) for k in range(-200, 200) if oracle.pow2(k) > largest)


def refined(a: Matrix, b: Vector, machines: tuple[Machine, ...], steps: int, inner: int) -> Matrix:
    """The iterates of three precisions; without GMRES where `inner` is 0."""
    factor, working, residual = machines
    packed, order = factor.lu([[factor.rounded(v) for v in row] for row in a])

    def scaled(r: Vector, by: Fraction) -> Vector:
        return [arithmetic.number(v) * by or v for v in r]

    def through(machine: Machine, r: Vector) -> Vector:
        y = machine.substitute(packed, [r[i] for i in order], lower=True, unit=True)
        return machine.substitute(packed, y, lower=False, unit=False)

    def from_factors(r: Vector) -> Vector:
        scale = power_above(r)
        return scaled(through(factor, [factor.rounded(v) for v in scaled(r, 1 / scale)]), scale)

    def from_gmres(r: Vector) -> Vector:
        scale = power_above(r)
        first = [working.rounded(v) for v in through(residual, scaled(r, 1 / scale))]
        image = lambda v: [working.rounded(u) for u in through(residual, residual.product(a, v))]  # noqa: E731
        return scaled(working.gmres(image, first, inner)[0], scale)

    x = [working.rounded(v) for v in from_factors(b)]
    iterates = [x]
    for _ in range(steps):
        r = [working.rounded(residual.sub(u, v)) for u, v in zip(b, residual.product(a, x), strict=True)]
        d = [working.rounded(v) for v in (from_gmres if inner else from_factors)(r)]
        x = [working.add(u, v) for u, v in zip(x, d, strict=True)]
        iterates.append(x)
    return iterates


HOWS = {"e5m7": How(oracle.ieee(5, 7)), "e6m9:toward_zero": How(oracle.ieee(6, 9), "toward_zero")}


def some(m: int, n: int, text: str, seed: int = 0) -> np.ndarray:
    """Values of a format."""
    x = np.random.default_rng(seed).normal(size=(m, n)).astype(np.float32)
    return np.asarray(jc.round_to_format(x, text))


def rows(a: np.ndarray) -> Matrix:
    return [oracle_math.values(row) for row in a]


def definite(n: int, text: str) -> np.ndarray:
    a = some(n, n, text)
    return np.asarray(jc.round_to_format(a @ a.T + n * np.eye(n, dtype=np.float32), text.split(":")[0]))


# -- every operation is rounded ----------------------------------------------------------------------------------------


@further
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("text", HOWS)
def elimination_and_substitution(text: str) -> None:
    a, b, machine = some(5, 5, text), some(5, 1, text, 1)[:, 0], Machine(HOWS[text])
    want, order = machine.lu(rows(a))
    factors, p = linalg.lu(a, text)
    same(factors, matrix(want))
    np.testing.assert_array_equal(p, order)
    y = machine.substitute(want, [oracle_math.values(b)[i] for i in order], lower=True, unit=True)
    x = machine.substitute(want, y, lower=False, unit=False)
    same(linalg.lu_solve((factors, p), b, text), oracle_math.array(x))
    same(
        linalg.solve_triangular(a, b, text, lower=True),
        oracle_math.array(machine.substitute(rows(a), oracle_math.values(b), lower=True, unit=False)),
    )


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("text", HOWS)
def test_cholesky(text: str) -> None:
    a = definite(4, text)
    same(linalg.cholesky(a, text), matrix(Machine(HOWS[text]).cholesky(rows(a))))


@further.first
@pytest.mark.parametrize("text", HOWS)
@pytest.mark.parametrize("shape", [(5, 3), (4, 4)])
def check_reflections(text: str, shape: tuple[int, int]) -> None:
    """A column with nothing below the diagonal is not reflected: the last of a square matrix, or here the first."""
    a = some(*shape, text)
    if shape[0] > shape[1]:
        a = np.where((np.arange(shape[0])[:, None] > 0) & (np.arange(shape[1]) == 0), np.float32(0), a)
    q, r = linalg.qr(a, text)
    want_q, want_r = Machine(HOWS[text]).qr(rows(a))
    same(r, matrix(want_r))
    np.testing.assert_array_equal(q, matrix(want_q))  # but for the sign of zeros


@pytest.mark.smoke
def test_conjugate_gradients() -> None:
    text = "e5m7"
    a, b = definite(4, text), some(4, 1, text, 1)[:, 0]
    x, squares = linalg.cg(a, b, text, tol=0, maxiter=3)
    want_x, want_squares = Machine(HOWS[text]).cg(rows(a), oracle_math.values(b), 3)
    same(x, oracle_math.array(want_x))
    same(squares, oracle_math.array(want_squares))


def test_the_generalized_minimal_residual() -> None:
    text = "e6m9:toward_zero"
    a, b, machine = some(4, 4, text), some(4, 1, text, 1)[:, 0], Machine(HOWS[text])
    x, norms = linalg.gmres(a, b, text, tol=0, restart=3, maxiter=1)
    want_x, want_norms = machine.gmres(partial(machine.product, rows(a)), oracle_math.values(b), 3)
    same(x, oracle_math.array(want_x))
    same(norms, oracle_math.array(want_norms))


def test_the_arguments_are_those_of_jax() -> None:
    for name in ("cg", "gmres"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (linalg, sparse))
        wanted = {key: value.default for key, value in theirs.items() if key not in ("A", "b", "solve_method")}
        assert {key: value.default for key, value in ours.items() if key not in ("a", "b", "spec", "key")} == wanted
        assert [key for key in ours if key in wanted] == list(wanted)


@further
@pytest.mark.parametrize("name", ["cg", "gmres"])
def a_start_a_preconditioner_and_restarts(name: str) -> None:
    """In the arithmetic of the dtype the solvers of JAX give the same, but for the order of sums."""
    a, b = definite(5, "binary32").astype(np.float32), some(5, 1, "binary32", 1)[:, 0].astype(np.float32)
    given: dict[str, Any] = {
        "x0": np.linspace(-1, 1, 5, dtype=np.float32),
        "M": np.diag(1 / np.diag(a)).astype(np.float32),
    }
    given |= {"maxiter": 3} if name == "cg" else {"restart": 2, "maxiter": 2}
    x, _ = getattr(linalg, name)(a, b, "binary32", tol=0, **given)
    want, _ = getattr(sparse, name)(a, b, tol=0.0, **given)
    np.testing.assert_allclose(x, want, rtol=2e-3, atol=2e-4)


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("solve", [linalg.cg, linalg.gmres])
def test_a_tolerance_that_holds_at_the_start_stops(solve: Any) -> None:
    a, b, x = definite(4, "e5m7"), some(4, 1, "e5m7", 1)[:, 0], some(4, 1, "e5m7", 2)[:, 0]
    stays, norms = solve(a, b, "e5m7", x0=x, atol=1e6, maxiter=2)
    same(stays, x)
    assert len(set(np.asarray(norms).tolist())) == 1


@further
def a_tolerance_stops() -> None:
    a, b, text = definite(4, "e5m7"), some(4, 1, "e5m7", 1)[:, 0], "e5m7"
    x, squares = linalg.cg(a, b, text, tol=0.25, maxiter=6)
    _, every = linalg.cg(a, b, text, tol=0, maxiter=6)
    stop = int(np.argmax(every <= 0.25**2 * every[0]))
    assert 0 < stop < 6
    same(squares, np.array([*every[: stop + 1], *[every[stop]] * (6 - stop)], np.float32))
    same(x, linalg.cg(a, b, text, tol=0, maxiter=stop)[0])


@pytest.mark.parametrize("inner", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_refinement(inner: int) -> None:
    texts: dict[str, Any] = {"factor": "e5m4", "working": "e5m7", "residual": "e6m15"}
    formats = (oracle.ieee(5, 4), oracle.ieee(5, 7), oracle.ieee(6, 15))
    a, b = some(3, 3, "e5m7"), some(3, 1, "e5m7", 1)[:, 0]
    x = linalg.refine(a, b, **texts, method="gmres" if inner else "lu", steps=2, inner=inner or 1)
    machines = tuple(Machine(How(fmt)) for fmt in formats)
    same(x, matrix(refined(rows(a), oracle_math.values(b), machines, 2, inner)))
    assert jax.eval_shape(partial(linalg.refine, **texts), a, b).shape == (11, 3)  # ten steps


# -- batches, columns, operators, empty systems -----------------------------------------------------------------------

BATCH = np.stack([definite(3, "e5m7"), definite(3, "e5m7") + 2 * np.eye(3, dtype=np.float32)])
COLUMNS = some(3, 2, "e5m7", 4)
SHORT: dict[str, Any] = {"tol": np.float32(1e-2), "maxiter": 2}


def solved(a: Any, b: Any, name: str, text: str = "e5m7", key: Any = None) -> Any:
    """A solver of one name, and what belongs to a right-hand side in its result."""
    if name == "refine":
        return linalg.refine(a, b, factor="e5m4", working=text, residual="e6m12", steps=1, key=key)
    if name == "solve_triangular":
        return linalg.solve_triangular(a, b, text, key)
    if name == "lu_solve":
        return linalg.lu_solve(linalg.lu(a, "e5m7"), b, text, key)
    return getattr(linalg, name)(a, b, text, key, **SHORT, **({"restart": 2} if name == "gmres" else {}))[0]


SOLVERS = ["solve_triangular", "lu_solve", "cg", "gmres", "refine"]


@further
@pytest.mark.parametrize("name", SOLVERS)
def columns_and_batches_are_systems_of_their_own(name: str) -> None:
    both = solved(BATCH, COLUMNS, name)
    vectors = solved(BATCH, COLUMNS[:, 1], name)
    steps = (2,) if name == "refine" else ()
    assert both.shape == (2, *steps, 3, 2) and vectors.shape == (2, *steps, 3)
    for i in range(2):
        same(both[i], solved(BATCH[i], COLUMNS, name))
        same(vectors[i], solved(BATCH[i], COLUMNS[:, 1], name))
        for j in range(2):
            same(both[i][..., j], solved(BATCH[i], COLUMNS[:, j], name))
    shared = solved(BATCH[0], np.stack([COLUMNS, COLUMNS]), name)
    same(shared[1], both[0])


@further
@pytest.mark.parametrize("name", ["cholesky", "lu", "qr"])
def factors_of_batches(name: str) -> None:
    whole = getattr(linalg, name)(BATCH[None], "e5m7:up")
    each = getattr(linalg, name)(BATCH[1], "e5m7:up")
    for got, want in zip(jax.tree.leaves(whole), jax.tree.leaves(each), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got[0, 1], want)


@further
@pytest.mark.parametrize("name", SOLVERS)
def systems_of_a_batch_draw_from_keys_of_their_own(name: str) -> None:
    text = "e5m7:stochastic"
    got = solved(BATCH, COLUMNS, name, text, KEY)
    for i in range(2):
        same(got[i], solved(BATCH[i], COLUMNS, name, text, jax.random.fold_in(KEY, i)))
    equal = solved(BATCH[0], np.repeat(COLUMNS[:, :1], 30, 1), name, "e4m2:stochastic", KEY)
    assert len(np.unique(equal.reshape(-1, 30), axis=1).T) > 5


@further
@pytest.mark.parametrize("name", ["cg", pytest.param("gmres", marks=pytest.mark.slow)])
def an_operator_is_its_images(name: str) -> None:
    """Its arithmetic is its own: here that of the matrix, so the results are those of the matrix."""
    solve, text = getattr(linalg, name), "e5m7"
    m = np.diag(1 / np.diag(BATCH[0])).astype(np.float32)
    want = solve(BATCH[0], COLUMNS, text, M=m, **SHORT)
    got = solve(
        lambda v: jc.math.matmul(BATCH[0], v, text), COLUMNS, text, M=lambda v: jc.math.matmul(m, v, text), **SHORT
    )
    for one, other in zip(got, want, strict=True):
        same(one, other)
    partial_ = jax.tree_util.Partial(lambda a, v: jc.math.matmul(a, v, text), BATCH[0])
    same(solve(partial_, COLUMNS[:, 0], text, M=m, **SHORT)[0], want[0][:, 0])


def test_the_image_of_an_operator_is_rounded() -> None:
    """In two steps of exact numbers but for the images, which are not of the format."""
    b = np.array([1.0, 2.0], np.float32)
    x, _ = linalg.cg(lambda v: v * 1.05, b, "e5m2", maxiter=1)
    same(x, linalg.cg(np.eye(2, dtype=np.float32), b, "e5m2", maxiter=1)[0])  # 1.05 is rounded to 1
    assert linalg.cg(lambda v: v.astype(jnp.bfloat16), np.ones(2, np.float16), "e5m2", maxiter=1)[0].dtype == np.float16


@further
def operators_within_transformations() -> None:
    def solution(a: jax.Array) -> jax.Array:
        return linalg.cg(lambda v: a @ v, COLUMNS[:, 0], "e5m7", **SHORT)[0]

    want = np.stack([solution(a) for a in BATCH])
    same(jax.jit(jax.vmap(solution))(BATCH), want)
    with pytest.raises(NotImplementedError, match="have no derivative"):
        jax.grad(lambda a: solution(a).sum())(jnp.asarray(BATCH[0]))


@further
@pytest.mark.parametrize("n", [0, 2])
def nothing_to_solve(n: int) -> None:
    """No equations, and no systems of two."""
    a, b = np.zeros((0, n, n) if n else (0, 0), np.float32), np.zeros(n, np.float32)
    batch = (0,) if n else ()
    for name in SOLVERS:
        assert solved(a, b, name).shape == (*batch, *((2,) if name == "refine" else ()), n), name
    assert [x.shape for x in linalg.lu(a, "e5m7")] == [a.shape, (*batch, n)]
    assert linalg.cholesky(a, "e5m7").shape == a.shape
    if n:
        return
    assert [x.shape for x in linalg.qr(np.zeros((3, 0)), "e5m7")] == [(3, 3), (3, 0)]
    x, squares = linalg.cg(np.zeros((0, 0)), np.zeros((0, 2)), "e5m7")
    assert (x.shape, squares.shape) == ((0, 2), (2, 1))
    assert linalg.gmres(BATCH, COLUMNS[:, :0], "e5m7", maxiter=1, restart=2)[1].shape == (2, 0, 3)


@further
def integers_are_promoted() -> None:
    a = np.array([[2, 1], [1, 3]])
    np.testing.assert_array_equal(linalg.lu(a, "e5m7")[0], linalg.lu(a.astype(float), "e5m7")[0])
    assert linalg.solve_triangular(a, np.array([1, 2], np.float16), "e5m7").dtype == np.float16


# -- they solve --------------------------------------------------------------------------------------------------------


def ill(n: int, condition: float, seed: int = 0) -> np.ndarray:
    """A random matrix of singular values that fall geometrically from 1 to 1 / condition."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0] for _ in range(2))
    return left * condition ** -np.linspace(0, 1, n) @ right


def backward_error(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In the maximum norm, of each row of x."""
    norm = np.abs(a).sum(1).max() * np.abs(x).max(-1) + np.abs(b).max()
    return np.abs(x @ a.T - b).max(-1) / norm


@further
@pytest.mark.parametrize(("text", "u"), [("binary16", 2.0**-11), ("binary32", 2.0**-24)])
def the_error_is_that_of_the_format(text: str, u: float) -> None:
    a = ill(10, 100)
    b = a @ np.ones(10)
    factors, p = linalg.lu(a, text)
    product = (np.tril(factors, -1) + np.eye(10)) @ np.triu(factors)
    assert 0.05 * u < np.abs(product - a[p]).max() < 10 * u
    q, r = linalg.qr(a, text)
    assert 0.05 * u < np.abs(q @ r - a).max() < 30 * u
    np.testing.assert_array_equal(np.sign(np.diag(r)), np.sign(np.diag(np.linalg.qr(a)[1])))
    x, norms = linalg.gmres(a, b, text, tol=0, restart=10, maxiter=1)
    assert backward_error(a, x, b) < 10 * u and norms[-1] < 30 * u


@further
def zero_columns_and_a_negative_matrix() -> None:
    a = np.array([[1.0, 0.0], [0.0, 0.0]])
    q, r = linalg.qr(a, "bfloat16")
    np.testing.assert_array_equal(q @ r, a)
    q, r = linalg.qr(np.array([[2.0**-6, 3.0], [2.0**-6, 1.0]]), "e4m3")  # its squares are 0: no reflection
    np.testing.assert_array_equal((q, r), ([[1, 0], [0, 1]], [[2**-6, 3], [0, 1]]))
    assert np.isnan(linalg.cholesky(-np.eye(2), "bfloat16")[1, 0])


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", ["cg", "gmres"])
def test_a_basis_that_cannot_grow_and_a_zero_right_side(name: str) -> None:
    if name == "cg":
        x, squares = linalg.cg(np.eye(2), np.array([3.0, 4.0]), "bfloat16", tol=0, maxiter=3)
        np.testing.assert_array_equal(x, [3, 4])
        np.testing.assert_array_equal(squares, [25, 0, 0, 0])
        return
    x, norms = linalg.gmres(np.eye(2), np.zeros(2), "bfloat16", tol=0, restart=2, maxiter=1)
    assert not x.any() and not norms.any()
    x, _ = linalg.gmres(
        np.eye(2), np.array([3.0, 4.0]), "bfloat16", tol=0, restart=2, maxiter=1
    )  # the basis cannot grow
    np.testing.assert_array_equal(x, [3, 4])


LIMITS = {  # conditions at which it must and must not converge with factors in binary16: u_f = 2^-11
    "lu": (1e2, 1e6),
    "gmres": (1e6, 1e13),
}


@further
@pytest.mark.parametrize(
    ("method", "working", "u"),
    [
        ("lu", "binary32", 2.0**-24),
        pytest.param("lu", "binary64", 2.0**-53, marks=pytest.mark.slow),
        pytest.param("gmres", "binary32", 2.0**-24, marks=pytest.mark.slow),
    ],
)
def refinement_converges_below_the_limit_and_not_above(method: Any, working: str, u: float) -> None:
    """Carson and Higham, SIAM J. Sci. Comput. 40 (2018), table 5.1: binary16, binary32 or 64, binary64."""
    below, above = (ill(12, condition, 1).astype(np.float32).astype(float) for condition in LIMITS[method])
    b = np.ones(12)

    @jax.vmap
    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        how: Any = {"factor": "binary16", "working": working, "residual": "binary64"}
        return linalg.refine(a, b, method=method, steps=6 if u > 2.0**-50 else 12, inner=12, **how)

    with jax.enable_x64(True):
        iterates = jax.jit(run)(np.stack([below, above]), np.stack([b, b]))
    good, bad = (np.asarray(x) for x in iterates)
    errors = backward_error(below, good, b)
    assert errors[0] > 2.0**-16 and errors[-1] < 2 * u
    assert forward_error(below, good[-1], b) < 2.0**-20
    assert not forward_error(above, bad[-1], b) < 2.0**-14


def forward_error(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    want = np.linalg.solve(a, b)
    return np.abs(x - want).max() / np.abs(want).max()


# -- transforms, randomness, refusals ----------------------------------------------------------------------------------

TEXT = "e5m7:stochastic"
CALLS: dict[str, Callable[..., Any]] = {
    "solve_triangular": partial(linalg.solve_triangular, spec=TEXT),
    "cholesky": lambda a, b, key: linalg.cholesky(a @ a.T + 9 * jnp.eye(3), TEXT, key),
    "qr": lambda a, b, key: linalg.qr(a, TEXT, key),
    "lu": lambda a, b, key: linalg.lu_solve(linalg.lu(a, TEXT, key), b, TEXT, key),
    "cg": lambda a, b, key: linalg.cg(a @ a.T + 9 * jnp.eye(3), b, TEXT, key, tol=0, maxiter=2),
    "gmres": lambda a, b, key: linalg.gmres(a, b, TEXT, key, tol=0, restart=2, maxiter=1),
    "refine": lambda a, b, key: linalg.refine(
        a, b, factor=TEXT, working="e6m9:stochastic", residual="e6m12", key=key, method="gmres", steps=1, inner=1
    ),
}


#: Those whose operations, all stochastic, take long to compile.
LONG = ("qr", "cg", "gmres", "refine")


@further
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CALLS])
def jit_and_vmap_give_the_same_bits(name: str) -> None:
    a = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 3)) + 3 * np.eye(3), jnp.float32)
    b, keys = a[:, 0], jax.random.split(KEY, 3)
    call = CALLS[name]
    program = jax.jit(jax.vmap(lambda a, b, key: call(a, b, key=key)))
    each, again = program(a, b, keys[:2]), program(a, b, keys[1:])
    for got, want in zip(jax.tree.leaves(each), jax.tree.leaves(call(a[1], b[1], key=keys[1])), strict=True):
        np.testing.assert_array_equal(got[1], want)
    assert any(np.any(x[1] != y[1]) for x, y in zip(jax.tree.leaves(each), jax.tree.leaves(again), strict=True))


@further
def every_operation_draws_afresh() -> None:
    """Equal columns are eliminated by equal operations, and come out unlike."""
    a = np.full((12, 12), 1 / 3, np.float32) + np.eye(12, dtype=np.float32)
    factors, _ = linalg.lu(a, "bfloat16:stochastic", KEY)
    assert len(np.unique(factors[1])) > 2


def test_every_turn_of_a_substitution_draws_afresh() -> None:
    threes, ones = np.eye(40, dtype=np.float32) * 3, np.ones(40, np.float32)
    first, second = (linalg.solve_triangular(threes, ones, "e4m2:stochastic", jax.random.key(i)) for i in range(2))
    assert len(np.unique(first)) == 2 and np.any(first != second)


untyped: Any = linalg
A = np.eye(3, dtype=np.float32)
B = np.ones(3, np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not square": (lambda: untyped.lu(A[:2], "e5m2"), ValueError, r"a has shape \(2, 3\); it must be a square matrix"),
    "wide": (lambda: untyped.qr(A[:2], "e5m2"), ValueError, r"must be \(..., m, n\) with m >= n"),
    "x0": (
        lambda: untyped.cg(A, B, "e5m2", x0=B[:2]),
        ValueError,
        r"x0 has shape \(2,\); it must be that of b, \(3,\)",
    ),
    "M": (lambda: untyped.cg(A, B, "e5m2", M=A[:2, :2]), ValueError, r"M has shape \(2, 2\); it must be that of a"),
    "tol": (lambda: untyped.gmres(A, B, "e5m2", tol=-1), ValueError, "tol=-1 must be a finite number >= 0"),
    "b": (lambda: untyped.gmres(A, B[:2], "e5m2"), ValueError, r"b has shape \(2,\); it must be \(3,\)"),
    "scalar": (lambda: untyped.cg(A, 1.0, "e5m2"), ValueError, "b is a scalar"),
    "batches": (
        lambda: untyped.lu_solve((A[None].repeat(2, 0), np.arange(3)), np.ones((3, 3, 1)), "e5m2"),
        ValueError,
        "the leading axes of the operands do not broadcast",
    ),
    "image": (lambda: untyped.cg(lambda v: v[:2], B, "e5m2"), ValueError, r"a gives float32\[2\] for a vector of"),
    "images": (lambda: untyped.cg(A, B, "e5m2", M=lambda v: (v, v)), ValueError, "M gives a tuple of float32.*"),
    "tuple": (
        lambda: untyped.cg(lambda v: (v,), B, "e5m2"),
        ValueError,
        r"a gives a tuple of float32\[3\] for a vector of shape \(3,\); it must give one such vector, of floats",
    ),
    "mapping": (
        lambda: untyped.gmres(A, B, "e5m2", M=lambda v: {"v": v}),
        ValueError,
        r"M gives a dict of float32\[3\]",
    ),
    "nothing": (lambda: untyped.cg(lambda v: None, B, "e5m2"), ValueError, "a gives nothing for a vector"),
    "no tolerance": (lambda: untyped.cg(A, B, "e5m2", tol=None), TypeError, "tol=None must be a finite number"),
    "tolerances": (lambda: untyped.cg(A, B, "e5m2", atol=B), TypeError, "atol=.* must be a finite number"),
    "infinite": (lambda: untyped.cg(A, B, "e5m2", tol=np.float32(np.inf)), ValueError, "must be a finite number >= 0"),
    "maxiter": (
        lambda: untyped.cg(A, B, "e5m2", maxiter=0),
        ValueError,
        "maxiter=0 must be an integer from 1 to 2147483647",
    ),
    "key": (lambda: untyped.lu(A, TEXT), ValueError, "key=None"),
    "dtype": (lambda: untyped.lu(A.astype(complex), "e5m2"), TypeError, "a has dtype complex128"),
    "method": (
        lambda: untyped.refine(A, B, factor="e5m2", working="e5m7", residual="e5m10", method="qr"),
        ValueError,
        "method='qr' must be one of",
    ),
    "residual": (
        lambda: untyped.refine(A, B, factor="e5m2", working="e5m7", residual="binary64"),
        ValueError,
        "binary64.*float64",
    ),
    "gradient": (lambda: untyped.lu(A, "e5m2:gradient=clipped"), ValueError, "has no derivative"),
    "derivative": (
        lambda: jax.grad(lambda a: linalg.cholesky(a, "e5m2").sum())(jnp.eye(3)),
        NotImplementedError,
        "functions of jchop.math.linalg have no derivative",
    ),
}


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", sorted(linalg.__all__, reverse=True))
def test_every_function_is_documented_and_its_example_runs(name: str) -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for other in linalg.__all__:
        text = inspect.getdoc(getattr(linalg, other)) or ""
        assert all(section in text for section in ("Args:", "Returns:", "Raises:", "Example:")), other
    for test in finder.find(getattr(linalg, name), name, globs={}):
        runner.run(test, out=report.append)
    assert runner.tries and runner.summarize(verbose=False).failed == 0, "".join(report)


@further
@pytest.mark.parametrize("name", ["solve_triangular", "cg", "gmres", "operator"])
def a_second_call_compiles_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one with other numbers, tolerances of another kind, or an operator of the same program."""
    text = "e7m6"  # of no other test
    a, b = definite(3, text), some(3, 1, text, 1)[:, 0]

    def compiled(solve: Callable[[], Any]) -> int:
        caplog.clear()
        with jax.log_compiles():
            solve()
        return len([record for record in caplog.records if "Compiling" in record.message])

    def through(matrix: Any) -> Any:
        return linalg.cg(lambda v: matrix @ v + 1, b, text, maxiter=1)

    calls: dict[str, list[Callable[[], Any]]] = {
        "cg": [
            lambda: linalg.cg(a, b, text, maxiter=1),
            lambda: linalg.cg(a + 1, b, text, tol=np.float32(0.1), maxiter=1),
        ],
        "gmres": [
            lambda: linalg.gmres(a, b, text, maxiter=1, restart=2),
            lambda: linalg.gmres(a, b, text, maxiter=1, restart=2, tol=0.5),
        ],
        "solve_triangular": [
            lambda: linalg.solve_triangular(a, b, text),
            lambda: linalg.solve_triangular(a + 1, b, text),
        ],
        "operator": [lambda: through(a), lambda: through(a), lambda: through(2 * a)],
    }
    first, *others = calls[name]
    assert compiled(first) > 0
    assert [compiled(other) for other in others] == [0] * len(others)
    if name == "operator":
        assert compiled(lambda: linalg.cg(lambda v: a @ v + 2, b, text, maxiter=1)) > 0
        assert np.any(through(a)[0] != through(2 * a)[0])


test_further = further.test()
