"""Constants of emulated programs: counts are not rounded, limits of the carrier become limits of the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each_case import each
from jax import lax

import jchop as jc

MANY = np.full(70_000, 1e-3, np.float32)
SOME = np.full((3, 300), 0.125, np.float32)  # 300 is no number of e4m3fn


def halves(x: Any) -> np.ndarray:
    """Numbers of float64 rounded to binary16."""
    return np.asarray(x, np.float64).astype(np.float16).astype(np.float64)


# -- counts ------------------------------------------------------------------------------------------------------------

#: Means of 70 000 numbers, which binary16 does not hold.
MEANS = {
    "mean": jnp.mean,
    "sum / size": lambda x: x.sum() / x.size,
    "sum times the inverse": lambda x: x.sum() * (1 / x.size),
    "several axes": lambda x: jnp.mean(x.reshape(7, 100, 100), axis=(0, 1, 2)),
    "where": lambda x: jnp.mean(x, where=x > 0),
    "nanmean": jnp.nanmean,
    "sum of a mask": lambda x: x.sum() / jnp.maximum((x > 0).sum(), 1),
    "a call of its own": lambda x: jax.jit(lambda s, n: s / n)(x.sum(), 70_000.0),
    "a product with ones": lambda x: x @ jnp.ones_like(x) / x.size,
}


@each("name", MEANS)
def test_the_count_of_a_mean_is_not_rounded(name: str) -> None:
    """The sum is rounded once, then the exact quotient by the count."""
    want = halves(halves(70_000 * halves(1e-3)) / 70_000)
    assert jc.emulate(MEANS[name], "binary16")(MANY) == want


def test_means_of_batches_and_loops_keep_the_count() -> None:
    """Also under vmap, in a scan, and of windows."""
    low = jc.emulate(jnp.mean, "e4m3fn")
    turns = jc.emulate(lambda x: lax.scan(lambda c, row: (c, jnp.mean(row)), 0.0, x)[1], "e4m3fn")
    for got in (jax.vmap(low)(SOME), turns(SOME)):  # the sum is 36, and 36 / 300 rounds to this
        np.testing.assert_array_equal(got, [0.1171875] * 3)


def test_average_pooling_keeps_the_count() -> None:
    """49 is no number of e4m3fn, nor are the counts of a window at an edge."""
    pool = lambda x: lax.reduce_window(x, 0.0, lax.add, (7, 7), (1, 1), "SAME")  # noqa: E731
    x = jnp.full((8, 8), 0.25)
    np.testing.assert_array_equal(jc.emulate(lambda x: pool(x)[3:5, 3:5] / 49, "e4m3fn")(x), np.full((2, 2), 0.25))
    low = np.asarray(jc.emulate(lambda x: pool(x) / pool(jnp.ones_like(x)), "e4m3fn")(x))
    sums, counts = np.asarray(pool(x)), np.asarray(pool(jnp.ones_like(x)))
    want = (sums.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / counts).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(low, want.astype(np.float32))


def test_variances_keep_the_count() -> None:
    """Less its degrees of freedom."""
    x = jnp.linspace(-0.5, 0.5, 1000)
    for low, n in ((jnp.var, 1000), (lambda x: jnp.var(x, ddof=1), 999), (lambda x: (x * x).sum() / 999, 999)):
        got = float(jc.emulate(low, "e4m3fn:saturate")(x))
        assert abs(got - 80 / n) <= 2.0**-8, low  # 83.5, the sum of squares, is 80 in e4m3fn


@pytest.mark.parametrize("of", [jnp.mean, pytest.param(jnp.var, marks=pytest.mark.slow)])
def test_derivatives_keep_the_count(of: Callable[..., Any]) -> None:
    """A cotangent is divided before it is copied to each term."""
    x = jnp.linspace(-1.0, 1.0, 70_000)
    low, own = jc.emulate(jax.grad(of), "binary16")(x), jax.grad(of)(x)
    assert float(jnp.abs(low - own).max()) <= 2.0**-23
    assert float(jnp.abs(low).max()) > 0


def test_a_fraction_of_a_mask_is_rounded_once() -> None:
    """A sum of booleans is a count, too."""
    assert float(jc.emulate(lambda x: jnp.mean(x > 0), "binary16")(MANY)) == 1.0
    assert float(jc.emulate(lambda x: jnp.mean(x > 0), "bfloat16")(jnp.ones(257).at[0].set(-1.0))) == 0.99609375


def test_a_divisor_that_is_no_count_is_rounded() -> None:
    """As any constant; a count that the program also uses as a number is one."""
    assert float(jc.emulate(lambda x: x / 1e6, "binary16")(1e3)) == 0.0
    assert float(jc.emulate(lambda x: x.sum() / 300.0, "e4m3fn")(jnp.full(100, 3.0))) == 1.0  # 288 / 288
    total = lambda x: (x > 0).astype(jnp.float32).sum()  # noqa: E731
    assert float(jc.emulate(total, "binary16")(MANY)) == np.inf


# -- limits ------------------------------------------------------------------------------------------------------------

MASK = np.array([[True, False], [False, False]])
#: Masks of numbers at the carrier's end.
MASKS = {
    "finfo.min": lambda s: jnp.where(MASK, s, jnp.finfo(s.dtype).min),
    "0.7 finfo.min": lambda s: jnp.where(MASK, s, -0.7 * float(jnp.finfo(s.dtype).max)),
    "full": lambda s: lax.select(MASK, s, jnp.full_like(s, jnp.finfo(s.dtype).min)),
    "a product": lambda s: s + (1 - MASK) * jnp.finfo(s.dtype).min,
    "an array": lambda s: s + np.where(MASK, 0, np.finfo(np.float32).min).astype(np.float32),
}


@each("mask", MASKS)
@pytest.mark.parametrize("spec", ["binary16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_row_without_entries_is_finite(mask: str, spec: str) -> None:
    """As in the dtype of the format, whose own finfo the program would read."""
    low = jc.emulate(lambda s: jax.nn.softmax(MASKS[mask](s), -1), spec)
    np.testing.assert_array_equal(low(jnp.zeros((2, 2))), [[1.0, 0.0], [0.5, 0.5]])


def test_attention_with_a_row_without_entries_is_that_of_float16() -> None:
    """The mask of `jax.nn.dot_product_attention` is 0.7 times the carrier's lowest number."""
    q = jax.random.normal(jax.random.key(0), (1, 2, 1, 4))
    attend = lambda q: jax.nn.dot_product_attention(q, q, q, mask=MASK[None, None])  # noqa: E731
    low = jc.emulate(attend, "binary16")(q)
    np.testing.assert_allclose(low, attend(q.astype(jnp.float16)), atol=2e-3)


#: A constant of float32, a format, and the constant there.
LIMITS = [
    (np.finfo(np.float32).max, "binary16", 65504.0),
    (np.finfo(np.float32).min, "binary16", -65504.0),
    (np.finfo(np.float32).min, "bfloat16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)),
    (np.finfo(np.float32).min, "e4m3fn", -448.0),
    (np.finfo(np.float32).min, "e4m3fn:saturate", -448.0),
    (np.finfo(np.float32).max / 2, "binary16", 32752.0),
    (np.finfo(np.float32).min, "fixed4.4", -8.0),
    (np.finfo(np.float32).tiny, "binary16", 2.0**-14),
    (np.finfo(np.float32).tiny, "bfloat16", 2.0**-126),
    (np.finfo(np.float32).smallest_subnormal, "e4m3fn", 2.0**-9),
    (-1e30, "binary16", -np.inf),  # numbers like others
    (1e-30, "binary16", 0.0),
    (np.finfo(np.float32).eps, "e4m3fn", 0.0),
]


@each("value, spec, want", LIMITS)
def test_constants_at_limits_of_the_carrier_are_at_those_of_the_format(value: Any, spec: str, want: float) -> None:
    """Only the numbers that a program reads from finfo; eps is no limit."""
    assert float(jc.emulate(lambda x: (x, float(value) + jnp.zeros(()))[1], spec)(1.0)) == want
    assert float(jc.emulate(lambda x: jnp.where(x > 0, np.float32(value), x), spec)(1.0)) == want


def test_nan_to_num_gives_the_ends_of_the_format() -> None:
    """Which are finite there."""
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])
    np.testing.assert_array_equal(jc.emulate(jnp.nan_to_num, "binary16")(x), [65504.0, -65504.0, 0.0, 1.0])


def test_an_argument_at_a_limit_is_a_number() -> None:
    """Data are rounded as they are."""
    assert float(jc.emulate(lambda x: x, "binary16")(jnp.finfo(jnp.float32).min)) == -np.inf


# -- reports -----------------------------------------------------------------------------------------------------------

#: Programs with a constant that binary16 does not hold, as a number of the program and as an array.
LOST = {
    "quotient": (lambda x: x / 1e6, "overflows"),
    "product": (lambda x: x * 1e-9, "underflows"),
    "choice": (lambda x: jnp.where(x > 0, 1e6, x), "overflows"),
    "comparison": (lambda x: x + (x > 1e6), "overflows"),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: c / 1e6, x), "overflows"),
}


@each("name", LOST)
def test_reports_count_constants_that_are_lost(name: str) -> None:
    """Once each, in a row of the line that has them."""
    program, field = LOST[name]
    report = jc.emulate(program, "binary16").report(jnp.ones(1), trace_values=True)
    (row,) = [row for row in report.rows if row.primitive == "constant"]
    assert (getattr(row, field), row.equations, row.results) == (1, 1, 1)
    assert row.place.startswith("test_constants.py:")


@each("name", [name for name, (_, field) in LOST.items() if field == "overflows"])
def test_stop_at_sees_constants_that_overflow(name: str) -> None:
    """The error names the constant and its line."""
    with pytest.raises(FloatingPointError, match=r"first overflow: constant, .*1e.06.*, is inf.*constants.py"):
        jc.emulate(LOST[name][0], "binary16", stop_at="overflow")(jnp.ones(1))


def part(found: Any, name: str) -> float:
    return sum(row.contribution for row in found.rows if row.primitive == name)


def test_blame_names_constants_that_vanish() -> None:
    """As it names arrays: the constant makes the error, not the product."""
    array = jnp.array([1e-9])
    for times in (lambda x: x * 1e-9, lambda x: x * array):
        found = jc.emulate(times, "binary16").blame(jnp.array([1e3]))
        assert part(found, "constant") == pytest.approx(-1e-6, rel=1e-5)
        assert part(found, "mul") == pytest.approx(0, abs=1e-12)


def test_blame_refuses_a_constant_that_overflows() -> None:
    """Its error is infinite, so that there are no parts; the message has its line."""
    with pytest.raises(ValueError, match=r"the result of constant \(.*test_constants.py:\d+\) is not finite"):
        jc.emulate(lambda x: x / 1e6, "binary16").blame(jnp.array([1e3]))


def test_a_constant_that_is_held_or_rounded_has_no_row() -> None:
    """Its rounding belongs to the operation."""
    keeps: Callable[..., Any] = lambda x: x * 0.1 + 2.0  # noqa: E731
    found = jc.emulate(keeps, "binary16").blame(jnp.array([3.0]))
    report = jc.emulate(keeps, "binary16").report(jnp.array([3.0]), trace_values=True)
    assert "constant" not in {row.primitive for row in (*found.rows, *report.rows)}
