"""`jc.math.matmul_double` against exact integers: errors by slices, pairs, shapes, specials, transforms, refusals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from refusals import assert_refused

import jchop as jc
from jchop.math._matmul import slice_count

further = Further()

#: Largest errors over sums of |a b| of 2 to 8 slices that were measured with another program on data of this kind.
FIGURES = {2: 2.0e-4, 3: 1.8e-6, 4: 1.3e-8, 5: 9.9e-11, 6: 7.4e-13, 7: 8.0e-15, 8: 9.0e-17}


def tolerance_of(slices: int) -> float:
    return 4.2 * 2.0 ** (-7 * slices)


def matrices(phi: float, n: int = 16, k: int = 256, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers times exp(phi normal), as the papers on the scheme use."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s) * np.exp(phi * rng.standard_normal(s)) for s in ((n, k), (k, n)))  # type: ignore[return-value]


def whole(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Python integers, and the exponent of their unit."""
    least = min(int(np.frexp(v)[1]) for v in np.abs(x[x != 0]).ravel()) - 54
    unit = Fraction(2) ** -least
    return np.array([int(Fraction(float(v)) * unit) for v in x.ravel()], object).reshape(x.shape), least


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The exact product, as fractions."""
    (x, p), (y, q) = whole(a), whole(b)
    return x.dot(y) * (Fraction(2) ** (p + q))


def error(c: Any, wanted: np.ndarray, over: np.ndarray, low: Any = None) -> float:
    """The largest error over `over`."""
    low = np.zeros_like(c) if low is None else low
    rows = zip(np.ravel(c), np.ravel(low), wanted.ravel(), over.ravel(), strict=True)
    return max(abs(float(Fraction(float(v)) + Fraction(float(u)) - w)) / s for v, u, w, s in rows)


@further
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def each_slice_gains_seven_bits(few: bool) -> None:
    """Two, three and eight slices by default, and those between in the slow run."""
    a, b = matrices(0.5)
    wanted, over = exact(a, b), np.abs(a) @ np.abs(b)
    ends = 256 * np.abs(a).max(1)[:, None] * np.abs(b).max(0)
    errors = {}
    for s in (2, 3, 8) if few else FIGURES:
        c = jc.math.matmul_double(a, b, tolerance=tolerance_of(s))
        assert c.dtype == np.float64 and isinstance(c, np.ndarray)
        errors[s] = error(c, wanted, over)
        last = 2.0**-52 * (np.abs(c) + 2.0**-6 * ends)
        assert error(c, wanted, tolerance_of(s) * ends + last) <= 1, "the stated bound"
        assert errors[s] <= 1.2 * FIGURES[s]
    assert all(80 < errors[s] / errors[s + 1] < 240 for s in range(2, 3 if few else 7))
    assert errors[8] <= error(a @ b, wanted, over), "no worse than NumPy's float64 product"


def test_rows_that_span_many_orders_of_magnitude() -> None:
    """The figure of the file for nine slices and phi = 2 is 1.7e-16, and 4.8e-16 for NumPy's product."""
    a, b = matrices(2.0, n=8)
    a *= 2.0 ** np.arange(-40, 40, 10)[:, None]  # rows have scales of their own
    wanted, over = exact(a, b), np.abs(a) @ np.abs(b)
    c = jc.math.matmul_double(a, b, tolerance=tolerance_of(9))
    assert error(c, wanted, over) <= 1.2 * 1.7e-16


def test_pairs_of_float32_numbers() -> None:
    """No float64 is computed, so that devices without it give the same; the error is 2^-46 of the sums or so."""
    a, b = matrices(0.5, n=8)
    pairs = [(x.astype(np.float32), (x - x.astype(np.float32)).astype(np.float32)) for x in (a, b)]
    a, b = (high.astype(float) + low for high, low in pairs)
    function = jax.jit(jc.math.matmul_double)
    high, low = function(*[tuple(map(jnp.asarray, pair)) for pair in pairs])
    assert high.dtype == low.dtype == np.float32 and bool((jnp.abs(low) <= jnp.abs(high) * 2.0**-24).all())
    assert error(high, exact(a, b), np.abs(a) @ np.abs(b), low) < 2.0**-46
    assert "f64" not in str(jax.make_jaxpr(jc.math.matmul_double)(*pairs))
    again = jc.math.matmul_double(*pairs)
    assert isinstance(again[0], np.ndarray)
    np.testing.assert_array_equal(again, (high, low))


SHAPES = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((5, 1, 2, 3), (4, 3, 2)), ((2, 0), (0, 3)), ((0, 3), (3, 2))]


@further
def shapes() -> None:
    """Small integers, whose products are exact."""
    for left, right in SHAPES:
        rng = np.random.default_rng(1)
        a, b = rng.integers(-9, 9, left).astype(float), rng.integers(-9, 9, right).astype(float)
        got = jc.math.matmul_double(a, b, tolerance=tolerance_of(3))
        np.testing.assert_array_equal(got, a @ b, err_msg=f"{left} {right}")


@further
def sums_of_more_products_than_int32_holds() -> None:
    k = 3 << 17
    a, b = np.full((1, k), 1 - 2.0**-8), np.full((k, 1), -(1 - 2.0**-8))
    assert jc.math.matmul_double(a, b, tolerance=tolerance_of(3)).item() == -k * (1 - 2.0**-8) ** 2


def test_specials_are_those_of_a_product() -> None:
    rows = [[np.inf, 1, 0], [-np.inf, 2, np.inf], [np.nan, 0, 1], [1, 2, 3], [0, 0, 0], [1e300, 1e300, 1e300]]
    a = np.array(rows)
    b = np.array([[1, 0, -2, 1, 1e300], [np.inf, 1, 0, 1, 1e300], [3, 2, 1, 1, 1e300]])
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = a @ b
    np.testing.assert_allclose(jc.math.matmul_double(a, b), wanted, rtol=1e-15)
    high, low = jc.math.matmul_double(
        *[(x.astype(np.float32), np.zeros_like(x, np.float32)) for x in (a[:5], b[:, :4])]
    )
    np.testing.assert_array_equal(high.astype(float) + low, wanted[:5, :4])


@further.first
def ends_of_the_range() -> None:
    tiny, large = np.full((1, 4), 2.0**-1000), np.full((4, 1), 1.75 * 2.0**1000)
    assert jc.math.matmul_double(tiny, large).item() == 7.0
    assert jc.math.matmul_double(tiny, tiny.T).item() == 0.0
    assert jc.math.matmul_double(large.T, large).item() == np.inf
    top = np.array([[np.finfo(float).max]])
    assert jc.math.matmul_double(top, np.ones((1, 1))).item() == top.item()


@further
def transforms() -> None:
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        a, b = jnp.asarray(rng.standard_normal((2, 3, 4))), jnp.asarray(rng.standard_normal((4, 2)))
        one_by_one = jnp.stack([jc.math.matmul_double(x, b) for x in a])
        np.testing.assert_array_equal(jax.jit(jax.vmap(jc.math.matmul_double, (0, None)))(a, b), one_by_one)

        def loss(a: jax.Array, b: jax.Array) -> jax.Array:
            return (jc.math.matmul_double(a, b) ** 2).sum()

        wanted = jax.grad(lambda a, b: (jnp.matmul(a, b) ** 2).sum(), (0, 1))(a, b)
        for got in (jax.jit(jax.grad(loss, (0, 1)))(a, b), (jax.jacfwd(loss)(a, b), jax.jacfwd(loss, 1)(a, b))):
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-13)


def test_derivatives_of_pairs_are_those_of_the_high_parts() -> None:
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)

    def total(a: jax.Array, low: jax.Array) -> jax.Array:
        return jc.math.matmul_double((a, low), (b, jnp.zeros_like(b)))[0].sum()

    gradients = jax.grad(total, (0, 1))(a, jnp.zeros_like(a))
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, jnp.broadcast_to(b.sum(1), (2, 3)))


def test_slices_of_a_tolerance() -> None:
    assert [slice_count(t) for t in (2.0**-53, 2e-8, 1.0, tolerance_of(9), float(np.float32(1e-3)))] == [8, 4, 1, 9, 2]


F64 = np.ones((2, 2))
F32 = F64.astype(np.float32)
REFUSED = [
    (lambda: jc.math.matmul_double(F64, F64, tolerance=1e-20), ValueError, "tolerance=1e-20 must be a finite"),
    (lambda: jc.math.matmul_double(F64, F64, tolerance=2), ValueError, "tolerance=2 must be a finite"),
    (lambda: jc.math.matmul_double(F64, F64, tolerance=float("nan")), ValueError, "tolerance=nan must be a finite"),
    (lambda: jc.math.matmul_double(F64, F64, tolerance="small"), TypeError, "tolerance='small' must be"),  # type: ignore[arg-type]
    (lambda: jc.math.matmul_double(F32, F32), TypeError, r"dtype float32 and must be float64 .* or pairs"),
    (lambda: jc.math.matmul_double(F64, (F32, F32)), TypeError, "a and b must be of one kind"),
    (lambda: jc.math.matmul_double((F64 / 3, F64), (F32, F32)), TypeError, "a has a part of dtype float64"),
    (lambda: jc.math.matmul_double((F32, F32[0]), (F32, F32)), ValueError, r"a has parts of the shapes \(2, 2\) and"),
    (lambda: jc.math.matmul_double((F32,), (F32, F32)), TypeError, "a has 1 parts; a pair"),
    (lambda: jc.math.matmul_double(F64, np.ones((3, 2))), ValueError, "must be of one length"),
    (lambda: jc.math.matmul_double(1.0, F64), ValueError, "a is a scalar"),
]


def test_what_is_refused() -> None:
    assert_refused({text: (call, kind, text) for call, kind, text in REFUSED})


test_further = further.test()
