"""`jc.emulate`: factorizations and triangular systems, and complex numbers by their parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from jchop.math import linalg

further = Further()

KEY = jax.random.key(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def matrix(n: int, seed: int = 0) -> np.ndarray:
    """Well conditioned, of values of bfloat16."""
    a = np.random.default_rng(seed).normal(size=(n, n)) + 3 * np.eye(n)
    return a.astype(BF16).astype(np.float32)


# -- linear algebra ----------------------------------------------------------------------------------------------------


def test_matrices_of_size_zero() -> None:
    """As without emulation."""

    def fun(one: Any, none: Any, rows: Any, batch: Any, matrices: Any, empty: Any, tall: Any) -> Any:
        solve = jnp.linalg.solve
        return [
            solve(one, none),
            solve(rows, batch),
            jnp.linalg.inv(matrices),
            jnp.linalg.det(empty),
            jnp.linalg.cholesky(empty),
            jnp.linalg.qr(tall),
        ]

    shapes = [(2, 0), (3, 0, 0), (3, 0, 2), (0, 3, 3), (0, 0), (3, 0)]
    args = [np.eye(2, dtype=np.float32), *(np.zeros(shape, np.float32) for shape in shapes)]
    got, want = (jax.tree.leaves(f(*args)) for f in (jc.emulate(fun, "e5m2"), fun))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def substituted(a: np.ndarray, b: np.ndarray, lower: bool, unit: bool) -> np.ndarray:
    """a x = b by columns, one operation of ml_dtypes after the other."""
    a, x = a.astype(BF16), b.astype(BF16).copy()
    order = range(len(x)) if lower else reversed(range(len(x)))
    for j in order:
        if not unit:
            x[j] = x[j] / a[j, j]
        for i in range(j + 1, len(x)) if lower else range(j):
            x[i] = x[i] - a[i, j] * x[j]
    return x.astype(np.float32)


def triangular_systems_of_every_form() -> None:
    """Which side, which triangle, transposed or not, with a diagonal of ones or not; two right-hand sides."""
    a, b = matrix(4), matrix(4, 1)[:, :2]
    forms = list(itertools.product((True, False), repeat=4))

    def solve(a: jax.Array, b: jax.Array) -> list[jax.Array]:
        return [
            lax.linalg.triangular_solve(
                a, b if left else b.T, left_side=left, lower=lower, transpose_a=transposed, unit_diagonal=unit
            )
            for left, lower, transposed, unit in forms
        ]

    got = jax.jit(jc.emulate(solve, "bfloat16"))(a, b)
    for (left, lower, transposed, unit), x in zip(forms, got, strict=True):
        op = a.T if transposed == left else a
        columns = [substituted(op, column, lower != (transposed == left), unit) for column in b.T]
        np.testing.assert_array_equal(x if left else x.T, np.stack(columns, 1), str((left, lower, transposed, unit)))


def factorizations_are_those_of_the_library() -> None:
    spec = "e5m10:up"
    a = matrix(4)
    symmetric = np.asarray(jc.round_to_format(a + a.T + 8 * np.eye(4, dtype=np.float32), spec))

    def factors(a: jax.Array, symmetric: jax.Array) -> Any:
        root = lax.linalg.cholesky(symmetric, symmetrize_input=False)
        return lax.linalg.lu(a), jnp.linalg.qr(a[:, :3]), root

    (packed, pivots, order), (q, r), root = jax.jit(jc.emulate(factors, spec))(a, symmetric)
    want, p = linalg.lu(a, spec)
    np.testing.assert_array_equal(packed, want)
    np.testing.assert_array_equal(order, p)
    np.testing.assert_array_equal(lax.linalg.lu_pivots_to_permutation(pivots, 4), p)
    whole_q, whole_r = linalg.qr(a[:, :3], spec)
    np.testing.assert_array_equal(q, whole_q[:, :3])
    np.testing.assert_array_equal(r, whole_r[:3])
    np.testing.assert_array_equal(root, linalg.cholesky(symmetric, spec))


@further
def one_matrix_costs_the_algorithm_of_the_library(caplog: pytest.LogCaptureFixture) -> None:
    """No batch of one, under which both sides of a branch on values would run; no trace in a second call."""
    low = jc.emulate(jnp.linalg.cholesky, "bfloat16")
    whole = jnp.eye(64) + 0.1
    emulated, own = (
        jax.jit(fun).lower(whole).as_text().count("\n") for fun in (low, lambda a: linalg.cholesky(a, "bfloat16"))
    )
    assert emulated < 1.6 * own
    root = low(whole)
    with jax.log_compiles():
        caplog.clear()
        np.testing.assert_array_equal(low(whole), root)
    assert not [record for record in caplog.records if "tracing" in record.message and "flat" not in record.message]
    np.testing.assert_array_equal(root, linalg.cholesky(whole, "bfloat16"))


def solvers_of_other_packages() -> None:
    a, b = matrix(4), np.ones(4, np.float32)
    solved = jax.jit(jc.emulate(lambda a, b: (jnp.linalg.solve(a, b), jnp.linalg.inv(a)), "e5m10"))(a, b)
    np.testing.assert_array_equal(solved[0], linalg.lu_solve(linalg.lu(a, "e5m10"), b, "e5m10"))
    np.testing.assert_allclose(solved[1] @ a, np.eye(4), atol=0.1)
    exact = jc.emulate(jnp.linalg.solve, None)(a, b)
    np.testing.assert_array_equal(exact, jnp.linalg.solve(a, b))


def matrices_of_a_batch_draw_apart() -> None:
    batch = np.stack([matrix(3)] * 4).reshape(2, 2, 3, 3)
    low = jax.jit(jc.emulate(jnp.linalg.inv, "e5m10:stochastic", key=KEY))
    out = np.asarray(low(batch)).reshape(4, 9)
    assert len(np.unique(out, axis=0)) == 4
    np.testing.assert_array_equal(out, np.asarray(low(batch)).reshape(4, 9))
    np.testing.assert_allclose(out, np.tile(np.linalg.inv(batch[0, 0]).ravel(), (4, 1)), atol=0.01)


def the_derivative_of_a_solution_is_the_carriers() -> None:
    a, b = matrix(3), np.ones(3, np.float32)
    fun = lambda a: jnp.linalg.solve(a, b).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(jc.emulate(fun, "e8m15"))(a), jax.grad(fun)(a), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fun", "shape"),
    [
        ("qr", lambda a: lax.linalg.qr(a, full_matrices=False), (3, 4)),
        ("lu", lax.linalg.lu, (4, 3)),
        ("eigh", lambda a: lax.linalg.eigh(a, symmetrize_input=False), (3, 3)),
        ("svd", lax.linalg.svd, (3, 3)),
        ("eig", lax.linalg.eig, (3, 3)),
        ("tridiagonal", lambda a: lax.linalg.tridiagonal(a), (4, 4)),
    ],
)
@pytest.mark.in_turn(6)
def test_what_has_no_algorithm_is_the_carriers(name: str, fun: Callable[..., Any], shape: tuple[int, int]) -> None:
    """Of the rounded matrix, each result rounded once; or left in the carrier, if a rule says so."""
    a = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    a = a + a.T if shape[0] == shape[1] else a
    for spec, rules in (("bfloat16", {}), ("bfloat16", {name: None})):
        r = (lambda x: x) if rules else rounded_parts
        want = jax.tree.map(r, fun(jc.round_to_format(a, spec)))
        jax.tree.map(np.testing.assert_array_equal, jc.emulate(fun, spec, rules=rules)(a), want)
    (row,) = jc.emulate(fun, "bfloat16").report(a).rows
    assert (row.primitive, row.spec) == (name, "bfloat16")


def rounded_parts(x: Any) -> Any:
    """Each part of a number in bfloat16."""
    if jnp.iscomplexobj(x):
        return lax.complex(*(jc.round_to_format(part, "bfloat16") for part in (lax.real(x), lax.imag(x))))
    return jc.round_to_format(x, "bfloat16") if jnp.issubdtype(x.dtype, jnp.floating) else x


def test_the_pivots_of_a_factorization_are_the_rows_that_are_exchanged() -> None:
    """By hand; every result is of the format."""
    a = np.array([[1, 2, 4], [4, 4, 8], [2, 6, 2]], np.float32)
    packed, pivots, order = jc.emulate(lax.linalg.lu, "bfloat16")(a)
    np.testing.assert_array_equal(packed, [[4, 4, 8], [0.5, 4, -2], [0.25, 0.25, 2.5]])
    assert (pivots.tolist(), order.tolist()) == ([1, 2, 2], [1, 2, 0])


# -- complex numbers ---------------------------------------------------------------------------------------------------


def of_ml_dtypes(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.real(z).astype(BF16), np.imag(z).astype(BF16)


@further.first
def complex_numbers_are_pairs_of_real_ones(rng: np.random.Generator) -> None:
    z, w = rng.normal(size=(2, 50, 2)).astype(np.float32).view(np.complex64)[..., 0]

    def fun(z: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [z + w, z - w, z * w, jnp.square(z), -z, jnp.conj(z), z.real, z.imag + 1.0, jnp.stack([z, w])[0] * 0.5]

    got = jax.jit(jc.emulate(fun, "bfloat16"))(z, w)
    (a, b), (c, d) = of_ml_dtypes(z), of_ml_dtypes(w)
    want = [
        (a + c, b + d), (a - c, b - d), (a * c - b * d, a * d + b * c), (a * a - b * b, a * b + b * a), (-a, -b),
        (a, -b), (a, 0 * a), (b + BF16.type(1), 0 * b), (a * BF16.type(0.5), b * BF16.type(0.5)),
    ]  # fmt: skip
    for i, (value, (real, imag)) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(np.real(value), real.astype(np.float32), str(i))
        np.testing.assert_array_equal(np.imag(value), imag.astype(np.float32), str(i))


@further
def complex_numbers_draw_and_differentiate() -> None:
    z = jnp.asarray([0.1 + 0.2j, 1.7 - 0.3j], jnp.complex64)
    low = jc.emulate(lambda z: z * z, "bfloat16:stochastic", key=KEY)
    many = np.asarray(jax.jit(jax.vmap(lambda key: low(z, key=key)))(jax.random.split(KEY, 500)))
    assert len(np.unique(many[:, 0])) > 3
    np.testing.assert_allclose(many.mean(0), z * z, atol=2e-3)
    fun = lambda x: jnp.real((x + 1j) * (x - 2j))  # noqa: E731
    assert float(jax.grad(jc.emulate(fun, "bfloat16"))(1.5)) == 3.0


@further
def other_complex_operations_are_the_carriers_by_parts(rng: np.random.Generator) -> None:
    z, w = rng.normal(size=(2, 8, 2)).astype(np.float32).view(np.complex64)[..., 0]
    fun = lambda z, w: [z / w, jnp.abs(z), lax.exp(z), lax.sqrt(z), lax.fft(z, "FFT", (8,)), lax.pow(z, w), z, 0.1j]  # noqa: E731
    z_low, w_low = rounded_parts(z), rounded_parts(w)
    want = [rounded_parts(jnp.asarray(x)) for x in fun(z_low, w_low)]
    got = jc.emulate(fun, "bfloat16")(z, w)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(jc.emulate(jnp.fft.fft, "bfloat16", rules={"fft": None})(z_low), jnp.fft.fft(z_low))
    real = jc.emulate(lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), "e8m15")(z.real)
    np.testing.assert_allclose(real, z.real, atol=1e-3)
    np.testing.assert_array_equal(jc.emulate(lambda z: z == 0.1j, "bfloat16")(jnp.array([0.1j, 0.2j])), [True, False])
    drawn = jc.emulate(lambda z: z, "bfloat16:stochastic", key=KEY)(jnp.full(50, 0.1 + 0.1j))
    assert not np.array_equal(drawn.real, drawn.imag)


@pytest.mark.parametrize(
    "spec", ["binary16", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("bfloat16", "e5m2:up"))]
)
def test_complex_programs_are_lowered_to_few_lines(spec: str) -> None:
    """Equal operations are one function, which is called: at most 12 lines for one of the program."""

    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        for i in range(20):
            x = x * y - (y if i % 2 else x)
        return x

    x = jnp.ones(8, jnp.complex64)
    low = jc.emulate(fun, spec, key=KEY)
    lines, plain = (jax.jit(f).lower(x, x).as_text().count("\n") for f in (low, fun))
    assert lines <= 12 * plain


@pytest.mark.parametrize("how", ["operations", pytest.param("roundings", marks=pytest.mark.slow)])
def test_complex_numbers_that_draw_add_few_lines(how: str) -> None:
    """An operation, or the rounding of a carrier's result, takes one number of its draws and one call."""

    def lines_of(turns: int, low: bool) -> int:
        def fun(x: jax.Array, y: jax.Array) -> jax.Array:
            for _ in range(turns):
                x = x * y - x if how == "operations" else jnp.exp(x) / y
            return x

        x = jnp.ones(8, jnp.complex64)
        run = jc.emulate(fun, "binary16:stochastic", key=KEY) if low else fun
        return jax.jit(run).lower(x, x).as_text().count("\n")

    added, plain = (lines_of(7, low) - lines_of(3, low) for low in (True, False))
    assert added <= 5 * plain


@pytest.mark.smoke
def test_sums_of_complex_numbers_are_sums_of_their_parts() -> None:
    """In the order of the accumulator; of products four sums of products."""
    how = jc.MatmulSpec(accumulate="e5m2")
    ones = jnp.full(100, 1 + 1j)
    total, dot, running = jc.emulate(lambda z: (jnp.sum(z), z @ z, jnp.cumsum(z)), "e5m2", accumulate=how)(ones)
    assert (complex(total), complex(dot), complex(running[-1])) == (8 + 8j, 16j, 8 + 8j)
    assert complex(jc.emulate(jnp.sum, "e5m2")(ones)) == 96 + 96j
    with pytest.raises(NotImplementedError, match=r"'reduce_prod'.*rules="):
        jc.emulate(jnp.prod, "e5m2", accumulate=how)(ones)


def test_real_and_imaginary_parts_of_a_product_draw_apart() -> None:
    """Both are 1 + 1/16: each is a difference or a sum of two numbers of the format, rounded to 1 or to 1.25."""
    x, y = jnp.tile(jnp.array([1, -0.0625j]), (64, 1)), jnp.array([1 + 1j, -1 + 1j])
    how = jc.MatmulSpec(accumulate="binary32")
    z = jax.jit(jc.emulate(jnp.matmul, "e5m2:stochastic", accumulate=how, key=KEY))(x, y)
    real, imaginary = np.real(z), np.imag(z)
    assert {*real.tolist()} == {*imaginary.tolist()} == {1, 1.25}
    assert 0 < np.sum(real == imaginary) < 64


@pytest.mark.parametrize(
    "check",
    [
        solvers_of_other_packages,
        *(
            pytest.param(check, marks=pytest.mark.slow)
            for check in (
                triangular_systems_of_every_form,
                factorizations_are_those_of_the_library,
                matrices_of_a_batch_draw_apart,
                the_derivative_of_a_solution_is_the_carriers,
            )
        ),
    ],
)
def test_linear_algebra(check: Callable[[], None]) -> None:
    check()


test_further = further.test()
